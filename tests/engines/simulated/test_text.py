"""Words, tokens and lengths of simulated requests and answers."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from dfexp.capacity.workload import Lengths, constant, log_normal
from dfexp.engines.simulated.server.text import (
    CLOSE,
    OPEN,
    Writer,
    drawn,
    drawn_many,
    prompt_tokens,
    request_key,
    said,
)
from dfexp.quality import garbage

LENGTHS = log_normal(1929, 0.5, limit=8192)
KEYS = [request_key([{"role": "user", "content": f"question {number}"}], 1) for number in range(2000)]


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(1)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("thinking", [True, False])
def test_answers_look_like_text_of_their_length(writer: Writer, thinking: bool) -> None:
    for key in KEYS[:200]:
        whole = drawn(LENGTHS, key)
        text = writer.answer(key, whole, thinking=thinking, whole=whole)
        assert garbage(text, whole) is None
        assert len(text.encode()) / 4 == pytest.approx(whole, abs=8)
        assert text.isascii()
        assert text.endswith(".")
        assert text.startswith(OPEN) == thinking


def test_two_thirds_of_an_answer_are_thought(writer: Writer) -> None:
    thought, close, answer = writer.answer(KEYS[0], 900, thinking=True, whole=900).partition(CLOSE)
    assert close
    assert len(thought) / len(answer) == pytest.approx(2, rel=0.05)
    assert answer[0].isupper()


@pytest.mark.parametrize("tokens", [1, 2, 5, 100, 299])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_cut_answer_is_the_beginning_of_the_whole_one(writer: Writer, tokens: int, thinking: bool) -> None:
    whole = writer.answer(7, 300, thinking=thinking, whole=300)
    assert writer.answer(7, tokens, thinking=thinking, whole=300) == whole[: 4 * tokens]


@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 9, 40])
@pytest.mark.parametrize("thinking", [True, False])
def test_the_shortest_answers_still_say_something(writer: Writer, tokens: int, thinking: bool) -> None:
    text = writer.answer(11, tokens, thinking=thinking, whole=tokens)
    assert 2 <= len(text) <= 4 * tokens
    assert text.strip(". \n")


def test_an_answer_longer_than_all_that_was_prepared(writer: Writer) -> None:
    assert len(writer.answer(3, 400_000, thinking=False, whole=400_000)) == pytest.approx(1_600_000, abs=40)


def test_answers_differ_by_key_and_by_seed(writer: Writer) -> None:
    texts = {writer.answer(key, 60, thinking=True, whole=60) for key in KEYS}
    assert len(texts) > 0.99 * len(KEYS)
    assert Writer(2).answer(5, 60, thinking=True, whole=60) != writer.answer(5, 60, thinking=True, whole=60)


@pytest.mark.parametrize("tokens", [10, 11, 12, 13, 20, 64, 150, 601, 5000])
def test_prompts_have_exactly_the_tokens_asked_for(writer: Writer, tokens: int) -> None:
    assert {prompt_tokens(user(writer.prompt(key, tokens))) for key in range(300)} == {tokens}


def test_the_smallest_prompt_has_one_token_beside_the_message(writer: Writer) -> None:
    assert [prompt_tokens(user(writer.prompt(3, tokens))) for tokens in (0, 1, 8, 9)] == [9, 9, 9, 9]
    assert writer.prompt(3, 1).strip() == writer.prompt(3, 1)


def test_prompts_are_all_different(writer: Writer) -> None:
    assert len({writer.prompt(key, 12) for key in range(20_000)}) == 20_000


def test_tokens_are_four_bytes_of_all_contents_and_eight_for_each_message() -> None:
    assert prompt_tokens(user("12345678")) == 2 + 8
    assert prompt_tokens(user("123456789")) == 3 + 8
    assert prompt_tokens([*user("123"), *user("45678")]) == 2 + 16
    assert prompt_tokens(user("äöü")) == 2 + 8
    assert prompt_tokens([{"role": "assistant", "content": None}]) == 8
    parts = [{"type": "text", "text": "1234"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert prompt_tokens([{"role": "user", "content": parts}]) == 1 + 8
    assert prompt_tokens(json.loads('[{"role": "user", "content": "\\ud800"}]')) == 1 + 8
    assert said([{"role": "user", "content": parts}, *user("56")]) == "123456"


def test_a_key_follows_from_content_and_seeds_alone() -> None:
    key = request_key(user("a"), 1, None)
    assert 0 <= key < 2**64
    assert key == request_key([{"content": "a", "role": "user"}], 1, None)
    others = [request_key(user("b"), 1, None), request_key(user("a"), 2, None), request_key(user("a"), 1, 0)]
    assert len({key, *others}) == 4


def test_another_process_finds_the_same() -> None:
    code = (
        "from dfexp.engines.simulated.server.text import *\n"
        "key = request_key([{'role': 'user', 'content': 'ä'}], 1, None)\n"
        "print(key, Writer(4).answer(key, 50, thinking=True, whole=50).encode().hex())"
    )
    key = request_key(user("ä"), 1, None)
    text = Writer(4).answer(key, 50, thinking=True, whole=50)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == [str(key), text.encode().hex()]


def test_drawn_lengths_are_distributed_as_asked() -> None:
    one_by_one = np.array([drawn(LENGTHS, request_key(user("x"), number)) for number in range(20_000)])
    many = drawn_many(LENGTHS, 200_000, 3)
    assert many.mean() == pytest.approx(LENGTHS.mean, rel=0.003)
    assert many.std() == pytest.approx((LENGTHS.moments[2] - LENGTHS.mean**2) ** 0.5, rel=0.01)
    for share in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert np.quantile(one_by_one, share) == pytest.approx(np.quantile(many, share), rel=0.03)
    assert many.max() == 8192
    assert len(np.unique(many[many < 8192])) > 3000  # not the 512 values that stand for them
    assert (many == drawn_many(LENGTHS, 200_000, 3)).all()


def test_a_cut_distribution_ends_at_its_limit_as_often_as_it_says() -> None:
    lengths = log_normal(4000, 1.0, limit=8192)
    many = drawn_many(lengths, 100_000, 1)
    assert (many == 8192).mean() == pytest.approx(lengths.weights[-1], abs=0.005)


def test_lengths_are_at_least_one_and_at_most_the_last() -> None:
    tiny = Lengths(values=(0.2, 0.4), weights=(0.5, 0.5), label="tiny")
    extremes = [0, 1, 2**53 - 1, 2**64 - 1]
    assert [drawn(tiny, key) for key in extremes] == [1, 1, 1, 1]
    assert [drawn(constant(300), key) for key in extremes] == [300] * 4
    assert max(drawn(LENGTHS, key) for key in extremes) <= 8192
