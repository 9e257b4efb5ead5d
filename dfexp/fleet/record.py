"""fleet.json: what a fleet's folder says about its servers. The file is the truth; every change replaces it whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from dfexp.engines.base import ServerPlan
from dfexp.errors import FleetError, LockedError, StorageError
from dfexp.jsonl import write_atomic
from dfexp.layout import FleetFolder
from dfexp.processes import ProcessId

_LOCK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server of a fleet.

    Attributes:
        name: host:port, the server's name everywhere.
        url: base URL without /v1.
        argv: its command; None when somebody else runs it, and then pid, process_started and log are None too.
        env: additions to its environment.
        files: names of its private files in the fleet's folder.
        pid: leader of its own session and process group; None before it is started.
        process_started: start stamp of that process (`ProcessId`): tells it from a later one with its number.
        log: path of its log.
    """

    name: str
    url: str
    argv: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    pid: int | None = None
    process_started: str | None = None
    log: str | None = None

    @property
    def ours(self) -> bool:
        """Whether dfexp runs it."""
        return self.argv is not None

    @property
    def process(self) -> ProcessId | None:
        """Its process, dead or alive; None when it has none."""
        if self.pid is None or self.process_started is None:
            return None
        return ProcessId(self.pid, self.process_started)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """The content of fleet.json. It holds no secret.

    Attributes:
        identity: random hex made at launch.
        spec: the fleet's parameters as launched.
        root: folder that relative paths in them are relative to.
        launched_at: seconds since the epoch.
        ready_at: when all servers had answered for the first time; None while the fleet is being launched.
    """

    identity: str
    name: str
    engine: str
    spec: dict[str, Any]
    root: str
    launched_at: float
    ready_at: float | None
    servers: tuple[Server, ...]

    def server(self, name: str) -> Server:
        """The server `name`. Raises FleetError that names those there are."""
        for server in self.servers:
            if server.name == name:
                return server
        known = ", ".join(server.name for server in self.servers)
        raise FleetError(f"fleet {self.name!r} has no server {name!r}. It has: {known}.")

    def with_server(self, position: int, server: Server) -> FleetRecord:
        """The record with another server at `position`."""
        servers = (*self.servers[:position], server, *self.servers[position + 1 :])
        return replace(self, servers=servers)


_FORMAT = TypeAdapter(FleetRecord)


def planned(plan: ServerPlan, folder: FleetFolder) -> Server:
    """The server of a plan, not started."""
    parts = urlsplit(plan.url)
    name = parts.netloc + parts.path
    log = None if plan.argv is None else str(folder.logs / f"server-{parts.port}.log")
    return Server(name=name, url=plan.url, argv=plan.argv, env=plan.env, files=tuple(plan.files), log=log)


def read_record(folder: FleetFolder) -> FleetRecord | None:
    """What fleet.json says; None when there is none. Raises FleetError for a file that is damaged."""
    try:
        return _FORMAT.validate_json(folder.fleet_json.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FleetError(f"cannot read {folder.fleet_json}: {error.strerror}. Fix its permissions.") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise FleetError(
            f"{folder.fleet_json} is damaged ({where or 'content'}: {first['msg']}). Stop its servers by hand"
            f" (the file or `ps` names them), then remove {folder.path}."
        ) from None


def write_record(folder: FleetFolder, record: FleetRecord) -> None:
    """Replace fleet.json. Raises FleetError if the disk refuses; the old file then stays."""
    try:
        write_atomic(folder.fleet_json, _FORMAT.dump_json(record, indent=2) + b"\n")
    except StorageError as error:
        raise FleetError(str(error)) from error


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, at no instant otherwise. Raises FleetError if the disk refuses."""
    try:
        write_atomic(path, data, mode=0o600)
    except StorageError as error:
        raise FleetError(str(error)) from error


def write_files(folder: FleetFolder, plan: ServerPlan) -> None:
    """Write a plan's private files. Raises FleetError if the disk refuses."""
    for name, data in plan.files.items():
        write_private(folder.path / name, data)


def make_folder(folder: FleetFolder) -> None:
    """Make the fleet's folder. Raises FleetError for a place where another user could swap what is in it."""
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
        found = folder.path.lstat()
    except OSError as error:
        raise FleetError(f"cannot make the fleet's folder {folder.path}: {error.strerror}. Fix `outputs`.") from None
    if not folder.path.is_dir() or folder.path.is_symlink() or found.st_uid != os.geteuid():
        raise FleetError(f"{folder.path} is a link or belongs to another user. Remove it or choose another fleet.name.")


@contextlib.contextmanager
def changing(folder: FleetFolder) -> Iterator[None]:
    """One process, and one thread in it, at a time changes a fleet. Raises LockedError when another takes too long."""
    try:
        # A file, not the folder itself: shared file systems lock only what is open for writing. It is never removed,
        # or two processes could each hold the lock of a file of that name.
        fd = os.open(folder.path / "launch.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise FleetError(f"cannot lock the fleet's folder {folder.path}: {error.strerror}.") from None
    try:
        _lock(fd, folder)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, folder: FleetFolder) -> None:
    """Take the lock of an open file; the kernel drops it when the descriptor closes, however that happens."""
    end = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise LockedError(
                    f"another process has been starting or stopping fleet {folder.name!r} for {_LOCK_TIMEOUT_S:.0f} s."
                    " Wait for it, or end it."
                ) from None
            time.sleep(0.05)
