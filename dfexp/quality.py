"""What a reader should know of an answer, and whether it is garbage, as broken servers give it with HTTP 200. Pure."""

from __future__ import annotations

import re
import zlib

from dfexp.records import GARBAGE

_REPEATED = re.compile(r"(.{1,12}?)\1{11,}", re.DOTALL)  # a token or a short phrase, a dozen times or more
_LEAST_CHARACTERS = 24  # shorter answers say too little about the server
_LEAST_TOKENS = 4  # fewer may be the end of an answer that has nothing to say
_REPEATED_SHARE, _PACKED_SHARE = 0.9, 0.04
_PIECES, _PIECE = 8, 24  # of a text, and the characters of one
_JUDGED_CHARACTERS = 2000  # of each end of an answer; takes 0.01 ms, and 1 ms of one that is garbage
_ENDS = frozenset(("stop", "length", "tool_calls", "function_call"))
_OPEN, _CLOSE = "<think>", "</think>"


def flags(
    text: str, finish_reason: str | None, completion_tokens: int | None, *, thinking: bool = False
) -> tuple[str, ...]:
    """The names of all that is unusual in an answer; takes about 0.02 ms for 10 KB.

    empty: no text, or none after the thought. garbage: as below. looping: cut for its length while it said one thing
    over and over. unclosed_thought: a thought without an end. truncated: cut for its length. unknown_end: the engine
    gave no reason of the usual ones for its end. nul: a NUL, which some readers take for the end of a text.

    Args: thinking, a thought was asked for, whose beginning may be in the prompt.
    """
    said, is_cut = text.rpartition(_CLOSE)[2], finish_reason == "length"
    is_empty = not said or said.isspace()
    is_garbage = garbage(text[:_JUDGED_CHARACTERS], completion_tokens) is not None
    is_open = len(said) == len(text) and not is_empty and (thinking or text[:100].lstrip().startswith(_OPEN))
    found = {
        "empty": is_empty,
        GARBAGE: is_garbage,
        "looping": is_cut and not is_garbage and garbage(text[-_JUDGED_CHARACTERS:], None) is not None,
        "unclosed_thought": is_open,
        "truncated": is_cut,
        "unknown_end": finish_reason not in _ENDS,
        "nul": "\0" in text,
    }
    return tuple(name for name, holds in found.items() if holds)


def garbage(text: str, completion_tokens: int | None) -> str | None:
    """Why an answer is garbage, or None: nothing for its tokens, one piece over and over, or next to no content.

    It judges the server, not the model: short answers, code, tables and random words pass.
    """
    said = text.strip()
    if not said and (completion_tokens or 0) >= _LEAST_TOKENS:
        return f"no text for {completion_tokens} tokens"
    if len(said) < _LEAST_CHARACTERS or not _comes_again(said):
        return None
    found = max(_REPEATED.finditer(said), key=lambda one: one.end() - one.start(), default=None)
    if found is not None and found.end() - found.start() >= _REPEATED_SHARE * len(said):
        return f"{found[1]!r} over and over"
    packed = zlib.compress(said.encode("utf-8", "replace"), 9, wbits=-15)
    if len(packed) < _PACKED_SHARE * len(said):
        return f"{len(said)} characters with the content of {len(packed)}"
    return None


def _comes_again(said: str) -> bool:
    """Whether half of some pieces are in the text twice, as in all garbage and seldom elsewhere: a quick first look."""
    size = min(_PIECE, len(said) // 4)
    places = [place * (len(said) - size) // (_PIECES - 1) for place in range(_PIECES)]
    again = [said.find(piece := said[at : at + size]) < at or said.find(piece, at + 1) > at for at in places]
    return 2 * sum(again) >= _PIECES


def repetition(text: str, words: int = 4) -> float:
    """Share of an answer's runs of so many words that were in it before, 0-1; 0.0 where it has fewer words."""
    said = text.split()
    runs = [tuple(said[at : at + words]) for at in range(len(said) - words + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
