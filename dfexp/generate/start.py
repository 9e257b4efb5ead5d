"""Begin a run, or join the one that is going on: the part that a cell or a command calls."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dfexp import control, fleet
from dfexp.errors import CorruptShardError, FingerprintError, RunError
from dfexp.generate.identity import hardware, sampling_text, versions
from dfexp.jsonl import disk, make_folder, read_json, sha256_of, write_json
from dfexp.layout import FleetFolder, RunFolder
from dfexp.params import PromptsGroup, RunSpec, validate
from dfexp.processes import ProcessId
from dfexp.prompts import freeze
from dfexp.shards import not_uploaded, read_failures, read_manifest

START_TIMEOUT_S = 180.0
CHANGE = "dfexp fleet reconfigure"
"""The purpose of a lease that a change of an idle fleet holds; a run waits for its end."""

ALL_KINDS = "all"


def run_folder(spec: RunSpec, root: Path) -> RunFolder:
    """Where the run's files are."""
    return RunFolder(root / spec.outputs / spec.run)


def fleet_folder(spec: RunSpec, root: Path) -> FleetFolder:
    """Where the files of the run's fleet are."""
    return FleetFolder.named(root, spec.outputs, spec.fleet_name)


def read_spec(folder: RunFolder) -> RunSpec:
    """The parameters that a run was last started with. Raises RunError if the folder holds no run."""
    return validate(_recorded(folder)["spec"], str(folder.run_json))


def _recorded(folder: RunFolder) -> dict[str, Any]:
    """The content of run.json. Raises RunError if there is none, or one that dfexp did not write."""
    try:
        with disk(f"read {folder.run_json}", "Fix the folder."):
            recorded = read_json(folder.run_json) if folder.run_json.exists() else None
    except CorruptShardError as error:
        raise RunError(str(error)) from None
    if recorded is None:
        raise RunError(f"{folder.path} holds no run: there is no run.json. Give the name of a run or its folder.")
    if not all(isinstance(recorded.get(key), dict) for key in ("spec", "prompts", "configs")):
        raise RunError(f"{folder.run_json} is not of dfexp, and is left as it is. Choose another name for `run`.")
    return recorded


def prepare(spec: RunSpec, root: Path) -> RunFolder:
    """Freeze the prompts and write run.json, or check that both belong to these parameters.

    Safe to call again. Raises PromptsError for prompts that cannot be read, FingerprintError for a run of this name
    that was begun with other prompts or sampling, RunError for a folder of something else; then nothing has changed.
    """
    folder = run_folder(spec, root)
    with _one_at_a_time(folder):
        if folder.run_json.exists():
            recorded = _recorded(folder)
            _check_prompts(spec, recorded, root, folder)
            _check_sampling(spec, recorded, folder)
            if recorded["spec"] != spec.model_dump() and control.living_process(folder) is None:
                write_json(folder.run_json, {**recorded, "spec": spec.model_dump()})
            return folder
        frozen = freeze(spec.prompts, root, folder)
        run = {"run": spec.run, "spec": spec.model_dump(), "versions": versions(), "hardware": hardware()}
        write_json(folder.run_json, {**run, "prompts": frozen.to_json(), "configs": {}, "created_at": time.time()})
    return folder


def keep_frozen(folder: RunFolder, root: Path) -> None:
    """Note that sources which have changed since the prompts were frozen are known to have: the run goes on without."""
    with _one_at_a_time(folder):
        recorded = _recorded(folder)
        for source in recorded["prompts"]["sources"]:
            path = root / source["path"]
            if path.exists() and (now := sha256_of(path)) != source["sha256"]:
                source["changed_sha256"] = now
        write_json(folder.run_json, recorded)


def start(
    spec: RunSpec, root: Path, *, retry_failed: Collection[str] | None = None, sample: tuple[int, int] | None = None
) -> RunFolder:
    """Start the generating process of a run, or attach to the one that runs. Returns once it works.

    None is started for a run that has ended with every row, all of them on S3 where they are to be.

    Args:
        spec: the run's parameters. Its fleet must be up.
        root: what relative paths in the parameters are relative to.
        retry_failed: kinds of failure to try again, or {"all"}.
        sample: how many of the prompts, drawn with which seed, are to be done before it stops; None: all of them.

    Raises RunError when the process cannot start (its words are in the message) or one runs with other parameters;
    FleetError when the fleet is not up; and what `prepare` raises.

    """
    folder = prepare(spec, root)
    with _one_at_a_time(folder):
        if control.going_on(folder) is not None:
            _check_same(spec, folder)
            return folder
        found = control.read_status(folder) or {}
        has_ended = found.get("state") == "ended" and kept(folder) == (found["done"], found["failed"], found["asked"])
        is_stored = not (spec.store.bucket and (found.get("not_uploaded") or not_uploaded(folder.completions)))
        if has_ended and is_stored and retry_failed is None and sample is None:
            return folder
        the_fleet = fleet.attach(fleet_folder(spec, root))
        while (the_fleet.lease_holder() or "").startswith(CHANGE):
            time.sleep(0.5)
        with disk(f"create {folder.control}", "Fix the folder."):
            folder.control.mkdir(exist_ok=True)
        _spawn(folder, root, retry_failed, sample)
    return folder


