"""events.jsonl: what happened to servers, disk and run, one record each."""

from __future__ import annotations

import contextlib
import sys
import time
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
