"""Points two places of SGLang, which would run a Triton kernel on a processor without AMX, at plain torch."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor


def module(name: str) -> ModuleType | None:
    """A module of SGLang; None in a version that has it elsewhere or not at all."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def norms_to_the_cpu_kernel() -> None:
    """The gated norms have a CPU kernel of their own, but ask for AMX before they take it. Ours needs none."""
    for package in ("sglang.srt.layers.attention.fla", "sglang.kernels.ops.attention.fla"):
        for name in ("fused_norm_gate", "layernorm_gated"):
            if found := module(f"{package}.{name}"):
                found._use_cpu = True


def gated_sum(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, output: Tensor, *, do_add: bool
) -> None:
    """output = [output +] sigmoid(hidden_states . gate_weight) * shared_output, in place."""
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float()).unsqueeze(-1)
    gated = gate * shared_output.float()
    output.copy_(output.float() + gated if do_add else gated)


def shared_expert_to_torch() -> None:
    """0.5.23 gates the shared expert of a mixture in a Triton kernel that has no CPU branch; 0.5.12 has none of it."""
    elementwise = module("sglang.kernels.ops.elementwise.elementwise")
    if elementwise is not None:
        elementwise._launch_fused_gate_sigmoid_mul = gated_sum
