"""The run in a few numbers, and those numbers beside the plan, the baselines and other runs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite, isnan, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from dfexp import params
from dfexp.control import FINAL_STATES
from dfexp.diagnose import Finding, Planned
from dfexp.errors import DfexpError
from dfexp.generate.status import planned as planned_for
from dfexp.layout import RunFolder
from dfexp.params import BaselinePart
from dfexp.records import SIMULATED
from dfexp.report import series
from dfexp.report.data import RunData, counted, flags_of, load
from dfexp.report.series import GPUS, LIMITED, POOLS, REQUESTS, flight, known_until, limited, medians, occupied, steady
from dfexp.shards import not_uploaded, read_manifest
from dfexp.tables import Table, duration, labelled

_OFF = 0.15
"""A mean length or a token budget so far from the plan's is a finding."""
_COUNTED = "as the servers count them, over rows done"
_RATE, _NO_BASELINES = "completion tokens/s", "None in report.baselines."
Line = tuple[str, Any, str, str]


def summary(data: RunData, title: str | None = None) -> Table:
    """The run in a few numbers, each with its unit and what it measures."""
    heads = ("what", "value", "unit", "how it is measured")
    lines = [dict(zip(heads, line, strict=True)) for line in (*_rates(data), *_rows(data), *_time(data))]
    note = "The run is not finished: this is what there is now. " if data.missing else ""
    note += "".join(f"{odd:,} damaged line(s) of {name} are left out. " for name, odd in data.damaged.items() if odd)
    if data.engine == SIMULATED:
        times = "all times are simulated" if data.is_virtual else "times are the client's, not those of simulated time"
        note += f"The servers were simulated: {times}. "
    note += "The rate to quote is " + ("'client rate'." if steady(data).words == series.WHOLE else "'decoded, fleet'.")
    return Table(name="summary", title=labelled(title or f"Run {data.folder.name}", data.engine), rows=lines, note=note)


def _rates(data: RunData) -> Iterator[Line]:
    """Prompts and servers, rates in the steady window, and what servers said of themselves in it."""
    found, said, (units, unit) = steady(data), medians(data, steady(data)).median(), data.units
    caps = [each.limits.max_running_requests for each in data.starts[0] if each.limits.max_running_requests]
    over = f"by {found.source}; {found.words}, {duration(found.end - found.start)}"
    total = f"; the sum of the next {'two' if isnan(found.unexplained) else 'three'}" * (not isnan(found.client))
    yield "asked", data.asked, "rows", "prompts frozen for this run"
    at_once = max(map(len, data.starts))
    yield "servers", at_once, "", f"at once; {units:,} {unit}(s) in all; engine: {data.engine or 'not said'}"
    yield f"decoded, each {unit}", found.decoded / units, _RATE, over
    yield "decoded, fleet", found.decoded, _RATE, over + total
    yield "client rate, same time", found.client, _RATE, "answers that arrived in it, over its seconds"
    yield "growth in flight", found.in_flight, _RATE, "tokens made and not yet answered: at its end, less at its start"
    yield "unexplained", found.unexplained, _RATE, "the rest; what was made for requests that gave no row is in it"
    yield "request cap", min(caps, default=None), "requests a server", "the smallest that a server named"
    few = "; not told of few in a run without a steady state" * (found.words == series.WHOLE)
    for what in (*REQUESTS.values(), *POOLS.values()):
        unit = "share" if what in POOLS.values() else "requests a server"
        yield what, float(said[what]), unit, "median over samples of that time, then over servers" + few


def _rows(data: RunData) -> Iterator[Line]:
    """What there is, how long it is, and what went wrong."""
    rows, (mean, how), tokens = data.rows, mean_tokens(data), counted(data.rows["completion_tokens"])
    uncounted = int(rows["completion_tokens"].isna().sum())
    apart = f"; {uncounted:,} rows have no count, and are not in it" * bool(uncounted)
    outages = sum(one["event"] == "server_down" for one in data.events)
    yield "completion tokens, mean", mean, "tokens", how + apart
    yield "prompt tokens, mean", float(rows["prompt_tokens"].mean()), "tokens", _COUNTED
    yield "completion tokens", None if isnan(tokens) else int(tokens), "tokens", "sum over rows done" + apart
    yield "done", len(rows), "rows", "completions on disk"
    yield "failed", len(data.failures), "rows", "will not succeed; kinds and the servers' words below"
    yield "missing", data.missing, "rows", "neither done nor failed yet"
    yield "on S3", *on_s3(data)
    yield "rows sent more than once", int((rows["attempt"] > 1).sum()), "rows", "done at a later attempt"
    yield "server outages", outages, "", "a server died or stopped answering, by events.jsonl"


