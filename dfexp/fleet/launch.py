"""Launch a fleet, or find the one that runs."""

import secrets
from pathlib import Path

from dfexp import preflight
from dfexp.engines.base import Engine, engine_for
from dfexp.errors import FleetError
from dfexp.fleet import spawn
from dfexp.fleet.fleet import Fleet
from dfexp.fleet.record import FleetRecord, changing, differences, read_record
from dfexp.hardware import held_bytes
from dfexp.jsonl import write_atomic
from dfexp.layout import FleetFolder
from dfexp.params import OwnFleet, RunSpec, SglangServers
from dfexp.processes import ProcessId


def up(spec: RunSpec, root: Path) -> tuple[Fleet, bool]:
    """The fleet of `spec`, and whether this call launched it. Does not wait: `Fleet.wait_ready` does.

    A fleet of that name that runs with the same parameters is attached to; its dead servers are started again unless a
    run holds it. Records of a fleet that is gone are replaced. Raises FleetError if it runs with other parameters
    (naming them), EngineStartError if it cannot be launched; then nothing is left running.
    """
    root = root.resolve()
    engine = engine_for(spec.fleet, root)
    engine.outside_key()  # a missing one is told before anything is made
    folder = FleetFolder.named(root, spec.outputs, spec.fleet_name)
    folder.logs.mkdir(parents=True, exist_ok=True)
    with changing(folder):
        record = read_record(folder)
        if record is None:
            return _launch(folder, engine, spec, root), True
        fleet = Fleet(folder, engine, record)
        changes, user = differences(record.spec, spec.fleet), fleet.lease_holder()
        ours = [server for server in record.servers if server.argv is not None]
        if user is None and not any(spawn.members(record.identity, ours).values()) and (ours or changes):
            fleet.stop_locked(drain_s=0.0)
            return _launch(folder, engine, spec, root), True
        if changes:
            by = f" and is in use by {user}" if user else ""
            raise FleetError(
                f"fleet {fleet.name!r} already runs with other parameters{by}: {'; '.join(changes)}. `dfexp fleet"
                f" reconfigure` gives it these one server at a time, `dfexp fleet down {fleet.name}` stops it, another"
                " fleet.name makes another fleet."
            )
        for server in ours:
            if record.ready and user is None and not server.process.is_alive():
                fleet.start_locked(server)
        return fleet, False


def attach(folder: FleetFolder) -> Fleet:
    """The fleet that `folder` records, whatever state its servers are in. Raises FleetError if none is recorded."""
    record = read_record(folder)
    if record is None:
        raise FleetError(f"no fleet {folder.name!r} here: {folder.fleet_json} does not exist. Launch it first.")
    return Fleet(folder, engine_for(record.spec, record.root), record)


def is_running(spec: RunSpec, root: Path) -> bool:
    """Whether a fleet of this name has a living server."""
    record = read_record(FleetFolder.named(root, spec.outputs, spec.fleet_name))
    return record is not None and any(spawn.members(record.identity, record.servers).values())


def list_fleets(root: Path, outputs: str = "outputs") -> list[FleetFolder]:
    """The folders under `root/outputs/fleets` in which a fleet is recorded, by name."""
    return [FleetFolder(path.parent) for path in sorted((root / outputs / "fleets").glob("*/fleet.json"))]


def _launch(folder: FleetFolder, engine: Engine, spec: RunSpec, root: Path) -> Fleet:
    """Start the servers. The record is on disk before the first process is, so that none can be forgotten."""
    # Real servers take minutes to fail, and GPUs; the others a second.
    preflight.require(spec, root, is_store_alone=not isinstance(spec.fleet, SglangServers))
    me = str(ProcessId.current())
    record = FleetRecord(identity=secrets.token_hex(8), spec=spec.fleet, root=root, servers=(), launcher=me)
    fleet = Fleet(folder, engine, record)
    try:
        key = engine.outside_key()
        if key is None:
            key = secrets.token_hex(32)  # never begins with "-", which would make it a flag
            write_atomic(folder.key, key.encode(), mode=0o600)
        servers = tuple(engine.plan(folder, key))
        gpus = {name for server in servers for name in server.gpus}
        fleet.save_locked(servers=servers, gpu_bytes_before=held_bytes(gpus) if gpus else None)
        own = isinstance(spec.fleet, OwnFleet) and (spec.fleet.canary_first or spec.fleet.stagger_s > 0)
        for server in servers[:1] if own else servers:  # the others are started by whoever waits for them
            if server.argv is not None:
                fleet.start_locked(server)
    except BaseException:
        fleet.stop_locked(drain_s=0.0)
        raise
    return fleet
