"""Steady state of one server under a workload: how many requests run, what each step costs, what comes out.

A completion costs its prefill, which stops decoding, and its share of as many decode steps as it has tokens:
`seconds per completion = prefill + mean completion x step / running`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from dfexp.capacity.cost import (
    Efficiency,
    Server,
    decode_bytes,
    decode_step_s,
    prefill_parts,
    prefill_s,
    small_kernels_s,
)
from dfexp.capacity.errors import CapacityError
from dfexp.capacity.memory import MemoryPlan
from dfexp.capacity.workload import Workload

RESERVED_TOKENS = 4096
"""SGLang reserves at most this many tokens of a request's answer when it decides on admission."""
RESERVE_RATIO = 0.7
LOWEST_RESERVE = 0.14
"""The reserved share starts at 0.7 and falls by steps to 0.14 of that."""
SLOTS_HELD = {"no_buffer": 2.0, "extra_buffer": 3.5, "extra_buffer_lazy": 3.0}
"""State slots that a running request was seen to hold; the lazy value is between the other two, not measured."""

MANY_SIGMAS = 99.0
LEAST_UNCERTAINTY = (0.05, 0.03)
"""Of a calibration on one sample, which says nothing of other batch sizes, and on several."""

LimitedBy = Literal["client concurrency", "request cap", "KV admission"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Steady state of one server (all its GPUs).

    Attributes:
        running: requests that run, on average; limited_by, what keeps it from being more.
        full_token_usage, mamba_usage: as SGLang's gauges show them; mamba_usage is None without recurrent state.
        step_s: one decode step; prefill_share: part of all time that prefill takes.
        tok_per_s: completion tokens per second, prefill pauses included, as `gen_throughput` shows it.
        retraction_sigmas: room in the KV pool, in standard deviations of what running requests hold together.
        uncertainty: relative, one sigma.
        beyond_graph: more requests run than the largest CUDA graph covers, so steps run eagerly.

    """

    running: float
    limited_by: LimitedBy
    context: float
    full_token_usage: float
    mamba_usage: float | None
    step_s: float
    prefill_share: float
    tok_per_s: float
    completions_per_s: float
    retraction_sigmas: float
    uncertainty: float
    beyond_graph: bool

    def hours(self, completions: int, servers: int) -> float:
        """Wall hours for this many completions on this many such servers, ramp and tail left out."""
        return completions / (self.completions_per_s * servers) / 3600


def admissible(
    tokens: float,
    workload: Workload,
    *,
    page: int,
    context_length: int,
    conservativeness: float = 1.0,
    ratio: float | None = None,
    cached: float = 0.0,
) -> float:
    """Requests that SGLang's admission test lets run at once in a KV pool of `tokens` tokens.

    Args: ratio, the reserved share of what running requests may still generate (default: the lowest, which it reaches
    after some hundred steps; 0.7 is where a cold server starts); cached, part of each prompt that is kept once for all.
    """
    prompt = workload.prompt.mean
    room = context_length - prompt
    most = room if workload.max_tokens == "fit" else min(float(workload.max_tokens), room)
    left = min(max(0.0, most - workload.completion.in_flight), RESERVED_TOKENS)
    share = RESERVE_RATIO * LOWEST_RESERVE * conservativeness if ratio is None else ratio
    shared = prompt * cached
    newcomer = prompt - shared + min(most, RESERVED_TOKENS) + page
    return max(0.0, (tokens - shared - newcomer) / (workload.context - shared + left * min(share, 1.0)))


def largest_graph(server: Server) -> int:
    """Requests that the largest captured decode graph covers; 0 without graphs."""
    if server.flags.disable_cuda_graph:
        return 0
    if server.flags.cuda_graph_max_bs is not None:
        return server.flags.cuda_graph_max_bs
    memory, wide = server.gpu.memory_mib, server.flags.tp_size >= 4
    limits = ((20, 8, 8), (35, 24, 80), (60, 32, 160), (160, 256, 512))
    found = next(((narrow, broad) for top, narrow, broad in limits if memory < top * 1024), (512, 512))
    return found[1] if wide else found[0]


def chunk_tokens(server: Server) -> int:
    """Tokens of one prefill batch at most."""
    memory = server.gpu.memory_mib
    default = 2048 if memory < 35 * 1024 else 4096 if memory < 60 * 1024 else 8192 if memory < 160 * 1024 else 16384
    chunk = server.flags.chunked_prefill_size or default
    return server.flags.max_prefill_tokens if chunk == -1 else min(chunk, server.flags.max_prefill_tokens)


def prefill_per_request_s(server: Server, efficiency: Efficiency, workload: Workload, arrivals: float = 1.0) -> float:
    """Prefill seconds per request when `arrivals` requests are admitted together; cached prefixes are not computed."""
    computed = max(1.0, workload.prompt.mean * (1.0 - _cached(server, workload)))
    tokens = min(max(1.0, arrivals) * computed, chunk_tokens(server))
    prompt = workload.prompt.moment(2) / workload.prompt.mean
    return prefill_s(server, efficiency, tokens, prompt) * computed / tokens


def _cached(server: Server, workload: Workload) -> float:
    return 0.0 if server.flags.disable_radix_cache else (workload.shared_prefix_share or 0.0)


def predict(
    server: Server, plan: MemoryPlan, efficiency: Efficiency, workload: Workload, *, concurrency: int | None = None
) -> Prediction:
    """The steady state of a server with this memory plan.

    Args: concurrency, requests that the client keeps in flight at this server (default: never the limit).
    """
    context_length = server.flags.context_length or server.shape.context_length
    cached = _cached(server, workload)
    fits = admissible(
        plan.max_total_num_tokens,
        workload,
        page=plan.resolved.page_size,
        context_length=context_length,
        conservativeness=server.flags.schedule_conservativeness,
        cached=cached,
    )
    limits: list[tuple[float, LimitedBy]] = [(float(plan.max_running_requests), "request cap"), (fits, "KV admission")]
    if concurrency is not None:
        limits.append((float(concurrency), "client concurrency"))
    running, limited_by = min(limits, key=lambda limit: limit[0])
    if running < 1:
        raise CapacityError(
            f"the KV pool of {plan.max_total_num_tokens} tokens admits no request of {workload.context:.0f} tokens; "
            "raise mem_fraction_static or lower max_tokens."
        )
    return _steady(server, plan, efficiency, workload, running, limited_by, cached * workload.prompt.mean)


def _steady(
    server: Server,
    plan: MemoryPlan,
    efficiency: Efficiency,
    workload: Workload,
    running: float,
    limited_by: LimitedBy,
    cached: float,
) -> Prediction:
    step = decode_step_s(server, efficiency, running, workload.context)
    completion = workload.completion.mean
    arrivals = running if workload.completion.constant else 1.0
    prefill = prefill_per_request_s(server, efficiency, workload, arrivals)
    for _ in range(2):
        rate = 1.0 / (prefill + completion * step / running)
        if not workload.completion.constant:
            prefill = prefill_per_request_s(server, efficiency, workload, 1.0 + rate * step)
    rate = 1.0 / (prefill + completion * step / running)
    kept = running * (workload.context - cached) + cached
    spread = sqrt(running * workload.context_variance)
    held = SLOTS_HELD.get(plan.resolved.strategy, 1.0) if plan.resolved.radix_cache else 1.0
    return Prediction(
        running=running,
        limited_by=limited_by,
        context=workload.context,
        full_token_usage=kept / plan.max_total_num_tokens,
        mamba_usage=min(1.0, running * held / plan.max_mamba_cache_size) if plan.max_mamba_cache_size else None,
        step_s=step,
        prefill_share=rate * prefill,
        tok_per_s=rate * completion,
        completions_per_s=rate,
        retraction_sigmas=min(MANY_SIGMAS, (plan.max_total_num_tokens - kept) / spread) if spread else MANY_SIGMAS,
        uncertainty=efficiency.uncertainty,
        beyond_graph=running > largest_graph(server),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a server was seen to do at a steady state.

    Attributes: running, context, requests and their mean tokens; tok_per_s, completion tokens per second with prefill
    pauses; tpot_s, median time between two tokens of one request, where it was measured.
    """

    running: float
    context: float
    tok_per_s: float
    tpot_s: float | None = None


def calibrate(
    server: Server, workload: Workload, samples: Sequence[Sample], start: Efficiency, *, provenance: str
) -> Efficiency:
    """Efficiencies that reproduce the samples: the bandwidth's always, the compute's where `tpot_s` was measured too.

    Samples of several batch sizes are averaged; their spread becomes the uncertainty (never below 3 %, 5 % for one).
    Raises CapacityError: no samples, or a sample faster than the hardware's peak.
    """
    if not samples:
        raise CapacityError("calibration needs at least one sample of a steady state.")
    found = [_solve(server, workload, sample, start) for sample in samples]
    bandwidth = sum(item[0] for item in found) / len(found)
    compute = sum(item[1] for item in found) / len(found)
    spread = max(abs(item[0] / bandwidth - 1) for item in found)
    if bandwidth > 1.05:
        raise CapacityError(
            f"the samples need {bandwidth:.2f} of {server.gpu.name}'s peak bandwidth, which cannot be; "
            "check running, context and the weights' dtype."
        )
    return Efficiency(
        bandwidth=bandwidth,
        compute=compute,
        provenance=provenance,
        uncertainty=max(LEAST_UNCERTAINTY[len(found) > 1], spread),
    )


def _solve(server: Server, workload: Workload, sample: Sample, start: Efficiency) -> tuple[float, float]:
    """Bandwidth and compute efficiency of one sample."""
    completion = workload.completion.mean
    moved = decode_bytes(server, sample.running, sample.context) / server.gpu.bandwidth_bytes_per_s
    cycle, least = sample.running / sample.tok_per_s, small_kernels_s(server)
    if sample.tpot_s is not None:
        step, prefill = _from_tpot(workload, sample, cycle)
        bandwidth = moved / max(1e-9, step - least)
        arrivals = sample.running if workload.completion.constant else 1.0
        return bandwidth, _compute_for(server, workload, bandwidth, prefill, arrivals, start.compute)
    bandwidth = start.bandwidth
    for _ in range(20):
        trial = replace(start, bandwidth=bandwidth)
        step = decode_step_s(server, trial, sample.running, sample.context)
        prefill = prefill_per_request_s(server, trial, workload, 1.0 + sample.tok_per_s / completion * step)
        bandwidth = moved / max(1e-9, cycle - sample.running * prefill / completion - least)
    return bandwidth, start.compute


def _from_tpot(workload: Workload, sample: Sample, cycle: float) -> tuple[float, float]:
    """Step and prefill seconds from rate and time per token.

    Requests of one length run in waves: all are prefilled, then all decode, and the median request waits for half of
    the others' prefill. Otherwise pauses are spread evenly, and the two numbers say the same: only a step is left.
    """
    assert sample.tpot_s is not None
    if workload.completion.constant:
        step = 2 * sample.tpot_s - cycle
        return step, (cycle - step) * workload.completion.mean / sample.running
    return sample.tpot_s, 0.0


def _compute_for(
    server: Server, workload: Workload, bandwidth: float, prefill: float, arrivals: float, start: float
) -> float:
    """The compute efficiency at which one request's prefill takes `prefill` seconds."""
    prompt = workload.prompt.moment(2) / workload.prompt.mean
    tokens = min(arrivals * workload.prompt.mean, chunk_tokens(server))
    passes = workload.prompt.mean / tokens
    compute = start
    for _ in range(8):
        fixed, at_peak = prefill_parts(server, bandwidth, compute, tokens, prompt)
        left = prefill / passes - fixed
        if left <= 0:
            return start
        compute = at_peak / left
    return compute
