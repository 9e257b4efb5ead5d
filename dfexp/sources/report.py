"""What became of the records of the sources: counts, examples, lengths, shared beginnings."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dfexp.records import Message
from dfexp.sources.mapping import said_by, text_of

EXAMPLES = 100
"""Examples of each reason that are kept; counts are complete."""
_SHOWN, _QUANTILES = 3, {"least": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "most": 1.0}
_ENDS = [0, 16]
while _ENDS[-1] < 65_536:
    _ENDS.append(_ENDS[-1] + max(4, _ENDS[-1] // 8))


class Notes:
    """Records counted by reason, and the first of each reason with its source, line from 1 and detail."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self.examples: list[dict[str, Any]] = []

    def add(self, source: str, line: int, reason: str, detail: str) -> None:
        """Count one record."""
        self.by_reason[reason] += 1
        if self.by_reason[reason] <= EXAMPLES:
            self.examples.append({"source": source, "line": line, "reason": reason, "detail": detail[:200]})


class Measures:
    """Lengths of prompts, and how much of them an earlier one begins with; about 200 bytes of memory a prompt."""

    def __init__(self) -> None:
        self._chars, self._total = array("I"), 0
        self._openings = [array("q") for _ in _ENDS[1:]]

    def add(self, messages: Sequence[Message]) -> None:
        """Measure one prompt."""
        text = "\n".join(f"{message['role']}\n{text_of(message)}" for message in messages)
        self._chars.append(len(said_by(messages, systems=True)))
        self._total += len(text)
        for end, found in zip(_ENDS[1:], self._openings, strict=True):
            if end > len(text):
                break
            found.append(hash(text[:end]))

    def shared_prefix_share(self) -> float:
        """Part of all text, 0-1, with which an earlier prompt begins too: what a prefix cache would find.

        Characters stand for tokens. What two prompts share counts up to the last of marks that lie 4 characters, or an
        eighth of the way so far, apart: so the share is a lower bound. Less than 16 characters never count.
        """
        shared = 0
        for (start, end), found in zip(pairwise(_ENDS), self._openings, strict=True):
            shared += (end - start) * (len(found) - len(np.unique(np.frombuffer(found, np.int64)))) if found else 0
        return shared / self._total if self._total else 0.0

    def lengths(self) -> dict[str, int]:
        """Characters of the prompts: least, median, percentiles, most, and their sum."""
        if not self._chars:
            return {}
        found = np.quantile(np.frombuffer(self._chars, np.uint32), list(_QUANTILES.values()), method="higher")
        return dict(zip(_QUANTILES, map(int, found), strict=True)) | {"sum": sum(self._chars)}


def render(report: Mapping[str, Any]) -> str:
    """A report for people."""
    lines = [f"{report['asked']:,} prompts"]
    for each in report["sources"]:
        several = "" if each["prompts"] == each["rows"] else f"{each['prompts']:,} prompts in "
        lines.append(f"  {each['kept']:>11,} kept of {several}{each['rows']:,} rows of {each['path']}")
    for each in report["mixture"]:
        lacking = (each["wanted"] or 0) - each["taken"]
        short = f", {lacking:,} FEWER than asked for" if lacking > 0 else ""
        lines.append(f"  {each['taken']:>11,} taken of {each['kept']:,} kept of {each['name']}{short}")
    if sizes := report["characters"]:
        lines.append("characters: " + ", ".join(f"{name} {size:,}" for name, size in sizes.items()))
        lines.append(f"shared beginnings: {report['shared_prefix_share']:.1%} of all text")
    for title, counts, examples in (
        ("left out", report["dropped_by_reason"], report["dropped"]),
        ("kept, and worth a look", report["odd_by_reason"], report["odd"]),
    ):
        lines += [f"{title}: {sum(counts.values()):,}"] if counts else []
        for reason, count in counts.items():
            lines.append(f"  {count:>11,} {reason}")
            some = [each for each in examples if each["reason"] == reason][:_SHOWN]
            lines += [f"              {each['source']}:{each['line']}: {each['detail'][:80]!r}" for each in some]
    return "\n".join(lines)
