"""One server's scheduler: who is admitted, prefilled, decoded, retracted, and when."""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal

from dfexp.capacity.cost import prefill_s
from dfexp.capacity.throughput import LOWEST_RESERVE, RESERVE_RATIO, RESERVED_TOKENS, chunk_tokens
from dfexp.engines.simulated.core.machine import Config, Pools
from dfexp.errors import PromptTooLong

RequestId = int | str
EventKind = Literal["first_token", "finished", "retracted", "aborted"]
DECODED, PREFILLED = 'realtime_tokens_total{mode="decode"}', 'realtime_tokens_total{mode="prefill_compute"}'
"""Counters that move with every batch; the others move when a request ends."""
RATIO_STEPS = 600
"""Steps in which the share of running requests' reserve that counts falls to its lowest."""
RETRACT_STEPS = 20
"""After a retraction the reserve counts as if every request went on for so many steps."""
GAUGES_KEPT_S = 30.0
"""An idle server's gauges keep their last values for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a request at `at_s`. `tokens`: its completion tokens so far."""

    at_s: float
    kind: EventKind
    request_id: RequestId
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One log line of SGLang: of a prefill batch, or of a decode step (`new_seqs` is 0).

    Attributes:
        at_s: end of the batch.
        gauges: SGLang's, as they stand from then on. `num_running_reqs` counts, of a decode step, those that took part;
            of a prefill, those that ran before it.
        new_seqs, new_tokens: prefilled.

    """

    at_s: float
    gauges: dict[str, float]
    new_seqs: int
    new_tokens: int


@dataclass(slots=True, eq=False)
class _Request:
    """`computed`: tokens whose prefill is over or under way. While that is 0 it waits and has `done` completion tokens;
    else those follow from `zero`, the step at which it would have had none.
    """

    id: RequestId
    prompt: int
    output: int
    max_new: int
    order: int
    done: int = 0
    zero: int = 0
    computed: int = 0
    aborted: bool = False

    def tokens(self, step: int) -> int:
        """Completion tokens at this step of the server."""
        return step - self.zero if self.computed else self.done


class Simulator:
    """One server in virtual time; see the package's docstring for how it is driven.

    Attributes:
        counters: SGLang's, by its names; those that have not moved are absent, and read 0.
        hung: time passes in vain; requests may still be submitted, and gauges keep their values.

    """

    def __init__(self, config: Config) -> None:
        self.counters, self._slowness, self.hung = Counter[str](), 1.0, False
        self._config, self._pools = config, Pools(config)
        self._page, self._chunk = config.memory.resolved.page_size, chunk_tokens(config.server)
        self._first_ratio = min(RESERVE_RATIO * config.server.flags.schedule_conservativeness, 1.0)
        self._decay = self._first_ratio * (1 - LOWEST_RESERVE) / RATIO_STEPS
        self._ratio, self._full, self._now_s, self._steps, self._order = self._first_ratio, False, 0.0, 0, count()
        self._overlap, self._lag = config.memory.resolved.overlap, 0
        self._requests: dict[RequestId, _Request] = {}
        self._arrivals: list[tuple[float, int, _Request]] = []
        self._queue: deque[_Request] = deque()
        self._batch: list[tuple[_Request, int]] = []  # what is being prefilled, with its tokens
        self._chunked: _Request | None = None
        self._running: list[tuple[int, int, _Request]] = []  # a heap by the step that completes the answer
        self._leaving: list[_Request] = []  # have ended, and count until the next decode step has begun
        self._unseen: list[_Request] = []  # have ended in the last batch, which the scheduler has not seen yet
        self._move: tuple[float, int] | None = None  # end of what is under way, and its decode steps
        self._told: list[Event | Line] = []
        self._step_lines, self._decode_line = cache(config.step_lines), (0.0, 0)
        self._set_gauges(0, 0.0)

    def submit(self, at_s: float, request_id: RequestId, prompt: int, output: int, max_new: int) -> None:
        """A request arrives at `at_s`, or now if that is past; sizes in tokens. It ends after `output` or `max_new`.

        SGLang lowers `max_new` to what context and KV pool leave. Raises PromptTooLong where that is nothing.
        """
        longest = min(self._config.server.context_length, self._pools.tokens - self._page) - 1
        max_new = min(max_new, longest - prompt - 1)
        if max_new < 1:
            raise PromptTooLong(f"{prompt} prompt tokens leave no room for an answer in {longest}. Shorten the prompt.")
        request = _Request(request_id, prompt, max(1, min(output, max_new)), max_new, next(self._order))
        self._requests[request_id] = request
        heappush(self._arrivals, (at_s, request.order, request))
        self._cut()

    def abort(self, request_id: RequestId) -> None:
        """End a request: at once while it is queued, else with its next token. One that has ended stays as it is."""
        request, step = self._requests.get(request_id), self._steps + 1
        if request is not None and request in self._queue:
            self._queue.remove(request)
            self._end(request, "aborted")
        elif request is not None:
            request.aborted, request.output = True, request.done + 1  # counts where its prefill is not over
            self._running = [(step if each is request else end, at, each) for end, at, each in self._running]
            heapify(self._running)
        self._cut()

    def slow(self, factor: float) -> None:
        """Let every batch take so many times what the model says; one that is being prefilled keeps its time."""
        self._slowness = factor
        self._cut()

    def _cut(self) -> None:
        """What is under way may have to end earlier, but what was decided stays."""
        if not self._batch:
            self._move = self._jump() if self._move and self._running else None

    def generated(self, request_id: RequestId) -> int:
        """Completion tokens so far of a request in flight. Raises KeyError: not in flight."""
        return self._requests[request_id].tokens(self._steps)

    def pending_tokens(self) -> int:
        """Tokens that the queue still has to prefill."""
        return sum(request.prompt + request.done for request in self._queue)

    def next_event_s(self) -> float | None:
        """When the present batch ends, before which nothing happens by itself; None: nothing will."""
        if not self.hung and not self._told:
            self._move = self._move or self._plan()
        if self._told:
            return self._now_s
        return self._move[0] if self._move and not self.hung else None

    def advance(self, until_s: float) -> list[Event | Line]:
        """Let time pass. What happened by then, in order."""
        if self.hung and until_s > self._now_s:  # what is under way begins anew when that is over
            self._move = (self._move[0] + until_s - self._now_s, 0) if self._move and self._batch else None
            self._now_s = until_s
        while not self.hung and (move := self._move or (self._plan() if self._now_s < until_s else None)):
            self._move, (end_s, steps) = move, move
            if end_s > until_s:
                steps = bisect_right(range(1, steps + 1), until_s, key=self._end_s)
                if not steps:
                    break
                end_s = self._end_s(steps)
            self._move, self._now_s = None, end_s
            self._finish(steps)
        told, self._told = self._told, []
        return told

    def gauges(self, at_s: float) -> dict[str, float]:
        """SGLang's gauges as they stand at `at_s`, which is not before the last `advance`."""
        if not (self._pools.holders or self._queue or self.hung) and at_s - self._now_s > GAUGES_KEPT_S:
            self._set_gauges(0, 0.0)
        return self._gauges

    def _set_gauges(self, running: int, rate: float) -> None:
        own = {"num_running_reqs": running, "num_queue_reqs": len(self._queue), "gen_throughput": rate}
        self._gauges = {**own, **self._pools.gauges(self._steps), "cache_hit_rate": 0.0}

    def _plan(self) -> tuple[float, int] | None:
        """What the scheduler does next. Prefill batches are formed, and requests retracted, at once."""
        self._take_arrivals()
        if not self._running:
            self._leaving, self._unseen, self._full = [], [], False
        if self._admit():
            tokens = sum(take for _, take in self._batch)
            prompt = sum(take * request.computed for request, take in self._batch) / tokens
            seconds = prefill_s(self._config.server, self._config.efficiency, tokens, prompt)
            return self._now_s + self._slowness * seconds, 0
        if self._running and not self._pools.steps_that_fit(self._steps, 1):
            self._retract()
        if not self._running:
            self._ratio = self._first_ratio
            return (self._arrivals[0][0], 0) if self._arrivals else None
        return self._jump()

    def _jump(self) -> tuple[float, int]:
        """As many decode steps as nothing but their number matters for."""
        interval = self._config.log_interval
        most = min(self._running[0][0] - self._steps, interval - self._steps % interval)
        if self._leaving or self._unseen if self._full else self._queue:
            most = 1  # then a place is free, or admission is tried again
        most = self._pools.steps_that_fit(self._steps, most)
        if self._arrivals and not self._full:
            most = 1 + bisect_left(range(1, most), self._arrivals[0][0], key=self._end_s)
        return self._end_s(most), most

    def _end_s(self, steps: int) -> float:
        """When so many decode steps from now will be over."""
        running = self._pools.holders
        read = steps * self._pools.context(self._steps) + running * steps * (steps + 1) / 2
        seconds = max(fixed * steps + per_token * read for fixed, per_token in self._step_lines(running))
        return self._now_s + self._slowness * seconds

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now_s:
            self._queue.append(heappop(self._arrivals)[2])

    def _admit(self) -> bool:
        """Form the next prefill batch, first come, first served; False: there is none."""
        if self._chunked is None and (self._full or not self._queue):
            return False
        pools, page, chunk = self._pools, self._page, self._chunk
        late, ended = self._config.settles_late, self._leaving + self._unseen
        counted_twice = late and self._chunked is not None
        places = self._config.memory.max_running_requests - len(self._running) - max(len(ended), counted_twice)
        if places <= 0 and self._chunked is None:
            self._full = True
            return False
        left = [request.zero + request.max_new - self._steps + self._lag for _, _, request in self._running]
        left += [request.max_new - request.done for request in ended]
        reserve = self._ratio * sum([tokens if tokens < RESERVED_TOKENS else RESERVED_TOKENS for tokens in left])
        held = sum([pools.paged(each.prompt + each.done - 1) for each in (self._unseen if late else ended)])
        room = pools.tokens - pools.used(self._steps) - held - reserve
        while chunk >= page:
            request = self._chunked
            if request is None:
                if self._full or not self._queue:
                    break
                request = self._queue[0]
                answer = min(request.max_new - request.done, RESERVED_TOKENS)
                self._full = len(self._batch) >= places or request.prompt + request.done + page + answer >= room
                if self._full:
                    break
                self._queue.popleft()
                request.order = next(self._order)  # its place in the batch, which decides between equals
                request.zero = self._steps - request.done
            rest = request.prompt + request.done - request.computed
            take = rest if pools.paged(rest) <= chunk else chunk // page * page
            self._chunked = request if take < rest else None
            self._batch.append((request, take))
            if request.computed:
                pools.change(-1, request.computed, self._steps)
            request.computed += take
            pools.change(1, request.computed, self._steps)
            chunk -= pools.paged(take)
            room -= pools.paged(take) + page + (0 if self._chunked else min(request.max_new, RESERVED_TOKENS))
            self._full = self._full or room <= 0
        return bool(self._batch)

    def _retract(self) -> None:
        """Make room for the next step: fewest completion tokens go first, then the longest prompts."""
        step = self._steps
        ranked = [request for _, _, request in self._running]
        ranked.sort(key=lambda each: (each.tokens(step), -each.prompt, -each.order))
        for ended, request in enumerate(ranked):
            if ended and self._pools.steps_that_fit(step, 1):
                break  # at the latest with the last one, whose max_new was lowered to the pool
            self._leave(request)
            self._tell("retracted", request)
            self._queue.append(request)
            self.counters["num_retracted_requests_total"] += 1
        self._running = [entry for entry in self._running if entry[2].computed]
        heapify(self._running)
        kept = [request for request in ranked if request.computed]
        generated = sum(each.tokens(step) + RETRACT_STEPS for each in kept)
        self._ratio = min(1.0, generated / (sum(each.max_new for each in kept) + 1))
        self._ratio += self._decay  # which the step that follows at once takes off again
        self._full = False

    def _leave(self, request: _Request) -> None:
        """A request gives back what it holds."""
        request.done, request.computed = request.tokens(self._steps), 0
        self._pools.change(-1, request.prompt + request.done - 1, self._steps)

    def _finish(self, steps: int) -> None:
        """The end of so many decode steps, or of the prefill batch."""
        running = len(self._running) + (steps < 2) * len(self._unseen) + (steps < 1) * len(self._leaving)
        batch, self._full = self._batch, self._full and (steps > 0 or bool(self._running))  # an empty batch's is lost
        self._batch, self._steps, self._lag = [], self._steps + steps, int(self._overlap and steps > 0)
        self._ratio = max(self._first_ratio * LOWEST_RESERVE, self._ratio - steps * self._decay)
        self.counters[DECODED] += len(self._running) * steps
        for _ in range(2 if steps > 1 else 1):
            self._settle(steps)
        for request, _ in batch:
            if request is self._chunked:
                self._full = False
                continue
            request.zero -= 1
            heappush(self._running, (request.zero + request.output, request.order, request))
            if request.tokens(self._steps) == 1:
                self._tell("first_token", request)
        while self._running and self._running[0][0] <= self._steps:
            request = heappop(self._running)[2]
            self._pools.keep(request.prompt + request.tokens(self._steps) - 1)
            self._leave(request)
            self._end(request, "aborted" if request.aborted else "finished")
            self._give_up_place(request, steps)
        self._take_arrivals()
        if batch or (steps and self._steps % self._config.log_interval == 0):
            self._log(running, batch)

    def _settle(self, steps: int) -> None:
        """What the scheduler learns while a prefill batch or a decode step runs: places of the ended are free."""
        late, stay = self._config.settles_late, self._config.settles_late and not steps
        gone = [] if stay else self._leaving if late else self._leaving + self._unseen
        self._full = self._full and not gone
        self._leaving, self._unseen = (self._leaving if stay else []) + (self._unseen if late else []), []

    def _give_up_place(self, request: _Request, steps: int) -> None:
        """Its place is free at once, or when the scheduler has seen it, and has dropped it before a decode step."""
        late = self._config.settles_late
        if self._overlap and (late or request.done < request.max_new):
            self._unseen.append(request)
        elif self._overlap or (late and steps):
            self._leaving.append(request)
        else:
            self._full = False

    def _log(self, running: int, batch: list[tuple[_Request, int]]) -> None:
        """Write a line, of this prefill batch or of a decode step, and set the gauges."""
        tokens, decoded, rate = sum(take for _, take in batch), self.counters[DECODED], self._gauges["gen_throughput"]
        self.counters[PREFILLED] += tokens
        if not batch:
            rate = (decoded - self._decode_line[1]) / max(1e-9, self._now_s - self._decode_line[0])
            self._decode_line = self._now_s, decoded
        self._set_gauges(running, rate)
        self._told.append(Line(at_s=self._now_s, gauges=self._gauges, new_seqs=len(batch), new_tokens=tokens))

    def _end(self, request: _Request, kind: EventKind) -> None:
        del self._requests[request.id]
        self.counters["num_requests_total" if kind == "finished" else "num_aborted_requests_total"] += 1
        if kind == "finished":
            self.counters.update({"prompt_tokens_total": request.prompt, "generation_tokens_total": request.done})
        self._tell(kind, request)

    def _tell(self, kind: EventKind, request: _Request) -> None:
        self._told.append(Event(at_s=self._now_s, kind=kind, request_id=request.id, tokens=request.tokens(self._steps)))
