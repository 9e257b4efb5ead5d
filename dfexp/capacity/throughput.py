"""Steady state of one server under a workload: how many requests run, what each step costs, what comes out.

A completion costs its prefill, which stops decoding, and its share of as many decode steps as it has tokens:
`seconds per completion = prefill + mean completion x step / running`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from dfexp.capacity.cost import Server, decode_bytes, decode_step_s, prefill_s, small_kernels_s
from dfexp.capacity.errors import CapacityError
from dfexp.capacity.memory import MemoryPlan
from dfexp.capacity.workload import Workload
from dfexp.hardware import Efficiency
from dfexp.params_plan import SamplePart

RESERVED_TOKENS = 4096
"""SGLang reserves at most this many tokens of a request's answer when it decides on admission."""
RESERVE_RATIO, LOWEST_RESERVE = 0.7, 0.14
"""The reserved share starts at 0.7 and falls by steps to 0.14 of that."""
SLOTS_HELD = {"no_buffer": 2.0, "extra_buffer": 3.5, "extra_buffer_lazy": 3.0}
"""State slots that a running request was seen to hold; the lazy value is between the other two, not measured."""
MANY_SIGMAS = 99.0

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
    server: Server, workload: Workload, tokens: float, *, page: int = 1, ratio: float | None = None
) -> float:
    """Requests that SGLang's admission test lets run at once in a KV pool of `tokens` tokens.

    Args: ratio, the reserved share of what running requests may still generate (default: the lowest, which it reaches
    after some hundred steps; 0.7 is where a cold server starts).
    """
    prompt, shared = workload.prompt.mean, _shared_tokens(server, workload)
    room = server.context_length - prompt
    most = room if workload.max_tokens == "fit" else min(float(workload.max_tokens), room)
    left = min(max(0.0, most - workload.completion.biased_mean / 2), RESERVED_TOKENS)
    if ratio is None:
        ratio = min(1.0, RESERVE_RATIO * LOWEST_RESERVE * server.flags.schedule_conservativeness)
    newcomer = prompt - shared + min(most, RESERVED_TOKENS) + page
    return max(0.0, (tokens - shared - newcomer) / (workload.context - shared + left * ratio))


def _shared_tokens(server: Server, workload: Workload) -> float:
    """Tokens of each prompt that the radix cache keeps once for all."""
    share = 0.0 if server.flags.disable_radix_cache else workload.shared_prefix_share or 0.0
    return workload.prompt.mean * share


def largest_graph(server: Server) -> int:
    """Requests that the largest captured decode graph covers; 0 without graphs. SGLang's defaults by GPU memory."""
    flags, memory_gib = server.flags, server.gpu.memory_mib / 1024
    if flags.disable_cuda_graph:
        return 0
    if flags.cuda_graph_max_bs_decode is not None:
        return flags.cuda_graph_max_bs_decode
    limits = ((20, 8, 8), (35, 24, 80), (60, 32, 160), (160, 256, 512), (float("inf"), 512, 512))
    narrow, wide = next((narrow, wide) for most_gib, narrow, wide in limits if memory_gib < most_gib)
    return wide if flags.tp_size >= 4 else narrow


def chunk_tokens(server: Server) -> int:
    """Tokens of one prefill batch at most."""
    flags, memory_gib = server.flags, server.gpu.memory_mib / 1024
    defaults = ((35, 2048), (60, 4096), (160, 8192), (float("inf"), 16384))
    chunk = flags.chunked_prefill_size or next(tokens for most_gib, tokens in defaults if memory_gib < most_gib)
    return flags.max_prefill_tokens if chunk < 0 else min(chunk, flags.max_prefill_tokens)


def prefill_per_request_s(server: Server, efficiency: Efficiency, workload: Workload, arrivals: float) -> float:
    """Prefill seconds per request when `arrivals` requests are admitted together; cached prefixes are not computed."""
    computed = max(1.0, workload.prompt.mean - _shared_tokens(server, workload))
    tokens = min(max(1.0, arrivals) * computed, chunk_tokens(server))
    return prefill_s(server, efficiency, tokens, workload.prompt.biased_mean) * computed / tokens


