"""Who uses a fleet: one at a time, held by an open file, so that it ends with its process however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dfexp.errors import FleetError, LockedError
from dfexp.processes import ProcessId


@contextlib.contextmanager
def held(path: Path, purpose: str, fleet: str) -> Iterator[None]:
    """Hold the lease at `path`. Raises LockedError that names the holder."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise FleetError(f"cannot open the lease {path}: {error.strerror}. Fix the fleet's folder.") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _words(_content(path)) or "another process"
            raise LockedError(f"fleet {fleet!r} is in use by {who}. Stop that first, or use another fleet.") from None
        me = ProcessId.current()
        note = {"purpose": purpose, "pid": me.pid, "process_started": me.started, "at": time.time()}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(note).encode() + b"\n", 0)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def holder(path: Path) -> tuple[ProcessId, str] | None:
    """The living process that holds the lease, and who that is in words; looking never disturbs a taker."""
    content = _content(path)
    try:
        process = ProcessId(int(content["pid"]), str(content["process_started"]))
    except (KeyError, TypeError, ValueError):
        return None
    return (process, _words(content)) if process.is_alive() else None


def _content(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _words(content: dict[str, Any]) -> str:
    return f"{content['purpose']} (pid {content['pid']})" if {"purpose", "pid"} <= content.keys() else ""
