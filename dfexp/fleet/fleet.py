"""A fleet: launched, attached to, watched, restarted and stopped by whoever has its folder; `fleet.json` is the truth.

Methods named `..._locked` are for whoever is `changing` the folder.
"""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from pydantic import SecretStr

from dfexp import errors
from dfexp.engines.base import Engine, Server, engine_for, scrub, start_log
from dfexp.engines.http import Readiness, probe
from dfexp.errors import FleetError, LockedError, RequestError
from dfexp.fleet import spawn
from dfexp.fleet.record import (
    FleetRecord,
    changing,
    check_change,
    read_group,
    read_record,
    waits_for_others,
    write_record,
)
from dfexp.fleet.waiting import Launch, wait_for_one
from dfexp.hardware import held_bytes
from dfexp.jsonl import disk
from dfexp.layout import FleetFolder
from dfexp.params import AnyFleet
from dfexp.processes import ProcessId
from dfexp.records import EngineSample, ServerLimits, TokenCounts

_LAST_LINES, _CHANGE_DRAIN_S, _MEMORY_BACK_S, _PAUSE_S = 12, 10.0, 15.0, 0.2
_DRIVER_BYTES = 2**29  # what a driver may hold more on a GPU than before, without any process there
_Said = TypeVar("_Said")


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


def _silent(step: str) -> None:
    """Tell nobody."""


