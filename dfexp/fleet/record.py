"""fleet.json: what a fleet's folder says about its servers. The file is the truth; every change replaces it whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server of a fleet.

    Attributes:
        name: host:port, the server's name everywhere.
        url: base URL without /v1.
        argv: its command; None when somebody else runs it, and then pid, process_started and log are None too.
        env: additions to its environment.
        pid: leader of its own session and process group; None before it is started.
        process_started: when that process began, seconds since the epoch: tells it from a later one with its number.
        log: path of its log.
    """

    name: str
    url: str
    argv: tuple[str, ...] | None
    env: Mapping[str, str]
    pid: int | None
    process_started: float | None
    log: str | None
