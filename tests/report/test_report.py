"""Tables and figures against runs whose numbers are known."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dfexp import figures, report
from dfexp.errors import RunError
from dfexp.figures import Chart
from dfexp.layout import RunFolder
from dfexp.params import BaselinePart, ReportGroup
from dfexp.report import RunData, details, series
from dfexp.tables import Table, duration, text
from tests.finished_run import START, failure, row, write_run

DRAWN = (
    figures.throughput, figures.gap, figures.in_flight, figures.usages, figures.usages_by_running, figures.events,
    figures.lengths, figures.latencies,
)  # fmt: skip


def drawn(chart: Chart | None) -> Any:
    """Its figure."""
    assert chart is not None
    return chart.figure


def charts(data: RunData) -> list[Chart]:
    return [chart for draw in DRAWN if (chart := draw(data)) is not None]


def written(data: RunData, **group: Any) -> dict[str, Table]:
    return report.write(data, ReportGroup(**group), data.folder.path.parent.parent)


def values(table: Table) -> dict[str, object]:
    return {str(line["what"]): line["value"] for line in table.rows}


def test_summary_counts_and_rates_over_the_busy_time(tmp_path: Path) -> None:
    # Rows 0..9 keep one or two requests in flight from START to START + 11; then an hour passes; then one more row.
    rows = [row(i) for i in range(10)] + [row(10, submitted_at=START + 3600, completion_tokens=100, attempt=2)]
    events = [{"at": START, "event": "server_down", "server": "127.0.0.1:8081"}]
    folder = write_run(tmp_path, rows, [failure(11)], asked=14, events=events)
    found = values(report.summary(report.load(folder)))
    assert (found["asked"], found["done"], found["failed"], found["missing"]) == (14, 11, 1, 2)
    assert found["running time"] == pytest.approx(3602)
    assert found["busy time"] == pytest.approx(11 + 2)
    assert found["completion tokens"] == 200
    assert found["client rate"] == pytest.approx(200 / 13)
    assert found["in flight, mean"] == pytest.approx(22 / 13)
    assert found["rows sent more than once"] == 1
    assert found["server outages"] == 1


def test_a_simulated_run_says_so_in_title_figures_and_conclusion(tmp_path: Path) -> None:
    real = report.load(write_run(tmp_path, [row(0), row(1)]))
    data = replace(real, run={**real.run, "spec": {**real.run["spec"], "fleet": {"engine": "simulated"}}})
    assert report.summary(data).title == "Run demo (simulated)"
    assert report.summary(data, "Mine").title == "Mine (simulated)"
    assert "not those of simulated time" in report.summary(data).note
    assert "are missing (simulated).**" in report.conclusion(data, written(data))
    for chart in charts(data):
        sources = [note.text for note in chart.figure.layout.annotations if note.text.startswith("Source")]
        assert sources == ["Source: outputs of run demo (simulated), 2 completions"]
    assert "simulated" not in report.summary(real).title + report.summary(real).note
    assert "(simulated)" not in report.conclusion(real, written(real))


def test_a_run_without_rows_has_a_report(tmp_path: Path) -> None:
    data = report.load(write_run(tmp_path, [], asked=3))
    assert values(report.summary(data))["missing"] == 3
    assert "not finished" in report.summary(data).note
    for chart in charts(data):
        assert "text/html" in chart._repr_mimebundle_()
    made = written(data, baselines=[BaselinePart(name="B200", tok_per_s=25_000.0, expected_fraction=0.25)])
    assert made["baselines"].rows[0]["verdict"] == "-"
    assert "0 of 3 rows are done" in report.conclusion(data, made)


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run yet"):
        report.load(RunFolder(tmp_path / "outputs" / "none"))


def test_counts_that_a_server_did_not_give_are_not_zero(tmp_path: Path) -> None:
    rows = [row(0, completion_tokens=None, prompt_tokens=None), row(1, completion_tokens=30)]
    data = report.load(write_run(tmp_path, rows))
    assert values(report.summary(data))["completion tokens, mean"] == 30


def test_per_server_rates_add_up_to_the_client_rate(tmp_path: Path) -> None:
    data = report.load(write_run(tmp_path, [row(i, completion_tokens=10 + i) for i in range(9)]))
    rates = [line["client tokens/s"] for line in details.per_server(data).rows]
    assert len(rates) == 2
    assert sum(rates) == pytest.approx(values(report.summary(data))["client rate"])


def test_throughput_bins_hold_every_token_once(tmp_path: Path) -> None:
    rows = [row(i, completion_tokens=7 + i, latency_s=0.5 + i % 7) for i in range(200)]
    found = series.throughput(report.load(write_run(tmp_path, rows)))
    tokens = (found["completion_tok_per_s"] * found["width_s"]).sum()
    assert tokens == pytest.approx(sum(each.completion_tokens or 0 for each in rows))


def test_requests_in_flight_integrate_to_the_latencies(tmp_path: Path) -> None:
    rows = [row(i, latency_s=0.5 + i % 7) for i in range(50)]
    data = report.load(write_run(tmp_path, rows))
    found = series.in_flight(data)
    assert (found["requests"] * found["width_s"]).sum() == pytest.approx(sum(each.latency_s for each in rows), rel=1e-4)


def test_examples_are_drawn_by_seed_and_index_alone(tmp_path: Path) -> None:
    rows = [row(i) for i in range(60)]
    forward = write_run(tmp_path, rows, name="forward")
    backward = write_run(tmp_path, rows[::-1], name="backward")
    first = [each["index"] for each in report.load(forward, examples=10, seed=3).examples]
    assert len(first) == 10
    assert first == [each["index"] for each in report.load(backward, examples=10, seed=3).examples]
    assert first != [each["index"] for each in report.load(forward, examples=10, seed=4).examples]
    assert report.load(forward, examples=0).examples == []


def test_failures_flags_and_drops_are_listed(tmp_path: Path) -> None:
    rows = [row(0, flags=("empty", "no_usage")), row(1, flags=("empty",))]
    failures = [failure(4, kind="refused"), failure(3), failure(2, message="HTTP 400: <b>9012</b> tokens")]
    data = report.load(write_run(tmp_path, rows, failures))
    assert [(line["kind"], line["rows"], line["index"]) for line in details.failures(data).rows] == [
        ("prompt_too_long", 2, "2, 3"),
        ("refused", 1, "4"),
    ]
    kinds = {line["kind"]: line for line in written(data)["quality"].rows}
    assert (kinds["empty"]["rows"], kinds["no_usage"]["rows"]) == (2, 1)
    assert kinds["no_usage"]["what it is"] == "told by the run"
    assert details.dropped(data).rows[0]["line"] == 3
    page = details.failures(data)._repr_html_()
    assert "&lt;b&gt;9012" in page
    assert "<b>9012" not in page


def test_write_leaves_every_table_as_csv_and_json(tmp_path: Path) -> None:
    data = report.load(write_run(tmp_path, [row(i) for i in range(5)], [failure(5)]))
    for table in written(data).values():
        stored = json.loads((data.folder.report / f"{table.name}.json").read_text())
        with (data.folder.report / f"{table.name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == len(stored) == len(table.rows)


def test_figures_name_their_axes_and_source(tmp_path: Path) -> None:
    rows = [row(i, finish_reason="length" if i % 3 else "stop") for i in range(30)]
    data = report.load(write_run(tmp_path, rows, generation={"max_tokens": 64}))
    for chart in charts(data):
        layout = chart.figure.layout
        assert layout.title.text
        assert layout.title.subtitle.text
        assert layout.xaxis.title.text
        assert layout.yaxis.title.text
        assert any("Source: " in note.text for note in layout.annotations)
    assert any(shape.x0 == 64.5 for shape in drawn(figures.lengths(data)).layout.shapes)


def test_answers_that_all_ended_alike_are_named_too(tmp_path: Path) -> None:
    for reason, words in (
        ("stop", "ended by itself (stop): 30"),
        ("length", "cut (length): 30"),
        (None, "not said: 30"),
    ):
        data = report.load(write_run(tmp_path, [row(i, finish_reason=reason) for i in range(30)], name=f"run-{reason}"))
        for chart in charts(data)[-2:]:
            assert [bar.name for bar in chart.figure.data] == [words]
            assert chart.figure.layout.showlegend


def test_the_settings_say_that_nothing_is_guessed_ahead(tmp_path: Path) -> None:
    """Speculative decoding changes what is measured: where no flag turns it on, the report says so."""
    data = report.load(write_run(tmp_path, [row(0)]))
    assert [line["speculative decoding"] for line in details.configurations(data).rows] == ["off"]
    fleet = {"engine": "sglang", "flags": {"speculative-algorithm": "EAGLE"}}
    configs = {"c0": {**data.run["configs"]["c0"], "fleet": fleet}}
    guessing = replace(data, run={**data.run, "configs": configs})
    assert [line["speculative decoding"] for line in details.configurations(guessing).rows] == ["EAGLE"]


def test_figures_stay_small_however_many_rows(tmp_path: Path) -> None:
    rows = [row(i, completion_tokens=1 + i % 3000, latency_s=1 + i % 90) for i in range(12_000)]
    data = report.load(write_run(tmp_path, rows, rows_per_shard=5000))
    for chart in charts(data):
        assert len(chart._repr_mimebundle_()["text/html"]) < 60_000


def test_answer_lengths_count_every_row_once(tmp_path: Path) -> None:
    rows = [row(i, completion_tokens=i % 97, finish_reason=(None, "length", "stop")[i % 3]) for i in range(300)]
    figure = drawn(figures.lengths(report.load(write_run(tmp_path, rows))))
    assert sum(int(bar.y.sum()) for bar in figure.data) == 300


def test_a_run_that_goes_on_says_so_in_its_figures(tmp_path: Path) -> None:
    data = report.load(write_run(tmp_path, [row(0)], asked=2))
    assert any("unfinished" in note.text for note in drawn(figures.throughput(data)).layout.annotations)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-"), (3.4, "3 s"), (59.7, "1 min 00 s"), (3725, "1 h 02 min"), (90_000, "1 d 01 h")]
)
def test_durations_as_people_read_them(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_numbers_as_people_read_them() -> None:
    assert [text(value) for value in (None, 1234567, 1234.5, 12.345, 0.01234, float("nan"))] == [
        "-", "1,234,567", "1,234", "12.3", "0.0123", "-",
    ]  # fmt: skip


def test_a_table_of_nothing_is_shown_as_none() -> None:
    table = Table(name="t", title="Failures", rows=[])
    assert "none" in table._repr_html_()
    assert replace(table, rows=[{"a": "<script>"}])._repr_html_().count("<script>") == 0


@pytest.mark.parametrize(
    ("raw", "thought", "answer"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("hm</think>yes", "hm", "yes"),
        ("<think>never ends", "never ends", ""),
        ("plain", "", "plain"),
        ("", "", ""),
    ],
)
def test_thought_and_answer(raw: str, thought: str, answer: str) -> None:
    assert report.split_thought(raw) == (thought, answer)


def test_examples_are_escaped_and_complete() -> None:
    row = {
        "index": 3, "id": "<i>", "messages": [{"role": "user", "content": "<b>1 < 2</b>"}],
        "text": "<think>&</think><hr>", "finish_reason": "length", "prompt_tokens": 4, "completion_tokens": None,
        "latency_s": 1.25,
        "server": "s", "flags": ["empty"], "submitted_at": START,
    }  # fmt: skip
    page = details._example(row)
    for shown in ("&lt;i&gt;", "&lt;b&gt;1 &lt; 2&lt;/b&gt;", "&amp;", "&lt;hr&gt;", "cut for length", "empty"):
        assert shown in page
    assert "<hr>" not in page
