"""What a simulated server is: the sizes of its pools and the time of its batches, from the capacity model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from dfexp.capacity.cost import Server, decode_step_s, prefill_s
from dfexp.capacity.planner import Setting
from dfexp.capacity.throughput import SLOTS_HELD, chunk_tokens, largest_graph
from dfexp.hardware import Efficiency

Lines = tuple[float, float, float, float]
"""Two straight lines in the tokens that the KV pool holds, of which the higher counts: fixed seconds of the first,
seconds per token of the first, and the same of the second."""


class Times(Protocol):
    """Seconds that batches take."""

    def step_lines(self, running: int) -> Lines:
        """Of one decode step of so many requests, by the tokens that they hold together after it."""

    def prefill_s(self, tokens: int, prompt: float) -> float:
        """Of one prefill batch of so many tokens, which belong to prompts of `prompt` tokens each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Times by the capacity model.

    Rows that pad a batch up to the next CUDA graph cost FLOPs, and no bytes of state or KV: their kernels skip them.
    `host_s`: seconds that the scheduler adds to a step where it does not overlap with the GPU.
    """

    server: Server
    efficiency: Efficiency
    host_s: float = 0.0

    def step_lines(self, running: int) -> Lines:
        """See Times. Bytes first, then FLOPs."""
        gpu, padded = self.server.gpu, padded_batch(running, largest_graph(self.server))
        by_bytes = self._line(replace(self.server, gpu=replace(gpu, flops_16=inf, flops_8=inf)), running)
        by_flops = self._line(replace(self.server, gpu=replace(gpu, bandwidth_bytes_per_s=inf)), padded)
        return (*by_bytes, *by_flops)

    def _line(self, server: Server, rows: int) -> tuple[float, float]:
        """Fixed seconds, and seconds per token, of a batch of this many rows."""
        context = 1024.0
        fixed, longer = (decode_step_s(server, self.efficiency, rows, each) for each in (0.0, context))
        return fixed + self.host_s, (longer - fixed) / (rows * context)

    def prefill_s(self, tokens: int, prompt: float) -> float:
        """See Times."""
        return prefill_s(self.server, self.efficiency, tokens, prompt)


def padded_batch(running: int, largest: int) -> int:
    """Rows of the smallest captured graph for so many requests; above the largest there is none, so no padding."""
    step = 1 if running <= 2 else 4 if running <= 16 else 8
    return running if running > largest else min(-(-running // step) * step, largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One server. Pools in SGLang's names (tokens, slots); a model without recurrent state has no slots.

    Attributes:
        chunk_tokens: tokens of one prefill batch at most.
        slots_held: state slots that a running request holds.
        radix_cache: what finished requests leave stays in the pools until the room is needed.
        conservativeness: SGLang's flag of that name.
        log_interval: decode steps from one log line to the next.

    """

    times: Times
    max_running_requests: int
    max_total_num_tokens: int
    max_mamba_cache_size: int
    context_length: int
    chunk_tokens: int
    page_size: int = 1
    slots_held: float = 0.0
    radix_cache: bool = False
    conservativeness: float = 1.0
    log_interval: int = 40


def server_config(setting: Setting, *, host_s: float = 0.0) -> Config:
    """The server of a planner's setting.

    Args: host_s, seconds of the scheduler per step without overlap. The reference run, whose second setting has none,
    shows no such loss, so it is 0 unless told.
    Raises CapacityError: SGLang refuses the flags, or nothing fits.
    """
    memory, server, flags = setting.memory(), setting.server, setting.server.flags
    resolved = memory.resolved
    held = SLOTS_HELD.get(resolved.strategy, 0.0) if resolved.radix_cache else 1.0
    return Config(
        times=Roofline(server=server, efficiency=setting.efficiency, host_s=0.0 if resolved.overlap else host_s),
        max_running_requests=memory.max_running_requests,
        max_total_num_tokens=memory.max_total_num_tokens,
        max_mamba_cache_size=memory.max_mamba_cache_size,
        context_length=server.context_length,
        chunk_tokens=chunk_tokens(server),
        page_size=resolved.page_size,
        slots_held=held if memory.max_mamba_cache_size else 0.0,
        radix_cache=resolved.radix_cache,
        conservativeness=flags.schedule_conservativeness,
    )
