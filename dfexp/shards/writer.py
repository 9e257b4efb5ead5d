"""The one writer of a run's completions."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from dfexp.errors import ShardError
from dfexp.jsonl import AppendLog, disk, encode_line, fsync_dir, repair
from dfexp.records import Completion, Failure
from dfexp.shards import files
from dfexp.shards.files import ShardEntry, foreign_file
from dfexp.shards.reader import read_entry
from dfexp.shards.recovery import Found, inspect

_MOST_SHARDS = 32
_REPAIRED = "surrogates_repaired"
_NO_HARD_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}


class _OpenShard(AppendLog):
    """A shard under its open name. `is_due`: it takes no more rows and waits for its final name."""

    def __init__(self, folder: Path, number: int, *, rows: int | None = None) -> None:
        """Open the shard in which recovery found `rows`, or create one. Raises ShardError if its name is taken."""
        self.number, self.rows, self.is_due = number, rows or 0, False
        self.path, self.final = folder / files.partial_name(number), folder / files.sealed_name(number)
        if rows is None and self.path.exists() and self.path.stat().st_size:
            raise foreign_file(self.path)
        super().__init__(self.path)

    def discard(self) -> None:
        """Remove a shard whose rows were taken back. If it cannot be removed, it stays behind empty."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def rewind(self, rows: int, size: int) -> None:
        """Take back all but the first `rows`, which have `size` bytes."""
        self.rows, self.is_due = rows, False
        self.truncate(size)

    def check(self) -> None:
        """Raises ShardError if the shard was removed or shortened, or if it is due and its final name is taken."""
        super().check()
        if self.is_due and os.path.lexists(self.final) and not self._is_published():
            raise foreign_file(self.final)

    def publish(self, total: int) -> ShardEntry:
        """Give the shard its final name, never replacing a file; called again, finish what began. Raises ShardError."""
        with disk(f"publish {self.final}", "Fix the folder."):
            self.check()
            if not self._is_published():
                self._move()
            fsync_dir(self.path.parent)  # the new name is safe before the old one goes; if that stays, opening heals
            self.path.unlink(missing_ok=True)
            entry = read_entry(self.final, total=total)
        self.close()
        return entry

    def _is_published(self) -> bool:
        return self.final.exists() and os.path.samestat(os.stat(self.final), os.fstat(self._fd))

    def _move(self) -> None:
        try:
            os.link(self.path, self.final)
        except FileExistsError as error:
            raise foreign_file(self.final) from error
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            os.rename(self.path, self.final)  # without hard links; nobody else uses such names, so `check` is enough


