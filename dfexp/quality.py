"""Whether an answer is garbage, as broken servers give it with HTTP 200. Pure."""

from __future__ import annotations

import re
import zlib

_REPEATED = re.compile(r"(.{1,12}?)\1{11,}", re.DOTALL)  # a token or a short phrase, a dozen times or more
_LEAST_CHARACTERS = 24  # shorter answers say too little about the server
_LEAST_TOKENS = 4  # fewer may be the end of an answer that has nothing to say
_REPEATED_SHARE, _PACKED_SHARE = 0.9, 0.04
_PIECES, _PIECE = 8, 24  # of a text, and the characters of one


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
