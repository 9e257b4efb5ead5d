"""Reading a run's completions without its lock, also while the run writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dfexp.errors import CorruptShardError
from dfexp.jsonl import read_log
from dfexp.shards.files import FAILURES, MANIFEST, list_shards, partial_name, read_shard, sealed_name
from dfexp.shards.manifest import read_manifest, unpack_indices


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Every row that was safe when the call began, and perhaps some since: sealed shards by number, then the open one.

    No row comes twice, even if a shard is sealed meanwhile, since each number is read once under whichever name it
    has. Raises CorruptShardError for a line that is no row, and for a shard that the manifest lists but is not there.
    """
    manifest = read_manifest(folder)
    listed = set() if manifest is None else {entry.number for entry in manifest.shards}
    last = max([shard.number for shard in list_shards(folder)] + list(listed), default=-1)
    # A listing can miss a file that is renamed under it, so every number up to the next one is tried by name.
    for number in range(last + 2):
        path, file = _open_shard(folder, number)
        if file is None:
            if number in listed:
                raise CorruptShardError(f"{path} is missing, though {MANIFEST} lists it. Restore it from a copy.")
            continue
        with file:
            for _, row in read_shard(path, file, growing=path.suffix == ".partial"):
                yield row


def _open_shard(folder: Path, number: int) -> tuple[Path, IO[bytes] | None]:
    """The shard under the name it has now. It may be sealed between the first two looks, so the third decides."""
    final, partial = folder / sealed_name(number), folder / partial_name(number)
    for path in (final, partial, final):
        try:
            return path, path.open("rb")
        except FileNotFoundError:
            continue
    return final, None


def read_failures(folder: Path) -> Iterator[dict[str, Any]]:
    """The failures that stand: the last one of every index that has no completion, in the order they happened.

    failures.jsonl keeps the earlier ones too. May be called while the run writes.
    """
    standing: dict[int, dict[str, Any]] = {}
    for row in read_log(folder / FAILURES):
        standing.pop(row["index"], None)  # so that the order is that of the last failure
        standing[row["index"]] = row
    if standing:
        for index in _done_indices(folder):
            standing.pop(index, None)
    yield from standing.values()


def _done_indices(folder: Path) -> Iterator[int]:
    """Indices of all rows, in no order; some may come twice if a shard is sealed meanwhile."""
    manifest = read_manifest(folder)
    listed = {} if manifest is None else {entry.number: entry for entry in manifest.shards}
    for entry in listed.values():
        yield from unpack_indices(entry.indices)
    last = max([shard.number for shard in list_shards(folder)] + list(listed), default=-1)
    for number in range(last + 2):
        if number in listed:
            continue
        path, file = _open_shard(folder, number)
        if file is not None:
            with file:
                for _, row in read_shard(path, file, growing=path.suffix == ".partial"):
                    yield row["index"]
