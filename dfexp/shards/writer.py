"""The one writer of a run's completions."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from dfexp.errors import ShardError, StorageError
from dfexp.jsonl import encode_line, fsync_dir, repair
from dfexp.records import Completion, Failure
from dfexp.shards.files import LOCK
from dfexp.shards.lock import WriterLock
from dfexp.shards.manifest import ShardEntry
from dfexp.shards.open_shard import Line, OpenShard, check_free
from dfexp.shards.recovery import Repairs, recover

_REPAIRED = "surrogates_repaired"


class Shards:
    """Completions of one run, written in shards; a context manager that holds the folder's lock.

    `commit` and `seal` may run in any thread, one at a time.

    Attributes:
        repairs: what opening found and put right, for the event log.
        seal_error: why shards that are due are not sealed yet, or None. Their rows are safe, and every commit tries
            again; the run only has to say so.

    """

    def __init__(self, folder: Path, *, total: int, fingerprint: Mapping[str, str], rows_per_shard: int) -> None:
        """See `open`."""
        self._total, self._rows_per_shard = total, rows_per_shard
        self._busy = threading.Lock()
        self._closed = False
        self.seal_error: ShardError | None = None
        with ExitStack() as undo:
            self._lock = WriterLock(_made(folder) / LOCK)
            undo.callback(self._lock.close)
            state = recover(folder, total=total, fingerprint=fingerprint, rows_per_shard=rows_per_shard)
            undo.pop_all()
        self._folder = folder
        self.repairs: Repairs = state.repairs
        self._ledger, self._failures = state.ledger, state.failures_log
        self._done, self._done_count = state.done, sum(state.done)
        self._failed = state.failed
        self._failed_count = sum(not self._done[index] for index in self._failed)
        self._next_number = state.next_number
        self._full = state.open_shards[:-1]
        self._open: OpenShard | None = state.open_shards[-1] if state.open_shards else None
        self._unsaved = False
        self._retire(at_rows=rows_per_shard)
        self._settle()

    @classmethod
    def open(cls, folder: Path, *, total: int, fingerprint: Mapping[str, str], rows_per_shard: int) -> Self:
        """Open the completions of a run, or begin them, and put right what a crash left.

        Args:
            folder: the run's completions folder; created if it is missing.
            total: prompts of the run; indices are 0..total-1.
            fingerprint: what the rows depend on, by part (prompts, model, sampling).
            rows_per_shard: rows at which a shard is sealed; may differ from the last time.

        Raises:
            LockedError: another process writes here.
            FingerprintError: the folder belongs to other prompts, another model or other sampling.
            CorruptShardError: a file holds what no crash explains. Nothing was changed.
            StorageError: the disk refuses.

        """
        if rows_per_shard < 1 or total < 0:
            raise ShardError(f"rows_per_shard is {rows_per_shard} and total {total}; at least 1 and 0 are needed.")
        return cls(folder, total=total, fingerprint=fingerprint, rows_per_shard=rows_per_shard)

    @property
    def done(self) -> int:
        """Rows that are safe on disk."""
        return self._done_count

    @property
    def failed(self) -> int:
        """Indices that failed and are not done."""
        return self._failed_count

    def is_done(self, index: int) -> bool:
        """Whether the row of an index is safe on disk."""
        return bool(self._done[index])

    def failures_by_kind(self) -> dict[str, int]:
        """Indices that failed and are not done, counted by the kind of their last failure."""
        failed = self._failed.copy()  # a commit in another thread may add to it meanwhile
        return dict(Counter(kind for index, kind in failed.items() if not self._done[index]))

    def pending(self, retry_failed: Container[str] | None = None) -> array[int]:
        """Indices that are neither done nor failed, ascending; with `retry_failed`, those failed in such a kind too."""
        failed, kinds = self._failed.copy(), () if retry_failed is None else retry_failed
        return array(
            "Q",
            (i for i, done in enumerate(self._done) if not done and (i not in failed or failed[i] in kinds)),
        )

    def commit(self, rows: Sequence[Completion], failures: Sequence[Failure] = ()) -> list[ShardEntry]:
        """Make rows and failures safe: when this returns, they survive anything. Returns the shards it sealed.

        A full shard that cannot be sealed now is no error: see `seal_error`.

        Raises:
            ShardError: a row is done already, is there twice or cannot be written as JSON, an index is outside the run,
                or a foreign file has the next shard's name. Nothing was written.
            StorageError: the disk refused. The files are as before; the same call may succeed later.

        """
        with self._alone():
            lines = self._encode(rows)
            notes = b"".join(self._encode_failure(failure) for failure in failures)
            self._check_names(len(lines))
            self._append(lines, notes)
            for line in lines:
                self._done[line.index] = 1
                self._failed_count -= line.index in self._failed
            self._done_count += len(lines)
            for failure in failures:
                self._failed_count += failure.index not in self._failed and not self._done[failure.index]
                self._failed[failure.index] = failure.kind
            return self._settle()

    def seal(self) -> list[ShardEntry]:
        """Seal the open shard short, at the end of a run or of a drain. Returns the shards it sealed.

        Raises StorageError or ShardError if that cannot be done now; the rows are safe all the same.
        """
        with self._alone():
            self._retire(at_rows=1)
            sealed = self._settle()
            if self.seal_error is not None:
                raise self.seal_error
            return sealed

    def close(self) -> None:
        """Close the files and let the next writer in; waits for a commit that is under way. Seals nothing."""
        with self._busy:
            self._closed = True
            for shard in [*self._full, self._open]:
                if shard is not None:
                    shard.close()
            self._failures.close()
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ShardError("two threads wrote to one run at once. Wait for one commit before the next.")
        try:
            if self._closed:
                raise ShardError(f"{self._folder} was closed. Open it again to write.")
            yield
        finally:
            self._busy.release()

    def _encode(self, rows: Sequence[Completion]) -> list[Line]:
        lines: dict[int, Line] = {}
        for row in rows:
            self._check_index(row.index)
            if self._done[row.index] or row.index in lines:
                raise ShardError(f"row {row.index} is {'there twice' if row.index in lines else 'done already'}.")
            record, repaired = repair(row.to_json())
            if repaired and _REPAIRED not in record["flags"]:
                record = {**record, "flags": [*record["flags"], _REPAIRED]}
            try:
                lines[row.index] = Line(index=row.index, data=encode_line(record))
            except (ValueError, TypeError, RecursionError) as error:
                raise ShardError(f"row {row.index} cannot be written as JSON: {error}.") from error
        return list(lines.values())

    def _encode_failure(self, failure: Failure) -> bytes:
        self._check_index(failure.index)
        try:
            return encode_line(failure.to_json())
        except (ValueError, TypeError, RecursionError) as error:
            raise ShardError(f"the failure of row {failure.index} cannot be written as JSON: {error}.") from error

    def _check_index(self, index: int) -> None:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < self._total:
            raise ShardError(f"index {index!r} is not in 0..{self._total - 1}, the prompts of this run.")

    def _check_names(self, rows: int) -> None:
        """Refuse before anything is written if a shard that these rows fill could not get its name."""
        for shard in self._full:
            shard.check_publishable()
        begun = 0 if self._open is None else len(self._open.indices)
        first = self._next_number if self._open is None else self._open.number
        for number in range(first, first + (begun + rows) // self._rows_per_shard):
            if self._open is not None and number == self._open.number:
                self._open.check_publishable()
            else:
                check_free(self._folder, number)

    def _retire(self, *, at_rows: int) -> None:
        """Take no more rows into the open shard if it has so many."""
        if self._open is not None and len(self._open.indices) >= at_rows:
            self._full.append(self._open)
            self._open = None

    def _append(self, lines: list[Line], notes: bytes) -> None:
        """Write all, flushed, or nothing.

        A shard is full and flushed before the next one is created, so a crash leaves whole shards and one torn tail.
        """
        shard, full, number = self._open, list(self._full), self._next_number
        with ExitStack() as undo:
            while lines:
                if shard is None:
                    shard = OpenShard.create(self._folder, number)
                    undo.callback(shard.discard)
                    number += 1
                undo.callback(shard.rewind, shard.mark())
                room = self._rows_per_shard - len(shard.indices)
                shard.append(lines[:room])
                lines = lines[room:]
                if len(shard.indices) >= self._rows_per_shard:
                    full.append(shard)
                    shard = None
            self._failures.append_bytes(notes)
            undo.pop_all()
        self._open, self._full, self._next_number = shard, full, number

    def _settle(self) -> list[ShardEntry]:
        """Publish the full shards and note them. What the disk refuses is due again at the next call."""
        sealed = []
        try:
            while self._full:
                entry = self._full[0].publish()
                self._full.pop(0).close()
                self._ledger.add(entry)
                self._unsaved = True
                sealed.append(entry)
            if self._unsaved:
                self._ledger.save()
                self._unsaved = False
            self.seal_error = None
        except ShardError as error:
            self.seal_error = error
        return sealed


def _made(folder: Path) -> Path:
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_dir(folder.parent)
    except OSError as error:
        raise StorageError(f"cannot create {folder}: {error.strerror or error}. Fix the folder above it.") from error
    return folder
