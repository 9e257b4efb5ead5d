"""What a run asks of its servers: prompt and completion lengths, what is in flight at any time, and shared prefixes.

A request in flight is met with a chance proportional to its length, so contexts in flight are longer than half a mean
completion; with lengths L the tokens already generated average E[L^2] / (2 E[L]).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import erf, exp, log, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dfexp.capacity.errors import CapacityError

_Z95 = 1.6448536269514722
_POINTS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of token counts: `values` ascending, `weights` adding up to 1. `label` says what it is."""

    values: tuple[float, ...]
    weights: tuple[float, ...]
    label: str
    moments: tuple[float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        values = np.asarray(self.values)
        found = [float(np.dot(values**order, self.weights)) for order in (1, 2, 3)]
        object.__setattr__(self, "moments", tuple(found))

    def moment(self, order: Literal[1, 2, 3]) -> float:
        """E[L ** order]."""
        return self.moments[order - 1]

    @property
    def mean(self) -> float:
        """E[L] in tokens."""
        return self.moment(1)

    @property
    def variance(self) -> float:
        """Variance in tokens squared."""
        return max(0.0, self.moment(2) - self.mean**2)

    @property
    def in_flight(self) -> float:
        """Tokens that a request met at random has generated so far, on average."""
        return self.moment(2) / (2 * self.mean)

    @property
    def in_flight_variance(self) -> float:
        """Variance of the same."""
        return max(0.0, self.moment(3) / (3 * self.mean) - self.in_flight**2)

    @property
    def constant(self) -> bool:
        """All the same length: such requests finish in waves."""
        return len(self.values) == 1


def constant(tokens: float) -> Lengths:
    """Every request alike. Raises CapacityError."""
    if not tokens > 0:
        raise CapacityError(f"a length of {tokens} tokens must be positive.")
    return Lengths(values=(float(tokens),), weights=(1.0,), label=f"{tokens:g} tokens each")


def measured(tokens: Iterable[int]) -> Lengths:
    """The lengths that were counted, reduced to at most 512 points. Raises CapacityError: none, or not positive."""
    data = np.sort(np.asarray(list(tokens), dtype=float))
    if not data.size or data[0] <= 0:
        raise CapacityError("measured lengths must be positive token counts, and at least one is needed.")
    parts = np.array_split(data, min(_POINTS, data.size))
    return _merged(
        [float(part.mean()) for part in parts],
        [part.size / data.size for part in parts],
        f"{data.size:,} measured lengths",
    )


def _merged(values: Sequence[float], weights: Sequence[float], label: str) -> Lengths:
    merged: dict[float, float] = {}
    for value, weight in zip(values, weights, strict=True):
        merged[value] = merged.get(value, 0.0) + weight
    return Lengths(values=tuple(merged), weights=tuple(merged.values()), label=label)


def log_normal(median: float, sigma: float, *, limit: float) -> Lengths:
    """Log-normal lengths, cut at `limit`: what would be longer ends there, as a full context does.

    Raises CapacityError for a median that is not positive, a negative sigma or a limit below 1.
    """
    if not median > 0 or not sigma >= 0 or not limit >= 1:
        raise CapacityError(
            f"log-normal lengths need median > 0, sigma >= 0 and limit >= 1, not {median}, {sigma}, {limit}."
        )
    if sigma == 0:
        return constant(min(median, limit))
    edges = np.linspace(0.0, limit, _POINTS + 1)
    chance = np.diff(_cdf(edges, log(median), sigma))
    chance[-1] += 1.0 - chance.sum()
    middles = (edges[1:] + edges[:-1]) / 2
    middles[-1] = limit if chance[-1] > chance[-2] else middles[-1]
    return Lengths(
        values=tuple(middles.tolist()),
        weights=tuple(chance.tolist()),
        label=f"log-normal, median {median:,.0f}, sigma {sigma:.2f}, cut at {limit:,.0f}",
    )


def _cdf(values: NDArray[np.float64], mu: float, sigma: float) -> NDArray[np.float64]:
    return np.array([0.5 * (1 + erf((log(value) - mu) / (sigma * sqrt(2)))) if value > 0 else 0.0 for value in values])


def sigma_of(median: float, p95: float) -> float:
    """The sigma of a log-normal with this median and 95th percentile. Raises CapacityError."""
    if not 0 < median <= p95:
        raise CapacityError(f"a 95th percentile of {p95} must not be below the median of {median}.")
    return log(p95 / median) / _Z95


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and completions of a run.

    Attributes: max_tokens, as sent with each request (`fit`: all that the context leaves); shared_prefix_share, part of
    all prompt tokens that an earlier prompt begins with too, None when it was not measured.
    """

    prompt: Lengths
    completion: Lengths
    max_tokens: int | Literal["fit"] = "fit"
    shared_prefix_share: float | None = None

    def __post_init__(self) -> None:
        share = self.shared_prefix_share
        if share is not None and not 0 <= share <= 1:
            raise CapacityError(f"shared_prefix_share = {share} must be between 0 and 1.")

    @property
    def context(self) -> float:
        """Tokens that a running request holds on average."""
        return self.prompt.mean + self.completion.in_flight

    @property
    def context_variance(self) -> float:
        """Variance of the same."""
        return self.prompt.variance + self.completion.in_flight_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyFigures:
    """A young run: what each request slot has done after generating `generated` tokens."""

    completions: float
    mean_completion: float
    in_flight: float


def early_figures(completion: Lengths, generated: float, *, step: float = 16.0) -> EarlyFigures:
    """What a counter shows early: completions so far per slot, their (too short) mean, tokens still in flight per slot.

    Each slot is a renewal process: one request after the other, all started at time 0.
    """
    bins = int(generated / step)
    chance = np.zeros(max(bins, int(max(completion.values) / step) + 1) + 1)
    for value, weight in zip(completion.values, completion.weights, strict=True):
        chance[max(1, round(value / step))] += weight
    starts = np.zeros(bins + 1)
    starts[0] = 1.0
    for position in range(1, bins + 1):
        starts[position] = np.dot(chance[1 : position + 1], starts[position - 1 :: -1][:position])
    alive = 1.0 - np.cumsum(chance)
    ages = np.arange(bins, -1, -1)
    in_flight = float(np.dot(starts, np.maximum(alive[ages], 0.0) * ages)) * step
    completions = float(starts[1:].sum())
    done = max(0.0, generated - in_flight)
    return EarlyFigures(
        completions=completions, mean_completion=done / completions if completions else 0.0, in_flight=in_flight
    )


def fit_completions(*, completions: float, mean_completion: float, generated: float, limit: float) -> Lengths:
    """Log-normal completions, cut at `limit`, from a run's first minutes.

    Args, all per request slot: completions so far; their mean length; tokens generated so far (decode rate of one
    request times the time).
    Raises CapacityError when the figures contradict each other (more tokens completed than generated).
    """
    in_flight = generated - completions * mean_completion
    if completions <= 0 or in_flight <= 0:
        raise CapacityError(
            f"{completions:.2f} completions of {mean_completion:.0f} tokens per slot are "
            f"{completions * mean_completion:.0f} tokens, and only {generated:.0f} were generated; check rate, "
            "time and slots."
        )
    low, high = 0.05, 2.0
    for _ in range(16):
        sigma = (low + high) / 2
        lengths = _fit_median(sigma, completions, generated, limit)
        low, high = (low, sigma) if early_figures(lengths, generated).in_flight > in_flight else (sigma, high)
    return lengths


def _fit_median(sigma: float, completions: float, generated: float, limit: float) -> Lengths:
    low, high = log(limit / 1000), log(limit * 4)
    for _ in range(24):
        middle = (low + high) / 2
        lengths = log_normal(exp(middle), sigma, limit=limit)
        low, high = (middle, high) if early_figures(lengths, generated).completions > completions else (low, middle)
    return lengths


def shared_prefix_share(prompts: Iterable[str]) -> float:
    """Part of all prompt text that repeats another prompt's beginning: the best hit rate a prefix cache could have.

    Characters stand for tokens. Sorting puts every prompt beside the one it shares most with. 0.0 for no prompts.
    """
    ordered = sorted(prompts)
    total = sum(map(len, ordered))
    return sum(_common(left, right) for left, right in pairwise(ordered)) / total if total else 0.0


def _common(left: str, right: str) -> int:
    """Length of the common beginning."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low
