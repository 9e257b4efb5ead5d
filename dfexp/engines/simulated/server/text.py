"""What requests and answers of simulated servers say, and how many tokens that is. Pure: the same from every process.

The simulated tokenizer has one token per started 4 bytes of UTF-8 of all contents, and 8 for each message.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from dfexp.capacity.workload import Lengths

BYTES_PER_TOKEN, MESSAGE_TOKENS = 4, 8
THOUGHT_SHARE = 2 / 3
"""Part of an answer that is thought."""
OPEN, CLOSE = "<think>\n", "\n</think>\n\n"
"""Around the thought, as Qwen's models write it."""
_CORPUS_CHARACTERS = 2**19


class Writer:
    """Writes prompts and answers out of one text, made of `seed`; all that it writes is ASCII."""

    def __init__(self, seed: int) -> None:
        random, sentences, size = Random(seed), list[str](), 0  # noqa: S311 (not a secret)
        made_of = yaml.safe_load(files(__package__).joinpath("text.yaml").read_text(encoding="utf-8"))
        while size < _CORPUS_CHARACTERS:
            pattern = random.choice(made_of["patterns"])
            sentence = re.sub(r"\w+", lambda kind: random.choice(made_of["words"][kind[0]]), pattern)
            sentences.append(sentence.capitalize() + (".\n\n" if random.random() < 0.2 else ". "))
            size += len(sentences[-1])
        self._starts = [0, *accumulate(map(len, sentences))][:-1]
        self._corpus = "".join(sentences)

    def answer(self, key: int, tokens: int, *, thinking: bool, whole: int) -> str:
        """The answer that `key` stands for: of `whole` tokens, of which `tokens` were made before it was cut.

        With `thinking` the thought comes first, inline; a cut may lie inside it.
        """
        size = whole * BYTES_PER_TOKEN
        thought = int(size * THOUGHT_SHARE) - len(OPEN) - len(CLOSE) if thinking else 0
        if thought < 1:
            text = _ended(self._passage(key, size))
        else:
            begins = OPEN + _ended(self._passage(key, thought)) + CLOSE
            text = begins + _ended(self._passage(key >> 20, size - len(begins)))
        return text[: tokens * BYTES_PER_TOKEN]

    def prompt(self, key: int, tokens: int) -> str:
        """What a user asks, of that many tokens as a message of its own, or of one content token if that is more.

        It begins with `key`, so that no two are alike unless they are too short for it.
        """
        size = max(1, tokens - MESSAGE_TOKENS) * BYTES_PER_TOKEN
        return f"{key}. {self._passage(key * 7919, size)}"[: size - 1] + "?"

    def _passage(self, key: int, size: int) -> str:
        """So many characters from a beginning of a sentence that `key` chooses."""
        start = self._starts[key % len(self._starts)]
        text = self._corpus[start : start + size]
        while len(text) < size:
            text += self._corpus[: size - len(text)]
        return text


def _ended(text: str) -> str:
    """A passage without its last, half word, and with a full stop in its place."""
    return (text[:-1].rpartition(" ")[0].rstrip(" ,.\n") or text[:-1]) + "."


def said(messages: Sequence[Mapping[str, Any]]) -> str:
    """All that messages say, one behind the other; parts that are not text count for nothing."""
    contents = [message.get("content") or "" for message in messages]
    parts = [[{"text": content}] if isinstance(content, str) else content for content in contents]
    return "".join(str(part.get("text", "")) for content in parts for part in content)


def prompt_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of a chat's messages."""
    size = len(said(messages).encode("utf-8", "surrogatepass"))
    return -(-size // BYTES_PER_TOKEN) + MESSAGE_TOKENS * len(messages)


def request_key(messages: Sequence[Mapping[str, Any]], *seeds: int | None) -> int:
    """What a request is, in 64 bits: the same for the same messages and seeds, whoever asks whom."""
    packed = json.dumps([messages, seeds], sort_keys=True, default=str).encode()
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "big")


def drawn(lengths: Lengths, key: int) -> int:
    """The length that `key` stands for; over many keys they are distributed like `lengths`."""
    return int(_quantiles(lengths, np.array([(key % 2**53 + 0.5) / 2**53]))[0])


def drawn_many(lengths: Lengths, number: int, seed: int) -> NDArray[np.int64]:
    """So many lengths, drawn one by one, always the same."""
    return _quantiles(lengths, np.random.default_rng(seed).random(number))


def _quantiles(lengths: Lengths, levels: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole tokens, at least 1, at levels between 0 and 1.

    A value stands for all lengths around it, so levels spread over those; not the last, where lengths are cut.
    """
    values, weights, below = _table(lengths)
    places = np.minimum(np.searchsorted(below, levels, side="right"), len(values) - 1)
    widths = np.append(np.diff(values), 0.0)[places]
    found = values[places] + widths * (0.5 - (below[places] - levels) / weights[places])
    return np.maximum(1, np.rint(found)).astype(np.int64)


@cache
def _table(lengths: Lengths) -> tuple[NDArray[np.float64], ...]:
    """Its values, their weights, and the chance of each value or a smaller one."""
    weights = np.maximum(lengths.weights, 1e-300)  # what is divided by
    return np.array(lengths.values), weights, np.cumsum(weights)
