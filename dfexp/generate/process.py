"""The generating process: everything that one start of a run holds open, from the lock to the last status."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from dfexp import fleet
from dfexp.errors import DfexpError, RequestError, RunError
from dfexp.fleet import Fleet
from dfexp.generate import identity
from dfexp.generate.events import EventLog
from dfexp.generate.lane import Lane
from dfexp.generate.loop import Loop, Setup
from dfexp.generate.start import ALL_KINDS, fleet_folder, read_spec
from dfexp.generate.work import WorkQueue
from dfexp.jsonl import read_json, write_json
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from dfexp.processes import ProcessId
from dfexp.prompts import FrozenPrompts
from dfexp.records import ServerLimits
from dfexp.shards import Shards

EXIT_CODES = {"ended": 0, "failed": 1, "stopped": 3}


class _Everything:
    """A container that contains every kind of failure."""

    def __contains__(self, kind: object) -> bool:
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the generation that `--folder` describes. Exit status: 0 ended, 1 failed, 2 could not start, 3 stopped."""
    parser = argparse.ArgumentParser(prog="python -m dfexp.generate")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--owner", type=ProcessId.parse)
    parser.add_argument("--retry-failed", action="append", default=[])
    args = parser.parse_args(argv)
    try:
        return generate(RunFolder(args.folder), args.root, owner=args.owner, retry_failed=args.retry_failed)
    except DfexpError as error:
        sys.stderr.write(f"dfexp: {' '.join(str(error).split())}\n")
        return 2


def generate(folder: RunFolder, root: Path, *, owner: ProcessId | None, retry_failed: Collection[str]) -> int:
    """Do one start of a run in this process. Returns the exit status.

    Until the run's lock is held nothing is written, so that a second process cannot disturb the first.
    """
    spec = read_spec(folder)
    recorded = read_json(folder.run_json)
    asked, sha256 = recorded["prompts"]["asked"], recorded["prompts"]["sha256"]
    with ExitStack() as stack:
        the_fleet = fleet.attach(fleet_folder(spec, root))
        stack.enter_context(the_fleet.lease(f"run {folder.name}"))
        prompts = stack.enter_context(FrozenPrompts(folder.prompts, asked=asked, sha256=sha256))
        model = the_fleet.model_name()
        prints = identity.fingerprint(sha256, _model_fingerprint(the_fleet), spec.generation)
        shards = stack.enter_context(
            Shards.open(
                folder.completions, total=asked, fingerprint=prints, rows_per_shard=spec.generation.rows_per_shard
            )
        )
        events = EventLog(folder)
        stack.callback(events.close)
        limits = _all_limits(the_fleet)
        config_id = _record_config(folder, spec, the_fleet, model, limits, prints)
        kinds: Any = _Everything() if ALL_KINDS in retry_failed else frozenset(retry_failed)
        pending = shards.pending(kinds or None)
        events.record(
            "run_started",
            pid=ProcessId.current().pid,
            config_id=config_id,
            done=shards.done,
            failed=shards.failed,
            pending=len(pending),
            repairs=str(shards.repairs),
        )
        run = _Run(folder, spec, the_fleet, shards, prompts, events, owner, config_id, model, limits)
        state, reason = asyncio.run(run.run(WorkQueue(pending, len(pending))))
        events.record(f"run_{state}", detail=reason, done=shards.done, failed=shards.failed, asked=asked)
    return EXIT_CODES[state]


class _Run:
    """Builds the lanes inside the event loop, runs the loop and writes the last status."""

    def __init__(
        self,
        folder: RunFolder,
        spec: RunSpec,
        the_fleet: Fleet,
        shards: Shards,
        prompts: FrozenPrompts,
        events: EventLog,
        owner: ProcessId | None,
        config_id: str,
        model: str,
        limits: dict[str, ServerLimits | None],
    ) -> None:
        self._folder, self._spec, self._fleet = folder, spec, the_fleet
        self._shards, self._prompts, self._events = shards, prompts, events
        self._owner, self._config_id, self._model, self._limits = owner, config_id, model, limits

    async def run(self, queue: WorkQueue) -> tuple[str, str | None]:
        generation = self._spec.generation
        async with AsyncExitStack() as stack:
            lanes = []
            for server in self._fleet.servers:
                lane = Lane(
                    self._fleet,
                    server,
                    self._limits[server.name],
                    model=self._model,
                    concurrency=None if generation.concurrency == "auto" else generation.concurrency,
                    start_timeout_s=self._spec.fleet.start_timeout_s,
                    events=self._events,
                )
                stack.push_async_callback(lane.close)
                lanes.append(lane)
            loop = Loop(
                Setup(
                    folder=self._folder,
                    generation=generation,
                    sampling=identity.request_fields(generation),
                    config_id=self._config_id,
                    prompts=self._prompts,
                    shards=self._shards,
                    lanes=tuple(lanes),
                    events=self._events,
                    me=ProcessId.current(),
                    owner=self._owner,
                ),
                queue,
            )
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, loop.signalled)
            try:
                state, reason = await loop.run()
            except Exception as error:  # a defect or a refused file: what is done is safe, and the status must say why
                state, reason = "failed", f"{type(error).__name__}: {error}"
                self._events.record("run_crashed", detail=reason)
            loop.finished(state, reason)
            return state, reason


def _model_fingerprint(the_fleet: Fleet) -> str:
    """What tells the fleet's model from another, as the first server that answers has it."""
    for server in the_fleet.servers:
        try:
            return the_fleet.engine.model_fingerprint(server.url, the_fleet.key)
        except RequestError:
            continue
    raise RunError(f"no server of fleet {the_fleet.name!r} answers. See dfexp fleet status {the_fleet.name}.")


def _all_limits(the_fleet: Fleet) -> dict[str, ServerLimits | None]:
    """The limits of every server; None for one that does not answer now."""
    return {status.name: status.limits if status.state == "ready" else None for status in the_fleet.status()}


def _record_config(
    folder: RunFolder,
    spec: RunSpec,
    the_fleet: Fleet,
    model: str,
    limits: dict[str, ServerLimits | None],
    prints: dict[str, str],
) -> str:
    """Add the configuration that rows are made with from now on to run.json. Returns its id."""
    said = next((each for each in limits.values() if each is not None), None)
    config = {
        "engine": the_fleet.engine.name,
        "engine_version": said.engine_version if said else None,
        "fleet": the_fleet.spec,
        "model": model,
        "sampling": identity.sampling(spec.generation),
    }
    config_id = identity.config_id(config)
    recorded = read_json(folder.run_json)
    argv = {server.name: list(server.argv) for server in the_fleet.servers if server.argv is not None}
    first_used = recorded["configs"].get(config_id, {}).get("first_used_at", time.time())
    recorded["configs"][config_id] = {**config, "argv": argv, "first_used_at": first_used}
    recorded["fingerprint"] = prints
    recorded["fleet"] = {"name": the_fleet.name, "identity": the_fleet.identity, "engine": the_fleet.engine.name}
    recorded["versions"] = identity.versions()
    write_json(folder.run_json, recorded)
    return config_id
