"""What a failed request means for its row."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfexp import errors
from dfexp.generate.verdicts import (
    FailureStreak,
    Pace,
    Rejections,
    SpoiledStreak,
    answer_s,
    drain_s,
    end_of,
    is_final,
    is_other_model,
    look_again_s,
    pause_s,
    policy_of,
    retry_wait_s,
    seed_of,
)
from dfexp.params import GenerationGroup, SpoiledGroup
from dfexp.quality import flags
from dfexp.records import Failure


def failure(kind: str) -> Failure:
    return Failure(index=0, id="0", kind=kind, message="m", attempts=1, server="s", config_id="c", at=0.0)


@pytest.mark.parametrize(
    ("error", "attempt", "final"),
    [
        (errors.PromptTooLong("x"), 1, True),
        (errors.Refused("x"), 1, True),
        (errors.ServerFault("x"), 1, False),
        (errors.ServerFault("x"), 3, False),
        (errors.ServerFault("x"), 4, True),
        (errors.TimedOut("x"), 4, True),
        (errors.BadAnswer("x"), 4, True),
        (errors.ConnectionLost("x"), 4, True),
        (errors.Unreachable("x"), 99, False),
        (errors.RateLimited("x"), 99, False),
        (errors.AccessDenied("x"), 3, False),
        (errors.AccessDenied("x"), 4, True),
    ],
)
def test_only_what_may_be_the_rows_own_fault_ever_becomes_final(
    error: errors.RequestError, attempt: int, final: bool
) -> None:
    assert is_final(error, attempt, max_attempts=4) is final


def test_a_refusal_is_final_once_no_other_server_is_left_to_ask_and_a_prompt_that_is_too_long_at_once() -> None:
    assert not is_final(errors.Refused("x"), 1, 4, may_move=True)
    assert is_final(errors.Refused("x"), 4, 4, may_move=True)
    assert is_final(errors.PromptTooLong("x"), 1, 4, may_move=True)


def test_a_server_that_rejects_many_rests_longer_each_time() -> None:
    rejections = Rejections()
    for n in range(1, 20):
        rejections.add("no", is_denied=False)
        assert rejections.many == (n >= 8)
    assert rejections.denial is None
    rejections.add("no key", is_denied=True)
    assert rejections.denial == "no key"
    assert [rejections.rest_s() for _ in range(12)] == [0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


@pytest.mark.parametrize(
    ("state", "done", "failed", "last"),
    [
        ("ended", 8, 2, "ended"),
        ("ended", 8, 1, "failed"),
        ("ended", 9, 2, "failed"),
        ("stopped", 8, 2, "ended"),
        ("stopped", 8, 1, "stopped"),
        ("failed", 8, 2, "failed"),
        ("failed", 8, 1, "failed"),
    ],
)
def test_a_run_has_ended_when_and_only_when_every_row_is_accounted_for(
    state: str, done: int, failed: int, last: str
) -> None:
    found, reason = end_of(state, "why", done=done, failed=failed, asked=10)
    assert found == last
    if (state, last) == ("ended", "failed"):
        assert f"{done} succeeded + {failed} failed = {done + failed} of 10 asked" in str(reason)
    elif found != state:
        assert reason is None
    else:
        assert reason == "why"


def test_waits_double_with_jitter_and_stay_bounded() -> None:
    draw = random.Random(1)
    for attempt in range(1, 30):
        base = min(30.0, 0.5 * 2 ** (attempt - 1))
        waits = {retry_wait_s(errors.ServerFault("x"), attempt, draw) / base for _ in range(50)}
        assert 0.5 <= min(waits) < 0.7 < 1.3 < max(waits) <= 1.5, "rows that failed together do not come back together"


def test_the_server_says_how_long_to_wait_within_reason() -> None:
    draw = random.Random(1)
    assert retry_wait_s(errors.ServerFault("x", retry_after_s=7.0), 1, draw) == 7.0
    assert pause_s(errors.RateLimited("x", retry_after_s=7.0), draw) == 7.0
    assert pause_s(errors.RateLimited("x", retry_after_s=1e9), draw) == 600.0
    assert 0 < pause_s(errors.RateLimited("x", retry_after_s=0.0), draw) <= 0.1, "0 means now, not a storm"
    assert 0.5 <= pause_s(errors.RateLimited("x"), draw) <= 1.5
    assert retry_wait_s(errors.Unreachable("x"), 1, draw) == 0.0


def test_a_row_goes_to_another_server_at_once_and_then_waits() -> None:
    draw = random.Random(1)
    assert retry_wait_s(errors.ServerFault("x"), 1, draw, elsewhere=True) == 0.0
    assert retry_wait_s(errors.ServerFault("x"), 2, draw, elsewhere=True) >= 0.5
    assert retry_wait_s(errors.RateLimited("x", retry_after_s=60.0), 1, draw) == 0.0, "its server waits, not the row"


def test_a_time_limit_follows_what_was_measured_unless_one_is_asked_for() -> None:
    unknown, asked = GenerationGroup(), GenerationGroup(slowest_tok_per_s=8.0)
    assert answer_s(unknown, 32768, 40.0) == 60 + 4 * 32768 / 40
    assert answer_s(unknown, 32768, 40.0) > 900, "thinking for 15 minutes is no hang"
    assert answer_s(unknown, 32768) == 60 + 32768
    assert answer_s(asked, 800, 40.0) == 60 + 2 * 100


@pytest.mark.parametrize(
    ("asked", "context", "tok_per_s", "in_flight", "limit_s"),
    [
        ({"max_tokens": 1000}, 8192, 100.0, 4, 60 + 4 * 1000 / 25),
        ({"max_tokens": "fit"}, 8192, 100.0, 4, 60 + 4 * 8192 / 25),
        ({"max_tokens": 1000}, 8192, None, 4, 60 + 2 * 1000 / 2),  # it tells no rate, or was away
        ({"max_tokens": 1000}, 8192, 0.0, 4, 60 + 2 * 1000 / 2),
        ({"max_tokens": 1000, "slowest_tok_per_s": 5.0}, 8192, 100.0, 4, 60 + 2 * 1000 / 5),
        ({"max_tokens": "fit"}, None, None, 0, 60 + 2 * 32768 / 2),
    ],
)
def test_a_drain_may_take_as_long_as_an_answer_at_the_servers_measured_speed(
    asked: dict[str, Any], context: int | None, tok_per_s: float | None, in_flight: int, limit_s: float
) -> None:
    assert drain_s(GenerationGroup(**asked), context, tok_per_s, in_flight) == pytest.approx(limit_s)


def test_the_slowest_of_many_answers_together_is_kept() -> None:
    pace = Pace()
    assert not any(pace.answered(100, 1.0) for _ in range(31))
    assert pace.slowest is None
    assert not pace.answered(None, 1.0)
    assert pace.answered(100, 1.0)
    assert pace.slowest == pytest.approx(100.0)
    assert not any(pace.answered(100, 0.1) for _ in range(32)), "a server that empties is no measure of a full one"
    assert [pace.answered(100, 10.0) for _ in range(32)][-1]
    assert pace.slowest == pytest.approx(10.0)


def test_the_strictest_policy_of_all_flags_counts() -> None:
    spoiled = SpoiledGroup(truncated="fail", nul="retry")
    assert policy_of(spoiled, ()) == ("keep", "")
    assert policy_of(spoiled, ("no_usage", "garbage")) == ("keep", "")
    assert policy_of(spoiled, ("empty",)) == ("retry", "empty")
    assert policy_of(spoiled, ("nul", "truncated")) == ("fail", "truncated")


def test_every_flag_of_an_answer_has_a_policy() -> None:
    shown = {*flags("", None, 9), *flags("<think>a\0", "length", 9), *flags("!" * 99, "stop", 9), "looping"}
    shown |= {*flags(" ".join(map(str, range(500))) + " and so on" * 999, "stop", 9)}
    assert shown | {"surrogates_repaired"} == set(SpoiledGroup.model_fields)


@given(st.lists(st.tuples(st.integers(0, 999_999), st.integers(1, 100)), min_size=2, max_size=2, unique=True),
       st.integers(0, 2**31 - 1))  # fmt: skip
def test_no_two_rows_and_attempts_share_a_seed(pair: list[tuple[int, int]], seed: int) -> None:
    first, second = (seed_of(seed, index, attempt) for index, attempt in pair)
    assert first != second
    assert 0 <= first < 2**31


def test_a_broken_server_that_answers_faster_than_the_others_is_not_all_of_them() -> None:
    streak = SpoiledStreak(3)
    assert not any(streak.answered("a", ("empty",), ("a", "b")) for _ in range(99))
    assert streak.answered("b", ("garbage", "truncated"), ("a", "b"))
    assert not streak.answered("b", ("truncated",), ("a", "b"))
    assert not streak.answered("a", ("empty",), ("a",))


def test_a_streak_without_a_success_is_too_long_at_its_limit_whatever_the_kind() -> None:
    streak = FailureStreak.of(3)
    assert [streak.failure(failure("prompt_too_long")) for _ in range(3)] == [False, False, True]


def test_a_success_gives_the_held_failures_free_and_breaks_the_streak() -> None:
    streak = FailureStreak.of(3)
    streak.failure(failure("refused"))
    streak.failure(failure("refused"))
    assert len(streak.success()) == 2
    assert streak.held == []
    assert [streak.failure(failure("refused")) for _ in range(3)] == [False, False, True]


def test_after_a_success_prompts_that_are_too_long_are_their_own_fault() -> None:
    streak = FailureStreak.of(3)
    streak.success()
    assert not any(streak.failure(failure("prompt_too_long")) for _ in range(100))
    assert len(streak.flush()) == 100


@pytest.mark.parametrize(("owned", "most"), [(False, 20.0), (True, 75.0)])
def test_looks_at_a_server_that_is_away_become_rarer_up_to_a_bound(owned: bool, most: float) -> None:
    waits = [
        [look_again_s(tries, random.Random(n), owned=owned) for n in range(200)] for tries in (0, 1, 2, 3, 5, 9999)
    ]
    assert 0.37 < min(waits[0]) < max(waits[0]) < 0.63
    assert [max(each) for each in waits] == sorted(max(each) for each in waits)
    assert 0.95 * most < max(waits[-1]) <= most, "another's server is found within 20 s of its return"
    assert min(waits[-1]) >= 0.59 * most, "and not asked all the time"


@pytest.mark.parametrize(
    ("asked", "answered", "other"),
    [
        ("m", "m", False), ("m", None, False), ("Qwen/Qwen3.6-27B", "qwen3.6-27b", False),
        ("/models/Qwen3.6-27B", "Qwen/Qwen3.6-27B", False), ("smollm2", "/cache/SmolLM2.gguf", False),
        ("Qwen3.6-27B", "Qwen3.6-27B-FP8", True), ("m", "gpt-4o", True), ("m", "", True),
    ],
)  # fmt: skip
def test_a_path_or_an_alias_that_only_shortens_it_is_the_same_model(
    asked: str, answered: str | None, other: bool
) -> None:
    assert is_other_model(asked, answered) is other
