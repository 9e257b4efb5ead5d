"""Tables on one aspect of a run each: servers, slots, answers, failures, events, settings, findings; and whole rows."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from IPython.display import HTML

from dfexp.diagnose import Finding, Planned, diagnose
from dfexp.export.rows import split
from dfexp.report.data import RunData, counted, flags_of
from dfexp.report.overview import off_plan
from dfexp.report.series import medians, occupied, server_rates, steady
from dfexp.tables import FONT, Table, duration, text

_SHOWN = 20  # of lines that were dropped


def of_frame(name: str, title: str, frame: pd.DataFrame, note: str = "") -> Table:
    """A frame as a table; its index is the first column."""
    rows: Any = frame.reset_index().astype(object).to_dict("records")
    return Table(name=name, title=title, rows=rows, note=note)


def per_server(data: RunData) -> Table:
    """What each server made, and what it said of itself."""
    found, made = steady(data), data.rows.groupby(data.rows["server"].astype(str))
    tokens, down = made["completion_tokens"], [one["server"] for one in data.events if one["event"] == "server_down"]
    frame = pd.DataFrame({"rows": made.size(), "mean tokens": tokens.mean()})
    frame["median latency (s)"] = made["latency_s"].median()
    frame["client tokens/s"] = tokens.agg(counted) / data.busy_s
    frame = frame.reindex(pd.Index([each.name for each in data.watched], name="server"))
    frame["decoded tokens/s"] = server_rates(data, found)
    frame["cap"] = [each.limits.max_running_requests for each in data.watched]
    frame = frame.join(medians(data, found)).assign(outages=[*map(down.count, frame.index)])
    frame = frame[frame["rows"].notna() | frame.index.isin([each.name for each in data.starts[0]])]
    note = f"Client: finished rows over the busy time. Decoded, by its counter, and medians of gauges: {found.words}."
    return of_frame("per_server", "Per server", frame, note)


def slots(data: RunData) -> Table:
    """How much of what the servers could decode at once was used, and what idle slots cost."""
    frame, (units, unit) = occupied(data).set_index("part"), data.units
    frame[f"idle {unit}-hours"] = units * frame["seconds"] * (1 - frame["occupied"]) / 3600
    note = "In flight, over what servers decode at once (over the most in flight where none says it). The middle: from"
    note += " the first to the last moment with nine tenths of the most in flight; the end is the tail."
    note += "" if data.is_settled else " Not all requests are known: there is no end yet."
    return of_frame("slots", "Start, middle and tail", frame, note)


def finish_reasons(data: RunData) -> Table:
    """How answers ended."""
    ended = data.rows.groupby(data.rows["finish_reason"].fillna("not said").rename("finish reason"))
    means = {"mean tokens": ended["completion_tokens"].mean(), "median latency (s)": ended["latency_s"].median()}
    frame = pd.DataFrame({"rows": ended.size(), "share": ended.size() / max(1, len(data.rows)), **means})
    return of_frame("finish_reasons", "Finish reasons", frame, "length: cut by max_tokens or by the context")


def findings(data: RunData, model: Planned | None) -> Table:
    """What limits the servers and what is wrong, over the whole run, by severity."""
    left = (data.status or {}).get("pending", data.missing) if data.is_going else None
    found = [*off_plan(data, model), *diagnose(data.starts[0], rows_left=left, planned=model)]
    alike = [[each for each in found if (each.kind, each.is_binding) == about]
             for about in dict.fromkeys((each.kind, each.is_binding) for each in found)]  # fmt: skip
    lines = [
        {"finding": kin[0].kind, "of": _of(kin), "severity": kin[0].severity, "evidence": kin[0].evidence,
         "gain": kin[0].gain, "change": kin[0].change or "-", "binding": "yes" if kin[0].is_binding else "no"}
        for kin in alike
    ]  # fmt: skip
    told = pd.Series([one.get("kind") for one in data.events if one["event"] == "finding"], dtype=object)
    note = "Over the whole run; gain: factor on tokens/s."
    note += "" if len(data.samples) else " Without samples of servers in metrics.jsonl little can be said."
    counts = ", ".join(f"{kind} {count}" for kind, count in told.value_counts().items())
    note += f" Told while it ran: {counts}." if counts else ""
    return Table(name="findings", title="What limits it, and what is wrong", rows=lines, note=note)


def _of(kin: Sequence[Finding]) -> str:
    names = [each.server for each in kin]
    return "the fleet" if None in names else f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}"


def failures(data: RunData) -> Table:
    """Rows that will not succeed, by kind."""
    found = pd.DataFrame(list(data.failures), columns=["kind", "index", "message"]).sort_values("index").groupby("kind")
    frame = pd.DataFrame({"rows": found.size(), "index": found["index"].agg(_first_ten),
                          "the server said, the first time": found["message"].first().str[:500]})  # fmt: skip
    note = "Each is in failures.jsonl. They stay failed on resume; dfexp resume RUN --retry-failed sends them again."
    return of_frame("failures", "Failed rows, by kind", frame, note if len(frame) else "")


def _first_ten(numbers: pd.Series) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")


def dropped(data: RunData) -> Table:
    """Lines of the sources that gave no prompt."""
    told: Mapping[str, Any] = data.run["prompts"]
    rows, counts = told.get("dropped", ()), told.get("dropped_by_reason", {})
    kinds = ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
    note = f"{sum(counts.values()):,} in all: {kinds}. The first {_SHOWN} that were noted at most." if kinds else ""
    return Table(name="dropped", title="Dropped while reading the prompts", rows=rows[:_SHOWN], note=note)


def events(data: RunData) -> Table:
    """What happened, counted."""
    found = pd.DataFrame(list(data.events), columns=["event", "server", "at"]).fillna({"server": "-"})
    found["at"] = found["at"] if data.is_virtual else data.stamps
    found["said, the last time"] = [*map(said, data.events)]
    kin = found.groupby(["event", "server"], sort=False)
    frame = pd.DataFrame({"times": kin.size(), "first": kin["at"].min(), "last": kin["at"].max()})
    for column in ("first", "last"):
        stamps = pd.to_datetime(frame[column], unit="s").dt.strftime("%Y-%m-%d %H:%M:%S")
        frame[column] = (frame[column] - data.began).map(duration) if data.is_virtual else stamps
    frame["said, the last time"] = kin["said, the last time"].last()
    note = "From events.jsonl; times are " + ("simulated, since the first request." if data.is_virtual else "UTC.")
    return of_frame("events", "What happened", frame, note)


def said(event: Mapping[str, Any]) -> str:
    """The details of an event."""
    words = _pairs({key: value for key, value in event.items() if key not in ("at", "event", "server")})
    return f"{words[:300]}{'...' * (len(words) > 300)}" or "-"


def configurations(data: RunData) -> Table:
    """With what the rows were made: one line per engine configuration."""
    lines = [
        {"config": config_id, "rows": int((data.rows["config_id"] == config_id).sum()),
         "made with": _pairs({key: config.get(key) for key in ("engine", "engine_version", "model")}),
         "speculative decoding": flags_of(config.get("fleet") or {}).get("speculative_algorithm") or "off",
         "sampling": _pairs(config.get("sampling")), "fleet": _pairs({**(config.get("fleet") or {}), "plan": None})}
        for config_id, config in data.run.get("configs", {}).items()
    ]  # fmt: skip
    note = f"Versions: {_pairs(data.run.get('versions'))}."
    return Table(name="configurations", title="Configurations", rows=lines, note=note)


def _pairs(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {value}" for key, value in (values or {}).items() if value not in (None, {}, []))


def examples(data: RunData) -> HTML:
    """The drawn rows to read: prompt, thought, answer, and how the answer ended. Everything is escaped."""
    took, unit = data.rows.set_index("index")["latency_s"], f"{'simulated ' * data.is_virtual}s"
    page = "".join(_example({**row, "latency_s": took[row["index"]]}, unit) for row in data.examples) or "none yet"
    return HTML(f'<div style="{FONT};max-width:960px">{page}</div>')


def _example(row: Mapping[str, Any], unit: str = "s") -> str:
    thought, answer = split_thought(row["text"])
    said = [(message["role"], message.get("content")) for message in row["messages"]]
    said += [("thought", thought), ("answer", answer)] if thought else [("answer", answer)]
    tokens = f"{text(row['prompt_tokens'])} + {text(row['completion_tokens'])} tokens"
    ended = {"stop": "ended by itself", "length": "cut for length"}.get(row["finish_reason"], str(row["finish_reason"]))
    facts = " · ".join((tokens, ended, f"{row['latency_s']:.1f} {unit}", row["server"], *row["flags"]))
    return (
        "<div style='border:1px solid rgba(128,128,128,.35);border-radius:6px;margin:0 0 12px;padding:8px 12px'>"
        "<div style='display:flex;flex-wrap:wrap;justify-content:space-between;gap:12px;margin-bottom:4px'>"
        f"<span><b>{html.escape(str(row['id']))}</b> <span style='opacity:.7'>index {row['index']}</span></span>"
        f"<span style='opacity:.7'>{html.escape(facts)}</span></div>"
        f"{''.join(_said(role, words) for role, words in said)}</div>"
    )


def _said(role: str, words: Any) -> str:
    tint = {"answer": "rgba(0,114,178,.10)", "thought": "rgba(204,121,167,.12)"}.get(role, "rgba(128,128,128,.09)")
    if isinstance(words, list):  # content in parts
        words = "\n".join(str(part.get("text", part) if isinstance(part, Mapping) else part) for part in words)
    return (
        f"<div style='background:{tint};border-radius:4px;padding:5px 9px;margin-top:5px'>"
        f"<div style='font-size:11px;opacity:.7'>{html.escape(role)}</div>"
        "<div style='white-space:pre-wrap;overflow-wrap:anywhere;max-height:16em;overflow-y:auto'>"
        f"{html.escape(str(words or '')) or '<i>empty</i>'}</div></div>"
    )


def split_thought(raw: str) -> tuple[str, str]:
    """The thought and the answer of a raw generation. A thought that never ends is all thought."""
    thought, answer = split(raw)
    return thought.strip(), answer.strip()
