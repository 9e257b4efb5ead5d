"""What `dfexp run` does around the notebooks: pass signals on, print progress, stop the fleet that it launched."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dfexp import control, fleet, generate, livepage, notebook
from dfexp.cli.common import EXIT_FAILED, EXIT_OK, opened, say
from dfexp.errors import ControlError, FleetError, RunError, RunStopped
from dfexp.generate.verdicts import tally
from dfexp.jsonl import disk, make_folder, read_json
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from dfexp.shards import not_uploaded
from dfexp.shards.files import lock
from dfexp.tables import labelled

_DOES = {"01_launch_fleet": "checks, then servers until each has made a token", "02_capacity": "room, and a probe",
         "03_generate": "the rows", "04_report": "tables and figures"}  # fmt: skip
NOTEBOOKS = tuple(_DOES)


def run_notebooks(
    spec: RunSpec, folder: RunFolder, root: Path, *, retry_failed: Sequence[str] | None = None,
    sample: tuple[int, int] | None = None, keeps_fleet: bool = False,
) -> int:  # fmt: skip
    """Run 01 to 04, stop the fleet if this started it and may, and say where everything is.

    With a `sample`, of so many rows drawn with such a seed, only that is done after 01. Where no row is left to send no
    server is needed: then 04 alone, and what is left to upload.
    """
    if (living := control.going_on(folder)) is not None:
        raise RunError(
            f"run {folder.name!r} is running already (pid {living.pid}). Look in: dfexp status {folder.name}; "
            f"stop it: dfexp stop {folder.name}."
        )
    with stop_signals() as signals, _alone(folder):
        ended = None if sample else _ended(folder, retry_failed or ())
        attendant = Attendant(spec, folder, root, signals)
        try:
            for name in NOTEBOOKS[:1] if sample else NOTEBOOKS[-1:] if ended else NOTEBOOKS:
                say(f"{name}: {_DOES[name]} ...")
                notebook.execute(name, spec, folder, root, tick=attendant.tick)
                if signals and name != NOTEBOOKS[-1]:
                    raise RunStopped(f"told to stop after {name}. Go on with: dfexp resume {folder.name}")
                if name == NOTEBOOKS[0] and (sample or retry_failed is not None):
                    generate.start(spec, root, retry_failed=retry_failed, sample=sample)
            while sample and not control.wait_until(lambda: control.living_process(folder) is None, 1.0):
                attendant.tick()
        finally:
            if not keeps_fleet:
                attendant.leave()
    if ended and spec.store.bucket:
        from dfexp.cli.stores import bring  # here, since it takes boto3, which is slow to import

        ended["not_uploaded"], _ = bring(folder, spec.store)  # what else differs, it has said
    return EXIT_OK if sample else _conclude(folder, ended or control.read_status(folder) or {})


@contextmanager
def _alone(folder: RunFolder) -> Iterator[None]:
    """Two commands that drive one run would stop its servers, and so the run, under one another: also before it works.

    Raises LockedError, which names the first one, and StorageError.
    """
    with disk(f"create {folder.notebooks}", "Fix the folder."):
        make_folder(folder.notebooks)
    held = lock(folder.notebooks)
    try:
        yield
    finally:
        os.close(held)


def _ended(folder: RunFolder, retry_failed: Sequence[str]) -> dict[str, Any] | None:
    """The status of a run none of whose rows is to be sent; None: there are some. What it had open is sealed."""
    if not generate.kept(folder)[2]:
        return None  # it was never started
    found = control.read_status(folder) or {}
    with opened(folder) as shards:
        if shards.pending(shards.failures_by_kind() if generate.ALL_KINDS in retry_failed else retry_failed):
            return None
        shards.seal()
        counts = {"done": shards.done, "failed": shards.failed, "asked": shards.done + shards.failed}
    say(f"nothing is left to do: {tally(**counts)}")
    if found.get("state", "ended") != "ended":  # its process was stopped or killed after the last row
        control.write_status(folder, {**found, "state": "ended", "reason": None, **counts})
    return {**found, "state": "ended", **counts}


def _conclude(folder: RunFolder, found: Mapping[str, Any]) -> int:
    """The last lines of a run: every row accounted for, and where things are."""
    asked, done, failed = (found.get(key, 0) for key in ("asked", "done", "failed"))
    dropped = sum(read_json(folder.run_json)["prompts"]["dropped_by_reason"].values())
    where = ", see prompts_report.json" * folder.prompts_report.exists()  # not of a run that was restored
    unused = f"; {dropped} row(s) of the sources were left out{where}" if dropped else ""
    name = labelled(repr(folder.name), found.get("engine"))
    say(f"run {name} {found.get('state')}: {tally(done, failed, asked)}{unused}")
    say(f"  completions  {folder.completions}")
    say(f"  report       {folder.notebooks / '04_report.html'}")
    say(f"  tables       {folder.report}")
    has_store = generate.read_spec(folder).store.bucket is not None  # the status may be of a start that had one
    left = not_uploaded(folder.completions) if has_store else []
    is_short = bool(left or (has_store and found.get("not_uploaded")))
    if gone := [name for name in left if not (folder.completions / name).exists()]:
        where = "are neither here nor in the bucket. Restore them there from a copy"
        say(f"  LOST on S3: {len(gone):,} shard(s), from {gone[0]}, {where}.")
    if is_short and (gone != left or not left):
        what = f"{len(left) - len(gone):,} shard(s)" if left else f"see store_incomplete in {folder.events}"
        say(f"  NOT on S3: {what}. Upload with: dfexp store upload {folder.name}")
    if is_useless := bool(failed and not done):
        say(f"  NOT ONE row succeeded. Why: {folder.completions / 'failures.jsonl'}")
        say(f"  Once that is mended: dfexp resume {folder.name} --retry-failed")
    is_whole = found.get("state") == "ended" and done + failed == asked
    return EXIT_OK if is_whole and not (is_short or is_useless) else EXIT_FAILED


class Attendant:
    """What `dfexp run` does about once a second while a notebook runs: obey signals, print progress.

    It also keeps the identity of the fleet that this command launched in the run's folder, so that a command that was
    killed leaves its servers to the next one, and not to nobody.
    """

    def __init__(self, spec: RunSpec, folder: RunFolder, root: Path, signals: list[int]) -> None:
        self._spec, self._folder, self._root, self._signals = spec, folder, root, signals
        self._mark = folder.path / ".launched_fleet"
        self._launched = self._mark.read_text() if self._mark.exists() else None
        self._foreign = identity if (identity := _fleet_identity(spec, root)) != self._launched else None
        self._next_line = 0.0
        self._obeyed = 0

    def tick(self) -> None:
        """Pass signals on: the first drains the run, the second cuts it off, the third leaves at once."""
        if len(self._signals) > self._obeyed:
            self._obeyed += 1
            self._obey()
        self._claim()
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._spec.generation.progress_interval_s
            found = control.read_status(self._folder)
            if found is not None and control.living_process(self._folder) is not None:
                say(f"  {time.strftime('%H:%M:%S')} {livepage.line(found)}")
            else:
                self._say_who_is_awaited()

    def _say_who_is_awaited(self) -> None:
        """Servers that do not answer yet are what a command without a run waits for."""
        with contextlib.suppress(FleetError):
            for each in fleet.attach(generate.fleet_folder(self._spec, self._root)).status(timeout_s=2.0):
                if each.state != "ready":
                    say(f"  {time.strftime('%H:%M:%S')} waiting for {each.name}: {each.state}, {each.detail}")

    def leave(self) -> None:
        """Stop the fleet if it is ours."""
        self._claim()
        if self._foreign is not None:
            say(f"fleet {self._spec.fleet_name!r} was running before and is left running.")
        elif self._launched is not None and _fleet_identity(self._spec, self._root) == self._launched:
            self._end_the_run()
            say("\n".join(fleet.attach(generate.fleet_folder(self._spec, self._root)).down()))
            self._mark.unlink(missing_ok=True)

    def _claim(self) -> None:
        """A fleet that was not there before this command is its own."""
        identity = None if self._foreign is not None else _fleet_identity(self._spec, self._root)
        if identity not in (None, self._launched):
            self._launched = identity
            with contextlib.suppress(OSError):  # a full disk; only a kill of this command would need the mark
                self._mark.write_text(str(identity))

    def _end_the_run(self) -> None:
        """A run goes on for a while when its notebook was killed, and holds the fleet until it has drained."""
        end = time.monotonic() + self._spec.generation.drain_s + 30.0
        with contextlib.suppress(ControlError):  # raised once it has ended
            generate.stop(self._folder, reason="dfexp run has ended")
            while time.monotonic() < end and not control.wait_until(
                lambda: control.living_process(self._folder) is None, 0.5
            ):
                if len(self._signals) > self._obeyed:
                    self._obeyed = len(self._signals)
                    generate.stop(self._folder, reason="dfexp run has ended", now=True)

    def _obey(self) -> None:
        try:
            generate.stop(self._folder, reason="dfexp run was told to stop", now=self._obeyed > 1)
        except ControlError:
            raise RunStopped(f"stopped while nothing made rows. Go on with: dfexp resume {self._folder.name}") from None
        if self._obeyed > 2:
            raise RunStopped(f"left at once. Rows reported done are safe. Go on with: dfexp resume {self._folder.name}")
        say("stopping: requests in flight may finish; once more cuts them off")


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them; the handlers of before come back at the end."""
    seen, numbers = list[int](), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda received, _: seen.append(received)) for number in numbers]
    try:
        yield seen
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _fleet_identity(spec: RunSpec, root: Path) -> str | None:
    """Which launch of the run's fleet is running now; None when no server of it has a living process."""
    try:
        found = fleet.attach(generate.fleet_folder(spec, root))
    except FleetError:
        return None
    return found.identity if any(found.is_process_alive(server.name) for server in found.servers) else None
