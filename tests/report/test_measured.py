"""What a report says of runs with samples, whose truth the scheduler's model knows; on real and on simulated time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dfexp import control, figures, report
from dfexp.jsonl import AppendLog
from dfexp.params import BaselinePart, ReportGroup
from dfexp.processes import ProcessId
from dfexp.report import RunData, details, overview, series
from dfexp.tables import Table
from dfexp.virtual_time import CLOCK
from tests.finished_run import START, row, status, write_run
from tests.report.simulated_run import write


def values(table: Table) -> dict[str, Any]:
    return {line["what"]: line["value"] for line in table.rows}


def kinds(data: RunData, root: Path) -> list[str]:
    return [line["finding"] for line in details.findings(data, overview.planned(data, root)).rows]


def test_rates_of_the_steady_state_reconcile_and_are_those_of_the_plan(tmp_path: Path) -> None:
    data = report.load(write(tmp_path, "after"))
    found = series.steady(data)
    assert found.words == "steady state, found in the servers' samples"
    assert data.began + 100 < found.start < found.end < data.ended - 100, "neither ramp nor tail"
    assert abs(found.unexplained) < 0.02 * found.decoded
    assert found.client + found.in_flight + found.unexplained == pytest.approx(found.server)
    summary, plan = values(report.summary(data)), overview.plan(data, overview.planned(data, tmp_path))
    assert summary["decoded, each GPU"] * 2 == pytest.approx(summary["decoded, fleet"])
    assert (summary["running"], summary["request cap"], summary["queued"]) == (64, 72, 0)
    ratios = {line["what"]: line["ratio"] for line in plan.rows}
    assert [ratios[what] for what in ("decoded", "running", "KV usage", "state usage")] == pytest.approx(
        [1] * 4, rel=0.05
    )


def test_what_limits_the_run_is_found_over_the_whole_of_it(tmp_path: Path) -> None:
    data = report.load(write(tmp_path, "after"))
    first, second = details.findings(data, overview.planned(data, tmp_path)).rows[:2]
    assert (first["finding"], first["of"], first["change"]) == (
        "client-limited",
        "the fleet",
        "generation.concurrency: 72",
    )
    assert (second["finding"], second["of"]) == ("request-cap", "127.0.0.1:30000 and 1 more"), "told once for both"


def test_before_and_after_stand_side_by_side_and_are_compared_like_with_like(tmp_path: Path) -> None:
    write(tmp_path, "before")
    data = report.load(write(tmp_path, "after"))
    others = report.compared(data, ["before", "nowhere"], tmp_path)
    table = overview.comparison(data, others)
    rate = next(line for line in table.rows if line["what"] == "decoded, fleet")
    assert rate["last / first"] == rate["after"] / rate["before"] == pytest.approx(1.74, abs=0.05)
    assert "mamba_strategy: extra_buffer, no_buffer" in table.note
    assert "There is no run nowhere" in table.note
    chart = figures.compared(data, others)
    assert chart is not None
    assert [line.name for line in chart.figure.data] == ["before", "after"]
    assert figures.compared(data, report.compared(data, "nowhere", tmp_path)) is None


def test_baselines_have_a_verdict(tmp_path: Path) -> None:
    write(tmp_path, "before")
    data = report.load(write(tmp_path, "after"))
    parts = [
        BaselinePart(name="node", tok_per_s=9_000.0, expected_fraction=0.25, hardware="eight of them"),
        BaselinePart(name="better node", tok_per_s=9_200.0, expected_fraction=0.26),
        BaselinePart(run="before"), BaselinePart(run="outputs/before", expected_fraction=1.7), BaselinePart(run="gone"),
    ]  # fmt: skip
    lines = overview.baselines(data, parts, tmp_path).rows
    assert [line["verdict"] for line in lines] == [
        "met", "not met", "-", "met", "there is no run 'gone': correct report.baselines",
    ]  # fmt: skip
    assert lines[0]["share"] == pytest.approx(series.steady(data).decoded / 9_000)
    assert lines[2]["its tokens/s"] == lines[3]["its tokens/s"] == pytest.approx(1_320, rel=0.03)


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ({"prompts": 1500}, []),
        ({"prompts": 1200}, ["token budget off plan"]),
        ({"prompts": 1500, "completion": {"median": 2100, "sigma": 0.3}},
         ["completion tokens, mean off plan", "token budget off plan"]),
        ({"prompts": 2200, "completion": {"median": 4000, "sigma": 0.3}},
         ["completion tokens, mean off plan", "token budget off plan"]),
    ],
)  # fmt: skip
def test_a_mean_length_or_a_budget_off_the_plan_is_a_finding(tmp_path: Path, plan: Any, found: list[str]) -> None:
    assert [
        kind for kind in kinds(report.load(write(tmp_path, "after", **plan)), tmp_path) if "off plan" in kind
    ] == found


def test_a_few_rows_are_no_reason_to_doubt_the_plan(tmp_path: Path) -> None:
    """The first ones are short. Where nothing more is open they are what there is."""
    data = report.load(write(tmp_path, "after", until_s=300))
    assert data.rows["completion_tokens"].mean() < 0.9 * 2766
    assert not any("off plan" in kind for kind in kinds(data, tmp_path))
    stopped = [{"at": START + 301, "event": "stop_asked", "server": None, "in_flight": 0}]
    settled = report.load(write(tmp_path, "after", until_s=120, name="settled", events=stopped))
    assert settled.is_settled
    assert "completion tokens, mean off plan" in kinds(settled, tmp_path)


def test_simulated_time_is_told_by_the_fleets_clock_and_changes_no_number(tmp_path: Path) -> None:
    """The clock runs ten times as fast as the real one, and begins at 500."""
    real = report.load(write(tmp_path, "after", name="real"))
    folder = write(tmp_path, "after", name="fast", engine="simulated")
    fleet = folder.path.parent / "fleets" / "fast"
    fleet.mkdir(parents=True)
    lines = [{"real_at": START, "virtual_s": 500.0}, {"real_at": START + 10_000, "virtual_s": 100_500.0}]
    (fleet / CLOCK).write_text("".join(json.dumps(line) + "\n" for line in lines))
    fast = report.load(folder)
    assert fast.began == pytest.approx(500.0)
    assert fast.ended - fast.began == pytest.approx(10 * (real.ended - real.began))
    first, second = values(report.summary(real)), values(report.summary(fast))
    for what in ("wall time", "latency, median", "latency, 95th percentile", "GPU-hours"):
        assert second[what] == pytest.approx(10 * first[what], rel=1e-6)
    assert second["decoded, fleet"] == pytest.approx(first["decoded, fleet"] / 10, rel=1e-3)
    assert second["slots occupied"] == pytest.approx(first["slots occupied"], rel=1e-6)
    assert "all times are simulated" in report.summary(fast).note
    assert "simulated time" in figures.throughput(fast).figure.layout.xaxis.title.text
    assert "simulated" not in figures.throughput(real).figure.layout.xaxis.title.text


def test_of_a_run_that_goes_on_only_the_servers_are_known_to_the_end(tmp_path: Path) -> None:
    folder = write(tmp_path, "after", until_s=1000)
    me = ProcessId.current()
    mean = {"value": 2800.0, "low": 2700.0, "high": 2900.0}
    told = status(pid=me.pid, process_started=me.started, servers=[], pending=600, eta_s=3600.0, eta_low_s=3000.0,
                  eta_high_s=4200.0, mean_completion_tokens=mean)  # fmt: skip
    control.write_status(folder, told)
    data = report.load(folder)
    assert data.is_going
    assert (overview.mean_tokens(data)[0], overview.time_left(data)[0]) == (2800.0, 3600.0)
    assert "50 min 00 s to 1 h 10 min" in overview.time_left(data)[2]
    rates = series.rates(data)
    known = rates["start_s"] + rates["width_s"] <= series.known_until(data) - data.began
    assert 3 < known.sum() < len(known) - 3
    assert rates.loc[known, "client"].notna().all()
    assert rates.loc[~known, "client"].isna().all()
    assert rates["server"].tolist()[1:-1] == pytest.approx([2 * 1140] * (len(rates) - 2), rel=0.1)
    assert list(series.occupied(data)["part"]) == ["start", "middle"], "nothing is a tail yet"


def test_slots_of_start_middle_and_tail(tmp_path: Path) -> None:
    """Ten requests begin one after the other, all work for a while, and one goes on alone."""
    rows = [row(i, submitted_at=START + i, latency_s=100 - i + (20 if i == 9 else 0), server="a") for i in range(10)]
    folder = write_run(tmp_path, rows)
    control.write_status(folder, status("ended", servers=[{"name": "a", "state": "ready", "cap": 16, "limit": 16}]))
    table = details.slots(report.load(folder)).rows
    assert [line["part"] for line in table] == ["start", "middle", "end"]
    assert [line["seconds"] for line in table] == pytest.approx([8, 92, 20])
    assert [line["occupied"] for line in table] == pytest.approx([36 / 8 / 16, (9 + 91 * 10) / 92 / 16, 1 / 16])
    assert table[2]["idle server-hours"] == pytest.approx(20 * 15 / 16 / 3600)


def test_every_figure_of_a_run_with_samples_is_drawn(tmp_path: Path) -> None:
    data = report.load(write(tmp_path, "after"))
    both = figures.usages(data), figures.usages_by_running(data), figures.gap(data), figures.in_flight(data)
    assert None not in both
    over_time, by_running, gap, in_flight = (chart.figure for chart in both if chart is not None)
    assert (
        [line.name for line in over_time.data]
        == [cloud.name for cloud in by_running.data]
        == ["KV usage", "state usage"]
    )
    at_64 = {round(float(y), 2) for x, y in zip(by_running.data[1].x, by_running.data[1].y, strict=True) if x == 64}
    assert at_64 <= {0.58, 0.59}
    assert [part.name for part in gap.data] == [
        "finished (client)",
        "growth in flight",
        "unexplained",
        "decoded (servers)",
    ]
    middle = len(gap.data[3].y) // 2
    assert sum(part.y[middle] for part in gap.data[:3]) == pytest.approx(gap.data[3].y[middle])
    assert [line.name for line in in_flight.data] == ["in flight (client)", "running (servers)", "queued (servers)"]
    assert in_flight.data[0].y[middle] == pytest.approx(128, abs=0.5)
    assert in_flight.data[1].y[middle] == pytest.approx(128, abs=0.5)


def test_events_stand_on_the_axis_of_time_under_their_names(tmp_path: Path) -> None:
    happened = [
        {"at": START + 3, "event": "server_down", "server": "b"},
        {"at": START + 4, "event": "shard_sealed", "server": None},
        {"at": START + 7, "event": "finding", "server": None, "kind": "stalled"},
    ]  # fmt: skip
    data = report.load(write_run(tmp_path, [row(i) for i in range(9)], events=happened))
    chart = figures.events(data)
    assert chart is not None
    assert {(mark.name, *mark.x, *mark.y) for mark in chart.figure.data} == {
        ("b", 3.0, "server_down"), ("the run", 7.0, "finding: stalled"),
    }  # fmt: skip
    assert "Told while it ran: stalled 1" in details.findings(data, None).note
    assert details.events(data).rows[0]["first"] == "2027-01-15 08:00:03"


def test_gpus_are_told_and_a_torn_last_sample_is_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [row(i) for i in range(4)])
    gpu = {"gpu": 0, "uuid": "u", "at": START, "memory_used_bytes": 2**30, "sm_clock_mhz": 1500}
    with AppendLog(folder.metrics) as log:
        log.append([{**gpu, "utilization": 0.5, "power_w": 300, "throttle_reasons": []},
                    {**gpu, "utilization": 1.0, "power_w": 500, "throttle_reasons": ["power"]}])  # fmt: skip
    with folder.metrics.open("ab") as file:
        file.write(b'{"at": 1800000001.0, "server": "127.0.0.1:8080", "num_runn')
    found = values(report.summary(report.load(folder)))
    assert (found["GPU utilisation, mean"], found["GPU power, mean"], found["GPU throttled"]) == (0.75, 400, 0.5)
    assert report.load(folder).samples.empty


def test_a_restarted_server_begins_to_count_again(tmp_path: Path) -> None:
    counts = [*range(0, 20_000, 1000), *range(500, 20_500, 1000)]
    samples = [{"at": START + 5 * nth, "server": "127.0.0.1:8080", "num_running_reqs": 10,
                "realtime_decode_tokens_total": count} for nth, count in enumerate(counts)]  # fmt: skip
    rows = [row(i, submitted_at=START + i, latency_s=5, server="127.0.0.1:8080") for i in range(190)]
    data = report.load(write_run(tmp_path, rows, samples=samples))
    rates = series.rates(data)["server"].tolist()
    assert min(rates[1:-1]) > 140, "the tokens between the last look before it and the restart are lost"
    assert rates[1:7] == rates[11:17] == pytest.approx([200] * 6, rel=0.01)


def test_all_tables_are_written_once_under_their_names(tmp_path: Path) -> None:
    data = report.load(write(tmp_path, "after"))
    made = report.write(data, ReportGroup(), tmp_path)
    files = sorted(path.name for path in data.folder.report.iterdir())
    names = [*made, "throughput", "rates", "in_flight", "gauges"]
    assert files == sorted(f"{name}.{suffix}" for name in names for suffix in ("csv", "json"))
    summary = json.loads((data.folder.report / "summary.json").read_text())
    assert {line["what"]: line["value"] for line in summary}["running"] == 64
