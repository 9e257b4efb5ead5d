"""One rehearsal through the real thing: fleet, generating process, client and journal, on simulated servers."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dfexp import control, fleet, generate, virtual_time
from dfexp.engines.simulated.server.text import Writer, drawn_many
from dfexp.errors import ControlError, RunError
from dfexp.jsonl import disk, encode_line, read_json
from dfexp.params import RunSpec
from dfexp.records import ServerLimits
from dfexp.rehearse.variants import Variant
from dfexp.shards.files import lock
from dfexp.tables import duration

_POLL_S, _STOP_S = 0.2, 60.0


def clock_of(spec: RunSpec, root: Path) -> Path:
    """Where the servers' host writes how virtual time passes."""
    return generate.fleet_folder(spec, root).path / virtual_time.CLOCK


@contextlib.contextmanager
def held(variants: Iterable[Variant], root: Path) -> Iterator[None]:
    """Keep the names of rehearsals for this process until the context, or the process, ends.

    All else is left as it is. Raises LockedError: another process, which it names, has one; RunError: the folder of
    that name is of something else; OSError: the disk refuses.
    """
    with contextlib.ExitStack() as locks:
        for spec in (each.spec for each in variants):
            # A folder of its own: the rehearsal's is removed when it is made anew.
            ours, names = generate.run_folder(spec, root), root / spec.outputs / "going_on" / spec.run
            names.mkdir(parents=True, exist_ok=True)
            locks.callback(os.close, lock(names))
            if ours.run_json.exists() and read_json(ours.run_json)["spec"]["fleet"]["engine"] != "simulated":
                raise RunError(f"{ours.path} is no rehearsal, and is left as it is. Move it away.")
        yield


def play(variant: Variant, root: Path, tell: Callable[[str], None]) -> ServerLimits:
    """Make a rehearsal anew. Returns what a server said of itself, when the hours are over or all rows are done.

    Whoever calls it has it `held`, and calls `end` afterwards, whatever happened.

    Args: tell, called with each step, and then once in each `generation.progress_interval_s`.
    Raises RunError: the run failed, or an earlier one does not end; and what `fleet.up`, `Fleet.wait_ready` and
    `generate.start` raise.
    """
    spec, folder = variant.spec, generate.run_folder(variant.spec, root)
    _clear(spec, root)
    if variant.missing:
        write_prompts(variant, root / str(spec.prompts.path))
    the_fleet, _ = fleet.up(spec, root)
    the_fleet.wait_ready(spec.fleet.start_timeout_s, tell)
    limits = next((each.limits for each in the_fleet.status() if each.limits), ServerLimits())
    generate.start(spec, root)
    now_s, end_s, next_line = virtual_time.LiveClock(clock_of(spec, root)), variant.hours * 3600, 0.0
    began_s = now_s()
    while control.living_process(folder) and (passed_s := now_s() - began_s) < end_s:
        status = control.read_status(folder)
        if status and time.monotonic() >= next_line:
            next_line = time.monotonic() + spec.generation.progress_interval_s
            counts = ", ".join(f"{status[key]:,} {key.replace('_', ' ')}" for key in ("done", "failed", "in_flight"))
            away = sum(server["state"] != "ready" for server in status["servers"])
            tell(f"{duration(passed_s)} of {duration(end_s)}, simulated: {counts}, {away} servers away")
        time.sleep(_POLL_S)
    if (status := control.read_status(folder) or {}).get("state") == "failed":
        raise RunError(f"the rehearsal {folder.name!r} failed: {status['reason']}")
    return limits


def end(spec: RunSpec, root: Path) -> None:
    """Stop the run and the servers of a rehearsal, as far as they are there."""
    folder, fleet_folder = generate.run_folder(spec, root), generate.fleet_folder(spec, root)
    with contextlib.suppress(ControlError):  # none runs
        generate.stop(folder, reason="the rehearsal is over", now=True)
    control.wait_until(lambda: control.living_process(folder) is None, _STOP_S)
    if fleet_folder.fleet_json.exists():
        fleet.attach(fleet_folder).down(force=True)


def _clear(spec: RunSpec, root: Path) -> None:
    """Remove an earlier rehearsal."""
    folder, clock = generate.run_folder(spec, root), clock_of(spec, root)
    end(spec, root)  # one whose command was killed may go on
    if living := control.living_process(folder):
        raise RunError(f"an earlier rehearsal {folder.name!r} does not end: stop process {living.pid}.")
    for ours in (folder.run_json, clock):
        if ours.exists():
            with disk(f"remove {ours.parent}", "Fix the folder."):
                shutil.rmtree(ours.parent)


def write_prompts(variant: Variant, path: Path) -> None:
    """Prompts of drawn lengths, always the same ones."""
    sizes, writer = drawn_many(variant.setting.workload.prompt, variant.spec.prompts.limit or 0, seed=1), Writer(1)
    with disk(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.writelines(encode_line({"prompt": writer.prompt(*pair)}) for pair in enumerate(sizes.tolist()))
