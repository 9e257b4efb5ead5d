"""Whether an answer is garbage, as broken servers give it with HTTP 200. Pure."""

from __future__ import annotations

import re
import zlib

_REPEATED = re.compile(r"(.{1,12}?)\1{11,}", re.DOTALL)  # a token or a short phrase, a dozen times or more
_LEAST_CHARACTERS = 24  # shorter answers say too little about the server
_LEAST_TOKENS = 4  # fewer may be the end of an answer that has nothing to say
_REPEATED_SHARE, _PACKED_SHARE = 0.9, 0.04


def garbage(text: str, completion_tokens: int | None) -> str | None:
    """Why an answer is garbage, or None: nothing for its tokens, one piece over and over, or next to no content.

    It judges the server, not the model: short answers, code, tables and random words pass.
    """
    said = text.strip()
    if not said and (completion_tokens or 0) >= _LEAST_TOKENS:
        return f"no text for {completion_tokens} tokens"
    if len(said) < _LEAST_CHARACTERS:
        return None
    found = max(_REPEATED.finditer(said), key=lambda one: one.end() - one.start(), default=None)
    if found is not None and found.end() - found.start() >= _REPEATED_SHARE * len(said):
        return f"{found[1]!r} over and over"
    packed = zlib.compress(said.encode("utf-8", "replace"), 9, wbits=-15)
    if len(packed) < _PACKED_SHARE * len(said):
        return f"{len(said)} characters with the content of {len(packed)}"
    return None
