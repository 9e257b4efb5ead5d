"""A run's files as tables: what was made, how fast, by whom, and what failed. Works while the run is still going."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dfexp import jsonl
from dfexp.layout import RunFolder
from dfexp.rundata import RunData as RunData
from dfexp.rundata import Window, window
from dfexp.rundata import load as load
from dfexp.tables import Table, duration, text

_BINS = 40
_NICE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def summary(data: RunData) -> Table:
    """The run in a few numbers, each with its unit and what it measures."""
    rows = data.rows
    busy = window(rows)
    missing = data.asked - len(rows) - len(data.failures)
    lines: list[tuple[str, Any, str, str]] = [
        ("asked", data.asked, "rows", "prompts frozen for this run"),
        ("done", len(rows), "rows", "completions on disk"),
        ("failed", len(data.failures), "rows", "will not succeed; kinds and the servers' words below"),
        ("missing", missing, "rows", "neither done nor failed yet"),
        ("prompt tokens, mean", _mean(rows["prompt_tokens"]), "tokens", "as the servers count them, over rows done"),
        ("completion tokens, mean", _mean(rows["completion_tokens"]), "tokens", _length_note(data)),
        ("completion tokens", int(rows["completion_tokens"].sum()), "tokens", "sum over rows done"),
    ]
    if busy is not None:
        lines += _rates(rows, busy)
    lines += [
        ("rows sent more than once", int((rows["attempt"] > 1).sum()), "rows", "done at a later attempt"),
        ("shards sealed", len(list(data.folder.completions.glob("completions_*.jsonl"))), "files", "immutable files"),
        ("server outages", _outages(data), "", "a server died or stopped answering, by events.jsonl"),
    ]
    columns = ("what", "value", "unit", "how it is measured")
    table = [dict(zip(columns, line, strict=True)) for line in lines]
    return Table(name="summary", title="The run in numbers", rows=table)


def _length_note(data: RunData) -> str:
    note = "as the servers count them, over rows done"
    return note if data.is_finished else f"{note}; biased short while longer answers are still in flight"


def _rates(rows: pd.DataFrame, busy: Window) -> list[tuple[str, Any, str, str]]:
    over = f"finished rows, over the {duration(busy.busy_s)} in which a request was in flight"
    tokens, latency = float(rows["completion_tokens"].sum()), rows["latency_s"]
    return [
        ("wall time", busy.wall_s, "s", "first request sent to last answer received, pauses between sessions included"),
        ("busy time", busy.busy_s, "s", "the part of it with at least one request of a finished row in flight"),
        ("client rate", tokens / busy.busy_s, "completion tokens/s", over),
        ("client rate, rows", len(rows) / busy.busy_s, "completions/s", over),
        ("in flight, mean", float(latency.sum()) / busy.busy_s, "requests", f"sum of latencies of {over}"),
        ("latency, median", float(latency.median()), "s", "sent to last byte, queueing in the server included"),
        ("latency, 95th percentile", float(latency.quantile(0.95)), "s", "as above"),
    ]


def per_server(data: RunData) -> Table:
    """What each server made."""
    busy = window(data.rows)
    lines = []
    for server, rows in data.rows.groupby("server", observed=True):
        assert busy is not None
        lines.append(
            {
                "server": str(server),
                "rows": len(rows),
                "share of rows": f"{len(rows) / len(data.rows):.1%}",
                "completion tokens": int(rows["completion_tokens"].sum()),
                "completion tokens/s": float(rows["completion_tokens"].sum() / busy.busy_s),
                "mean completion tokens": _mean(rows["completion_tokens"]),
                "median latency (s)": float(rows["latency_s"].median()),
                "outages": _outages(data, str(server)),
            }
        )
    note = "Finished rows; rates over the run's busy time, so that they add up to the client rate."
    return Table(name="per_server", title="Per server", rows=lines, note=note)


def finish_reasons(data: RunData) -> Table:
    """Why answers ended."""
    lines = [
        {
            "finish reason": str(reason),
            "rows": len(rows),
            "share": f"{len(rows) / len(data.rows):.1%}",
            "mean completion tokens": _mean(rows["completion_tokens"]),
        }
        for reason, rows in data.rows.groupby("finish_reason", observed=True)
    ]
    note = "stop: the model ended by itself. length: cut by max_tokens or the context."
    return Table(name="finish_reasons", title="Why answers ended", rows=lines, note=note)


def failures_by_kind(data: RunData) -> Table:
    """Rows that will not succeed, counted by kind, with one message each."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for failure in data.failures:
        kinds.setdefault(str(failure["kind"]), []).append(failure)
    lines = [
        {"kind": kind, "rows": len(found), "for example, the server said": str(found[0]["message"])[:300]}
        for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]
    note = "They stay failed when the run is resumed; `--retry-failed` tries them again."
    return Table(name="failures_by_kind", title="Failures by kind", rows=lines, note=note if lines else "")


