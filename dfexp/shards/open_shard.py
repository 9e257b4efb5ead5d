"""The shard that grows: appended to, taken back when the disk refuses, and published under its final name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dfexp.errors import CorruptShardError, ShardError, StorageError
from dfexp.jsonl import AppendLog, fsync_dir
from dfexp.shards.files import partial_name, sealed_name
from dfexp.shards.manifest import ShardEntry, pack_indices

_NO_HARD_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row as it will be written."""

    index: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far a shard had come, so that it can be put back there."""

    size: int
    rows: int
    digest: Any


class OpenShard:
    """`completions_NNNNNN.jsonl.partial`. Not thread-safe: `Shards` admits one caller at a time.

    Attributes:
        number: in the name.
        indices: of its rows, in order.

    """

    def __init__(self, folder: Path, number: int, indices: array[int] | None = None) -> None:
        """Open the shard, or create it. `indices` are those of the rows that `read_contents` found in it."""
        self._folder, self.number = folder, number
        self.path, self.final = folder / partial_name(number), folder / sealed_name(number)
        self._log = AppendLog(self.path)
        self.indices = array("Q") if indices is None else indices
        self._digest = hashlib.sha256()
        if self._log.size:
            with self.path.open("rb") as file:
                self._digest = hashlib.file_digest(file, "sha256")

    @classmethod
    def create(cls, folder: Path, number: int) -> Self:
        """A new shard. Raises ShardError if a file has its name or the one that it will be published under."""
        check_free(folder, number)
        return cls(folder, number)

    @property
    def cut_bytes(self) -> int:
        """Bytes of a torn tail that opening cut off."""
        return self._log.cut_bytes

    def append(self, lines: Sequence[Line]) -> None:
        """Append rows; on return they survive anything. Raises StorageError; the shard is then as it was."""
        data = b"".join(line.data for line in lines)
        digest = self._digest.copy()
        digest.update(data)
        self._log.append_bytes(data)
        self._digest = digest
        self.indices.extend(line.index for line in lines)

    def mark(self) -> Mark:
        """Where the shard stands, for `rewind`."""
        return Mark(size=self._log.size, rows=len(self.indices), digest=self._digest)

    def rewind(self, mark: Mark) -> None:
        """Take back what was appended since `mark`."""
        self._log.truncate(mark.size)
        del self.indices[mark.rows :]
        self._digest = mark.digest

    def discard(self) -> None:
        """Remove a shard that was created for rows that were taken back. If it cannot be, it stays behind empty."""
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def check_publishable(self) -> None:
        """Raises ShardError if the shard was removed, or if a foreign file has its final name."""
        if os.fstat(self._log.fileno()).st_nlink == 0:
            raise CorruptShardError(f"{self.path} was removed while in use. Stop the run and restore the file.")
        if os.path.lexists(self.final) and not self._is_published():
            raise foreign_file(self.final)

    def publish(self) -> ShardEntry:
        """Give the shard its final name without ever replacing a file; a second call finishes what a first one began.

        Raises StorageError if the disk refuses, ShardError if a foreign file has the name.
        """
        try:
            if not self._is_published():
                _move(self.path, self.final)
            fsync_dir(self._folder)  # the new name is on disk before the old one goes; if that one stays, opening heals
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            stat = os.fstat(self._log.fileno())
        except FileExistsError as error:
            raise foreign_file(self.final) from error
        except OSError as error:
            raise StorageError(f"cannot publish {self.final}: {error.strerror or error}. Fix the folder.") from error
        return ShardEntry(
            name=self.final.name,
            rows=len(self.indices),
            bytes=self._log.size,
            sha256=self._digest.hexdigest(),
            indices=pack_indices(self.indices),
            mtime_ns=stat.st_mtime_ns,
        )

    def _is_published(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.final), os.fstat(self._log.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file; its rows stay."""
        self._log.close()


def _move(path: Path, final: Path) -> None:
    """Rename without replacing. Raises FileExistsError if `final` is there."""
    try:
        os.link(path, final)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # A file system without hard links. Nothing else in the folder writes such names, so looking first is enough.
        if os.path.lexists(final):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from error
        os.rename(path, final)


def check_free(folder: Path, number: int) -> None:
    """Raises ShardError if a shard of this number cannot be created and published; an empty open one is no obstacle."""
    partial, final = folder / partial_name(number), folder / sealed_name(number)
    if os.path.lexists(final):
        raise foreign_file(final)
    if os.path.lexists(partial) and partial.stat().st_size:
        raise foreign_file(partial)


def foreign_file(path: Path) -> ShardError:
    """The error for a file that stands where a shard of ours has to go."""
    return ShardError(
        f"{path} exists, and this run did not write it. Move it away and resume: dfexp never replaces a file."
    )
