"""How other processes speak with a running generation: a status file to read and command files to leave.

Everything lies in the run's `control/` folder and is written by atomic replacement, so a reader never sees half of it.
A command names the process it is meant for: one that was left for a process now dead is never obeyed by the next.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dfexp.errors import ControlError, CorruptShardError, StorageError
from dfexp.jsonl import disk, read_json, write_json
from dfexp.layout import RunFolder
from dfexp.processes import ProcessId

STOP, STOP_NOW, RECONFIGURE = "stop", "stop_now", "reconfigure"
FINAL_STATES = frozenset({"ended", "stopped", "failed"})
_END_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command as the running process receives it."""

    verb: str
    args: Mapping[str, Any]


def read_status(folder: RunFolder) -> dict[str, Any] | None:
    """The last status that a generating process wrote, or None before the first. `silent_s`: for how long none came."""
    try:
        status = read_json(folder.control / "status.json")
        return {**status, "silent_s": time.time() - status["at"]} if "at" in status else status
    except (OSError, CorruptShardError, TypeError):
        return None


def write_status(folder: RunFolder, status: Mapping[str, Any]) -> None:
    """Replace the status; called by the generating process alone. Raises StorageError."""
    with disk(f"create {folder.control}"):
        folder.control.mkdir(exist_ok=True)  # somebody who tidied it away would have made the run deaf and dumb
    write_json(folder.control / "status.json", status)


def living_process(folder: RunFolder) -> ProcessId | None:
    """The generating process of this run if it still runs on this machine."""
    status = read_status(folder)
    if status is None or "pid" not in status:
        return None
    process = ProcessId(int(status["pid"]), str(status["process_started"]))
    return process if process.is_alive() else None


def going_on(folder: RunFolder) -> ProcessId | None:
    """The generating process of this run. One that has told its end is waited for: its `notify` may still run."""
    if (read_status(folder) or {}).get("state") in FINAL_STATES:
        wait_until(lambda: living_process(folder) is None, _END_S)
    return living_process(folder)


def send(folder: RunFolder, verb: str, **args: Any) -> None:
    """Leave a command for the running process. Raises ControlError when no process runs."""
    process = living_process(folder)
    if process is None:
        raise ControlError(f"run {folder.name!r} has no running process, so it cannot be told to {verb!r}.")
    path = folder.control / f"{time.time_ns():020d}.command.json"
    try:
        write_json(path, {"verb": verb, "to": str(process), "args": args})
    except StorageError:  # a full disk takes no command; the process takes a signal for one
        os.kill(process.pid, signal.SIGTERM)


def take_commands(folder: RunFolder, me: ProcessId) -> list[Command]:
    """Commands left for this process, oldest first; each is taken once. Those for other processes are removed."""
    taken = []
    for path in sorted(folder.control.glob("*.command.json")):
        try:
            content = read_json(path)
        except (OSError, CorruptShardError):
            content = {}
        with contextlib.suppress(OSError):  # one that cannot be removed is obeyed again, which changes nothing
            path.unlink()
        if content.get("to") == str(me):
            taken.append(Command(verb=content["verb"], args=content.get("args", {})))
    return taken


def wait_until(condition: Callable[[], bool], timeout_s: float, step_s: float = 0.05) -> bool:
    """Poll `condition` until it holds (True) or the time is over (False)."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(step_s)
    return True
