"""The kernels of a gated delta net (the recurrent layers of Qwen3-Next and its successors) in plain torch.

Each function has the name, the arguments and the layouts by which SGLang's CPU path calls the compiled kernel, and
computes what the layer is defined to compute, in float32, one token after the other: slow, and easy to check. Written
from the definition: a state S of [value width, key width] per value head decays, is corrected towards the new value,
and is read:

    S <- exp(g) S;    S <- S + beta (v - S k) k^T;    o = S q / sqrt(key width)

Shapes: T tokens of all requests one after the other, B requests, H key heads, HV value heads (HV a multiple of H),
K and V the widths of a head, C channels of the convolution, W its width. States live in pools whose first axis is the
slot: convolution [slots, C, W - 1], recurrent [slots, HV, V, K].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .reroute import norms_to_the_cpu_kernel, shared_expert_to_torch


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the decay, and the step size, of each token and value head: both [1, T, HV]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def activated(y: Tensor, activation: str | None) -> Tensor:
    """What follows the convolution: SiLU, or nothing."""
    return F.silu(y) if activation in ("silu", "swish") else y


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Causal convolution per channel over the prompts: x [C, T], weight [C, W]. Leaves the last inputs in the pool."""
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for start, end, slot, goes_on in zip(
        starts, starts[1:], cache_indices.tolist(), has_initial_state.tolist(), strict=False
    ):
        before = conv_states[slot].to(x.dtype) if goes_on else x.new_zeros(conv_states.shape[1:])
        inputs = torch.cat([before, x[:, start:end]], dim=1)
        y = F.conv1d(inputs.float(), weight.float().unsqueeze(1), bias if bias is None else bias.float(), groups=len(x))
        out[:, start:end] = activated(y, activation).to(x.dtype)
        conv_states[slot] = inputs[:, end - start :]
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """The same for one more token of each request: x [B, C]."""
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_states[slots].to(x.dtype), x.unsqueeze(-1)], dim=-1)
    y = (inputs.float() * weight.float()).sum(dim=-1)
    conv_states[slots] = inputs[..., 1:].to(conv_states.dtype)
    return activated(y if bias is None else y + bias.float(), activation).to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """Vectors of length one."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence: q, k [B, time, H, K], v [B, time, HV, V], g, beta [B, time, HV], state [B, HV, V, K].

    A step with g = 0 and beta = 0 changes nothing, so that requests of different lengths can be padded with zeros.
    """
    groups = v.shape[2] // q.shape[2]
    q, k = (unit(x.float()).repeat_interleave(groups, dim=2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    state, v, outputs = state.float(), v.float(), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        missing = (v[:, t] - (state @ k[:, t].unsqueeze(-1)).squeeze(-1)) * beta[:, t].unsqueeze(-1)
        state = state + missing.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, dim=1), state


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, None]:
    """The recurrence over the prompts: q, k [1, T, H, K], v [1, T, HV, V].

    Older versions hand over the states of these requests and store the returned ones; newer ones hand over the whole
    pool with the slots, and expect the states to be changed in it.
    """
    assert use_qk_l2norm_in_kernel
    assert not head_first
    pool = initial_state_indices is not None
    state = initial_state[initial_state_indices.long()] if pool else initial_state
    lengths = cu_seqlens.diff().tolist()
    padded = (torch.nn.utils.rnn.pad_sequence(x[0].split(lengths), batch_first=True) for x in (q, k, v, g, beta))
    outputs, state = delta_rule(*padded, state)
    output = torch.cat([one[:length] for one, length in zip(outputs, lengths, strict=True)]).unsqueeze(0).to(v.dtype)
    if pool:
        initial_state[initial_state_indices.long()] = state.to(initial_state.dtype)
    return output, state, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> Tensor:
    """Gating and recurrence for one more token of each request: q, k [1, B, H, K], v [1, B, HV, V]."""
    assert use_qk_l2norm_in_kernel
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    slots = initial_state_indices.long()
    one_step = (x.transpose(0, 1) for x in (q, k, v, g, beta))
    outputs, state = delta_rule(*one_step, initial_state_source[slots])
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return outputs.transpose(0, 1).to(v.dtype)


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
    """The norm after the recurrence, times its gate."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float() * F.silu(z.float())).to(x.dtype)


# SGLang finds these three among torch's operators, not in this module.
for kernel in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu, fused_rmsnorm_gated_cpu):
    setattr(torch.ops.sgl_kernel, kernel.__name__, kernel)

norms_to_the_cpu_kernel()
shared_expert_to_torch()
