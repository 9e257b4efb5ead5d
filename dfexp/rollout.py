"""Decisions of a rolling change of a fleet's settings: whether the canary is as fast as it should be. Pure.

A rate is tokens over a window by the engine's own counter, which moves with every step: whole answers come in lumps,
and late after a start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from dfexp.params import AnyFleet

DONE = "rollout_done"
FINAL = frozenset({DONE, "rollout_rolled_back", "rollout_stopped", "rollout_failed"})
"""States in which a change is over."""
RAMP_SHARE = 0.25
"""Part of a window's length for which a server that has just been filled is not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What was asked for.

    Attributes:
        ident: name of the request, by which its sender finds the answer.
        group: the settings that all servers shall have.
        canary_s: seconds of each measured window; 0: no canary, so nothing is compared.
        least_speed: least rate of the canary, as a share of what is expected of it.
        answers: prompts of the run whose answers before and after the change are compared; 0: none.
        drain_s: time for requests in flight, after which they are sent again; None: all the time that they may take.

    """

    ident: str
    group: AnyFleet
    canary_s: float
    least_speed: float
    answers: int = 0
    drain_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one server had made by the time `at` (s, monotonic)."""

    at: float
    tokens: float | None  # by the engine's counter, restarts bridged; None where it has none
    restarts: int
    serves: bool


Window = tuple[Mapping[str, Reading], Mapping[str, Reading]]
"""Readings of all servers at its begin and at its end."""


def rate(name: str, window: Window) -> float | None:
    """Tokens/s of a server; None if the window has no length, the engine no counter."""
    first, last = window[0][name], window[1][name]
    if first.tokens is None or last.tokens is None or last.at <= first.at:
        return None
    return (last.tokens - first.tokens) / (last.at - first.at)


def fleet_rate(window: Window) -> float:
    """Tokens/s of all servers together, whatever they went through."""
    return sum(rate(name, window) or 0.0 for name in window[0])


def steady(name: str, window: Window) -> bool:
    """Whether a server was fed all through the window."""
    first, last = window[0][name], window[1][name]
    return first.serves and last.serves and first.restarts == last.restarts


def judge(name: str, before: Window, now: Window, least_speed: float) -> tuple[bool, str]:
    """Whether the canary is as fast as expected, and the numbers.

    Expected is the median of its own rate before, of the others' now, and of its own before times what the others made
    of theirs meanwhile: so neither a slower GPU, nor longer prompts, nor one noisy number counts against it. Where one
    side is missing the other decides; without both it is not proven, and fails.
    """
    own, own_before = (rate(name, window) if steady(name, window) else None for window in (now, before))
    others_now, others_before = (
        median([rate(one, window) or 0.0 for one in window[0] if one != name and steady(one, window)] or [0.0])
        for window in (now, before)
    )
    estimates = [rate for rate in (own_before, others_now) if rate]
    if own_before and others_now and others_before:
        estimates.append(own_before * others_now / others_before)
    expected = median(estimates or [0.0])
    seconds = now[1][name].at - now[0][name].at
    text = (
        f"{own or 0.0:,.1f} tokens/s over {seconds:.0f} s, the time in which it filled left out; expected"
        f" {expected:,.1f}: its own before {own_before or 0.0:,.1f}, the others' median {others_now:,.1f} now and"
        f" {others_before:,.1f} before"
    )
    if not expected or own is None:
        return False, f"not proven, it did not serve all the time or there is nothing to compare: {text}"
    share = own / expected
    hint = "" if share >= least_speed else ". If that is wanted all the same: --no-canary, or a lower --least-speed"
    return (
        share >= least_speed,
        f"{share:.2f} of the expected speed, at least {least_speed:g} is asked for: {text}{hint}",
    )
