"""What a report says of files that are damaged, of counts that are missing, and of runs that were cut off."""

from __future__ import annotations

import json
import warnings
from math import nan
from pathlib import Path
from typing import Any

import pytest

from dfexp import cli, control, figures, pilot, report
from dfexp.errors import CorruptShardError, StorageError
from dfexp.jsonl import read_json, write_json
from dfexp.params import BaselinePart, ReportGroup
from dfexp.report import RunData, details, overview, series
from tests.finished_run import START, failure, row, status, write_run
from tests.report.simulated_run import write

STARTED = {"at": START - 1, "event": "run_started", "server": None}


def values(data: RunData) -> dict[str, Any]:
    return {line["what"]: line["value"] for line in report.summary(data).rows}


def told(data: RunData, **group: Any) -> str:
    return report.conclusion(data, report.write(data, ReportGroup(**group), data.folder.path.parent.parent))


def damage(path: Path, line: int, text: bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:line], text, *lines[line + 1 :]]))


@pytest.mark.parametrize(
    "line",
    [
        b'{"at":1800000100.0,"server":"127.0.0.1:30000","num_runn', b"[1]", b'{"at":null,"server":"127.0.0.1:30000"}',
        b'{"at":1800000100.0,"server":"127.0.0.1:30000","num_running_reqs":"x"}', b'{"at":1800000100.0}',
        b'{"at":1800000100.0,"server":7}', b'{"at":1800000100.0,"server":"127.0.0.1:30000","mamba_usage":[1]}',
    ],
)  # fmt: skip
def test_a_damaged_sample_is_left_out_and_told(tmp_path: Path, line: bytes) -> None:
    folder = write(tmp_path, "after")
    whole = report.load(folder)
    damage(folder.metrics, 50, line)
    data = report.load(folder)
    assert len(data.samples) == len(whole.samples) - 1
    assert data.samples["at"].notna().all()
    assert "1 damaged line(s) of metrics.jsonl are left out." in report.summary(data).note
    assert values(data)["decoded, fleet"] == pytest.approx(values(whole)["decoded, fleet"], rel=0.001)
    assert "damaged" not in report.summary(whole).note


@pytest.mark.parametrize(
    "line", [b'{"at":18000', b"{}", b'{"at":"x","event":"e","server":null}', b'{"at":1.0,"event":"e","server":[1]}']
)
def test_a_damaged_event_is_left_out_and_told(tmp_path: Path, line: bytes) -> None:
    happened = [{"at": START + i, "event": "e", "server": None} for i in range(5)]
    folder = write_run(tmp_path, [row(i) for i in range(5)], events=happened)
    damage(folder.events, 2, line)
    data = report.load(folder)
    assert [one["at"] - START for one in data.events] == [0, 1, 3, 4]
    assert "1 damaged line(s) of events.jsonl are left out." in report.summary(data).note
    assert details.events(data).rows[0]["times"] == 4


def test_a_damaged_row_ends_it_all_the_same(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [row(i) for i in range(5)], rows_per_shard=9)
    damage(folder.completions / "completions_000000.jsonl.partial", 2, b"x")
    with pytest.raises(CorruptShardError, match=r"completions_000000.jsonl.partial:3"):
        report.load(folder)


@pytest.mark.parametrize("every", [1, 2])
def test_tokens_that_nobody_counted_are_not_known_and_never_zero(tmp_path: Path, every: int) -> None:
    """All servers, or one of two, give no counts."""
    rows = [row(i, completion_tokens=10 if i % every else None) for i in range(80)]
    data = report.load(write_run(tmp_path, rows, rows_per_shard=500))
    found, (odd, even) = values(data), (0, 1)
    for what in ("client rate", "decoded, fleet", "client rate, same time", "server-hours per million tokens"):
        assert found[what] == pytest.approx(nan, nan_ok=True), what
    assert (found["completion tokens"], found["client rate, rows"]) == (None, pytest.approx(80 / 81))
    assert f"{80 // every} rows have no count" in next(
        line["how it is measured"] for line in report.summary(data).rows if line["what"] == "completion tokens"
    )
    rates = [line["client tokens/s"] for line in details.per_server(data).rows]
    assert rates[odd] == pytest.approx(nan, nan_ok=True)
    assert rates[even] == pytest.approx(400 / 81 if every == 2 else nan, nan_ok=True)
    assert [each.tok_per_s is None for each in data.watched] == [True, every == 1]
    assert (figures.throughput(data) is None, figures.lengths(data) is None) == (every == 1, every == 1)
    assert "nobody counted tokens" in told(data)
    few = [row(i, completion_tokens=10 if i else None) for i in range(200)]
    known = values(report.load(write_run(tmp_path, few, name="few", rows_per_shard=500)))
    assert (known["completion tokens"], known["client rate"]) == (1990, pytest.approx(1990 / 201)), "one is no matter"


