"""Small servers, and SGLang's scheduler once more, one step at a time and as plainly as it can be said."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from dfexp.capacity.cost import decode_step_s, prefill_s
from dfexp.capacity.flags import Flags
from dfexp.engines.simulated.core import Config, Event, Line, Simulator, Sizes
from tests.capacity.support import AFTER, GPU, plan, server


def config(
    *,
    tokens: int,
    cap: int,
    slots: int = 1000,
    page: int = 1,
    radix: bool = True,
    overlap: bool = False,
    interval: int = 40,
    late: bool = True,
    **flags: Any,
) -> Config:
    """A server with these pools, on one RTX PRO 6000; `flags` beat those of the reference run's second setting."""
    given: Flags = replace(AFTER, **flags)
    memory = plan(AFTER)
    resolved = replace(memory.resolved, page_size=page, radix_cache=radix, overlap=overlap)
    memory = replace(memory, max_total_num_tokens=tokens, max_mamba_cache_size=slots, max_running_requests=cap)
    return Config(
        server=server(given),
        memory=replace(memory, resolved=resolved),
        efficiency=GPU.efficiency,
        log_interval=interval,
        settles_late=late,
    )


def run(simulator: Simulator, until_s: float = float("inf")) -> list[Event | Line]:
    """Everything that happens until then."""
    told: list[Event | Line] = []
    while (at_s := simulator.next_event_s()) is not None and at_s <= until_s:
        told += simulator.advance(at_s)
    return told


def events(told: list[Event | Line]) -> list[Event]:
    return [each for each in told if isinstance(each, Event)]


def lines(told: list[Event | Line]) -> list[Line]:
    return [each for each in told if isinstance(each, Line)]


@dataclass(eq=False)
class Slow:
    """A request of the slow scheduler: completion tokens so far, tokens of its KV, prompt tokens of earlier chunks."""

    id: int
    prompt: int
    output: int
    max_new: int
    out: int = 0
    kv: int = 0


