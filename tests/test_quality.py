"""What broken servers say is told from what models say."""

from __future__ import annotations

import random
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfexp.params import SpoiledGroup
from dfexp.quality import KNOWN, Thresholds, flags, garbage, marks, repeated, usual_lengths
from tests.finished_run import row

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
        (" ".join(WORDS[:500]) + " and so on" * 800, "length", ("looping", "repetitive", "truncated")),
        (" ".join(WORDS[:500]) + " and so on" * 800 + " " + " ".join(WORDS[500:600]), "stop", ("repetitive",)),
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


PROSE = " ".join(WORDS[1000:1200])
LOOP = "Wait, let me check that again. "
LATIN = ["the rate is low", "der Wert steigt", "la valeur augmente", "значение растёт", "सबसे बड़ा मान"]
HANZI = (
    "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生自会那后能"
    "对着事其里所去行过家十用发天如然作方成者多日都三小军二无同么经法当起与好看学进种将还分此心"
    "前面又定见只主没公从"
)


def said_in_hanzi(count: int) -> str:
    return "".join(DRAW.choice(HANZI) if place % 17 else "，" for place in range(count))


HONEST = {
    "table of numbers": "\n".join(
        "| " + " | ".join(f"{DRAW.random():.3f}" for _ in range(6)) + " |" for _ in range(80)
    ),
    "multiplication table": TABLE,
    "truth table": "| A | B | C | A and B or C |\n|---|---|---|---|\n" + "\n".join(
        f"| {a} | {b} | {c} | {(a and b) or c} |" for a in (True, False) for b in (True, False) for c in (True, False)
    ),
    "test cases": "\n".join(f"assert add({a}, {b}) == {a + b}" for a in range(12) for b in range(6)),
    "JSON": "[\n" + ",\n".join(
        f'  {{"id": {i}, "name": "{WORDS[i]}", "tags": ["{WORDS[2 * i]}", "{WORDS[3 * i]}"]}}' for i in range(60)
    ) + "\n]",
    "class with accessors": "\n".join(
        f"    def get_{name}(self) -> int:\n        \"\"\"Return {name}.\"\"\"\n        return self._{name}\n"
        for name in WORDS[:40] if len(name) > 3
    ),
    "long division": "\n".join(f"Step {i}: {i} x {i + 7} = {i * (i + 7)}, remainder {i * 31 % 17}." for i in range(60)),
    "LaTeX": "\n".join(
        f"\\begin{{align}} x_{{{i}}} &= \\frac{{{i * 3}}}{{{i + 2}}} x_{{{i - 1}}} + {i} \\\\ \\end{{align}}"
        for i in range(50)
    ),
    "proof by cases": "\n\n".join(
        f"Case {i}: suppose n = {i} (mod 9). Then n^2 = {i * i % 9} (mod 9), so the claim holds." for i in range(9)
    ),
    "numbered list": "\n".join(f"{i}. **{WORDS[i]}**: {' '.join(WORDS[9 * i : 9 * i + 9])}." for i in range(1, 60)),
    "draft and answer": f"<think>\n{PROSE}\nLet me rewrite it.\n{PROSE}\nGood.\n</think>\n\n{PROSE}",
    "draft three times": f"<think>\n{PROSE}\n\n{PROSE}\n\n{PROSE}\n</think>\n\n{PROSE}",
    "song": "\n\n".join(
        f"{i} bottles of beer on the wall, {i} bottles of beer.\nTake one down and pass it around, {i - 1} bottles of "
        f"beer on the wall." for i in range(6, 0, -1)
    ) + f"\n\n{PROSE}",
    "Chinese": said_in_hanzi(1500),
    "Chinese list": "\n".join(f"{i}. {said_in_hanzi(30)}。" for i in range(1, 40)),
    "languages": "\n".join(f"{i}) {DRAW.choice(LATIN)}: {' '.join(DRAW.sample(WORDS, 6))}" for i in range(60)),
    "indented code": "\n".join(f"{' ' * (4 * (i % 6))}{WORDS[i]} = {WORDS[i + 1]}({i})" for i in range(150)),
    "diagram": "\n".join("+" + "-" * 30 + "+\n|" + WORDS[i].center(30) + "|" for i in range(8)) + f"\n\n{PROSE}" * 2,
}  # fmt: skip
LOOPS = {
    "a word": "no, " * 400,
    "a sentence": LOOP * 100,
    "a paragraph": f"{PROSE}\n\n" * 12,
    "with a number that counts": "".join(
        f"Step {i}: I need to check the next case, since the one before did not hold either.\n" for i in range(100)
    ),
    "after a good beginning": PROSE + LOOP * 150,
    "before a good end": LOOP * 150 + PROSE,
    "a wavering thought": "".join(
        f"{DRAW.choice(('Wait', 'Hmm', 'No'))}, {DRAW.choice(('so', 'but', 'and'))} that is the same as before, and I "
        "have to look at the definition again to be sure of it. "
        for _ in range(80)
    ),
    "Chinese": "所以答案应该是三，让我再检查一遍题目的条件。" * 40,
    "Chinese, after a good beginning": said_in_hanzi(600) + "让我再检查一遍。" * 250,
    "fences": "```\n\n" * 200,
}


@pytest.mark.parametrize("kind", HONEST)
def test_tables_code_lists_and_drafts_are_not_repetitive(kind: str) -> None:
    assert repeated(HONEST[kind]) <= 0.25  # half of the threshold
    assert flags(HONEST[kind], "stop", 400) == ()


