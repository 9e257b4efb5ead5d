"""Decisions of a rolling change of a fleet's settings: who goes first, and whether the canary is as fast. Pure.

A rate is tokens over a window. It comes from the engine's own counter where there is one, which moves with every step;
else from whole answers, which come in lumps, so that many are needed. Both kinds are never mixed in one comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from dfexp.params import AnyFleet

LEAST_ANSWERS = 50  # whole answers of the canary in each window, for a verdict without the engine's counter
MOST_WINDOWS = 5  # so many times the window is waited for data
_RAMP_SHARE, _RAMP_ANSWERS = 0.25, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What was asked for.

    Attributes:
        ident: name of the request, by which its sender finds the answer.
        group: the settings that all servers shall have.
        canary_s: seconds of each measured window; 0: no canary, so nothing is compared.
        least_speed: least rate of the canary, as a share of what is expected of it.
        drain_s: time for requests in flight, after which they are sent again; None: all the time that they may take.

    """

    ident: str
    group: AnyFleet
    canary_s: float
    least_speed: float
    drain_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one server had made at the time `at` (s), since the run began; restarts are bridged."""

    at: float
    counted: float | None  # tokens by the engine's counter; None where it has none
    answered: int  # completion tokens of whole answers
    answers: int
    in_flight: int
    restarts: int
    serves: bool


Window = tuple[Mapping[str, Reading], Mapping[str, Reading]]
"""Readings of all servers at the begin and at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the canary may be followed: None while there are too few data. Rates in tokens/s."""

    passed: bool | None
    text: str
    rate: float | None = None
    expected: float | None = None


def order(in_flight: Mapping[str, int]) -> list[str]:
    """The servers in the order of their change: fewest requests first, since the first one may fail."""
    return sorted(in_flight, key=lambda name: in_flight[name])


def ramp_s(name: str, before: Window, canary_s: float) -> float:
    """How long a server that has just been filled is not judged.

    Without the engine's counter the first answers of a full server come one whole answer late; how long one takes
    follows from requests in flight over answers per second.
    """
    first, last = before[0][name], before[1][name]
    answers_per_s = (last.answers - first.answers) / max(last.at - first.at, 1e-9)
    answer_s = last.in_flight / answers_per_s if answers_per_s and last.counted is None else 0.0
    return min(max(_RAMP_SHARE * canary_s, _RAMP_ANSWERS * answer_s), MOST_WINDOWS * canary_s)


def rate(name: str, window: Window, *, by_counter: bool) -> float | None:
    """Tokens/s of a server that served all through the window, else None."""
    first, last = window[0][name], window[1][name]
    if not (first.serves and last.serves and first.restarts == last.restarts):
        return None
    return _per_s(first, last, by_counter)


def fleet_rate(window: Window) -> float | None:
    """Tokens/s of all servers, whatever they went through; None for a window without length."""
    pairs = [(first, window[1][name]) for name, first in window[0].items()]
    by_counter = all(one.counted is not None for pair in pairs for one in pair)
    rates = [each for pair in pairs if (each := _per_s(*pair, by_counter)) is not None]
    return sum(rates) if rates else None


def _per_s(first: Reading, last: Reading, by_counter: bool) -> float | None:
    made = [one.counted if by_counter else float(one.answered) for one in (first, last)]
    if None in made or last.at <= first.at:
        return None
    return ((made[1] or 0.0) - (made[0] or 0.0)) / (last.at - first.at)


def judge(name: str, before: Window, now: Window, terms: Terms) -> Verdict:
    """Compare the canary with the others in the same window and with itself before.

    Expected of it is its own rate before, times what the others made of theirs meanwhile: so neither a slower GPU nor
    longer prompts count against it. Where one side is missing the other decides.
    """
    first, last = now[0][name], now[1][name]
    if last.restarts != first.restarts or not last.serves:
        return Verdict(passed=False, text=f"{name} did not stay up with the new settings")
    by_counter = first.counted is not None and last.counted is not None and before[1][name].counted is not None
    others = [one for one in now[0] if one != name]
    own, own_before = (rate(name, window, by_counter=by_counter) for window in (now, before))
    others_now, others_before = (
        median([each for one in others if (each := rate(one, window, by_counter=by_counter))] or [0.0])
        for window in (now, before)
    )
    expected = others_now or own_before or 0.0
    if others_now and others_before and own_before:
        expected = own_before * others_now / others_before
    seconds, answers = last.at - first.at, {one: now[1][one].answers - now[0][one].answers for one in now[0]}
    what = "the engine's counter" if by_counter else f"{answers[name]} whole answers"
    text = (
        f"{name} makes {_said(own)} tokens/s over {seconds:.0f} s ({what}; the time in which it filled left out),"
        f" expected {_said(expected or None)}: its own before {_said(own_before)}, the others' median"
        f" {_said(others_now or None)} now and {_said(others_before or None)} before"
    )
    if not expected or (not by_counter and max(answers.values()) < LEAST_ANSWERS):
        return Verdict(passed=None, text=f"not proven, too few data: {text}", rate=own, expected=expected)
    share = (own or 0.0) / expected
    told = f"{share:.2f} of it, at least {terms.least_speed:g} is asked for"
    return Verdict(passed=share >= terms.least_speed, text=f"{text}; {told}", rate=own, expected=expected)


def _said(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.{0 if value >= 10 else 1}f}"
