"""A run's files as tables and series: what was made, how fast, by whom, what failed. Works while the run goes on."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nsmallest
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import HTML

from dfexp import control, jsonl, shards
from dfexp.errors import RunError
from dfexp.layout import RunFolder
from dfexp.tables import FONT, SIMULATED, Table, duration, labelled, text

_TYPES = {
    "index": "int64", "server": "object", "config_id": "object", "finish_reason": "object", "flags": "object",
    "prompt_tokens": "float64", "completion_tokens": "float64", "attempt": "int64", "submitted_at": "float64",
    "latency_s": "float64",
}  # fmt: skip
_CHUNK = 1_000  # rows whose texts are in memory together
_NICE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_COUNTED = "as the servers count them, over rows done"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a report is made of.

    Attributes:
        run: run.json.
        asked, missing: rows that the run is to make; those neither done nor failed yet.
        status: what the generating process said last; None if it never said anything.
        rows: one line per completion, without texts; counts that a server did not give are NaN, never zero.
        busy_s: time in which at least one request of `rows` was in flight; NaN without rows.
        examples: whole rows, drawn at random, by index.
    """

    folder: RunFolder
    run: Mapping[str, Any]
    asked: int
    missing: int
    status: Mapping[str, Any] | None
    rows: pd.DataFrame
    busy_s: float
    failures: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    examples: Sequence[Mapping[str, Any]]

    @property
    def engine(self) -> str:
        """The engine of its servers, as its parameters name it; "" if they do not."""
        return str(self.run["spec"].get("fleet", {}).get("engine", ""))


def load(folder: RunFolder, *, examples: int = 10, seed: int = 0) -> RunData:
    """Read a run in one pass over its shards, in about 100 bytes a row. Raises RunError when there is no run.

    The draw of `examples` depends on `seed` and the rows' indices alone, not on their order.
    """
    try:
        run = jsonl.read_json(folder.run_json)
    except FileNotFoundError:
        raise RunError(f"{folder.path} holds no run yet: run 03_generate first, or correct `run`.") from None

    reader = shards.read_rows(folder.completions)
    pieces, drawn = [_without_texts([])], list[dict[str, Any]]()
    while chunk := list(islice(reader, _CHUNK)):
        pieces.append(_without_texts(chunk))
        drawn = nsmallest(
            examples, [*drawn, *chunk], key=lambda row: blake2b(f"{seed}:{row['index']}".encode()).digest()
        )
    rows = pd.concat(pieces, ignore_index=True).astype(dict.fromkeys(("server", "config_id", "flags"), "category"))
    rows["finished_at"] = rows["submitted_at"] + rows["latency_s"]
    failed, asked = list(shards.read_failures(folder.completions)), int(run["prompts"]["asked"])
    return RunData(
        folder=folder, run=run, asked=asked, missing=asked - len(rows) - len(failed), rows=rows, busy_s=_busy_s(rows),
        status=control.read_status(folder), failures=failed, events=list(jsonl.read_log(folder.events)),
        examples=sorted(drawn, key=lambda row: int(row["index"])),
    )  # fmt: skip


