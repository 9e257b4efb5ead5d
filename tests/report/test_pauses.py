"""The time in which no process of a run ran is no time of its rates, costs and figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfexp import figures, report
from dfexp.layout import RunFolder
from dfexp.params import ReportGroup
from dfexp.report import RunData, details, overview, series
from dfexp.report.pauses import pauses, without
from tests.finished_run import START, row, write_run
from tests.report.simulated_run import played, spec_of

NIGHT = 8 * 3600.0


def started(at: Any) -> dict[str, Any]:
    return {"at": at, "event": "run_started", "server": None}


def twice(root: Path, gap: float, *, sampled: bool = True) -> RunFolder:
    """The same 1,500 rows in two starts; the last answer of the first is `gap` before the second."""
    rows, samples = played("after", 1500)
    samples = samples if sampled else []
    length = max(each.submitted_at + each.latency_s for each in rows) - START
    more = [replace(each, index=each.index + 1500, submitted_at=each.submitted_at + length + gap) for each in rows]
    events = [started(START - 1), started(START + length + gap)]
    looks = [*samples, *({**each, "at": each["at"] + length + gap} for each in samples)]
    return write_run(
        root, [*rows, *more], asked=3000, name=f"gap{gap:.0f}", samples=looks, events=events, rows_per_shard=500,
        **spec_of("after", prompts=3000),
    )  # fmt: skip


def values(data: RunData) -> dict[str, Any]:
    return {line["what"]: line["value"] for line in report.summary(data).rows}


@pytest.mark.parametrize("sampled", [True, False])
def test_a_run_that_went_on_days_later_costs_what_one_without_a_pause_does(tmp_path: Path, sampled: bool) -> None:
    whole, paused = (report.load(twice(tmp_path, gap, sampled=sampled)) for gap in (0.0, 48 * 3600.0))
    assert (whole.stopped, paused.stopped) == ("", "stopped in between: 2 d 00 h")
    first, second = values(whole), values(paused)
    for what in (
        "running time", "GPU-hours", "GPU-hours per million tokens", "slots occupied", "decoded, fleet",
        "client rate, same time", "busy time",
    ):  # fmt: skip
        assert second[what] == pytest.approx(first[what], rel=1e-3), what
    for ours, theirs in zip(details.slots(paused).rows, details.slots(whole).rows, strict=True):
        assert [*ours.values()][1:] == pytest.approx([*theirs.values()][1:], rel=1e-3)
    hours = [overview.plan(data, overview.planned(data, tmp_path)).rows[-1] for data in (whole, paused)]
    assert hours[1]["measured"] == pytest.approx(hours[0]["measured"], rel=1e-3)
    (told,) = [line for line in report.summary(paused).rows if line["what"] == "running time"]
    assert "stopped in between: 2 d 00 h, left out" in told["how it is measured"]
    (cost,) = [line for line in report.summary(paused).rows if line["what"] == "GPU-hours"]
    assert "nor servers that stayed up while it was stopped" in cost["how it is measured"]
    assert "stopped in" not in str(report.summary(whole).rows)
    assert details.events(paused).rows[0]["last"].startswith("2027-01-17"), "times of events are those of the wall"


def test_figures_have_bins_of_running_time_and_mark_where_it_was_stopped(tmp_path: Path) -> None:
    data = report.load(twice(tmp_path, 48 * 3600.0))
    charts = [figures.throughput(data), figures.gap(data), figures.in_flight(data), figures.usages(data)]
    widths = set()
    for chart in charts:
        assert chart is not None
        axis, title = chart.figure.layout.xaxis, chart.figure.layout.title
        assert axis.range == pytest.approx((0, (data.ended - data.began) / 60))
        assert axis.title.text == "time since the first request, without stops (min)"
        (mark,) = [shape for shape in chart.figure.layout.shapes if shape.x0 == shape.x1]
        assert mark.x0 == pytest.approx((data.ended - data.began) / 120, rel=0.01)
        assert (mark.name, mark.showlegend) == ("stopped in between: 2 d 00 h", True)
        widths |= {words for words in ("2 min 00 s", "1 min 00 s") if words in title.subtitle.text}
    assert widths == {"2 min 00 s"}, "one width in all of them"
    assert max(series.throughput(data)["width_s"]) <= 180
    rates, (end,) = series.rates(data), data.running(data.gaps[:, 0]) - data.began
    late = rates[(rates["start_s"] > end + 600) & (rates["start_s"] < end + 1200)]
    assert late["server"].to_numpy() == pytest.approx(2 * 1140, rel=0.1), "counters go on in the time of the rows"


def test_a_pause_is_named_once_in_the_panels_of_gpus(tmp_path: Path) -> None:
    rows = [row(i, submitted_at=START + i + NIGHT * (i > 50)) for i in range(100)]
    looks = [{"gpu": 0, "at": each.submitted_at, "utilization": 0.5, "power_w": 300} for each in rows]
    events = [started(START), started(START + NIGHT + 51)]
    chart = figures.gpus(report.load(write_run(tmp_path, rows, samples=looks, events=events, rows_per_shard=100)))
    assert chart is not None
    assert [mark.showlegend for mark in chart.figure.layout.shapes] == [True, False, False]
    assert {mark.name for mark in chart.figure.layout.shapes} == {"stopped in between: 7 h 59 min"}


def test_a_clock_that_jumps_a_day_is_a_pause_and_so_is_one_stray_time(tmp_path: Path) -> None:
    rows = [row(i, latency_s=20.0, submitted_at=START + i + 86_400 * (i > 150)) for i in range(300)]
    jumped = values(report.load(write_run(tmp_path, rows, name="jumped", rows_per_shard=100)))
    assert jumped["running time"] == pytest.approx(338, abs=2)
    stray = [row(i, latency_s=20.0, submitted_at=3.0 if i == 5 else START + i) for i in range(300)]
    assert values(report.load(write_run(tmp_path, stray, name="stray", rows_per_shard=100)))[
        "running time"
    ] == pytest.approx(339)


def test_a_run_that_waits_for_its_servers_runs(tmp_path: Path) -> None:
    """All servers are down for a night: that is what the run cost. Where it was killed first, it is not."""
    rows = [row(i, submitted_at=START + i + NIGHT * (i > 50)) for i in range(100)]
    down = {"at": START + 52.5, "event": "server_down", "server": "127.0.0.1:8080"}
    back = {"at": START + NIGHT + 51, "event": "server_back", "server": "127.0.0.1:8080"}
    waited = report.load(write_run(tmp_path, rows, name="waited", events=[started(START), down, back]))
    assert waited.ended - waited.began == pytest.approx(NIGHT + 101)
    killed = report.load(write_run(tmp_path, rows, name="killed", events=[started(START), down, started(back["at"])]))
    assert killed.ended - killed.began == pytest.approx(100, abs=3)
    later = [replace(each, submitted_at=each.submitted_at + NIGHT * (each.index > 75)) for each in rows]
    jumped = report.load(write_run(tmp_path, later, name="jumped", events=[started(START), down, started(back["at"])]))
    assert jumped.ended - jumped.began == pytest.approx(100, abs=5), "the new start knows of no server that is down"


def test_only_what_lies_between_rows_samples_and_events_is_a_pause(tmp_path: Path) -> None:
    """A start after 30 s is a pause of 30 s; without a start, 30 s without anything are none."""
    rows = [row(i, submitted_at=START + i + 30 * (i > 50)) for i in range(100)]
    again = [started(START), {"at": START + 80.9, "event": "servers_differ", "server": None}, started(START + 81.0)]
    assert report.load(write_run(tmp_path, rows, name="again", events=again)).gaps - START == pytest.approx(
        np.array([[52.0, 80.9], [80.9, 81.0]])
    )
    once = write_run(tmp_path, rows, name="once", events=again[:1])
    assert report.load(once).stopped == ""
    empty = report.load(write_run(tmp_path, [], asked=3, name="empty", events=again))
    assert (empty.gaps.shape, pauses(empty.rows, (empty.samples, empty.gpus), ()).shape) == ((0, 2), (0, 2))


def test_times_in_a_pause_stand_still() -> None:
    gaps = np.array([[10.0, 20.0], [30.0, 35.0]])
    assert without(gaps, [0, 10, 15, 20, 29, 33, 40]).tolist() == [0, 10, 10, 10, 19, 20, 25]
    assert without(np.zeros((0, 2)), [1.0, 2.0]).tolist() == [1, 2]


def test_what_was_steady_before_a_pause_is_a_stretch_of_its_own(tmp_path: Path) -> None:
    """Servers that stayed up count on; the steady state found is within one start."""
    data = report.load(twice(tmp_path, 3600.0))
    found, (end,) = series.steady(data), data.running(data.gaps[:, 0])
    assert found.words == "steady state, found in the servers' samples"
    assert found.end < end or found.start > end
    report.write(data, ReportGroup(), tmp_path)


def test_servers_of_an_earlier_start_are_not_counted_beside_those_of_a_later_one(tmp_path: Path) -> None:
    """Each start launches its servers anew, so that they have other names; the third has nothing left to do."""
    rows, samples = played("after", 1500)
    later = {f"127.0.0.1:{30000 + index}": f"127.0.0.1:{40000 + index}" for index in range(2)}
    shift_s = max(each.submitted_at + each.latency_s for each in rows) + 600.0 - START
    again = [replace(each, index=each.index + 1500, submitted_at=each.submitted_at + shift_s, server=later[each.server])
             for each in rows]  # fmt: skip
    looks = [{**each, "at": each["at"] + shift_s, "server": later[each["server"]]} for each in samples]
    idle = [{**samples[0], "at": START + 3 * shift_s + nth, "server": f"127.0.0.1:{50000 + nth}"} for nth in range(2)]
    events, spec = [started(START - 1), started(START + shift_s - 1)], spec_of("after")
    once = report.load(write_run(tmp_path, rows, name="once", samples=samples, events=events[:1], **spec))
    twice_ = report.load(write_run(tmp_path, [*rows, *again], name="two", samples=[*samples, *looks], events=events,
                                   rows_per_shard=500, **spec))  # fmt: skip
    events.append(started(START + 3 * shift_s - 1))
    thrice = report.load(write_run(tmp_path, [*rows, *again], name="three", samples=[*samples, *looks, *idle],
                                   events=events, rows_per_shard=500, **spec))  # fmt: skip
    first, second, third = (values(data) for data in (once, twice_, thrice))
    assert second == pytest.approx(third, nan_ok=True), "a start that made no row changes nothing"
    assert twice_.stopped == thrice.stopped == "stopped in between: 9 min 59 s"
    for what in ("servers", "request cap", "slots occupied", "decoded, fleet", "decoded, each GPU", "running"):
        assert second[what] == pytest.approx(first[what], rel=0.01), what
    assert second["GPU-hours"] == pytest.approx(2 * first["GPU-hours"], rel=0.01)
    for data in (twice_, thrice):
        assert (data.slots, len(details.per_server(data).rows)) == (144, 4)
        assert details.findings(data, None).rows[0]["evidence"].startswith("2 of 2 servers, such as 127.0.0.1:4000")
        rates, said = series.rates(data), series.gauges(data)
        assert rates["server"].notna().all(), "what is gone is not silent"
        assert said["num_running_reqs"].max() <= 128
        chart = figures.in_flight(data)
        assert chart is not None
        assert [mark.name for mark in chart.figure.layout.shapes] == ["144 at once (cap)", data.stopped]
