"""A run's files as tables and series: what was made, how fast, by whom, what failed, and how that compares.

Works while a run goes on, without samples of servers, and without rows. `load` reads a run, `write` makes all
tables and leaves them in the run's report/; `series` has what figures show over time.
"""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from dfexp import jsonl
from dfexp.params import QualityGroup, ReportGroup
from dfexp.report import answers, details, overview, series
from dfexp.report.data import RunData, load
from dfexp.report.details import examples, said, split_thought
from dfexp.report.overview import summary
from dfexp.tables import Table, duration, labelled, text

__all__ = ["RunData", "compared", "conclusion", "examples", "load", "said", "split_thought", "summary", "write"]


def compared(data: RunData, names: str | Sequence[str], root: Path) -> dict[str, RunData | str]:
    """Other runs, by their names beside this one or by their folders; for one that cannot be had, why."""
    return {name: overview.other(data, name, root) for name in ([names] if isinstance(names, str) else names)}


def write(
    data: RunData, group: ReportGroup, root: Path, others: Mapping[str, RunData | str] | None = None,
    quality: QualityGroup | None = None,
) -> dict[str, Table]:  # fmt: skip
    """All tables by name; each, and the series behind the figures over time, is left as CSV and JSON in report/.

    Args: others, runs to stand beside this one, earlier ones first; quality, which answers an export would take.
    """
    model = overview.planned(data, root)
    made = (
        summary(data, group.title), overview.baselines(data, group.baselines, root, others), overview.plan(data, model),
        overview.comparison(data, others or {}), details.findings(data, model), details.per_server(data),
        details.slots(data), details.finish_reasons(data), details.failures(data),
        *answers.quality(data, quality or QualityGroup()), details.dropped(data), details.events(data),
        details.configurations(data),
    )  # fmt: skip
    frames = {table.name: pd.DataFrame(list(table.rows), dtype=object) for table in made}
    for make in (series.throughput, series.rates, series.in_flight, series.gauges, series.gpus):
        frames[make.__name__] = make(data)
    with jsonl.disk(f"make the folder {data.folder.report}", "Move away what is there."):
        data.folder.report.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        jsonl.write_atomic(data.folder.report / f"{name}.csv", frame.to_csv(index=False).encode())
        jsonl.write_atomic(data.folder.report / f"{name}.json", frame.to_json(orient="records", indent=1).encode())
    return {table.name: table for table in made}


def conclusion(data: RunData, made: Mapping[str, Table]) -> str:
    """What the run came to, as Markdown. Args: made, its tables."""
    values = {line["what"]: line for line in made["summary"].rows}
    is_over, is_open = data.folder.path.parent.name == "rehearsals", data.missing and not data.is_going
    again = (" A rehearsal ends with its hours." if is_over else " Run 03_generate again to go on.") * bool(is_open)
    counts = f"{len(data.rows):,} of {data.asked:,} rows are done, {len(data.failures):,} failed, {data.missing:,} are"
    parts = [f"**{labelled(f'{counts} missing', data.engine)}.**{again}"]
    rate, how = text(values["decoded, fleet"]["value"]), values["decoded, fleet"]["how it is measured"]
    got, busy = text(values["client rate"]["value"]), duration(data.busy_s) + " of simulated time" * data.is_virtual
    made_at = f"The servers made **{rate} completion tokens/s** ({how.partition('; the sum')[0]})."
    if len(data.rows):
        parts.append("What the servers make is not known yet." if rate == "-" else made_at)
        got = "nobody counted tokens" if got == "-" else f"the client got **{got} completion tokens/s** (client rate)"
        parts.append(f"In the {busy} with requests in flight {got}.")
    for line in made["baselines"].rows if len(data.rows) else ():
        share = "not known" if line["share"] is None else labelled(f"{line['share']:.1%}", data.engine)
        verdict = f"; what was expected: {line['verdict']}" if line["verdict"] != "-" else ""
        parts.append(_plain(f"Share of the rate of {line['baseline']}: {share}{verdict}."))
    for line in made["findings"].rows[:3]:
        name = f"{line['finding'][0].upper()}{line['finding'][1:]}"
        parts.append(f"**{_plain(name)}**: {_plain(line['evidence'])} {_plain(line['change'].strip('-'))}")
    return "\n\n".join([*parts, f"The tables and the series behind the figures are in `{data.folder.report}`."])


def _plain(words: str) -> str:
    """Words in Markdown that mean themselves."""
    return re.sub(r"([\\`*_{}\[\]#|~$])", r"\\\1", html.escape(words, quote=False))
