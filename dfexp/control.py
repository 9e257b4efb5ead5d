"""How other processes speak with a running generation: a status file to read and command files to leave.

Everything lies in the run's `control/` folder and is written by atomic replacement, so a reader never sees half of it.
A command names the process it is meant for: one that was left for a process now dead is never obeyed by the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dfexp.errors import ControlError, CorruptShardError
from dfexp.jsonl import read_json, write_json
from dfexp.layout import RunFolder
from dfexp.processes import ProcessId

STOP, STOP_NOW = "stop", "stop_now"
FINAL_STATES = frozenset({"ended", "stopped", "failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command as the running process receives it."""

    id: str
    verb: str
    args: Mapping[str, Any]


def read_status(folder: RunFolder) -> dict[str, Any] | None:
    """The last status that a generating process wrote, or None before the first."""
    try:
        return read_json(folder.control / "status.json")
    except (FileNotFoundError, CorruptShardError):
        return None


def write_status(folder: RunFolder, status: Mapping[str, Any]) -> None:
    """Replace the status; called by the generating process alone."""
    write_json(folder.control / "status.json", status)


def living_process(folder: RunFolder) -> ProcessId | None:
    """The generating process of this run if it still runs on this machine."""
    status = read_status(folder)
    if status is None or "pid" not in status:
        return None
    process = ProcessId(int(status["pid"]), str(status["process_started"]))
    return process if process.is_alive() else None


def send(folder: RunFolder, verb: str, **args: Any) -> str:
    """Leave a command for the running process and return its id. Raises ControlError when no process runs."""
    process = living_process(folder)
    if process is None:
        raise ControlError(f"run {folder.name!r} has no running process, so it cannot be told to {verb!r}.")
    command_id = f"{time.time_ns():020d}"
    write_json(
        folder.control / f"{command_id}.command.json",
        {"id": command_id, "verb": verb, "to": str(process), "args": args},
    )
    return command_id


def wait_answer(folder: RunFolder, command_id: str, timeout_s: float) -> dict[str, Any]:
    """The answer to a command. Raises ControlError when the process ends or stays silent for `timeout_s`."""
    path = folder.control / f"{command_id}.answer.json"
    if not wait_until(lambda: path.exists() or living_process(folder) is None, timeout_s) or not path.exists():
        raise ControlError(f"run {folder.name!r} did not answer a command within {timeout_s:g} s. See {folder.log}.")
    return read_json(path)


def take_commands(folder: RunFolder, me: ProcessId) -> list[Command]:
    """Commands left for this process, oldest first; each is taken once. Those for other processes are removed."""
    taken = []
    for path in sorted(folder.control.glob("*.command.json")):
        try:
            content = read_json(path)
        except (FileNotFoundError, CorruptShardError):
            content = {}
        path.unlink(missing_ok=True)
        if content.get("to") == str(me):
            taken.append(Command(id=content["id"], verb=content["verb"], args=content.get("args", {})))
    return taken


def answer(folder: RunFolder, command: Command, result: Mapping[str, Any]) -> None:
    """Answer a command; called by the generating process."""
    write_json(folder.control / f"{command.id}.answer.json", result)


def prepare(folder: RunFolder) -> None:
    """Make the control folder and remove answers that nobody waits for any more."""
    folder.control.mkdir(parents=True, exist_ok=True)
    for path in folder.control.glob("*.answer.json"):
        _remove_if_old(path, age_s=3600)


def wait_until(condition: Callable[[], bool], timeout_s: float, step_s: float = 0.05) -> bool:
    """Poll `condition` until it holds (True) or the time is over (False)."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(step_s)
    return True


def _remove_if_old(path: Path, age_s: float) -> None:
    if time.time() - path.stat().st_mtime > age_s:
        path.unlink(missing_ok=True)