def kept(folder: RunFolder) -> tuple[int, int, int]:
    """Done, failed and asked rows by the sealed shards, also of a run that was restored; (0, 0, 0): no start yet."""
    manifest = read_manifest(folder.completions)
    done = sum(entry.rows for entry in manifest.shards) if manifest else 0
    return done, sum(1 for _ in read_failures(folder.completions)), manifest.total if manifest else 0


def stop(folder: RunFolder, *, reason: str, now: bool = False) -> None:
    """Ask the generating process to drain and stop. Does not wait. Raises ControlError when none runs."""
    control.send(folder, control.STOP_NOW if now else control.STOP, reason=reason)


def _spawn(folder: RunFolder, root: Path, retry_failed: Collection[str] | None, sample: tuple[int, int] | None) -> None:
    """Start the process in a session of its own, and wait until it has written its first status."""
    argv = [sys.executable, "-m", "dfexp.generate", "--folder", str(folder.path), "--root", str(root)]
    argv += ["--owner", str(ProcessId.current()), *(f"--retry-failed={kind}" for kind in retry_failed or ())]
    argv += ["--sample", *map(str, sample)] if sample else []
    with folder.log.open("ab") as log:
        before = log.tell()
        process = subprocess.Popen(
            argv, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    threading.Thread(target=process.wait, daemon=True).start()  # reaps it whenever it ends

    def works() -> bool:
        return (control.read_status(folder) or {}).get("pid") == process.pid

    if not control.wait_until(lambda: process.returncode is not None or works(), START_TIMEOUT_S):
        raise RunError(f"run {folder.name!r} has not started within {START_TIMEOUT_S:.0f} s. See {folder.log}.")
    if not works():
        words = folder.log.read_bytes()[before:].decode("utf-8", "replace").strip().splitlines()
        said = words[-1] if words else f"exit code {process.returncode}, no word in {folder.log}: is its disk full?"
        raise RunError(f"run {folder.name!r} could not start: {said.removeprefix('dfexp: ')}")


def _check_prompts(spec: RunSpec, recorded: Mapping[str, Any], root: Path, folder: RunFolder) -> None:
    """A run goes on with its frozen prompts; parameters or files that mean others need another run."""
    # As this version reads them: a run that an older one began lacks the keys that are new.
    old, new = PromptsGroup.model_validate(recorded["spec"]["prompts"]).model_dump(), spec.prompts.model_dump()
    if old != new:
        changed = _changes(_flat(old, "prompts."), _flat(new, "prompts."))
        raise FingerprintError(
            f"run {folder.name!r} was begun with other prompts ({changed}). Choose another name for `run`, or put the "
            "old values back."
        )
    for source in recorded["prompts"]["sources"]:
        path = root / source["path"]
        if path.exists() and sha256_of(path) not in (source["sha256"], source.get("changed_sha256")):
            raise FingerprintError(
                f"{source['path']} has changed since run {folder.name!r} froze its prompts. Choose another name for "
                f"`run` for the new prompts. To go on with the frozen ones: dfexp resume {folder.name}."
            )


def _check_sampling(spec: RunSpec, recorded: Mapping[str, Any], folder: RunFolder) -> None:
    """Rows of one run share their sampling: told before the parameters replace those that the rows were made with."""
    old, new = recorded.get("fingerprint", {}).get("sampling"), sampling_text(spec.generation)
    if old not in (None, new):
        raise FingerprintError(
            f"run {folder.name!r} belongs to another sampling ({_changes(json.loads(old), json.loads(new))}). Choose "
            "another name for `run`, or put the old values back."
        )


def _check_same(spec: RunSpec, folder: RunFolder) -> None:
    """Joining a running process with other parameters would silently ignore them."""
    old, new = read_json(folder.run_json)["spec"], spec.model_dump()
    if changed := _changes(_flat(old), _flat({**new, "report": old["report"]})):
        raise RunError(
            f"run {folder.name!r} is running with other parameters ({changed}). "
            f"Stop it first (dfexp stop {folder.name}), then start again: it goes on where it was."
        )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The differing keys with both values, for a message; empty when there are none."""
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return ", ".join(f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in differing)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


@contextmanager
def _one_at_a_time(folder: RunFolder) -> Iterator[None]:
    """Two cells or terminals that start the same run wait for each other instead of racing."""
    path, is_held = folder.path / ".start.lock", False
    with ExitStack() as stack:
        while not is_held:  # a start that was waited for may have been refused, and have removed folder and lock
            with disk(f"use {folder.path}", "Fix the folder, or choose another name for `run`."):
                is_new = not folder.path.exists()
                make_folder(folder.path)
                with suppress(FileNotFoundError):
                    fcntl.flock(lock := stack.enter_context(path.open("a")), fcntl.LOCK_EX)
                    is_held = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        try:
            yield
        finally:
            with suppress(OSError):  # another start may use it already
                if is_new and [*folder.path.iterdir()] == [path]:  # of a run that was refused nothing stays
                    path.unlink()
                    folder.path.rmdir()
