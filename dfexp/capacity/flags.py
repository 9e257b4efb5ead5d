"""SGLang's flags that decide sizes, in one vocabulary for all versions, and what a version makes of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from dfexp.capacity.errors import CapacityError, FlagsRefused
from dfexp.capacity.shape import ModelShape, dtype_bytes
from dfexp.capacity.versions import Rules

Strategy = Literal["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Flags under the newest version's names; None = not given. `mamba_radix_cache_strategy` was
    `mamba_scheduler_strategy`, and `cuda_graph_max_bs` became `cuda_graph_max_bs_decode`, in 0.5.14.

    `speculative_draft_layers` is not a flag: attention layers of the draft model, whose KV shares the token budget.
    """

    mem_fraction_static: float | None = None
    mamba_full_memory_ratio: float = 0.9
    mamba_radix_cache_strategy: Strategy = "auto"
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    max_mamba_cache_size: int | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    mamba_ssm_dtype: str | None = None
    kv_cache_dtype: str = "auto"
    page_size: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    enable_dp_attention: bool = False
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int = 16384
    cuda_graph_max_bs: int | None = None
    disable_cuda_graph: bool = False
    schedule_conservativeness: float = 1.0
    attention_backend: str | None = None
    quantization: str | None = None
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_draft_layers: int = 0

    @property
    def attention_tp(self) -> int:
        """Ranks that share one attention layer."""
        return self.tp_size // self.dp_size if self.enable_dp_attention else self.tp_size

    def kv_element(self, shape: ModelShape) -> int:
        """Bytes of one KV element."""
        return dtype_bytes(shape.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype)

    def ssm_dtype(self, shape: ModelShape) -> str:
        """The state dtype: the flag, else the config's wish, else float32."""
        return self.mamba_ssm_dtype or shape.ssm_dtype or "float32"


OLD_NAMES = {
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    "tp": "tp_size",
    "dp": "dp_size",
    "pp": "pp_size",
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "pipeline_parallel_size": "pp_size",
}


def parse_flags(values: Mapping[str, Any]) -> Flags:
    """Flags from a mapping; `-` and `_`, a leading `--` and the names of other versions are understood.

    Raises CapacityError: unknown name (with the nearest right one), wrong type, impossible value.
    """
    known = {field.name for field in fields(Flags)}
    given: dict[str, Any] = {}
    for raw, value in values.items():
        name = raw.removeprefix("--").replace("-", "_")
        name = OLD_NAMES.get(name, name)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(known))}."
            raise CapacityError(f"flag {raw} = {value!r} has no part in the capacity model. {hint}")
        if name in given:
            raise CapacityError(f"flag {name} is given twice (under two spellings); keep one.")
        given[name] = _typed(name, value)
    flags = Flags(**given)
    _check_ranges(flags)
    return flags


def _typed(name: str, value: Any) -> Any:
    default = Flags.__dataclass_fields__[name].type
    kind = str(default)
    right = (
        (value is None and "None" in kind)
        or ("bool" in kind and isinstance(value, bool))
        or ("int" in kind and isinstance(value, int) and not isinstance(value, bool))
        or ("float" in kind and isinstance(value, (int, float)) and not isinstance(value, bool))
        or (("str" in kind or "Strategy" in kind) and isinstance(value, str))
    )
    if not right:
        raise CapacityError(f"flag {name} = {value!r} must be {kind.replace(' | None', ' or nothing')}.")
    return value


