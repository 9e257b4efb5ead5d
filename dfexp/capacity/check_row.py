"""One row of a checks file, read without trust: its shape, flags, rules and logged numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, get_args

from dfexp.capacity.errors import CapacityError
from dfexp.capacity.flags import Flags, Resolved, Strategy, parse_flags, slots_per_request
from dfexp.capacity.shape import DTYPE_BYTES, GroupedAttention, LatentAttention, ModelShape, StateLayers
from dfexp.capacity.sources import load_model
from dfexp.capacity.units import GiB
from dfexp.capacity.versions import Rules, rules, version_of

LONGEST_CONTEXT = 262_144


class RowError(ValueError):
    """A row has a field of the wrong type; the message names it."""


class _NotModelled(Exception):
    """Part of a row is understood, and the model does not describe it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row as far as it could be understood; `no_shape` says why `shape` is None."""

    id: str
    kind: str
    rules: Rules
    flags: Flags
    resolved: Resolved
    shape: ModelShape | None
    no_shape: str | None
    has_state: bool
    multimodal: bool
    context: int
    pre_gib: GiB | None
    post_gib: GiB | None
    rest_gib: GiB | None
    expected: Mapping[str, float]


def read_row(value: Mapping[str, Any], number: int) -> Row:
    """Understand one row. Raises RowError."""
    part, expected = _mapping(value, "shape"), _numbers(_mapping(value, "expected"))
    get = _Getter(_mapping(value, "inputs"), value)
    version = get.text("sglang_version", "version")
    try:
        rules_used = rules(version or "")
    except CapacityError:  # a commit, a fork or nothing: the date decides
        rules_used = rules(version_of(get.text("date"), get.flag("charges_padding_slot")))
    flags, shape, why = Flags(), None, None
    try:
        flags = _flags(get)
        shape = _shape(value, part, flags)
    except _NotModelled as error:
        why = str(error)
    slots = expected.get("max_mamba_cache_size") or flags.max_mamba_cache_size
    stateful = part.get("state_kind") not in (None, "none", "dense") if part else slots is not None
    has_state = shape.state is not None if shape is not None else stateful
    return Row(
        id=str(value.get("id") or f"line {number}"),
        kind=str(value.get("kind") or "unknown"),
        rules=rules_used,
        flags=flags,
        resolved=_resolved(get, flags, rules_used, has_state),
        shape=shape,
        no_shape=why,
        has_state=has_state,
        multimodal=bool(get.flag("multimodal")),
        context=flags.context_length or (shape.context_length if shape else LONGEST_CONTEXT),
        expected=expected,
        **{
            name: None if (size := get.number(name)) is None else GiB(size)
            for name in ("pre_gib", "post_gib", "rest_gib")
        },
    )


def _mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = value.get(key)
    if part is not None and not isinstance(part, Mapping):
        raise RowError(f"{key} must be an object, not {type(part).__name__}")
    return part or {}


def _numbers(part: Mapping[str, Any]) -> dict[str, float]:
    get = _Getter(part)
    found = {name: get.number(name) for name in part}
    return {name: number for name, number in found.items() if number is not None}


class _Getter:
    """Fields of the first source that has them; null and absent are the same."""

    def __init__(self, *sources: Mapping[str, Any]) -> None:
        self._sources = sources

    def _raw(self, names: tuple[str, ...], kinds: type | tuple[type, ...], what: str) -> Any:
        for source in self._sources:
            for name in names:
                value = source.get(name)
                if value is None:
                    continue
                if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                    raise RowError(f"{name} = {str(value)[:80]!r} must be {what}")
                return value
        return None

    def number(self, *names: str) -> float | None:
        """A finite number."""
        value = self._raw(names, (int, float), "a number")
        if value is None:
            return None
        if abs(value) > 1e15 or not isfinite(value):
            raise RowError(f"{names[0]} = {value!r} must be a number")
        return float(value)

    def count(self, *names: str) -> int | None:
        """A whole number."""
        value = self.number(*names)
        if value is not None and value != int(value):
            raise RowError(f"{names[0]} = {value!r} must be a whole number")
        return None if value is None else int(value)

    def needed(self, *names: str) -> int:
        """A whole number of at least one. Raises _NotModelled."""
        value = self.count(*names)
        if value is None or value < 1:
            raise _NotModelled(f"shape: {names[0]} is {'missing' if value is None else value}")
        return value

    def flag(self, *names: str) -> bool | None:
        """A truth value."""
        found: bool | None = self._raw(names, bool, "true or false")
        return found

    def text(self, *names: str) -> str | None:
        """Text."""
        found: str | None = self._raw(names, str, "text")
        return found


_COUNTS = {
    "max_running_requests": (), "max_mamba_cache_size": (), "max_total_tokens": (), "page_size": (), "tp_size": ("tp",),
    "dp_size": ("dp",), "pp_size": ("pp",), "context_length": ("context_len",),
    "speculative_draft_layers": ("draft_layers",),
    "speculative_num_draft_tokens": ("speculative_draft_tokens", "draft_tokens"),
}  # fmt: skip
_DTYPES = {"mamba_ssm_dtype": "ssm_dtype", "kv_cache_dtype": "kv_dtype"}


def _flags(get: _Getter) -> Flags:
    given: dict[str, Any] = {name: get.count(name, *others) for name, others in _COUNTS.items()}
    for name in ("mem_fraction_static", "mamba_full_memory_ratio"):
        given[name] = get.number(name)
    for name in ("disable_radix_cache", "disable_overlap_schedule", "enable_dp_attention"):
        given[name] = get.flag(name)
    given["speculative_algorithm"] = get.text("speculative_algorithm")
    for name, short in _DTYPES.items():
        dtype = get.text(short, name)
        if dtype not in (None, "auto") and str(dtype).removeprefix("torch.").lower() not in DTYPE_BYTES:
            raise _NotModelled(f"{short} {dtype!r} is not modelled")
        given[name] = dtype if dtype != "auto" or name == "kv_cache_dtype" else None
    try:
        return parse_flags({name: value for name, value in given.items() if value is not None})
    except CapacityError as error:
        raise RowError(str(error)) from None


def _resolved(get: _Getter, flags: Flags, found: Rules, has_state: bool) -> Resolved:
    """The row's strategy as it ran; a report of a running server is never refused."""
    strategy = get.text("strategy", "mamba_radix_cache_strategy", "mamba_scheduler_strategy") or "no_buffer"
    if strategy not in get_args(Strategy):
        raise RowError(f"strategy = {strategy!r} must be no_buffer, extra_buffer or extra_buffer_lazy")
    radix, overlap = not flags.disable_radix_cache, not flags.disable_overlap_schedule
    if strategy == "auto":
        strategy = "extra_buffer" if found.auto_is_extra_buffer and overlap else "no_buffer"
    running = flags.max_running_requests
    return Resolved(
        radix_cache=radix,
        overlap=overlap,
        strategy=strategy if has_state else "none",  # type: ignore[arg-type]
        page_size=flags.page_size or 1,
        slots_per_request=slots_per_request(strategy, radix_cache=radix, overlap=overlap) if has_state else 0,
        max_running_requests=48 if running is None and flags.speculative_num_draft_tokens else running,
    )


