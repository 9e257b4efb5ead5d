"""Reading a run's completions; the public functions need no lock and may run while the run writes."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from dfexp.errors import CorruptShardError
from dfexp.jsonl import parse_line, read_log, whole_lines
from dfexp.shards import files
from dfexp.shards.files import ShardEntry, partial_name, sealed_name

_ROW_KEYS = ("index", "messages", "text")
Parse = Callable[[Path, int, bytes], dict[str, Any]]


def read_rows(folder: Path, parse: Parse = parse_line) -> Iterator[dict[str, Any]]:
    """Every row that was safe when the call began, and perhaps some since: sealed shards by number, then the open one.

    No row comes twice, even if a shard is sealed meanwhile, since each number is read once under whichever name it
    has. Shards that are in the store alone are left out (`only_stored`). Raises CorruptShardError for a line that is no
    row, and for a shard that the manifest lists but is not there.

    Args: parse, what makes a row of a line, given the file and the line's number too.
    """
    listed = _listed(folder)
    for number in sorted(_numbers(folder) | listed.keys()):
        must_exist = number in listed and listed[number].uploaded is None
        yield from _rows(folder, number, must_exist=must_exist, parse=parse)


def not_uploaded(folder: Path) -> list[str]:
    """The sealed shards that the store is not known to have, or is known to have lost."""
    return [entry.name for entry in _listed(folder).values() if entry.uploaded is None or "gone" in entry.uploaded]


def only_stored(folder: Path, *, lost: bool = False) -> list[ShardEntry]:
    """The shards that are in the store and not in this folder: of a run that goes on here from another machine.

    Args: lost, those instead that are not there either.
    """
    uploaded = [one for one in _listed(folder).values() if one.uploaded and ("gone" in one.uploaded) == lost]
    return [one for one in uploaded if not (folder / one.name).exists()]


def read_failures(folder: Path) -> Iterator[dict[str, Any]]:
    """The failures that stand: the last one of every index that has no completion, in the order they happened.

    failures.jsonl keeps the earlier ones too. May be called while the run writes.
    """
    standing: dict[int, dict[str, Any]] = {}
    for row in read_failure_log(folder):
        standing.pop(row["index"], None)  # so that the order is that of the last failure
        standing[row["index"]] = row
    listed = _listed(folder)
    done = {index for entry in listed.values() for index in entry.indices}
    for number in _numbers(folder) - listed.keys():
        done.update(row["index"] for row in _rows(folder, number))
    yield from (row for index, row in standing.items() if index not in done)


def _listed(folder: Path) -> dict[int, ShardEntry]:
    manifest = files.read_manifest(folder)
    return {} if manifest is None else {entry.number: entry for entry in manifest.shards}


def _numbers(folder: Path) -> set[int]:
    """The numbers of all shards. One listing can miss a file that is renamed under it; no shard is renamed twice."""
    return {shard.number for _ in range(2) for shard in files.list_shards(folder)}


def _rows(
    folder: Path, number: int, *, must_exist: bool = False, parse: Parse = parse_line
) -> Iterator[dict[str, Any]]:
    """Rows of a shard under the name that it has now: the open name goes only after the final one came."""
    for path in (folder / partial_name(number), folder / sealed_name(number)):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            for _, row in _lines(path, file, parse):
                yield row
            return
    if must_exist:
        raise CorruptShardError(
            f"{folder / sealed_name(number)} is missing, though {files.MANIFEST} lists it. Restore it from a copy."
        )


def _lines(path: Path, file: IO[bytes], parse: Parse = parse_line) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines of a shard with their records; an open one ends before what a crash left. Raises CorruptShardError."""
    growing = path.suffix == ".partial"
    for number, line in enumerate(whole_lines(file) if growing else file, 1):
        if not line.endswith(b"\n"):
            raise CorruptShardError(f"{path}:{number} ends in the middle of a row. Restore the file from a copy.")
        yield line, parse(path, number, line)


def read_entry(path: Path, *, total: int) -> ShardEntry:
    """What the manifest says, or is to say, of a shard: every row that is there whole is read and checked.

    Raises CorruptShardError, naming file and line, for a line that cannot be a row of a run with `total` prompts.
    """
    indices: list[int] = []
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        for line, row in _lines(path, file):
            missing = [key for key in _ROW_KEYS if key not in row]
            index = row.get("index")
            if missing or type(index) is not int or not 0 <= index < total:
                reason = f"it has no {missing[0]!r}" if missing else f"its index {index!r} is not in 0..{total - 1}"
                raise CorruptShardError(
                    f"{path}:{len(indices) + 1} is not a row of this run: {reason}. If dfexp did not write this file, "
                    "move it away; else restore it from a copy, or delete the line to have the row made again."
                )
            indices.append(index)
            size += len(line)
            digest.update(line)
    return ShardEntry(
        name=path.name.removesuffix(".partial"),
        rows=len(indices),
        bytes=size,
        sha256=digest.hexdigest(),
        indices=indices,
        mtime_ns=path.stat().st_mtime_ns,
    )


def read_failure_log(folder: Path, *, total: float = math.inf) -> Iterator[dict[str, Any]]:
    """Every failure that was written whole, in order. Raises CorruptShardError for a line that is none of the run's."""
    path = folder / files.FAILURES
    for number, row in enumerate(read_log(path), 1):
        index = row.get("index")
        if type(index) is not int or not 0 <= index < total or not isinstance(row.get("kind"), str):
            raise CorruptShardError(f"{path}:{number} is not a failure of this run. Delete the line.")
        yield row
