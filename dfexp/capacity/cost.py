"""Seconds of one decode step and of one prefill batch, from bytes and FLOPs: the arithmetic of the roofline.

Decoding is one memory-bound sweep, so its step takes the longer of bytes and FLOPs, and the least time of its many
small kernels. A prefill batch is a chain of kernels of different kinds, so its parts add up: matrix products (the
longer of both), routed experts (both: few rows per expert leave neither hidden), attention in 16 bits, activations
written and read, and the recurrence, whose time was measured by others.
"""

from dataclasses import dataclass

from dfexp.capacity.flags import Flags
from dfexp.capacity.memory import slot_bytes
from dfexp.capacity.shape import ModelShape, dtype_bytes
from dfexp.hardware import Efficiency, Gpu

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

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together that one request may have."""
        return self.flags.context_length or self.shape.context_length


def weight_bytes(server: Server, tokens: float) -> float:
    """Weight bytes that one rank reads for a batch of `tokens` tokens."""
    shape = server.shape
    experts = shape.experts.total * shape.experts.touched(tokens) if shape.experts else 0.0
    return ((shape.body_parameters + experts) * server.element + shape.head_parameters * 2) / server.flags.tp_size


def decode_bytes(server: Server, running: float, context: float) -> float:
    """All bytes that one rank moves in one step: weights, each request's state read and written, its KV read."""
    shape, flags = server.shape, server.flags
    kv = shape.attention.token_bytes(flags.tp_size, flags.kv_element(shape)) * context
    return weight_bytes(server, running) + running * (2.0 * slot_bytes(shape, flags) + kv)


def decode_step_s(server: Server, efficiency: Efficiency, running: float, context: float) -> float:
    """Seconds of one step of `running` requests that hold `context` tokens on average."""
    shape, gpu, experts = server.shape, server.gpu, server.shape.experts
    moved = decode_bytes(server, running, context) / (gpu.bandwidth_bytes_per_s * efficiency.bandwidth)
    active = experts.layers * experts.active * experts.parameters if experts else 0
    parameters = shape.body_parameters + shape.head_parameters + active
    products = 2.0 * running * parameters / gpu.flops(server.element)
    mixing = running * shape.attention.flops(context) / gpu.flops_16
    return max(moved, (products + mixing) / server.flags.tp_size / efficiency.compute) + small_kernels_s(server)


def small_kernels_s(server: Server) -> float:
    """Least time of the kernels of one step that move next to nothing: norms, gates, routing, quantising."""
    shape, eight = server.shape, server.element == 1
    per_layer = 2 + 4 * eight
    mixing = 4 * (shape.state.layers if shape.state else 0) + 4 * shape.attention.layers
    routing = (7 + eight) * shape.experts.layers if shape.experts else 0
    return KERNEL_S * (per_layer * shape.layers + mixing + routing)


def prefill_s(server: Server, efficiency: Efficiency, tokens: float, prompt: float) -> float:
    """Seconds of one prefill batch of `tokens` tokens that belong to prompts of `prompt` tokens each."""
    seconds, at_peak = prefill_parts(server, efficiency, tokens, prompt)
    return seconds + at_peak / efficiency.compute


def prefill_parts(server: Server, efficiency: Efficiency, tokens: float, prompt: float) -> tuple[float, float]:
    """The same in two parts: seconds that do not depend on the compute efficiency, and seconds at full compute peak.

    Matrix products count where they belong at these efficiencies: with the bytes when reading weights takes longer.
    """
    shape, gpu, tp = server.shape, server.gpu, server.flags.tp_size
    rate = gpu.bandwidth_bytes_per_s * efficiency.bandwidth
    peak = gpu.flops(server.element) * tp
    fixed = activation_bytes(shape, server.element) * tokens / tp / rate
    if shape.state is not None:
        chain, heads = min(tokens, prompt) / SCAN_CHUNK + 1, shape.state.heads / tp
        fixed += shape.state.layers * (chain * SCAN_CHUNK_S + tokens / SCAN_CHUNK * heads * SCAN_HEAD_S)
    at_peak = tokens * shape.attention.flops(prompt / 2) / (gpu.flops_16 * tp)
    body_s = 2.0 * tokens * shape.body_parameters / peak
    body_read_s = (shape.body_parameters * server.element + shape.head_parameters * 2) / tp / rate
    if body_s / efficiency.compute >= body_read_s:
        at_peak += body_s
    else:
        fixed += body_read_s
    if shape.experts is not None:
        experts = shape.experts
        rows = tokens * experts.active / experts.count
        waste = min(1 + (EXPERT_TILE - 1) / 2 / rows, EXPERT_TILE / 2)
        flops = 2.0 * tokens * experts.layers * experts.active * experts.parameters * waste
        at_peak += flops / (peak * EXPERT_SHARE)
        fixed += experts.total * experts.touched(tokens) * server.element / tp / rate
    return fixed, at_peak


def activation_bytes(shape: ModelShape, element: int) -> float:
    """Bytes that the kernels between two matrix products write and read for one token, counted op by op, in 16 bits.

    The recurrence itself is not among them (its time is measured). 8-bit weights add quantising each product's input.
    """
    hidden, attention = shape.hidden_size, shape.attention
    quantise = 0 if element > 1 else 2 * 3 * hidden
    residuals = shape.layers * (2 * 4 * hidden * 2 + quantise)
    heads = 11 * attention.query_heads + 4 * attention.kv_heads
    mixing = attention.layers * 2 * heads * attention.k_dim
    if shape.state is not None:
        values, keys = shape.state.heads * shape.state.head_dim, shape.state.groups * shape.state.state_size
        mixing += shape.state.layers * 2 * (9 * values + 10 * keys)
    feed = shape.layers * 2 * (3 * shape.inner_size + hidden)
    if shape.experts is not None:
        feed += shape.experts.layers * 2 * (3 * shape.experts.active * hidden + 2 * shape.experts.count)
    return float(residuals + mixing + feed)
