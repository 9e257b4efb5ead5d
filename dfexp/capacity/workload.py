"""What a run asks of its servers: prompt and completion lengths, and what is in flight at any time.

A request in flight is met with a chance proportional to its length, so contexts in flight are longer than half a mean
completion; with lengths L the tokens already generated average E[L^2] / (2 E[L]).
"""

from dataclasses import dataclass, field
from math import erf, exp, log, sqrt
from typing import Literal

import numpy as np

from dfexp.capacity.errors import CapacityError

_POINTS = 512
_STEP = 16.0
"""Tokens that one step of the renewal process stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of token counts: `values` ascending, `weights` adding up to 1. `label` says what it is."""

    values: tuple[float, ...]
    weights: tuple[float, ...]
    label: str
    moments: tuple[float, ...] = field(init=False)
    """E[L ** 0] to E[L ** 3]."""

    def __post_init__(self) -> None:
        values = np.asarray(self.values)
        moments = tuple(float(np.dot(values**order, self.weights)) for order in range(4))
        object.__setattr__(self, "moments", moments)

    @property
    def mean(self) -> float:
        """E[L] in tokens."""
        return self.moments[1]

    @property
    def biased_mean(self) -> float:
        """Mean length where each is met with a chance proportional to it; a request in flight has done half of it."""
        return self.moments[2] / self.mean

    @property
    def is_constant(self) -> bool:
        """All the same length: such requests finish in waves."""
        return len(self.values) == 1


def constant(tokens: float) -> Lengths:
    """Every request alike."""
    return Lengths(values=(float(tokens),), weights=(1.0,), label=f"{tokens:g} tokens each")


def log_normal(median: float, sigma: float, *, limit: float) -> Lengths:
    """Log-normal lengths, cut at `limit`: what would be longer ends there, as a full context does."""
    if sigma == 0:
        return constant(min(median, limit))
    edges = np.linspace(0.0, limit, _POINTS + 1)
    below = [0.5 * (1 + erf(log(edge / median) / (sigma * sqrt(2)))) for edge in edges[1:]]
    chance = np.diff([0.0, *below])
    chance[-1] += 1.0 - below[-1]
    middles = (edges[1:] + edges[:-1]) / 2
    middles[-1] = limit if chance[-1] > chance[-2] else middles[-1]
    return Lengths(
        values=tuple(middles.tolist()),
        weights=tuple(chance.tolist()),
        label=f"log-normal, median {median:,.0f}, sigma {sigma:.2f}, cut at {limit:,.0f}",
    )


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

    @property
    def context(self) -> float:
        """Tokens that a running request holds on average."""
        return self.prompt.mean + self.completion.biased_mean / 2

    @property
    def context_variance(self) -> float:
        """Variance of the same."""
        prompt, completion = self.prompt, self.completion
        in_flight = completion.moments[3] / (3 * completion.mean) - (completion.biased_mean / 2) ** 2
        return max(0.0, prompt.moments[2] - prompt.mean**2) + max(0.0, in_flight)


def early_figures(completion: Lengths, generated: float) -> tuple[float, float]:
    """What a counter shows after each request slot has generated `generated` tokens: completions so far per slot, and
    tokens still in flight per slot.

    Each slot is a renewal process: one request after the other, all started at time 0.
    """
    bins = int(generated / _STEP)
    chance = np.zeros(max(bins, int(completion.values[-1] / _STEP) + 1) + 1)
    for value, weight in zip(completion.values, completion.weights, strict=True):
        chance[max(1, round(value / _STEP))] += weight
    starts = np.zeros(bins + 1)
    starts[0] = 1.0
    for position in range(1, bins + 1):
        starts[position] = np.dot(chance[1 : position + 1], starts[position - 1 :: -1][:position])
    alive, ages = 1.0 - np.cumsum(chance), np.arange(bins, -1, -1)
    in_flight = float(np.dot(starts, np.maximum(alive[ages], 0.0) * ages)) * _STEP
    return float(starts[1:].sum()), in_flight


def fit_completions(*, completions: float, mean_completion: float, generated: float, limit: float) -> Lengths:
    """Log-normal completions, cut at `limit`, from a run's first minutes.

    Args, all per request slot: completions so far; their mean length; tokens generated so far (decode rate of one
    request times the time).
    Raises CapacityError when the figures contradict each other (more tokens completed than generated).
    """
    in_flight = generated - completions * mean_completion
    if completions <= 0 or in_flight <= 0:
        raise CapacityError(
            f"{completions:.2f} completions of {mean_completion:.0f} tokens per slot, and only {generated:.0f} tokens "
            "were generated; check rate, time and slots."
        )
    low, high = 0.05, 2.0
    for _ in range(16):
        sigma = (low + high) / 2
        lengths = _fit_median(sigma, completions, generated, limit)
        low, high = (low, sigma) if early_figures(lengths, generated)[1] > in_flight else (sigma, high)
    return lengths


def _fit_median(sigma: float, completions: float, generated: float, limit: float) -> Lengths:
    low, high = log(limit / 1000), log(limit * 4)
    for _ in range(24):
        middle = (low + high) / 2
        lengths = log_normal(exp(middle), sigma, limit=limit)
        low, high = (middle, high) if early_figures(lengths, generated)[0] > completions else (low, middle)
    return lengths
