"""Does a setting change what the model says? The same prompts, answered with two configurations. Pure.

Answers differ without any change too: the sums of a batch depend on who else is in it, and at a temperature above 0
the draw does. So the yardstick is one configuration against itself, prompt by prompt, and no share by itself says
anything. Tests are paired by prompt; together they raise a false alarm in `ALARMS` of comparisons at the most (Holm).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from dfexp.quality import repetition
from dfexp.records import Answer

ALARMS = 0.01
LEAST_PAIRS = 20
SAME, PARTS_EARLIER, DIFFERS, TOO_FEW = (
    "no more difference than by chance",
    "answers part earlier",
    "differs",
    "too few answers",
)
Said = Mapping[int, Answer]
"""Answers by the index of their prompts; prompts that have none are left out of the pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One comparison: what it is of, both sides as text, and how likely so much is by chance (0-1)."""

    name: str
    reference: str
    changed: str
    p: float
    own_p: float | None  # the same of the reference against itself: small where the test itself is at fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome.

    Attributes:
        verdict: one of SAME, PARTS_EARLIER (the same in length, end and repetition; the words part earlier than from
            their own repetition, as other sums do it), DIFFERS, TOO_FEW.
        pairs: prompts that both have answered.
        identical, own_identical: share of equal texts, 0-1: with the change, and of the reference with itself.
        first_difference, own_first_difference: median place, in characters, of answers that differ; None: none do.
        length_ratio: tokens with the change over those without, geometric mean and its 95 % interval.
        tests: all that was tested.

    """

    verdict: str
    pairs: int
    identical: float | None
    own_identical: float | None
    first_difference: float | None
    own_first_difference: float | None
    length_ratio: tuple[float, float, float] | None
    tests: tuple[Test, ...] = ()

    def __str__(self) -> str:
        if self.verdict == TOO_FEW:
            return f"{TOO_FEW}: {self.pairs} prompts answered by both, at least {LEAST_PAIRS} are needed"
        words = [f"{self.verdict}: {self.pairs} prompts, {self.identical:.0%} of the answers identical"]
        if self.own_identical is not None:
            words.append(f"{self.own_identical:.0%} without any change")
        if self.first_difference is not None:
            own = "" if self.own_first_difference is None else f" (own: {self.own_first_difference:,.0f})"
            words.append(f"those that differ part after {self.first_difference:,.0f} characters{own}")
        if self.length_ratio is not None:
            ratio, low, high = self.length_ratio
            words.append(f"length {ratio:.3f} times as before, {low:.3f} to {high:.3f} in 95 of 100 cases")
        return "; ".join(words)


def first_difference(one: str, other: str) -> int | None:
    """The first character, from 0, in which two texts differ; None if they are equal."""
    if one == other:
        return None
    low, high = 0, min(len(one), len(other)) + 1  # the longest common beginning is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle)
    return low


def compare(reference: Said, changed: Said, again: Said | None = None) -> Verdict:
    """Whether `changed` says other things than `reference`. `again` is the reference asked once more: the yardstick.

    Without it the places of first differences are told, but not judged. Answers without a count of tokens take no part
    in the comparison of lengths.
    """
    indices = sorted(reference.keys() & changed.keys())
    pairs = [(reference[index], changed[index]) for index in indices]
    own = None if again is None else [(reference[i], again[i]) for i in sorted(reference.keys() & again.keys())]
    places = [first_difference(one.text, other.text) for one, other in pairs]
    own_places = None if own is None else [first_difference(one.text, other.text) for one, other in own]
    both = [] if again is None else [index for index in indices if index in again]
    tests = [_test(name, size, shown, pairs, own) for name, size, shown in _SIZES]
    if both:
        tests.append(_parting(both, reference, changed, again or {}))
    found = _significant(tests)
    verdict = DIFFERS if found - {_PARTS} else PARTS_EARLIER if found else SAME
    return Verdict(
        verdict=verdict if len(pairs) >= LEAST_PAIRS else TOO_FEW,
        pairs=len(pairs),
        identical=_share(places),
        own_identical=_share(own_places),
        first_difference=_middle(places),
        own_first_difference=_middle(own_places),
        length_ratio=_ratio(pairs),
        tests=tuple(tests),
    )