def on_s3(data: RunData) -> tuple[int | None, str, str]:
    """Shards that were uploaded, their unit, and what is to be known of them."""
    group, manifest = data.run["spec"].get("store") or {}, read_manifest(data.folder.completions)
    if not group.get("bucket"):
        return None, "shards", "not uploaded: no store; the run's folder is the only copy"
    shards = manifest.shards if manifest else []
    words = f"of {len(shards):,} sealed, in bucket {group['bucket']}"
    if data.elsewhere:
        fix = f"dfexp store restore {data.folder.name} --rows"
        words += f"; {data.elsewhere:,} rows are there alone, and in no other number here ({fix})"
    if any(one["event"] == "store_opened" and one.get("unconditional") for one in data.events):
        words += "; the store ignores If-None-Match, so each put was preceded by a look"
    if gone := [entry.name for entry in shards if "gone" in (entry.uploaded or {})]:
        words += f"; LOST: {len(gone):,}, neither in the bucket nor in the run's folder, from {gone[0]}"
    return len(shards) - len(not_uploaded(data.folder.completions)), "shards", words


def _time(data: RunData) -> Iterator[Line]:
    """Durations, rates over all of the time, and what it cost."""
    rows, wall_s, (units, unit), parts = data.rows, data.ended - data.began, data.units, occupied(data)
    used = np.average(parts["occupied"], weights=parts["seconds"]) if parts["seconds"].sum() > 0 else nan
    tokens, hours, latency = counted(rows["completion_tokens"]), units * wall_s / 3600, rows["latency_s"]
    idle = "loading models is not in it" + ", nor servers that stayed up while it was stopped" * bool(data.stopped)
    over = f"finished rows, over the {duration(data.busy_s)} in which a request was in flight"
    left_out = f"; {data.stopped}, left out of all that follows" if data.stopped else ""
    yield "running time", wall_s, "s", f"{duration(wall_s)}: first request to last answer{left_out}"
    yield "busy time", data.busy_s, "s", "the part of it with at least one request of a finished row in flight"
    yield "time left", *time_left(data)
    yield "client rate", tokens / data.busy_s, _RATE, over
    yield "client rate, rows", len(rows) / data.busy_s, "completions/s", over
    yield "in flight, mean", float(latency.sum()) / data.busy_s, "requests", f"sum of latencies of {over}"
    yield "slots occupied", float(used), "share", "in flight over what servers decode at once, as far as it is known"
    yield "slots occupied, first to 98 %", *slots(data)
    yield "latency, median", float(latency.median()), "s", "sent to last byte, queueing in the server included"
    yield "latency, 95th percentile", float(latency.quantile(0.95)), "s", "as above"
    yield f"{unit}-hours", hours, "h", f"{units:,} {unit}(s) times the running time; {idle}"
    yield f"{unit}-hours per million tokens", hours / tokens * 1e6 if tokens else nan, "h", "completion tokens done"
    if len(data.gpus):
        for name, (words, unit) in GPUS.items():
            value = float(data.gpus[name].mean()) / (2**30 if unit == "GiB" else 1)
            yield f"GPU {words}, mean", value, f"{unit} a GPU", "all samples of all GPUs"
        for name, share in limited(data).items():
            yield f"GPU {LIMITED[name][0]}", float(share.mean()), "share", "of all samples that say what limits clocks"


def slots(data: RunData) -> tuple[float, str, str]:
    """The share of request slots in use from the first row to 98 % of them, its unit, and what it leaves out."""
    told = (data.status or {}).get("slots") or {}
    if not told.get("there"):
        return nan, "share", "not measured: no two looks at a server, while rows were left, said its cap and what ran"
    how = "of requests that ran or waited at a server, over caps, by samples, the last 2 % of each start left out; "
    how += f"{told['running'] / told['there']:.3f} ran by the gauge, which leaves out the newest; servers were "
    return told["occupied"] / told["there"], "share", how + f"away for {duration(told['away_s'])}, which does not count"


def _told(data: RunData) -> Mapping[str, float] | None:
    """The mean length as the run's process knew it, also one that was killed: what was in flight is counted in."""
    status = data.status or {}
    told = None if data.is_settled or status.get("state") in FINAL_STATES else status.get("mean_completion_tokens")
    return told if isinstance(told, Mapping) else None


