"""SGLang's own sizing of its two pools, for one rank: state slots, KV tokens, request cap, and what set the cap.

The order of operations is SGLang's (floats of GiB until the last division), so that counts come out equal, not close.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from dfexp.capacity.errors import CapacityError, DoesNotFit
from dfexp.capacity.flags import Flags, Resolved, resolve
from dfexp.capacity.shape import LatentAttention, ModelShape, dtype_bytes
from dfexp.capacity.units import Bytes, GiB
from dfexp.capacity.versions import Rules

UNLOGGED_GIB = GiB(0.03)
"""Free memory at sizing is below the last log line before it: 0.02 to 0.06 GiB on boots of models with recurrent state
that were looked at, nothing on those of dense models."""
MULTIMODAL_RESERVE_GIB = GiB(100 / 1024)
CONV_BYTES = 2
"""Convolution states are bfloat16 unless an environment variable says otherwise."""
_GIB = 1 << 30

CapFrom = Literal["requested", "state pool", "KV pool", "SGLang's own limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Free memory of one GPU: `pre`, before the weights are loaded, and `post`, after.

    `measured`: `post` was read at sizing; otherwise it is from a log line or an estimate, and overstates a little.
    """

    pre: GiB
    post: GiB
    measured: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.pre < 100_000:
            raise CapacityError(
                f"free memory before loading = {self.pre} GiB must be positive; it is GiB, not MiB or bytes."
            )
        if self.post > self.pre:
            raise CapacityError(
                f"free memory after loading ({self.post} GiB) exceeds that before ({self.pre} GiB); are they swapped?"
            )
        if self.post <= 0:
            raise DoesNotFit(
                f"the weights need {self.pre - self.post:.1f} GiB and the GPU has {self.pre:.1f} GiB free: no fit. "
                "Use more GPUs per server (tp_size), a quantised checkpoint, or a GPU with more memory."
            )

    def left(self, *, state: bool) -> GiB:
        """What is free at sizing, for a model with or without recurrent state."""
        return GiB(self.post - (UNLOGGED_GIB if state and not self.measured else 0.0))

    def rest(self, mem_fraction_static: float, *, state: bool) -> GiB:
        """What SGLang leaves for the pools."""
        return GiB(self.left(state=state) - self.pre * (1 - mem_fraction_static))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one rank holds. Counts are SGLang's, bytes are what it allocates (padding included).

    `slots_per_request`, `max_mamba_cache_size` are 0 for a model without recurrent state. `reserved_bytes`: kept free
    by `mem_fraction_static` and the multimodal reserve, None when free memory was not given.
    """

    rest_bytes: Bytes
    slot_bytes: Bytes
    kv_token_bytes: Bytes
    slots_per_request: int
    max_mamba_cache_size: int
    max_total_num_tokens: int
    max_running_requests: int
    cap_from: CapFrom
    ssm_state_bytes: Bytes
    conv_state_bytes: Bytes
    intermediate_ssm_bytes: Bytes
    intermediate_conv_bytes: Bytes
    k_bytes: Bytes
    v_bytes: Bytes
    draft_kv_bytes: Bytes
    weights_bytes: Bytes | None
    reserved_bytes: Bytes | None
    resolved: Resolved
    notes: tuple[str, ...]

    @property
    def state_bytes(self) -> Bytes:
        """The state pool, speculation's buffers included."""
        return Bytes(
            self.ssm_state_bytes + self.conv_state_bytes + self.intermediate_ssm_bytes + self.intermediate_conv_bytes
        )

    @property
    def kv_bytes(self) -> Bytes:
        """The KV pool, a draft model's included."""
        return Bytes(self.k_bytes + self.v_bytes + self.draft_kv_bytes)


def plan_memory(shape: ModelShape, flags: Flags, rules: Rules, free: Free) -> MemoryPlan:
    """The plan for a GPU with this much free memory.

    Raises CapacityError, FlagsRefused, DoesNotFit (with the smallest `mem_fraction_static` that would do).
    """
    if flags.mem_fraction_static is None:
        raise CapacityError(
            "mem_fraction_static is not given, and SGLang's default depends on the machine; give it explicitly."
        )
    resolved = resolve(flags, shape, rules)
    rest = free.rest(flags.mem_fraction_static, state=shape.state is not None)
    reserve = GiB(MULTIMODAL_RESERVE_GIB if shape.multimodal and rules.reserves_multimodal else 0.0)
    try:
        plan = split(shape, flags, rules, GiB(rest - reserve), resolved)
    except DoesNotFit as error:
        least = 1 - (free.left(state=shape.state is not None) - reserve) / free.pre
        raise DoesNotFit(
            f"{error} mem_fraction_static = {flags.mem_fraction_static} leaves {rest:.2f} of {free.pre:.2f} GiB for "
            f"the pools after {free.pre - free.post:.2f} GiB of weights; it must be well above "
            f"{ceil(least * 1000) / 1000:.3f}."
        ) from None
    return _with_room(plan, free, flags.mem_fraction_static, reserve)


