"""One simulated server: its life, its requests, its log and its scheduled faults, on the host's virtual clock."""

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

from aiohttp import web

from dfexp.engines.simulated.core import Event, Line, Simulator
from dfexp.engines.simulated.server import pages
from dfexp.engines.simulated.server.app import App
from dfexp.engines.simulated.server.attach import taken
from dfexp.engines.simulated.server.faults import Faults
from dfexp.engines.simulated.server.pace import Pace
from dfexp.engines.simulated.server.spec import ServerSpec
from dfexp.params_simulated import FaultPart

if TYPE_CHECKING:
    from dfexp.engines.simulated.server.host import Host

WARM_UP_S = 1.0
"""From listening to being ready: SGLang sends a request to itself, which is not simulated."""
LARGEST_BODY, BACKLOG = 2**26, 2048
"""Bytes of a request, and connections that may come at once."""
_TRACEBACK = "Scheduler hit an exception: Traceback (most recent call last):\n"
_OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (simulated)"


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A request in flight.

    Attributes:
        arrived_s: virtual second of its arrival.
        prompt: tokens.
        whole: tokens that its answer would have without a limit; 0 while the simulator does not have the request.
        changed: set when its answer has ended, of a stream also when it may have grown.

    """

    number: int
    arrived_s: float
    prompt: int = 0
    whole: int = 0
    is_stream: bool = False
    ended: Event | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> tuple[int, str]:
        """Completion tokens of an answer that has ended, and its finish_reason."""
        assert self.ended, "only then"
        return self.ended.tokens, "stop" if self.ended.tokens >= self.whole else "length"


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=LARGEST_BODY)


class Server:
    """One server of a host.

    Attributes:
        url: without /v1.
        is_ready: whether it serves.
        health_status: of /health, unless that finds something worse.
        jobs: what is in flight, by number.
        finished: requests that ended, and their tokens, by what SGLang counts and whether they were streamed.
        turn: the host's mark of the event that comes next.

    """

    def __init__(
        self, host: "Host", spec: ServerSpec, sock: socket.socket, log: int | None, faults: Faults, start: int,
        ended: Callable[[int], object] | None,
    ) -> None:  # fmt: skip
        self.port: int = sock.getsockname()[1]
        self.host, self.spec, self.faults = host, replace(spec, port=self.port), faults
        self.simulator, self.pace, self.finished = Simulator(spec.config), Pace(host.grace), Counter[tuple[str, bool]]()
        self.jobs, self.health_status, self.is_ready, self.turn = dict[int, Job](), 200, False, -1
        self.url = f"http://{self.spec.address}"
        self._sock, self._log, self._start, self._ended = sock, log, start, ended
        self._numbers, self._prefilled_s = count(), host.clock.now_s
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: asyncio.Server | None = None
        self._web = web.Server(App(self).handle, request_factory=_request, handler_cancellation=True, access_log=None)

    async def start(self) -> None:
        """Load the model, listen, warm up. Returns when it serves, or has ended."""
        live = self._begin(self._live())
        for number, part in self.faults.due(self.host.since_s or 0.0):
            self._begin(self._befall(number, part))
        await asyncio.wait([live])
        if not live.cancelled():
            live.result()

    def close(self) -> None:
        """Close its port and cut every connection, at once."""
        self.is_ready = False
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        with suppress(OSError):  # its process holds the socket too; this ends listening for both
            self._sock.shutdown(socket.SHUT_RDWR)
        (self._listener or self._sock).close()
        for connection in self._web.connections:
            if connection.transport is not None:
                connection.transport.abort()

    def crash(self, words: str = _TRACEBACK + "RuntimeError: simulated crash") -> None:
        """It ends by itself, with these last words in its log."""
        self._print(words)
        self.host.remove(self)
        self.host.remember()  # the host may end with this server
        if self._ended is not None:
            self._ended(1)

    def take(self) -> Job:
        """A request has come."""
        job = Job(number=next(self._numbers), arrived_s=self.host.clock.now_s)
        self.jobs[job.number] = job
        self.pace.arrived(time.monotonic())
        self.host.changed(self)
        return job

    def submit(self, job: Job, max_new: int) -> None:
        """Hand a request over to the simulator. Raises PromptTooLong."""
        self.simulator.submit(job.arrived_s, job.number, job.prompt, job.whole, max_new)
        if job.is_stream:
            self.host.streaming.add(self)
        self.host.changed(self)

    def generated(self, job: Job) -> int:
        """Completion tokens so far of a request that was submitted."""
        return job.ended.tokens if job.ended else self.simulator.generated(job.number)

    def leave(self, job: Job) -> None:
        """It is answered, or its client has hung up: then the simulator gives it up too."""
        if job.ended is None and self in self.host.servers:
            self.host.look(self)  # what it did until now is done
        if self.jobs.pop(job.number, None) is not None:
            if job.ended is None:
                self.simulator.abort(job.number)
            if job.is_stream and not any(other.is_stream for other in self.jobs.values()):
                self.host.streaming.discard(self)
            self.pace.left(time.monotonic())
            self.host.changed(self)

    def advance(self, until_s: float) -> bool:
        """Let its time pass; whether somebody waits for what came of it."""
        awaited = False
        for told in self.simulator.advance(until_s):
            if isinstance(told, Line):
                pending = self.simulator.pending_tokens()
                words = pages.batch_line(self.spec, told, pending=pending, before_s=self._prefilled_s)
                self._prefilled_s = told.at_s if told.new_seqs else self._prefilled_s
                self._print(words, at_s=told.at_s)
            elif isinstance(told.request_id, int) and told.request_id in self.jobs:
                awaited |= self._tell(self.jobs[told.request_id], told)
        for job in self.jobs.values() if self in self.host.streaming else ():
            if job.is_stream:
                job.changed.set()
        return awaited or self in self.host.streaming

    def _tell(self, job: Job, told: Event) -> bool:
        """What happened to a request; whether it has ended."""
        if told.kind == "retracted":
            self._print(pages.retract_line(1, job.prompt + told.tokens), at_s=told.at_s)
        elif told.kind == "finished":
            job.ended = told
            self.leave(job)
            job.changed.set()
            counted = {"num_requests": 1, "prompt_tokens": job.prompt, "generation_tokens": told.tokens}
            self.finished.update({(name, job.is_stream): number for name, number in counted.items()})
        return job.ended is not None

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    async def _live(self) -> None:
        """From the start to being ready."""
        host, (before, after) = self.host, pages.startup_lines(self.spec)
        self._print(*before)
        await host.reached(host.clock.now_s + self.spec.load_s)
        if self.faults.fails_to_start(self._start):
            self.crash(_TRACEBACK + _OUT_OF_MEMORY)
            return
        try:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._web, sock=self._sock, backlog=BACKLOG)
        except OSError as error:
            self.crash(f"ERROR:    {taken(self.spec.host, self.port, error)}")
            return
        self._print(*after[:-1])
        await host.reached(host.clock.now_s + WARM_UP_S)
        self._print(after[-1])
        self.is_ready = True
        host.serves(self)

    async def _befall(self, number: str, part: FaultPart) -> None:
        """Let a scheduled fault happen when its time comes, until it is over."""
        await self.host.due(part.at_s or 0.0)
        if part.kind == "crash":
            self.faults.met[number] += 1
            self.crash()
            return
        self._turn(part, on=True)
        if part.for_s is not None:
            await self.host.reached(self.host.clock.now_s + part.for_s)
            self._turn(part, on=False)

    def _turn(self, part: FaultPart, *, on: bool) -> None:
        self.host.look(self)
        if part.kind == "hang":
            self.simulator.hung = on
        elif part.kind == "slow":
            self.simulator.slow(part.factor if on else 1.0)
        else:
            self.health_status = part.answered_status if on else 200
        self.host.changed(self)

    def _print(self, *lines: str, at_s: float | None = None) -> None:
        """Lines of the log, of now unless a virtual second is given."""
        if self._log is not None:
            clock = self.host.clock
            stamp = pages.stamp(datetime.fromtimestamp(clock.zero_at + (clock.now_s if at_s is None else at_s)))
            with suppress(OSError):  # a full disk ends no server
                os.write(self._log, "".join(f"{stamp}{line}\n" for line in lines).encode())
