"""The shape of a model, as far as memory and time depend on it; every cost is a method beside the numbers it uses.

All counts are those of the whole model; methods that take `tp` give the share of one attention tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dfexp.capacity.errors import CapacityError
from dfexp.capacity.units import Bytes

DTYPE_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2,
    "float8": 1, "float8_e4m3": 1, "float8_e5m2": 1, "float8_e4m3fn": 1, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
    "bf16": 2, "fp16": 2, "fp32": 4,
}  # fmt: skip


def dtype_bytes(name: str) -> int:
    """Bytes of one element. Raises CapacityError for a dtype whose storage this model does not describe."""
    try:
        return DTYPE_BYTES[name.removeprefix("torch.").lower()]
    except KeyError:
        raise CapacityError(
            f"dtype {name!r} is not known here; use one of float32, bfloat16, float16, fp8_e4m3, fp8_e5m2 "
            "(4-bit caches keep scales beside the values, which this model does not describe)."
        ) from None


def _divided(count: int, tp: int, what: str) -> int:
    if count % tp:
        raise CapacityError(
            f"{what} = {count} cannot be divided by an attention tp of {tp}; SGLang refuses it. "
            f"Choose a tp that divides {count}."
        )
    return count // tp


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Layers that keep keys and values per token (MHA, GQA, MQA). KV heads are replicated when tp exceeds them."""

    layers: int
    query_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int

    def k_bytes(self, tp: int, element: int) -> Bytes:
        """Key bytes of one token on one rank."""
        return Bytes(self.layers * max(1, self.kv_heads // tp) * self.k_dim * element)

    def v_bytes(self, tp: int, element: int) -> Bytes:
        """Value bytes of one token on one rank."""
        return Bytes(self.layers * max(1, self.kv_heads // tp) * self.v_dim * element)

    def token_bytes(self, tp: int, element: int) -> Bytes:
        """KV bytes of one token on one rank."""
        return Bytes(self.k_bytes(tp, element) + self.v_bytes(tp, element))

    def flops(self, context: float) -> float:
        """FLOPs for one new token that attends to `context` tokens."""
        return 2.0 * self.layers * self.query_heads * (self.k_dim + self.v_dim) * context


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Layers that keep one compressed vector per token (MLA); every rank keeps all of it."""

    layers: int
    query_heads: int
    kv_lora_rank: int
    rope_dim: int

    def k_bytes(self, tp: int, element: int) -> Bytes:
        """Bytes of one token on one rank; there is no separate value pool."""
        del tp
        return Bytes(self.layers * (self.kv_lora_rank + self.rope_dim) * element)

    def v_bytes(self, tp: int, element: int) -> Bytes:
        """Zero: the latent vector serves both."""
        del tp, element
        return Bytes(0)

    def token_bytes(self, tp: int, element: int) -> Bytes:
        """KV bytes of one token on one rank."""
        return self.k_bytes(tp, element)

    def flops(self, context: float) -> float:
        """FLOPs for one new token that attends to `context` tokens, in the absorbed form that decoding uses."""
        return 2.0 * self.layers * self.query_heads * (2 * self.kv_lora_rank + self.rope_dim) * context


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayers:
    """Layers with a recurrent state per request slot.

    `gdn` (gated delta net): heads = value heads, state_size = key dim, groups = key heads. `mamba2`: as in its config.
    `short_conv`: only a convolution over `heads * head_dim` channels, no recurrent state.
    """

    kind: Literal["gdn", "mamba2", "short_conv"]
    layers: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_kernel: int

    def conv_channels(self, tp: int = 1) -> int:
        """Channels of the convolution on one rank; groups that tp does not divide grow to tp."""
        groups = self.groups if self.groups % tp == 0 else tp
        return _divided(self.heads * self.head_dim + 2 * groups * self.state_size, tp, "convolution channels")

    def ssm_bytes(self, tp: int, element: int) -> Bytes:
        """Recurrent-state bytes of one slot on one rank."""
        heads = _divided(self.heads, tp, "state heads")
        return Bytes(self.layers * heads * self.head_dim * self.state_size * element)

    def conv_bytes(self, tp: int, element: int) -> Bytes:
        """Convolution-state bytes of one slot on one rank."""
        return Bytes(self.layers * self.conv_channels(tp) * (self.conv_kernel - 1) * element)

    def slot_bytes(self, tp: int, ssm_element: int, conv_element: int) -> Bytes:
        """All bytes of one slot on one rank."""
        return Bytes(self.ssm_bytes(tp, ssm_element) + self.conv_bytes(tp, conv_element))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts: `layers` layers of `count` experts, `active` of them per token."""

    layers: int
    count: int
    active: int
    parameters: int

    def touched(self, tokens: float) -> float:
        """Expected share of experts that a batch of `tokens` tokens reads, routing taken as uniform."""
        return 1.0 - (1.0 - self.active / self.count) ** tokens if tokens > 0 else 0.0

    @property
    def total(self) -> int:
        """Parameters of all experts."""
        return self.layers * self.count * self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model.

    Attributes:
        body_parameters: parameters that every token uses, without embedding table, output head and routed experts.
        head_parameters: the output head; kept in two bytes by quantised checkpoints.
        embedding_parameters: the table, 0 when the head shares it; resident but hardly read.
        other_parameters: resident and unused when text is generated (a vision tower).
        inner_size: elements that the feed-forward part of one layer writes per token (active experts together).
        ssm_dtype: state dtype that the config asks for; None = float32.
        dtype: element type of weights that are not quantised, and of the KV pool unless a flag says otherwise.

    """

    name: str
    architecture: str
    hidden_size: int
    layers: int
    vocab_size: int
    context_length: int
    attention: GroupedAttention | LatentAttention
    state: StateLayers | None
    experts: Experts | None
    body_parameters: int
    head_parameters: int
    embedding_parameters: int
    other_parameters: int
    inner_size: int
    ssm_dtype: str | None = None
    dtype: str = "bfloat16"
    multimodal: bool = False

    @property
    def parameters(self) -> int:
        """All parameters."""
        experts = self.experts.total if self.experts else 0
        return self.body_parameters + self.head_parameters + self.embedding_parameters + self.other_parameters + experts
