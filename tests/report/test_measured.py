"""What a report says of runs with samples, whose truth the scheduler's model knows; on real and on simulated time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dfexp import control, figures, report
from dfexp.jsonl import AppendLog
from dfexp.params import BaselinePart, QualityGroup, ReportGroup
from dfexp.processes import ProcessId
from dfexp.report import RunData, answers, details, overview, series
from dfexp.tables import Table
from dfexp.virtual_time import CLOCK
from tests.finished_run import START, row, status, write_run
from tests.report.simulated_run import played, spec_of, write


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


@pytest.mark.parametrize(
    ("which", "number", "running", "cap", "pool", "next_change"),
    [
        ("before", 1500, "32 requests run, 37 can, 0 wait", "generation.concurrency: 37",
         "state pool, 186 slots // 5 a request = 37", "mamba_strategy: no_buffer, disable_radix_cache: true"),
        ("after", 1500, "64 requests run, 72 can, 0 wait", "generation.concurrency: 72",
         "state pool, 216 slots // 3 a request = 72", "disable_radix_cache: true, max_running_requests: 157"),
    ],
)  # fmt: skip
def test_the_reference_run_is_client_limited_and_its_cap_is_the_state_pools(
    tmp_path: Path, which: str, number: int, running: str, cap: str, pool: str, next_change: str
) -> None:
    data = report.load(write(tmp_path, which, number=number))
    lines = report.write(data, ReportGroup(), tmp_path)["findings"].rows
    assert [line["finding"] for line in lines] == ["client-limited", "request-cap"], (
        "and nothing else: no ramp, no fault"
    )
    assert running in lines[0]["evidence"]
    assert (lines[0]["change"], lines[0]["binding"]) == (cap, "yes")
    assert 1.05 < lines[0]["gain"] < 1.2
    assert pool in lines[1]["evidence"]
    assert next_change in lines[1]["change"]
    assert lines[1]["gain"] > 1.5


def test_the_planned_run_is_as_good_as_it_gets(tmp_path: Path) -> None:
    data = report.load(write(tmp_path, "planned", number=3000))
    (line,) = details.findings(data, overview.planned(data, tmp_path)).rows
    assert (line["finding"], line["of"], line["severity"]) == ("bandwidth", "the fleet", "note")
    assert series.steady(data).decoded == pytest.approx(2 * 2000, rel=0.03)
    summary = values(report.summary(data))
    assert (summary["request cap"], summary["running"] > 145) == (157, True)


def test_before_and_after_stand_side_by_side_and_are_compared_like_with_like(tmp_path: Path) -> None:
    write(tmp_path, "before")
    data = report.load(write(tmp_path, "after"))
    others = report.compared(data, ["before", "nowhere"], tmp_path)
    table = overview.comparison(data, others)
    rate = next(line for line in table.rows if line["what"] == "decoded, fleet")
    assert rate["last / first"] == rate["after"] / rate["before"] == pytest.approx(1.74, abs=0.05)
    assert "mamba_strategy: extra_buffer, no_buffer" in table.note
    assert "There is no run 'nowhere': correct report.compare." in table.note
    (source,) = [line for line in table.rows if line["what"] == "decoded is by"]
    assert source["before"] == source["after"] == "the servers' counters"
    chart = figures.compared(data, others)
    assert chart is not None
    by = "by the servers' counters"
    assert [line.name for line in chart.figure.data] == [f"before, {by}", f"after, {by}"]
    source = "Source: outputs of run after, 1,500 completions; run before, 1,500 completions"
    assert [note.text for note in chart.figure.layout.annotations] == [source]
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
    assert {line["this run's is by"] for line in lines} == {"the servers' counters"}
    assert [line["its rate is by"] for line in lines[1:4]] == ["as given", *["the servers' counters"] * 2]
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
    for what in ("running time", "latency, median", "latency, 95th percentile", "GPU-hours"):
        assert second[what] == pytest.approx(10 * first[what], rel=1e-6)
    assert second["decoded, fleet"] == pytest.approx(first["decoded, fleet"] / 10, rel=1e-3)
    assert second["slots occupied"] == pytest.approx(first["slots occupied"], rel=1e-6)
    assert "all times are simulated" in report.summary(fast).note
    charts = figures.throughput(fast), figures.throughput(real)
    assert ["simulated time" in chart.figure.layout.xaxis.title.text for chart in charts if chart] == [True, False]


def test_of_a_run_that_goes_on_only_the_servers_are_known_to_the_end(tmp_path: Path) -> None:
    folder = write(tmp_path, "after", until_s=1000)
    me = ProcessId.current()
    mean = {"value": 2800.0, "low": 2700.0, "high": 2900.0}
    told = status(pid=me.pid, process_started=me.started, servers=[], pending=600, rows_of_later_starts=0,
                  whole_eta_s=3600.0, whole_eta_low_s=3000.0, whole_eta_high_s=4200.0,
                  mean_completion_tokens=mean)  # fmt: skip
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
    assert series.steady(data).end == series.known_until(data), "of what came later nobody knows what was in flight"
    assert series.steady(data).client == pytest.approx(2 * 1140, rel=0.1)
    hours = next(line for line in overview.plan(data, overview.planned(data, tmp_path)).rows if line["unit"] == "h")
    assert hours["measured"] == pytest.approx((data.ended - data.began + 3600) / 3600), "what is left is in it"


def test_the_steady_time_of_all_is_that_in_which_each_was_steady(tmp_path: Path) -> None:
    """The second server came ten minutes after the first."""
    rows, samples = played("after", 1500)
    late_s = {"127.0.0.1:30001": 600.0}
    rows = [replace(each, submitted_at=each.submitted_at + late_s.get(each.server, 0.0)) for each in rows]
    samples = [{**each, "at": each["at"] + late_s.get(each["server"], 0.0)} for each in samples]
    ends = {name: max(each["at"] for each in samples if each["server"] == name) for name in ("127.0.0.1:30000",)}
    folder = write_run(tmp_path, rows, samples=samples, rows_per_shard=500, **spec_of("after", prompts=1500))
    data = report.load(folder)
    found = series.steady(data)
    assert found.words == "steady state, found in the servers' samples"
    assert START + 600 < found.start < found.end < ends["127.0.0.1:30000"]
    assert found.decoded == pytest.approx(2 * 1140, rel=0.05)


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
    (cap,), notes = in_flight.layout.shapes, in_flight.layout.annotations
    assert (cap.y0, cap.name, cap.showlegend) == (144, "144 at once (cap)", True)
    assert [note.text[:7] for note in notes] == ["Source:"], "no words over bars"
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
    assert chart.figure.data[1].customdata[0].tolist() == ["the run", "kind stalled"]
    assert {(mark.name, *mark.x, *mark.y) for mark in chart.figure.data} == {
        ("b", 3.0, "server_down"), ("the run", 7.0, "finding: stalled"),
    }  # fmt: skip
    assert [*chart.figure.layout.yaxis.categoryarray] == ["finding: stalled", "server_down"], "from the bottom up"
    assert "Told while it ran: stalled 1" in details.findings(data, None).note
    assert details.events(data).rows[0]["first"] == "2027-01-15 08:00:03"


def test_gpus_are_told_and_a_torn_last_sample_is_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [row(i) for i in range(4)])
    gpu = {"gpu": 0, "uuid": "u", "at": START, "memory_used_bytes": 2**30, "sm_clock_mhz": 1500}
    with AppendLog(folder.metrics) as log:
        log.append([{**gpu, "utilization": 0.5, "power_w": 300, "throttle_reasons": [], "clock_limits": ["gpu idle"]},
                    {**gpu, "utilization": 1.0, "power_w": 500, "throttle_reasons": ["thermal"], "clock_limits": []},
                    {**gpu, "throttle_reasons": ["gpu idle", "power cap"]}, gpu])  # fmt: skip
    with folder.metrics.open("ab") as file:
        file.write(b'{"at": 1800000001.0, "server": "127.0.0.1:8080", "num_runn')
    found = values(report.summary(report.load(folder)))
    assert (found["GPU utilisation, mean"], found["GPU power, mean"], found["GPU memory in use, mean"]) == (
        0.75,
        400,
        1,
    )
    shares = found["GPU slowed by heat or hardware"], found["GPU at its power cap"]
    assert shares == pytest.approx((1 / 3, 1 / 3)), "of those that say; being idle is neither"
    assert report.load(folder).samples.empty


def test_what_gpus_did_is_drawn_over_time(tmp_path: Path) -> None:
    """Two GPUs for 100 s; one is at its power cap all the time, the other too hot in the second half."""
    rows = [row(i) for i in range(100)]
    folder = write_run(tmp_path, rows)
    assert figures.gpus(report.load(folder)) is None
    looks = [
        {"gpu": gpu, "at": START + at, "utilization": 0.9 + gpu / 10, "memory_used_bytes": (80 + gpu) * 2**30,
         "memory_total_bytes": 96 * 2**30, "power_w": 600 - 100 * gpu, "sm_clock_mhz": 2000 - 500 * gpu * (at >= 50),
         "throttle_reasons": ["thermal"] * (gpu * (at >= 50)), "clock_limits": ["power cap"] * (1 - gpu)}
        for at in range(100) for gpu in (0, 1)
    ]  # fmt: skip
    with AppendLog(folder.metrics) as log:
        log.append(looks)
    data = report.load(folder)
    chart = figures.gpus(data)
    assert chart is not None
    drawn = {line.name: line.y for line in chart.figure.data}
    assert drawn["utilisation, mean"].tolist() == pytest.approx([0.95] * len(drawn["power, mean"]))
    assert (drawn["memory in use, min"][3], drawn["memory in use, max"][3], drawn["power, mean"][3]) == (80, 81, 550)
    assert (drawn["SM clock, mean"][0], drawn["SM clock, mean"][-2]) == (2000, 1750)
    assert (drawn["slowed by heat or hardware"][0], drawn["slowed by heat or hardware"][-2]) == (0, 0.5)
    assert set(drawn["at its power cap"]) == {0.5}
    axes = [axis.title.text.replace("<br>", " ") for axis in chart.figure.select_yaxes()]
    assert axes == ["utilisation (share)", "memory in use (GiB)", "power (W)", "SM clock (MHz)", "samples (share)"]
    assert "first request (s)" in [*chart.figure.select_xaxes()][-1].title.text
    report.write(data, ReportGroup(), tmp_path)
    assert len(json.loads((folder.report / "gpus.json").read_text())) == len(drawn["power, mean"])


def test_a_restarted_server_begins_to_count_again(tmp_path: Path) -> None:
    counts = [*range(0, 20_000, 1000), *range(500, 20_500, 1000)]
    samples = [{"at": START + 5 * nth, "server": "127.0.0.1:8080", "num_running_reqs": 10,
                "realtime_decode_tokens_total": count} for nth, count in enumerate(counts)]  # fmt: skip
    rows = [row(i, submitted_at=START + i, latency_s=5, server="127.0.0.1:8080") for i in range(190)]
    data = report.load(write_run(tmp_path, rows, samples=samples))
    rates = series.rates(data)["server"].tolist()
    assert min(rates[1:-1]) > 140, "the tokens between the last look before it and the restart are lost"
    assert rates[1:7] == rates[11:17] == pytest.approx([200] * 6, rel=0.01)


def test_a_server_that_is_gone_for_good_makes_nothing_and_the_others_are_known(tmp_path: Path) -> None:
    """Both decode 100 tokens/s; one dies after 150 of 400 s, another time it comes back and is only silent."""
    ends = {"a": 400, "b": 150}
    samples = [{"at": START + at, "server": name, "num_running_reqs": 10, "realtime_decode_tokens_total": 100 * at}
               for name, end in ends.items() for at in range(0, end + 1, 5)]  # fmt: skip
    rows = [row(i, submitted_at=START + 2 * i, latency_s=2, server="a", completion_tokens=200) for i in range(200)]
    down = {"at": START + 151, "event": "server_down", "server": "b"}
    gone = report.load(write_run(tmp_path, rows, samples=samples, events=[down], rows_per_shard=100))
    rates = series.rates(gone)["server"].to_numpy()
    places = series.rates(gone)["start_s"]
    assert rates[(places > 0) & (places < 140)] == pytest.approx(200, rel=0.03)
    assert rates[places > 165] == pytest.approx(100, rel=0.03)
    back = down | {"at": START + 160, "event": "server_back"}
    silent = report.load(write_run(tmp_path, rows, name="back", samples=samples, events=[down, back]))
    assert series.rates(silent)["server"][places > 165].isna().all(), "nobody knows what it does"


def test_a_run_whose_servers_rate_is_not_known_yet_tells_the_clients(tmp_path: Path) -> None:
    rows = [row(i, latency_s=100, completion_tokens=1000) for i in range(3)]
    folder, me = write_run(tmp_path, rows, asked=50), ProcessId.current()
    control.write_status(folder, status(pid=me.pid, process_started=me.started, servers=[], whole_eta_s=None))
    data = report.load(folder)
    told = report.conclusion(data, report.write(data, ReportGroup(), tmp_path))
    assert "What the servers make is not known yet." in told
    assert "the client got **29.4 completion tokens/s** (client rate)" in told
    assert figures.gap(data) is None, "no bin of it is known from end to end"


def test_all_tables_are_written_once_under_their_names(tmp_path: Path) -> None:
    data = report.load(write(tmp_path, "after"))
    made = report.write(data, ReportGroup(), tmp_path)
    files = sorted(path.name for path in data.folder.report.iterdir())
    names = [*made, "throughput", "rates", "in_flight", "gauges", "gpus"]
    assert files == sorted(f"{name}.{suffix}" for name in names for suffix in ("csv", "json"))
    summary = json.loads((data.folder.report / "summary.json").read_text())
    assert {line["what"]: line["value"] for line in summary}["running"] == 64


def test_a_slow_server_is_found_by_its_answers_where_it_tells_no_rate(tmp_path: Path) -> None:
    """Three servers with gauges alone keep 10 requests each; those of one take three times as long."""
    slow = {0: 3}
    samples = [{"at": START + at, "server": f"s{nth}", "num_running_reqs": 10, "num_queue_reqs": 0}
               for at in range(0, 600, 5) for nth in range(3)]  # fmt: skip
    times = [(nth, start, 20 * slow.get(nth, 1)) for nth in range(3) for start in range(0, 600, 20 * slow.get(nth, 1))]
    each = [(nth, start, took) for nth, start, took in times for _ in range(10)]
    rows = [row(i, server=f"s{nth}", submitted_at=START + start, latency_s=took, completion_tokens=200)
            for i, (nth, start, took) in enumerate(each)]  # fmt: skip
    data = report.load(write_run(tmp_path, rows, samples=samples, rows_per_shard=500))
    assert [round(each.tok_per_s or 0) for each in data.watched] == [33, 100, 100]
    found = {(line["finding"], line["of"]) for line in details.findings(data, None).rows}
    assert ("slow server", "s0") in found


def without_samples(root: Path, which: str, name: str, engine: str = "sglang") -> RunData:
    """The same rows of a run that nobody sampled."""
    folder = write(root, which, name=name, engine=engine)
    folder.metrics.unlink()
    return report.load(folder)


def test_rates_from_different_sources_are_shown_and_not_compared(tmp_path: Path) -> None:
    write(tmp_path, "before")
    data = without_samples(tmp_path, "after", "bare")
    others = report.compared(data, "before", tmp_path)
    table = overview.comparison(data, others)
    lines = {line["what"]: line for line in table.rows}
    assert lines["decoded is by"]["before"] == "the servers' counters"
    assert lines["decoded is by"]["bare"] == "finished rows and what was in flight"
    assert lines["decoded is of"]["bare"] == "at least 90% of the most requests in flight"
    assert lines["decoded, fleet"]["last / first"] is lines["decoded, each GPU"]["last / first"] is None
    assert lines["client rate"]["last / first"] > 1
    assert "measured by different things, so there is no ratio" in table.note
    parts = [BaselinePart(run="before", expected_fraction=0.1),
             BaselinePart(name="node", tok_per_s=100.0, expected_fraction=0.1)]  # fmt: skip
    for found in (overview.baselines(data, parts, tmp_path), overview.baselines(data, parts, Path("/none"), others)):
        assert (found.rows[0]["share"], found.rows[0]["its rate is by"]) == (None, "the servers' counters")
        assert found.rows[0]["verdict"] == "none: the two rates are measured by different things"
        assert found.rows[1]["verdict"] == "met"
    chart = figures.compared(data, others)
    assert chart is not None
    assert chart.figure.data[1].name == "bare, by finished rows and what was in flight"


def test_a_simulated_run_against_a_real_baseline_says_that_it_is_simulated(tmp_path: Path) -> None:
    folder = write(tmp_path, "after", engine="simulated")
    parts = [BaselinePart(name="node", tok_per_s=9_000.0, expected_fraction=0.25)]
    made = report.write(report.load(folder), ReportGroup(baselines=parts), tmp_path)
    assert (made["baselines"].rows[0]["share"], made["baselines"].rows[0]["verdict"][:5]) == (None, "none:")
    assert "seconds that are not those of the simulation" in made["baselines"].rows[0]["this run's is by"]
    fleet = folder.path.parent / "fleets" / "after"
    fleet.mkdir(parents=True)
    lines = [{"real_at": START, "virtual_s": 0.0}, {"real_at": START + 10_000, "virtual_s": 10_000.0}]
    (fleet / CLOCK).write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = report.load(folder)
    made = report.write(data, ReportGroup(baselines=parts), tmp_path)
    (line,) = made["baselines"].rows
    assert (line["verdict"], line["this run's is by"]) == ("met (simulated)", "the servers' counters (simulated)")
    told = report.conclusion(data, made)
    assert f"{line['share']:.1%} (simulated); what was expected: met (simulated)" in told
    assert "of simulated time with requests in flight" in told


def test_of_one_start_among_several_the_time_left_is_of_all_rows(tmp_path: Path) -> None:
    folder, me = write(tmp_path, "after", until_s=1000), ProcessId.current()
    done = len(report.load(folder).rows)
    whole = {"whole_eta_s": 5000.0, "whole_eta_low_s": 4000.0, "whole_eta_high_s": 6000.0}
    told = status(pid=me.pid, process_started=me.started, servers=[], asked=1500, done=done, failed=0, pending=60,
                  in_flight=100, eta_s=300.0, rows_of_later_starts=1340 - done, **whole)  # fmt: skip
    control.write_status(folder, told)
    left_s, _, words = overview.time_left(report.load(folder))
    assert left_s == 5000, "as the live page has it: one source"
    assert words == (
        "1 h 23 min: as its process says of all rows; at 95 % 1 h 06 min to 1 h 40 min."
        " This start ends before: its own rows take 5 min 00 s"
    )
    mean = {"value": 2800.0, "low": 2700.0, "high": 2900.0}
    control.write_status(folder, {**told, "whole_eta_s": None, "mean_completion_tokens": mean})
    data = report.load(folder)
    left_s, _, words = overview.time_left(data)
    assert left_s == pytest.approx((1500 - done) * 2800 / series.steady(data).decoded)
    assert f"all {1500 - done:,} missing rows" in words


def test_one_sample_of_each_server_makes_no_bin_of_a_day(tmp_path: Path) -> None:
    samples = [{"at": START + 5, "server": f"127.0.0.1:{8080 + nth}", "num_running_reqs": 10} for nth in range(2)]
    data = report.load(write_run(tmp_path, [row(i) for i in range(190)], samples=samples))
    assert series.throughput(data)["width_s"].median() == 5
    assert series.gauges(data)["num_running_reqs"].tolist() == [20]


@pytest.mark.parametrize("seconds", [391, 396, 399, 400, 401, 403])
def test_the_last_bin_is_as_high_as_the_others(tmp_path: Path, seconds: int) -> None:
    """One answer of 10 tokens ends every second, however much of a bin is left at the end."""
    data = report.load(write_run(tmp_path, [row(i, latency_s=1.0) for i in range(seconds)], rows_per_shard=100))
    found = series.throughput(data).groupby("start_s")[["completion_tok_per_s", "rows_per_s"]].sum()
    assert found["completion_tok_per_s"].iloc[-1] == pytest.approx(10, rel=0.11)
    assert series.rates(data)["client"].iloc[-1] == pytest.approx(10, rel=0.11)
    widths = series.rates(data)["width_s"]
    assert widths.iloc[-1] >= widths.iloc[0] / 2


def test_what_happened_after_the_last_answer_is_on_the_axis_and_told(tmp_path: Path) -> None:
    happened = [
        {"at": START + 3, "event": "server_down", "server": "a", "detail": "exit code 137"},
        {"at": START + 900, "event": "server_down", "server": "a", "detail": "no <answer> for 60 s"},
        {"at": START + 950, "event": "run_failed", "server": None, "detail": "no server is left " + "x" * 400},
    ]  # fmt: skip
    data = report.load(write_run(tmp_path, [row(i) for i in range(9)], events=happened))
    chart = figures.events(data)
    assert chart is not None
    (first, last), unit_s = chart.figure.layout.xaxis.range, 1.0
    assert first < 0 < 950 / unit_s < last
    assert chart.figure.data[0].customdata[1].tolist() == ["a", "detail no &lt;answer&gt; for 60 s"]
    assert "%{customdata[1]}" in chart.figure.data[0].hovertemplate
    lines = details.events(data).rows
    assert (lines[0]["times"], lines[0]["said, the last time"]) == (2, "detail no <answer> for 60 s")
    assert lines[1]["said, the last time"].startswith("detail no server is left")
    assert len(lines[1]["said, the last time"]) < 310


def test_sixty_four_servers_stay_readable(tmp_path: Path) -> None:
    """Server 7 makes half as many tokens as the others, server 63 twice as many."""
    tokens = {7: 50, 63: 200}
    rows = [
        row(i, server=f"host:{30000 + i % 64}", completion_tokens=tokens.get(i % 64, 100), submitted_at=START + i // 64)
        for i in range(64 * 60)
    ]
    happened = [{"at": START + i, "event": "server_down", "server": f"host:{30000 + i}"} for i in range(64)]
    happened.append({"at": START + 9, "event": "stop_asked", "server": None, "in_flight": 0})
    data = report.load(write_run(tmp_path, rows, rows_per_shard=500, events=happened))
    chart, marks = figures.throughput(data), figures.events(data)
    assert chart is not None
    assert [line.name for line in chart.figure.data] == ["most: host:30063", "median", "least: host:30007"]
    most, median, least = (line.y[3:-3].mean() for line in chart.figure.data)
    assert (most, median, least) == pytest.approx((200, 100, 50))
    assert "64 servers" in chart.figure.layout.title.subtitle.text
    assert chart.figure.layout.yaxis.title.text.endswith("one server")
    assert marks is not None
    assert [mark.name for mark in marks.figure.data] == ["servers", "the run"]
    assert {each[0] for each in marks.figure.data[0].customdata} == {f"host:{30000 + i}" for i in range(64)}
    for number, parts in ((8, 8), (9, 3)):
        few = [row(i, server=f"s{i % number}") for i in range(64)]
        chart = figures.throughput(report.load(write_run(tmp_path, few, name=f"of_{number}")))
        assert chart is not None
        assert len(chart.figure.data) == parts <= len(figures.PALETTE), (
            "as many as there are colours are shown by themselves"
        )


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ({"tensor_parallel_size": 2, "pp_size": 2, "dp_size": 2}, 16),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 8), ({}, 2),
    ],
)  # fmt: skip
def test_gpus_are_those_that_the_fleet_takes(tmp_path: Path, flags: dict[str, Any], gpus: int) -> None:
    fleet = {"engine": "sglang", "servers": 2, "flags": flags}
    data = report.load(write_run(tmp_path, [row(i) for i in range(4)], fleet=fleet))
    assert data.units == (gpus, "GPU")
    assert values(report.summary(data))["GPU-hours"] == pytest.approx(gpus * 5 / 3600)


def test_a_damaged_run_is_told_as_damaged(tmp_path: Path) -> None:
    folder = write(tmp_path, "before")
    (folder.completions / "completions_000000.jsonl").unlink()
    data = report.load(write(tmp_path, "after"))
    others = report.compared(data, "before", tmp_path)
    note = overview.comparison(data, others).note
    assert "Run 'before' cannot be read:" in note
    assert "completions_000000.jsonl is missing" in note
    verdict = overview.baselines(data, [BaselinePart(run="before")], tmp_path, others).rows[0]["verdict"]
    assert verdict.startswith("run 'before' cannot be read")


NONSENSE = "!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!"


def test_garbage_is_counted_where_rows_are_flagged_and_looked_for_in_a_sample(tmp_path: Path) -> None:
    rows = [row(i, text=NONSENSE, server="a") if i % 10 == 0 else row(i, server="b") for i in range(4000)]
    older = report.load(write_run(tmp_path, rows, rows_per_shard=500))
    (line,) = answers.quality(older, QualityGroup())[0].rows
    assert (line["kind"], line["rows"], line["export"]) == ("garbage", 0, "rejects")
    assert line["in 2,000 judged anew"] == pytest.approx(200, abs=50)
    assert "garbage output" in [line["finding"] for line in details.findings(older, None).rows]
    flagged = [replace(each, flags=("garbage",)) if each.index in (0, 10) else each for each in rows]
    newer = report.load(write_run(tmp_path, flagged, rows_per_shard=500, name="newer"))
    assert answers.quality(newer, QualityGroup())[0].rows[0]["rows"] == 2
    assert [each["index"] for each in report.load(newer.folder, examples=3).examples] == [
        each["index"] for each in report.load(older.folder, examples=3).examples
    ]
