"""SGLang's flags that decide sizes, in one vocabulary for all versions, and what each version makes of them."""

import datetime
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from dfexp.capacity.errors import CapacityError, FlagsRefused, first_mistake
from dfexp.capacity.shape import ModelShape, dtype_bytes


class Since:
    """The patch of 0.5 that brought each difference; read off the public wheels of 0.5.12 to 0.5.19 and 0.5.23."""

    LAZY_BUFFER = 13  # `extra_buffer_lazy` exists
    JOINT_SPECULATION = 13  # speculation's buffers share the state budget instead of coming off first
    CAP_BY_TOKENS = 14  # a requested cap is limited to half the KV tokens, not to the context-based estimate
    PACKED_WINDOWS = 14  # speculation's convolution windows overlap in memory
    STRICT_NO_BUFFER = 14  # `no_buffer` wants overlap off and page size 1 given; before, both were changed silently
    AUTO_EXTRA_BUFFER = 14  # `auto` means extra_buffer, and every hybrid described here supports it
    IGNORED_WITHOUT_RADIX = 14  # extra_buffer with the radix cache off is ignored, refused before
    RENAMED_FLAGS = 14
    PADDING_SLOT_CHARGED = 17  # the pool's extra slot is taken from the memory budget
    MULTIMODAL_RESERVE = 18  # 100 MiB are kept back for multimodal models


_NO_EXTRA_BUFFER_BEFORE_14 = ("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM")
_OWN_NAMES = {
    "mamba_radix_cache_strategy": "mamba_strategy", "mamba_scheduler_strategy": "mamba_strategy",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode", "cuda_graph_bs": "cuda_graph_bs_decode",
    "tensor_parallel_size": "tp_size", "pipeline_parallel_size": "pp_size", "data_parallel_size": "dp_size",
}  # fmt: skip
_NEW_SPELLING = {"mamba_strategy": "mamba_radix_cache_strategy"}
_OLD_SPELLING = {
    "mamba_strategy": "mamba_scheduler_strategy", "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    "cuda_graph_bs_decode": "cuda_graph_bs",
}  # fmt: skip
_RELEASES = (("2026-08-21", 18), ("2026-08-08", 17), ("2026-07-25", 16), ("2026-06-26", 14), ("2026-06-11", 13))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one version, 0.5.`patch`."""

    version: str
    patch: int

    def since(self, patch: int) -> bool:
        """Whether this version has what came with 0.5.`patch`."""
        return self.patch >= patch


def rules(version: str) -> Rules:
    """The rules of a version such as `0.5.12` or `0.5.12.post1`. Raises CapacityError: not one, or older than 0.5.9."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(int(part) for part in match.groups()) if match else (0, 0, 0)
    if number < (0, 5, 9):
        raise CapacityError(f"sglang version {version!r} must be of the form 0.5.23, and at least 0.5.9.")
    return Rules(version=version, patch=number[2] if number[:2] == (0, 5) else 999)


def rules_at(date: str | None, charges_padding_slot: bool | None) -> Rules:
    """The rules that a dated report most likely followed; the padding slot, where stated, beats the date, because
    builds of the main branch run ahead of releases.
    """
    try:
        day = datetime.date.fromisoformat((date or "")[:10]).isoformat()
    except ValueError:
        day = ""
    patch = next((patch for released, patch in _RELEASES if day >= released), 12)
    if charges_padding_slot:
        patch = 18
    elif charges_padding_slot is False:
        patch = min(patch, 16)
    return Rules(version=f"0.5.{patch}", patch=patch)


def _known_dtype(name: str) -> str:
    dtype_bytes("bfloat16" if name == "auto" else name)
    return name


