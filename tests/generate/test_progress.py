"""Rates say what they measure and over which window; what is in flight counts in the mean and in the time left."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dfexp.diagnose import STALLED_S
from dfexp.generate.progress import WINDOW_S, History, Progress, Recent, Traffic
from dfexp.records import Answer, EngineSample


def answer(tokens: int | None) -> Answer:
    return Answer(
        text="", finish_reason="stop", prompt_tokens=1, completion_tokens=tokens, max_tokens=None, submitted_at=0.0,
        latency_s=1.0,
    )  # fmt: skip


def estimates(progress: Progress, now: float, **given: Any) -> dict[str, Any]:
    return progress.estimates(now, **{"left": 10, "limit": None, "samples": {}, **given})


def counter(at: float, tokens: float) -> EngineSample:
    return EngineSample(at=at, server="a", realtime_decode_tokens_total=tokens)


def in_turns(progress: Progress, rows: int, tokens: int, step_s: float) -> float:
    """One server that answers one request after another; the time at the end."""
    now = 0.0
    for index in range(rows):
        progress.servers["a"].sent(index, now)
        now += step_s
        progress.answered("a", index, now, answer(tokens))
    return now


def test_rates_cover_the_window_only() -> None:
    progress = Progress(0.0)
    now = in_turns(progress, 120, 100, 1.0)
    told = estimates(progress, now)
    assert told["window_s"] == WINDOW_S
    assert told["elapsed_s"] == 120
    assert told["rows_per_s"] == pytest.approx(1.0, rel=0.02)
    assert told["client_tok_per_s"] == pytest.approx(100.0, rel=0.02)
    assert told["server_tok_per_s"] is None
    assert told["mean_completion_tokens"] == pytest.approx({"value": 100, "low": 100, "high": 100}, abs=1)


def test_the_window_moves_on_in_tenths_of_a_second_and_forgets_nothing_inside_it() -> None:
    recent = Recent()
    for step in range(1000):
        recent.add(step / 100, 3)
    assert recent.since(0.0) == (1000, 3000)
    assert recent.since(9.0) == (100, 300)
    assert recent.since(20.0) == (0, 0)
    assert recent.since(0.0) == (1000, 3000), "looking forgets nothing"
    recent.add(305.0, 3)
    assert recent.since(0.0) == (501, 1503), "but for what no window reaches"


def test_before_the_first_row_there_is_no_estimate_and_no_mean() -> None:
    progress = Progress(0.0)
    progress.servers["a"].sent(0, 0.0)
    told = estimates(progress, 5.0)
    assert (told["eta_s"], told["eta_low_s"], told["mean_completion_tokens"]) == (None, None, None)
    assert told["rows_per_s"] == 0
    json.dumps(told)


def test_with_nothing_left_and_nothing_in_flight_no_time_is_left() -> None:
    progress = Progress(0.0)
    now = in_turns(progress, 3, 10, 1.0)
    assert estimates(progress, now, left=0)["eta_s"] == 0.0


def test_rows_of_later_starts_are_in_the_time_of_the_whole_alone() -> None:
    progress = Progress(0.0)
    now = in_turns(progress, 100, 100, 1.0)
    progress.servers["a"].sent(100, now)
    told = estimates(progress, now, left=100, later=900)
    assert told["eta_s"] == pytest.approx(101, rel=0.05)
    assert told["whole_eta_s"] == pytest.approx(1001, rel=0.05)
    assert told["whole_eta_low_s"] < told["whole_eta_s"] < told["whole_eta_high_s"]
    alone = estimates(progress, now, left=100)
    assert alone["whole_eta_s"] == alone["eta_s"] == told["eta_s"]


def test_a_page_that_is_silent_is_not_known_and_a_server_that_is_gone_makes_nothing() -> None:
    progress = Progress(0.0)
    now = in_turns(progress, 100, 100, 1.0)
    silent, goes_on = ([counter(at, at * 100.0) for at in range(0, end, 5)] for end in (51, 101))
    samples = {"a": goes_on, "b": silent}
    known = estimates(progress, now, samples={"a": goes_on})
    assert known["server_tok_per_s"] == pytest.approx(100.0)
    assert estimates(progress, now, samples=samples)["server_tok_per_s"] is None
    gone = estimates(progress, now, samples=samples, gone=["b"])
    assert gone["server_tok_per_s"] == pytest.approx(100.0 * (1 + 10 / WINDOW_S), rel=0.01), "away since its last page"


def test_a_row_without_counts_does_not_lower_the_mean() -> None:
    progress = Progress(0.0)
    progress.answered("a", 0, 1.0, answer(10))
    progress.answered("a", 1, 2.0, answer(None), ("no_usage",))
    assert estimates(progress, 2.0)["mean_completion_tokens"]["value"] == pytest.approx(10)
    assert progress.flags == {"no_usage": 1}


def test_early_answers_are_short_and_the_estimates_are_not() -> None:
    """A hundred slots, lengths of 100 to 1,900, and nothing but short ones has finished after 600 tokens of each."""
    draw, progress = random.Random(3), Progress(0.0)
    lengths, place = [draw.randint(100, 1900) for _ in range(20_000)], 0
    ends: dict[int, float] = {}

    def send(now: float) -> None:
        nonlocal place
        ends[place] = now + lengths[place] / 10
        progress.servers["a"].sent(place, now)
        place += 1

    for _ in range(100):
        send(0.0)
    while (now := ends[(index := min(ends, key=lambda each: ends[each]))]) < 60.0:
        del ends[index]
        progress.answered("a", index, now, answer(lengths[index]))
        send(now)
    samples = {"a": [counter(at, at * 1000.0) for at in range(0, 61, 5)]}
    told = estimates(progress, 60.0, left=len(lengths) - place, limit=1900.0, samples=samples)
    mean = sum(progress.lengths[size] * size for size in progress.lengths) / progress.rows
    assert mean < 500
    assert told["mean_completion_tokens"]["low"] < 1000 < told["mean_completion_tokens"]["high"]
    assert told["server_tok_per_s"] == pytest.approx(1000)
    assert told["eta_low_s"] < 1000 * 20_000 / 1000 - 60 < told["eta_high_s"]
    assert told["client_tok_per_s"] < 500
    assert told["rates"]["a"] == {name: told[name] for name in ("server_tok_per_s", "client_tok_per_s")}


def test_requests_at_a_server_that_stands_still_do_not_seem_to_go_on() -> None:
    progress = Progress(0.0)
    now = in_turns(progress, 100, 100, 10.0)
    for index, server in enumerate(("a", "b")):
        progress.servers[server].sent(100 + index, now)
    progress.servers["b"].flight.sent(7, 0.0)
    progress.servers["b"].flight.ended(7, 10.0, 100)
    moves = [counter(now + at, at * 10.0) for at in range(0, 1001, 5)]
    still = [counter(now + at, 5.0) for at in range(0, 1001, 5)]
    means = [
        estimates(progress, now + 1000.0, samples={"a": moves, "b": samples})["mean_completion_tokens"]["value"]
        for samples in (still, moves)
    ]
    assert means[0] < means[1]


def test_samples_that_are_far_apart_make_the_window_longer() -> None:
    progress = Progress(0.0)
    samples = {"a": [counter(40.0 * number, 4000.0 * number) for number in range(30)]}
    told = estimates(progress, 1160.0, samples=samples)
    assert told["window_s"] == 440
    assert told["server_tok_per_s"] == pytest.approx(100)


def test_lengths_of_earlier_starts_count_and_stay_small() -> None:
    progress = Progress(0.0)
    for tokens in range(1, 8193):
        progress.answered("a", tokens, 1.0, answer(tokens))
    kept = estimates(progress, 1.0)["lengths"]
    assert len(json.dumps(kept)) < 8_000
    assert sum(kept.values()) == 8192
    again = Progress(0.0, lengths={int(tokens): number for tokens, number in kept.items()})
    assert estimates(again, 1.0)["mean_completion_tokens"]["value"] == pytest.approx(4096.5, rel=0.002)


def test_the_rate_over_time_stays_small_and_keeps_its_shape() -> None:
    history = History()
    for second in range(1, 60 * 3600, 7):
        history.add(float(second), 100.0 if second < 30 * 3600 else 300.0)
    assert len(history.points) < 120
    assert len(history.points) * history.step_s == pytest.approx(60 * 3600, rel=0.02)
    assert history.points[0] == 100.0
    assert history.points[-1] == 300.0
    assert sum(history.points) / len(history.points) == pytest.approx(200, rel=0.02)


def test_a_request_is_over_once_and_cut_off_ones_give_nothing() -> None:
    traffic = Traffic()
    traffic.sent(7, 0.0)
    traffic.left(7, 2.0, answer(50))
    traffic.left(7, 2.0)
    traffic.sent(8, 0.0)
    traffic.left(8, 3.0)
    assert traffic.recent.since(0.0) == (1, 50)
    assert traffic.flight.ages(3.0) == []
    assert traffic.watched(3.0)["request_s"] == 2.0


def test_what_is_watched_is_of_the_last_minutes() -> None:
    traffic = Traffic()
    traffic.sent(1, 900.0)
    traffic.sent(2, 1000.0 - STALLED_S)
    traffic.sent(3, 999.0)
    for at in (100.0, 950.0, 960.0):
        traffic.judged(at, is_garbage=at != 950.0)
    seen = traffic.watched(1000.0)
    assert (seen["long_in_flight"], seen["answers"], seen["garbage"]) == (2, 2, 1)
