"""A model's shape from its Hugging Face `config.json`; pure, the reading is done in `models`."""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from dfexp.capacity.errors import CapacityError, UnsupportedModel
from dfexp.capacity.shape import Attention, Experts, ModelShape, StateLayers

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_STATE_TYPES = ("linear_attention", "mamba")
_LAYER_TYPES = ("full_attention", "attention", *_STATE_TYPES)
_BLOCKS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
"""Nemotron-H's `layers_block_type`, as the letters of the older `hybrid_override_pattern`."""
_STATES: dict[str, dict[str, tuple[str, ...]]] = {
    "gdn": {
        "heads": ("linear_num_value_heads",), "head_dim": ("linear_value_head_dim",),
        "groups": ("linear_num_key_heads",), "state_size": ("linear_key_head_dim",),
        "conv_kernel": ("linear_conv_kernel_dim",),
    },
    "mamba2": {
        "heads": ("mamba_num_heads", "mamba_n_heads"), "head_dim": ("mamba_head_dim", "mamba_d_head"),
        "groups": ("n_groups", "mamba_n_groups"), "state_size": ("ssm_state_size", "mamba_d_state"),
        "conv_kernel": ("conv_kernel", "mamba_d_conv"),
    },
}  # fmt: skip
"""Sizes of layers with a recurrent state, and the fields that tell them."""
_ADVICE = "Launch it with explicit limits and read them from its startup log instead."


