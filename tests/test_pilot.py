"""What a sample tells of the whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dfexp import pilot
from dfexp.jsonl import read_json, write_json
from dfexp.layout import RunFolder
from dfexp.params import validate
from tests.finished_run import failure, row, status, write_run

ASKED = 1000


def folder(root: Path, in_flight: int = 8, **more: Any) -> RunFolder:
    """Forty answers of 10 tokens, `in_flight` at a time for 2 s each, by two servers with 4 slots each."""
    rows = [row(index, submitted_at=1000.0 + 2 * (index // in_flight)) for index in range(40)]
    made = write_run(root, rows, [failure(40), failure(41, "timeout")], asked=ASKED, **more)
    write_json(made.control / "status.json", status("stopped", asked=ASKED))
    return made


def told(root: Path, sample: range, **more: Any) -> tuple[dict[str, Any], str, int]:
    made = folder(root, **more)
    page, missing = pilot.write(made, root, sample, 0)
    assert (made.report / "pilot.md").read_text() == page
    return json.loads((made.report / "pilot.json").read_text()), page, missing


def test_counts_lengths_rate_and_time_left(tmp_path: Path) -> None:
    facts, page, missing = told(tmp_path, range(42))
    assert (facts["sample"], facts["done"], facts["failed"]) == (42, 40, {"prompt_too_long": 1, "timeout": 1})
    assert (missing, facts["rows_left"], facts["cut_for_length_share"]) == (0, ASKED - 42, 0.0)
    assert facts["mean_tokens"] == pytest.approx({"value": 10.0, "low": 10.0, "high": 10.0})
    assert (facts["median_tokens"], facts["p95_tokens"]) == (10.0, 10.0)
    assert (facts["slots"], facts["in_flight"]) == (8, pytest.approx(8.0))
    assert facts["tok_per_s"]["value"] == pytest.approx(40.0)
    assert facts["tok_per_s_with_all_slots"] == facts["tok_per_s"], "the sample filled the servers"
    assert facts["time_left_s"]["value"] == pytest.approx((ASKED - 42) * 10 / 40, rel=0.01)
    assert facts["time_left_s"]["low"] < facts["time_left_s"]["value"] < facts["time_left_s"]["high"]
    assert "- time left: 4 min 00 s [3 min 46 s to 4 min 14 s]" in page


def test_a_sample_that_leaves_slots_free_is_no_measure_of_the_full_rate(tmp_path: Path) -> None:
    facts, _, _ = told(tmp_path, range(42), in_flight=2)
    full, now = facts["tok_per_s_with_all_slots"], facts["tok_per_s"]["value"]
    assert now == pytest.approx(10.0)
    assert full["low"] < 1.2 * now
    assert 3.9 * now < full["high"]
    assert now < full["value"] < 4 * now


def test_rows_of_the_sample_that_are_not_there_are_counted_and_others_do_not_count(tmp_path: Path) -> None:
    facts, page, missing = told(tmp_path, range(30, 60))
    assert "- MISSING: 18 rows, " in page
    assert (facts["done"], facts["failed"], missing) == (10, {"prompt_too_long": 1, "timeout": 1}, 18)


def test_ten_answers_are_shown_in_full_whatever_is_in_them(tmp_path: Path) -> None:
    texts = ["<think>\nhm\n</think>\n\nyes\n````\n# no title\n````", "\u2028plain"]
    made = write_run(tmp_path, [row(index, text=texts[index % 2]) for index in range(20)])
    write_json(made.control / "status.json", status("stopped"))
    page, _ = pilot.write(made, tmp_path, range(20), 0)
    assert page.count("\n## p") == 10
    assert "\nthought:\n\n```\nhm\n```\n" in page
    assert "\nanswer:\n\n`````\nyes\n````\n# no title\n````\n`````\n" in page
    assert "5 + 10 tokens, ended by stop" in page


def test_of_one_answer_there_are_no_bounds(tmp_path: Path) -> None:
    facts, page, missing = told(tmp_path, range(1))
    assert (facts["done"], missing) == (1, 0)
    assert facts["mean_tokens"] == {"value": 10.0, "low": None, "high": None}
    assert facts["time_left_s"]["value"] > 0
    assert facts["time_left_s"]["low"] is facts["tok_per_s"]["high"] is None
    assert "- mean tokens: 10.0\n" in page
    assert "[" not in page.partition("In brackets")[0]


def test_only_answers_of_the_sample_are_shown(tmp_path: Path) -> None:
    made, sample = folder(tmp_path), range(25, 40)
    for seed in range(3):
        pilot.write(made, tmp_path, sample, seed)
        shown = [row["index"] for row in read_json(made.report / "pilot.json")["examples"]]
        assert len(set(shown)) == 10
        assert set(shown) <= set(sample)


def test_nothing_done_is_told_as_not_known(tmp_path: Path) -> None:
    made = write_run(tmp_path, [], [failure(0)], asked=5)
    page, missing = pilot.write(made, tmp_path, [0, 1], 0)
    assert missing == 1
    assert "- time left: -" in page


def test_with_a_plan_it_stands_beside_it_and_leaving_it_is_a_finding(tmp_path: Path) -> None:
    made = folder(tmp_path, in_flight=2)
    recorded = read_json(made.run_json)
    flags = {"mem_fraction_static": 0.9, "mamba_strategy": "no_buffer"}
    fleet = {"engine": "sglang", "model": "/models/Qwen3.6-27B", "servers": 2, "flags": flags}
    plan = {"gpu": "rtx-pro-6000", "prompt": {"tokens": 150}, "completion": {"tokens": 20}, "shared_prefix_share": 0.0}
    spec = validate({"run": "demo", "fleet": fleet, "prompts": {"path": "p.jsonl"}, "plan": plan}, "test")
    write_json(made.run_json, {**recorded, "spec": spec.model_dump()})
    page, _ = pilot.write(made, tmp_path, range(42), 0)
    facts = json.loads((made.report / "pilot.json").read_text())
    assert facts["planned_mean_tokens"] == 20
    assert facts["planned_time_left_s"] == pytest.approx((ASKED - 42) * 20 / facts["planned_tok_per_s"])
    assert 1.0 < facts["tok_per_s_with_all_slots"]["value"] / facts["tok_per_s"]["value"] < 4.0
    assert "completion tokens, mean" in facts["findings"][0]["kind"]
    assert page.count("\n- FINDING, ") == len(facts["findings"]) > 0
