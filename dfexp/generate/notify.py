"""The command of `notify`: run at a stall and at the end, and unable to hurt the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence

from dfexp import control
from dfexp.generate.events import EventLog
from dfexp.generate.lane import Lane
from dfexp.jsonl import repair_text
from dfexp.layout import RunFolder
from dfexp.params import RunSpec

TIMEOUT_S = 60.0
_MOST_CHARACTERS = 4000
_COUNTS = ("state", "asked", "done", "failed", "in_flight", "tok_per_s", "eta_s")


async def tell(line: str, folder: RunFolder, event: str, message: str) -> str | None:
    """Run the command with an event. Why it failed; None: it did not.

    It is a shell's line, since the event comes as DFEXP_EVENT, DFEXP_RUN and DFEXP_MESSAGE, which somebody has to
    expand; nothing of the event is put into the line itself, so that no words of a server are ever run. On its stdin is
    the same as JSON, with the last counts. What it prints goes where this process prints. After `TIMEOUT_S`, or when
    this is cancelled, it and its children are killed.
    """
    status, what = control.read_status(folder) or {}, {"event": event, "run": folder.name, "message": message}
    more = {"at": time.time(), "folder": str(folder.path), **{name: status.get(name) for name in _COUNTS}}
    # Words of servers may hold what no environment takes.
    names = {f"DFEXP_{key.upper()}": repair_text(text)[0].replace("\0", "") for key, text in what.items()}
    env = {**os.environ, **{name: text[:_MOST_CHARACTERS] for name, text in names.items()}}
    try:
        process = await asyncio.create_subprocess_shell(line, stdin=PIPE, env=env, start_new_session=True)
    except OSError as error:
        return str(error)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await process.communicate(json.dumps({**what, **more}).encode() + b"\n")
    except TimeoutError:
        return f"it had not ended after {TIMEOUT_S:.0f} s and was killed"
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return f"exit status {process.returncode}" if process.returncode else None


async def tell_and_record(line: str, folder: RunFolder, events: EventLog, event: str, message: str) -> None:
    """`tell`, whose failure is an event."""
    if (why := await tell(line, folder, event, message)) is not None:
        events.record("notify_failed", detail=why, about=event)


class Lookout:
    """Tells of a stall, once until a row is settled again."""

    def __init__(self, folder: RunFolder, spec: RunSpec, events: EventLog, now: float) -> None:
        """Args: now, monotonic seconds, as in `look`."""
        self._folder, self._line, self._events, self._stall_s = folder, spec.notify, events, spec.generation.stall_s
        self._settled, self._moved_at, self._has_told = 0, now, False
        self._telling: asyncio.Task[None] | None = None

    def look(self, now: float, settled: int, lanes: Sequence[Lane]) -> None:
        """See whether the run stalls, `settled` rows after its start, while rows are left.

        It does when no row was settled and no server that is busy made a token for `generation.stall_s`, or when all
        servers are down. A change of settings is no stall.
        """
        if settled != self._settled or any(lane.is_held for lane in lanes):
            self._settled, self._moved_at, self._has_told = settled, now, False
        still_s = now - max([self._moved_at, *(lane.moved_at for lane in lanes if lane.tasks)])
        away = [f"{lane.name} is {lane.state}" for lane in lanes if lane.state in ("down", "quarantined")]
        if self._has_told or (still_s < self._stall_s and len(away) < len(lanes)):
            return
        self._has_told = True
        words = (
            f"no row was completed for {now - self._moved_at:.0f} s" if len(away) < len(lanes) else "no server is up"
        )
        message = "; ".join((words, *away[:3]))
        self._events.record("run_stalled", detail=message)
        if self._line is not None:
            self._telling = asyncio.create_task(
                tell_and_record(self._line, self._folder, self._events, "stall", message)
            )

    def close(self) -> None:
        """Kill a command that still runs."""
        if self._telling is not None:
            self._telling.cancel()
