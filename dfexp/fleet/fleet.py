"""A fleet: launched, attached to, watched, restarted and stopped by whoever has its folder; `fleet.json` is the truth.

Methods named `..._locked` are for whoever is `changing` the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dfexp import errors
from dfexp.engines.base import Engine, Server, engine_for, scrub
from dfexp.engines.http import probe
from dfexp.errors import EngineStartError, FleetError, LockedError, RequestError
from dfexp.fleet import spawn
from dfexp.jsonl import write_atomic
from dfexp.layout import FleetFolder
from dfexp.params import AnyFleet, RunSpec
from dfexp.processes import ProcessId
from dfexp.records import ServerLimits

_PROBE_TIMEOUT_S, _PAUSE_S, _LAST_LINES = 20.0, 0.2, 12
_Said = TypeVar("_Said")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """The content of fleet.json, without secrets."""

    identity: str  # random hex made at launch
    spec: AnyFleet  # the parameters as launched
    root: Path  # what relative paths in them are relative to
    servers: tuple[Server, ...]
    ready: bool = False  # whether all have answered once; until then the fleet is being launched


_FORMAT = TypeAdapter(FleetRecord)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What one server is doing now."""

    name: str
    url: str
    state: str  # ready: tells its limits; starting: lives, serves not yet; dead: process gone; unreachable: no answer
    detail: str  # one line for a person
    limits: ServerLimits | None  # None unless ready
    pid: int | None  # None unless its process lives and is this fleet's
    rss_bytes: int | None  # resident memory of its processes, shared pages counted in each


