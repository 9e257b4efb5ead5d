"""One row of a checks file, read without trust: its shape, flags, rules and logged numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dfexp.capacity.errors import CapacityError, DoesNotFit
from dfexp.capacity.flags import Flags, Resolved, parse_flags, slots_per_request
from dfexp.capacity.shape import GroupedAttention, LatentAttention, ModelShape, StateLayers
from dfexp.capacity.units import GiB
from dfexp.capacity.versions import Rules, rules, version_of


class RowError(ValueError):
    """A row has a field of the wrong type; the message names it."""


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
    inputs, shape_part = _mapping(value, "inputs"), _mapping(value, "shape")
    get = _Getter(inputs, value)
    version = get.text("sglang_version", "version")
    try:
        rules_used = rules(version or version_of(get.text("date"), get.flag("charges_padding_slot")))
    except CapacityError:
        rules_used = rules(version_of(get.text("date"), get.flag("charges_padding_slot")))
    flags = _flags(get)
    shape, no_shape = _shape(value, shape_part, flags)
    has_state = (
        shape.state is not None if shape is not None else shape_part.get("state_kind") not in (None, "none", "dense")
    )
    return Row(
        id=str(value.get("id") or f"line {number}"),
        kind=str(value.get("kind") or "unknown"),
        rules=rules_used,
        flags=flags,
        resolved=_resolved(get, flags, has_state),
        shape=shape,
        no_shape=no_shape,
        has_state=has_state,
        multimodal=bool(get.flag("multimodal")),
        context=get.count("context_length", "context_len") or 262144,
        pre_gib=_gib(get.number("pre_gib")),
        post_gib=_gib(get.number("post_gib")),
        rest_gib=_gib(get.number("rest_gib")),
        expected=_expected(value),
    )


def _gib(value: float | None) -> GiB | None:
    return None if value is None else GiB(value)


def _mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = value.get(key)
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise RowError(f"{key} must be an object, not {type(part).__name__}")
    return part


class _Getter:
    """Fields of `inputs`, else of the row itself; null and absent are the same."""

    def __init__(self, *sources: Mapping[str, Any]) -> None:
        self._sources = sources

    def _raw(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for source in self._sources:
            for name in names:
                if source.get(name) is not None:
                    return name, source[name]
        return names[0], None

    def number(self, *names: str) -> float | None:
        """A finite number."""
        name, value = self._raw(names)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value != value
            or abs(value) == float("inf")
        ):
            raise RowError(f"{name} = {value!r} must be a number")
        return float(value)

    def count(self, *names: str) -> int | None:
        """A whole number."""
        name, value = self._raw(names)
        number = self.number(*names)
        if number is not None and number != int(number):
            raise RowError(f"{name} = {value!r} must be a whole number")
        return None if number is None else int(number)

    def flag(self, *names: str) -> bool | None:
        """A truth value."""
        name, value = self._raw(names)
        if value is not None and not isinstance(value, bool):
            raise RowError(f"{name} = {value!r} must be true or false")
        return value

    def text(self, *names: str) -> str | None:
        """Text."""
        name, value = self._raw(names)
        if value is not None and not isinstance(value, str):
            raise RowError(f"{name} = {value!r} must be text")
        return value


_COUNT_FLAGS = {
    "max_running_requests": ("max_running_requests",),
    "max_mamba_cache_size": ("max_mamba_cache_size",),
    "max_total_tokens": ("max_total_tokens",),
    "page_size": ("page_size",),
    "tp_size": ("tp", "tp_size"),
    "dp_size": ("dp", "dp_size"),
    "pp_size": ("pp", "pp_size"),
    "context_length": ("context_length", "context_len"),
    "speculative_num_draft_tokens": ("speculative_num_draft_tokens", "speculative_draft_tokens", "draft_tokens"),
    "speculative_draft_layers": ("speculative_draft_layers", "draft_layers"),
}


def _flags(get: _Getter) -> Flags:
    given: dict[str, Any] = {name: get.count(*names) for name, names in _COUNT_FLAGS.items()}
    given["mem_fraction_static"] = get.number("mem_fraction_static")
    given["mamba_full_memory_ratio"] = get.number("mamba_full_memory_ratio")
    given["disable_radix_cache"] = get.flag("disable_radix_cache")
    given["disable_overlap_schedule"] = get.flag("disable_overlap_schedule")
    given["enable_dp_attention"] = get.flag("enable_dp_attention")
    given["mamba_ssm_dtype"] = get.text("ssm_dtype", "mamba_ssm_dtype")
    given["kv_cache_dtype"] = get.text("kv_dtype", "kv_cache_dtype")
    given["speculative_algorithm"] = get.text("speculative_algorithm")
    try:
        return parse_flags({name: value for name, value in given.items() if value is not None})
    except CapacityError as error:
        raise RowError(str(error)) from None


def _resolved(get: _Getter, flags: Flags, has_state: bool) -> Resolved:
    """The row's strategy as it ran; a report of a running server is never refused."""
    strategy = get.text("strategy", "mamba_radix_cache_strategy", "mamba_scheduler_strategy") or "no_buffer"
    if strategy not in ("no_buffer", "extra_buffer", "extra_buffer_lazy"):
        raise RowError(f"strategy = {strategy!r} must be no_buffer, extra_buffer or extra_buffer_lazy")
    radix, overlap = not flags.disable_radix_cache, not flags.disable_overlap_schedule
    running = flags.max_running_requests
    if running is None and flags.speculative_num_draft_tokens:
        running = 48
    return Resolved(
        radix_cache=radix,
        overlap=overlap,
        strategy=strategy if has_state else "none",  # type: ignore[arg-type]
        page_size=flags.page_size or 1,
        slots_per_request=slots_per_request(strategy, radix_cache=radix, overlap=overlap) if has_state else 0,
        max_running_requests=running,
    )


