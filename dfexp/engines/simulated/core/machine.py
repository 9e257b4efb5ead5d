"""A simulated server's machine: the time of its decode steps, by the capacity model, and its two pools.

Every request gains one token a step, so its tokens less the step counter never change; what all hold together at any
later step follows from the sum of those.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, replace
from math import inf

from dfexp.capacity.cost import Server, decode_step_s
from dfexp.capacity.memory import MemoryPlan
from dfexp.capacity.planner import Setting
from dfexp.capacity.throughput import SLOTS_HELD, largest_graph
from dfexp.hardware import Efficiency

SETTLED_AT_ONCE = 23
"""The patch of 0.5 since which a place is free as soon as its request has ended; see `Config.settles_late`."""
KEPT_SLOTS = 2
"""State slots that the radix cache keeps of a finished request: one at the prompt's end, one at the answer's."""
Straight = tuple[float, float]
"""Seconds of a decode step at 0 tokens, and per token that all running requests hold together after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One server.

    Attributes:
        log_interval: decode steps from one log line to the next.
        settles_late: versions before 0.5.23 drop an ended request from the running batch when the next decode step
            begins, so that its place is given away one step later, and count the place of a chunked prompt twice.

    """

    server: Server
    memory: MemoryPlan
    efficiency: Efficiency
    log_interval: int = 40
    settles_late: bool = True

    @classmethod
    def of(cls, setting: Setting) -> Config:
        """The server of a planner's setting. Raises CapacityError: SGLang refuses the flags, or nothing fits."""
        late, memory = not setting.rules.since(SETTLED_AT_ONCE), setting.memory()
        return cls(server=setting.server, memory=memory, efficiency=setting.efficiency, settles_late=late)

    def step_lines(self, running: int) -> tuple[Straight, Straight]:
        """The time of a decode step is the higher of these: by bytes, and by FLOPs.

        Rows that pad a batch up to the next CUDA graph cost FLOPs alone: the kernels skip their state.
        """
        gpu, padded = self.server.gpu, padded_batch(running, largest_graph(self.server))
        by_bytes = replace(self.server, gpu=replace(gpu, flops_16=inf, flops_8=inf))
        by_flops = replace(self.server, gpu=replace(gpu, bandwidth_bytes_per_s=inf))
        return self._line(by_bytes, running), self._line(by_flops, padded)

    def _line(self, server: Server, rows: int) -> Straight:
        fixed, full = (decode_step_s(server, self.efficiency, rows, context) for context in (0.0, 1024.0))
        return fixed, (full - fixed) / (rows * 1024.0)


def padded_batch(running: int, largest: int) -> int:
    """Rows of the smallest captured graph for so many requests; above the largest there is none, and no padding."""
    step = 1 if running <= 2 else 4 if running <= 16 else 8
    return running if running > largest else min(-(-running // step) * step, largest)


class Pools:
    """Who holds what at which decode step."""

    def __init__(self, config: Config) -> None:
        memory, resolved = config.memory, config.memory.resolved
        self.tokens, self._slots = memory.max_total_num_tokens, memory.max_mamba_cache_size
        self._page, self._is_cached = resolved.page_size, resolved.radix_cache
        self._slots_held = SLOTS_HELD.get(resolved.strategy, 1.0) if resolved.radix_cache else 1.0
        self._offsets, self._residues = 0, [0] * self._page
        self._cached: deque[int] = deque()
        self._cached_tokens = self.holders = 0

    def paged(self, tokens: int) -> int:
        """Tokens rounded up to whole pages."""
        return -(-tokens // self._page) * self._page

    def change(self, by: int, tokens: int, step: int) -> None:
        """A request that holds `tokens` comes (`by` 1) or goes (-1)."""
        offset = tokens - step
        self._offsets += by * offset
        self._residues[offset % self._page] += by
        self.holders += by

    def keep(self, tokens: int) -> None:
        """The radix cache, if there is one, takes over the whole pages of a request."""
        if self._is_cached:
            self._cached.append(tokens // self._page * self._page)
            self._cached_tokens += self._cached[-1]

    def context(self, step: int) -> int:
        """Tokens that requests hold, ends of pages not counted: what a decode step reads."""
        return self._offsets + self.holders * step

    def used(self, step: int) -> int:
        """Tokens that requests hold, in whole pages."""
        if self._page == 1:
            return self.context(step)
        ends = sum(number * (-(residue + step) % self._page) for residue, number in enumerate(self._residues))
        return self.context(step) + ends

    def steps_that_fit(self, step: int, most: int) -> int:
        """Decode steps, at most `most`, for which the KV pool has room."""
        if self.used(step) + self.holders * (most + self._page - 1) <= self.tokens:
            return most
        return bisect_right(range(1, most + 1), self.tokens, key=lambda steps: self.used(step + steps))

    def gauges(self, step: int) -> dict[str, float]:
        """SGLang's gauges of the two pools."""
        self._trim(step)
        used, held, kept = self.used(step), self._held(), len(self._cached) * KEPT_SLOTS if self._slots else 0
        usages = {"full_token_usage": used / self.tokens, "mamba_usage": held / self._slots if self._slots else 0.0}
        return {
            **usages, "token_usage": max(usages.values()),
            "kv_used_tokens": used, "kv_evictable_tokens": self._cached_tokens,
            "kv_available_tokens": self.tokens - used - self._cached_tokens, "mamba_used_tokens": held,
            "mamba_evictable_tokens": kept, "mamba_available_tokens": self._slots - held - kept,
        }  # fmt: skip

    def _held(self) -> int:
        return min(round(self.holders * self._slots_held), self._slots)

    def _trim(self, step: int) -> None:
        """Drop the oldest of what is cached until the rest fits beside what requests hold."""
        most = (self._slots - self._held()) // KEPT_SLOTS if self._slots else len(self._cached)
        while self._cached and (self._cached_tokens > self.tokens - self.used(step) or len(self._cached) > most):
            self._cached_tokens -= self._cached.popleft()
