"""What broken servers say is told from what models say."""

from __future__ import annotations

import random

import pytest

from dfexp.quality import flags, garbage

TABLE = "\n".join("| " + " | ".join(str(row * column) for column in range(1, 13)) + " |" for row in range(1, 13))
ZEROS = "| a | b | c | d |\n|---|---|---|---|\n" + "| 0 | 0 | 0 | 0 |\n" * 12
CODE = "def f(x):\n" + "    if x == 1:\n        return 2\n" * 10
DRAW = random.Random(1)
WORDS = ["".join(DRAW.choice("abcdefghijklmnop") for _ in range(DRAW.randint(1, 8))) for _ in range(5000)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("!" * 48, "'!' over and over"),
        ("the " * 48, "over and over"),
        ("Sure. " + "!" * 400, "over and over"),
        ("\u0000" * 48, "over and over"),
        ("", "no text for 48 tokens"),
        (" \n\n", "no text for 48 tokens"),
        ("Sure. " + "I am sorry, but I cannot help with that request today. " * 60, "with the content of"),
    ],
)
def test_garbage_is_named(text: str, why: str) -> None:
    assert why in (garbage(text, 48) or "")


@pytest.mark.parametrize(
    "text",
    ["42", "Yes!!!", "- - -", TABLE, ZEROS, CODE, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14", "Ha ha ha ha!"],
)
def test_honest_answers_pass(text: str) -> None:
    assert garbage(text, 48) is None


@pytest.mark.parametrize("count", [20, 48, 400, 8000])
def test_random_words_of_a_random_model_pass(count: int) -> None:
    assert garbage(" ".join(DRAW.choice(WORDS) for _ in range(count)), count) is None


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_nothing_for_no_token_is_no_garbage(tokens: int | None) -> None:
    assert garbage("", tokens) is None


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        ("An answer.", "stop", ()),
        ("<think>\nhm\n</think>\n\nAn answer.", "stop", ()),
        ("", "stop", ("empty",)),
        (" \n\u2028", "stop", ("empty",)),
        ("<think>\nhm\n</think>\n\n", "stop", ("empty",)),
        ("<think>\nhm", "stop", ("unclosed_thought",)),
        ("<think>\nhm", "length", ("unclosed_thought", "truncated")),
        ("An ans", "length", ("truncated",)),
        ("!" * 400, "length", ("garbage", "truncated")),
        (" ".join(WORDS[:1500]) + " and so on" * 400, "length", ("looping", "truncated")),
        (" ".join(WORDS[:1500]) + " and so on" * 400, "stop", ()),
        ("An answer.", None, ("unknown_end",)),
        ("An answer.", "hungry", ("unknown_end",)),
        ("a\0b", "stop", ("nul",)),
        ("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg", "stop", ()),
    ],
)
def test_what_is_unusual_has_its_flags(text: str, finish_reason: str | None, expected: tuple[str, ...]) -> None:
    assert flags(text, finish_reason, 3) == expected


def test_a_thought_that_began_in_the_prompt_is_open_until_it_ends() -> None:
    assert flags("hm, two twos", "stop", 3, thinking=True) == ("unclosed_thought",)
    assert flags("hm, two twos\n</think>\n\n4", "stop", 3, thinking=True) == ()
    assert flags("4", "stop", 3) == ()