def _shape(value: Mapping[str, Any], part: Mapping[str, Any], flags: Flags) -> ModelShape:
    """The row's shape, or that of the model it names. Raises _NotModelled."""
    if flags.pp_size > 1:
        raise _NotModelled("pipeline parallelism is not modelled")
    try:
        if not part:
            return load_model(str(value.get("model"))).shape
        get = _Getter(part)
        state, attention = _state(str(part.get("state_kind") or "none"), get), _attention(get)
        if state is not None:
            state.slot_bytes(flags.attention_tp, 4, 2)
    except CapacityError as error:
        raise _NotModelled(f"no shape: {error}") from None
    return ModelShape(
        name=str(value.get("id")), architecture="", hidden_size=1, layers=1, vocab_size=1, attention=attention,
        context_length=get.count("context_length") or LONGEST_CONTEXT, state=state, experts=None, body_parameters=0,
        head_parameters=0, embedding_parameters=0, other_parameters=0, inner_size=0,
    )  # fmt: skip


def _state(kind: str, get: _Getter) -> StateLayers | None:
    if kind in ("none", "dense"):
        return None
    names = {
        "gdn": ("v_heads", "v_dim", "k_dim", "k_heads"),
        "mamba2": ("heads", "head_dim_state", "state_size", "n_groups"),
    }
    if kind not in names:
        raise _NotModelled(f"state_kind {kind!r} is not modelled (gdn and mamba2 are)")
    heads, width, size, groups = (get.needed(name) for name in names[kind])
    return StateLayers(
        kind="gdn" if kind == "gdn" else "mamba2", layers=get.needed("state_layers"), heads=heads, head_dim=width,
        state_size=size, groups=groups, conv_kernel=get.needed("conv_kernel"),
    )  # fmt: skip


def _attention(get: _Getter) -> GroupedAttention | LatentAttention:
    layers = get.needed("attention_layers")
    if get.count("kv_lora_rank") is not None:
        rope = get.needed("qk_rope_head_dim", "rope_dim")
        return LatentAttention(layers=layers, query_heads=1, kv_lora_rank=get.needed("kv_lora_rank"), rope_dim=rope)
    return GroupedAttention(
        layers=layers,
        query_heads=1,
        kv_heads=get.needed("kv_heads"),
        k_dim=get.needed("k_head_dim", "head_dim"),
        v_dim=get.needed("v_head_dim", "head_dim"),
    )
