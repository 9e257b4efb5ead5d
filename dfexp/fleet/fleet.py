"""A running fleet, whoever launched it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from dfexp.engines.base import Engine, engine_for, scrub
from dfexp.engines.ports import is_listening
from dfexp.errors import (
    ConnectionLost,
    EngineStartError,
    FleetError,
    LockedError,
    RequestError,
    ServerFault,
    TimedOut,
    Unreachable,
)
from dfexp.fleet import lease, ready, spawn
from dfexp.fleet.record import (
    FleetRecord,
    Server,
    changing,
    planned,
    read_record,
    write_files,
    write_record,
)
from dfexp.layout import FleetFolder
from dfexp.params import AnyFleet, FleetGroup
from dfexp.processes import ProcessId
from dfexp.records import ServerLimits

State = Literal["ready", "starting", "dead", "foreign", "unreachable"]
_LAST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What one server is doing now.

    Attributes:
        state: ready: it answers and says its limits. starting: its process lives and does not answer yet. dead: its
            process is gone. foreign: somebody else answers at its address. unreachable: it should answer and does not.
        detail: one line for a person.
        limits: what it says of its room; None unless ready.
        pid: None unless its process lives and is this fleet's.
        rss_bytes: resident memory of its processes; None where unknown.
    """

    name: str
    url: str
    state: State
    detail: str
    limits: ServerLimits | None
    pid: int | None
    rss_bytes: int | None


