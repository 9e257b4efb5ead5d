"""The shape of a model, as far as memory and time depend on it; every cost is a method beside the numbers it uses.

Counts are those of the whole model; methods that take `tp` give the share of one tensor-parallel rank.
"""

from dataclasses import dataclass

from dfexp.capacity.errors import CapacityError

GIB = 1 << 30
"""Bytes. SGLang's log says GB and means this; decimal gigabytes appear nowhere in this package."""
_DTYPE_BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


def dtype_bytes(name: str) -> int:
    """Bytes of one element. Raises CapacityError for a dtype whose storage this model does not describe."""
    short = name.removeprefix("torch.").lower()
    if short.startswith(("float8", "fp8")):
        return 1
    if short not in _DTYPE_BYTES:
        raise CapacityError(f"dtype {name!r} is not known here; use float32, bfloat16, float16 or fp8_e4m3.")
    return _DTYPE_BYTES[short]


def _divided(count: int, tp: int, what: str) -> int:
    if count % tp:
        raise CapacityError(f"{what} = {count} cannot be divided by tp_size = {tp}; SGLang refuses it.")
    return count // tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Layers that keep keys and values per token (MHA, GQA, MQA), or one `latent` vector (MLA: k_dim is its width with
    the rotary part, v_dim the part that values are read from, kv_heads 1). KV heads replicate beyond tp.
    """

    layers: int
    query_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    latent: bool = False

    def k_bytes(self, tp: int, element: int) -> int:
        """Key bytes of one token on one rank, at `element` bytes per number."""
        return self.layers * max(1, self.kv_heads // tp) * self.k_dim * element

    def v_bytes(self, tp: int, element: int) -> int:
        """Value bytes of one token on one rank; a latent vector serves both and counts as key."""
        return 0 if self.latent else self.layers * max(1, self.kv_heads // tp) * self.v_dim * element

    def token_bytes(self, tp: int, element: int) -> int:
        """KV bytes of one token on one rank."""
        return self.k_bytes(tp, element) + self.v_bytes(tp, element)

    def flops(self, context: float) -> float:
        """FLOPs for one new token that attends to `context` tokens."""
        return 2.0 * self.layers * self.query_heads * (self.k_dim + self.v_dim) * context


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayers:
    """Layers with a recurrent state per request slot. `gdn` (gated delta net): heads and head_dim are those of values,
    groups and state_size those of keys. `mamba2`: as in its config.
    """

    kind: str
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

    def ssm_bytes(self, tp: int, element: int) -> int:
        """Recurrent-state bytes of one slot on one rank."""
        return self.layers * _divided(self.heads, tp, "state heads") * self.head_dim * self.state_size * element

    def conv_bytes(self, tp: int) -> int:
        """Convolution-state bytes of one slot on one rank, in bfloat16."""
        return self.layers * self.conv_channels(tp) * (self.conv_kernel - 1) * 2

    def slot_bytes(self, tp: int, element: int) -> int:
        """All bytes of one slot on one rank."""
        return self.ssm_bytes(tp, element) + self.conv_bytes(tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts: `layers` layers of `count` experts with `parameters` each, `active` of them per token."""

    layers: int
    count: int
    active: int
    parameters: int

    def touched(self, tokens: float) -> float:
        """Expected share of experts that a batch of `tokens` tokens reads, routing taken as uniform."""
        return float(1.0 - (1.0 - self.active / self.count) ** tokens)

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
        idle_parameters: resident and hardly read: an embedding table of its own, a vision tower.
        inner_size: elements that the feed-forward part of one layer writes per token (active experts together).
        ssm_dtype: state dtype that the config asks for; None = float32.
        dtype: element type of weights that are not quantised, and of the KV pool unless a flag says otherwise.

    """

    name: str
    context_length: int
    attention: Attention
    state: StateLayers | None = None
    experts: Experts | None = None
    architecture: str = ""
    hidden_size: int = 0
    layers: int = 0
    body_parameters: int = 0
    head_parameters: int = 0
    idle_parameters: int = 0
    inner_size: int = 0
    ssm_dtype: str | None = None
    dtype: str = "bfloat16"
    multimodal: bool = False

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        return self.experts.total if self.experts else 0