class Fleet:
    """Servers of one engine under one name, recorded in one folder. Safe to use from several threads."""

    def __init__(self, folder: FleetFolder, engine: Engine, record: FleetRecord) -> None:
        """For `up` and `attach`."""
        self.folder, self.engine, self.name = folder, engine, folder.name
        self.identity = record.identity  # a restart of a server keeps it
        self._key: SecretStr | None = None  # never in a repr
        self._record = record

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers as they are now, in their order; replaced whole by a restart."""
        return self._record.servers

    @property
    def group(self) -> AnyFleet:
        """The parameters of its servers, but for those that have settings of their own."""
        return self._record.spec

    def settings(self, name: str) -> AnyFleet:
        """The parameters that server `name` runs with: those of the fleet, or its own in the middle of a change."""
        own = self.server(name).settings
        return self.group if own is None else read_group(own)

    @property
    def key(self) -> str:
        """The API key, "" for none, read once. Raises FleetError: its file is gone, its variable not set."""
        if self._key is None:
            outside = self.engine.outside_key()
            try:
                self._key = SecretStr(self.folder.key.read_text("ascii") if outside is None else outside)
            except OSError as error:
                why = f"no key of fleet {self.name!r}: {error}. Stop the fleet and launch it again."
                raise FleetError(why) from None
        return self._key.get_secret_value()

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
        return self.engine.limits(self.server(name), self.key, timeout_s)

    def progress(self, name: str, timeout_s: float = 10.0) -> TokenCounts | None:
        """Counters of tokens that grow while server `name` works; None where there are none. Raises RequestError."""
        return self.engine.progress(self.server(name), self.key, timeout_s)

    def sample(self, name: str, timeout_s: float = 10.0) -> EngineSample | None:
        """What server `name` says of its work; None where it says nothing. Raises RequestError."""
        return self.engine.sample(self.server(name), self.key, timeout_s)

    def probe(self, name: str, model: str, timeout_s: float = 20.0) -> Readiness:
        """Ask server `name` for a token, and see that it is ours that gave it."""
        server = self.server(name)
        readiness = probe(server.url, self.key, model, timeout_s)
        if readiness.ready and server.argv is not None and not spawn.owns_port(self.identity, server):
            why = "another program answers on its port. Stop that, or choose other ports."
            return Readiness(errors.Unreachable(f"{name}: {why}"))
        return readiness

    def wait_ready(self, timeout_s: float, tell: Callable[[str], None] = _silent) -> None:
        """Return once the servers serve; all are asked at the same time. `tell` is called with each step of a launch.

        While the fleet is being launched each must generate a token: the first that ends early or stays silent raises
        EngineStartError (cause from its log, fix, last lines), and everything that was started is stopped, also when
        the wait is interrupted; but not while another process that launched it waits as well. Of a fleet that was
        ready before, one server that tells its limits is enough.
        """
        end = time.monotonic() + timeout_s
        if self._record.ready:
            wait_for_one(self, end)
            return
        try:
            Launch(self, tell).wait(end)
            with changing(self.folder):
                self.reread()
                self.save_locked(ready=True)
        except BaseException:
            with changing(self.folder), contextlib.suppress(FleetError):
                self.reread()
                launcher = ProcessId.parse(self._record.launcher)
                if not self._record.ready and (launcher == ProcessId.current() or not launcher.is_alive()):
                    self.stop_locked(drain_s=0.0)
            raise

    def status(self, timeout_s: float = 10.0) -> list[ServerStatus]:
        """What each server is doing, asked at the same time. Raises FleetError only if the fleet was stopped."""
        self.reread()
        return self.ask_all(lambda server: self._status(server, timeout_s))

    def is_process_alive(self, name: str) -> bool:
        """Whether the process of `name` lives: cheap, no request. True for servers that somebody else runs."""
        server = self.server(name)
        return server.argv is None or server.process.is_alive()

    def has_failed(self, name: str) -> bool:
        """Whether server `name`, which is starting, never will serve: its process is gone, or its log says so."""
        return not self.is_process_alive(name) or self.engine.has_failed(start_log(self.server(name)))

    def restart(self, name: str) -> Self:
        """Kill what is left of server `name` and start it again on the same address, without waiting.

        Raises FleetError for a server that somebody else runs or a fleet that was stopped, EngineStartError.
        """
        with changing(self.folder):
            self.reread()
            server = self.server(name)
            if server.argv is None:
                raise FleetError(f"{name} is run by somebody else and cannot be restarted from here.")
            self.start_locked(server)
        return self

    def check_change(self, group: AnyFleet) -> None:
        """Raise FleetError for settings that cannot be given one by one, or with which the model says other things."""
        check_change(self.group, group)
        url, root = self.servers[0].url, self._record.root
        old, new = (engine_for(each, root).model_fingerprint(url, self.key) for each in (self.group, group))
        if old != new:
            raise FleetError(
                f"the model would say other things ({old!r} -> {new!r}), and the rows of one run must come from one"
                " model. Stop the fleet, launch it again with these settings, and choose another name for `run`."
            )

    def reconfigure(self, name: str, group: AnyFleet) -> None:
        """Stop server `name` and start it on the same address with the settings of `group`, without waiting.

        What is in flight gets a few seconds. Raises FleetError: servers of somebody else, or `group` differs in more
        than servers can be given; EngineStartError. Then the server has not been touched.
        """
        with changing(self.folder):
            self.reread()
            server = self.server(name)
            self.check_change(group)
            planned = engine_for(group, self._record.root).plan(self.folder, self.key, at=[server])
            spawn.stop(self.identity, [server], _CHANGE_DRAIN_S)
            own = None if group == self.group else group.model_dump(mode="json")
            self.start_locked(replace(planned[0], settings=own))

    def settle(self, group: AnyFleet) -> None:
        """Record that all servers run with `group` now."""
        with changing(self.folder):
            self.reread()
            self.save_locked(spec=group, servers=tuple(replace(server, settings=None) for server in self.servers))
            self.engine = engine_for(group, self._record.root)

    def start_locked(self, server: Server) -> Server:
        """Kill what is left of a server, start it and record it."""
        spawn.stop(self.identity, [server], drain_s=0.0)
        started = spawn.spawn(server, self.identity, self.folder.path)
        self.save_locked(servers=tuple(started if one.name == server.name else one for one in self.servers))
        return started

    def start_failure(self, name: str) -> str:
        """Cause, fix and last log lines of server `name`, whose process ended or stays silent; without the key."""
        server, what = self.server(name), "did not become ready" if self.is_process_alive(name) else "ended"
        log = start_log(server)
        lines = [f"server {name} {what}. {self.engine.diagnose_start(log)}"]
        if log:
            lines += [f"Last lines of {server.log}:", *(f"  {line[:300]}" for line in log.split("\n")[-_LAST_LINES:])]
        return scrub("\n".join(lines), self.key)

    def down(self, drain_s: float = 10.0, *, force: bool = False) -> list[str]:
        """Stop every server that this fleet started: SIGTERM, SIGKILL after `drain_s` seconds, and proof.

        Returns one line per server. Raises LockedError while a process holds the lease (unless `force`), FleetError
        naming what could not be stopped; fleet.json then stays.
        """
        with changing(self.folder):
            self.reread()
            holder = self.lease_holder()
            if holder is not None and not force:
                raise LockedError(f"fleet {self.name!r} is in use by {holder}. Stop that first.")
            return self.stop_locked(drain_s)

    def stop_locked(self, drain_s: float) -> list[str]:
        """Stop the servers and remove what is private and what records them."""
        lines = spawn.stop(self.identity, [one for one in self.servers if one.argv is not None], drain_s)
        lines += self._memory_back()
        lines += [f"{one.name}: left alone, somebody else runs it" for one in self.servers if one.argv is None]
        for path in (*self.folder.path.glob("server-*"), self.folder.key, self.folder.fleet_json):
            path.unlink(missing_ok=True)
        return lines

    def _memory_back(self) -> list[str]:
        """Whether the memory of the GPUs is as free as before the launch; the driver needs a moment to free it."""
        gpus, before = {name for server in self.servers for name in server.gpus}, self._record.gpu_bytes_before
        if before is None:
            return []
        most = before + len(gpus) * _DRIVER_BYTES
        end = time.monotonic() + _MEMORY_BACK_S
        while (held := held_bytes(gpus) or 0) > most and time.monotonic() < end:
            time.sleep(_PAUSE_S)
        used = f"{held / 2**30:.1f} GiB in use on GPU {', '.join(sorted(gpus))}, {before / 2**30:.1f} before the launch"
        if held > most:
            used = f"NOT BACK: {used}. No process of this fleet is left; nvidia-smi shows whose it is"
        return [f"GPU memory: {used}"]

    @contextlib.contextmanager
    def lease(self, purpose: str) -> Iterator[None]:
        """Hold the fleet for one user until the context or the process ends.

        Raises LockedError naming who holds it, StorageError.
        """
        with contextlib.ExitStack() as stack:
            with disk(f"lock {self.folder.lock}"):
                file = stack.enter_context(self.folder.lock.open("ab", 0))  # closing writes nothing that was refused
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    who = self.lease_holder() or "another process"
                    why = f"fleet {self.name!r} is in use by {who}. Stop that, or use another fleet."
                    raise LockedError(why) from None
                file.truncate(0)
                file.write(f"{ProcessId.current()} {purpose}".encode())
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
        write_record(self.folder, record)
        self._record = record

    def reread(self) -> None:
        """Take over what other processes changed in fleet.json."""
        record = read_record(self.folder)
        if record is None or record.identity != self.identity:
            raise FleetError(f"fleet {self.name!r} was stopped by somebody in the meantime. Bring it up again.")
        self._record = record

    def ask_all(self, ask: Callable[[Server], _Said]) -> list[_Said]:
        """What `ask` gives for each server, asked at the same time."""
        pool = ThreadPoolExecutor(len(self.servers), thread_name_prefix="dfexp-fleet")
        try:
            return list(pool.map(ask, self.servers))
        finally:
            pool.shutdown(wait=False)  # an interrupt does not wait for a server that hangs

    def _status(self, server: Server, timeout_s: float) -> ServerStatus:
        alive, limits, state, detail = self.is_process_alive(server.name), None, "dead", "its process is gone"
        if waits_for_others(server):
            return ServerStatus(server.name, server.url, "starting", "not started yet", None, None, None)
        if alive:
            try:
                limits, state = self.limits(server.name, timeout_s), "ready"
                detail = "answers" if server.settings is None else "answers, with settings other than the fleet's"
            except RequestError as error:
                state = "unreachable" if server.argv is None or isinstance(error, errors.TimedOut) else "starting"
                detail = scrub(str(error), self.key)
        pid, memory = (server.pid, spawn.rss_bytes(server)) if alive and server.argv else (None, None)
        return ServerStatus(server.name, server.url, state, detail, limits, pid, memory)