class Fleet:
    """Servers of one engine under one name, recorded in one folder. Safe to use from several threads.

    Attributes:
        folder: the fleet's files.
        engine: how its servers are started and understood.
    """

    def __init__(
        self, folder: FleetFolder, engine: Engine, record: FleetRecord, *, launched_here: bool = False
    ) -> None:
        """For `up` and `attach`. Args: launched_here, whether an interrupted launch is this process's to undo."""
        self.folder, self.engine = folder, engine
        self._record, self._launched_here = record, launched_here
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._guard = threading.Lock()

    @property
    def name(self) -> str:
        """The fleet's name."""
        return self.folder.name

    @property
    def identity(self) -> str:
        """Random hex made when the fleet was launched; a restart of a server keeps it."""
        return self._record.identity

    @property
    def spec(self) -> Mapping[str, Any]:
        """The fleet's parameters as they were launched."""
        return self._record.spec

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers as they are now, in their order; replaced whole by a restart."""
        return self._record.servers

    @property
    def key(self) -> str:
        """The API key, "" for none. Raises FleetError if it cannot be had: file gone, variable not set."""
        key = self.engine.outside_key()
        if key is not None:
            return key
        try:
            return self.folder.key.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise FleetError(
                f"the key of fleet {self.name!r} cannot be read from {self.folder.key}. The fleet was stopped, or the"
                " file was removed: stop it and launch it again."
            ) from None

    def server(self, name: str) -> Server:
        """The server `name` as it is now. Raises FleetError that names the servers there are."""
        return self._record.server(name)

    def model_name(self) -> str:
        """The model name to send, from the first server that says it. Raises FleetError if none does."""
        reasons = []
        for server in self.servers:
            try:
                return self.engine.model_name(server.url, self.key)
            except RequestError as error:
                reasons.append(str(error))
        raise FleetError(f"no server of fleet {self.name!r} tells its model: {reasons[0]}")

    def limits(self, name: str, timeout_s: float = 10.0) -> ServerLimits:
        """What server `name` says of its room. Raises RequestError if it does not answer."""
        return self.engine.limits(self.server(name).url, self.key, timeout_s)

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the servers have each generated a token; all are asked at the same time.

        While the fleet is being launched every server must: one that ends early or stays silent raises
        EngineStartError at once (cause from its log, fix, last lines), and everything that was started is stopped. Of
        a fleet that was ready before, one server is enough; `status` tells about the others.
        """
        launching = self._record.ready_at is None
        try:
            ready.wait_ready(self, timeout_s, strict=launching)
        except BaseException as error:
            if launching and (self._launched_here or isinstance(error, EngineStartError)):
                self.abandon()
            raise
        if launching:
            with changing(self.folder):
                self._save(replace(self._reread(), ready_at=time.time()))

    def status(self, timeout_s: float = 10.0) -> list[ServerStatus]:
        """What each server is doing, asked at the same time. Never raises for what a server does.

        Looks at fleet.json first: a server may have been restarted by another process. Raises FleetError if the fleet
        was stopped.
        """
        self._record = self._reread()
        self._reap()
        key, servers = self.key, self.servers
        with ThreadPoolExecutor(len(servers), thread_name_prefix="dfexp-status") as pool:
            return list(pool.map(lambda server: self._status(server, key, timeout_s), servers))

    def is_process_alive(self, name: str) -> bool:
        """Whether the process of `name` lives: cheap, no request. True for servers that somebody else runs."""
        server = self.server(name)
        if not server.ours:
            return True
        with self._guard:
            child = self._children.get(server.pid or 0)
            if child is not None:
                return child.poll() is None
        return server.process is not None and server.process.is_alive()

    def restart(self, name: str) -> Fleet:
        """Kill what is left of server `name` and start it again on the same address; returns this fleet, updated.

        Returns once the process is started: `probe` tells when it serves. Raises FleetError for a server that somebody
        else runs or a fleet that was stopped, EngineStartError if it cannot be started.
        """
        with changing(self.folder):
            self.restart_locked(name)
        return self

    def restart_locked(self, name: str) -> None:
        """`restart` for whoever is already `changing` the folder."""
        record = self._reread()
        server = record.server(name)
        if not server.ours:
            raise FleetError(f"{name} is run by somebody else and cannot be restarted from here.")
        spawn.stop(record.identity, [server], drain_s=0.0)
        self._reap()
        address = urlsplit(server.url)
        if is_listening(address.hostname or "", address.port or 80):
            raise EngineStartError(
                f"{name} cannot be restarted: another process listens at its address. Stop that one."
            )
        self.start_locked(record, record.servers.index(server), server)

    def start_locked(self, record: FleetRecord, position: int, server: Server) -> FleetRecord:
        """Start `server` in the place `position` of `record`, and record it; for whoever is `changing` the folder."""
        started, child = spawn.spawn(server, record.identity, self.folder.path)
        with self._guard:
            self._children[child.pid] = child
        record = record.with_server(position, started)
        try:
            self._save(record)
        except BaseException:
            spawn.stop(record.identity, [started], drain_s=0.0)
            raise
        return record

    def move(self, position: int) -> None:
        """Start a server that lost its port to somebody else on another one; no server that was ready ever moves."""
        with changing(self.folder):
            record = self._reread()
            server = record.servers[position]
            if server != self._record.servers[position]:
                self._record = record  # whoever else waits for this launch has moved it already
                return
            taken = {one.name for one in record.servers}
            plans = [(plan, planned(plan, self.folder)) for plan in self.engine.plans(self.folder, self.key)]
            plan, moved = next(((plan, one) for plan, one in plans if one.name not in taken), (None, None))
            if plan is None or moved is None:
                raise EngineStartError(self.start_failure(server.name))
            write_files(self.folder, plan)
            self.start_locked(record, position, moved)
            for name in server.files:
                (self.folder.path / name).unlink(missing_ok=True)

    def start_failure(self, name: str) -> str:
        """Cause, fix and last log lines of server `name`, whose process ended or stays silent; without the key."""
        server = self.server(name)
        with self._guard:
            child = self._children.get(server.pid or 0)
            exit_code = None if child is None else child.poll()
        log = spawn.last_start(server.log)
        cause, fix = self.engine.diagnose_start(log, exit_code)
        if not server.ours:
            what = "did not become ready"
        elif self.is_process_alive(name):
            what = "runs, but did not become ready"
        else:
            what = "ended" + ("" if exit_code is None else f" with exit code {exit_code}")
        message = f"server {name} {what}. {cause} {fix}"
        lines = log.splitlines()[-_LAST_LINES:]
        if lines:
            message += f"\nLast lines of {server.log}:\n  " + "\n  ".join(lines)
        return scrub(message, self.key)

    def down(self, drain_s: float = 10.0, *, force: bool = False) -> list[str]:
        """Stop every server that this fleet started, and prove it; one line per server of what was done.

        SIGTERM, up to `drain_s` seconds to finish, then SIGKILL for whole process groups. Only processes of this fleet
        are touched. Raises LockedError while another process holds the lease (unless `force`), FleetError naming what
        could not be stopped; fleet.json then stays.
        """
        with changing(self.folder):
            held = lease.holder(self.folder.lock)
            if held is not None and held[0] != ProcessId.current() and not force:
                raise LockedError(f"fleet {self.name!r} is in use by {held[1]}. Stop that first.")
            return self.stop_locked(drain_s)

    def stop_locked(self, drain_s: float) -> list[str]:
        """Stop the servers and remove what is private and what records them; for whoever is `changing` the folder."""
        record = read_record(self.folder) or self._record
        if record.identity != self.identity:
            raise FleetError(f"fleet {self.name!r} was launched anew in the meantime. Attach to it and try again.")
        lines = spawn.stop(record.identity, [server for server in record.servers if server.ours], drain_s)
        lines += [f"{server.name}: left alone, somebody else runs it" for server in record.servers if not server.ours]
        self._reap()
        private = [self.folder.path / name for server in record.servers for name in server.files]
        for path in (*private, self.folder.key, self.folder.fleet_json):
            path.unlink(missing_ok=True)
        return lines

    def abandon(self) -> None:
        """Undo a launch that failed, so that nothing stays half-launched."""
        with changing(self.folder):
            record = read_record(self.folder)
            if record is not None and record.identity == self.identity and record.ready_at is None:
                self.stop_locked(drain_s=0.0)

    def lease(self, purpose: str) -> AbstractContextManager[None]:
        """Hold the fleet for one user until the context ends or the process dies.

        Raises LockedError naming who holds it.
        """
        return lease.held(self.folder.lock, purpose, self.name)

    def lease_holder(self) -> str | None:
        """Who holds the lease now, in words; None when nobody does."""
        held = lease.holder(self.folder.lock)
        return None if held is None else held[1]

    def _status(self, server: Server, key: str, timeout_s: float) -> ServerStatus:
        alive = self.is_process_alive(server.name)
        limits: ServerLimits | None = None
        try:
            limits = self.engine.limits(server.url, key, timeout_s)
            state, detail = _answered(server, alive)
        except RequestError as error:
            state, detail = _silent(server, alive, error), scrub(str(error), key)
        return ServerStatus(
            name=server.name,
            url=server.url,
            state=state,
            detail=detail,
            limits=limits if state == "ready" else None,
            pid=server.pid if server.ours and alive else None,
            rss_bytes=spawn.rss_bytes(server),
        )

    def _reread(self) -> FleetRecord:
        """The record on disk. Raises FleetError if the fleet was stopped or replaced since this object was made."""
        record = read_record(self.folder)
        if record is None or record.identity != self.identity:
            what = "stopped" if record is None else "launched anew"
            raise FleetError(f"fleet {self.name!r} was {what} by somebody in the meantime. Bring it up again.")
        return record

    def _save(self, record: FleetRecord) -> None:
        write_record(self.folder, record)
        self._record = record

    def _reap(self) -> None:
        """Collect children that have ended, so that none stays a zombie."""
        with self._guard:
            self._children = {pid: child for pid, child in self._children.items() if child.poll() is None}


