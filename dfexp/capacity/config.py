"""A model's shape from its Hugging Face `config.json`; pure, the reading is done in `sources`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dfexp.capacity.errors import CapacityError, UnsupportedModel
from dfexp.capacity.shape import Experts, GroupedAttention, LatentAttention, ModelShape, StateLayers

_DENSE = {
    "llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text", "phi3", "glm", "glm4", "granite", "internlm3",
    "olmo2", "starcoder2", "gemma", "seed_oss", "smollm3", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text",
}  # fmt: skip
_MOE = {
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "mixtral", "deepseek_v2", "deepseek_v3",
    "kimi_k2", "glm4_moe", "granitemoe", "olmoe", "bailing_moe", "qwen3_vl_moe", "qwen3_vl_moe_text", "minimax_m2",
}  # fmt: skip
_STATE = {"nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "bamba"}
_SLIDING = {
    "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss", "llama4",
    "llama4_text", "cohere2", "mimo_v2", "mimo_v2_flash", "step3p5", "olmo3", "exaone4",
}  # fmt: skip
_REFUSED = {
    "kimi_linear": "Kimi-Linear's KDA layers", "kimi_k3": "Kimi's KDA layers", "bailing_moe_v3": "Ling's KDA layers",
    "bailing_moe_v2_5": "Ling's lightning layers", "minicpm_sala": "MiniCPM-SALA's lightning layers",
    "glm5_next": "GLM-5's KDA layers", "deepseek_v32": "DeepSeek's sparse-attention index",
    "deepseek_v4": "DeepSeek-V4's compressed pools", "minimax_m1": "MiniMax's lightning-attention layers",
    "qwen4_exp": "the per-layer embedding and sparse index of Qwen's newest hybrids",
}  # fmt: skip
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


class _Fields:
    """A config's fields, read under any of their names; a missing one is an error that says what it is for."""

    def __init__(self, text: Mapping[str, Any], root: Mapping[str, Any], name: str) -> None:
        self._text, self._root, self._name = text, root, name

    def get(self, *names: str) -> Any:
        """The first of these fields that is there and not null, in the text part first."""
        for source in (self._text, self._root):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return None

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`. Raises CapacityError: missing, or not such a number."""
        value = self.get(*names)
        if value is None:
            if default is not None:
                return default
            raise CapacityError(
                f"{self._name}: the config has no {' or '.join(names)}, which its memory layout needs. "
                "Give the model's full config.json."
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CapacityError(
                f"{self._name}: {names[0]} = {value!r} must be a whole number of at least {least}; "
                "is this the model's own config.json?"
            )
        return value


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a config describes.

    Args: config, the parsed config.json (vision models: with their text part nested); name, for messages.
    Raises UnsupportedModel: KDA, lightning, sliding-window or sparse-index layers, or an architecture not known here;
    CapacityError: a field is missing or impossible.
    """
    text = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), config)
    fields = _Fields(text, config, name)
    kind = str(fields.get("model_type") or "")
    _refuse(kind, fields, config, name)
    layers, state = _layers(kind, fields, name)
    attention = _attention(kind, fields, layers)
    experts, expert_body, inner = _feedforward(kind, fields, layers)
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    tied = bool(fields.get("tie_word_embeddings"))
    vision = config.get("vision_config")
    return ModelShape(
        name=name,
        architecture=str((config.get("architectures") or [kind])[0]),
        hidden_size=hidden,
        layers=fields.count("num_hidden_layers", default=len(layers)),
        vocab_size=vocabulary,
        context_length=fields.count("max_position_embeddings", default=32768),
        attention=attention,
        state=state,
        experts=experts,
        body_parameters=_attention_parameters(fields, attention, hidden)
        + _state_parameters(state, hidden)
        + expert_body,
        head_parameters=vocabulary * hidden,
        embedding_parameters=0 if tied else vocabulary * hidden,
        other_parameters=_vision_parameters(vision) if isinstance(vision, Mapping) else 0,
        inner_size=inner,
        ssm_dtype=_ssm_dtype(text, config),
        dtype=str(fields.get("dtype", "torch_dtype") or "bfloat16").removeprefix("torch."),
        multimodal=isinstance(vision, Mapping),
    )


def _refuse(kind: str, fields: _Fields, config: Mapping[str, Any], name: str) -> None:
    """Raise UnsupportedModel for what is recognised and not modelled, and for what is not recognised."""
    types = fields.get("layer_types") or []
    linear = fields.get("linear_attn_config")
    if kind in _REFUSED or (isinstance(linear, Mapping) and "kda_layers" in linear):
        what = _REFUSED.get(kind, "KDA layers")
    elif kind in _SLIDING or "sliding_attention" in types or "chunked_attention" in types:
        what = "sliding-window layers, which have a pool of their own"
    elif fields.get("index_topk") is not None:
        what = "a sparse-attention index beside the KV pool"
    elif kind in _DENSE | _MOE | _STATE:
        return
    else:
        known = ", ".join(sorted(_DENSE | _MOE | _STATE))
        shown = (config.get("architectures") or ["no architectures"])[0]
        raise UnsupportedModel(
            f"{name}: model_type {kind!r} ({shown}) is not known here. Known: {known}. "
            "Launch it with explicit limits and read them from its startup log instead."
        )
    raise UnsupportedModel(
        f"{name}: {what} are not modelled (model_type {kind!r}). Launch it with explicit limits "
        "(--max-running-requests, --max-mamba-cache-size, --max-total-tokens) and read the startup log."
    )


def _layers(kind: str, fields: _Fields, name: str) -> tuple[list[str], StateLayers | None]:
    """Every layer as `full`, `state` or `other`, and the state layers' shape."""
    pattern = fields.get("hybrid_override_pattern")
    if kind == "nemotron_h":
        if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
            raise CapacityError(f"{name}: hybrid_override_pattern = {pattern!r} must be a string of M, *, - and E.")
        kinds = [{"M": "state", "*": "full"}.get(letter, "other") for letter in pattern]
    else:
        kinds = _listed_layers(fields, name)
    if kind == "falcon_h1":
        kinds = ["both"] * fields.count("num_hidden_layers")
    count = sum(layer in ("state", "both") for layer in kinds)
    return kinds, _state(kind, fields, count) if count else None


def _listed_layers(fields: _Fields, name: str) -> list[str]:
    total = fields.count("num_hidden_layers")
    types, interval = fields.get("layer_types"), fields.get("full_attention_interval")
    if isinstance(types, Sequence) and not isinstance(types, str):
        if len(types) != total:
            raise CapacityError(f"{name}: layer_types has {len(types)} entries, num_hidden_layers says {total}.")
        known = {
            "full_attention": "full",
            "attention": "full",
            "linear_attention": "state",
            "mamba": "state",
            "conv": "state",
        }
        wrong = sorted({str(kind) for kind in types if kind not in known})
        if wrong:
            raise UnsupportedModel(f"{name}: layer type {wrong[0]!r} is not modelled; known: {', '.join(known)}.")
        return [known[kind] for kind in types]
    if interval is not None:
        step = fields.count("full_attention_interval")
        return ["full" if (index + 1) % step == 0 else "state" for index in range(total)]
    attention = fields.get("full_attn_idxs", "attn_layer_indices")
    if attention is not None:
        return ["full" if index in attention else "state" for index in range(total)]
    return ["full"] * total


def _state(kind: str, fields: _Fields, layers: int) -> StateLayers:
    if kind == "lfm2":
        return StateLayers(
            kind="short_conv", layers=layers, heads=1, head_dim=fields.count("hidden_size"), state_size=0, groups=0,
            conv_kernel=fields.count("conv_L_cache", least=2),
        )  # fmt: skip
    if kind in _STATE:
        return StateLayers(
            kind="mamba2",
            layers=layers,
            heads=fields.count("mamba_num_heads", "mamba_n_heads"),
            head_dim=_mamba_head_dim(fields),
            state_size=fields.count("ssm_state_size", "mamba_d_state"),
            groups=fields.count("n_groups", "mamba_n_groups"),
            conv_kernel=fields.count("conv_kernel", "mamba_d_conv", least=2),
        )
    return StateLayers(
        kind="gdn",
        layers=layers,
        heads=fields.count("linear_num_value_heads"),
        head_dim=fields.count("linear_value_head_dim"),
        state_size=fields.count("linear_key_head_dim"),
        groups=fields.count("linear_num_key_heads"),
        conv_kernel=fields.count("linear_conv_kernel_dim", least=2),
    )


def _mamba_head_dim(fields: _Fields) -> int:
    value = fields.get("mamba_head_dim", "mamba_d_head")
    if isinstance(value, int):
        return value
    inner = fields.get("mamba_d_ssm")
    width = inner if isinstance(inner, int) else fields.count("mamba_expand") * fields.count("hidden_size")
    return width // fields.count("mamba_num_heads", "mamba_n_heads")


def _attention(kind: str, fields: _Fields, kinds: Sequence[str]) -> GroupedAttention | LatentAttention:
    layers = sum(layer in ("full", "both") for layer in kinds)
    heads = fields.count("num_attention_heads")
    if fields.get("kv_lora_rank") is not None:
        return LatentAttention(
            layers=layers,
            query_heads=heads,
            kv_lora_rank=fields.count("kv_lora_rank"),
            rope_dim=fields.count("qk_rope_head_dim"),
        )
    head_dim = fields.count("head_dim", "attention_head_dim", default=fields.count("hidden_size") // heads)
    return GroupedAttention(
        layers=layers,
        query_heads=heads,
        kv_heads=fields.count("num_key_value_heads", default=heads),
        k_dim=head_dim,
        v_dim=fields.count("v_head_dim", default=head_dim),
    )


def _attention_parameters(fields: _Fields, attention: GroupedAttention | LatentAttention, hidden: int) -> int:
    heads = attention.query_heads
    if isinstance(attention, LatentAttention):
        nope, value = fields.count("qk_nope_head_dim", default=128), fields.count("v_head_dim", default=128)
        rank = attention.kv_lora_rank
        down = fields.get("q_lora_rank")
        query = heads * (nope + attention.rope_dim)
        q_parameters = hidden * query if not isinstance(down, int) else down * (hidden + query)
        rest = hidden * (rank + attention.rope_dim) + rank * heads * (nope + value) + heads * value * hidden
        return attention.layers * (q_parameters + rest)
    gate = 2 if fields.get("attn_output_gate") else 1
    query, value = heads * attention.k_dim, heads * attention.v_dim
    kv = attention.kv_heads * (attention.k_dim + attention.v_dim)
    return attention.layers * hidden * (gate * query + kv + value)


def _state_parameters(state: StateLayers | None, hidden: int) -> int:
    if state is None:
        return 0
    inner = state.heads * state.head_dim
    if state.kind == "short_conv":
        return state.layers * hidden * 4 * inner
    per_head = 2 if state.kind == "gdn" else 1
    projections = 2 * inner + 2 * state.groups * state.state_size + per_head * state.heads
    return state.layers * (hidden * (projections + inner) + state.conv_kernel * state.conv_channels())


def _feedforward(kind: str, fields: _Fields, kinds: Sequence[str]) -> tuple[Experts | None, int, int]:
    """The routed experts, the parameters of dense and shared parts, elements written per token and layer."""
    hidden = fields.count("hidden_size")
    nemotron = kind == "nemotron_h"
    matrices = 2 if nemotron else 3
    count = fields.get("num_experts", "n_routed_experts", "num_local_experts")
    if not count:
        layers = sum(layer == "other" for layer in kinds) if nemotron else len(kinds)
        inner = fields.count("intermediate_size", "shared_intermediate_size", default=0, least=0)
        return None, layers * matrices * hidden * inner, (matrices - 1) * inner
    pattern = str(fields.get("hybrid_override_pattern") or "")
    dense = fields.count("first_k_dense_replace", default=0, least=0)
    layers = pattern.count("E") if nemotron else len(kinds) - dense
    width = fields.count("moe_intermediate_size", "intermediate_size")
    active = fields.count("num_experts_per_tok", "num_experts_per_token", "moe_k")
    shared = fields.get(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
    )
    shared_width = shared if isinstance(shared, int) else width * fields.count("n_shared_experts", default=0, least=0)
    dense_width = fields.count("intermediate_size", default=width, least=0)
    body = layers * (matrices * hidden * shared_width + hidden * int(count)) + dense * matrices * hidden * dense_width
    experts = Experts(layers=layers, count=int(count), active=active, parameters=matrices * hidden * width)
    return experts, body, (matrices - 1) * (active * width + shared_width)


def _vision_parameters(vision: Mapping[str, Any]) -> int:
    """Rough size of a vision transformer; where the fields are missing, that of a 27-layer, 1152-wide one."""
    depth = vision.get("depth") or vision.get("num_hidden_layers") or 27
    width = vision.get("hidden_size") or 1152
    inner = vision.get("intermediate_size") or 4 * width
    return int(depth * (4 * width * width + 2 * width * inner))


def _ssm_dtype(text: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
    """The text part's own wish beats the root's, as in SGLang; Nemotron's `mamba_ssm_cache_dtype` is not read there."""
    value = text.get("mamba_ssm_dtype", root.get("mamba_ssm_dtype"))
    return value if isinstance(value, str) and value in ("float32", "bfloat16", "float16") else None