def _shape(value: Mapping[str, Any], part: Mapping[str, Any], flags: Flags) -> tuple[ModelShape | None, str | None]:
    if flags.pp_size > 1:
        return None, "pipeline parallelism is not modelled"
    if not part:
        return None, f"no shape is given (model {value.get('model')!r})"
    get = _Getter(part)
    kind = str(part.get("state_kind") or "none")
    try:
        state = _state(kind, get)
        attention = _attention(get)
        if state is not None:
            state.slot_bytes(flags.attention_tp, 4, 2)
    except (KeyError, CapacityError, DoesNotFit) as error:
        return None, f"shape: {error.args[0] if isinstance(error, KeyError) else error}"
    return (
        ModelShape(
            name=str(value.get("id") or ""), architecture="", hidden_size=1, layers=1, vocab_size=1,
            context_length=get.count("context_length") or 262144, attention=attention, state=state, experts=None,
            body_parameters=0, head_parameters=0, embedding_parameters=0, other_parameters=0, inner_size=0,
        ),
        None,
    )  # fmt: skip


def _needed(get: _Getter, *names: str) -> int:
    count = get.count(*names)
    if count is None:
        raise KeyError(f"{names[0]} is missing")
    return count


def _state(kind: str, get: _Getter) -> StateLayers | None:
    if kind in ("none", "dense"):
        return None
    names: dict[str, tuple[tuple[str, ...], ...]] = {
        "gdn": (("v_heads",), ("v_dim",), ("k_dim",), ("k_heads",)),
        "mamba2": (("heads",), ("head_dim_state", "head_dim_ssm"), ("state_size",), ("n_groups", "groups")),
    }
    if kind not in names:
        raise KeyError(f"state_kind {kind!r} is not modelled (gdn and mamba2 are)")
    heads, width, size, groups = names[kind]
    return StateLayers(
        kind="gdn" if kind == "gdn" else "mamba2",
        layers=_needed(get, "state_layers"),
        heads=_needed(get, *heads),
        head_dim=_needed(get, *width),
        state_size=_needed(get, *size),
        groups=_needed(get, *groups),
        conv_kernel=_needed(get, "conv_kernel"),
    )


def _attention(get: _Getter) -> GroupedAttention | LatentAttention:
    layers = _needed(get, "attention_layers")
    rank = get.count("kv_lora_rank")
    if rank is not None:
        return LatentAttention(
            layers=layers, query_heads=1, kv_lora_rank=rank, rope_dim=_needed(get, "qk_rope_head_dim", "rope_dim")
        )
    head_dim = get.count("head_dim", "k_head_dim")
    if head_dim is None:
        raise KeyError("head_dim is missing")
    return GroupedAttention(
        layers=layers,
        query_heads=1,
        kv_heads=_needed(get, "kv_heads"),
        k_dim=get.count("k_head_dim", "head_dim_k") or head_dim,
        v_dim=get.count("v_head_dim", "head_dim_v") or head_dim,
    )


def _expected(value: Mapping[str, Any]) -> dict[str, float]:
    get = _Getter(_mapping(value, "expected"))
    numbers = {name: get.number(name) for name in _mapping(value, "expected")}
    return {name: number for name, number in numbers.items() if number is not None}