@dataclass
class SlowServer:
    """One iteration of the scheduler's loop at a time, one token of one request at a time."""

    config: Config
    arrivals: list[tuple[float, Slow]]
    told: list[tuple[float, str, int, int]] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=lambda: {"running": 0, "kv": 0})
    now_s: float = 0.0
    ratio: float = 1.0
    full: bool = False
    queue: list[Slow] = field(default_factory=list)
    running: list[Slow] = field(default_factory=list)
    chunked: Slow | None = None

    def go(self) -> list[tuple[float, str, int, int]]:
        """(time, kind, id, tokens) of every event."""
        self.ratio = 0.7 * self.flags.schedule_conservativeness
        while self.arrivals or self.queue or self.running or self.chunked:
            while self.arrivals and self.arrivals[0][0] <= self.now_s:
                self.queue.append(self.arrivals.pop(0)[1])
            if not (self.config.settles_late and self.alive()):
                self.drop_ended()
            if not (self.queue or self.running or self.chunked or self.arrivals):
                break
            if not (self.queue or self.running or self.chunked):
                self.now_s, self.ratio = self.arrivals[0][0], 0.7 * self.flags.schedule_conservativeness
                continue
            batch = self.admit()
            if batch:
                self.prefill(batch)
            else:
                self.decode()
            self.peaks["running"] = max(self.peaks["running"], len(self.running))
            self.peaks["kv"] = max(self.peaks["kv"], self.used())
        return self.told

    @property
    def flags(self) -> Flags:
        return self.config.server.flags

    def paged(self, tokens: int) -> int:
        page = self.config.memory.resolved.page_size
        return ceil(tokens / page) * page

    def used(self) -> int:
        held = [*self.alive(), *([self.chunked] if self.chunked else [])]
        return sum(self.paged(each.kv) for each in held)

    def alive(self) -> list[Slow]:
        return [each for each in self.running if each.out < each.output]

    def drop_ended(self) -> None:
        """Those that have ended leave the running batch, and another may be admitted."""
        if len(self.alive()) < len(self.running):
            self.full = False
        self.running = self.alive()

    def admit(self) -> list[tuple[Slow, int]]:
        batch: list[tuple[Slow, int]] = []
        page, chunk = self.config.memory.resolved.page_size, self.flags.chunked_prefill_size or 0
        reserved = sum(min(each.max_new - each.out, 4096) for each in self.running) * self.ratio
        room = self.config.memory.max_total_num_tokens - self.used() - reserved
        cap = self.config.memory.max_running_requests
        places = min(cap - len(self.running), cap - len(self.alive()) - bool(self.chunked and self.config.settles_late))
        if self.chunked:
            request, left = self.chunked, self.chunked.prompt + self.chunked.out - self.chunked.kv
            take = min(left, chunk)
            batch.append((request, take))
            room -= self.paged(take) + page
            chunk -= self.paged(take)
            if take == left:
                room -= min(request.max_new, 4096)
                self.chunked = None
        elif self.full:
            return []
        while self.queue and not self.full and chunk > 0:
            request = self.queue[0]
            extend = request.prompt + request.out
            if len(batch) >= places or extend + min(request.max_new - request.out, 4096) + page >= room:
                self.full = True
            else:
                take = extend if self.paged(extend) <= chunk else chunk // page * page
                batch.append((self.queue.pop(0), take))
                chunk -= self.paged(take)
                room -= self.paged(take) + page + (min(request.max_new, 4096) if take == extend else 0)
                if take < extend:
                    self.chunked = request
                self.full = self.full or room <= 0
        return batch

    def prefill(self, batch: list[tuple[Slow, int]]) -> None:
        tokens = sum(take for _, take in batch)
        for request, take in batch:
            request.kv += take
        lengths = sum(take * request.kv for request, take in batch) / tokens
        self.now_s += prefill_s(self.config.server, self.config.efficiency, tokens, lengths)
        if self.chunked or not self.running:
            self.full = False
        for request, _ in batch:
            if request is self.chunked:
                continue
            request.out += 1
            if request.out == 1:
                self.told.append((self.now_s, "first_token", request.id, 1))
            if request.out < request.output:
                self.running.append(request)
            else:
                self.full = False
                self.told.append((self.now_s, "finished", request.id, request.out))

    def decode(self) -> None:
        self.drop_ended()
        total, page = self.config.memory.max_total_num_tokens, self.config.memory.resolved.page_size

        def fits() -> bool:
            return self.used() + page * sum(each.kv % page == 0 for each in self.running) <= total

        if fits():
            lowest, share = 0.098, self.flags.schedule_conservativeness
            self.ratio = max(lowest * share, self.ratio - share * (0.7 - lowest) / 600)
        else:
            while not fits() or not self.told or self.told[-1][:2] != (self.now_s, "retracted"):
                order = [each.id for each in self.running]
                worst = min(self.running, key=lambda each: (each.out, -each.prompt, -order.index(each.id)))
                self.running.remove(worst)
                worst.kv = 0
                self.queue.append(worst)
                self.told.append((self.now_s, "retracted", worst.id, worst.out))
            outs, news = sum(each.out for each in self.running), sum(each.max_new for each in self.running)
            self.ratio = min(1.0, (outs + 20 * len(self.running)) / (news + 1))
            self.full = False
        for request in self.running:
            request.kv += 1
            request.out += 1
        context = sum(each.kv for each in self.running) / len(self.running)
        self.now_s += decode_step_s(self.config.server, self.config.efficiency, len(self.running), context)
        for request in self.running:
            if request.out >= request.output:
                self.told.append((self.now_s, "finished", request.id, request.out))


def slow(server_config: Config, requests: list[tuple[float, Sizes]]) -> SlowServer:
    """The slow server with these requests, their `max_new` lowered as SGLang does."""
    memory = server_config.memory
    longest = min(server_config.server.context_length, memory.max_total_num_tokens - memory.resolved.page_size) - 1
    arrivals = []
    for number, (at_s, (prompt, output, max_new)) in enumerate(requests):
        most = min(max_new, longest - prompt - 1)
        arrivals.append((at_s, Slow(number, prompt, min(output, most), most)))
    return SlowServer(server_config, sorted(arrivals, key=lambda arrival: arrival[0]))
