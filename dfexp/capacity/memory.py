"""SGLang's own sizing of its two pools, for one rank: state slots, KV tokens, request cap, and what set the cap.

The order of operations is SGLang's (floats of GiB until the last division), so that counts come out equal, not close.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from dfexp.capacity.errors import CapacityError, DoesNotFit
from dfexp.capacity.flags import Flags, Resolved, Rules, Since, refuse, resolve
from dfexp.capacity.shape import GIB, ModelShape

UNLOGGED_GIB = 0.03
"""Free memory at sizing is below the last log line before it: 0.02 to 0.06 GiB on boots of models with recurrent state
that were looked at, nothing on those of dense models."""
MULTIMODAL_GIB = 100 / 1024
MOST_GIB = 2000
"""More than any GPU has; larger numbers are MiB."""

CapFrom = Literal["requested", "state pool", "KV pool", "SGLang's own limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Free memory of one GPU in GiB, before and after the weights are loaded. Raises CapacityError, DoesNotFit."""

    pre_gib: float
    post_gib: float

    def __post_init__(self) -> None:
        if not 0 < self.pre_gib < MOST_GIB:
            raise CapacityError(f"free memory before loading = {self.pre_gib} must be GiB, not MiB, and positive.")
        if self.post_gib > self.pre_gib:
            raise CapacityError(f"free memory after loading ({self.post_gib} GiB) exceeds that before; swapped?")
        if self.post_gib <= 0:
            raise DoesNotFit(
                f"weights of {self.pre_gib - self.post_gib:.1f} GiB do not fit a GPU with {self.pre_gib:.1f} GiB free. "
                "Raise tp_size, choose a quantised checkpoint, or a GPU with more memory."
            )

    def rest_gib(self, fraction: float, *, has_state: bool, reserve_gib: float = 0.0) -> float:
        """What SGLang leaves for both pools under `mem_fraction_static`."""
        return self.post_gib - (UNLOGGED_GIB if has_state else 0.0) - self.pre_gib * (1 - fraction) - reserve_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one rank holds. Counts are SGLang's; `pools` are the bytes that it allocates, padding included (ssm, conv,
    intermediate_ssm, intermediate_conv, k, v). `max_mamba_cache_size` is 0 for a model without recurrent state.
    """

    rest_bytes: int
    slot_bytes: int
    kv_token_bytes: int
    max_mamba_cache_size: int
    max_total_num_tokens: int
    max_running_requests: int
    cap_from: CapFrom
    pools: Mapping[str, int]
    resolved: Resolved
    weights_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """The state pool, speculation's buffers included."""
        return sum(size for name, size in self.pools.items() if name not in ("k", "v"))

    @property
    def kv_bytes(self) -> int:
        """The KV pool."""
        return self.pools["k"] + self.pools["v"]


def plan_memory(shape: ModelShape, flags: Flags, version: Rules, free: Free) -> MemoryPlan:
    """The plan for a GPU with this much free memory.

    Raises CapacityError, FlagsRefused, DoesNotFit (with the smallest `mem_fraction_static` that would do).
    """
    fraction, has_state = flags.mem_fraction_static, shape.state is not None
    if fraction is None:
        raise CapacityError(
            "mem_fraction_static is not given, and SGLang's default depends on the machine; give it explicitly."
        )
    refuse(flags, shape, version)
    reserve = multimodal_reserve_gib(version, is_multimodal=shape.multimodal)
    rest = free.rest_gib(fraction, has_state=has_state, reserve_gib=reserve)
    try:
        plan = split(shape, flags, version, rest, resolve(flags, version, has_state=has_state))
    except DoesNotFit as error:
        least = 1 - free.rest_gib(1.0, has_state=has_state, reserve_gib=reserve) / free.pre_gib
        raise DoesNotFit(
            f"{error} mem_fraction_static = {fraction} leaves {rest:.2f} of {free.pre_gib:.2f} GiB for the pools; "
            f"it must be well above {ceil(least * 1000) / 1000:.3f}."
        ) from None
    return replace(
        plan,
        weights_bytes=int((free.pre_gib - free.post_gib) * GIB),
        reserved_bytes=int((free.pre_gib * (1 - fraction) + reserve) * GIB),
    )


def multimodal_reserve_gib(version: Rules, *, is_multimodal: bool) -> float:
    """GiB that a version keeps back beside `mem_fraction_static`."""
    return MULTIMODAL_GIB if is_multimodal and version.since(Since.MULTIMODAL_RESERVE) else 0.0


