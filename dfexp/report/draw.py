"""Rows of shards without their texts, and some whole ones: drawn at random, of each flag, shortest, longest."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from heapq import heappush, heapreplace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from dfexp import jsonl
from dfexp.jsonl import parse_line

ROW = {
    "index": "int64", "server": "object", "config_id": "object", "finish_reason": "object",
    "prompt_tokens": "float64", "completion_tokens": "float64", "attempt": "int64", "submitted_at": "float64",
    "latency_s": "float64", "flags": "object",
}  # fmt: skip
CHUNK = 100  # lines that are parsed together: of more their texts fit into no cache
_PICK = itemgetter(*list(ROW)[:-1])
_EACH = 3  # whole rows that are kept of a flag


def facts(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """A line of a shard, and what to parse of it: all but messages and text, which are most of it.

    What is sought can stand in no text: there every quotation mark comes after a backslash.
    """
    start, is_ours = line.rfind(b',"finish_reason":') + 1, line.startswith(b'{"index":')
    part = line[: line.index(b",") + 1] + line[start:] if start and is_ours else line
    return {"part": (path, number, part), "line": line}


def parsed(lines: Sequence[tuple[Path, int, bytes]], *, may_skip: bool = False) -> list[dict[str, Any]]:
    """The records of lines, with their files and numbers, parsed together: by themselves they take twice the time.

    Raises CorruptShardError for the first that is no record; with `may_skip` such lines are left out.
    """
    try:
        found: list[Any] = jsonl.decode_line(b'{"all":[%b]}' % b",".join(line for _, _, line in lines))["all"]
    except ValueError:
        found = []
    if len(found) == len(lines) and all(type(each) is dict for each in found):
        return found
    if may_skip:
        return [each for line in lines for each in parsed([line], may_skip=True)] if len(lines) > 1 else []
    return [parse_line(*line) for line in lines]


class Draw:
    """Passes rows on without their texts, and keeps some whole lines, which do not depend on the order of all."""

    def __init__(self, number: int, seed: int) -> None:
        self._number, self._seed = number, seed
        self._kept = defaultdict[str, list[tuple[int, int, bytes]]](list)

    def passed(self, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
        """The values of `ROW` for each row."""
        while chunk := list(islice(rows, CHUNK)):
            for row, whole in zip(parsed([row["part"] for row in chunk]), chunk, strict=True):
                self._see(row, whole["line"])
                yield (*_PICK(row), ",".join(row["flags"]))

    def _see(self, row: dict[str, Any], line: bytes) -> None:
        place = -int.from_bytes(blake2b(f"{self._seed}:{row['index']}".encode(), digest_size=8).digest(), "big")
        self._keep("", place, place, line)
        for flag in row["flags"]:
            self._keep(flag, place, place, line)
        if (tokens := row["completion_tokens"]) is not None:
            self._keep("<", -tokens, place, line)
            self._keep(">", tokens, place, line)

    def _keep(self, kind: str, rank: int, place: int, line: bytes) -> None:
        """Keep the lines of the highest ranks of a kind."""
        kept, one = self._kept[kind], (rank, place, line)
        if len(kept) < (_EACH if kind else self._number):
            heappush(kept, one)
        elif one > kept[0]:
            heapreplace(kept, one)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The rows that were kept of a flag, of the shortest (<) or the longest (>); "": drawn, in random order."""
        return [jsonl.decode_line(line) for _, _, line in sorted(self._kept[kind], reverse=True)]

    @property
    def kept(self) -> list[dict[str, Any]]:
        """All but those drawn of all rows: those of flags, then the shortest and longest by turns, to the farthest."""
        flags = [row for kind in sorted(self._kept.keys() - {"", "<", ">"}) for row in self.rows(kind)]
        return flags + [row for pair in zip(self.rows("<")[::-1], self.rows(">")[::-1], strict=True) for row in pair]