def _without_texts(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    lines = [{**row, "flags": ",".join(row["flags"])} for row in rows]
    return pd.DataFrame(lines, columns=list(_TYPES)).astype(_TYPES)


def _busy_s(rows: pd.DataFrame) -> float:
    times = rows[["submitted_at", "finished_at"]].sort_values("submitted_at")
    ends = times["finished_at"].cummax()
    pauses_s = (times["submitted_at"] - ends.shift()).clip(lower=0).sum()
    return float(ends.max() - times["submitted_at"].min() - pauses_s)


def summary(data: RunData, title: str | None = None) -> Table:
    """The run in a few numbers, each with its unit and what it measures."""
    rows, tokens = data.rows, data.rows["completion_tokens"]
    ended, latency = rows["finish_reason"].value_counts(), rows["latency_s"]
    wall_s = float(rows["finished_at"].max() - rows["submitted_at"].min())
    short = "; biased short while longer answers are still in flight" if data.missing else ""
    over = f"finished rows, over the {duration(data.busy_s)} in which a request was in flight"
    outages = sum(event["event"] == "server_down" for event in data.events)
    lines: list[tuple[str, Any, str, str]] = [
        ("asked", data.asked, "rows", "prompts frozen for this run"),
        ("done", len(rows), "rows", "completions on disk"),
        ("failed", len(data.failures), "rows", "will not succeed; kinds and the servers' words below"),
        ("missing", data.missing, "rows", "neither done nor failed yet"),
        ("ended by itself", int(ended.get("stop", 0)), "rows", "finish reason stop"),
        ("cut", int(ended.get("length", 0)), "rows", "finish reason length: max_tokens or the context was reached"),
        ("prompt tokens, mean", float(rows["prompt_tokens"].mean()), "tokens", _COUNTED),
        ("completion tokens, mean", float(tokens.mean()), "tokens", _COUNTED + short),
        ("completion tokens", int(tokens.sum()), "tokens", "sum over rows done"),
        ("wall time", wall_s, "s", "first request sent to last answer received, pauses between starts included"),
        ("busy time", data.busy_s, "s", "the part of it with at least one request of a finished row in flight"),
        ("client rate", float(tokens.sum()) / data.busy_s, "completion tokens/s", over),
        ("client rate, rows", len(rows) / data.busy_s, "completions/s", over),
        ("in flight, mean", float(latency.sum()) / data.busy_s, "requests", f"sum of latencies of {over}"),
        ("latency, median", float(latency.median()), "s", "sent to last byte, queueing in the server included"),
        ("latency, 95th percentile", float(latency.quantile(0.95)), "s", "as above"),
        ("rows sent more than once", int((rows["attempt"] > 1).sum()), "rows", "done at a later attempt"),
        ("server outages", outages, "", "a server died or stopped answering, by events.jsonl"),
    ]
    table = [dict(zip(("what", "value", "unit", "how it is measured"), line, strict=True)) for line in lines]
    note = "The run is not finished: this is what there is now. " if data.missing else ""
    if data.engine == SIMULATED:
        note += "The servers were simulated: times and rates are the client's, not those of the simulated time."
    return Table(name="summary", title=labelled(title or f"Run {data.folder.name}", data.engine), rows=table, note=note)


def per_server(data: RunData) -> Table:
    """What each server made."""
    lines = [
        {
            "server": str(server),
            "rows": len(rows),
            "cut for length": f"{(rows['finish_reason'] == 'length').mean():.1%}",
            "completion tokens": int(rows["completion_tokens"].sum()),
            "completion tokens/s": float(rows["completion_tokens"].sum() / data.busy_s),
            "mean completion tokens": float(rows["completion_tokens"].mean()),
            "median latency (s)": float(rows["latency_s"].median()),
            "outages": sum(e["event"] == "server_down" and e.get("server") == server for e in data.events),
        }
        for server, rows in data.rows.groupby("server", observed=True)
    ]
    note = "Finished rows; rates over the run's busy time, so that they add up to the client rate."
    return Table(name="per_server", title="Per server", rows=lines, note=note)


def failures(data: RunData) -> Table:
    """Rows that will not succeed, by kind."""
    found = pd.DataFrame(list(data.failures), columns=["kind", "index", "message"]).sort_values("index")
    lines = [
        {
            "kind": str(kind),
            "rows": len(rows),
            "index": ", ".join(map(str, rows["index"][:10])) + (", ..." if len(rows) > 10 else ""),
            "the server said, the first time": str(rows["message"].iloc[0])[:500],
        }
        for kind, rows in found.groupby("kind")
    ]
    note = (
        "Each row is in failures.jsonl. They stay failed on resume; dfexp resume RUN --retry-failed sends them again."
    )
    return Table(name="failures", title="Failed rows, by kind", rows=lines, note=note if lines else "")


def flags(data: RunData) -> Table:
    """Rows with something a reader of the data should know."""
    counts = data.rows["flags"].astype(str).str.split(",").explode().value_counts().drop("", errors="ignore")
    lines = [{"flag": str(flag), "rows": int(count)} for flag, count in counts.items()]
    return Table(name="flags", title="Flags on rows", rows=lines)


def dropped(data: RunData) -> Table:
    """Lines of the sources that gave no prompt."""
    return Table(name="dropped", title="Dropped while reading the prompts", rows=data.run["prompts"].get("dropped", ()))


def events(data: RunData) -> Table:
    """What happened, counted."""
    found = pd.DataFrame(list(data.events), columns=["event", "server", "at"]).fillna({"server": "-"})
    found["at"] = pd.to_datetime(found["at"], unit="s").dt.strftime("%Y-%m-%d %H:%M:%S")
    lines = [
        {"event": event, "server": server, "times": len(at), "first": at.min(), "last": at.max()}
        for (event, server), at in found.groupby(["event", "server"], sort=False)["at"]
    ]
    return Table(name="events", title="What happened", rows=lines, note="From events.jsonl; times are UTC.")


def configurations(data: RunData) -> Table:
    """With what the rows were made: one line per engine configuration."""
    lines = [
        {
            "config": config_id,
            "rows": int((data.rows["config_id"] == config_id).sum()),
            "made with": _pairs({key: config.get(key) for key in ("engine", "engine_version", "model")}),
            "sampling": _pairs(config.get("sampling")),
            "fleet": _pairs(config.get("fleet")),
        }
        for config_id, config in data.run.get("configs", {}).items()
    ]
    note = f"Versions: {_pairs(data.run.get('versions'))}."
    return Table(name="configurations", title="Configurations", rows=lines, note=note)


def _pairs(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {value}" for key, value in (values or {}).items() if value not in (None, {}, []))


def throughput(data: RunData) -> pd.DataFrame:
    """Client rates per server and bin, by when answers finished; `start_s` and `width_s` since the first request."""
    rows, began = data.rows, data.rows["submitted_at"].min()
    wall_s = rows["finished_at"].max() - began
    width_s = next((width for width in _NICE_S if wall_s / width <= 40), _NICE_S[-1])
    start_s = ((rows["finished_at"] - began) // width_s * width_s).rename("start_s")
    sums = rows.groupby([rows["server"].astype(str), start_s])["completion_tokens"].agg(["sum", "size"]) / width_s
    return sums.set_axis(["completion_tok_per_s", "rows_per_s"], axis=1).reset_index().assign(width_s=width_s)


def in_flight(data: RunData, steps: int = 600) -> pd.DataFrame:
    """Requests of finished rows in flight: the mean of each step; `at_s` since the first request."""
    if data.rows.empty:
        return pd.DataFrame({"at_s": [], "requests": []})
    sent, answered = data.rows["submitted_at"].to_numpy(), data.rows["finished_at"].to_numpy()
    times = np.concatenate([sent, answered])
    order = np.argsort(times)
    level = np.cumsum(np.repeat([1, -1], len(sent))[order])
    request_s = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times[order]))])  # spent until each moment
    edges = np.linspace(sent.min(), answered.max(), steps + 1)
    means = np.diff(np.interp(edges, times[order], request_s)) / np.diff(edges)
    return pd.DataFrame({"at_s": edges[:-1] - edges[0], "requests": means})


