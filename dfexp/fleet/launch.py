"""Bring a fleet up: attach to it, or launch it; and find the fleets there are."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dfexp.engines.base import Engine, engine_for
from dfexp.errors import FleetError
from dfexp.fleet import lease, spawn
from dfexp.fleet.fleet import Fleet
from dfexp.fleet.record import (
    FleetRecord,
    changing,
    make_folder,
    planned,
    read_record,
    write_files,
    write_private,
    write_record,
)
from dfexp.layout import FleetFolder
from dfexp.params import FleetGroup, RunSpec

_WAITING = frozenset({"name", "start_timeout_s"})
"""Keys that say nothing about the servers themselves."""


def up(spec: RunSpec, root: Path) -> tuple[Fleet, bool]:
    """The fleet of `spec`, and whether this call launched it. Does not wait: `Fleet.wait_ready` does.

    A fleet of that name that runs with the same parameters is attached to; its dead servers are started again unless a
    run holds it. Records of a fleet that is gone are replaced. Raises FleetError if it runs with other parameters
    (naming them), EngineStartError if it cannot be launched; then nothing is left running.
    """
    root = root.resolve()
    engine = engine_for(spec.fleet, root)
    engine.outside_key()
    folder = FleetFolder(root / spec.outputs / "fleets" / spec.fleet_name)
    make_folder(folder)
    with changing(folder):
        record = read_record(folder)
        if record is not None:
            fleet = Fleet(folder, engine, record)
            if _goes_on(fleet, record, spec.fleet):
                _revive(fleet, record)
                return fleet, False
            fleet.stop_locked(drain_s=0.0)
        return _launch(folder, engine, spec.fleet, root), True


def list_fleets(root: Path, outputs: str = "outputs") -> list[FleetFolder]:
    """The folders under `root/outputs/fleets` in which a fleet is recorded, by name."""
    found = sorted((root / outputs / "fleets").glob("*/fleet.json"))
    return [FleetFolder(path.parent) for path in found]


def _goes_on(fleet: Fleet, record: FleetRecord, group: FleetGroup) -> bool:
    """Whether the recorded fleet is to be attached to. Raises FleetError when it is in the way."""
    differences = _differences(record.spec, group.model_dump(mode="json"))
    user = fleet.lease_holder()
    if not _is_running(record) and user is None:
        return not differences and not any(server.ours for server in record.servers)
    if differences:
        in_use = f" and is in use by {user}" if user else ""
        raise FleetError(
            f"fleet {fleet.name!r} already runs with other parameters{in_use}: {'; '.join(differences)}. Stop it with"
            f" `dfexp fleet down {fleet.name}`, or give this one another name (fleet.name)."
        )
    return True


def _is_running(record: FleetRecord) -> bool:
    """Whether a process of the recorded fleet lives: by pid and start stamp, or by its mark when no pid was noted."""
    ours = [server for server in record.servers if server.ours]
    if any(server.process is not None and server.process.is_alive() for server in ours):
        return True
    unnoted = [server for server in ours if server.pid is None]
    return bool(unnoted) and any(spawn.members(record.identity, unnoted).values())


def _revive(fleet: Fleet, record: FleetRecord) -> None:
    """Start dead servers again. Not those of a fleet in use, which its run looks after, nor of an unfinished launch."""
    if record.ready_at is None or lease.holder(fleet.folder.lock) is not None:
        return
    for server in record.servers:
        if not fleet.is_process_alive(server.name):
            fleet.restart_locked(server.name)


def _launch(folder: FleetFolder, engine: Engine, group: FleetGroup, root: Path) -> Fleet:
    """Start every server. The record is on disk before the first process is, so that none can be forgotten."""
    key, outside = secrets.token_urlsafe(32), engine.outside_key()
    plans = engine.plans(folder, key if outside is None else outside)
    record = FleetRecord(
        identity=secrets.token_hex(8),
        name=folder.name,
        engine=engine.name,
        spec=group.model_dump(mode="json"),
        root=str(root),
        launched_at=time.time(),
        ready_at=None,
        servers=tuple(planned(plan, folder) for plan in plans),
    )
    fleet = Fleet(folder, engine, record, launched_here=True)
    try:
        if outside is None:
            write_private(folder.key, key.encode())
        for plan in plans:
            write_files(folder, plan)
        write_record(folder, record)
        for position, server in enumerate(record.servers):
            if server.ours:
                record = fleet.start_locked(record, position, server)
    except BaseException:
        fleet.stop_locked(drain_s=0.0)
        raise
    return fleet


def _differences(running: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """The keys that differ, with both values."""
    keys = [key for key in {**asked, **running} if key not in _WAITING]
    return [
        f"fleet.{key} is {running.get(key)!r}, asked for is {asked.get(key)!r}"
        for key in keys
        if running.get(key) != asked.get(key)
    ]
