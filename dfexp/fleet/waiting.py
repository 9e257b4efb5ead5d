"""Waiting for a fleet to serve: start its servers one after the other, ask them all, tell why one cannot."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dfexp import errors
from dfexp.engines import content
from dfexp.engines.base import Server, scrub, start_log
from dfexp.errors import EngineStartError, RequestError
from dfexp.fleet import spawn
from dfexp.fleet.record import changing, waits_for_others
from dfexp.params import OwnFleet

if TYPE_CHECKING:
    from dfexp.fleet.fleet import Fleet

_PROBE_TIMEOUT_S, _PAUSE_S = 20.0, 0.2


class Garbage(RequestError):
    """A server answers with HTTP 200 and no sense; waiting does not help."""

    kind = "garbage"


class Launch:
    """A fleet that is being launched: its servers are started, and each has to show that it serves."""

    def __init__(self, fleet: "Fleet", tell: Callable[[str], None]) -> None:
        """Args: tell, called for each server that is started and that serves."""
        self._fleet, self._group, self._tell = fleet, fleet.group, tell
        self._serving: set[str] = set()  # servers that have given a token, and whose content was looked at

    def wait(self, end: float) -> None:
        """Return once every server has generated a token. Raises EngineStartError: one cannot, or it is too late."""
        while True:
            self._start_more()
            timeout_s = max(1.0, min(_PROBE_TIMEOUT_S, end - time.monotonic()))
            waits = self._fleet.ask_all(lambda server: self._why_not_serving(server, timeout_s))  # noqa: B023
            if waits.count(None) == len(waits):
                return
            for server, error in zip(self._fleet.servers, waits, strict=True):
                if error is not None and (self._is_hopeless(server, error) or time.monotonic() >= end):
                    raise start_error(self._fleet, server, error)
            time.sleep(min(_PAUSE_S, max(0.0, end - time.monotonic())))

    def _start_more(self) -> None:
        """Start the next server once the one before has read its weights, so that they do not thrash one disk.

        With `canary_first` the second one waits until the first has shown that its answers are no garbage.
        """
        group, fleet = self._group, self._fleet
        if not isinstance(group, OwnFleet) or not any(map(waits_for_others, fleet.servers)):
            return
        with changing(fleet.folder):
            fleet.reread()
            started = [server for server in fleet.servers if not waits_for_others(server)]
            if group.canary_first and started and started[0].name not in self._serving:
                return
            for server in fleet.servers[len(started) :]:
                if started and group.stagger_s and not self._lets_others_start(started[-1], group.stagger_s):
                    return
                started.append(fleet.start_locked(server))
                self._tell(f"{server.name}: starting, {len(started)} of {len(fleet.servers)}")
                if group.canary_first and len(started) == 1:
                    return

    def _lets_others_start(self, server: Server, stagger_s: float) -> bool:
        """Whether a server has read its weights, or has had `stagger_s` for it."""
        if server.name in self._serving:
            return True
        age_s = spawn.age_s(server)
        return age_s is None or age_s > stagger_s or self._fleet.engine.has_loaded(start_log(server))

    def _why_not_serving(self, server: Server, timeout_s: float) -> RequestError | None:
        if waits_for_others(server):
            return errors.Unreachable(f"{server.name}: not started yet, it waits for another to read its weights.")
        if server.name in self._serving:
            return None
        fleet, group = self._fleet, self._group
        try:
            model = fleet.engine.model_name(server.url, fleet.key)
            error = fleet.probe(server.name, model, timeout_s).error
        except RequestError as failed:
            error = failed
        if error is None and isinstance(group, OwnFleet) and (group.check_content or group.canary_first):
            reasons = content.check(server.url, fleet.key, model)
            error = Garbage(f"{server.name} answers, but with garbage: {'; '.join(reasons)}") if reasons else None
        if error is None:
            self._serving.add(server.name)
            self._tell(f"{server.name}: serves, {len(self._serving)} of {len(fleet.servers)}")
        return error

    def _is_hopeless(self, server: Server, error: RequestError) -> bool:
        """Whether waiting longer cannot help."""
        if server.argv is None:
            return isinstance(error, (errors.AccessDenied, errors.Refused))
        return isinstance(error, Garbage) or (not waits_for_others(server) and self._fleet.has_failed(server.name))


def wait_for_one(fleet: "Fleet", end: float) -> None:
    """Return once a server of a fleet that was ready before tells its limits. Raises EngineStartError: too late."""
    while True:
        timeout_s = max(1.0, min(_PROBE_TIMEOUT_S, end - time.monotonic()))
        silences = [status for status in fleet.status(timeout_s) if status.state != "ready"]
        if len(silences) < len(fleet.servers):
            return
        if time.monotonic() >= end:
            raise start_error(fleet, fleet.server(silences[0].name), silences[0].detail)
        time.sleep(min(_PAUSE_S, max(0.0, end - time.monotonic())))


def start_error(fleet: "Fleet", server: Server, last: object) -> EngineStartError:
    """Why a server does not serve: cause and fix out of its log, and the last answer that it gave."""
    return EngineStartError(f"{fleet.start_failure(server.name)}\nLast answer: {scrub(str(last), fleet.key)}")
