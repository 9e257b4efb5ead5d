from __future__ import annotations

import random

import pytest

from dfexp.capacity.errors import CapacityError
from dfexp.capacity.workload import (
    Lengths,
    constant,
    early_figures,
    fit_completions,
    log_normal,
)
from tests.capacity.support import SIGMA, early_completions


def test_constant_lengths_are_half_done_in_flight() -> None:
    one = constant(1000)
    assert (one.mean, one.biased_mean / 2) == (1000, 500)


def test_longer_requests_are_met_more_often() -> None:
    two = Lengths(values=(100.0, 1000.0), weights=(0.5, 0.5), label="two")
    assert two.biased_mean / 2 == pytest.approx((100**2 + 1000**2) / 2 / (2 * 550))
    assert two.biased_mean > two.mean


def test_log_normal_keeps_median_percentile_and_limit() -> None:
    lengths = log_normal(150, SIGMA, limit=8192)
    assert lengths.mean == pytest.approx(214, rel=0.01)
    assert sum(
        weight for value, weight in zip(lengths.values, lengths.weights, strict=True) if value < 600
    ) == pytest.approx(0.95, abs=0.01)
    cut = log_normal(5000, 1.0, limit=8000)
    assert cut.values[-1] == 8000
    assert cut.weights[-1] == pytest.approx(0.32, abs=0.02)
    assert sum(cut.weights) == pytest.approx(1)


def test_early_figures_agree_with_a_simulation() -> None:
    lengths, generator = log_normal(2500, 0.5, limit=8000), random.Random(3)
    done = tokens = held = 0
    for _ in range(4000):
        left = 5862.0
        while True:
            length = generator.choices(lengths.values, lengths.weights)[0]
            if length > left:
                held += left
                break
            left, done, tokens = left - length, done + 1, tokens + length
    completions, in_flight = early_figures(lengths, 5862)
    assert completions == pytest.approx(done / 4000, rel=0.03)
    assert (5862 - in_flight) / completions == pytest.approx(tokens / done, rel=0.03)
    assert in_flight == pytest.approx(held / 4000, rel=0.05)


def test_a_fit_returns_what_it_was_made_of() -> None:
    fitted = early_completions()
    generated = 670 / 32 * 280
    completions, in_flight = early_figures(fitted, generated)
    print(f"{fitted.label}: mean {fitted.mean:,.0f}, in flight {fitted.biased_mean / 2:,.0f}")
    assert completions * 256 == pytest.approx(438, abs=2)
    assert (generated - in_flight) / completions == pytest.approx(2473, rel=0.003)
    assert fitted.mean > 2473  # early completions are the short ones


def test_the_later_counters_of_the_second_setting_are_predicted() -> None:
    generated = 1180 / 64 * 480
    completions, in_flight = early_figures(early_completions(), generated)
    mean = (generated - in_flight) / completions
    print(f"after 480 s: {completions * 512:,.0f} completions of mean {mean:,.0f}")
    assert completions * 512 == pytest.approx(1397, rel=0.05)
    assert mean == pytest.approx(2660, rel=0.05)


def test_contradicting_figures_are_refused() -> None:
    with pytest.raises(CapacityError, match="only 3000 tokens were generated"):
        fit_completions(completions=2, mean_completion=2000, generated=3000, limit=8000)