def mean_tokens(data: RunData) -> tuple[float, str]:
    """The mean length of answers, with those in flight where that was told; and how it was had."""
    if told := _told(data):
        return float(told["value"]), f"answers in flight counted in; {told['low']:,.0f} to {told['high']:,.0f} at 95 %"
    rows, short = data.rows, "; biased short while longer answers are still in flight"
    known = rows[rows["submitted_at"] <= known_until(data)]
    if data.is_settled or 2 * len(known) < len(rows):
        return float(rows["completion_tokens"].mean()), _COUNTED + short * (not data.is_settled)
    return float(known["completion_tokens"].mean()), f"{_COUNTED} that were sent before the last ones that are open"


def time_left(data: RunData) -> tuple[float, str, str]:
    """Seconds until all rows are done, their unit, and who says so."""
    if not data.missing:
        return 0.0, "s", "no row is missing"
    status, rate, (mean, how) = data.status or {}, steady(data).decoded, mean_tokens(data)
    if data.is_going and status.get("whole_eta_s") is not None:
        left, low, high = (duration(status[f"whole_eta_{end}s"]) for end in ("", "low_", "high_"))
        said, here = f"{left}: as its process says of all rows; at 95 % {low} to {high}", duration(status["eta_s"])
        ends = f". This start ends before: its own rows take {here}" if status["rows_of_later_starts"] else ""
        return float(status["whole_eta_s"]), "s", said + ends
    left_s = data.missing * mean / rate if rate > 0 else nan
    said = f"{duration(left_s)}: all {data.missing:,} missing rows, of the mean length, decoded as fast as above; {how}"
    return left_s, "s", said


def planned(data: RunData, root: Path) -> Planned | None:
    """What the capacity model says of a server of this run; None without a plan, or with one that cannot be."""
    with suppress(DfexpError):
        return planned_for(params.validate(data.run["spec"], str(data.folder.run_json)), root, data.run["prompts"])
    return None


def plan(data: RunData, model: Planned | None) -> Table:
    """What was planned beside what came: the load, and what the capacity model says of servers under it."""
    lines = []
    if model is not None and len(data.rows):
        setting, found, load = model.setting, steady(data), model.setting.workload
        said, mean = medians(data, found).median(), mean_tokens(data)[0]
        limit = min((each.limit for each in data.starts[0] if each.limit), default=None)
        one = setting.predict(model.plan.current.memory, limit)
        prompts = min(setting.prompts, data.run["spec"]["prompts"].get("limit") or setting.prompts)
        hours = (data.ended - data.began + time_left(data)[0]) / 3600
        for what, unit, expected, got in (
            ("prompts", "rows", prompts, data.asked),
            ("prompt tokens, mean", "tokens", load.prompt.mean, float(data.rows["prompt_tokens"].mean())),
            ("completion tokens, mean", "tokens", load.completion.mean, mean),
            ("token budget", "completion tokens", prompts * load.completion.mean, data.asked * mean),
            ("running", "requests a server", one.running, float(said["running"])),
            ("KV usage", "share", one.full_token_usage, float(said["KV usage"])),
            ("state usage", "share", one.mamba_usage, float(said["state usage"])),
            ("decoded", f"{_RATE} a server", one.tok_per_s, found.decoded / max(1, len(data.starts[0]))),
            ("time for all rows", "h", one.hours(prompts, setting.servers), hours),
        ):
            ratio = got / expected if expected and isfinite(got) else None
            lines.append({"what": what, "unit": unit, "planned": expected, "measured": got, "ratio": ratio})
    note = f"Budget and time: with what is missing, at mean length ({mean_tokens(data)[1]}) and rate so far. Running to"
    note += " decoded: steady state."
    note = note if lines else "No `plan` that this run could be compared with."
    return Table(name="plan", title="Against the plan", rows=lines, note=note)


def off_plan(data: RunData, model: Planned | None) -> Iterator[Finding]:
    """Findings on mean length and token budget, where they leave the plan by more than chance, or open answers, do."""
    tokens, told = data.rows["completion_tokens"].dropna(), _told(data)
    chance = 2 * float(tokens.std()) / sqrt(len(tokens)) / float(tokens.mean()) if len(tokens) > 1 else 1.0
    if told:
        chance = (told["high"] - told["low"]) / 2 / told["value"]
    elif not data.is_settled:
        chance += float(flight(data)[1].max(initial=0.0)) / max(1, len(tokens))
    change = "correct `plan`, or stop before the budget is spent"
    for line in plan(data, model).rows:
        ratio, kind = line["ratio"], line["what"]
        if kind in ("completion tokens, mean", "token budget") and ratio and abs(ratio - 1) > max(_OFF, chance):
            words = f"{line['measured']:,.0f} {line['unit']}, {line['planned']:,.0f} planned: {ratio:.2f} times that."
            yield Finding(kind=f"{kind} off plan", server=None, severity="fault", evidence=words, change=change)


