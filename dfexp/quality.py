"""What a reader should know of an answer, whether it is garbage, and what keeps it out of a training set. Pure.

Broken servers give garbage with HTTP 200, and models that lost their way repeat themselves until they are cut.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log
from statistics import median
from typing import Any

from dfexp.records import GARBAGE, SIMULATED

MARKS = {
    "empty": "no text, or none after the thought",
    GARBAGE: "one piece over and over, or nothing for its tokens",
    "looping": "cut for its length while it said one thing over and over",
    "repetitive": "too much of it is said five times or more",
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
MORE_MARKS = {
    "truncated": "cut for its length", "length_outlier": "far shorter or longer than the run's answers are",
    "earlier_answers": "a prompt with answers in it, which this model did not give", "nul": "it holds a NUL character",
    "surrogates_repaired": "it held half of a character", "reseeded": "sent again with another seed",
    "reasoning_rejoined": "thought and answer came apart and were joined",
    "not_judged": "the run could not look at it, and events.jsonl says why",
}  # fmt: skip
"""Marks of rows that are in unless told otherwise."""
KNOWN = MARKS | MORE_MARKS
REPETITIVE = 0.5
"""Share of an answer that is said five times or more above which it is repetitive."""

_REPEATED = re.compile(r"(.{1,12}?)\1{11,}", re.DOTALL)  # a token or a short phrase, a dozen times or more
_LEAST_CHARACTERS = 24  # shorter answers say too little about the server
_LEAST_TOKENS = 4  # fewer may be the end of an answer that has nothing to say
_REPEATED_SHARE, _PACKED_SHARE = 0.9, 0.04
_PIECES, _PIECE = 8, 24  # of a text, and the characters of one
_JUDGED_CHARACTERS = 2000  # of each end of an answer; takes 0.01 ms, and 1 ms of one that is garbage
_TIMES = 5  # that something is said is a loop; a draft that is written again is said twice
_SYSTEM = frozenset(("system", "developer"))
_ENDS = frozenset(("stop", "length", "tool_calls", "function_call"))
_OPEN, _CLOSE = "<think>", "</think>"


def flags(
    text: str, finish: str | None, tokens: int | None, *, thinking: bool = False, most_repeated: float = REPETITIVE
) -> tuple[str, ...]:
    """The names of all that is unusual in an answer; takes about 0.1 ms for 10 KB.

    empty: no text, or none after the thought. garbage: as below. looping: cut for its length while it said one thing
    over and over. repetitive: more of it than `most_repeated` is said five times. unclosed_thought: a thought without
    an end. truncated: cut for its length. unknown_end: the engine gave no reason of the usual ones for its end. nul: a
    NUL, which some readers take for the end of a text.

    Args: thinking, a thought was asked for, whose beginning may be in the prompt.
    """
    said, is_cut = text.rpartition(_CLOSE)[2], finish == "length"
    is_empty = not said or said.isspace()
    is_garbage = garbage(text[:_JUDGED_CHARACTERS], tokens) is not None
    is_open = len(said) == len(text) and not is_empty and (thinking or text[:100].lstrip().startswith(_OPEN))
    found = {
        "empty": is_empty,
        GARBAGE: is_garbage,
        "looping": is_cut and not is_garbage and garbage(text[-_JUDGED_CHARACTERS:], None) is not None,
        "repetitive": not is_garbage and repeated(text) > most_repeated,
        "unclosed_thought": is_open,
        "truncated": is_cut,
        "unknown_end": finish not in _ENDS,
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


def repeated(text: str) -> float:
    """Share of an answer that is said five times or more, 0-1, in any language; white space counts as one blank.

    Estimated by 8 pieces of 24 characters, and where two of them come again, by 32. Unlike the share of words seen
    before, it is next to nothing for tables, for code, and for drafts that an answer gives again; and next to one for a
    loop, whatever its round and its end.
    """
    said, share = " ".join(text.split()), 0.0
    for pieces in (8, 32) if len(said) >= _TIMES * _PIECE else ():
        places = [place * (len(said) - _PIECE) // (pieces - 1) for place in range(pieces)]
        share = sum(said.count(said[at : at + _PIECE]) >= _TIMES for at in places) / pieces
        if share < 0.2:
            break
    return share


def usual_lengths(tokens: Iterable[float], sigmas: float) -> tuple[float, float]:
    """From how many tokens to how many a length is usual: robust deviations from the median, of logarithms.

    Robust: 1.4826 times the median distance from the median, which outliers do not move. (0, inf) where half of all are
    of one length, or nothing is known. Args: tokens, of all answers; NaN is not known.
    """
    logs = [log(count) for count in tokens if count > 0]
    middle = median(logs) if logs else 0.0
    most = sigmas * 1.4826 * (median(abs(each - middle) for each in logs) if logs else 0.0)
    return (exp(middle - most), exp(min(middle + most, 700.0))) if most else (0.0, inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Which answers a training set takes.

    Attributes:
        rejected: marks for which a row stays out, `ALWAYS` among them.
        tokens: the fewest and the most of an answer.
        repeated: the most of an answer that may be said five times or more (`repeated`).
        sigmas: how far from the run's median a length is an outlier (`usual_lengths`).
    """

    rejected: frozenset[str] = frozenset(MARKS)
    tokens: tuple[int, int | None] = (0, None)
    repeated: float = REPETITIVE
    sigmas: float = 4.0


def marks(
    row: Mapping[str, Any], limits: Thresholds, *, thinking: bool, usual: tuple[float, float] = (0.0, inf)
) -> set[str]:
    """Flags of a row, judged again since an older dfexp may have made it, and what else speaks against it.

    It is rejected for those of them that are in `limits.rejected`. Args: thinking, whether a thought was asked for;
    usual, as `usual_lengths` has it.
    """
    roles = [turn["role"] for turn in row["messages"]]
    talk = roles[roles[0] in _SYSTEM :]
    is_odd = talk[:1] != ["user"] or any(a == b == "assistant" for a, b in pairwise(talk)) or _SYSTEM & {*talk}
    calls = "tool" in roles or any(turn.get("tool_calls") for turn in row["messages"])
    more = {
        "odd_turns": is_odd,
        "earlier_answers": "assistant" in roles,
        "tools": calls or row["finish_reason"] in ("tool_calls", "function_call"),
    }
    count = row["completion_tokens"]
    judged = flags(row["text"], row["finish_reason"], count, thinking=thinking, most_repeated=limits.repeated)
    more |= {} if count is None else by_length(count, limits, usual)
    return {*row["flags"]} - {"repetitive"} | {*judged, *(name for name, holds in more.items() if holds)}


def by_length(tokens: Any, limits: Thresholds, usual: tuple[float, float]) -> dict[str, Any]:
    """For marks that depend on tokens alone, whether they hold; `tokens` is a number or an array, NaN is not known."""
    least, most = limits.tokens
    is_outlier = (tokens < usual[0]) | (tokens > usual[1])
    return {"too_short": tokens < least, "too_long": tokens > (most or inf), "length_outlier": is_outlier}
