"""Shapes, GPUs and the reference run that the tests of capacity share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from dfexp.capacity.cost import Server
from dfexp.capacity.flags import Flags, Rules, rules
from dfexp.capacity.memory import Free, MemoryPlan, plan_memory
from dfexp.capacity.models import load_model
from dfexp.capacity.planner import Setting
from dfexp.capacity.shape import GIB
from dfexp.capacity.workload import Lengths, Workload, fit_completions, log_normal
from dfexp.hardware import Efficiency, find_gpu

DATA = Path(__file__).resolve().parent.parent / "data" / "capacity"
MODEL = load_model("Qwen3.6-27B")
GPU = find_gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition")
OLD, NEW = rules("0.5.12"), rules("0.5.23")
PROMPTS = 654_676
SIGMA = 0.8428
"""Of log-normal lengths whose 95th percentile is four medians."""


def lines(name: str) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file among the data."""
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").split("\n") if line.strip()]


def free_memory() -> Free:
    """One RTX PRO 6000 with the reference run's weights."""
    return Free(pre_gib=GPU.free_gib, post_gib=GPU.free_gib - MODEL.weights_bytes / GIB)


COMMON: dict[str, Any] = {"context_length": 8192, "mamba_ssm_dtype": "bfloat16"}
BEFORE = Flags(
    mem_fraction_static=0.85,
    mamba_strategy="extra_buffer",
    max_running_requests=64,
    chunked_prefill_size=4096,
    **COMMON,
)
AFTER = Flags(
    mem_fraction_static=0.90,
    mamba_strategy="no_buffer",
    max_running_requests=128,
    chunked_prefill_size=8192,
    **COMMON,
)


def server(flags: Flags) -> Server:
    """A server of the reference run."""
    return Server(shape=MODEL.shape, weight_dtype="bfloat16", gpu=GPU, flags=flags)


def plan(flags: Flags, version: Rules = OLD) -> MemoryPlan:
    """Its memory plan."""
    return plan_memory(MODEL.shape, flags, version, free_memory())


@cache
def early_completions() -> Lengths:
    """Fitted on the first setting's early figures: 438 of mean 2,473 after 280 s, 8 servers x 32 at 670 tok/s."""
    return fit_completions(completions=438 / 256, mean_completion=2473, generated=670 / 32 * 280, limit=8192 - 214)


def workload(share: float | None = 0.0) -> Workload:
    """The reference run's assumed workload."""
    prompt = log_normal(150, SIGMA, limit=8192)
    return Workload(prompt=prompt, completion=early_completions(), shared_prefix_share=share)


def setting(
    flags: Flags, *, concurrency: int | None, share: float | None = 0.0, efficiency: Efficiency | None = None
) -> Setting:
    """The reference run as a planner's setting."""
    return Setting(
        server=server(flags),
        rules=OLD,
        free=free_memory(),
        efficiency=efficiency or GPU.efficiency,
        workload=workload(share),
        prompts=PROMPTS,
        servers=8,
        concurrency=concurrency,
    )
