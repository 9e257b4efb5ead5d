"""A whole run in virtual time, without servers or clients: the scheduler's model alone, as fast as one core goes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dfexp.capacity.planner import Setting
from dfexp.capacity.workload import Workload
from dfexp.engines.simulated.core import Config, Line, Simulator, Sizes, run_closed_loop
from dfexp.engines.simulated.server.text import drawn_many


def draw(workload: Workload, number: int, context: int, seed: int = 1) -> Iterator[Sizes]:
    """So many requests with the workload's lengths, always the same."""
    prompts, answers = (
        drawn_many(lengths, number, seed + nth).tolist()
        for nth, lengths in enumerate((workload.prompt, workload.completion))
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        room = context - min(prompt, context - 16)
        yield context - room, answer, room if workload.max_tokens == "fit" else workload.max_tokens


@dataclass(slots=True)
class Whole:
    """A run in virtual time: when each completion ended, in order, and its tokens; `cpu_s`: what simulating it took."""

    finished_s: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("l"))
    retracted: int = 0
    cpu_s: float = 0.0


def simulate(
    setting: Setting, concurrency: int, number: int, watch: Callable[[Line], None] = lambda line: None
) -> Whole:
    """Send so many requests, at most `concurrency` at a time to each server. Raises CapacityError: nothing fits.

    Args: watch, called with each log line.
    """
    whole, started = Whole(), time.process_time()
    servers = [Simulator(Config.of(setting)) for _ in range(setting.servers)]
    requests = draw(setting.workload, number, setting.server.context_length)
    for _, told in run_closed_loop(servers, requests, concurrency):
        if isinstance(told, Line):
            watch(told)
        elif told.kind == "finished":
            whole.finished_s.append(told.at_s)
            whole.tokens.append(told.tokens)
        else:
            whole.retracted += told.kind == "retracted"
    whole.cpu_s = time.process_time() - started
    return whole