def _tokens(answer: Answer) -> float | None:
    return None if answer.completion_tokens is None else math.log(max(1, answer.completion_tokens))


_PARTS = "answers part earlier than from themselves"
_SIZES: tuple[tuple[str, Callable[[Answer], float | None], Callable[[float], str]], ...] = (
    ("tokens of an answer", _tokens, lambda mean: f"{math.exp(mean):,.0f}"),
    ("cut for its length", lambda answer: float(answer.finish_reason == "length"), lambda mean: f"{mean:.1%}"),
    ("words said again", lambda answer: repetition(answer.text), lambda mean: f"{mean:.1%}"),
)
Pairs = Sequence[tuple[Answer, Answer]]


def _test(
    name: str, size: Callable[[Answer], float | None], shown: Callable[[float], str], pairs: Pairs, own: Pairs | None
) -> Test:
    known = _known(size, pairs)
    first, second = [shown(fmean(side)) for side in zip(*known, strict=True)] or ("-", "-")
    own_p = None if own is None else _by_chance([two - one for one, two in _known(size, own)])
    p = _by_chance([two - one for one, two in known])
    return Test(name=name, reference=first, changed=second, p=p, own_p=own_p)


def _parting(indices: Sequence[int], reference: Said, changed: Said, again: Said) -> Test:
    """Whether more answers part earlier with the change than without one: a sign test, one-sided."""
    earlier = later = 0
    for index in indices:
        text = reference[index].text
        place, own = (first_difference(text, other[index].text) for other in (changed, again))
        earlier += place is not None and (own is None or place < own)
        later += own is not None and (place is None or own < place)
    return Test(name=_PARTS, reference=f"{later}", changed=f"{earlier}", p=_tail(earlier, earlier + later), own_p=None)


def _known(size: Callable[[Answer], float | None], pairs: Pairs) -> list[tuple[float, float]]:
    sizes = ((size(one), size(two)) for one, two in pairs)
    return [(one, two) for one, two in sizes if one is not None and two is not None]


def _by_chance(differences: Sequence[float]) -> float:
    """How often differences like these have a mean so far from 0 by chance, two-sided: normal, or exact by signs."""
    nonzero = [one for one in differences if one]
    if len(differences) < 2 or not nonzero:
        return 1.0
    if len(set(map(abs, nonzero))) == 1:  # yes or no: McNemar's exact test
        above = sum(one > 0 for one in nonzero)
        return min(1.0, 2 * _tail(max(above, len(nonzero) - above), len(nonzero)))
    return math.erfc(abs(fmean(differences)) / (stdev(differences) * math.sqrt(2 / len(differences))))


def _tail(hits: int, tries: int) -> float:
    """How often a fair coin shows at least so many heads."""
    return sum(math.comb(tries, count) for count in range(hits, tries + 1)) / 2**tries if tries else 1.0


def _significant(tests: Sequence[Test]) -> set[str]:
    """Names of the tests that hold, by Holm's steps: the surest first, each against what is left."""
    found = set()
    for number, test in enumerate(sorted(tests, key=lambda test: test.p)):
        if test.p > ALARMS / (len(tests) - number):
            break
        found.add(test.name)
    return found


def _share(places: Sequence[int | None] | None) -> float | None:
    return sum(place is None for place in places) / len(places) if places else None


def _middle(places: Sequence[int | None] | None) -> float | None:
    apart = [place for place in places or () if place is not None]
    return median(apart) if apart else None


def _ratio(pairs: Pairs) -> tuple[float, float, float] | None:
    known = _known(_tokens, pairs)
    if len(known) < 2:
        return None
    logs = [two - one for one, two in known]
    mean, half = fmean(logs), 1.96 * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