def _with_room(plan: MemoryPlan, free: Free, fraction: float, reserve: GiB) -> MemoryPlan:
    return replace(
        plan,
        weights_bytes=Bytes(int((free.pre - free.post) * _GIB)),
        reserved_bytes=Bytes(int((free.pre * (1 - fraction) + reserve) * _GIB)),
    )


def split(shape: ModelShape, flags: Flags, rules: Rules, rest: GiB, resolved: Resolved) -> MemoryPlan:
    """The plan when `rest` GiB are left for both pools. Raises DoesNotFit."""
    tp = flags.attention_tp
    slot = _slot_bytes(shape, flags)
    slots, left = _state_slots(shape, flags, rules, rest, resolved)
    cell = kv_cell_bytes(shape, flags, rules)
    page = resolved.page_size
    tokens = int(left * _GIB) // cell // page * page
    if flags.max_total_tokens is not None and flags.max_total_tokens < tokens:
        tokens = flags.max_total_tokens // page * page
    if tokens <= 0:
        raise DoesNotFit(f"no room is left for the KV pool ({left:.2f} GiB after {slots} state slots).")
    context = flags.context_length or shape.context_length
    cap, cap_from = request_cap(
        flags, rules, resolved, context=context, slots=slots if shape.state else None, tokens=tokens
    )
    if cap <= 0:
        raise DoesNotFit(
            f"the state pool holds {slots} slots and a request needs {resolved.slots_per_request}, so none can run. "
            "Raise mem_fraction_static or mamba_full_memory_ratio, or turn the radix cache off."
        )
    pools = pool_bytes(shape, flags, rules, slots=slots, tokens=tokens, page=page, requests=cap)
    return MemoryPlan(
        rest_bytes=Bytes(int(rest * _GIB)),
        slot_bytes=slot,
        kv_token_bytes=shape.attention.token_bytes(tp, flags.kv_element(shape)),
        slots_per_request=resolved.slots_per_request,
        max_mamba_cache_size=slots,
        max_total_num_tokens=tokens,
        max_running_requests=cap,
        cap_from=cap_from,
        ssm_state_bytes=pools["ssm"],
        conv_state_bytes=pools["conv"],
        intermediate_ssm_bytes=pools["intermediate_ssm"],
        intermediate_conv_bytes=pools["intermediate_conv"],
        k_bytes=pools["k"],
        v_bytes=pools["v"],
        draft_kv_bytes=pools["draft_kv"],
        weights_bytes=None,
        reserved_bytes=None,
        resolved=resolved,
        notes=resolved.notes + _notes(shape, flags, tokens, cap, cap_from),
    )


def _slot_bytes(shape: ModelShape, flags: Flags) -> Bytes:
    if shape.state is None:
        return Bytes(0)
    return shape.state.slot_bytes(flags.attention_tp, dtype_bytes(flags.ssm_dtype(shape)), CONV_BYTES)


def kv_cell_bytes(shape: ModelShape, flags: Flags, rules: Rules) -> int:
    """Bytes that the token budget is divided by: one token's KV, and a draft model's share where it is charged."""
    cell = int(shape.attention.token_bytes(flags.attention_tp, flags.kv_element(shape)))
    draft = flags.speculative_draft_layers
    algorithm = (flags.speculative_algorithm or "").upper()
    charged = algorithm.startswith("DFLASH") or rules.dense_draft_in_cell
    if draft and flags.speculative_num_draft_tokens and charged:
        cell += cell * draft // shape.attention.layers
    return cell


