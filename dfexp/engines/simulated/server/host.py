"""All simulated servers of a process on one virtual clock, which stands still while their client has to react.

A heap holds the time of each server's next event, and another the timers, so that nothing looks at all servers. What a
server does next is asked only when the clock is about to move: SGLang too sees all that has come by then.
"""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Self

from dfexp.engines.simulated.server.attach import bound
from dfexp.engines.simulated.server.clock import TICK_S, Clock
from dfexp.engines.simulated.server.faults import Faults
from dfexp.engines.simulated.server.pace import AWAY_S, Grace
from dfexp.engines.simulated.server.server import Server
from dfexp.engines.simulated.server.spec import ServerSpec
from dfexp.errors import StorageError
from dfexp.jsonl import read_json, write_atomic
from dfexp.params_simulated import Speed

PAST = "server-simulator.json"
"""In the folder: what a host of a fleet that is still up has to know of the one before it."""
YIELD_S = 0.005
"""Requests are looked for at least so often."""
_Timers = list[tuple[float, int, asyncio.Future[None]]]


class Host:
    """Simulated servers in this process. An async context manager; leaving it ends them.

    Attributes:
        began_s: virtual second at which all servers of the fleet served for the first time; None before.
        driver: the task that moves the clock; it ends early only by an error.

    """

    driver: asyncio.Task[None]

    def __init__(self, *, speed: Speed = "max", folder: Path | None = None) -> None:
        """Args: speed, in virtual seconds per second; folder, of clock.jsonl, None where that is not wanted."""
        self.clock, self.servers = Clock(folder, speed), set[Server]()
        self.streaming, self.grace, self._past = set[Server](), Grace(), folder / PAST if folder else None
        past = read_json(self._past) if self._past and self._past.exists() else {}
        self.began_s: float | None = past.get("began_s")
        self._served, self._begun = set[int](), asyncio.Event()
        self._changed, self._unsettled = set[Server](), set[Server]()
        self._order, self._events = count(), list[tuple[float, int, Server]]()
        self._wanted: _Timers = []
        self._passive: _Timers = []
        self._starts = Counter[str](past.get("starts", {}))
        self._met = {which: Counter[str](met) for which, met in past.get("met", {}).items()}
        self._fed: dict[str, int] = past.get("fed", {})  # what was in flight at a port whose server has ended
        self._away_until_s: dict[int, float] = {}
        self._woken: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        self.driver = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.driver.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await self.driver
        finally:
            self.clock.close()

    async def add(self, spec: ServerSpec, sock: socket.socket | None = None, log: int | None = None) -> Server:
        """A server, once it serves or has ended. Arguments as for `open`. Raises OSError: its address is taken."""
        server = self.open(spec, sock or bound(spec.host, spec.port), log)
        await server.start()
        return server

    def open(
        self, spec: ServerSpec, sock: socket.socket, log: int | None, ended: Callable[[int], object] | None = None
    ) -> Server:
        """A server, to be started.

        Args: sock, bound to its address; log, where its lines go, a descriptor; ended, called with the exit status
        when it ends by itself.
        """
        which = repr((spec.index, spec.seed, spec.faults))
        self._starts[str(spec.index)] += 1
        faults = Faults(spec.faults, spec.index, spec.seed, self._met.setdefault(which, Counter()))
        server = Server(self, spec, sock, log, faults, self._starts[str(spec.index)], ended)
        self.remember()
        self.servers.add(server)
        self._away_until_s.pop(server.port, None)
        return server

    def remove(self, server: Server) -> None:
        """End a server: its port closes, and its requests are cut. The clock waits for its next start."""
        if server in self.servers:
            for servers in (self.servers, self._changed, self._unsettled, self.streaming):
                servers.discard(server)
            server.turn = -1
            if server.pace.most:
                self._fed[str(server.port)] = server.pace.most
            self._away_until_s[server.port] = time.monotonic() + AWAY_S
            server.close()
            self.wake()

    def changed(self, server: Server) -> None:
        """Requests came to a server or left it, or it works in another way from now on."""
        if server in self.servers:
            self._changed.add(server)
            (self._unsettled.discard if server.pace.is_settled else self._unsettled.add)(server)
            self.wake()

    def serves(self, server: Server) -> None:
        """A server is ready. Once all of its fleet are, what is scheduled begins to count."""
        server.pace.returns(self._fed.get(str(server.port), 0), time.monotonic())
        self.changed(server)
        self._served.add(server.spec.index)
        if self.began_s is None and len(self._served) >= server.spec.servers:
            self.began_s = self.clock.now_s
            self.remember()
        if self.began_s is not None:
            self._begun.set()

    async def due(self, at_s: float) -> None:
        """Return `at_s` virtual seconds after the beginning; time does not pass for that."""
        await self._begun.wait()
        assert self.began_s is not None, "it has begun"
        await self.reached(self.began_s + at_s, wanted=False)

    @property
    def since_s(self) -> float | None:
        """Virtual seconds since the beginning; None before it."""
        return None if self.began_s is None else self.clock.now_s - self.began_s

    def remember(self) -> None:
        """Write what the next host of this folder has to know."""
        past = {"began_s": self.began_s, "starts": self._starts, "met": self._met, "fed": self._fed}
        with suppress(StorageError):  # a full disk ends no server
            if self._past is not None:
                write_atomic(self._past, json.dumps(past).encode())

    def look(self, server: Server) -> None:
        """Bring a server up to now."""
        server.advance(self.clock.now_s)
        self.changed(server)

    def reached(self, at_s: float, *, wanted: bool = True) -> asyncio.Future[None]:
        """Done at virtual second `at_s`. One that is not `wanted` does not make time pass."""
        timer = asyncio.get_running_loop().create_future()
        heappush(self._wanted if wanted else self._passive, (at_s, next(self._order), timer))
        self.wake()
        return timer

    def wake(self) -> None:
        """Look again at what is to be done."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _run(self) -> None:
        try:
            await self._drive()
        finally:  # on an error too: nobody waits for servers whose clock stands
            for server in tuple(self.servers):
                self.remove(server)

    async def _drive(self) -> None:
        """Move the clock from event to event, for ever."""
        looked_s = 0.0
        while True:
            now_s = time.monotonic()
            until_s = self._client_until_s(now_s)
            due_s = self._due_s() if until_s is None else None
            if due_s is None:
                self.clock.stand(idle=until_s is None)
                await self._sleep(until_s)
            elif (until_s := self.clock.runs_until_s(due_s)) > now_s:
                await self._sleep(min(until_s, now_s + TICK_S))
                self.clock.move(0.0)
                for server in tuple(self.streaming):
                    self.look(server)
            elif self._go(due_s) or now_s - looked_s > YIELD_S:
                await asyncio.sleep(0)
                looked_s = now_s

    async def _sleep(self, until_s: float | None) -> None:
        """Until that time, or until something has changed."""
        loop = asyncio.get_running_loop()
        self._woken = loop.create_future()
        alarm = None if until_s is None else loop.call_at(until_s, self.wake)
        try:
            await self._woken
        finally:
            if alarm is not None:
                alarm.cancel()

    def _client_until_s(self, now_s: float) -> float | None:
        """Until when the clock waits for the client; None: it does not. One that runs by itself never waits."""
        if self.clock.speed != "max":
            return None
        waits = [until_s for until_s in self._away_until_s.values() if until_s > now_s]
        for server in tuple(self._unsettled):
            until_s = server.pace.waits_until_s(now_s, has_queue=server.simulator.pending_tokens() > 0)
            if until_s is not None:
                waits.append(until_s)
            elif server.pace.is_settled:
                self._unsettled.discard(server)
        return min(waits, default=None)

    def _due_s(self) -> float | None:
        """When something happens next; None: nothing will."""
        for server in self._changed:
            at_s, server.turn = server.simulator.next_event_s(), next(self._order)
            if at_s is not None:
                heappush(self._events, (at_s, server.turn, server))
        self._changed.clear()
        while self._events and self._events[0][1] != self._events[0][2].turn:
            heappop(self._events)
        for timers in (self._wanted, self._passive):
            while timers and timers[0][2].done():
                heappop(timers)
        due_s = min((heap[0][0] for heap in (self._events, self._wanted) if heap), default=None)
        return due_s if due_s is None or not self._passive else min(due_s, self._passive[0][0])

    def _go(self, due_s: float) -> bool:
        """Do what is due; whether somebody waits for it."""
        self.clock.move(due_s)
        now_s, awaited = self.clock.now_s, False
        for timers in (self._wanted, self._passive):
            while timers and timers[0][0] <= now_s:
                timer = heappop(timers)[2]
                if not timer.done():
                    timer.set_result(None)
                    awaited = True
        while self._events and self._events[0][0] <= now_s:
            at_s, turn, server = heappop(self._events)
            if turn == server.turn:
                self._changed.add(server)
                awaited |= server.advance(at_s)
        return awaited
