"""Whether a canary may be followed."""

from __future__ import annotations

from typing import Any

import pytest

from dfexp.rollout import Reading, Window, fleet_rate, judge


def window(rates: dict[str, float | None], seconds: float = 100.0, **changes: Any) -> Window:
    """Servers that made tokens at these rates; `changes` are of the last reading of server a."""

    def reading(name: str, at: float, rate: float | None) -> Reading:
        values: dict[str, Any] = {"at": at, "tokens": None if rate is None else 5 + rate * at, "restarts": 1}
        return Reading(**{"serves": True, **values, **(changes if name == "a" and at else {})})

    begin, end = ({name: reading(name, at, rate) for name, rate in rates.items()} for at in (0.0, seconds))
    return begin, end


BEFORE = window({"a": 100.0, "b": 100.0, "c": 100.0})


@pytest.mark.parametrize(
    ("now", "passed"),
    [
        ({"a": 100.0, "b": 100.0, "c": 100.0}, True),
        ({"a": 175.0, "b": 100.0, "c": 100.0}, True),
        ({"a": 94.0, "b": 100.0, "c": 100.0}, False),
        ({"a": 80.0, "b": 80.0, "c": 80.0}, True),  # longer prompts for all
        ({"a": 100.0, "b": 120.0, "c": 120.0}, False),  # shorter prompts for all, and the canary gains nothing
        ({"a": 0.0, "b": 100.0, "c": 100.0}, False),
    ],
)
def test_the_canary_is_compared_with_the_others_and_with_itself(now: dict[str, float | None], passed: bool) -> None:
    assert judge("a", BEFORE, window(now), 0.95)[0] is passed


def test_a_slower_gpu_is_no_reason_against_the_settings() -> None:
    before = window({"a": 70.0, "b": 100.0, "c": 100.0})
    assert judge("a", before, window({"a": 70.0, "b": 100.0, "c": 100.0}), 0.95)[0]
    assert not judge("a", before, window({"a": 60.0, "b": 100.0, "c": 100.0}), 0.95)[0]


def test_one_noisy_number_does_not_decide() -> None:
    before = window({"a": 352.0, "b": 220.0})  # two equal servers, one of them held up for a while
    passed, text = judge("a", before, window({"a": 350.0, "b": 355.0}), 0.95)
    assert passed
    assert "expected 355.0" in text
    assert "--no-canary" in judge("a", before, window({"a": 266.0, "b": 355.0}), 0.95)[1]


def test_the_text_has_the_numbers_and_the_window() -> None:
    passed, text = judge("a", BEFORE, window({"a": 50.0, "b": 100.0, "c": 110.0}, 60.0), 0.95)
    assert not passed
    assert text.startswith("0.48 of the expected speed, at least 0.95 is asked for: 50.0 tokens/s over 60 s")
    assert "expected 105.0: its own before 100.0, the others' median 105.0 now and 100.0 before" in text


def test_a_single_server_is_compared_with_itself_alone() -> None:
    assert judge("a", window({"a": 100.0}), window({"a": 96.0}), 0.95)[0]
    assert not judge("a", window({"a": 100.0}), window({"a": 90.0}), 0.95)[0]


@pytest.mark.parametrize(
    "now",
    [
        window({"a": 200.0, "b": 100.0, "c": 100.0}, restarts=2),
        window({"a": 200.0, "b": 100.0, "c": 100.0}, serves=False),
        window({"a": None, "b": None, "c": None}),
        window({"a": 200.0, "b": 100.0, "c": 100.0}, 0.0),
    ],
)
def test_what_cannot_be_compared_is_not_proven(now: Window) -> None:
    passed, text = judge("a", BEFORE, now, 0.95)
    assert not passed
    assert "not proven" in text


def test_others_that_were_away_are_left_out() -> None:
    begin, end = window({"b": 100.0, "a": 0.0, "c": 100.0}, restarts=2)
    assert judge("b", window({"b": 100.0, "a": 100.0, "c": 100.0}), (begin, end), 0.95)[0]


def test_the_fleets_rate_counts_what_all_made() -> None:
    assert fleet_rate(BEFORE) == 300.0
    assert fleet_rate(window({"a": 1.0}, 0.0)) == 0.0