def fixed_slots(flags: Flags, resolved: Resolved) -> int | None:
    """State slots of one worker that the flags fix whatever the memory; None where memory decides."""
    shards = flags.dp_size if flags.enable_dp_attention else 1
    if flags.max_mamba_cache_size is not None:
        return flags.max_mamba_cache_size // shards
    running = resolved.max_running_requests
    return max(1, running // shards) if not resolved.radix_cache and running is not None else None


def _state_slots(shape: ModelShape, flags: Flags, rules: Rules, rest: GiB, resolved: Resolved) -> tuple[int, float]:
    """State slots, and GiB left for the KV pool."""
    if shape.state is None:
        return 0, rest
    slot, padding = _slot_bytes(shape, flags), int(rules.charges_padding_slot)
    shards = flags.dp_size if flags.enable_dp_attention else 1
    draft = flags.speculative_num_draft_tokens or 0
    running = resolved.max_running_requests
    per_worker = max(1, running // shards) if running is not None else None
    left = float(rest)
    if draft and not rules.joint_speculative:
        left -= slot * (per_worker or 0) * draft / _GIB
    fixed = fixed_slots(flags, resolved)
    if fixed is not None:
        slots = fixed
    else:
        budget = left * flags.mamba_full_memory_ratio / (1 + flags.mamba_full_memory_ratio) * _GIB
        shared = draft if rules.joint_speculative else 0
        slots = int((budget - padding * slot * (1 + shared)) // (slot * (1 + shared / resolved.slots_per_request)))
    if slots <= 0:
        error = DoesNotFit(f"the state pool would hold {slots} slots of {slot / 2**20:.2f} MiB (rest {left:.2f} GiB).")
        error.slots = slots
        raise error
    if draft and rules.joint_speculative:
        requests = min(per_worker or 1, slots // resolved.slots_per_request)
        left -= slot * (requests + padding) * draft / _GIB
    return slots, left - (slots + padding) * slot / _GIB


def request_cap(
    flags: Flags, rules: Rules, resolved: Resolved, *, context: int, slots: int | None, tokens: int | None
) -> tuple[int, CapFrom]:
    """Requests that one worker runs at once, and which limit set it.

    Args: context, tokens of the longest request; slots, None for a model without state; tokens, None when not known.
    """
    estimated = max(min(int((tokens or 0) / context * 512), 4096), 2048)
    limits: list[tuple[int, CapFrom]] = []
    if resolved.max_running_requests is not None:
        shards = flags.dp_size if flags.enable_dp_attention or rules.divides_by_dp else 1
        limits.append((max(1, resolved.max_running_requests // shards), "requested"))
    if resolved.max_running_requests is None or not rules.cap_by_tokens:
        limits.append((estimated, "SGLang's own limit"))
    if tokens is not None and (resolved.max_running_requests is None or rules.cap_by_tokens):
        limits.append((tokens // 2, "KV pool"))
    if slots is not None:
        limits.append((slots // resolved.slots_per_request, "state pool"))
    return min(limits, key=lambda limit: limit[0])


def pool_bytes(
    shape: ModelShape, flags: Flags, rules: Rules, *, slots: int, tokens: int, page: int, requests: int
) -> dict[str, Bytes]:
    """Bytes of every pool at given counts: K+1 slots and one page more than the tokens are allocated."""
    tp, element = flags.attention_tp, flags.kv_element(shape)
    rows = tokens + page if tokens else 0
    sizes = {
        "k": Bytes(rows * shape.attention.k_bytes(tp, element)),
        "v": Bytes(rows * shape.attention.v_bytes(tp, element)),
        **dict.fromkeys(("ssm", "conv", "intermediate_ssm", "intermediate_conv", "draft_kv"), Bytes(0)),
    }
    draft = flags.speculative_num_draft_tokens or 0
    if draft and flags.speculative_draft_layers:
        share = flags.speculative_draft_layers / shape.attention.layers
        sizes["draft_kv"] = Bytes(int((sizes["k"] + sizes["v"]) * share))
    if shape.state is not None:
        ssm = shape.state.ssm_bytes(tp, dtype_bytes(flags.ssm_dtype(shape)))
        conv, columns = shape.state.conv_bytes(tp, CONV_BYTES), shape.state.conv_kernel - 1
        padded, rows = (slots + 1 if slots else 0), (requests + 1 if draft else 0)
        windows = draft + columns - 1 if rules.packed_conv_window else draft * columns
        sizes["ssm"], sizes["conv"] = Bytes(padded * ssm), Bytes(padded * conv)
        sizes["intermediate_ssm"] = Bytes(rows * draft * ssm)
        sizes["intermediate_conv"] = Bytes(rows * windows * conv // max(1, columns))
    return sizes


def _notes(shape: ModelShape, flags: Flags, tokens: int, cap: int, cap_from: CapFrom) -> tuple[str, ...]:
    """What a user of this plan should know."""
    notes = []
    context = flags.context_length or shape.context_length
    if tokens < context:
        notes.append(
            f"the KV pool holds {tokens} tokens, less than one request of context_length {context}; "
            "usually a sign that free memory was misread."
        )
    asked = flags.max_running_requests
    if asked is not None and cap < asked and cap_from != "requested":
        notes.append(f"max_running_requests = {asked} is asked for, {cap} is what the {cap_from} allows.")
    if isinstance(shape.attention, LatentAttention) and flags.attention_tp > 1:
        notes.append("MLA keeps the whole KV pool on every rank; tp does not enlarge it (dp attention does).")
    return tuple(notes)
