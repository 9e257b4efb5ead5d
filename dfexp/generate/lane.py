"""One server as a run sees it: its client, its room, and the watch that brings it back when it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import deque
from typing import Any

from dfexp.client import ServerClient
from dfexp.engines import Readiness, get_text, probe
from dfexp.errors import DfexpError, RequestError, TimedOut, Unreachable
from dfexp.fleet import Fleet, Server, scrub
from dfexp.generate.events import EventLog
from dfexp.params import RunSpec
from dfexp.records import ServerLimits

UNKNOWN_CAP = 16
"""Requests in flight to a server that does not say how many it decodes at once."""

_WATCH_S = 1.0
_HEALTH_EVERY_S = 15.0
_HEALTH_TIMEOUT_S = 30.0  # SGLang's health check answers after up to 20 s on a busy server
_MISSES_TO_HANG = 3
_MOST_DENIED_PAUSE_S = 30.0
_RESTART_BUDGET = 6
_ERRORS_TO_DOUBT = 8
"""Errors in a row, of any rows, after which a server has to generate a token before it gets another row."""


class Lane:
    """Feeds one server up to `limit` requests and knows whether it can be fed.

    States: ready, suspect (a request could not reach it or was denied; being checked), down (being restarted, or waited
    for where somebody else runs it), given_up.
    """

    def __init__(
        self,
        fleet: Fleet,
        server: Server,
        limits: ServerLimits | None,
        model: str,
        spec: RunSpec,
        events: EventLog,
    ) -> None:
        """Args: limits, None when the server does not answer."""
        self._fleet, self._events, self._model = fleet, events, model
        self._concurrency = None if spec.generation.concurrency == "auto" else spec.generation.concurrency
        self._start_timeout_s = spec.fleet.start_timeout_s
        self.name, self.url = server.name, server.url
        self.owned = server.argv is not None
        self.limits = limits or ServerLimits()
        self.state = "ready" if limits is not None else "down"
        self.client = ServerClient(url=server.url, key=fleet.key or None, model=model, connections=4096)
        self.tasks: set[asyncio.Task[None]] = set()
        self.done = self.errors = self.restarts = 0
        self.down_since: float | None = None if limits is not None else time.monotonic()
        self._paused_until = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._last_sign = time.monotonic()
        self._deaths_in_a_row = 0
        self._errors_in_a_row = 0
        self._is_doubted = False
        self._misses = 0
        self._denied_pause_s = 0.0  # above zero: access was denied, and the next look comes after so long
        self._wake = asyncio.Event()

    @property
    def cap(self) -> int | None:
        """Requests that the server decodes at once, as it says."""
        return self.limits.max_running_requests

    @property
    def limit(self) -> int:
        """Requests in flight that this lane may have: the cap, and a few that wait so that no slot is ever empty."""
        if self._concurrency is not None:
            return self._concurrency
        return UNKNOWN_CAP if self.cap is None else self.cap + max(1, math.ceil(self.cap / 16))

    def has_room(self, now: float) -> bool:
        """Whether the server should get another request."""
        return self.state == "ready" and now >= self._paused_until and len(self.tasks) < self.limit

    def completed(self, now: float, tokens: int | None) -> None:
        """Count an answer: a sign of life."""
        self.done += 1
        self._deaths_in_a_row = self._errors_in_a_row = self._misses = 0
        self._last_sign = now
        self._recent.append((now, tokens or 0))

    def failed(self) -> None:
        """Count an error, and look after the server soon: it may be dead."""
        self.errors += 1
        self._wake.set()

    def stumbled(self) -> None:
        """Count an error that the row or the server may be to blame for. Many in a row are the server's.

        A proxy whose server is away answers everything, with errors: without this its rows would use up all attempts.
        """
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= _ERRORS_TO_DOUBT:
            self._errors_in_a_row, self._is_doubted = 0, True
            self.suspect()

    def suspect(self, *, denied: bool = False) -> None:
        """Stop feeding until the watch has seen the server answer; `denied`: until it gives a token again."""
        if denied and not self._denied_pause_s:
            self._denied_pause_s = 0.5
        if self.state == "ready":
            self.state = "suspect"
        self._wake.set()

    def pause(self, now: float, seconds: float) -> None:
        """Feed nothing for some seconds, as the server asked."""
        self._paused_until = max(self._paused_until, now + seconds)

    def status(self, now: float, window_s: float) -> dict[str, Any]:
        """The lane's part of the status file; the rate counts tokens of whole answers over the window."""
        while self._recent and self._recent[0][0] < now - window_s:
            self._recent.popleft()
        return {
            "name": self.name,
            "state": self.state,
            "in_flight": len(self.tasks),
            "limit": self.limit,
            "cap": self.cap,
            "done": self.done,
            "errors": self.errors,
            "restarts": self.restarts,
            "tok_per_s": sum(tokens for _, tokens in self._recent) / max(window_s, 1e-9),
        }

    async def watch(self) -> None:
        """Look after the server until cancelled, or until it is given up."""
        if self.state == "down":
            await self._bring_back("did not answer when the run began")
        while self.state != "given_up":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _WATCH_S)
            self._wake.clear()
            if not await asyncio.to_thread(self._fleet.is_process_alive, self.name):
                await self._bring_back("its process died")
            elif self.state == "suspect" or time.monotonic() - self._last_sign > _HEALTH_EVERY_S:
                await self._check()

    async def _check(self) -> None:
        """One look at the health page: any answer is a sign of life; silence three times in a row is a hang."""
        try:
            await asyncio.to_thread(get_text, f"{self.url}/health", key=self._fleet.key, timeout_s=_HEALTH_TIMEOUT_S)
        except (TimedOut, Unreachable) as error:
            self._misses += 1
            if self._misses >= _MISSES_TO_HANG or (isinstance(error, Unreachable) and not self.owned):
                await self._bring_back(f"{self._misses} health checks without an answer, the last: {error}")
            else:
                await asyncio.sleep(_WATCH_S)
            return
        except RequestError:
            pass  # an error page, or a server without a health page: it lives
        self._last_sign, self._misses = time.monotonic(), 0
        if self._is_doubted and not await self._regains_trust():
            return
        if self._denied_pause_s and not await self._answers():
            await asyncio.sleep(self._denied_pause_s)
            self._denied_pause_s = min(2 * self._denied_pause_s, _MOST_DENIED_PAUSE_S)
        elif self.state == "suspect":
            self.state, self._denied_pause_s = "ready", 0.0

    async def _regains_trust(self) -> bool:
        """Whether a server that gave only errors generates a token. One that refuses to is brought back."""
        error = (await self._probe()).error
        if isinstance(error, TimedOut):  # it may only be busy
            await asyncio.sleep(_WATCH_S)
            return False
        self._is_doubted = False
        if error is not None:
            await self._bring_back(f"{_ERRORS_TO_DOUBT} errors in a row and no token when asked for one: {error}")
        return error is None

    async def _bring_back(self, why: str) -> None:
        """Restart the server, or wait for it where somebody else runs it, with growing pauses."""
        self.state, self.down_since, self._misses = "down", time.monotonic(), 0
        said = scrub(why, self._fleet.key)
        self._events.record("server_down", server=self.name, detail=said, in_flight=len(self.tasks))
        pause_s = 0.5
        while not (await self._restart() if self.owned else await self._answers()):
            if self.owned and self._deaths_in_a_row >= _RESTART_BUDGET:
                self.state = "given_up"
                self._events.record("server_given_up", server=self.name, restarts=self.restarts)
                return
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # noqa: S311 (spreads retries, guards nothing)
            pause_s = min(pause_s * 2, 60.0)
        await self._refresh_limits()
        down_s = time.monotonic() - self.down_since
        self.state, self.down_since, self._last_sign = "ready", None, time.monotonic()
        self._events.record("server_back", server=self.name, down_s=round(down_s, 3), restarts=self.restarts)

    async def _restart(self) -> bool:
        """Start the server again and wait for its first token. False: it did not come up; the log says why."""
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > 1:  # it died again before it completed a row
            await asyncio.sleep(min(60.0, 0.5 * 2**self._deaths_in_a_row))
        try:
            await asyncio.to_thread(self._fleet.restart, self.name)
            self.restarts += 1
            end = time.monotonic() + self._start_timeout_s
            while time.monotonic() < end:
                if await self._answers():
                    return True
                if not await asyncio.to_thread(self._fleet.is_process_alive, self.name):
                    break
                await asyncio.sleep(0.25)
            detail = await asyncio.to_thread(self._fleet.start_failure, self.name)
        except DfexpError as error:
            detail = str(error)
        self._events.record("server_restart_failed", server=self.name, detail=detail)
        return False

    async def _answers(self) -> bool:
        return (await self._probe()).ready

    async def _probe(self) -> Readiness:
        return await asyncio.to_thread(probe, self.url, self._fleet.key, self._model, _HEALTH_TIMEOUT_S)

    async def _refresh_limits(self) -> None:
        """Read the cap again: a restarted server may have another one."""
        try:
            self.limits = await asyncio.to_thread(self._fleet.limits, self.name)
        except RequestError as error:
            self._events.record("limits_unknown", server=self.name, detail=scrub(str(error), self._fleet.key))
