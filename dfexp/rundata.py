"""What a report is made of: a run's files as frames, read in one pass, also while the run is going on."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from dfexp import control, jsonl, shards
from dfexp.errors import RunError
from dfexp.layout import RunFolder

_COLUMNS = (
    "index",
    "server",
    "config_id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "max_tokens",
    "attempt",
    "submitted_at",
    "latency_s",
    "flags",
)
_CHUNK = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a report is made of.

    Attributes:
        run: run.json.
        status: what the generating process said last; None if it never said anything.
        rows: one line per completion, without texts: the columns of a shard's row, and `finished_at`.
        failures: one line per row that will not succeed.
        events: events.jsonl as it is.
        examples: whole rows, drawn at random.
    """

    folder: RunFolder
    run: Mapping[str, Any]
    status: Mapping[str, Any] | None
    rows: pd.DataFrame
    failures: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    examples: Sequence[Mapping[str, Any]]

    @property
    def asked(self) -> int:
        """Rows that the run is to make."""
        return int(self.run["prompts"]["asked"])

    @property
    def is_finished(self) -> bool:
        """Whether every row is done or failed."""
        return len(self.rows) + len(self.failures) >= self.asked


def load(folder: RunFolder, *, examples: int = 10, seed: int = 0) -> RunData:
    """Read a run, in one pass over its shards. Memory: about 100 bytes a row.

    Args: examples, completions to keep whole, drawn by `seed`; the draw depends on the rows alone, not on their order.
    Raises RunError when there is no run.
    """
    try:
        run = jsonl.read_json(folder.run_json)
    except FileNotFoundError:
        raise RunError(f"{folder.path} holds no run yet: run 03_generate first, or correct `run`.") from None
    draw = _Draw(examples, seed)
    return RunData(
        folder=folder,
        run=run,
        status=control.read_status(folder),
        rows=_frame(draw.watch(shards.read_rows(folder.completions))),
        failures=tuple(shards.read_failures(folder.completions)),
        events=tuple(jsonl.read_log(folder.events)),
        examples=tuple(draw.rows()),
    )


class _Draw:
    """A seeded sample of rows that pass by: those with the smallest hash of seed and index."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._kept: list[tuple[int, int, Mapping[str, Any]]] = []

    def watch(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The same rows, seen."""
        for row in rows:
            if self._count:
                self._see(row)
            yield row

    def _see(self, row: dict[str, Any]) -> None:
        key = hashlib.blake2b(f"{self._seed}:{row['index']}".encode(), digest_size=8).digest()
        item = (-int.from_bytes(key), int(row["index"]), row)
        if len(self._kept) < self._count:
            heapq.heappush(self._kept, item)
        elif item > self._kept[0]:
            heapq.heapreplace(self._kept, item)

    def rows(self) -> list[Mapping[str, Any]]:
        """The sample, by index."""
        return sorted((row for _, _, row in self._kept), key=lambda row: int(row["index"]))


def _frame(rows: Iterator[dict[str, Any]]) -> pd.DataFrame:
    """Rows without their texts, read in pieces so that the texts of a large run are never in memory together."""
    pieces = []
    while piece := [
        [",".join(row["flags"]) if column == "flags" else row[column] for column in _COLUMNS]
        for row in islice(rows, _CHUNK)
    ]:
        pieces.append(_typed(pd.DataFrame(piece, columns=list(_COLUMNS))))
    frame = pd.concat(pieces, ignore_index=True) if pieces else _typed(pd.DataFrame(columns=list(_COLUMNS)))
    for column in ("server", "config_id", "finish_reason", "flags"):
        frame[column] = frame[column].astype("category")
    frame["finished_at"] = frame["submitted_at"] + frame["latency_s"]
    return frame


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Counts that a server did not give are NaN, never zero."""
    whole = dict.fromkeys(("index", "attempt"), "int64")
    real = dict.fromkeys(("prompt_tokens", "completion_tokens", "max_tokens", "submitted_at", "latency_s"), "float64")
    return frame.astype({**whole, **real})


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When requests of the finished rows were in flight; epoch seconds, and seconds."""

    first_at: float
    last_at: float
    busy_s: float

    @property
    def wall_s(self) -> float:
        """From the first request sent to the last answer received, gaps included."""
        return self.last_at - self.first_at


def window(rows: pd.DataFrame) -> Window | None:
    """The time in which at least one of `rows` was in flight; None without rows."""
    if rows.empty:
        return None
    order = np.argsort(rows["submitted_at"].to_numpy(), kind="stable")
    starts = rows["submitted_at"].to_numpy()[order]
    ends = np.maximum.accumulate(rows["finished_at"].to_numpy()[order])
    gaps = np.clip(starts[1:] - ends[:-1], 0, None).sum()
    return Window(first_at=float(starts[0]), last_at=float(ends[-1]), busy_s=float(ends[-1] - starts[0] - gaps))
