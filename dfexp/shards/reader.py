"""Reading a run's completions without its lock, also while the run writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dfexp.errors import CorruptShardError
from dfexp.shards.files import (
    FAILURES,
    MANIFEST,
    list_shards,
    partial_name,
    read_failure_log,
    read_shard,
    sealed_name,
)
from dfexp.shards.manifest import read_manifest, unpack_indices


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Every row that was safe when the call began, and perhaps some since: sealed shards by number, then the open one.

    No row comes twice, even if a shard is sealed meanwhile, since each number is read once under whichever name it
    has. Raises CorruptShardError for a line that is no row, and for a shard that the manifest lists but is not there.
    """
    manifest = read_manifest(folder)
    listed = set() if manifest is None else {entry.number for entry in manifest.shards}
    for number in sorted(_numbers(folder) | listed):
        shard = _open_shard(folder, number)
        if shard is not None:
            yield from _rows(*shard)
        elif number in listed:
            raise CorruptShardError(
                f"{folder / sealed_name(number)} is missing, though {MANIFEST} lists it. Restore it from a copy."
            )


def _numbers(folder: Path) -> set[int]:
    """The numbers of all shards. One listing can miss a file that is renamed under it; no shard is renamed twice."""
    return {shard.number for _ in range(2) for shard in list_shards(folder)}


def _open_shard(folder: Path, number: int) -> tuple[Path, IO[bytes]] | None:
    """A shard under the name that it has now: the open one goes only after the final one came."""
    for path in (folder / partial_name(number), folder / sealed_name(number)):
        with contextlib.suppress(FileNotFoundError):
            return path, path.open("rb")
    return None


def _rows(path: Path, file: IO[bytes]) -> Iterator[dict[str, Any]]:
    with file:
        for _, row in read_shard(path, file, growing=path.suffix == ".partial"):
            yield row


def read_failures(folder: Path) -> Iterator[dict[str, Any]]:
    """The failures that stand: the last one of every index that has no completion, in the order they happened.

    failures.jsonl keeps the earlier ones too. May be called while the run writes.
    """
    standing: dict[int, dict[str, Any]] = {}
    for row in read_failure_log(folder / FAILURES):
        standing.pop(row["index"], None)  # so that the order is that of the last failure
        standing[row["index"]] = row
    if standing:
        for index in _done_indices(folder):
            standing.pop(index, None)
    yield from standing.values()


def _done_indices(folder: Path) -> Iterator[int]:
    """Indices of all rows, in no order."""
    manifest = read_manifest(folder)
    listed = {} if manifest is None else {entry.number: entry for entry in manifest.shards}
    for entry in listed.values():
        yield from unpack_indices(entry.indices)
    for number in _numbers(folder) - listed.keys():
        shard = _open_shard(folder, number)
        if shard is not None:
            yield from (row["index"] for row in _rows(*shard))