class Fields:
    """Fields under any of their names; null is the same as absent."""

    def __init__(self, values: Mapping[str, Any], owner: str) -> None:
        self._values, self._owner = values, owner

    def get(self, *names: str) -> Any:
        """The first of these that is there, or None."""
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least 1, or the default. Raises CapacityError: missing, or not such a number."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 10**12:
            raise CapacityError(f"{self._owner}: {' or '.join(names)} must be a count, not {str(value)[:80]!r}.")
        return value


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a config describes.

    Args: config, the parsed config.json (vision models: with their text part nested); name, for messages.
    Raises UnsupportedModel: KDA, lightning, sliding-window or sparse-index layers, or an architecture not known here;
    CapacityError: a field is missing or impossible.
    """
    text: Mapping[str, Any] = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), {})
    fields = Fields({**config, **{key: value for key, value in text.items() if value is not None}}, name)
    kind, architecture = str(fields.get("model_type") or ""), str((fields.get("architectures") or [""])[0])
    table = json.loads(resources.files("dfexp.capacity").joinpath("architectures.json").read_text(encoding="utf-8"))
    _refuse(fields, kind, architecture, table, name)
    hidden = fields.count("hidden_size")
    layers = fields.count("num_hidden_layers", default=len(_pattern(fields) or "") or None)
    vocabulary, vision = hidden * fields.count("vocab_size"), config.get("vision_config")
    attention_layers, state_layers = _layer_counts(fields, layers, name, needs_pattern=kind == "nemotron_h")
    if attention_layers < 1:
        raise CapacityError(f"{name}: none of {layers} layers has attention; check layer_types or its interval.")
    attention = _attention(fields, attention_layers, hidden)
    state = _state(fields, state_layers, "mamba2" if kind in table["mamba2"] else "gdn") if state_layers else None
    experts, feed_parameters, inner = _feedforward(fields, layers, hidden)
    mixing = _attention_parameters(fields, attention, hidden) + (_state_parameters(state, hidden) if state else 0)
    idle = 0 if fields.get("tie_word_embeddings") else vocabulary
    ssm_dtype = fields.get("mamba_ssm_dtype")
    return ModelShape(
        name=name,
        architecture=architecture,
        hidden_size=hidden,
        layers=layers,
        context_length=fields.count("max_position_embeddings", default=32768),
        attention=attention,
        state=state,
        experts=experts,
        body_parameters=mixing + feed_parameters,
        head_parameters=vocabulary,
        idle_parameters=idle + (_vision_parameters(vision) if isinstance(vision, Mapping) else 0),
        inner_size=inner,
        ssm_dtype=ssm_dtype if ssm_dtype in ("float32", "bfloat16", "float16") else None,
        dtype=str(fields.get("dtype", "torch_dtype") or "bfloat16").removeprefix("torch."),
        multimodal=isinstance(vision, Mapping),
    )


def _refuse(fields: Fields, kind: str, architecture: str, table: Mapping[str, Any], name: str) -> None:
    """Raise UnsupportedModel for what is recognised and not modelled, and for what is not recognised."""
    what, types = table["refused"].get(kind), fields.get("layer_types") or []
    if "kda_layers" in (fields.get("linear_attn_config") or {}):
        what = "KDA layers"
    elif "sliding_attention" in types or "chunked_attention" in types:
        what = "sliding-window layers, which have a pool of their own,"
    elif fields.get("index_topk") is not None:
        what = "a sparse-attention index beside the KV pool"
    unknown = sorted(set(types) - set(_LAYER_TYPES))
    if what or unknown:
        what = what or f"layers of type {unknown[0]!r}"
        raise UnsupportedModel(f"{name}: {what} cannot be sized (model_type {kind!r}). {_ADVICE}")
    known = [*table["plain"], *table["mamba2"]]
    if kind not in known:
        raise UnsupportedModel(f"{name}: model_type {kind!r} ({architecture}) is none of {', '.join(known)}. {_ADVICE}")


def _pattern(fields: Fields) -> str | None:
    """One letter per layer, where the config says it so (Nemotron-H)."""
    blocks = fields.get("layers_block_type")
    if isinstance(blocks, list):
        return "".join(_BLOCKS.get(str(block), "?") for block in blocks)
    pattern = fields.get("hybrid_override_pattern")
    return None if pattern is None else str(pattern)


def _layer_counts(fields: Fields, layers: int, name: str, *, needs_pattern: bool) -> tuple[int, int]:
    """Layers with attention, and layers with recurrent state."""
    pattern, types = _pattern(fields), fields.get("layer_types")
    if pattern is not None:
        if set(pattern) - set("M*-E"):
            raise CapacityError(
                f"{name}: hybrid_override_pattern = {pattern!r} must be a string of M, *, - and E "
                f"(layers_block_type: {', '.join(_BLOCKS)})."
            )
        return pattern.count("*"), pattern.count("M")
    if needs_pattern and types is None:
        raise CapacityError(f"{name}: hybrid_override_pattern or layers_block_type must say what each layer is.")
    if types is not None:
        if len(types) != layers:
            raise CapacityError(f"{name}: layer_types has {len(types)} entries, num_hidden_layers says {layers}.")
        state_layers = sum(kind in _STATE_TYPES for kind in types)
        return layers - state_layers, state_layers
    listed = fields.get("attn_layer_indices")
    attention_layers = len(listed) if listed else layers // fields.count("full_attention_interval", default=1)
    return attention_layers, layers - attention_layers


def _state(fields: Fields, layers: int, kind: str) -> StateLayers:
    sizes = {name: fields.count(*theirs) for name, theirs in _STATES[kind].items()}
    return StateLayers(kind=kind, layers=layers, **sizes)


def _state_parameters(state: StateLayers, hidden: int) -> int:
    inner, per_head = state.heads * state.head_dim, 2 if state.kind == "gdn" else 1
    projections = 3 * inner + 2 * state.groups * state.state_size + per_head * state.heads
    return state.layers * (hidden * projections + state.conv_kernel * state.conv_channels())


def _attention(fields: Fields, layers: int, hidden: int) -> Attention:
    heads = fields.count("num_attention_heads")
    if fields.get("kv_lora_rank") is not None:
        rank = fields.count("kv_lora_rank")
        width = rank + fields.count("qk_rope_head_dim")
        return Attention(layers=layers, query_heads=heads, kv_heads=1, k_dim=width, v_dim=rank, latent=True)
    k_dim = fields.count("head_dim", "attention_head_dim", default=hidden // heads)
    kv_heads, v_dim = fields.count("num_key_value_heads", default=heads), fields.count("v_head_dim", default=k_dim)
    return Attention(layers=layers, query_heads=heads, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim)


def _attention_parameters(fields: Fields, attention: Attention, hidden: int) -> int:
    heads = attention.query_heads
    if attention.latent:
        rank, nope = attention.v_dim, fields.count("qk_nope_head_dim", default=128)
        value, query = fields.count("v_head_dim", default=128), heads * (nope + attention.k_dim - rank)
        down = fields.get("q_lora_rank")
        query_parameters = hidden * query if down is None else down * (hidden + query)
        kv_parameters = hidden * attention.k_dim + rank * heads * (nope + value)
        return attention.layers * (query_parameters + kv_parameters + heads * value * hidden)
    query = heads * attention.k_dim * (2 if fields.get("attn_output_gate") else 1)
    kv = attention.kv_heads * (attention.k_dim + attention.v_dim)
    return attention.layers * hidden * (query + kv + heads * attention.v_dim)


def _feedforward(fields: Fields, layers: int, hidden: int) -> tuple[Experts | None, int, int]:
    """The routed experts, the parameters of dense and shared parts, elements written per token and layer."""
    pattern = _pattern(fields)
    matrices = 3 if pattern is None else 2  # Nemotron-H has no gate
    count = fields.get("num_experts", "n_routed_experts", "num_local_experts")
    if not count:
        dense_layers = layers if pattern is None else pattern.count("-")
        width = fields.get("intermediate_size", "shared_intermediate_size") or 0
        return None, dense_layers * matrices * hidden * width, (matrices - 1) * width
    dense_layers = pattern.count("-") if pattern else fields.get("first_k_dense_replace") or 0
    expert_layers = pattern.count("E") if pattern else layers - dense_layers
    width = fields.count("moe_intermediate_size", "intermediate_size")
    active = fields.count("num_experts_per_tok", "num_experts_per_token", "moe_k")
    shared = fields.get(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
    )
    if shared is None:
        shared = width * (fields.get("n_shared_experts") or 0)
    dense = dense_layers * matrices * hidden * fields.count("intermediate_size", default=width)
    latent = fields.count("moe_latent_size", default=hidden)  # the experts' own, smaller width, where there is one
    around = 2 * latent if latent != hidden else 0
    body = expert_layers * hidden * (matrices * shared + count + around) + dense
    experts = Experts(layers=expert_layers, count=count, active=active, parameters=matrices * latent * width)
    return experts, body, (matrices - 1) * (active * width + shared)


def _vision_parameters(vision: Mapping[str, Any]) -> int:
    """Rough size of a vision transformer; where the fields are missing, that of a 27-layer, 1152-wide one."""
    depth, width = vision.get("depth") or vision.get("num_hidden_layers") or 27, vision.get("hidden_size") or 1152
    return int(depth * (4 * width * width + 2 * width * (vision.get("intermediate_size") or 4 * width)))
