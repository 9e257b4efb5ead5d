"""events.jsonl: what happened to servers, disk and run, one record each."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from dfexp.errors import ShardError
from dfexp.jsonl import AppendLog


class EventLog(AppendLog):
    """Appends events and repeats each in the process log. A disk that refuses one does not stop the run."""

    repeats = True

    def record(self, event: str, *, server: str | None = None, **details: Any) -> None:
        """Append one event with the time of now; `details` must be JSON."""
        entry = {"at": time.time(), "event": event, "server": server, **details}
        with contextlib.suppress(ShardError):
            self.append([entry])
        if not self.repeats:
            return
        told = " ".join(f"{key}={value}" for key, value in entry.items() if key != "at" and value is not None)
        with contextlib.suppress(OSError):  # the log of the process is on the same full disk
            sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {told}\n")
            sys.stderr.flush()


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