class Shards:
    """Completions of one run, written in shards; a context manager that holds the folder's lock.

    `commit` and `seal` may run in any thread, one at a time.

    Attributes:
        repairs: what opening put right, for the event log: names of sealed shards that no manifest listed, bytes of
            torn lines, whether .done_indices was wrong; empty if all was well.
        seal_error: why shards that are due are not sealed yet, or None. Their rows are safe, and every commit tries
            again; the run only has to say so.
        on_sealed: is called with the shards that were sealed, at once and in the thread that did it.
    """

    def __init__(self, folder: Path, found: Found, opened: ExitStack) -> None:
        """Go on from what `open` found: repair the folder, with every file that is opened closed by `opened`."""
        self._folder, self._opened, self._busy = folder, opened, threading.Lock()
        self._manifest, self._done, self._failed = found.manifest, found.done, found.failed
        self._is_saved, self._is_open, self._is_noted = True, True, False
        self._failures = opened.enter_context(
            AppendLog(folder / files.FAILURES)
        )  # flushes all names before one is removed
        for path in found.leftovers:
            path.unlink()
        self._writer = files.ManifestWriter(folder)
        if found.old != found.manifest or not found.is_listed:
            self._writer.write(self._manifest)
        self._open: list[_OpenShard] = []
        for number, entry in found.growing.items():
            self._open.append(opened.enter_context(_OpenShard(folder, number, rows=entry.rows)))
            is_last = number == max(found.growing)
            self._open[-1].is_due = not is_last or entry.rows >= self._manifest.rows_per_shard
        old = set() if found.old is None else {entry.name for entry in found.old.shards}
        repairs = {
            "adopted": [entry.name for entry in self._manifest.shards if entry.name not in old],
            "cut_bytes": sum(shard.cut_bytes for shard in self._open),
            "cut_failure_bytes": self._failures.cut_bytes,
            "rebuilt_done_indices": any(entry.rows for entry in self._manifest.shards) and not found.is_listed,
        }
        self.repairs = {name: value for name, value in repairs.items() if value}
        self.seal_error: ShardError | None = None
        self.on_sealed: Callable[[Sequence[ShardEntry]], None] = lambda sealed: None
        self._settle()

    @classmethod
    def open(cls, folder: Path, *, total: int, fingerprint: Mapping[str, str], rows_per_shard: int) -> Self:
        """Open the completions of a run, or begin them, and put right what a crash left.

        Indices are 0..total-1; `fingerprint` is what the rows depend on, by part; `rows_per_shard` may differ from the
        last time. Raises LockedError if another process writes here, FingerprintError if the folder is another run's,
        CorruptShardError if a file holds what no crash explains; nothing was changed. StorageError if the disk refuses.
        """
        if rows_per_shard < 1 or total < 0:
            raise ShardError(f"rows_per_shard is {rows_per_shard} and total {total}; at least 1 and 0 are needed.")
        with disk(f"create {folder}", "Fix the folder above it."):
            folder.mkdir(parents=True, exist_ok=True)
            fsync_dir(folder.parent)
        with disk(f"open {folder}", "Fix the folder."), ExitStack() as opened:
            opened.callback(os.close, files.lock(folder))
            found = inspect(folder, total=total, fingerprint=fingerprint, rows_per_shard=rows_per_shard)
            run = cls(folder, found, opened)
            run._opened = opened.pop_all()
            return run

    @property
    def done(self) -> int:
        """Rows that are safe on disk."""
        return self._done.count(1)

    @property
    def failed(self) -> int:
        """Indices that failed and are not done."""
        return len(self._failed)

    @property
    def most_rows(self) -> int:
        """Rows that one commit should be given at most: it keeps a file open for every shard that they fill."""
        return _MOST_SHARDS * self._manifest.rows_per_shard

    def is_done(self, index: int) -> bool:
        """Whether the row of an index is safe on disk."""
        return bool(self._done[index])

    def failures_by_kind(self) -> dict[str, int]:
        """Indices that failed and are not done, counted by the kind of their last failure."""
        return dict(Counter(list(self._failed.values())))  # a copy: a commit in another thread may change it meanwhile

    def pending(self, retry_failed: Container[str] = ()) -> array[int]:
        """Indices that are neither done nor failed, ascending; those failed in a kind of `retry_failed` too."""
        kept = {index for index, kind in self._failed.copy().items() if kind not in retry_failed}
        return array("Q", (index for index, done in enumerate(self._done) if not done and index not in kept))

    def commit(self, rows: Sequence[Completion], failures: Sequence[Failure] = ()) -> list[ShardEntry]:
        """Make rows and failures safe: when this returns, they survive anything. Returns the shards it sealed.

        A full shard that cannot be sealed now is no error: see `seal_error`. Raises ShardError for a row that is done,
        doubled, outside the run or no JSON, or if a foreign file has a shard's name, and StorageError if the disk
        refuses, after which the same call may succeed later. The files are then as before.
        """
        with self._alone(), disk(f"write to {self._folder}"):
            lines: dict[int, bytes] = {}
            for row in rows:
                line = self._line(row)
                if row.index in lines or self._done[row.index]:
                    raise ShardError(f"row {row.index} is {'there twice' if row.index in lines else 'done already'}.")
                lines[row.index] = line
            self._append(list(lines.values()), b"".join(map(self._line, failures)))
            for index in lines:
                self._done[index] = 1
                self._failed.pop(index, None)
            self._failed |= {failure.index: failure.kind for failure in failures if not self._done[failure.index]}
            return self._settle()

    def seal(self) -> list[ShardEntry]:
        """Seal the open shard short, at the end of a run or of a drain. Returns the shards it sealed.

        Raises StorageError or ShardError if that cannot be done now; the rows are safe all the same.
        """
        with self._alone():
            for shard in self._open:
                shard.is_due = shard.is_due or shard.rows > 0
            sealed = self._settle()
            if self.seal_error is not None:
                raise self.seal_error
            return sealed

    @property
    def failure_bytes(self) -> int:
        """How much of failures.jsonl is safe; it only grows."""
        return self._failures.size

    def note_uploaded(self, entry: ShardEntry) -> None:
        """Take an entry with what the store noted into the manifest, which is written at the next seal or at the end.

        May be called in any thread.
        """
        self._manifest.shards[bisect_left(self._manifest.shards, entry.number, key=lambda held: held.number)] = entry
        self._is_noted = True

    def close(self) -> None:
        """Close the files and let the next writer in; waits for a commit that is under way. Seals nothing."""
        with self._busy:
            if self._is_open and self._is_noted:
                with contextlib.suppress(ShardError):  # the store is asked again what it has
                    self._writer.write(self._manifest)
            self._is_open = False
            for shard in self._open:
                shard.close()
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ShardError("two threads wrote to one run at once. Wait for one commit before the next.")
        try:
            if not self._is_open:
                raise ShardError(f"{self._folder} was closed. Open it again to write.")
            yield
        finally:
            self._busy.release()

    def _line(self, item: Completion | Failure) -> bytes:
        """A row or a failure as it is written. Raises ShardError if it cannot be, or is not of this run."""
        if type(item.index) is not int or not 0 <= item.index < self._manifest.total:
            raise ShardError(f"index {item.index!r} is not in 0..{self._manifest.total - 1}, the prompts of this run.")
        try:
            record = item.to_json()
            line = encode_line(record)
            if b"\\ud" not in line or not repair(record)[1]:  # nearly all rows: no surrogate, or only whole pairs
                return line
            if isinstance(item, Completion) and _REPAIRED not in item.flags:
                record["flags"] = [*item.flags, _REPAIRED]
            return encode_line(record)
        except (ValueError, TypeError, RecursionError) as error:
            raise ShardError(f"row {item.index} cannot be written as JSON: {error}.") from error

    def _append(self, lines: list[bytes], notes: bytes) -> None:
        """Write all, flushed, or nothing.

        A shard is full and flushed before the next one is created, so a crash leaves whole shards and one torn tail.
        """
        rows_per_shard, shards = self._manifest.rows_per_shard, self._open.copy()
        for held in (self._failures, *shards):  # no open shard may be there to tell that the folder was removed
            held.check()
        with ExitStack() as undo:
            while lines:
                if not shards or shards[-1].is_due:
                    taken = [-1, *(held.number for held in self._manifest.shards), *(held.number for held in shards)]
                    shards.append(_OpenShard(self._folder, max(taken) + 1))
                    undo.callback(shards[-1].discard)
                shard, room = shards[-1], rows_per_shard - shards[-1].rows
                undo.callback(shard.rewind, shard.rows, shard.size)
                shard.append_bytes(b"".join(lines[:room]))
                shard.rows += len(lines[:room])
                shard.is_due = shard.rows == rows_per_shard
                shard.check()
                lines = lines[room:]
            self._failures.append_bytes(notes)
            undo.pop_all()
        self._open = shards

    def _settle(self) -> list[ShardEntry]:
        """Publish the shards that are due and note them. What the disk refuses is due again at the next call."""
        sealed: list[ShardEntry] = []
        try:
            while self._open and self._open[0].is_due:
                sealed.append(self._open[0].publish(self._manifest.total))
                del self._open[0]
                self._manifest.shards.append(sealed[-1])
                self._is_saved = False
            if not self._is_saved:
                self._writer.write(self._manifest)
                self._is_saved = True
            self.seal_error = None
        except ShardError as error:
            self.seal_error = error
        self.on_sealed(sealed)
        return sealed
