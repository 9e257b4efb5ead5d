from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfexp import quality
from dfexp.equivalence import DIFFERS, LEAST_PAIRS, PARTS_EARLIER, SAME, TOO_FEW, compare, first_difference
from dfexp.records import Answer

WORDS = ["the", "a", "of", "run", "slow", "cat", "river", "stone", "open", "light", "nine", "under"]


def answer(text: str, tokens: int | None = None, finish_reason: str = "stop") -> Answer:
    return Answer(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=5,
        completion_tokens=tokens,
        max_tokens=4096,
        submitted_at=0.0,
        latency_s=1.0,
    )


def drawn(seed: int, prompts: int, *, longer: float = 1.0, cut: float = 0.05, loops: float = 0.0) -> dict[int, Answer]:
    """Answers whose length depends on their prompt and on a draw, as at a temperature above 0."""
    draw, found = random.Random(seed), {}
    for index in range(prompts):
        tokens = int(longer * random.Random(index).lognormvariate(5, 0.4) * draw.lognormvariate(0, 0.3))
        said = draw.choices(WORDS, k=tokens)
        if draw.random() < loops:
            said = said[: tokens // 2] + ["again", "and"] * (tokens // 4)
        found[index] = answer(" ".join(said), tokens, "length" if draw.random() < cut else "stop")
    return found


def parted(base: dict[int, Answer], seed: int, share: float, earliest: float) -> dict[int, Answer]:
    """The same answers, of which a share has other words from some place on, of the same number."""
    draw, found = random.Random(seed), {}
    for index, one in base.items():
        said = one.text.split(" ")
        if draw.random() < share:
            place = int(len(said) * draw.uniform(earliest, 1))
            said = said[:place] + draw.choices(WORDS, k=len(said) - place)
        found[index] = answer(" ".join(said), one.completion_tokens, one.finish_reason or "stop")
    return found


@given(st.text(), st.text(), st.text())
def test_the_first_difference_is_the_first(same: str, one: str, other: str) -> None:
    one, other = same + one, same + other
    place = first_difference(one, other)
    if place is None:
        assert one == other
    else:
        assert one[:place] == other[:place]
        assert one[place : place + 1] != other[place : place + 1]


def test_equal_answers_are_identical_and_no_difference() -> None:
    base = drawn(1, 64)
    found = compare(base, base, base)
    assert (found.verdict, found.identical, found.own_identical, found.first_difference) == (SAME, 1.0, 1.0, None)
    assert found.length_ratio == (1.0, 1.0, 1.0)
    assert all(test.p == 1.0 for test in found.tests)


def test_draws_of_the_same_configuration_seldom_differ() -> None:
    """With a limit of 1 in 100 more than 4 false alarms in 100 would come once in 280 such tests."""
    verdicts = [compare(drawn(2 * seed, 80), drawn(2 * seed + 1, 80)).verdict for seed in range(100)]
    assert verdicts.count(DIFFERS) <= 4
    assert verdicts.count(SAME) >= 96


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"longer": 1.25}, "tokens of an answer"),
        ({"longer": 0.8}, "tokens of an answer"),
        ({"cut": 0.3}, "cut for its length"),
        ({"loops": 0.25}, "words said again"),
    ],
)
def test_what_changes_is_found_and_named(change: dict[str, float], name: str) -> None:
    found = compare(drawn(1, 200), drawn(2, 200, **change), drawn(3, 200))
    assert found.verdict == DIFFERS
    test = min(found.tests, key=lambda test: test.p)
    assert test.name == name
    assert test.p < 0.0025
    assert test.own_p is not None
    assert test.own_p > 0.0025


def test_the_interval_of_the_lengths_holds_the_truth() -> None:
    ratios = [compare(drawn(2 * s, 100), drawn(2 * s + 1, 100, longer=1.1)).length_ratio for s in range(60)]
    held = sum(low <= 1.1 <= high for _, low, high in filter(None, ratios))
    assert 50 <= held <= 60


def test_other_sums_part_answers_earlier_but_change_no_size() -> None:
    base = drawn(1, 100)
    found = compare(base, parted(base, 2, 0.9, 0.1), parted(base, 3, 0.1, 0.8))
    assert found.verdict == PARTS_EARLIER
    assert found.identical == pytest.approx(0.1, abs=0.1)
    assert found.own_identical == pytest.approx(0.9, abs=0.1)
    assert found.first_difference is not None
    assert found.own_first_difference is not None
    assert found.first_difference < found.own_first_difference


def test_as_much_as_from_themselves_is_no_difference() -> None:
    base = drawn(1, 100)
    assert compare(base, parted(base, 2, 0.6, 0.2), parted(base, 3, 0.6, 0.2)).verdict == SAME


def test_few_pairs_prove_nothing() -> None:
    found = compare(drawn(1, LEAST_PAIRS - 1), drawn(2, LEAST_PAIRS - 1, longer=5))
    assert found.verdict == TOO_FEW
    assert "19 prompts" in str(found)
    nothing = compare({}, {})
    assert (nothing.verdict, nothing.identical, nothing.length_ratio) == (TOO_FEW, None, None)


def test_prompts_that_only_one_has_answered_are_left_out() -> None:
    base = drawn(1, 50)
    found = compare(base, {index: base[index] for index in range(25, 50)} | {99: answer("more")}, {})
    assert found.pairs == 25
    assert found.own_identical is None


def test_answers_without_a_count_take_no_part_in_lengths() -> None:
    base = {index: answer(f"text {index}") for index in range(30)}
    found = compare(base, base)
    assert found.length_ratio is None
    assert (found.tests[0].reference, found.tests[0].p) == ("-", 1.0)


def test_the_words_say_what_was_compared() -> None:
    base = drawn(1, 100)
    said = str(compare(base, drawn(2, 100, longer=1.5), drawn(3, 100)))
    assert said.startswith(f"{DIFFERS}: 100 prompts, 0% of the answers identical; 0% without any change")
    assert "length 1." in said


def test_repetition_counts_runs_that_were_there_before() -> None:
    assert quality.repetition("") == quality.repetition("one two three") == 0.0
    assert quality.repetition("a b c d e f g h") == 0.0
    assert quality.repetition("a b " * 50) == pytest.approx(1 - 2 / 97)
