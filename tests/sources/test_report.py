"""How much of the prompts an earlier one begins with, against a count of every character."""

from __future__ import annotations

from itertools import pairwise
from os.path import commonprefix
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfexp.sources.report import EXAMPLES, Measures, Notes


def share(*texts: str) -> float:
    measures = Measures()
    for text in texts:
        measures.add([{"role": "user", "content": text}])
    return measures.shared_prefix_share()


def exact(*texts: str) -> float:
    ordered = sorted(f"user\n{text}" for text in texts)
    shared = sum(len(commonprefix(pair)) for pair in pairwise(ordered))  # noqa: RUF071 (of texts, not of paths)
    return shared / max(1, sum(map(len, ordered)))


def test_prompts_that_share_nothing_share_nothing() -> None:
    assert share() == share("abc", "xyz") == share("a" * 50, "b" * 50) == 0.0


@pytest.mark.parametrize("shared", [20, 100, 1000, 30_000])
def test_a_common_beginning_is_found_to_an_eighth(shared: int) -> None:
    texts = ["s" * shared + str(n) * 30 for n in range(10)]
    assert exact(*texts) * 0.8 < share(*texts) <= exact(*texts)


def test_repeated_prompts_count_but_for_the_first() -> None:
    assert share(*["x" * 500] * 4) == pytest.approx(0.75, abs=0.1)


@given(st.integers(0, 1000))
def test_it_is_never_more_than_what_a_cache_would_find(seed: int) -> None:
    rng = Random(seed)
    texts = ["".join(rng.choices("ab", k=rng.randint(0, 80))) for _ in range(6)]
    texts += [rng.choice(texts)[: rng.randint(0, 80)] + rng.choice(texts) for _ in range(6)]
    assert share(*texts) <= exact(*texts) + 1e-9


def test_examples_are_bounded_for_each_reason_and_counts_are_not() -> None:
    notes = Notes()
    for line in range(3 * EXAMPLES):
        notes.add("p.jsonl", line, "common", "x" * 500)
    notes.add("p.jsonl", 7, "rare", "y")
    assert notes.by_reason == {"common": 3 * EXAMPLES, "rare": 1}
    assert len(notes.examples) == EXAMPLES + 1
    assert len(notes.examples[0]["detail"]) == 200
