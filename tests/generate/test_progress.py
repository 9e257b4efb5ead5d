"""Rates say what they measure and over which window."""

from __future__ import annotations

import pytest

from dfexp.generate.progress import WINDOW_S, Progress, Recent


def test_rates_cover_the_window_only() -> None:
    progress = Progress(0.0)
    for second in range(1, 121):
        progress.completed(float(second), 100, ())
    rates = progress.rates(120.0, left=60)
    assert rates["window_s"] == WINDOW_S
    assert rates["rows_per_s"] == pytest.approx(1.0, rel=0.02)
    assert rates["tok_per_s"] == pytest.approx(100.0, rel=0.02)
    assert rates["mean_completion_tokens"] == 100
    assert rates["eta_s"] == pytest.approx(60.0)


def test_the_window_moves_on_in_tenths_of_a_second_and_forgets_nothing_inside_it() -> None:
    recent = Recent()
    for step in range(1000):
        recent.add(step / 100, 3)
    assert recent.since(0.0) == (1000, 3000)
    assert recent.since(9.0) == (100, 300)
    assert recent.since(20.0) == (0, 0)


def test_before_the_first_row_there_is_no_estimate_and_no_mean() -> None:
    rates = Progress(0.0).rates(5.0, left=10)
    assert rates["eta_s"] is None
    assert rates["mean_completion_tokens"] is None
    assert rates["rows_per_s"] == 0


def test_a_row_without_counts_does_not_lower_the_mean() -> None:
    progress = Progress(0.0)
    progress.completed(1.0, 10, ())
    progress.completed(2.0, None, ("no_usage",))
    rates = progress.rates(2.0, left=0)
    assert rates["mean_completion_tokens"] == 10
    assert rates["eta_s"] == 0.0
    assert progress.flags == {"no_usage": 1}


def test_failed_rows_count_towards_the_estimate_since_they_are_settled() -> None:
    progress = Progress(0.0)
    progress.completed(1.0, 10, ())
    progress.failed()
    assert progress.rates(10.0, left=4)["eta_s"] == pytest.approx(20.0)