def _check_ranges(flags: Flags) -> None:
    """Raise CapacityError for a value that no server could run with."""
    if flags.mamba_radix_cache_strategy not in get_args(Strategy):
        raise CapacityError(
            f"mamba_radix_cache_strategy = {flags.mamba_radix_cache_strategy!r} must be one of "
            f"{', '.join(get_args(Strategy))}."
        )
    fraction = flags.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise CapacityError(f"mem_fraction_static = {fraction} must be between 0 and 1; 0.80 to 0.92 is usual.")
    if not 0 < flags.mamba_full_memory_ratio <= 100:
        raise CapacityError(
            f"mamba_full_memory_ratio = {flags.mamba_full_memory_ratio} must be above 0; SGLang's default is 0.9."
        )
    for name in (
        "max_mamba_cache_size", "max_running_requests", "max_total_tokens", "page_size", "tp_size", "dp_size",
        "pp_size", "context_length", "max_prefill_tokens", "cuda_graph_max_bs", "speculative_num_draft_tokens",
    ):  # fmt: skip
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise CapacityError(f"{name} = {value} must be at least 1.")
    if flags.chunked_prefill_size is not None and flags.chunked_prefill_size != -1 and flags.chunked_prefill_size < 1:
        raise CapacityError(
            f"chunked_prefill_size = {flags.chunked_prefill_size} must be positive, or -1 for no chunks."
        )
    if flags.mamba_ssm_dtype is not None:
        dtype_bytes(flags.mamba_ssm_dtype)
    if flags.kv_cache_dtype != "auto":
        dtype_bytes(flags.kv_cache_dtype)
    if flags.enable_dp_attention and flags.tp_size % flags.dp_size:
        raise CapacityError(f"dp_size = {flags.dp_size} must divide tp_size = {flags.tp_size} under dp attention.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a version makes of the flags. `notes`: what it changes without being asked."""

    radix_cache: bool
    overlap: bool
    strategy: Literal["none", "no_buffer", "extra_buffer", "extra_buffer_lazy"]
    page_size: int
    slots_per_request: int
    max_running_requests: int | None
    notes: tuple[str, ...] = ()


def slots_per_request(strategy: str, *, radix_cache: bool, overlap: bool) -> int:
    """State slots that SGLang divides the pool by to get the request cap."""
    if not radix_cache:
        return 1
    if strategy == "extra_buffer":
        return 5 if overlap else 4
    return 4 if strategy == "extra_buffer_lazy" else 3


def resolve(flags: Flags, shape: ModelShape, rules: Rules) -> Resolved:
    """Apply a version's own changes. Raises FlagsRefused for what it refuses, CapacityError for pp."""
    if flags.pp_size > 1:
        raise CapacityError(
            f"pp_size = {flags.pp_size}: pipeline parallelism is not modelled; use tp_size, or pp_size = 1."
        )
    running = flags.max_running_requests
    notes: list[str] = []
    if flags.speculative_num_draft_tokens and running is None:
        running = 48
        notes.append("max_running_requests is set to 48 for speculative decoding; give it explicitly.")
    if shape.state is None:
        if flags.mamba_radix_cache_strategy.startswith("extra"):
            raise FlagsRefused(
                f"mamba_radix_cache_strategy = {flags.mamba_radix_cache_strategy!r}: {shape.name} has no recurrent "
                "state. Leave the flag out."
            )
        return Resolved(
            radix_cache=not flags.disable_radix_cache,
            overlap=not flags.disable_overlap_schedule,
            strategy="none",
            page_size=flags.page_size or 1,
            slots_per_request=0,
            max_running_requests=running,
            notes=tuple(notes),
        )
    return _resolve_state(flags, shape, rules, running, notes)


def _resolve_state(flags: Flags, shape: ModelShape, rules: Rules, running: int | None, notes: list[str]) -> Resolved:
    radix, overlap, page = not flags.disable_radix_cache, not flags.disable_overlap_schedule, flags.page_size or 1
    if radix and shape.architecture in rules.radix_off:
        radix = False
        notes.append(f"sglang {rules.version} turns the radix cache off for {shape.architecture}.")
    strategy = flags.mamba_radix_cache_strategy
    supported = shape.architecture not in rules.no_extra_buffer
    if strategy == "auto":
        buffered = rules.auto_is_extra_buffer and supported and (overlap or page > 1)
        strategy = "extra_buffer" if buffered and radix else "no_buffer"
        if radix and strategy == "no_buffer" and rules.auto_is_extra_buffer:
            overlap = False
    _refuse_strategy(strategy, flags, shape, rules, radix=radix, overlap=overlap)
    if radix and strategy == "no_buffer":
        if overlap:
            notes.append("overlap scheduling is turned off: no_buffer with the radix cache does not work with it.")
            overlap = False
        if page != 1:
            notes.append(f"page_size {page} is changed to 1: no_buffer with the radix cache needs it.")
            page = 1
    return Resolved(
        radix_cache=radix,
        overlap=overlap,
        strategy=strategy,
        page_size=page,
        slots_per_request=slots_per_request(strategy, radix_cache=radix, overlap=overlap),
        max_running_requests=running,
        notes=tuple(notes),
    )


def _refuse_strategy(
    strategy: str, flags: Flags, shape: ModelShape, rules: Rules, *, radix: bool, overlap: bool
) -> None:
    """Raise FlagsRefused for what this version stops at."""
    buffered = strategy.startswith("extra_buffer")
    name = f"mamba_radix_cache_strategy = {strategy!r}"
    if strategy == "extra_buffer_lazy" and not rules.has_lazy:
        raise FlagsRefused(f"{name}: sglang {rules.version} does not have it (0.5.13 does). Use extra_buffer.")
    if buffered and not radix and not rules.extra_buffer_with_radix_off:
        raise FlagsRefused(
            f"{name} with disable_radix_cache: sglang {rules.version} refuses it. Use no_buffer; "
            "overlap scheduling stays on without the radix cache."
        )
    if not radix:
        return
    if buffered and shape.architecture in rules.no_extra_buffer:
        raise FlagsRefused(
            f"{name}: sglang {rules.version} does not support it for {shape.architecture}. Use no_buffer."
        )
    if strategy == "extra_buffer_lazy" and not overlap:
        raise FlagsRefused(f"{name} with disable_overlap_schedule: sglang refuses it. Leave overlap scheduling on.")
    if strategy == "no_buffer":
        if flags.speculative_num_draft_tokens:
            raise FlagsRefused(
                f"{name} with speculative decoding and the radix cache: sglang refuses it. Use extra_buffer."
            )
        explicit = flags.mamba_radix_cache_strategy == "no_buffer"
        if rules.strict_no_buffer and explicit and overlap:
            raise FlagsRefused(
                f"{name} with overlap scheduling: sglang {rules.version} stops with an assertion. "
                "Add disable_overlap_schedule, or use disable_radix_cache, which keeps overlap scheduling."
            )
        if rules.strict_no_buffer and (flags.page_size or 1) != 1:
            raise FlagsRefused(f"{name} with page_size = {flags.page_size}: sglang {rules.version} wants page_size 1.")


def to_argv(flags: Flags, rules: Rules) -> list[str]:
    """The flags as this version spells them; only those that differ from the defaults."""
    spelled = {"mamba_radix_cache_strategy": rules.strategy_flag, "cuda_graph_max_bs": rules.graph_flag}
    argv: list[str] = []
    for field in fields(Flags):
        value = getattr(flags, field.name)
        if value == field.default or field.name == "speculative_draft_layers":
            continue
        flag = spelled.get(field.name, "--" + field.name.replace("_", "-"))
        argv += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return argv
