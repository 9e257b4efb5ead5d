"""One row of a run as one chat of a training set, and what speaks against it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal

from dfexp import quality
from dfexp.records import GARBAGE, SIMULATED

Thinking = Literal["inline", "apart", "dropped"]
_OPEN, _CLOSE = "<think>", "</think>"
_SYSTEM = ("system", "developer")

MARKS = {
    "empty": "no text, or none after the thought",
    GARBAGE: "one piece over and over, or nothing for its tokens",
    "looping": "cut for its length while it said one thing over and over",
    "unclosed_thought": "a thought without an end, which chat templates cannot write as the model said it",
    "unknown_end": "no usual reason for its end, so it may be cut anywhere",
    SIMULATED: "made by a simulated server, not by a model",
    "odd_turns": "a chat that trainers shorten: the first turn is not the user's, or two in a row answer",
    "tools": "calls of tools; their definitions are not in the run",
    "too_short": "fewer tokens than asked for",
    "too_long": "more tokens than asked for",
}
"""What speaks against a row, and keeps it out unless told otherwise."""
ALWAYS = ("tools", "too_short", "too_long")
"""Marks that cannot be accepted."""
MORE_MARKS = ("truncated", "earlier_answers", "nul", "surrogates_repaired", "reasoning_rejoined", "reseeded")
"""Marks of rows that are in unless told otherwise."""


def marks(row: Mapping[str, Any], *, thinking: bool, tokens: tuple[int, int | None]) -> set[str]:
    """Flags of a row, judged again since an older dfexp may have made it, and what else speaks against it.

    Args: thinking, whether a thought was asked for; tokens, the fewest and the most of an answer.
    """
    count, least, most = row["completion_tokens"], *tokens
    roles = [turn["role"] for turn in row["messages"]]
    talk = roles[roles[0] in _SYSTEM :]
    is_odd = talk[:1] != ["user"] or any(a == b == "assistant" for a, b in pairwise(talk)) or {*_SYSTEM} & {*talk}
    calls = "tool" in roles or any(turn.get("tool_calls") for turn in row["messages"])
    more = {
        "odd_turns": is_odd,
        "earlier_answers": "assistant" in roles,
        "tools": calls or row["finish_reason"] in ("tool_calls", "function_call"),
        "too_short": count is not None and count < least,
        "too_long": count is not None and most is not None and count > most,
    }
    judged = quality.flags(row["text"], row["finish_reason"], count, thinking=thinking)
    return {*row["flags"], *judged, *(name for name, holds in more.items() if holds)}


def split(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """Thought and answer, without the line breaks around them; `is_open`: it is all thought, whose end never came.

    Tags that an answer talks about, the first of them after some other text, are no thought.
    """
    head, ended, rest = text.partition(_CLOSE)
    if not text.lstrip().startswith(_OPEN) and (_OPEN in head or not ended) and not is_open:
        return "", text
    return head.lstrip().removeprefix(_OPEN).strip("\n"), rest.lstrip("\n")


def joined(thought: str, answer: str) -> str:
    """A thought and the answer after it as chat templates write them, and as models therefore do."""
    return f"{_OPEN}\n{thought}\n{_CLOSE}\n\n{answer}" if thought else answer


def is_as_templates_write(text: str) -> bool:
    """Whether a template makes the very text again out of what `split` takes apart; it may open the thought itself."""
    thought, answer = split(text)
    return not thought or text in ((said := joined(thought, answer)), said.removeprefix(f"{_OPEN}\n"))


def chat(row: Mapping[str, Any], thinking: Thinking) -> list[dict[str, str]]:
    """The whole chat, the row's answer last. Every message has `role` and `content`, both text.

    With `apart`, those of the assistant have `reasoning_content` too, empty where there was no thought: a key that came
    and went, or content that is text here and a list there, would break readers that infer one type for all rows.
    """
    turns = [_turn(turn, thinking) for turn in row["messages"]]
    is_open = "unclosed_thought" in row["flags"]
    thought, answer = ("", row["text"]) if thinking == "inline" else split(row["text"], is_open=is_open)
    return [*turns, _answer(thought, answer, thinking)]


def _turn(turn: Mapping[str, Any], thinking: Thinking) -> dict[str, str]:
    content, role = turn.get("content") or "", turn["role"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if role == "assistant":
        return _answer(turn.get("reasoning_content") or "", text, thinking)
    return {"role": "system" if role in _SYSTEM else role, "content": text}


def _answer(thought: str, answer: str, thinking: Thinking) -> dict[str, str]:
    said = joined(thought, answer) if thinking == "inline" else answer
    return {"role": "assistant", "content": said, **({"reasoning_content": thought} if thinking == "apart" else {})}


def is_for_validation(messages: Sequence[Mapping[str, Any]], share: float) -> bool:
    """Which side of the split a prompt is on, by its hash alone: whatever else is in the set, and for equal prompts."""
    text = json.dumps(messages, sort_keys=True).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") < share * 2**64