def write(data: RunData) -> list[Table]:
    """Leave each table, and the series behind the figures over time, as CSV and JSON in the run's report/."""
    tables = [make(data) for make in (summary, per_server, failures, flags, dropped, events, configurations)]
    frames = {table.name: pd.DataFrame(list(table.rows), dtype=object) for table in tables}
    data.folder.report.mkdir(parents=True, exist_ok=True)
    for name, frame in {**frames, "throughput": throughput(data), "in_flight": in_flight(data)}.items():
        jsonl.write_atomic(data.folder.report / f"{name}.csv", frame.to_csv(index=False).encode())
        jsonl.write_atomic(data.folder.report / f"{name}.json", frame.to_json(orient="records", indent=1).encode())
    return tables


def conclusion(data: RunData) -> str:
    """What the run came to, as Markdown."""
    rows, again = data.rows, " Run 03_generate again to go on." if data.missing else ""
    counts = (
        f"{len(rows):,} of {data.asked:,} rows are done, {len(data.failures):,} failed, {data.missing:,} are missing"
    )
    rate = text(float(rows["completion_tokens"].sum()) / data.busy_s)
    return (
        f"**{labelled(counts, data.engine)}.**{again} In the {duration(data.busy_s)} with requests in flight the client"
        f" got **{rate} completion tokens/s**. The tables and the series behind the figures are in"
        f" `{data.folder.report}`."
    )


def examples(data: RunData) -> HTML:
    """The drawn rows to read: prompt, thought, answer, and how the answer ended. Everything is escaped."""
    page = "".join(map(_example, data.examples)) or "none yet"
    return HTML(f'<div style="{FONT};max-width:960px">{page}</div>')


def _example(row: Mapping[str, Any]) -> str:
    thought, answer = split_thought(row["text"])
    said = [(message["role"], message.get("content")) for message in row["messages"]]
    said += [("thought", thought), ("answer", answer)] if thought else [("answer", answer)]
    tokens = f"{text(row['prompt_tokens'])} + {text(row['completion_tokens'])} tokens"
    ended = {"stop": "ended by itself", "length": "cut for length"}.get(row["finish_reason"], str(row["finish_reason"]))
    facts = " · ".join((tokens, ended, f"{row['latency_s']:.1f} s", row["server"], *row["flags"]))
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
        words = "\n".join(str(part.get("text", part)) for part in words)
    return (
        f"<div style='background:{tint};border-radius:4px;padding:5px 9px;margin-top:5px'>"
        f"<div style='font-size:11px;opacity:.7'>{html.escape(role)}</div>"
        "<div style='white-space:pre-wrap;overflow-wrap:anywhere;max-height:16em;overflow-y:auto'>"
        f"{html.escape(words or '') or '<i>empty</i>'}</div></div>"
    )


def split_thought(raw: str) -> tuple[str, str]:
    """The thought and the answer of a raw generation. A thought that never ends is all thought."""
    head, ended, rest = raw.partition("</think>")
    if ended or raw.lstrip().startswith("<think>"):
        return head.strip().removeprefix("<think>").strip(), rest.strip()
    return "", raw.strip()
