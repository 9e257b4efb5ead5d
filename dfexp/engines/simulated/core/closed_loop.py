"""A client that keeps a number of requests in flight at each of several simulated servers, in virtual time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from dfexp.capacity.workload import Lengths, Workload
from dfexp.engines.simulated.core.config import Config
from dfexp.engines.simulated.core.records import Counters, Event
from dfexp.engines.simulated.core.simulator import Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The lengths of one request in tokens."""

    prompt_tokens: int
    output_tokens: int
    max_new_tokens: int


def draw(workload: Workload, number: int, *, context_length: int, seed: int) -> Iterable[Drawn]:
    """So many requests with the workload's lengths; the same seed gives the same ones, one after the other."""
    generator = np.random.default_rng(seed)
    prompts, outputs = (_drawn(generator, lengths, number) for lengths in (workload.prompt, workload.completion))
    for prompt, output in zip(prompts, outputs, strict=True):
        prompt_tokens = max(1, min(int(prompt), context_length - 16))
        room = context_length - prompt_tokens
        most = room if workload.max_tokens == "fit" else min(workload.max_tokens, room)
        yield Drawn(prompt_tokens=prompt_tokens, output_tokens=max(1, int(output)), max_new_tokens=most)


def _drawn(generator: np.random.Generator, lengths: Lengths, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.rint(generator.choice(lengths.values, size=number, p=lengths.weights)).astype(np.int64)


@dataclass(slots=True, kw_only=True)
class Run:
    """What a closed loop did.

    Attributes:
        ended_s: when the last request ended; finished, in order: time, and completion tokens of all until then.
        samples: every `sample_s` seconds each server's gauges.
        counters: of each server at the end; aborted: requests that fitted no KV pool.

    """

    counters: tuple[Counters, ...] = ()
    ended_s: float = 0.0
    aborted: int = 0
    finished_s: list[float] = field(default_factory=list)
    tokens_by_then: list[int] = field(default_factory=list)
    samples: list[tuple[float, tuple[dict[str, float], ...]]] = field(default_factory=list)

    def completions(self, at_s: float) -> int:
        """Completions by then."""
        return bisect_right(self.finished_s, at_s)

    def mean_tokens(self, at_s: float) -> float:
        """Mean completion tokens of those; 0.0 without any."""
        number = self.completions(at_s)
        return self.tokens_by_then[number - 1] / number if number else 0.0


def run_closed_loop(
    configs: Sequence[Config], requests: Iterable[Drawn], concurrency: int, *, sample_s: float = 60.0
) -> Run:
    """Send all requests, at most `concurrency` at a time to each server; who ends one gets the next at once."""
    run, servers, source = Run(), [Simulator(config) for config in configs], enumerate(requests)

    def send(server: Simulator, at_s: float) -> None:
        for number, drawn in source:
            server.submit(
                at_s, number, prompt_tokens=drawn.prompt_tokens, output_tokens=drawn.output_tokens,
                max_new_tokens=drawn.max_new_tokens,
            )  # fmt: skip
            return

    for _ in range(concurrency):
        for server in servers:
            send(server, 0.0)
    ahead = [(0.0, index) for index in range(len(servers))]
    heapify(ahead)
    sample_at_s = sample_s
    while ahead:
        at_s, index = heappop(ahead)
        while at_s > sample_at_s:
            run.samples.append((sample_at_s, tuple(server.gauges(sample_at_s) for server in servers)))
            sample_at_s += sample_s
        server = servers[index]
        for event in server.advance(at_s):
            if event.kind in ("finished", "aborted"):
                _record(run, event)
                send(server, event.at_s)
        server.take_lines()
        following_s = server.next_event_s()
        if following_s is not None:
            heappush(ahead, (following_s, index))
    run.counters = tuple(server.counters for server in servers)
    return run


def _record(run: Run, event: Event) -> None:
    run.ended_s = event.at_s
    if event.kind == "aborted":
        run.aborted += 1
        return
    run.finished_s.append(event.at_s)
    run.tokens_by_then.append(event.tokens + (run.tokens_by_then[-1] if run.tokens_by_then else 0))
