"""What the sample of a run that goes first tells of the whole: lengths, rate, time left, and answers to read."""

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import hypot
from pathlib import Path
from typing import Any

import numpy as np

from dfexp.diagnose import Planned
from dfexp.estimate import Estimate, lengths_of, time_left
from dfexp.jsonl import disk, write_atomic, write_json
from dfexp.layout import RunFolder
from dfexp.report import load, split_thought
from dfexp.report.data import RunData
from dfexp.report.overview import off_plan, planned
from dfexp.report.series import steady
from dfexp.shards import read_rows
from dfexp.tables import duration, labelled, text

_EXAMPLES, _MORE = 10, 1.1
# Standard errors, as parts: of a rate, and of what it is taken to grow by: with a plan that says so, and without.
_ERROR, _PLANNED, _GUESSED = 0.03, 0.2, 0.5


def write(folder: RunFolder, root: Path, sample: Sequence[int], seed: int) -> tuple[str, int]:
    """Leave what the sample told in the run's report/, as pilot.json and pilot.md.

    Returns the latter, Markdown, and how many rows of the sample are neither done nor failed.

    Tokens are those of answers; times and rates are those of the simulated time where servers are simulated. The rate
    is that of all rows so far, in the run's steady state. Raises StorageError.
    """
    data = load(folder, examples=0)
    done = data.rows.loc[data.rows["index"].isin(sample), "index"].tolist()
    shown = random.Random(seed).sample(done, min(_EXAMPLES, len(done)))  # noqa: S311 (a draw, no secret)
    examples = [row for row in read_rows(folder.completions) if row["index"] in shown]
    model = planned(data, root)
    facts, findings = _facts(data, model, sample), [asdict(each) for each in off_plan(data, model)]
    missing = len(sample) - facts["done"] - sum(facts["failed"].values())
    lines = [f"- MISSING: {missing:,} rows, more long ones than short: real answers are longer"] * bool(missing)
    named = {name: name.replace("_per_s", "/s").removesuffix("_s").replace("_", " ") for name in facts}
    lines += [f"- {named[name]}: {_shown(name, value)}" for name, value in facts.items()]
    lines += [f"- FINDING, {each['kind']}: {each['evidence']} Change: {each['change']}" for each in findings]
    note = "In brackets: 95 % of the chance. A rate is told at what was in flight, and extrapolated to all slots."
    title = f"# {labelled(f'Pilot of run {folder.name}', data.engine)}"
    page = "\n".join((title, "", *lines, "", note, "", *map(_example, examples)))
    with disk(f"make the folder {folder.report}", "Move away what is there."):
        folder.report.mkdir(parents=True, exist_ok=True)
    write_json(folder.report / "pilot.json", {**facts, "findings": findings, "examples": examples})
    write_atomic(folder.report / "pilot.md", page.encode("utf-8", "replace"))
    return page, missing


def _facts(data: RunData, model: Planned | None, sample: Sequence[int]) -> dict[str, Any]:
    """What is told, by names with units."""
    rows, drawn = data.rows[data.rows["index"].isin(sample)], set(sample)
    tokens, cut = rows["completion_tokens"].dropna().astype(int), rows["finish_reason"] == "length"
    lengths = lengths_of(Counter(tokens.tolist()))
    rate, in_flight = _rate(data)
    slots = data.slots or sum(each.limit or 0 for each in data.watched)
    one = [model.tok_per_s(number / max(1, len(data.watched))) for number in (in_flight, slots)] if model else []
    full = _at_full(rate, max(1.0, slots / max(in_flight, 1e-9)), one)
    flying = np.zeros(min(slots, data.missing))
    many = len(tokens) > 1  # of one answer nobody knows how it differs from others
    eta = full and time_left(lengths, rows_left=data.missing - len(flying), ages=flying, rate=full)
    facts: dict[str, Any] = {
        "sample": len(sample), "done": len(rows),
        "failed": dict(Counter(row["kind"] for row in data.failures if row["index"] in drawn)),
        "mean_tokens": _told(lengths.mean if lengths else None, many),
        **{f"{name}_tokens": float(tokens.quantile(q)) if len(tokens) else None
           for name, q in (("median", 0.5), ("p95", 0.95))},
        "cut_for_length_share": float(cut.mean()) if len(rows) else None,
        "in_flight": in_flight, "tok_per_s": _told(rate, many), "slots": slots,
        "tok_per_s_with_all_slots": _told(full, many), "rows_left": data.missing, "time_left_s": _told(eta, many),
    }  # fmt: skip
    if model and data.watched:
        facts |= {"planned_mean_tokens": (mean := model.setting.workload.completion.mean),
                  "planned_tok_per_s": (full_rate := one[1] * len(data.watched)),
                  "planned_time_left_s": data.missing * mean / full_rate}  # fmt: skip
    return facts


def _rate(data: RunData) -> tuple[Estimate | None, float]:
    """Tokens/s of all servers in the steady window, and the requests in flight in it."""
    found, rows = steady(replace(data, missing=0)), data.rows  # what is missing is not in flight: nothing is
    if not found.decoded > 0:
        return None, 0.0
    held_s = rows["finished_at"].clip(upper=found.end) - rows["submitted_at"].clip(lower=found.start)
    rate = Estimate(value=found.decoded, error=_ERROR * found.decoded)
    return rate, float(held_s.clip(lower=0.0).sum() / (found.end - found.start))


def _at_full(rate: Estimate | None, room: float, planned_rates: Sequence[float]) -> Estimate | None:
    """The rate with `room` times as many in flight: more make more tokens, but never in proportion."""
    if rate is None or room < _MORE:
        return rate
    factor = min(room, planned_rates[1] / planned_rates[0]) if planned_rates else (1 + room) / 2
    grown = (_PLANNED if planned_rates else _GUESSED) * (factor - 1) * rate.value
    return Estimate(value=factor * rate.value, error=hypot(factor * rate.error, grown))


def _told(found: Estimate | None, many: bool) -> dict[str, float | None] | None:
    low, high = found.interval if found and many else (None, None)
    return {"value": found.value, "low": low, "high": high} if found else None


def _shown(name: str, value: Any) -> str:
    """A fact as people read it; failures are counts by kind."""
    form = duration if name.endswith("time_left_s") else text
    if not isinstance(value, Mapping):
        return form(value)
    if "low" in value:
        bounds = f" [{form(value['low'])} to {form(value['high'])}]"
        return form(value["value"]) + bounds * (value["low"] is not None)
    return ", ".join(f"{kind} {number:,}" for kind, number in value.items()) or "none"


def _example(row: Mapping[str, Any]) -> str:
    """One row in full, as Markdown: each text in a fence that is longer than any in it."""
    thought, answer = split_thought(row["text"])
    said = [(each["role"], str(each.get("content"))) for each in row["messages"]]
    said += [("thought", thought)] * bool(thought) + [("answer", answer)]
    tokens = f"{text(row['prompt_tokens'])} + {text(row['completion_tokens'])} tokens, ended by {row['finish_reason']}"
    fences = ["`" * max([3, *(len(run) + 1 for run in re.findall("`+", words))]) for _, words in said]
    parts = [f"{who}:\n\n{fence}\n{words}\n{fence}\n" for (who, words), fence in zip(said, fences, strict=True)]
    return "\n".join((f"## {row['id']} (index {row['index']}): {tokens}\n", *parts))
