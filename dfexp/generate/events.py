"""events.jsonl: what happened to servers, disk and run, one record each."""

import contextlib
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from dfexp.errors import ShardError
from dfexp.jsonl import AppendLog, encode_line

_MOST_KEPT_BYTES = 2**20  # of events that the disk refused; those that come then are in the process log alone


class EventLog(AppendLog):
    """Appends events and repeats each in the process log. The disk is left to a thread: nobody waits for its flushes.

    What it refuses is kept, and comes before the next event. Closing waits for the last one.
    """

    repeats = True

    def __init__(self, path: Path) -> None:
        """Open the log at `path`. Raises as `AppendLog` does."""
        self._told, self._refused = SimpleQueue[bytes](), b""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dfexp-events")
        super().__init__(path)

    def record(self, event: str, *, server: str | None = None, **details: Any) -> None:
        """Append one event with the time of now; `details` must be JSON."""
        entry = {"at": time.time(), "event": event, "server": server, **details}
        self._told.put(encode_line(entry))
        with contextlib.suppress(RuntimeError):  # it is closed
            self._thread.submit(self._write)
        if not self.repeats:
            return
        told = " ".join(f"{key}={value}" for key, value in entry.items() if key != "at" and value is not None)
        with contextlib.suppress(OSError):  # the log of the process is on the same full disk
            sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {told}\n")
            sys.stderr.flush()

    def _write(self) -> None:
        """Append, at once, all that was told so far."""
        data = self._refused
        with contextlib.suppress(Empty):
            while True:
                data += self._told.get_nowait()
        if len(data) <= _MOST_KEPT_BYTES:
            self._refused = data
        with contextlib.suppress(ShardError):
            self.append_bytes(data)
            self._refused = b""

    def close(self) -> None:
        """Make the last events safe, as far as the disk takes them, and close the file."""
        self._thread.shutdown()
        self._write()
        super().close()


class Guard:
    """Keeps defects of what only watches from the run: each part of it tells of its first one, and is tried again."""

    def __init__(self, events: EventLog) -> None:
        self._events, self._told = events, set[str]()

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Let a block fail. Args: part, of the watching, in words."""
        try:
            yield
        except Exception as error:
            if part not in self._told:
                self._told.add(part)
                where = "".join(traceback.format_exception(error))
                self._events.record("watching_failed", part=part, detail=repr(error), traceback=where)