def other(data: RunData, name: str, root: Path) -> RunData | str:
    """Another run, by its name beside this one or by its folder; or why there is none."""
    for path in (data.folder.path.parent / name, root / name):
        if path.exists():
            try:
                return load(RunFolder(path), examples=0)
            except DfexpError as error:
                return f"run {name!r} cannot be read: {error}"
    return f"there is no run {name!r}"


def measured_by(data: RunData) -> str:
    """What its rate of decoding was measured by: rates are compared where this is the same."""
    is_real = data.engine == SIMULATED and not data.is_virtual
    return steady(data).source + (", in seconds that are not those of the simulation" if is_real else "")


def baselines(
    data: RunData, parts: Sequence[BaselinePart], root: Path, others: Mapping[str, RunData | str] | None = None
) -> Table:
    """The rate at which this run decoded, beside that of other machines or runs, and what was expected of it.

    Args: others, runs that were read already.
    """
    lines, found, by = list[dict[str, Any]](), steady(data), measured_by(data)
    for part in parts:
        run = ((others or {}).get(part.run) or other(data, part.run, root)) if part.run else None
        rate, source, alike, engine = part.tok_per_s, "as given", found.source, ""
        if isinstance(run, RunData):
            rate, source, alike, engine = steady(run).decoded, measured_by(run), measured_by(run), run.engine
        share, least = found.decoded / rate if rate and found.decoded > 0 else None, part.expected_fraction
        if isinstance(run, str):
            verdict = f"{run}: correct report.baselines"
        elif by != alike:
            share, verdict = None, "none: the two rates are measured by different things"
        else:
            verdict = labelled("met" if share and least and share >= least else "not met", data.engine)
            verdict = "-" if share is None or least is None else verdict
        lines.append({
            "baseline": labelled(part.name or str(part.run), engine), "hardware": part.hardware or "-",
            "its tokens/s": rate, "its rate is by": source, "this run's": found.decoded,
            "this run's is by": labelled(by, data.engine), "share": share, "expected": least, "verdict": verdict,
        })  # fmt: skip
    note = f"{_RATE} decoded by all servers together; this run's: {found.words}."
    return Table(name="baselines", title="Against baselines", rows=lines, note=note if lines else _NO_BASELINES)


def comparison(data: RunData, others: Mapping[str, RunData | str]) -> Table:
    """The summary of this run beside those of others, before it; and how their settings differ."""
    runs, lines = [*(run for run in others.values() if isinstance(run, RunData)), data], list[dict[str, Any]]()
    names = [labelled(run.folder.name, run.engine) for run in runs]
    values = [{line["what"]: line["value"] for line in summary(run).rows} for run in runs] if runs[1:] else []
    sources, windows = [measured_by(run) for run in runs], [steady(run).words for run in runs]
    for line in summary(data).rows if runs[1:] else ():
        what, cells = line["what"], [value.get(line["what"]) for value in values]
        is_alike = what not in ("growth in flight", "unexplained")  # near zero: how often says nothing
        is_alike &= not what.startswith("decoded") or sources[0] == sources[-1]
        ratio = cells[-1] / cells[0] if cells[0] and cells[-1] and is_alike else None
        rows: list[tuple[Any, Any, Sequence[Any], float | None]] = [(what, line["unit"], cells, ratio)]
        if what == "decoded, fleet":
            rows += [("decoded is by", "", sources, None), ("decoded is of", "", windows, None)]
        lines += [{"what": words, "unit": unit, **dict(zip(names, told, strict=True)), "last / first": over}
                  for words, unit, told, over in rows]  # fmt: skip
    settings = [{**run.run["spec"].get("generation", {}), **run.fleet, **flags_of(run.fleet)} for run in runs]
    keys = sorted({key for each in settings for key in each} - {"name", "plan", "flags"})
    told_of = {key: [str(each.get(key, "-")) for each in settings] for key in keys}
    differs = "; ".join(f"{key}: {', '.join(each)}" for key, each in told_of.items() if len(set(each)) > 1)
    notes = [f"Settings that differ: {differs or 'none'}." if others else "None in report.compare."]
    prints = [run.run.get("fingerprint", {}) for run in runs]
    if unlike := [name for name in prints[-1] if len({each.get(name) for each in prints}) > 1]:
        notes.append(f"NOT ALIKE, by their fingerprints: {', '.join(unlike)}. Rates and lengths depend on that too.")
    if sources[0] != sources[-1]:
        notes.append("What was decoded is measured by different things, so there is no ratio of it.")
    notes += [f"{run[0].upper()}{run[1:]}: correct report.compare." for run in others.values() if isinstance(run, str)]
    return Table(name="comparison", title="Beside other runs", rows=lines, note=" ".join(notes))
