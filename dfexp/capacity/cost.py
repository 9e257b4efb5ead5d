"""Seconds of one decode step and of one prefill batch, from bytes and FLOPs: the arithmetic of the roofline.

Decoding is one memory-bound sweep, so its step takes the longer of bytes and FLOPs, and the least time of its many
small kernels. A prefill batch is a chain of kernels of different kinds, so its parts add up: matrix products (the
longer of both), routed experts (both: few rows per expert leave neither hidden), attention in 16 bits, activations
written and read, and the recurrence, whose time was measured by others.
"""

from __future__ import annotations

from dataclasses import dataclass

from dfexp.capacity.flags import Flags
from dfexp.capacity.memory import CONV_BYTES
from dfexp.capacity.shape import LatentAttention, ModelShape, dtype_bytes
from dfexp.hardware import Gpu

SCAN_CHUNK = 64
"""Tokens that a linear-attention kernel handles between two states."""
SCAN_CHUNK_S = 1.4e-6
SCAN_HEAD_S = 0.077e-6
"""Time of one such chunk, all kernels of the recurrence: a chain that no parallelism shortens, and a part per head.
Public measurements of the Triton kernels on an H100 (flashinfer pull request 3866: 8,192 tokens with 8, 32 and 48 heads
of 128 take 0.26, 0.46 and 0.65 ms)."""
KERNEL_S = 2e-6
"""Least time of a kernel inside a CUDA graph; it counts for the small ones, whose bytes are negligible."""
EXPERT_TILE = 128
"""Rows of a grouped-GEMM tile; an expert's last tile is half empty on average."""
EXPERT_SHARE = 0.5
"""What grouped products reach of the efficiency of dense ones: a round prior from public kernel benchmarks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What a GPU kind reaches of its peaks.

    Attributes: bandwidth, compute, shares of the peaks; provenance, the measurement behind them; uncertainty, relative
    error (one sigma) to expect of a rate predicted with them.
    """

    bandwidth: float
    compute: float
    provenance: str
    uncertainty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server: a model with its weights' dtype, on `flags.tp_size` GPUs of one kind."""

    shape: ModelShape
    weight_dtype: str
    gpu: Gpu
    flags: Flags

    @property
    def element(self) -> int:
        """Bytes of a weight outside embeddings and head."""
        return dtype_bytes(self.weight_dtype)


def weight_bytes(server: Server, tokens: float) -> float:
    """Weight bytes that one rank reads for a batch of `tokens` tokens."""
    shape = server.shape
    experts = shape.experts.total * shape.experts.touched(tokens) if shape.experts else 0.0
    return ((shape.body_parameters + experts) * server.element + shape.head_parameters * 2) / server.flags.tp_size


def state_bytes(server: Server) -> float:
    """State bytes that one rank moves per running request and step: read once, written once."""
    state = server.shape.state
    if state is None:
        return 0.0
    ssm = dtype_bytes(server.flags.ssm_dtype(server.shape))
    return 2.0 * state.slot_bytes(server.flags.attention_tp, ssm, CONV_BYTES)


def kv_bytes(server: Server, context: float) -> float:
    """KV bytes that one rank reads per running request and step."""
    element = server.flags.kv_element(server.shape)
    return server.shape.attention.token_bytes(server.flags.attention_tp, element) * context


def decode_bytes(server: Server, running: float, context: float) -> float:
    """All bytes that one rank moves in one step."""
    return weight_bytes(server, running) + running * (state_bytes(server) + kv_bytes(server, context))


def decode_step_s(server: Server, efficiency: Efficiency, running: float, context: float) -> float:
    """Seconds of one step of `running` requests that hold `context` tokens on average."""
    shape, gpu = server.shape, server.gpu
    moved = decode_bytes(server, running, context) / (gpu.bandwidth_bytes_per_s * efficiency.bandwidth)
    products = 2.0 * running * (_products(shape) + shape.head_parameters) / gpu.flops(server.element)
    mixing = running * shape.attention.flops(context) / gpu.flops_16
    return max(moved, (products + mixing) / server.flags.tp_size / efficiency.compute) + small_kernels_s(server)


