"""What one row becomes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfexp.export.rows import chat, is_as_templates_write, is_for_validation, joined, split
from tests.finished_run import row

USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("plain", "", "plain"),
        ("<think>\nwhy\n</think>\n\nso", "why", "so"),
        ("why\n</think>\n\nso", "why", "so"),  # the beginning was in the prompt
        ("<think>\n\n</think>\n\nso", "", "so"),
        ("<think>\nnot done", "not done", ""),
        ("<think>\na </think> b </think> c", "a ", " b </think> c"),
        ("\n  <think> why  \n</think>so\n", " why  ", "so\n"),
        ("says <think> in the middle", "", "says <think> in the middle"),
        ("`<think>` goes before `</think>`.", "", "`<think>` goes before `</think>`."),
    ],
)
def test_a_text_is_split_where_its_first_thought_ends(text: str, thought: str, answer: str) -> None:
    assert split(text) == (thought, answer)


def test_a_thought_whose_beginning_was_in_the_prompt_is_all_thought_when_it_never_ended() -> None:
    given = row(0, text="not done", flags=("unclosed_thought", "truncated")).to_json()
    assert chat(given, "apart")[-1] == {"role": "assistant", "content": "", "reasoning_content": "not done"}


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(TEXT.filter(lambda text: text.strip("\n") == text != ""), TEXT.filter(lambda text: text.lstrip("\n") == text))
def test_what_templates_write_is_taken_apart_and_joined_again(thought: str, answer: str) -> None:
    if "</think>" not in thought and not thought.startswith("<think>"):
        assert joined(*split(joined(thought, answer))) == joined(thought, answer)


@pytest.mark.parametrize(
    ("text", "is_so"),
    [
        ("<think>\na\n</think>\n\nb", True), ("a\n</think>\n\nb", True), ("plain", True),
        ("<think>\n\n</think>\n\nb", True), ("<think>a</think>b", False), ("\n<think>\na\n</think>\n\nb", False),
        ("<think>\na\n</think>\n\n\nb", False),
    ],
)  # fmt: skip
def test_other_white_space_around_a_thought_is_noticed(text: str, is_so: bool) -> None:
    assert is_as_templates_write(text) == is_so


HISTORY = (
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}], "name": "x"},
    {"role": "assistant", "content": "three", "reasoning_content": "hm"},
    USER,
)


@pytest.mark.parametrize(
    ("thinking", "before", "answer"),
    [
        ("inline", {"content": "<think>\nhm\n</think>\n\nthree"}, {"content": "<think>\nwhy\n</think>\n\nso"}),
        ("apart", {"content": "three", "reasoning_content": "hm"}, {"content": "so", "reasoning_content": "why"}),
        ("dropped", {"content": "three"}, {"content": "so"}),
    ],
)
def test_thoughts_go_where_they_are_asked_to(thinking: Any, before: dict[str, str], answer: dict[str, str]) -> None:
    said = chat(row(0, messages=HISTORY, text="<think>\nwhy\n</think>\n\nso").to_json(), thinking)
    assert said == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", **before},
        USER,
        {"role": "assistant", **answer},
    ]


def test_a_thought_that_was_asked_for_may_talk_about_tags() -> None:
    row = {"messages": [{"role": "user", "content": "q"}], "text": "What is <think>?\n</think>\n\nA tag.", "flags": []}
    assert chat(row, "dropped")[-1]["content"] == row["text"]
    assert chat(row, "dropped", True)[-1]["content"] == "A tag."
    assert chat({**row, "text": "None."}, "dropped", True)[-1]["content"] == "None."
    assert not is_as_templates_write("What is <think>? </think>A tag.", True)


@given(st.text(st.characters(codec="utf-8")))
def test_inline_is_the_text_byte_for_byte(text: str) -> None:
    assert chat(row(0, text=text).to_json(), "inline")[-1] == {"role": "assistant", "content": text}


def test_a_share_of_prompts_is_for_validation_and_a_larger_share_only_adds_some() -> None:
    prompts = [[{"role": "user", "content": f"question {number}"}] for number in range(4000)]
    few, more = ([is_for_validation(prompt, share) for prompt in prompts] for share in (0.05, 0.1))
    assert 150 < sum(few) < 250
    assert 320 < sum(more) < 480
    assert all(later for earlier, later in zip(few, more, strict=True) if earlier)
    assert not any(is_for_validation(prompt, 0.0) for prompt in prompts)