def predict(
    server: Server, plan: MemoryPlan, efficiency: Efficiency, workload: Workload, *, concurrency: int | None = None
) -> Prediction:
    """The steady state of a server with this memory plan.

    Args: concurrency, requests that the client keeps in flight at this server (default: never the limit).
    Raises CapacityError: the KV pool admits not even one request.
    """
    tokens, completion, shared = plan.max_total_num_tokens, workload.completion, _shared_tokens(server, workload)
    limits: list[tuple[float, LimitedBy]] = [
        (float(plan.max_running_requests), "request cap"),
        (admissible(server, workload, tokens, page=plan.resolved.page_size), "KV admission"),
    ]
    if concurrency is not None:
        limits.append((float(concurrency), "client concurrency"))
    running, limited_by = min(limits, key=lambda limit: limit[0])
    if running < 1:
        raise CapacityError(
            f"the KV pool of {tokens} tokens admits no request of {workload.context:.0f} tokens; "
            "raise mem_fraction_static or lower max_tokens."
        )
    step, prefill = _step_and_prefill_s(server, efficiency, workload, running)
    rate = 1.0 / (prefill + completion.mean * step / running)
    kept = running * (workload.context - shared) + shared
    spread = sqrt(running * workload.context_variance)
    slots, held = plan.max_mamba_cache_size, SLOTS_HELD.get(plan.resolved.strategy, 1.0)
    in_use = running * (held if plan.resolved.radix_cache else 1.0)
    return Prediction(
        running=running,
        limited_by=limited_by,
        context=workload.context,
        full_token_usage=kept / tokens,
        mamba_usage=min(1.0, in_use / slots) if slots else None,
        step_s=step,
        prefill_share=rate * prefill,
        tok_per_s=rate * completion.mean,
        completions_per_s=rate,
        retraction_sigmas=min(MANY_SIGMAS, (tokens - kept) / spread) if spread else MANY_SIGMAS,
        uncertainty=efficiency.uncertainty,
        beyond_graph=running > largest_graph(server),
    )


def _step_and_prefill_s(
    server: Server, efficiency: Efficiency, workload: Workload, running: float
) -> tuple[float, float]:
    """Seconds of a decode step, and of a request's prefill. Requests of one length arrive all together, in waves;
    others as fast as they finish.
    """
    step = decode_step_s(server, efficiency, running, workload.context)
    arrivals = running if workload.completion.is_constant else 1.0
    prefill = prefill_per_request_s(server, efficiency, workload, arrivals)
    for _ in range(0 if workload.completion.is_constant else 2):
        rate = 1.0 / (prefill + workload.completion.mean * step / running)
        prefill = prefill_per_request_s(server, efficiency, workload, 1.0 + rate * step)
    return step, prefill


def calibrate(
    server: Server, workload: Workload, samples: Sequence[SamplePart], start: Efficiency, *, provenance: str
) -> Efficiency:
    """Efficiencies that reproduce the samples: the bandwidth's; the compute's stays that of `start`.

    Samples of several batch sizes are averaged; their spread becomes the uncertainty, which is at least 3 %, and 5 % of
    one sample, which says nothing of other batch sizes.
    Raises CapacityError: no samples, or a sample faster than the hardware's peak.
    """
    if not samples:
        raise CapacityError("calibration needs at least one sample of a steady state.")
    found = [_bandwidth(server, workload, sample, start) for sample in samples]
    bandwidth = sum(found) / len(found)
    if bandwidth > 1.05:
        raise CapacityError(
            f"the samples need {bandwidth:.2f} of {server.gpu.name}'s peak bandwidth, which cannot be; "
            "check running, context and the weights' dtype."
        )
    spread = max(abs(item / bandwidth - 1) for item in found)
    least = 0.03 if len(found) > 1 else 0.05
    return replace(start, bandwidth=bandwidth, provenance=provenance, uncertainty=max(least, spread))


def _bandwidth(server: Server, workload: Workload, sample: SamplePart, start: Efficiency) -> float:
    """The bandwidth efficiency that reproduces one sample."""
    running, tokens, found = sample.running, workload.completion.mean, start
    context = sample.context or workload.context
    moved_at_peak = decode_bytes(server, running, context) / server.gpu.bandwidth_bytes_per_s
    cycle, least = running / sample.tok_per_s, small_kernels_s(server)
    for _ in range(20):
        step = decode_step_s(server, found, running, context)
        prefill = prefill_per_request_s(server, found, workload, 1.0 + sample.tok_per_s / tokens * step)
        decoding = cycle - running * prefill / tokens - least
        found = replace(found, bandwidth=moved_at_peak / max(1e-9, decoding))
    return found.bandwidth