def failures(data: RunData, most: int = 50) -> Table:
    """Every failed row with the server's words, at most `most`."""
    lines = [
        {
            "index": str(failure["index"]),
            "id": failure["id"],
            "kind": failure["kind"],
            "attempts": failure["attempts"],
            "server": failure["server"],
            "the server said": str(failure["message"])[:500],
        }
        for failure in sorted(data.failures, key=lambda failure: int(failure["index"]))[:most]
    ]
    left = len(data.failures) - len(lines)
    note = f"{left:,} more are in failures.jsonl." if left else ""
    return Table(name="failures", title="Failed rows", rows=lines, note=note)


def flags(data: RunData) -> Table:
    """Rows with something a reader of the data should know."""
    counts: dict[str, int] = {}
    for joined, count in data.rows["flags"].value_counts().items():
        for flag in filter(None, str(joined).split(",")):
            counts[flag] = counts.get(flag, 0) + int(count)
    lines = [{"flag": flag, "rows": count} for flag, count in sorted(counts.items(), key=lambda item: -item[1])]
    return Table(name="flags", title="Flags on rows", rows=lines)


def dropped(data: RunData) -> Table:
    """Lines of the sources that gave no prompt."""
    lines = [dict(drop) for drop in data.run["prompts"].get("dropped", ())]
    return Table(name="dropped", title="Dropped while reading the prompts", rows=lines)


def events(data: RunData) -> Table:
    """What happened, counted."""
    counts: dict[tuple[str, str], list[float]] = {}
    for event in data.events:
        counts.setdefault((str(event["event"]), str(event.get("server") or "-")), []).append(float(event["at"]))
    lines = [
        {"event": name, "server": server, "times": len(at), "first": _clock(min(at)), "last": _clock(max(at))}
        for (name, server), at in counts.items()
    ]
    return Table(name="events", title="What happened", rows=lines, note="From events.jsonl; times are UTC.")


def configurations(data: RunData) -> Table:
    """With what the rows were made: one line per engine configuration that made rows."""
    counts = data.rows["config_id"].value_counts()
    lines = [
        {
            "config": config_id,
            "rows": int(counts.get(config_id, 0)),
            "engine": " ".join(str(config.get(key)) for key in ("engine", "engine_version") if config.get(key)),
            "model": config.get("model"),
            "sampling": _pairs(config.get("sampling") or {}),
            "fleet": _pairs(config.get("fleet") or {}),
        }
        for config_id, config in data.run.get("configs", {}).items()
    ]
    versions = _pairs(data.run.get("versions", {}))
    return Table(name="configurations", title="Configurations", rows=lines, note=f"Versions: {versions}.")


def headline(data: RunData, title: str | None = None) -> str:
    """What the report is about, as Markdown."""
    servers = data.rows["server"].nunique()
    models = ", ".join(sorted({str(config.get("model")) for config in data.run.get("configs", {}).values()}))
    state = "finished" if data.is_finished else "not finished: this is what there is now"
    made = f"{len(data.rows):,} of {data.asked:,} completions by {servers} server(s) of `{models}`"
    return f"### {title or 'Run ' + data.folder.name}\n\n{made}. The run is {state}."