@pytest.mark.parametrize("kind", LOOPS)
def test_loops_are_found_however_they_end(kind: str) -> None:
    assert repeated(LOOPS[kind]) >= 0.65
    assert {"repetitive", "garbage"} & {*flags(LOOPS[kind], "stop", 400)}
    assert marks(row(0, text=LOOPS[kind]).to_json(), Thresholds(), thinking=False) & Thresholds().rejected


@given(st.text(max_size=400), st.integers(5, 40))
def test_what_is_said_over_and_over_is_repeated_and_what_is_said_once_is_not(text: str, times: int) -> None:
    assert 0 <= repeated(text) <= 1
    if len(" ".join(text.split())) >= 24:
        assert repeated(f"{text} " * (times + 1)) >= 0.7
    assert repeated(" ".join(map(str, range(times * 40)))) == 0.0


@given(st.lists(st.integers(1, 30_000), max_size=60), st.floats(0.1, 10), st.integers(2, 9))
def test_usual_lengths_hold_the_median_scale_with_lengths_and_widen(counts: list[int], sigmas: float, by: int) -> None:
    least, most = usual_lengths(counts, sigmas)
    inside = [count for count in counts if least * 0.999 <= count <= most * 1.001]
    assert 2 * len(inside) >= len(counts) * (sigmas >= 0.7)  # half are within 0.67 of them
    assert usual_lengths([count * by for count in counts], sigmas) == pytest.approx((least * by, most * by))
    wider = usual_lengths([*counts, nan, 0], sigmas * 1.5)
    assert wider[0] <= least * 1.001
    assert wider[1] >= most * 0.999


def test_an_answer_far_from_the_others_is_an_outlier_and_one_length_has_none() -> None:
    counts = [DRAW.lognormvariate(7, 0.5) for _ in range(4000)]
    least, most = usual_lengths(counts, 4.0)
    assert (least, most) == pytest.approx((1097 / 7.4, 1097 * 7.4), rel=0.15)  # e^7, e^(4 x 0.5)
    assert usual_lengths([*counts, 9e9], 4.0)[1] == pytest.approx(most, rel=0.01)
    assert usual_lengths([64.0] * 9, 4.0) == usual_lengths([], 4.0) == (0.0, inf)


def test_every_flag_has_a_meaning() -> None:
    assert {*SpoiledGroup.model_fields} <= KNOWN.keys()


USER = {"role": "user", "content": "q"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}


def found(*, thinking: bool = False, **changes: Any) -> set[str]:
    limits = {name: changes.pop(name) for name in ("tokens", "repeated") if name in changes}
    usual = changes.pop("usual", (0.0, inf))
    return marks(row(0, **changes).to_json(), Thresholds(**limits), thinking=thinking, usual=usual)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"text": ""}, {"empty", "garbage"}),  # nothing for ten tokens
        ({"text": "", "completion_tokens": 1}, {"empty"}),
        ({"text": "<think>\nso\n</think>\n\n", "finish_reason": "length"}, {"empty", "truncated"}),
        ({"text": "<think>\nso", "finish_reason": "length"}, {"unclosed_thought", "truncated"}),
        ({"text": "a b " * 200}, {"garbage"}),
        ({"finish_reason": None}, {"unknown_end"}),
        ({"flags": ("simulated",)}, {"simulated"}),
        ({"text": "one\0two"}, {"nul"}),
        ({"messages": ({"role": "system", "content": "s"}, USER)}, set()),
        ({"messages": ({"role": "assistant", "content": "hi"}, USER)}, {"odd_turns", "earlier_answers"}),
        ({"messages": (USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, USER)},
         {"odd_turns", "earlier_answers"}),
        ({"messages": (USER, {"role": "system", "content": "s"}, USER)}, {"odd_turns"}),
        ({"messages": ({"role": "system", "content": "s"},)}, {"odd_turns"}),
        ({"messages": (USER, USER)}, set()),
        ({"messages": (USER, CALL, {"role": "tool", "content": "1", "tool_call_id": "a"})},
         {"tools", "earlier_answers"}),
        ({"finish_reason": "tool_calls"}, {"tools"}),
        ({"tokens": (11, None)}, {"too_short"}),
        ({"tokens": (10, 10)}, set()),
        ({"tokens": (0, 9)}, {"too_long"}),
        ({"tokens": (11, None), "completion_tokens": None}, set()),
        ({"thinking": True}, {"unclosed_thought"}),
        ({"usual": (11.0, 99.0)}, {"length_outlier"}),
        ({"usual": (1.0, 9.0)}, {"length_outlier"}),
        ({"usual": (11.0, 99.0), "completion_tokens": None}, set()),
        ({"text": PROSE + LOOP * 15}, set()),
        ({"text": PROSE + LOOP * 15, "repeated": 0.3}, {"repetitive"}),
        ({"text": PROSE + LOOP * 60}, {"repetitive"}),
        ({"text": PROSE + LOOP * 60, "repeated": 0.8}, set()),
        ({"flags": ("repetitive", "no_usage")}, {"no_usage"}),  # by the threshold of now
    ],
)  # fmt: skip
def test_what_speaks_against_a_row(changes: dict[str, Any], expected: set[str]) -> None:
    assert found(**changes) == expected
    assert expected <= KNOWN.keys() | {"no_usage"}
