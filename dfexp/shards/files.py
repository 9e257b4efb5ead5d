"""Names of a completions folder and what its shard files hold."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

from dfexp.errors import CorruptShardError
from dfexp.jsonl import parse_line, read_log

FAILURES = "failures.jsonl"
MANIFEST = "manifest.json"
DONE_INDICES = ".done_indices"
LOCK = ".lock"

_NAME = re.compile(r"completions_(\d{6,})\.jsonl(\.partial)?")
_ROW_KEYS = ("index", "messages", "text")


def sealed_name(number: int) -> str:
    """The name of a sealed shard."""
    return f"completions_{number:06d}.jsonl"


def partial_name(number: int) -> str:
    """The name of a shard that still grows."""
    return f"completions_{number:06d}.jsonl.partial"


def shard_number(name: str) -> int:
    """The number in the name of a shard. Raises ValueError for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a shard")
    return int(match[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One shard as its name describes it."""

    number: int
    path: Path
    sealed: bool


def list_shards(folder: Path) -> list[ShardFile]:
    """The shard files of a folder by number, a sealed one before an open one; none if there is no folder."""
    if not folder.exists():
        return []
    found = [
        ShardFile(number=int(match[1]), path=path, sealed=match[2] is None)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda shard: (shard.number, not shard.sealed))


def read_shard(path: Path, file: IO[bytes], *, growing: bool) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines of an opened shard with the rows in them.

    Args: growing, the shard is an open one: reading ends before a line that is torn, or that a power loss hit.
    Raises CorruptShardError for anything else that is no row.
    """
    for number, line in enumerate(file, 1):
        if growing and (b"\0" in line or not line.endswith(b"\n")):
            return
        if not line.endswith(b"\n"):
            raise CorruptShardError(f"{path}:{number} ends in the middle of a row. Restore the file from a copy.")
        yield line, parse_line(path, number, line)


def read_failure_log(path: Path) -> Iterator[dict[str, Any]]:
    """Every failure that was written whole, in order. Raises CorruptShardError for a line that is none."""
    for number, row in enumerate(read_log(path), 1):
        if not is_index(row.get("index")) or not isinstance(row.get("kind"), str):
            raise CorruptShardError(f"{path}:{number} is not a failure of a run. Delete the line.")
        yield row


def is_index(value: object) -> TypeGuard[int]:
    """Whether a value of JSON can be an index."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the rows of one shard file are: their indices in order, their bytes and the SHA-256 of those."""

    indices: array[int]
    size: int
    sha256: str
    torn: bool


def read_contents(path: Path, *, total: int, growing: bool) -> Contents:
    """Read and check every row of a shard. `torn` tells that bytes follow the last whole row of a growing one.

    Raises CorruptShardError, naming file and line, for a line that cannot be a row of a run with `total` prompts.
    """
    indices, size, digest = array("Q"), 0, hashlib.sha256()
    with path.open("rb") as file:
        for line, row in read_shard(path, file, growing=growing):
            missing = [key for key in _ROW_KEYS if key not in row]
            index = row.get("index")
            if missing or not is_index(index) or index >= total:
                reason = f"it has no {missing[0]!r}" if missing else f"its index {index!r} is not in 0..{total - 1}"
                raise CorruptShardError(
                    f"{path}:{len(indices) + 1} is not a row of this run: {reason}. If dfexp did not write this file, "
                    "move it away; else restore it from a copy, or delete the line to have the row made again."
                )
            indices.append(index)
            size += len(line)
            digest.update(line)
        torn = file.seek(0, 2) > size
    return Contents(indices=indices, size=size, sha256=digest.hexdigest(), torn=torn)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
