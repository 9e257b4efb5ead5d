"""`dfexp fleet reconfigure`: through the run that uses the fleet, or directly where none does."""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dfexp import control, fleet
from dfexp.engines.base import engine_for
from dfexp.errors import LockedError, RunError
from dfexp.fleet.record import differences
from dfexp.generate.events import EventLog
from dfexp.generate.rolling import change_idle
from dfexp.generate.start import CHANGE, fleet_folder
from dfexp.layout import FleetFolder, RunFolder
from dfexp.params import RunSpec
from dfexp.rollout import DONE, FINAL


def reconfigure(spec: RunSpec, root: Path, tell: Callable[[str], None], **terms: Any) -> bool:
    """Give the servers of the fleet that `spec` names the settings in it, one by one; `tell` is called for each step.

    Args: terms, `canary_s`, `least_speed`, `answers` and `drain_s` of `rollout.Terms`. Returns whether all have them
    now; if not, why was told. Raises FleetError for what servers cannot be changed to, LockedError when somebody else
    holds the fleet, RunError when the run refuses or ends.
    """
    the_fleet = fleet.attach(fleet_folder(spec, root))
    the_fleet.check_change(spec.fleet)
    if not any(differences(the_fleet.settings(server.name), spec.fleet) for server in the_fleet.servers):
        tell("all servers have these settings already: there is nothing to change")
        return True
    with tempfile.TemporaryDirectory() as nowhere:  # what cannot be started is told before a server is drained
        engine_for(spec.fleet, root).plan(FleetFolder(Path(nowhere)), "", at=the_fleet.servers)
    holder, _, pid = (the_fleet.lease_holder() or "").rpartition(" (pid")
    if not pid:
        tell("no run uses this fleet: the answers of each server are checked, its speed is not")
        with the_fleet.lease(CHANGE), EventLog(the_fleet.folder.events) as events:
            return asyncio.run(change_idle(the_fleet, spec, events, tell))
    if not holder.startswith("run "):
        raise LockedError(f"fleet {the_fleet.name!r} is in use by {holder}. Wait until that has ended.")
    folder, ident = RunFolder(root / spec.outputs / holder.removeprefix("run ")), secrets.token_hex(4)
    control.send(folder, control.RECONFIGURE, ident=ident, group=spec.fleet.model_dump(mode="json"), **terms)
    return _follow(folder, ident, tell)


def _follow(folder: RunFolder, ident: str, tell: Callable[[str], None]) -> bool:
    """Tell each step that the run reports until the last one."""
    told = 0
    while True:
        lives = control.living_process(folder) is not None  # asked first: a process writes its end, then goes
        status = control.read_status(folder) or {}
        if words := status.get("refusals", {}).get(ident):
            raise RunError(f"run {folder.name!r} refuses: {words}")
        rollout = status.get("rollout") or {}
        if rollout.get("id") == ident:
            for step in rollout["steps"][told:]:
                tell(step)
            told = len(rollout["steps"])
            if rollout["state"] in FINAL:
                return bool(rollout["state"] == DONE)
        if not lives:
            raise RunError(f"run {folder.name!r} ended before the change. Ask again: then the others are changed.")
        time.sleep(0.2)