Strategy = Literal["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]
_Count = Annotated[int, Field(ge=1)]


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Flags:
    """Flags under dfexp's names; None = not given. `chunked_prefill_size`: -1 means no chunks."""

    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    mamba_full_memory_ratio: Annotated[float, Field(gt=0, le=100)] = 0.9
    mamba_strategy: Strategy = "auto"
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    max_mamba_cache_size: _Count | None = None
    max_running_requests: _Count | None = None
    max_total_tokens: _Count | None = None
    mamba_ssm_dtype: Annotated[str, AfterValidator(_known_dtype)] | None = None
    kv_cache_dtype: Annotated[str, AfterValidator(_known_dtype)] = "auto"
    page_size: _Count | None = None
    tp_size: _Count = 1
    dp_size: _Count = 1
    pp_size: _Count = 1
    context_length: _Count | None = None
    chunked_prefill_size: Annotated[int, Field(ge=-1)] | None = None
    max_prefill_tokens: _Count = 16384
    cuda_graph_max_bs_decode: _Count | None = None
    disable_cuda_graph: bool = False
    schedule_conservativeness: Annotated[float, Field(gt=0)] = 1.0
    attention_backend: str | None = None
    quantization: str | None = None
    speculative_num_draft_tokens: _Count | None = None

    def kv_element(self, shape: ModelShape) -> int:
        """Bytes of one KV element."""
        return dtype_bytes(shape.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype)

    def ssm_element(self, shape: ModelShape) -> int:
        """Bytes of one element of the recurrent state: the flag's dtype, else the config's wish, else float32."""
        return dtype_bytes(self.mamba_ssm_dtype or shape.ssm_dtype or "float32")


FLAG_NAMES = tuple(field.name for field in fields(Flags))


def parse_flags(values: Mapping[str, Any]) -> Flags:
    """Flags from a mapping; every spelling that `own_name` knows is understood.

    Raises CapacityError: unknown name (with the nearest right one), wrong type, impossible value.
    """
    given: dict[str, Any] = {}
    for raw, value in values.items():
        name = own_name(raw)
        if name not in FLAG_NAMES:
            near = difflib.get_close_matches(name, FLAG_NAMES, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(FLAG_NAMES))}."
            raise CapacityError(f"flag {raw} = {value!r} has no part in the capacity model. {hint}")
        if name in given:
            raise CapacityError(f"flag {name} is given twice (under two spellings); keep one.")
        given[name] = value
    try:
        return Flags(**given)
    except ValidationError as error:
        raise CapacityError(f"flag {first_mistake(error)}.") from None


def modelled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a server's flags that have a part in the capacity model."""
    return {name: value for name, value in values.items() if own_name(name) in FLAG_NAMES}


def own_name(spelling: str) -> str:
    """The name that dfexp has for a flag: no `--`, `_` for `-`, and one where versions or aliases differ."""
    name = spelling.removeprefix("--").replace("-", "_")
    return _OWN_NAMES.get(name, name)


def option(name: str, version: Rules) -> str:
    """The option that a version has for dfexp's name of a flag, such as `--mamba-radix-cache-strategy`."""
    spelling = _NEW_SPELLING if version.since(Since.RENAMED_FLAGS) else _OLD_SPELLING
    return "--" + spelling.get(name, name).replace("_", "-")


def written(flag: str, value: Any) -> list[str]:
    """An option and its value or values as arguments; True is the bare option, False nothing."""
    if isinstance(value, bool):
        return [flag] if value else []
    texts = [f"{item:.12g}" if isinstance(item, float) else str(item) for item in as_list(value)]
    if len(texts) == 1 and texts[0].startswith("-"):
        return [f"{flag}={texts[0]}"]  # as a word of its own it could be taken for an option
    return [flag, *texts]


def as_list(value: Any) -> list[Any]:
    """The values of a flag that may have one or several."""
    return value if isinstance(value, list) else [value]


def to_argv(flags: Flags, version: Rules) -> list[str]:
    """The flags as this version spells them; only those that differ from the defaults."""
    changed = {name: pair[1] for name, pair in differing(Flags(), flags).items()}
    return [word for name, value in changed.items() for word in written(option(name, version), value)]