def conclusion(data: RunData) -> str:
    """What the run came to, as Markdown."""
    busy, rows = window(data.rows), data.rows
    missing = data.asked - len(rows) - len(data.failures)
    parts = [
        f"**{len(rows):,} of {data.asked:,} rows are done, {len(data.failures):,} failed, {missing:,} are missing.**"
    ]
    if busy is not None:
        rate = float(rows["completion_tokens"].sum()) / busy.busy_s
        parts.append(
            f"They took {duration(busy.busy_s)} with requests in flight: **{text(rate)} completion tokens/s** at the"
            f" client over that time, {float(rows['latency_s'].sum()) / busy.busy_s:.1f} requests in flight on average."
        )
    cut = int((rows["finish_reason"] == "length").sum())
    if cut:
        parts.append(f"{cut:,} answers ({cut / len(rows):.0%}) were cut for length.")
    if missing:
        parts.append("Run 03_generate again to go on.")
    parts.append(f"The tables and the series behind the figures are in `{data.folder.report}`.")
    return " ".join(parts)


def throughput(data: RunData) -> Table:
    """Completion tokens/s and rows/s per server and bin of time, by the time at which answers finished."""
    busy = window(data.rows)
    lines = []
    if busy is not None:
        width_s = bin_width_s(busy.wall_s)
        bins = ((data.rows["finished_at"] - busy.first_at) // width_s).astype("int64").rename("bin")
        tokens = data.rows["completion_tokens"].groupby([data.rows["server"], bins], observed=True)
        sums = pd.DataFrame({"tokens": tokens.sum(), "rows": tokens.size()}).reset_index()
        lines = [
            {
                "start_s": float(row["bin"] * width_s),
                "width_s": float(width_s),
                "server": str(row["server"]),
                "completion_tok_per_s": float(row["tokens"] / width_s),
                "rows_per_s": float(row["rows"] / width_s),
            }
            for row in sums.to_dict("records")
        ]
    note = "start_s counts from the first request; all tokens of an answer fall into the bin in which it finished."
    return Table(name="throughput", title="Client rate over time", rows=lines, note=note)


def in_flight(data: RunData, points: int = 600) -> Table:
    """Requests of finished rows in flight: mean per step of time, at most `points` steps."""
    busy = window(data.rows)
    lines = []
    if busy is not None:
        edges = np.linspace(busy.first_at, busy.last_at, points + 1)
        starts, ends = data.rows["submitted_at"].to_numpy(), data.rows["finished_at"].to_numpy()
        spent = _time_before(edges, starts) - _time_before(edges, ends)
        means = np.diff(spent) / np.diff(edges)
        lines = [
            {"at_s": float(at - busy.first_at), "requests": float(mean)}
            for at, mean in zip(edges[:-1], np.maximum(means, 0), strict=True)
        ]
    note = "at_s counts from the first request; requests that were lost or failed are not in it."
    return Table(name="in_flight", title="Requests in flight over time", rows=lines, note=note)


def _time_before(edges: Any, moments: Any) -> Any:
    """For each edge, the sum of (edge - moment) over the moments before it: the integral of their count."""
    ordered = np.sort(moments)
    sums = np.concatenate([[0.0], np.cumsum(ordered - ordered[0])])
    count = np.searchsorted(ordered, edges, side="right")
    return count * (edges - ordered[0]) - sums[count]


def bin_width_s(wall_s: float) -> int:
    """A round width in seconds that cuts `wall_s` into at most 40 bins, the last widths excepted."""
    return next((width for width in _NICE_S if wall_s / width <= _BINS), _NICE_S[-1])


def tables(data: RunData) -> list[Table]:
    """Every table of the report, and the series behind its figures."""
    makers = (
        summary, per_server, finish_reasons, failures_by_kind, failures, flags, dropped, events, configurations,
        throughput, in_flight,
    )  # fmt: skip
    return [make(data) for make in makers]


def write(data: RunData) -> RunFolder:
    """Write each table and each figure's series as CSV and JSON into the run's report/. Raises StorageError."""
    data.folder.report.mkdir(parents=True, exist_ok=True)
    for table in tables(data):
        jsonl.write_atomic(data.folder.report / f"{table.name}.csv", table.to_csv().encode())
        jsonl.write_atomic(data.folder.report / f"{table.name}.json", table.to_json().encode())
    return data.folder


def _mean(values: pd.Series[float]) -> float | None:
    return float(values.mean()) if values.notna().any() else None


def _outages(data: RunData, server: str | None = None) -> int:
    downs = [event for event in data.events if event["event"] == "server_down"]
    return sum(server is None or event.get("server") == server for event in downs)


def _clock(at: float) -> str:
    return str(pd.Timestamp(at, unit="s").strftime("%Y-%m-%d %H:%M:%S"))


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if value not in (None, {}, []))