class Fleet:
    """Servers of one engine under one name, recorded in one folder. Safe to use from several threads."""

    def __init__(self, folder: FleetFolder, engine: Engine, record: FleetRecord) -> None:
        """For `up` and `attach`."""
        self.folder, self.engine, self.name = folder, engine, folder.name
        self.identity = record.identity  # a restart of a server keeps it
        self.spec: dict[str, Any] = record.spec.model_dump(mode="json")  # the parameters as launched
        self._record = record

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers as they are now, in their order; replaced whole by a restart."""
        return self._record.servers

    @property
    def key(self) -> str:
        """The API key, "" for none. Raises FleetError if it cannot be had: file gone, variable not set."""
        outside = self.engine.outside_key()
        try:
            return self.folder.key.read_text("ascii") if outside is None else outside
        except OSError as error:
            raise FleetError(f"no key of fleet {self.name!r}: {error}. Stop the fleet and launch it again.") from None

    def server(self, name: str) -> Server:
        """The server `name` as it is now. Raises FleetError that names the servers there are."""
        known = {server.name: server for server in self.servers}
        if name not in known:
            raise FleetError(f"fleet {self.name!r} has no server {name!r}. It has: {', '.join(known)}.")
        return known[name]

    def model_name(self) -> str:
        """The model name to send, from the first server that says it. Raises FleetError if none does."""
        for server in self.servers:
            with contextlib.suppress(RequestError):
                return self.engine.model_name(server.url, self.key)
        raise FleetError(f"no server of fleet {self.name!r} tells its model. Give it in fleet.model.")

    def limits(self, name: str, timeout_s: float = 10.0) -> ServerLimits:
        """What server `name` says of its room. Raises RequestError if it does not answer."""
        return self.engine.limits(self.server(name).url, self.key, timeout_s)

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the servers serve; all are asked at the same time.

        While the fleet is being launched each must generate a token: the first that ends early or stays silent raises
        EngineStartError (cause from its log, fix, last lines), and everything that was started is stopped, also when
        the wait is interrupted. Of a fleet that was ready before, one server that tells its limits is enough.
        """
        launching = not self._record.ready
        try:
            self._wait_ready(time.monotonic() + timeout_s, launching)
            if launching:
                with changing(self.folder):
                    self._reread()
                    self.save_locked(ready=True)
        except BaseException:
            with changing(self.folder), contextlib.suppress(FleetError):
                self._reread()
                if not self._record.ready:
                    self.stop_locked(drain_s=0.0)
            raise

    def status(self, timeout_s: float = 10.0) -> list[ServerStatus]:
        """What each server is doing, asked at the same time. Raises FleetError only if the fleet was stopped."""
        self._reread()
        return self._ask_all(lambda server: self._status(server, timeout_s))

    def is_process_alive(self, name: str) -> bool:
        """Whether the process of `name` lives: cheap, no request. True for servers that somebody else runs."""
        server = self.server(name)
        return server.argv is None or server.process.is_alive()

    def restart(self, name: str) -> Fleet:
        """Kill what is left of server `name` and start it again on the same address, without waiting.

        Raises FleetError for a server that somebody else runs or a fleet that was stopped, EngineStartError.
        """
        with changing(self.folder):
            self._reread()
            server = self.server(name)
            if server.argv is None:
                raise FleetError(f"{name} is run by somebody else and cannot be restarted from here.")
            self.start_locked(server)
        return self

    def start_locked(self, server: Server) -> None:
        """Kill what is left of a server, start it and record it."""
        spawn.stop(self.identity, [server], drain_s=0.0)
        started = spawn.spawn(server, self.identity, self.folder.path)
        self.save_locked(servers=tuple(started if one.name == server.name else one for one in self.servers))

    def start_failure(self, name: str) -> str:
        """Cause, fix and last log lines of server `name`, whose process ended or stays silent; without the key."""
        server, what = self.server(name), "did not become ready" if self.is_process_alive(name) else "ended"
        log = spawn.last_start(server)
        lines = [f"server {name} {what}. {self.engine.diagnose_start(log)}"]
        if log:
            lines += [f"Last lines of {server.log}:", *(f"  {line}" for line in log.splitlines()[-_LAST_LINES:])]
        return scrub("\n".join(lines), self.key)

    def down(self, drain_s: float = 10.0, *, force: bool = False) -> list[str]:
        """Stop every server that this fleet started: SIGTERM, SIGKILL after `drain_s` seconds, and proof.

        Returns one line per server. Raises LockedError while a process holds the lease (unless `force`), FleetError
        naming what could not be stopped; fleet.json then stays.
        """
        with changing(self.folder):
            self._reread()
            holder = self.lease_holder()
            if holder is not None and not force:
                raise LockedError(f"fleet {self.name!r} is in use by {holder}. Stop that first.")
            return self.stop_locked(drain_s)

    def stop_locked(self, drain_s: float) -> list[str]:
        """Stop the servers and remove what is private and what records them."""
        lines = spawn.stop(self.identity, [one for one in self.servers if one.argv is not None], drain_s)
        lines += [f"{one.name}: left alone, somebody else runs it" for one in self.servers if one.argv is None]
        for path in (*self.folder.path.glob("server-*"), self.folder.key, self.folder.fleet_json):
            path.unlink(missing_ok=True)
        return lines

    @contextlib.contextmanager
    def lease(self, purpose: str) -> Iterator[None]:
        """Hold the fleet for one user until the context or the process ends. Raises LockedError naming who holds it."""
        with self.folder.lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = self.lease_holder() or "another process"
                raise LockedError(f"fleet {self.name!r} is in use by {who}. Stop that, or use another fleet.") from None
            file.truncate(0)
            file.write(f"{ProcessId.current()} {purpose}")
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def lease_holder(self) -> str | None:
        """Who holds the lease now, in words; None when nobody does. Looking never disturbs a taker."""
        try:
            holder, _, purpose = self.folder.lock.read_text().partition(" ")
            process = ProcessId.parse(holder)
        except (OSError, ValueError):
            return None
        return f"{purpose} (pid {process.pid})" if process.is_alive() else None

    def save_locked(self, **changes: Any) -> None:
        """Replace fields of the record, on disk first. Raises StorageError if the disk refuses."""
        record = replace(self._record, **changes)
        write_atomic(self.folder.fleet_json, _FORMAT.dump_json(record, indent=2) + b"\n")
        self._record = record

    def _reread(self) -> None:
        """Take over what other processes changed in fleet.json."""
        record = read_record(self.folder)
        if record is None or record.identity != self.identity:
            raise FleetError(f"fleet {self.name!r} was stopped by somebody in the meantime. Bring it up again.")
        self._record = record

    def _ask_all(self, ask: Callable[[Server], _Said]) -> list[_Said]:
        pool = ThreadPoolExecutor(len(self.servers), thread_name_prefix="dfexp-fleet")
        try:
            return list(pool.map(ask, self.servers))
        finally:
            pool.shutdown(wait=False)  # an interrupt does not wait for a server that hangs

    def _wait_ready(self, end: float, launching: bool) -> None:
        while True:
            timeout_s = max(1.0, min(_PROBE_TIMEOUT_S, end - time.monotonic()))
            waits = self._ask_all(lambda server: self._why_not_ready(server, timeout_s, launching))  # noqa: B023
            if waits.count(None) >= (len(waits) if launching else 1):
                return
            for server, error in zip(self.servers, waits, strict=True):
                refused = server.argv is None and isinstance(error, (errors.AccessDenied, errors.Refused))
                hopeless = launching and (refused or not self.is_process_alive(server.name))
                if error is not None and (hopeless or time.monotonic() >= end):
                    last = scrub(str(error), self.key)
                    raise EngineStartError(f"{self.start_failure(server.name)}\nLast answer: {last}")
            time.sleep(min(_PAUSE_S, max(0.0, end - time.monotonic())))

    def _why_not_ready(self, server: Server, timeout_s: float, launching: bool) -> RequestError | None:
        """None if a server serves: in a launch only a token counts, later its limits."""
        try:
            if launching:
                return probe(server.url, self.key, self.engine.model_name(server.url, self.key), timeout_s).error
            self.limits(server.name, timeout_s)
        except RequestError as error:
            return error
        return None

    def _status(self, server: Server, timeout_s: float) -> ServerStatus:
        alive, limits, state, detail = self.is_process_alive(server.name), None, "dead", "its process is gone"
        if alive:
            try:
                limits, state, detail = self.limits(server.name, timeout_s), "ready", "answers"
            except RequestError as error:
                state = "unreachable" if server.argv is None or isinstance(error, errors.TimedOut) else "starting"
                detail = scrub(str(error), self.key)
        pid, memory = (server.pid, spawn.rss_bytes(server)) if alive and server.argv else (None, None)
        return ServerStatus(server.name, server.url, state, detail, limits, pid, memory)


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
        differences, user = _differences(record, spec), fleet.lease_holder()
        ours = [server for server in record.servers if server.argv is not None]
        if user is None and not any(spawn.members(record.identity, ours).values()) and (ours or differences):
            fleet.stop_locked(drain_s=0.0)
            return _launch(folder, engine, spec, root), True
        if differences:
            by = f" and is in use by {user}" if user else ""
            raise FleetError(
                f"fleet {fleet.name!r} already runs with other parameters{by}: {'; '.join(differences)}. Stop it with"
                f" `dfexp fleet down {fleet.name}`, or give this one another name (fleet.name)."
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


def list_fleets(root: Path, outputs: str = "outputs") -> list[FleetFolder]:
    """The folders under `root/outputs/fleets` in which a fleet is recorded, by name."""
    return [FleetFolder(path.parent) for path in sorted((root / outputs / "fleets").glob("*/fleet.json"))]


def _launch(folder: FleetFolder, engine: Engine, spec: RunSpec, root: Path) -> Fleet:
    """Start every server. The record is on disk before the first process is, so that none can be forgotten."""
    record = FleetRecord(identity=secrets.token_hex(8), spec=spec.fleet, root=root, servers=())
    fleet = Fleet(folder, engine, record)
    try:
        key = engine.outside_key()
        if key is None:
            key = secrets.token_urlsafe(32)
            write_atomic(folder.key, key.encode(), mode=0o600)
        servers = tuple(engine.plan(folder, key))
        fleet.save_locked(servers=servers)
        for server in servers:
            if server.argv is not None:
                fleet.start_locked(server)
    except BaseException:
        fleet.stop_locked(drain_s=0.0)
        raise
    return fleet


def _differences(record: FleetRecord, spec: RunSpec) -> list[str]:
    """The keys that differ, with both values, but for those that say nothing about the servers themselves."""
    running, asked = record.spec.model_dump(mode="json"), spec.fleet.model_dump(mode="json")
    return [
        f"fleet.{key} is {running.get(key)!r}, asked for is {asked.get(key)!r}"
        for key in {**asked, **running}
        if running.get(key) != asked.get(key) and key not in ("name", "start_timeout_s")
    ]


def read_record(folder: FleetFolder) -> FleetRecord | None:
    """What fleet.json says; None when there is none. Raises FleetError for a file that is not whole."""
    try:
        return _FORMAT.validate_json(folder.fleet_json.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        why = f"{folder.fleet_json} is damaged or of another version of dfexp ({error.errors()[0]['msg']})."
        raise FleetError(f"{why} Stop its servers by hand (`ps` names them), then remove {folder.path}.") from None


@contextlib.contextmanager
def changing(folder: FleetFolder) -> Iterator[None]:
    """One process, and one thread in it, at a time changes a fleet; others wait. Ends with its process."""
    # A file, not the folder: shared file systems lock only what is open for writing. It is never removed, or two
    # processes could each hold the lock of a file of that name.
    with (folder.path / "launch.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