def differing(now: Flags, new: Flags) -> dict[str, tuple[Any, Any]]:
    """Flags that differ, with both values."""
    pairs = {name: (getattr(now, name), getattr(new, name)) for name in FLAG_NAMES}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a version makes of the flags. `slots_per_request`: state slots that the pool is divided by for the cap."""

    radix_cache: bool
    overlap: bool
    strategy: Literal["none", "auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]
    page_size: int
    slots_per_request: int
    max_running_requests: int | None


def resolve(flags: Flags, version: Rules, *, has_state: bool) -> Resolved:
    """Apply a version's own changes, for a model with or without recurrent state; refuses nothing."""
    radix, overlap, page = not flags.disable_radix_cache, not flags.disable_overlap_schedule, flags.page_size or 1
    strategy = flags.mamba_strategy
    if strategy == "auto":
        buffered = version.since(Since.AUTO_EXTRA_BUFFER) and radix and (overlap or page > 1)
        strategy = "extra_buffer" if buffered else "no_buffer"
    if has_state and radix and strategy == "no_buffer":
        overlap, page = False, 1
    slots = 3
    if not radix:
        slots = 1
    elif strategy == "extra_buffer":
        slots = 5 if overlap else 4
    elif strategy == "extra_buffer_lazy":
        slots = 4
    running = flags.max_running_requests
    return Resolved(
        radix_cache=radix,
        overlap=overlap,
        strategy=strategy if has_state else "none",
        page_size=page,
        slots_per_request=slots if has_state else 0,
        max_running_requests=48 if running is None and flags.speculative_num_draft_tokens else running,
    )


def refuse(flags: Flags, shape: ModelShape | None, version: Rules) -> None:
    """Raise FlagsRefused for what this version stops at, CapacityError for parallelism that is not modelled.

    Without a shape: what it stops at for every model with recurrent state.
    """
    if flags.pp_size > 1 or flags.dp_size > 1:
        raise CapacityError(
            f"pp_size = {flags.pp_size}, dp_size = {flags.dp_size}: pipeline and data parallelism inside a server are "
            "not modelled; use tp_size, and more servers."
        )
    given, radix = flags.mamba_strategy, not flags.disable_radix_cache
    overlap = not flags.disable_overlap_schedule
    lazy, buffered = given == "extra_buffer_lazy", given.startswith("extra_buffer")
    has_state, is_old = shape is None or shape.state is not None, not version.since(Since.AUTO_EXTRA_BUFFER)
    name, architecture = (shape.name, shape.architecture) if shape else ("the model", "")
    no_buffer = has_state and radix and resolve(flags, version, has_state=True).strategy == "no_buffer"
    strict = no_buffer and given == "no_buffer" and version.since(Since.STRICT_NO_BUFFER)
    refusals = (
        (buffered and not has_state, f"{name} has no recurrent state. Leave it out."),
        (lazy and not version.since(Since.LAZY_BUFFER), "it came with 0.5.13. Use extra_buffer."),
        (buffered and not radix and not version.since(Since.IGNORED_WITHOUT_RADIX),
         "not with disable_radix_cache. Use no_buffer; overlap scheduling stays on without the radix cache."),
        (buffered and is_old and architecture in _NO_EXTRA_BUFFER_BEFORE_14,
         f"not for {architecture}. Use no_buffer."),
        (lazy and radix and not overlap, "not with disable_overlap_schedule. Leave overlap scheduling on."),
        (no_buffer and flags.speculative_num_draft_tokens is not None,
         "not with speculative decoding and the radix cache. Use extra_buffer."),
        (strict and overlap, "not with overlap scheduling. Add disable_overlap_schedule, or disable_radix_cache."),
        (strict and (flags.page_size or 1) != 1, "it wants page_size 1."),
    )  # fmt: skip
    for is_refused, reason in refusals:
        if is_refused:
            raise FlagsRefused(f"sglang {version.version} refuses mamba_strategy = {given!r}: {reason}")