@pytest.mark.parametrize(("prints", "said"), [({}, ""), ({"prompts": "zz", "model": "yy"}, "prompts, model")])
def test_runs_with_other_prompts_or_another_model_are_not_alike(tmp_path: Path, prints: Any, said: str) -> None:
    folder = write_run(tmp_path, [row(i) for i in range(40)], name="older", rows_per_shard=100)
    run = read_json(folder.run_json)
    write_json(folder.run_json, {**run, "fingerprint": {**run["fingerprint"], **prints}})
    data = report.load(write_run(tmp_path, [row(i) for i in range(40)], rows_per_shard=100))
    note = overview.comparison(data, report.compared(data, "older", tmp_path)).note
    assert (f"NOT ALIKE, by their fingerprints: {said}." in note, "NOT ALIKE" in note) == (bool(said), bool(said))


def test_a_killed_run_has_the_length_that_its_process_told_last(tmp_path: Path) -> None:
    folder = write(tmp_path, "after", until_s=400, events=[STARTED])
    bare = report.load(folder)
    assert "biased short" in overview.mean_tokens(bare)[1]
    assert "biased short" in overview.time_left(bare)[2]
    assert "biased short" in overview.plan(bare, overview.planned(bare, tmp_path)).note
    mean = {"value": 2800.0, "low": 2600.0, "high": 3000.0}
    control.write_status(folder, status("running", servers=[], mean_completion_tokens=mean))
    data = report.load(folder)
    assert (data.is_going, overview.mean_tokens(data)[0]) == (False, 2800)
    left_s, _, words = overview.time_left(data)
    assert left_s == pytest.approx(data.missing * 2800 / series.steady(data).decoded)
    assert "2,600 to 3,000 at 95 %" in words
    (budget,) = [line for line in overview.plan(data, overview.planned(data, tmp_path)).rows
                 if line["what"] == "token budget"]  # fmt: skip
    assert budget["measured"] == 1500 * 2800
    control.write_status(folder, status("stopped", servers=[], mean_completion_tokens=mean))
    assert overview.mean_tokens(report.load(folder))[0] == bare.rows["completion_tokens"].mean(), (
        "of a run that drained"
    )


def test_the_last_rows_of_a_long_run_that_was_cut_off_do_not_shorten_its_mean(tmp_path: Path) -> None:
    """Answers of 10 and of 90 s by turns; at the cut the long ones of the last 90 s are missing."""
    rows = [row(i, latency_s=10.0 + 80 * (i % 2), completion_tokens=100 + 800 * (i % 2)) for i in range(400)]
    kept = [each for each in rows if each.submitted_at + each.latency_s <= START + 400]
    data = report.load(write_run(tmp_path, kept, asked=400, rows_per_shard=500, events=[STARTED]))
    mean, how = overview.mean_tokens(data)
    assert data.rows["completion_tokens"].mean() < 465
    assert mean == pytest.approx(500, rel=0.01)
    assert how.endswith("that were sent before the last ones that are open")


@pytest.mark.parametrize(("in_flight", "is_settled"), [(3, True), (4, False)])
def test_a_stop_that_cut_off_what_was_in_flight_is_not_settled(
    tmp_path: Path, in_flight: int, is_settled: bool
) -> None:
    """Three rows ended after it."""
    asked = {"at": START + 9.5, "event": "stop_asked", "server": None, "in_flight": in_flight}
    rows = [row(i) for i in range(11)]
    assert report.load(write_run(tmp_path, rows, asked=99, events=[STARTED, asked])).is_settled is is_settled


def test_dropped_records_are_counted_in_full_and_twenty_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [row(0)])
    run = read_json(folder.run_json)
    dropped = [{"source": "a.jsonl", "line": nth, "reason": "empty", "detail": "x"} for nth in range(100)]
    counts = {"empty": 50_000, "too_long": 7}
    write_json(folder.run_json, run | {"prompts": run["prompts"] | {"dropped": dropped, "dropped_by_reason": counts}})
    table = details.dropped(report.load(folder))
    assert len(table.rows) == 20
    assert table.note.startswith("50,007 in all: empty 50,000, too_long 7.")


def test_names_in_the_conclusion_mean_themselves(tmp_path: Path) -> None:
    data = report.load(write_run(tmp_path, [row(i) for i in range(30)], rows_per_shard=100))
    name = "<script>x</script> *a* [b](c) `d` $e$"
    page = told(data, baselines=[BaselinePart(name=name, tok_per_s=5.0)])
    assert r"&lt;script&gt;x&lt;/script&gt; \*a\* \[b\](c) \`d\` \$e\$:" in page


