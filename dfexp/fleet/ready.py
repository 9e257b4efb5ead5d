"""Wait until servers serve: all of them at the same time, with the reason at once when one ends early."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from dfexp.engines.http import Readiness, probe
from dfexp.errors import AccessDenied, EngineStartError, RequestError
from dfexp.fleet.spawn import last_start, listens

if TYPE_CHECKING:
    from dfexp.fleet.fleet import Fleet
    from dfexp.fleet.record import Server

_PROBE_TIMEOUT_S = 20.0
_PORT_TRIES = 5


def wait_ready(fleet: Fleet, timeout_s: float, *, strict: bool) -> None:
    """Return when the servers have each generated a token. Raises the first EngineStartError.

    strict: one failure is enough to raise, at once; else only the failure of all.
    """
    end, given_up = time.monotonic() + timeout_s, threading.Event()
    pool = ThreadPoolExecutor(len(fleet.servers), thread_name_prefix="dfexp-ready")
    try:
        positions = range(len(fleet.servers))
        _judge([pool.submit(_wait_one, fleet, one, end, given_up, strict=strict) for one in positions], strict=strict)
    finally:
        given_up.set()
        # Not waited for: a probe may still hang on a server that the caller is about to stop.
        pool.shutdown(wait=False, cancel_futures=True)


def _judge(waits: list[Future[None]], *, strict: bool) -> None:
    failures = []
    for done in as_completed(waits):
        error = done.exception()
        if error is not None and (strict or not isinstance(error, EngineStartError)):
            raise error
        if error is not None:
            failures.append(error)
    if len(failures) == len(waits):
        raise failures[0]


def _wait_one(fleet: Fleet, position: int, end: float, given_up: threading.Event, *, strict: bool) -> None:
    """Wait for one server. It may move to another port meanwhile, so it is looked up by position each time."""
    pause_s, tries = 0.05, 0
    while not given_up.is_set():
        server = fleet.servers[position]
        if server.ours and not fleet.is_process_alive(server.name):
            tries += 1
            if not strict or tries >= _PORT_TRIES or not fleet.engine.is_port_taken(last_start(server.log)):
                raise EngineStartError(fleet.start_failure(server.name))
            fleet.move(position)
            continue
        found = _look(fleet, server, end, strict=strict)
        if found.ready:
            return
        if time.monotonic() >= end or (found.state == "refused" and not server.ours):
            raise EngineStartError(f"{fleet.start_failure(server.name)}\nLast probe: {found.state}, {found.detail}")
        given_up.wait(min(pause_s, max(0.0, end - time.monotonic())))
        pause_s = min(1.0, pause_s * 1.5)


def _look(fleet: Fleet, server: Server, end: float, *, strict: bool) -> Readiness:
    """One probe, whose answer counts only if it came from this fleet's own process.

    A server that was ready before and is only too busy for one token more counts when it tells its limits.
    """
    timeout_s = max(1.0, min(_PROBE_TIMEOUT_S, end - time.monotonic()))
    try:
        model = fleet.engine.model_name(server.url, fleet.key)
        found = probe(server.url, fleet.key, model, timeout_s)
        if found.state == "busy" and not strict:
            fleet.limits(server.name, timeout_s)
            found = Readiness(state="ready", detail="busy, and tells its limits", latency_s=found.latency_s)
    except AccessDenied as error:
        return Readiness(state="refused", detail=str(error), latency_s=0.0)
    except RequestError as error:
        return Readiness(state="closed", detail=str(error), latency_s=0.0)
    if found.ready and server.ours and not (fleet.is_process_alive(server.name) and listens(server)):
        return Readiness(state="foreign", detail="another process answers at its address", latency_s=found.latency_s)
    return found
