from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dfexp import params, planview
from dfexp.planview import View
from dfexp.records import ServerLimits

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def shown() -> View:
    found = planview.view(params.load(ROOT / "params" / "expansion_v1.yaml"), ROOT)
    assert found is not None
    return found


def test_a_run_without_a_plan_shows_nothing_and_says_so() -> None:
    found = planview.view(params.load(ROOT / "params" / "demo.yaml"), ROOT)
    assert found is None
    assert "no `plan` group" in planview.conclusion(found)


def test_the_parts_of_a_gpu_add_up_to_its_memory(shown: View) -> None:
    chart = planview.memory(shown)
    before, after, best = chart.figure.data
    assert [sum(bars.y) for bars in (before, after, best)] == pytest.approx([94.8] * 3, abs=0.1)
    assert after.y[2] < best.y[2]  # fewer slots, more KV


def test_a_plan_slower_than_the_present_flags_is_not_drawn_as_the_best(shown: View) -> None:
    slower = tuple(replace(item, hours=1e6) for item in shown.plan.ranked)
    assert list(replace(shown, plan=replace(shown.plan, ranked=slower)).settings()) == ["before", "after"]


def test_usages_rise_to_the_cap_and_stay(shown: View) -> None:
    chart = planview.usages(shown)
    kv = {line.name: list(line.y) for line in chart.figure.data}
    assert sorted(kv) == [
        f"{pool}, {name}" for pool in ("KV pool", "state pool") for name in ("after", "before", "best")
    ]
    assert kv["KV pool, after"] == sorted(kv["KV pool, after"])
    assert kv["KV pool, after"][-1] == pytest.approx(72 * 1849 / 289_354, rel=0.01)
    assert kv["state pool, best"][-1] == 1.0
    assert {note.text for note in chart.figure.layout.annotations} >= {"cap 37 (before)", "cap 72 (after)"}


def test_measured_points_lie_on_the_predicted_curve(shown: View) -> None:
    chart = planview.throughput(shown)
    lines = {line.name: line for line in chart.figure.data}
    assert list(lines["measured"].x) == [32, 64]
    after = dict(zip(lines["predicted, after"].x, lines["predicted, after"].y, strict=True))
    near = min(after, key=lambda at: abs(at - 64))
    assert after[near] == pytest.approx(1180, rel=0.05)


def test_the_tables_hold_flags_to_paste_and_both_settings(shown: View) -> None:
    ranked, changing, variants = planview.ranked(shown), planview.changing(shown), planview.variants(shown)
    assert ranked.rows[0][""] == "now"
    assert "--disable-radix-cache" in str(ranked.rows[1]["flags"])
    assert [row["cap"] for row in variants.rows] == [37, 72]
    assert [row[""] for row in changing.rows] == ["weights", "kv_cache_dtype", "mamba_ssm_dtype"]
    assert all("<table" in table._repr_html_() for table in (ranked, changing, variants))


def test_a_file_without_variants_shows_the_present_flags(shown: View) -> None:
    alone = replace(shown, prepared=replace(shown.prepared, variants={}))
    chart = planview.throughput(alone)
    assert [line.name for line in chart.figure.data] == ["predicted, now", "predicted, best"]
    assert planview.variants(alone).rows == []


def test_real_limits_stand_beside_the_predicted(shown: View) -> None:
    class Status:
        name = "127.0.0.1:30000"
        limits = ServerLimits(max_running_requests=71, max_total_num_tokens=289_000)

    table = planview.beside(shown, [Status()])  # type: ignore[list-item]
    assert table is not None
    assert (table.rows[0]["cap, predicted"], table.rows[0]["cap, actual"]) == (72, 71)


def test_the_conclusion_says_now_best_and_flags(shown: View) -> None:
    text = planview.conclusion(shown)
    assert "64 requests a server" in text
    assert "--disable-radix-cache" in text


def test_charts_show_in_notebook_and_page(shown: View) -> None:
    for draw in (planview.memory, planview.usages, planview.throughput):
        chart = draw(shown)
        bundle = chart._repr_mimebundle_()
        assert "plotly" in bundle["text/html"]
        assert "capacity model" in str(bundle["application/vnd.plotly.v1+json"])