@pytest.mark.parametrize("failed", [0, 3])
def test_without_rows_nothing_is_drawn_or_told_of_rates(tmp_path: Path, failed: int) -> None:
    failures = [failure(i) for i in range(failed)]
    data = report.load(write_run(tmp_path, [], failures, asked=3, events=[STARTED]))
    drawn = figures.throughput, figures.gap, figures.in_flight, figures.usages, figures.lengths, figures.latencies
    assert [draw(data) for draw in drawn] == [None] * 6
    page = told(data, baselines=[BaselinePart(name="B200", tok_per_s=25_000.0, expected_fraction=0.25)])
    first, last = page.split("\n\n")
    assert first.startswith(f"**0 of 3 rows are done, {failed} failed, {3 - failed} are missing.**")
    assert last.startswith("The tables")


def test_a_file_in_the_place_of_the_reports_folder_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [row(i) for i in range(4)])
    folder.report.write_text("mine")
    data = report.load(folder)
    with pytest.raises(StorageError, match=r"outputs/demo/report: File exists. Move away what is there."):
        report.write(data, ReportGroup(), tmp_path)
    with pytest.raises(StorageError, match="Move away what is there"):
        pilot.write(folder, tmp_path, [0], 0)


def test_samples_of_gpus_alone_warn_of_nothing(tmp_path: Path) -> None:
    looks = [{"gpu": 0, "at": START + i, "utilization": 0.5} for i in range(5)]
    folder = write_run(tmp_path, [row(i) for i in range(4)], samples=looks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (len(report.load(folder).gpus), report.load(folder).samples.empty) == (5, True)


def test_messages_of_any_shape_are_shown(tmp_path: Path) -> None:
    shapes: list[Any] = [{"a": 1}, 5, [{"type": "text", "text": "<b>"}, "plain"], None]
    rows = [row(i, messages=({"role": "user", "content": shape},)) for i, shape in enumerate(shapes)]
    page = report.examples(report.load(write_run(tmp_path, rows))).data
    assert "{&#x27;a&#x27;: 1}" in page
    assert "&lt;b&gt;\nplain" in page


def test_baselines_may_be_thought_of_later_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, "after", name="later")
    before = folder.run_json.read_bytes()
    monkeypatch.chdir(tmp_path)
    node = {"name": "node", "tok_per_s": 9000.0, "expected_fraction": 25}
    for given, said in (
        ("generation.max_tokens=5", "--set generation.max_tokens=5: "),
        (f"report.baselines={json.dumps([node])}", "0.25 for 25 %"),
    ):
        assert cli.main(["report", str(folder.path), "--set", "report.title=x", "--set", given]) != 0
        assert said in capsys.readouterr().err
    node["expected_fraction"] = 0.25
    assert cli.main(["report", str(folder.path), "--set", f"report.baselines={json.dumps([node])}"]) == 0
    (line,) = json.loads((folder.report / "baselines.json").read_text())
    assert (line["baseline"], line["verdict"]) == ("node", "met")
    assert folder.run_json.read_bytes() == before


def test_a_run_too_short_for_a_steady_state_tells_no_medians_and_which_rate_to_quote(tmp_path: Path) -> None:
    """Looks of its first seconds, at which nothing ran yet, are no level of it."""
    looks = [{"at": START + 5 * nth, "server": "127.0.0.1:8080", "num_running_reqs": 0, "num_queue_reqs": 0,
              "max_running_requests": 4} for nth in range(3)]  # fmt: skip
    fleet = {"engine": "llamacpp", "servers": 2, "max_running_requests": 4}
    data = report.load(write_run(tmp_path, [row(i) for i in range(12)], samples=looks, fleet=fleet))
    lines = {line["what"]: line for line in report.summary(data).rows}
    assert (lines["running"]["value"], lines["queued"]["value"]) == pytest.approx((nan, nan), nan_ok=True)
    assert lines["running"]["how it is measured"].endswith("; not told of few in a run without a steady state")
    assert lines["decoded, fleet"]["how it is measured"].endswith("; the sum of the next two"), "of what is told"
    assert "cap" in lines["slots occupied, first to 98 %"]["how it is measured"]
    assert report.summary(data).note.endswith("The rate to quote is 'client rate'.")
    assert data.watched[0].flags == {"max_running_requests": 4}
    assert report.summary(report.load(write(tmp_path, "after"))).note.endswith("The rate to quote is 'decoded, fleet'.")


def test_a_rehearsal_does_not_ask_to_be_gone_on_with_and_says_why_bars_end(tmp_path: Path) -> None:
    asked = {"at": START + 400, "event": "stop_asked", "server": None, "in_flight": 128}
    folder = write(tmp_path, "after", until_s=400, events=[STARTED, asked], name="rehearsals/x")
    data = report.load(folder)
    assert "A rehearsal ends with its hours." in told(data)
    assert "03_generate" not in told(data)
    assert "Run 03_generate again" in told(report.load(write(tmp_path, "after", until_s=400, events=[STARTED, asked])))
    for draw in (figures.in_flight, figures.gap):
        chart = draw(data)
        assert chart is not None
        assert chart.figure.data[0].name.endswith("(client; ends where requests have no row)")