def split(shape: ModelShape, flags: Flags, version: Rules, rest_gib: float, resolved: Resolved) -> MemoryPlan:
    """The plan when `rest_gib` are left for both pools. Raises DoesNotFit."""
    slots, left_gib = _state_slots(shape, flags, version, rest_gib, resolved)
    token = shape.attention.token_bytes(flags.tp_size, flags.kv_element(shape))
    page = resolved.page_size
    tokens = int(left_gib * GIB) // token // page * page
    if flags.max_total_tokens is not None:
        tokens = min(tokens, flags.max_total_tokens // page * page)
    if tokens <= 0:
        raise DoesNotFit(f"no room is left for the KV pool ({left_gib:.2f} GiB after {slots} state slots).")
    context = flags.context_length or shape.context_length
    has_state = shape.state is not None
    cap, cap_from = request_cap(version, resolved, context=context, slots=slots if has_state else None, tokens=tokens)
    if cap <= 0:
        raise DoesNotFit(
            f"the state pool holds {slots} slots and a request needs {resolved.slots_per_request}, so none can run. "
            "Raise mem_fraction_static or mamba_full_memory_ratio, or turn the radix cache off."
        )
    return MemoryPlan(
        rest_bytes=int(rest_gib * GIB),
        slot_bytes=slot_bytes(shape, flags),
        kv_token_bytes=token,
        max_mamba_cache_size=slots,
        max_total_num_tokens=tokens,
        max_running_requests=cap,
        cap_from=cap_from,
        pools=pool_bytes(shape, flags, version, slots=slots, tokens=tokens, page=page, requests=cap),
        resolved=resolved,
    )


def slot_bytes(shape: ModelShape, flags: Flags) -> int:
    """Bytes of one state slot on one rank, 0 without recurrent state."""
    return shape.state.slot_bytes(flags.tp_size, flags.ssm_element(shape)) if shape.state else 0


def fixed_slots(flags: Flags, resolved: Resolved) -> int | None:
    """State slots that the flags fix whatever the memory; None where memory decides."""
    return flags.max_mamba_cache_size or (None if resolved.radix_cache else resolved.max_running_requests)


def _state_slots(
    shape: ModelShape, flags: Flags, version: Rules, rest_gib: float, resolved: Resolved
) -> tuple[int, float]:
    """State slots, and GiB left for the KV pool."""
    if shape.state is None:
        return 0, rest_gib
    slot, padding = slot_bytes(shape, flags), int(version.since(Since.PADDING_SLOT_CHARGED))
    draft, is_joint = flags.speculative_num_draft_tokens or 0, version.since(Since.JOINT_SPECULATION)
    running = resolved.max_running_requests or 0
    left = rest_gib if is_joint else rest_gib - slot * running * draft / GIB
    slots = fixed_slots(flags, resolved)
    if slots is None:
        budget = left * flags.mamba_full_memory_ratio / (1 + flags.mamba_full_memory_ratio) * GIB
        shared = draft if is_joint else 0
        slots = int((budget - padding * slot * (1 + shared)) // (slot * (1 + shared / resolved.slots_per_request)))
    if slots <= 0:
        message = f"the state pool would hold {slots} slots of {slot / 2**20:.2f} MiB (rest {left:.2f} GiB)."
        raise DoesNotFit(message, slots)
    if draft and is_joint:
        requests = min(running, slots // resolved.slots_per_request)
        left -= slot * (requests + padding) * draft / GIB
    return slots, left - (slots + padding) * slot / GIB


def request_cap(
    version: Rules, resolved: Resolved, *, context: int, slots: int | None, tokens: int | None
) -> tuple[int, CapFrom]:
    """Requests that one server runs at once, and which limit set it.

    Args: context, tokens of the longest request; slots, None for a model without state; tokens, None when not known.
    """
    requested = resolved.max_running_requests
    limits: list[tuple[int, CapFrom]] = []
    if requested is not None:
        limits.append((requested, "requested"))
    if requested is None or not version.since(Since.CAP_BY_TOKENS):
        estimated = int((tokens or 0) / context * 512)
        limits.append((min(max(estimated, 2048), 4096), "SGLang's own limit"))
    if tokens is not None and (requested is None or version.since(Since.CAP_BY_TOKENS)):
        limits.append((tokens // 2, "KV pool"))
    if slots is not None:
        limits.append((slots // resolved.slots_per_request, "state pool"))
    return min(limits, key=lambda limit: limit[0])


def pool_bytes(
    shape: ModelShape, flags: Flags, version: Rules, *, slots: int, tokens: int, page: int, requests: int
) -> dict[str, int]:
    """Bytes of every pool at given counts: K+1 slots and one page more than the tokens are allocated."""
    tp, element = flags.tp_size, flags.kv_element(shape)
    rows = tokens + page if tokens else 0
    sizes = {"k": rows * shape.attention.k_bytes(tp, element), "v": rows * shape.attention.v_bytes(tp, element)}
    if shape.state is None:
        return sizes
    ssm, conv = shape.state.ssm_bytes(tp, flags.ssm_element(shape)), shape.state.conv_bytes(tp)
    columns, draft = shape.state.conv_kernel - 1, flags.speculative_num_draft_tokens or 0
    padded, rows = (slots + 1 if slots else 0), (requests + 1 if draft else 0)
    windows = draft + columns - 1 if version.since(Since.PACKED_WINDOWS) else draft * columns
    sizes |= {"ssm": padded * ssm, "conv": padded * conv, "intermediate_ssm": rows * draft * ssm}
    sizes["intermediate_conv"] = rows * windows * conv // columns
    return sizes
