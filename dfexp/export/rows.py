"""One row of a run as one chat of a training set. Pure."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

Thinking = Literal["inline", "apart", "dropped"]
_OPEN, _CLOSE = "<think>", "</think>"
_SYSTEM = ("system", "developer")


def split(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """Thought and answer, without the line breaks around them; `is_open`: it begins in a thought, which may never end.

    Tags that an answer talks about, the first of them after some other text, are no thought.
    """
    head, ended, rest = text.partition(_CLOSE)
    if not text.lstrip().startswith(_OPEN) and (_OPEN in head or not ended) and not is_open:
        return "", text
    return head.lstrip().removeprefix(_OPEN).strip("\n"), rest.lstrip("\n")


def joined(thought: str, answer: str) -> str:
    """A thought and the answer after it as chat templates write them, and as models therefore do."""
    return f"{_OPEN}\n{thought}\n{_CLOSE}\n\n{answer}" if thought else answer


def is_as_templates_write(text: str, thinks: bool = False) -> bool:
    """Whether a template makes the very text again out of what `split` takes apart; it may open the thought itself."""
    thought, answer = split(text, is_open=thinks and _CLOSE in text)
    return not thought or text in ((said := joined(thought, answer)), said.removeprefix(f"{_OPEN}\n"))


def chat(row: Mapping[str, Any], thinking: Thinking, thinks: bool = False) -> list[dict[str, str]]:
    """The whole chat, the row's answer last. Every message has `role` and `content`, both text.

    With `apart`, those of the assistant have `reasoning_content` too, empty where there was no thought: a key that came
    and went, or content that is text here and a list there, would break readers that infer one type for all rows.
    Args: thinks, a thought was asked for, so that the text begins in one, also where its tag is in the prompt.
    """
    turns = [_turn(turn, thinking) for turn in row["messages"]]
    is_open = "unclosed_thought" in row["flags"] or (thinks and _CLOSE in row["text"])
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
