"""One server as a run sees it: its client, its room, and the watch that brings it back when it dies or hangs."""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable
from typing import Any

from dfexp.client import ServerClient
from dfexp.engines import Readiness, get_text
from dfexp.errors import AccessDenied, DfexpError, RequestError, TimedOut, Unreachable
from dfexp.fleet import Fleet, Server, scrub
from dfexp.generate.events import EventLog
from dfexp.generate.probe import Probe
from dfexp.generate.verdicts import Rejections, look_again_s
from dfexp.params import AnyFleet, RunSpec
from dfexp.records import EngineSample, ServerLimits
from dfexp.rollout import Reading

_SPREAD_S, _LEAST_A_SECOND = 1.0, 64.0
"""A server that starts gets its first requests over so long, but no fewer a second."""
_WATCH_S = 1.0
_HEALTH_EVERY_S = 15.0
_ANSWER_TIMEOUT_S = 30.0
_MISSES_TO_HANG = 3
_MOST_DENIED_PAUSE_S, _SOON_S = 30.0, 5.0  # rows wait for a server that pauses for less than the latter
_TOKENS_A_LOOK = 4
_UNREADABLE = (RequestError, ValueError, TypeError, LookupError, AttributeError)  # pages are somebody else's
_ERRORS_TO_DOUBT = 8
"""Errors in a row, of any rows, after which a server has to generate a token before it gets another row."""


