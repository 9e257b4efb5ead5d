"""The planner's answers in words: one sentence per candidate, marks to heed, the verdict on the radix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dfexp.capacity.cost import Server
from dfexp.capacity.throughput import Prediction, largest_graph

if TYPE_CHECKING:
    from dfexp.capacity.planner import Candidate

LEAST_SIGMAS = 3.0
"""Room in the KV pool that a winner must leave, in standard deviations of what running requests hold together."""


def sentence(item: Candidate, current: Candidate) -> str:
    """One sentence: what changes, what that does to the number of running requests, and the gain."""
    new, old = item.prediction, current.prediction
    gain = current.hours / item.hours
    if not item.changes:
        if new.running <= old.running:
            return "The current flags are already the best found."
        return (
            f"With the flags as they are, {new.running:.0f} instead of {old.running:.0f} requests run "
            f"once the client keeps that many in flight: {gain:.2f} times the rate."
        )
    return (
        f"{_mechanism(item, current)}, so {new.running:.0f} requests run instead of {old.running:.0f}: "
        f"{gain:.2f} times the rate."
    )


def _mechanism(item: Candidate, current: Candidate) -> str:
    changed, old = item.changes, current.memory
    slots, strategy = item.memory.slots_per_request, item.memory.resolved.strategy
    if "weights" in changed:
        return "FP8 weights free memory and halve the bytes of each step"
    if "mamba_ssm_dtype" in changed:
        share = "half" if item.memory.slot_bytes < old.slot_bytes else "twice"
        return f"States in {item.flags.mamba_ssm_dtype} take {share} the memory and {share} the traffic"
    if "kv_cache_dtype" in changed:
        return f"A KV pool in {item.flags.kv_cache_dtype} holds twice the tokens and halves its traffic"
    if changed.get("disable_radix_cache") == (False, True):
        overlap = " and overlap scheduling stays on" if slots and not old.resolved.overlap else ""
        return f"Without the radix cache a request needs {slots} state slot instead of {old.slots_per_request}{overlap}"
    if strategy != old.resolved.strategy:
        return f"{strategy} needs {slots} state slots a request instead of {old.slots_per_request}"
    if "mem_fraction_static" in changed:
        return f"The measured free memory allows mem_fraction_static {item.flags.mem_fraction_static:g}"
    if item.memory.max_mamba_cache_size != old.max_mamba_cache_size:
        tokens = item.memory.max_total_num_tokens
        return f"A state pool of {item.memory.max_mamba_cache_size} slots leaves {tokens:,} KV tokens"
    return "The request cap fits what the pools can hold"


def marks(server: Server, prediction: Prediction) -> tuple[str, ...]:
    """What to know of a configuration before using it."""
    found = []
    if prediction.beyond_graph:
        found.append(
            f"{prediction.running:.0f} requests exceed the largest CUDA graph ({largest_graph(server)}), so steps run "
            "eagerly; raise cuda_graph_max_bs if memory allows."
        )
    if prediction.retraction_sigmas < LEAST_SIGMAS:
        found.append(
            f"the KV pool leaves only {prediction.retraction_sigmas:.1f} standard deviations of room: "
            "expect retractions."
        )
    return tuple(found)


def verdict(share: float | None, threshold: float) -> str:
    """Whether the radix cache pays, in words."""
    if threshold >= 1.0:
        limit = "at any shared-prefix share, going without the radix cache is faster by this model"
    elif threshold <= 0.0:
        limit = "going without the radix cache gains nothing"
    else:
        limit = f"going without the radix cache is faster below a shared-prefix share of {threshold:.1%}"
    if share is None:
        return f"{limit}; the share of these prompts was not measured, so it is no candidate: measure it on them."
    return f"{limit}; these prompts share {share:.1%}."
