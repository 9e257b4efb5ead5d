"""What a failed request means for its row."""

from __future__ import annotations

import random

import pytest

from dfexp import errors
from dfexp.generate.verdicts import FailureStreak, is_final, retry_wait_s
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
        (errors.AccessDenied("x"), 99, False),
    ],
)
def test_only_what_may_be_the_rows_own_fault_ever_becomes_final(
    error: errors.RequestError, attempt: int, final: bool
) -> None:
    assert is_final(error, attempt, max_attempts=4) is final


def test_waits_double_with_jitter_and_stay_bounded() -> None:
    draw = random.Random(1)
    for attempt in range(1, 30):
        base = min(30.0, 0.5 * 2 ** (attempt - 1))
        assert 0.5 * base <= retry_wait_s(errors.ServerFault("x"), attempt, draw) <= 1.5 * base


def test_the_server_says_how_long_to_wait_within_reason() -> None:
    draw = random.Random(1)
    assert retry_wait_s(errors.RateLimited("x", retry_after_s=7.0), 1, draw) == 7.0
    assert retry_wait_s(errors.RateLimited("x", retry_after_s=1e9), 1, draw) == 600.0
    assert retry_wait_s(errors.Unreachable("x"), 1, draw) == 0.0


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
