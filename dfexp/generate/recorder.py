"""Between the event loop and the disk: rows are gathered, written by a thread, and counted once they are safe."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from dfexp.errors import ShardError, StorageError
from dfexp.generate.events import EventLog
from dfexp.records import Completion, Failure
from dfexp.shards import Shards

GATHER_S = 0.5
"""Rows wait at most this long for others, so that one fsync serves them all."""

_MOST_WAIT_S = 30.0


class Recorder:
    """Commits rows in groups. A disk that refuses keeps them in memory and is tried again.

    `backlog` counts rows that are not safe yet: the run stops feeding servers when it grows, so that a full disk costs
    waiting and never a row.
    """

    def __init__(self, shards: Shards, events: EventLog) -> None:
        self._shards, self._events = shards, events
        # A thread of its own: health checks of servers that hang would keep all shared ones busy.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dfexp-recorder")
        self._rows: list[Completion] = []
        self._failures: list[Failure] = []
        self._wake = asyncio.Event()
        self._deadline: float | None = None
        self.refusal: str | None = None

    @property
    def backlog(self) -> int:
        """Rows handed over that are not safe on the disk yet."""
        return len(self._rows) + len(self._failures)

    def add(self, row: Completion) -> None:
        """Hand over one completion."""
        self._rows.append(row)
        self._wake.set()

    def add_failure(self, failure: Failure) -> None:
        """Hand over one row that will not succeed."""
        self._failures.append(failure)
        self._wake.set()

    def finish(self, within_s: float) -> None:
        """Ask `run` to return once all is safe; with a refusing disk, after `within_s` seconds at the latest."""
        self._deadline = time.monotonic() + within_s
        self._wake.set()

    async def run(self) -> None:
        """Commit until `finish`. Raises StorageError if rows could not be made safe by then."""
        wait_s = 1.0
        while self._deadline is None or self.backlog:
            await self._wake.wait()
            self._wake.clear()
            if self._deadline is None:
                await asyncio.sleep(GATHER_S)
            try:
                await self._commit()
                wait_s = 1.0
            except StorageError as error:
                self._told(error)
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise
                self._wake.set()
                await asyncio.sleep(wait_s if self._deadline is None else min(wait_s, 1.0))
                wait_s = min(wait_s * 2, _MOST_WAIT_S)

    async def _commit(self) -> None:
        rows, failures = self._rows[: self._shards.most_rows], self._failures[:]
        if not rows and not failures:
            return
        loop = asyncio.get_running_loop()
        sealed = await loop.run_in_executor(self._thread, self._shards.commit, rows, failures)
        del self._rows[: len(rows)], self._failures[: len(failures)]
        if self.backlog:
            self._wake.set()
        for shard in sealed:
            self._events.record("shard_sealed", shard=shard.name, rows=shard.rows)
        if self._shards.seal_error is not None:
            self._told(self._shards.seal_error)
        elif self.refusal is not None:
            self.refusal = None
            self._events.record("disk_accepts_again")

    def _told(self, error: ShardError) -> None:
        """Record a refusal once, not at every try."""
        if self.refusal is None:
            self._events.record("disk_refused", detail=str(error), rows_in_memory=self.backlog)
        self.refusal = str(error)
