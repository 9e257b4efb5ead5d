"""What differs between SGLang versions, as far as sizes and flags go.

Read off the public wheels of 0.5.12 to 0.5.19 and 0.5.23. A version between two of them behaves as the lower one.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from dfexp.capacity.errors import CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """One version's rules.

    Attributes:
        charges_padding_slot: the pool's extra slot is taken from the memory budget (0.5.17).
        joint_speculative: speculation's buffers share the state budget instead of coming off first (0.5.13).
        cap_by_tokens: a requested cap is limited to half the KV tokens, not to the context-based estimate (0.5.14).
        divides_by_dp: the requested cap is divided by plain data parallelism too (until 0.5.15).
        reserves_multimodal: 100 MiB are kept back for multimodal models (0.5.18).
        dense_draft_in_cell: an EAGLE draft's KV is charged per token (0.5.14); DFLASH's always was.
        packed_conv_window: speculation's convolution windows overlap in memory (0.5.14).
        has_lazy: `extra_buffer_lazy` exists (0.5.13).
        strict_no_buffer: `no_buffer` with the radix cache must be given with overlap off and page size 1 (0.5.14);
            before, SGLang changed both silently.
        auto_is_extra_buffer: `auto` means extra_buffer where the architecture has it (0.5.14).
        extra_buffer_with_radix_off: accepted and ignored (0.5.14), refused before.
        no_extra_buffer: architectures without extra_buffer.
        radix_off: architectures whose radix cache SGLang turns off by itself.
        strategy_flag, graph_flag: how the two renamed flags are spelled.

    """

    version: str
    charges_padding_slot: bool
    joint_speculative: bool
    cap_by_tokens: bool
    divides_by_dp: bool
    reserves_multimodal: bool
    dense_draft_in_cell: bool
    packed_conv_window: bool
    has_lazy: bool
    strict_no_buffer: bool
    auto_is_extra_buffer: bool
    extra_buffer_with_radix_off: bool
    no_extra_buffer: frozenset[str]
    radix_off: frozenset[str]
    strategy_flag: str
    graph_flag: str


_OLD_WITHOUT_BUFFER = frozenset(
    {
        "FalconH1ForCausalLM", "JetNemotronForCausalLM", "JetVLMForConditionalGeneration",
        "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "Lfm2ForCausalLM",
    }
)  # fmt: skip
_NEW_WITHOUT_BUFFER = frozenset({"JetNemotronForCausalLM", "JetVLMForConditionalGeneration", "Lfm2ForCausalLM"})


def rules(version: str) -> Rules:
    """The rules of a version such as `0.5.12`, `0.5.23` or `0.5.12.post1`.

    Raises CapacityError: not a version, or older than the oldest whose sources were read.
    """
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if not match:
        raise CapacityError(f"sglang version {version!r} is not of the form 0.5.23; give the version that will run.")
    number = tuple(int(part) for part in match.groups())
    if number < (0, 5, 9):
        raise CapacityError(
            f"sglang {version} is older than 0.5.9; its sizing rules are not known. Use 0.5.12 or newer."
        )

    def since(patch: int) -> bool:
        return number >= (0, 5, patch)

    return Rules(
        version=version,
        charges_padding_slot=since(17),
        joint_speculative=since(13),
        cap_by_tokens=since(14),
        divides_by_dp=not since(16),
        reserves_multimodal=since(18),
        dense_draft_in_cell=since(14),
        packed_conv_window=since(14),
        has_lazy=since(13),
        strict_no_buffer=since(14),
        auto_is_extra_buffer=since(14),
        extra_buffer_with_radix_off=since(14),
        no_extra_buffer=_NEW_WITHOUT_BUFFER if since(14) else _OLD_WITHOUT_BUFFER,
        radix_off=frozenset() if since(14) else frozenset({"KimiLinearForCausalLM", "BailingMoeV2_5ForCausalLM"}),
        strategy_flag="--mamba-radix-cache-strategy" if since(14) else "--mamba-scheduler-strategy",
        graph_flag="--cuda-graph-max-bs-decode" if since(14) else "--cuda-graph-max-bs",
    )


_RELEASES = (
    (datetime.date(2026, 8, 21), "0.5.18"),
    (datetime.date(2026, 8, 8), "0.5.17"),
    (datetime.date(2026, 7, 25), "0.5.16"),
    (datetime.date(2026, 6, 26), "0.5.14"),
    (datetime.date(2026, 6, 11), "0.5.13"),
)


def version_of(date: str | None, charges_padding_slot: bool | None) -> str:
    """The version whose rules a dated report most likely followed; the padding slot, where stated, beats the date.

    Builds of the main branch run ahead of releases: a report that charges the padding slot gets the newest rules, one
    that does not gets those of 0.5.16 at most.
    """
    try:
        day = datetime.date.fromisoformat((date or "")[:10])
        by_date = next((version for released, version in _RELEASES if day >= released), "0.5.12")
    except ValueError:
        by_date = "0.5.12"
    if charges_padding_slot:
        return "0.5.18"
    if charges_padding_slot is False and by_date in ("0.5.17", "0.5.18"):
        return "0.5.16"
    return by_date
