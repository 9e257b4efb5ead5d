"""The generating process: everything that one start of a run holds open, from the lock to the last status."""

import argparse
import asyncio
import contextlib
import gc
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dfexp import control, fleet
from dfexp.capacity.plan_command import require_room
from dfexp.errors import DfexpError, RequestError, RunError
from dfexp.fleet import Fleet
from dfexp.generate import identity
from dfexp.generate.configs import Configs
from dfexp.generate.events import EventLog
from dfexp.generate.limits import drawn, portion
from dfexp.generate.loop import Loop, Setup
from dfexp.generate.notify import tell
from dfexp.generate.start import ALL_KINDS, fleet_folder, read_spec
from dfexp.generate.verdicts import tally
from dfexp.jsonl import read_json, write_json
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from dfexp.processes import ProcessId
from dfexp.prompts import FrozenPrompts
from dfexp.records import ServerLimits
from dfexp.shards import Shards, not_uploaded

if TYPE_CHECKING:
    from dfexp.store import Uploader

EXIT_CODES = {"ended": 0, "failed": 1, "stopped": 3}
EXIT_NOT_UPLOADED = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run the generation that `--folder` describes.

    Exit status: 0 ended, 1 failed, 2 could not start, 3 stopped, 4 ended, not all of it on S3.
    """
    parser = argparse.ArgumentParser(prog="python -m dfexp.generate")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--owner", type=ProcessId.parse)
    parser.add_argument("--retry-failed", action="append", default=[])
    parser.add_argument("--sample", nargs=2, type=int, metavar=("ROWS", "SEED"))
    args = parser.parse_args(argv)
    folder = RunFolder(args.folder)
    try:
        state, words = generate(folder, args.root, owner=args.owner, retry_failed=args.retry_failed, sample=args.sample)
    except Exception as error:
        said = " ".join(str(error).split()) if isinstance(error, DfexpError) else repr(error)
        with contextlib.suppress(DfexpError):
            asyncio.run(tell(read_spec(folder).notify, folder, None, "failed", f"could not start: {said}"))
        if not isinstance(error, DfexpError):
            raise
        sys.stderr.write(f"dfexp: {said}\n")  # the last line, which whoever started this reads
        return 2
    # Nothing is held any more: a command that hangs keeps no other start and no `fleet down` waiting.
    with contextlib.suppress(DfexpError), EventLog(folder.events) as events:
        asyncio.run(tell(read_spec(folder).notify, folder, events, state, words))
    left = not_uploaded(folder.completions) or (control.read_status(folder) or {}).get("not_uploaded")
    is_short = left and state == "ended" and read_spec(folder).store.bucket
    return EXIT_NOT_UPLOADED if is_short else EXIT_CODES[state]


def generate(
    folder: RunFolder,
    root: Path,
    *,
    owner: ProcessId | None,
    retry_failed: Collection[str],
    sample: Sequence[int] | None,
) -> tuple[str, str]:
    """Do one start of a run in this process. Returns its last state, and what came of it in words.

    Args: sample, rows and seed of a sample of the prompts that alone is to be done; None: all of them.

    Until the run's lock is held nothing is written, so that a second process cannot disturb the first.
    """
    spec, frozen = read_spec(folder), read_json(folder.run_json)["prompts"]
    asked, size = frozen["asked"], spec.generation.rows_per_shard
    with ExitStack() as stack:
        the_fleet = fleet.attach(fleet_folder(spec, root))
        stack.enter_context(the_fleet.lease(f"run {folder.name}"))
        prompts = stack.enter_context(FrozenPrompts(folder.prompts, asked=asked, sha256=frozen["sha256"]))
        prints = identity.fingerprint(frozen["sha256"], _model_fingerprint(the_fleet), spec.generation)
        opened = Shards.open(folder.completions, total=asked, fingerprint=prints, rows_per_shard=size)
        shards = stack.enter_context(opened)
        events = stack.enter_context(EventLog(folder.events))
        limits = _limits(the_fleet, spec, root)
        model = the_fleet.model_name()
        _record(folder, the_fleet, prints)
        uploads = _uploads(folder, spec, shards, events) if spec.store.bucket else None
        common = {"model": model, "sampling": identity.sampling(spec.generation)}
        configs = Configs(folder=folder, fleet=the_fleet, common=common)
        pending = shards.pending(shards.failures_by_kind() if ALL_KINDS in retry_failed else retry_failed)
        rows, rest = portion(spec.limits, pending, drawn(asked, *sample) if sample else None)
        version = next((each.engine_version for each in limits.values() if each is not None), None)
        config_ids = {name: configs.id_of(name, it.engine_version if it else version) for name, it in limits.items()}
        setup = Setup(
            folder=folder, root=root, spec=spec, fleet=the_fleet, model=model, limits=limits, config_ids=config_ids,
            configs=configs, prompts=prompts, shards=shards, events=events, uploads=uploads, me=ProcessId.current(),
            owner=owner, rows=rows, rest=rest, later=len(pending) - len(rows),
        )  # fmt: skip
        if differing := [one.name for one in the_fleet.servers if one.settings is not None]:
            events.record("servers_differ", detail="they have other settings than the fleet", servers=differing)
        events.record(
            "run_started", pid=setup.me.pid, config_ids=sorted(set(config_ids.values())), done=shards.done,
            pending=len(pending), repairs=shards.repairs,
        )  # fmt: skip
        gc.freeze()  # what is there now stays: no collection has to walk it again
        gc.set_threshold(20_000, 20, 50)  # at the default, requests in flight are walked for a fifth of the CPU time
        state, reason = asyncio.run(Loop(setup).run())
        done, failed = shards.done, shards.failed
        events.record(f"run_{state}", detail=reason, done=done, failed=failed, asked=asked)
        left = f"; {len(uploads.left):,} object(s) are not on S3" if uploads and uploads.left else ""
    return state, tally(done, failed, asked) + left + f": {reason}" * bool(reason)


def _uploads(folder: RunFolder, spec: RunSpec, shards: Shards, events: EventLog) -> "Uploader":
    """The uploads beside the run. Raises StoreError for what is known to be wrong before the first row is sent."""
    from dfexp.store import Uploader  # here, since it takes boto3, which is slow to import

    return Uploader(folder, spec.store, shards, events.record)


def _limits(the_fleet: Fleet, spec: RunSpec, root: Path) -> dict[str, ServerLimits | None]:
    """The room of each server, None for one that does not answer. Raises TooLittleRoom: not what was planned."""
    limits = {each.name: each.limits if each.state == "ready" else None for each in the_fleet.status()}
    require_room(spec, root, limits)
    return limits


def _model_fingerprint(the_fleet: Fleet) -> str:
    """What tells the fleet's model from another, as the first server that answers has it."""
    for server in the_fleet.servers:
        try:
            return the_fleet.engine.model_fingerprint(server.url, the_fleet.key)
        except RequestError:
            continue
    raise RunError(f"no server of fleet {the_fleet.name!r} answers. See dfexp fleet status {the_fleet.name}.")


def _record(folder: RunFolder, the_fleet: Fleet, prints: Mapping[str, str]) -> None:
    """Write to run.json with what this start goes on."""
    recorded = read_json(folder.run_json)
    recorded["fingerprint"] = prints
    recorded["fleet"] = {"name": the_fleet.name, "identity": the_fleet.identity, "engine": the_fleet.engine.name}
    recorded["versions"] = identity.versions()
    write_json(folder.run_json, recorded)