def small_kernels_s(server: Server) -> float:
    """Least time of the kernels of one step that move next to nothing: norms, gates, routing, quantising."""
    shape, eight = server.shape, server.element == 1
    per_layer = 2 + 4 * eight
    mixing = 4 * (shape.state.layers if shape.state else 0) + 4 * shape.attention.layers
    routing = (7 + eight) * shape.experts.layers if shape.experts else 0
    return KERNEL_S * (per_layer * shape.layers + mixing + routing)


def _products(shape: ModelShape) -> float:
    """Parameters that one token is multiplied with, head excluded."""
    experts = shape.experts.layers * shape.experts.active * shape.experts.parameters if shape.experts else 0
    return shape.body_parameters + experts


def prefill_s(server: Server, efficiency: Efficiency, tokens: float, prompt: float) -> float:
    """Seconds of one prefill batch of `tokens` tokens that belong to prompts of `prompt` tokens each."""
    seconds, per_compute = prefill_parts(server, efficiency.bandwidth, efficiency.compute, tokens, prompt)
    return seconds + per_compute / efficiency.compute


def prefill_parts(
    server: Server, bandwidth: float, compute: float, tokens: float, prompt: float
) -> tuple[float, float]:
    """The same in two parts: seconds that do not depend on the compute efficiency, and seconds at full compute peak.

    Matrix products count where they belong at these efficiencies: with the bytes when reading weights takes longer.
    """
    shape, gpu, tp = server.shape, server.gpu, server.flags.tp_size
    rate = gpu.bandwidth_bytes_per_s * bandwidth
    peak = gpu.flops(server.element) * tp
    fixed = activation_bytes(shape, server.element) * tokens / tp / rate
    scanned = min(tokens, prompt)
    if shape.state is not None and shape.state.state_size:
        heads = shape.state.heads / tp
        chain, throughput = scanned / SCAN_CHUNK + 1, tokens / SCAN_CHUNK
        fixed += shape.state.layers * (chain * SCAN_CHUNK_S + throughput * heads * SCAN_HEAD_S)
    at_peak = tokens * shape.attention.flops(prompt / 2) / (gpu.flops_16 * tp)
    body_s = 2.0 * tokens * shape.body_parameters / peak
    body_read_s = (shape.body_parameters * server.element + shape.head_parameters * 2) / tp / rate
    if body_s / compute >= body_read_s:
        at_peak += body_s
    else:
        fixed += body_read_s
    if shape.experts is not None:
        experts = shape.experts
        rows = tokens * experts.active / experts.count
        waste = (rows + (EXPERT_TILE - 1) / 2) / rows if rows >= 1 else EXPERT_TILE / 2
        flops = 2.0 * tokens * experts.layers * experts.active * experts.parameters * min(waste, EXPERT_TILE / 2)
        at_peak += flops / (peak * EXPERT_SHARE)
        fixed += experts.total * experts.touched(tokens) * server.element / tp / rate
    return fixed, at_peak


def activation_bytes(shape: ModelShape, element: int) -> float:
    """Bytes that the kernels between two matrix products write and read for one token, counted op by op, in 16 bits.

    The recurrence itself is not among them (its time is measured). 8-bit weights add quantising each product's input.
    """
    hidden, layers = shape.hidden_size, shape.layers
    quantise = 0 if element > 1 else 2 * 3 * hidden
    residuals = layers * (2 * 4 * hidden * 2 + quantise)
    attention = shape.attention
    width = attention.kv_lora_rank + attention.rope_dim if isinstance(attention, LatentAttention) else attention.k_dim
    kv_heads = 1 if isinstance(attention, LatentAttention) else attention.kv_heads
    mixing = attention.layers * 2 * (11 * attention.query_heads * width + 4 * kv_heads * width)
    if shape.state is not None:
        state = shape.state
        values, keys = state.heads * state.head_dim, state.groups * state.state_size
        mixing += state.layers * 2 * (9 * values + 10 * keys)
    feed = layers * 2 * (3 * shape.inner_size + hidden)
    if shape.experts is not None:
        feed += shape.experts.layers * 2 * (3 * shape.experts.active * hidden + 2 * shape.experts.count)
    return float(residuals + mixing + feed)
