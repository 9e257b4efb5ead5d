"""The command of `notify`: run at a stall and at the end, and unable to hurt the run."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Sequence

from dfexp import control
from dfexp.generate.events import EventLog
from dfexp.generate.lane import Lane
from dfexp.jsonl import repair_text
from dfexp.layout import RunFolder

TIMEOUT_S = 60.0
_MOST_CHARACTERS = 4000


async def tell(line: str | None, folder: RunFolder, events: EventLog | None, event: str, message: str) -> None:
    """Run the command, if there is one, with what happened; that it failed or hung is an event, if there are events.

    It is a shell's line, since what happened comes as DFEXP_EVENT, DFEXP_RUN and DFEXP_MESSAGE, which somebody has to
    expand; nothing of it is put into the line itself, so that no words of a server are ever run. On its stdin is the
    same as JSON, with the last status. What it prints goes where this process prints. After `TIMEOUT_S`, or when this
    is cancelled, it and its children are killed.
    """
    if line is None:
        return
    told = {"event": event, "run": folder.name, "message": message}
    # Words of servers may hold what no environment takes.
    plain = {key: repair_text(text)[0].replace("\0", "")[:_MOST_CHARACTERS] for key, text in told.items()}
    env = {**os.environ, **{f"DFEXP_{key.upper()}": text for key, text in plain.items()}}
    given = json.dumps({**told, "folder": str(folder.path), "status": control.read_status(folder)}).encode()
    try:
        process = await asyncio.create_subprocess_shell(line, stdin=PIPE, env=env, start_new_session=True)
        try:
            await asyncio.wait_for(process.communicate(given), TIMEOUT_S)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        why = f"exit status {process.returncode}" if process.returncode else ""
    except OSError as error:  # without words: a TimeoutError, which is one
        why = str(error) or f"it had not ended after {TIMEOUT_S:.0f} s and was killed"
    if why and events:
        events.record("notify_failed", detail=why, about=event)


class Lookout:
    """Sees a run stall: no row was settled and no busy server made a token for `stall_s`, or no server is up."""

    def __init__(self, stall_s: float, now: float) -> None:
        """Args: now, monotonic seconds."""
        self._stall_s, self._settled, self._moved_at, self._has_told = stall_s, 0, now, False

    def look(self, now: float, settled: int, lanes: Sequence[Lane]) -> str | None:
        """What to tell, once until another row is settled; a change of settings is no stall. `settled`: since then."""
        if settled != self._settled or any(lane.is_held for lane in lanes):
            self._settled, self._moved_at, self._has_told = settled, now, False
        still_s = now - max([self._moved_at, *(lane.moved_at for lane in lanes if lane.tasks)])
        away = [f"{lane.name} is {lane.state}" for lane in lanes if lane.state in ("down", "quarantined")]
        if self._has_told or (still_s < self._stall_s and len(away) < len(lanes)):
            return None
        self._has_told = True
        return "; ".join((f"no row was settled for {now - self._moved_at:.0f} s", *away))
