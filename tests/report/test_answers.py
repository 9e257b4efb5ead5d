"""What is odd about a run's answers, under the thresholds of its export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dfexp import export, report
from dfexp.export import Options
from dfexp.params import QualityGroup
from dfexp.records import Completion
from dfexp.report import RunData
from dfexp.report.answers import quality
from dfexp.tables import Table
from tests.finished_run import row, write_run

LOOP = " ".join(f"word{i * i}" for i in range(220)) + " and Let me look at this once more, then. " * 100
MIXED: Sequence[Completion] = [
    *(row(i, completion_tokens=100 + i % 50) for i in range(200)),
    *(row(i, finish_reason="length", flags=("truncated",), completion_tokens=120) for i in range(200, 210)),
    row(210, text="", flags=("empty",), completion_tokens=1),
    row(
        211, text="<think>\nso", finish_reason="length", flags=("unclosed_thought", "truncated"), completion_tokens=140
    ),
    row(212, text=LOOP + "x\0y \u202e<b>", flags=("repetitive", "nul"), completion_tokens=110),
    row(213, completion_tokens=90_000),
    row(214, completion_tokens=None, flags=("no_usage",)),
    row(215, messages=({"role": "assistant", "content": "a"},), completion_tokens=111),
]


def loaded(tmp_path: Path, rows: Sequence[Completion] = MIXED, name: str = "demo") -> RunData:
    return report.load(write_run(tmp_path, rows, rows_per_shard=50, name=name))


def kinds(table: Table) -> dict[str, Any]:
    return {line["kind"]: line for line in table.rows}


def test_kinds_are_counted_with_what_the_export_does(tmp_path: Path) -> None:
    table, shown = quality(loaded(tmp_path), QualityGroup())
    found = kinds(table)
    counts = {kind: (line["rows"], line["in 216 judged anew"], line["export"]) for kind, line in found.items()}
    assert counts == {
        "empty": (1, 1, "rejects"), "repetitive": (1, 1, "rejects"), "unclosed_thought": (1, 1, "rejects"),
        "odd_turns": (None, 1, "rejects"), "truncated": (11, 11, "takes"), "length_outlier": (2, 2, "takes"),
        "earlier_answers": (None, 1, "takes"), "nul": (1, 1, "takes"), "no_usage": (1, 1, "takes"),
    }  # fmt: skip
    assert found["truncated"]["share"] == pytest.approx(11 / 216)
    assert "it would take 212 of these 216" in table.note
    assert "length_outlier: not within 68 to 223 tokens. Not found: garbage, looping," in table.note
    assert {line["kind"] for line in shown.rows} == counts.keys()


def test_the_report_and_the_export_agree_under_any_thresholds(tmp_path: Path) -> None:
    data = loaded(tmp_path)
    for number, group in enumerate((
        QualityGroup(), QualityGroup(reject=["truncated", "length_outlier"], accept=["empty"], max_repeated=0.99),
        QualityGroup(min_tokens=105, max_tokens=130, outlier_sigmas=1.0, reject=["length_outlier"]),
    )):  # fmt: skip
        table, _ = quality(data, group)
        made = export.export(data.folder, tmp_path / str(number) / "a.jsonl", Options(thresholds=group.thresholds))
        assert f"it would take {made.rows['good']} of these 216" in table.note
        assert made.rows["good"] + made.rows["rejected"] == made.rows["done"] == 216
        seen = {kind: line["in 216 judged anew"] for kind, line in kinds(table).items() if line["export"] == "rejects"}
        assert Counter(seen) == made.counts["Rejected"]


def test_rows_of_each_kind_are_shown_whatever_their_order_and_safely(tmp_path: Path) -> None:
    table, shown = quality(loaded(tmp_path), QualityGroup())
    assert shown.rows == quality(loaded(tmp_path, MIXED[::-1], "backward"), QualityGroup())[1].rows
    (nul,) = (line for line in shown.rows if line["kind"] == "nul")
    assert (nul["index"], nul["tokens"], nul["finish reason"]) == (212, 110, "stop")
    assert nul["answer"].startswith("word0 word1 word4")
    assert nul["answer"].endswith("then. x\\x00y \\u202e<b>")
    assert "<b>" not in shown._repr_html_()
    assert max(len(line["answer"]) for line in shown.rows) < 200
    assert [line["index"] for line in shown.rows if line["kind"] == "length_outlier"] == [213, 210]
    assert sum(line["kind"] == "truncated" for line in shown.rows) == 3
    assert table.rows


def test_the_longest_answers_stand_for_lengths_alone(tmp_path: Path) -> None:
    rows = [row(i, flags=("truncated",), finish_reason="length", completion_tokens=100 + i) for i in range(300)]
    _, shown = quality(loaded(tmp_path, rows), QualityGroup(max_tokens=110))
    of = {kind: [line["tokens"] for line in shown.rows if line["kind"] == kind] for kind in ("truncated", "too_long")}
    assert of["too_long"] == [399, 398, 397]
    assert max(of["truncated"]) < 397


def test_a_rare_flag_has_its_rows_shown_though_no_draw_meets_it(tmp_path: Path) -> None:
    rows = [row(i) for i in range(9000)]
    rows[7000] = row(7000, flags=("looping",), text="a rare one")
    for seed in range(3):
        data = report.load(write_run(tmp_path, rows, rows_per_shard=5000, name=f"r{seed}"), seed=seed)
        table, shown = quality(data, QualityGroup())
        assert (kinds(table)["looping"]["rows"], len(data.drawn)) == (1, 2000)
        assert [(line["index"], line["answer"]) for line in shown.rows] == [(7000, "a rare one")]


def test_another_threshold_of_repetition_is_not_what_flags_say(tmp_path: Path) -> None:
    assert kinds(quality(loaded(tmp_path), QualityGroup(max_repeated=0.4))[0])["repetitive"]["rows"] is None


def test_a_run_without_rows_has_no_kinds(tmp_path: Path) -> None:
    table, shown = quality(report.load(write_run(tmp_path, [], asked=3)), QualityGroup())
    assert (table.rows, shown.rows) == ([], [])
    assert "not within" not in table.note
    assert "none" in table._repr_html_()
