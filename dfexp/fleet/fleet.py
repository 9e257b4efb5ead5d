"""A running fleet, whoever launched it. Methods named `..._locked` are for whoever is `changing` the folder."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dfexp import errors
from dfexp.engines.base import Engine, Server, is_free, scrub
from dfexp.engines.http import probe
from dfexp.errors import EngineStartError, FleetError, LockedError, RequestError
from dfexp.fleet import spawn
from dfexp.fleet.record import FleetRecord, changing, read_record, write_record
from dfexp.layout import FleetFolder
from dfexp.processes import ProcessId
from dfexp.records import ServerLimits

_PROBE_TIMEOUT_S, _PAUSE_S = 20.0, 0.2
_LAST_LINES = 12
_Said = TypeVar("_Said")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What one server is doing now.

    State: ready, it tells its limits; starting, its process lives and does not serve yet; dead, its process is gone;
    unreachable, it should answer and does not.
    """

    name: str
    url: str
    state: str
    detail: str  # one line for a person
    limits: ServerLimits | None  # None unless ready
    pid: int | None  # None unless its process lives and is this fleet's
    rss_bytes: int | None  # resident memory of its processes, shared pages counted in each


class Fleet:
    """Servers of one engine under one name, recorded in one folder. Safe to use from several threads."""

    def __init__(
        self, folder: FleetFolder, engine: Engine, record: FleetRecord, *, launched_here: bool = False
    ) -> None:
        """For `up` and `attach`. Args: launched_here, whether an interrupted launch is this process's to undo."""
        self.folder, self.engine, self.name = folder, engine, folder.name
        self.identity = record.identity  # a restart of a server keeps it
        self.spec: dict[str, Any] = record.spec.model_dump(mode="json")  # the parameters as launched
        self._record, self._launched_here = record, launched_here
        self._children: dict[int, subprocess.Popen[bytes]] = {}

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
        """Return once the servers serve; all are asked at the same time.

        While the fleet is being launched each must generate a token: the first that ends early or stays silent raises
        EngineStartError (cause from its log, fix, last lines), and everything that was started is stopped. Of a fleet
        that was ready before, one server that tells its limits is enough; `status` tells about the others.
        """
        launching = not self._record.ready
        try:
            self._wait_ready(time.monotonic() + timeout_s, launching)
            if launching:
                with changing(self.folder):
                    self._reread()
                    self.save_locked(ready=True)
        except BaseException as error:
            if launching and (self._launched_here or isinstance(error, EngineStartError)):
                with changing(self.folder):
                    if self._is_current() and not self._record.ready:
                        self.stop_locked(drain_s=0.0)
            raise

    def status(self, timeout_s: float = 10.0) -> list[ServerStatus]:
        """What each server is doing, asked at the same time. Never raises for what a server does.

        Looks at fleet.json first: a server may have been restarted by another process. Raises FleetError if the fleet
        was stopped.
        """
        self._reread()
        return self._ask_all(lambda server: self._status(server, timeout_s))

    def is_process_alive(self, name: str) -> bool:
        """Whether the process of `name` lives: cheap, no request. True for servers that somebody else runs."""
        server = self.server(name)
        return server.argv is None or server.process.is_alive()

    def restart(self, name: str) -> Fleet:
        """Kill what is left of server `name` and start it again on the same address; returns this fleet, updated.

        Does not wait: `probe` tells when it serves. Raises FleetError for a server that somebody else runs or a fleet
        that was stopped, EngineStartError if it cannot be started.
        """
        with changing(self.folder):
            self._reread()
            self.restart_locked(self.server(name))
        return self

    def restart_locked(self, server: Server) -> None:
        """What `restart` does."""
        if server.argv is None:
            raise FleetError(f"{server.name} is run by somebody else and cannot be restarted from here.")
        spawn.stop(self.identity, [server], drain_s=0.0)
        address = urlsplit(server.url)
        if not is_free(address.hostname or "", address.port or 80):
            raise EngineStartError(f"{server.name}: another process listens at its address. Stop that one.")
        self.start_locked(server)

    def start_locked(self, server: Server) -> None:
        """Start a server and record it."""
        started, child = spawn.spawn(server, self.identity, self.folder.path)
        self._children[child.pid] = child
        self.save_locked(servers=tuple(started if one.name == server.name else one for one in self.servers))

    def start_failure(self, name: str) -> str:
        """Cause, fix and last log lines of server `name`, whose process ended or stays silent; without the key."""
        server, what, code = self.server(name), "did not become ready", None
        if not self.is_process_alive(name):
            child = self._children.get(server.pid or 0)
            code = child.wait() if child else None
            what = "ended" if code is None else f"ended with exit code {code}"
        log = spawn.last_start(server)
        cause, fix = self.engine.diagnose_start(log, code)
        lines = [f"server {name} {what}. {cause} {fix}"]
        if log:
            lines += [f"Last lines of {server.log}:", *(f"  {line}" for line in log.splitlines()[-_LAST_LINES:])]
        return scrub("\n".join(lines), self.key)

    def down(self, drain_s: float = 10.0, *, force: bool = False) -> list[str]:
        """Stop every server that this fleet started, and prove it; one line per server of what was done.

        SIGTERM, up to `drain_s` seconds to finish, then SIGKILL. Only processes of this fleet are touched. Raises
        LockedError while a process holds the lease (unless `force`), FleetError naming what could not be stopped;
        fleet.json then stays.
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
        """Replace fields of the record, on disk first."""
        record = replace(self._record, **changes)
        write_record(self.folder, record)
        self._record = record

    def _is_current(self) -> bool:
        """Take over what other processes changed in fleet.json. False if the fleet was stopped or launched anew."""
        record = read_record(self.folder)
        if record is None or record.identity != self.identity:
            return False
        self._record = record
        return True

    def _reread(self) -> None:
        if not self._is_current():
            raise FleetError(f"fleet {self.name!r} was stopped by somebody in the meantime. Bring it up again.")

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
                    raise EngineStartError(f"{self.start_failure(server.name)}\nLast answer: {error}")
            time.sleep(min(_PAUSE_S, max(0.0, end - time.monotonic())))

    def _why_not_ready(self, server: Server, timeout_s: float, launching: bool) -> RequestError | None:
        """None if a server serves. In a launch only a token counts, and only from the fleet's own process."""
        try:
            if not launching:
                self.limits(server.name, timeout_s)
                return None
            error = probe(server.url, self.key, self.engine.model_name(server.url, self.key), timeout_s).error
        except RequestError as refusal:
            return refusal
        if error is None and server.argv is not None and not spawn.listens(server):
            return errors.BadAnswer("another process answers at its address")
        return error

    def _status(self, server: Server, timeout_s: float) -> ServerStatus:
        alive, limits, state, detail = self.is_process_alive(server.name), None, "dead", "its process is gone"
        if alive:
            try:
                limits, state, detail = self.limits(server.name, timeout_s), "ready", "answers"
            except RequestError as error:
                state = "unreachable" if server.argv is None or isinstance(error, errors.TimedOut) else "starting"
                detail = scrub(str(error), self.key)
        pid, memory = (server.pid, spawn.rss_bytes(server)) if alive and server.argv else (None, None)
        return ServerStatus(
            name=server.name, url=server.url, state=state, detail=detail, limits=limits, pid=pid, rss_bytes=memory
        )
