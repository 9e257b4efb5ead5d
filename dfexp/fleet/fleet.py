"""A running fleet, whoever launched it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from dfexp.engines.base import Engine
from dfexp.fleet.record import Server
from dfexp.layout import FleetFolder
from dfexp.records import ServerLimits


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
    state: Literal["ready", "starting", "dead", "foreign", "unreachable"]
    detail: str
    limits: ServerLimits | None
    pid: int | None
    rss_bytes: int | None


class Fleet:
    """Servers of one engine under one name, recorded in one folder. Safe to use from several threads.

    Attributes:
        folder: the fleet's files.
        engine: how its servers are started and understood.
        identity: random hex made when the fleet was launched; a restart of a server keeps it.
        spec: the fleet's parameters as they were launched, a plain mapping.
    """

    folder: FleetFolder
    engine: Engine
    identity: str
    spec: dict[str, Any]

    @property
    def name(self) -> str:
        """The fleet's name."""
        raise NotImplementedError

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers as they are now, in their order; replaced whole by a restart."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """The API key ("" for none). Raises FleetError if it cannot be had (file gone, environment variable not set)."""
        raise NotImplementedError

    def server(self, name: str) -> Server:
        """The server `name` as it is now. Raises FleetError that names the servers there are."""
        raise NotImplementedError

    def model_name(self, timeout_s: float = 10.0) -> str:
        """The model name to send, from the first server that says it. Raises FleetError if none does."""
        raise NotImplementedError

    def limits(self, name: str, timeout_s: float = 10.0) -> ServerLimits:
        """What server `name` says of its room. Raises RequestError if it does not answer."""
        raise NotImplementedError

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the servers have each generated a token; all are asked at the same time.

        While the fleet is being launched every server must: one that ends early or stays silent raises
        EngineStartError at once (cause from its log, fix, last lines), and everything that was started is stopped. Of
        a fleet that was ready before, one server is enough; `status` tells about the others.
        """
        raise NotImplementedError

    def status(self, timeout_s: float = 10.0) -> list[ServerStatus]:
        """What each server is doing, asked at the same time. Never raises for what a server does."""
        raise NotImplementedError

    def is_process_alive(self, name: str) -> bool:
        """Whether the process of `name` lives: cheap, no request. True for servers that somebody else runs."""
        raise NotImplementedError

    def restart(self, name: str) -> Fleet:
        """Stop what is left of server `name` and start it again on the same address; returns this fleet, updated.

        Returns once the process is started: `probe` tells when it serves. Raises FleetError for a server that somebody
        else runs, EngineStartError if it cannot be started.
        """
        raise NotImplementedError

    def start_failure(self, name: str) -> str:
        """Cause, fix and last log lines of server `name`, whose process ended or stays silent; without the key."""
        raise NotImplementedError

    def down(self, drain_s: float = 10.0) -> list[str]:
        """Stop every server that this fleet started, and prove it; one line per server of what was done.

        SIGTERM, up to `drain_s` seconds to finish, then SIGKILL for whole process groups. Only processes of this fleet
        are touched. Raises FleetError naming what could not be stopped; fleet.json then stays.
        """
        raise NotImplementedError

    def lease(self, purpose: str) -> AbstractContextManager[None]:
        """Hold the fleet for one user until the context ends or the process dies.

        Raises LockedError naming who holds it.
        """
        raise NotImplementedError

    def lease_holder(self) -> str | None:
        """Who holds the lease now, in words; None when nobody does."""
        raise NotImplementedError


def attach(folder: FleetFolder) -> Fleet:
    """The fleet that `folder` records, whatever state its servers are in.

    Raises FleetError if nothing is recorded there (it was never launched, or it was stopped).
    """
    raise NotImplementedError