def attach(folder: FleetFolder) -> Fleet:
    """The fleet that `folder` records, whatever state its servers are in.

    Raises FleetError if nothing is recorded there (it was never launched, or it was stopped).
    """
    record = read_record(folder)
    if record is None:
        raise FleetError(f"no fleet {folder.name!r} here: {folder.fleet_json} does not exist. Launch it first.")
    try:
        group: FleetGroup = TypeAdapter(AnyFleet).validate_python(record.spec)
    except ValidationError:
        raise FleetError(
            f"{folder.fleet_json} was written by another version of dfexp. Use that one to stop it."
        ) from None
    return Fleet(folder, engine_for(group, Path(record.root)), record)


def _answered(server: Server, alive: bool) -> tuple[State, str]:
    """The state of a server whose address tells its limits."""
    if alive:
        return "ready", "answers"
    return "foreign", "its process is gone, and another process answers at its address"


def _silent(server: Server, alive: bool, error: RequestError) -> State:
    """The state of a server whose address does not tell its limits."""
    if not server.ours:
        return "unreachable"
    if isinstance(error, (ConnectionLost, Unreachable)):
        return "starting" if alive else "dead"
    if isinstance(error, TimedOut):
        return "unreachable" if alive else "foreign"
    return "starting" if alive and isinstance(error, ServerFault) else "foreign"