class Lane:
    """Feeds one server up to `limit` requests and knows whether it can be fed.

    States: ready, suspect (a request could not reach it or was denied; being checked), down (being restarted, or waited
    for where somebody else runs it), quarantined (it kept dying, and is started again now and then), changing (being
    started with other settings). Whatever its state, a lane that is held gets no rows: a change of settings drains it.
    """

    restart_budget = 6  # tries without a completed row, after which a server is quarantined
    quarantine_s = 600.0  # from one try to start a quarantined server to the next

    def __init__(
        self, fleet: Fleet, server: Server, limits: ServerLimits | None, model: str, spec: RunSpec, events: EventLog,
        config_id: str,
    ) -> None:  # fmt: skip
        """Args: limits, None when the server does not answer; config_id, what its rows point to."""
        self._fleet, self._events, self.model = fleet, events, model
        self._concurrency = None if spec.generation.concurrency == "auto" else spec.generation.concurrency
        self._start_timeout_s, self._stall_s = spec.fleet.start_timeout_s, spec.generation.stall_s
        self.name, self.url = server.name, server.url
        self.owned = server.argv is not None
        self.limits = limits or ServerLimits()
        self.state = "ready" if limits is not None else "down"
        self.client = ServerClient(url=server.url, key=fleet.key or None, model=model, connections=4096)
        self.config_id, self.is_held = config_id, False
        self.tasks: dict[asyncio.Task[None], float] = {}  # requests in flight, oldest first, and when each was sent
        self.staying: set[asyncio.Task[None]] = set()  # those of them that were elsewhere before
        self._probe_of_room = Probe()
        self.fed_from: float | None = None  # when it got its first request since it began to serve
        speed = getattr(spec.fleet, "speed", 1.0)  # a clock that waits for the client alone must not see it pause
        self._spread_s = 0.0 if speed == "max" else _SPREAD_S / speed
        self._running = self._queued = 0  # in the server, when it was sampled; those that wait may be fewer by now
        self.watching: asyncio.Task[None] | None = None
        self.done = self.errors = self.restarts = 0
        self._paused_until = 0.0
        # `moved_at`: when it last gave an answer or, as far as it tells, a token, in monotonic seconds
        self._last_sign = self.moved_at = self.answered_at = time.monotonic()
        self._counted: float | None = None  # tokens of answers by the engine's counter, as last read
        self._computed: float | None = None  # tokens of any kind, when the counter last moved by itself
        self._looks = 0  # at the server's pages since then: each may have cost it a token or two
        self._counted_before = 0.0  # what it said before the restarts that set it to zero
        self._deaths_in_a_row = 0
        self._errors_in_a_row = 0
        self._is_doubted, self.rejections = False, Rejections()
        self._misses, self._draw = 0, random.Random()  # noqa: S311 (spreads retries, guards nothing)
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
        return self._probe_of_room.value if self.cap is None else self.cap + max(1, math.ceil(self.cap / 16))

    @property
    def serves(self) -> bool:
        """Whether the server gets requests at all."""
        return self.state == "ready" and not self.is_held

    def serves_soon(self, now: float) -> bool:
        """Whether a row may wait for this server: it gets requests, now or after a short pause."""
        return self.serves and self._paused_until < now + _SOON_S

    def may_return(self, now: float, within_s: float) -> bool:
        """Whether a server that gave answers and is away, or only pauses, may give some again.

        Args: within_s, after its last answer or, before the first, the run's start.
        """
        is_hope = self.state == "ready" or (self.done > 0 and self.state != "quarantined")
        return is_hope and not self.rejections.many and now - self.answered_at < within_s

    def has_room(self, now: float) -> bool:
        """Whether the server should get another request. The first ones are spread: no herd in one step of it."""
        if not self.serves or now < self._paused_until:
            return False
        self.fed_from = now if self.fed_from is None else self.fed_from
        a_second = max(_LEAST_A_SECOND, self.limit / (self._spread_s or 1.0))
        due = 1 + (now - self.fed_from) * a_second if self._spread_s else self.limit
        return len(self.tasks) < min(self.limit, due)

    def is_filling(self, now: float) -> bool:
        """Whether it is getting its first requests, some of which are not due yet."""
        return self.serves and self.fed_from is not None and now < self.fed_from + self._spread_s

    @property
    def free_slots(self) -> int:
        """Requests that would be decoded at once if they were sent, as far as is known."""
        return max(0, min(self.limit, self.cap or self.limit) - len(self.tasks)) if not self._queued else 0

    def waiting(self) -> list[asyncio.Task[None]]:
        """Requests that wait in the server and may be sent to another, the last sent first.

        Those that were elsewhere before stay, so that no row comes and goes. A server that tells neither cap nor queue
        has none.
        """
        kept = [task for task in self.tasks if not task.cancelling()]
        beyond = len(kept) - self.cap if self.cap is not None else 0
        last = kept[: -max(beyond, min(self._queued, len(kept) - self._running), 0) - 1 : -1]
        return [task for task in last if task not in self.staying]

    def sampled(self, sample: EngineSample) -> None:
        """Learn how many requests wait: more than those beyond the cap where its memory is full."""
        self._running, self._queued = round(sample.num_running_reqs or 0), round(sample.num_queue_reqs or 0)

    def starved(self) -> None:
        """There was nothing to send though there was room: its rate says nothing of the room."""
        self._probe_of_room.disturbed()

    def completed(self, now: float, tokens: int | None) -> None:
        """Count an answer: a sign of life."""
        self.done += 1
        self._queued = max(0, self._queued - 2)  # one that ends may let in two that are shorter
        if self._concurrency is None and self.cap is None and self._probe_of_room.answered(now, tokens or 1):
            self._events.record("concurrency_found", server=self.name, requests=self.limit)
        self._deaths_in_a_row = self._errors_in_a_row = self._misses = 0
        self.rejections, self._last_sign, self.moved_at, self.answered_at = Rejections(), now, now, now

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

    def rejected(self, now: float, words: str, *, is_denied: bool, beside: bool) -> None:
        """Count a row that the server will not take. One that denies access twice has to give a token.

        One that rejects many gets none for a time that grows, where a better one serves `beside` it.
        """
        self.rejections.add(words, is_denied=is_denied)
        if is_denied and self.rejections.in_a_row > 1:
            self.suspect(denied=True)
        if self.rejections.many and beside and now >= self._paused_until:
            self._paused_until, self.rejections.words = now + (rest_s := self.rejections.rest_s()), words
            rows = self.rejections.in_a_row
            self._events.record("server_rejects", server=self.name, detail=words, rows=rows, rest_s=rest_s)

    def suspect(self, *, denied: bool = False) -> None:
        """Stop feeding until the watch has seen the server answer; `denied`: until it gives a token again."""
        if denied and not self._denied_pause_s:
            self._denied_pause_s = 0.5
        if self.state == "ready":
            self.state = "suspect"
        self._wake.set()

    def pause(self, now: float, seconds: float) -> None:
        """Feed nothing for some seconds, as the server asked, which turned a request away."""
        self._probe_of_room.refused(now, len(self.tasks))
        self._paused_until = max(self._paused_until, now + seconds)

    def status(self) -> dict[str, Any]:
        """The lane's part of the status file."""
        return {
            "name": self.name, "state": "draining" if self.is_held and self.state == "ready" else self.state,
            "in_flight": len(self.tasks), "limit": self.limit, "cap": self.cap,
            "done": self.done, "errors": self.errors, "restarts": self.restarts,
        }  # fmt: skip

    def start_watch(self) -> None:
        """Look after the server from now on."""
        self.watching = asyncio.create_task(self.watch())

    async def drain(self, limit_s: float) -> int:
        """Feed nothing more and let what is in flight finish. How many requests took longer and were cut off."""
        self.is_held = True
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=limit_s)
        return self.cut_off()

    def cut_off(self) -> int:
        """Cancel what is in flight; its rows go back into the queue, and it is no attempt of theirs."""
        for task in (cut := [task for task in self.tasks if not task.cancelling()]):
            task.cancel()
        return len(cut)

    async def reconfigure(self, group: AnyFleet) -> str | None:
        """Start the drained server with other settings; None once it serves, else why it does not.

        The watch rests, since a server that loads looks like one that hangs. `release` ends that.
        """
        if self.watching is not None:
            self.watching.cancel()
            await asyncio.wait({self.watching})
        self.state = "changing"
        why = await self._start(lambda: self._fleet.reconfigure(self.name, group))
        if why is None:
            await self._refresh_limits()
        return why

    def release(self, *, is_well: bool) -> None:
        """Feed a held lane again: at once when it `is_well`, else when its watch has brought the server back."""
        self.is_held = False
        if self.state == "changing":
            self.state, self._is_doubted = "ready" if is_well else "suspect", not is_well
            self._last_sign = self.moved_at = time.monotonic()
            self._deaths_in_a_row = self._misses = 0
        if self.watching is not None and self.watching.done():
            self.start_watch()

    async def reading(self) -> Reading:
        """What the server has made so far."""
        with contextlib.suppress(*_UNREADABLE):  # one that is away makes nothing
            await self._count()
        return Reading(
            at=time.monotonic(), restarts=self.restarts, serves=self.serves,
            tokens=None if self._counted is None else self._counted_before + self._counted,
        )  # fmt: skip

    async def watch(self) -> None:
        """Look after the server until cancelled."""
        if self.state == "down":
            await self._bring_back("did not answer when the run began")
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _WATCH_S)
            self._wake.clear()
            if not await asyncio.to_thread(self._fleet.is_process_alive, self.name):
                await self._bring_back("its process died")
            elif self.state == "suspect" or time.monotonic() - self._last_sign > _HEALTH_EVERY_S:
                await self._check()
            elif (silent_s := await self._stuck_for()) > self._stall_s:
                numbers = {"silent_s": round(silent_s, 1), "counted": self._counted, "in_flight": self.cut_off()}
                self._events.record("server_stalled", server=self.name, **numbers)
                await self._bring_back(f"no new token for {silent_s:.0f} s, though it seems healthy")

    async def _count(self) -> None:
        """Read the engine's counter of tokens. One that has moved is a sign of progress."""
        counted = await asyncio.to_thread(self._fleet.progress, self.name, _ANSWER_TIMEOUT_S)
        if counted is None:
            return
        if self._computed is None or abs(counted.computed - self._computed) > _TOKENS_A_LOOK * self._looks:
            self._computed, self._looks, self.moved_at = counted.computed, 0, time.monotonic()
        self._counted = counted.decoded

    async def _stuck_for(self) -> float:
        """Seconds for which a busy server has made no token, as far as is known; 0 where it never told."""
        now = time.monotonic()
        if not self.tasks:
            self.moved_at = now
        if now - self.moved_at < min(_HEALTH_EVERY_S, self._stall_s / 4):
            return 0.0
        with contextlib.suppress(*_UNREADABLE):  # a page that was there and cannot be read now shows no progress
            await self._count()
        return 0.0 if self._counted is None else now - self.moved_at

    async def _check(self) -> None:
        """One look at the page of liveness: any answer is a sign of life; silence three times in a row is a hang."""
        page, timeout_s = self._fleet.engine.liveness
        self._looks += 1
        try:
            await asyncio.to_thread(get_text, f"{self.url}/{page}", key=self._fleet.key, timeout_s=timeout_s)
        except (TimedOut, Unreachable) as error:
            self._misses += 1
            if self._misses >= _MISSES_TO_HANG or (isinstance(error, Unreachable) and not self.owned):
                await self._bring_back(f"{self._misses} looks at its /{page} without an answer, the last: {error}")
            else:
                await asyncio.sleep(_WATCH_S)
            return
        except RequestError:
            pass  # an error page, or a server without a health page: it lives
        self._last_sign, self._misses = time.monotonic(), 0
        if self._is_doubted and not await self._regains_trust():
            return
        if self._denied_pause_s and (why := (await self._probe()).error) is not None:
            self.rejections.denial = scrub(str(why), self._fleet.key) if isinstance(why, AccessDenied) else None
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
        self.state, self._misses, began = "down", 0, time.monotonic()
        said = scrub(why, self._fleet.key)
        self._events.record("server_down", server=self.name, detail=said, in_flight=len(self.tasks))
        tries = 0
        while True:
            if self._deaths_in_a_row >= self.restart_budget:
                if self.state != "quarantined":
                    self._events.record("server_quarantined", server=self.name, restarts=self.restarts)
                self.state = "quarantined"
                await asyncio.sleep(self.quarantine_s)
            if await (self._restart() if self.owned else self._answers()):
                break
            await asyncio.sleep(look_again_s(tries, self._draw, owned=self.owned))
            tries += 1
        await self._refresh_limits()
        self.state, self._last_sign = "ready", time.monotonic()
        self.moved_at, down_s = self._last_sign, self._last_sign - began
        self._events.record("server_back", server=self.name, down_s=round(down_s, 3), restarts=self.restarts)

    async def _restart(self) -> bool:
        """Start the server again. False: it did not come up, and the event says why."""
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > 1:  # it died again before it completed a row
            await asyncio.sleep(min(60.0, 0.5 * 2**self._deaths_in_a_row))
        self.restarts += 1
        why = await self._start(lambda: self._fleet.restart(self.name))
        if why is not None:
            self._events.record("server_restart_failed", server=self.name, detail=why)
        return why is None

    async def _start(self, start: Callable[[], object]) -> str | None:
        """Start the server and wait for its first token. None, or why there is none: its log says that."""
        if self._counted is not None:
            self._counted_before, self._counted = self._counted_before + self._counted, 0.0
        try:
            await asyncio.to_thread(start)
            end = time.monotonic() + self._start_timeout_s
            while time.monotonic() < end:
                if await self._answers():
                    return None
                if await asyncio.to_thread(self._fleet.has_failed, self.name):
                    break
                await asyncio.sleep(0.25)
            return await asyncio.to_thread(self._fleet.start_failure, self.name)
        except DfexpError as error:
            return str(error)

    async def _answers(self) -> bool:
        return (await self._probe()).ready

    async def _probe(self) -> Readiness:
        return await asyncio.to_thread(self._fleet.probe, self.name, self.model, _ANSWER_TIMEOUT_S)

    async def _refresh_limits(self) -> None:
        """Read the cap again, or look for it again: a restarted server may have another one."""
        self.fed_from, self._queued = None, 0
        self._probe_of_room.again()
        try:
            self.limits = await asyncio.to_thread(self._fleet.limits, self.name)
        except RequestError as error:
            self._events.record("limits_unknown", server=self.name, detail=scrub(str(error), self._fleet.key))
