"""Backwards: which memory fractions and state dtypes explain the request cap and the slot usage that a server shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dfexp.capacity.errors import CapacityError
from dfexp.capacity.flags import Flags
from dfexp.capacity.memory import Free, plan_memory
from dfexp.capacity.shape import ModelShape
from dfexp.capacity.versions import Rules

FRACTIONS = tuple(round(0.70 + 0.01 * step, 2) for step in range(26))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One setting: what it would show, and whether that is what was seen."""

    mem_fraction_static: float
    mamba_ssm_dtype: str
    max_mamba_cache_size: int
    max_running_requests: int
    max_total_num_tokens: int
    mamba_usage: float | None
    fits_cap: bool
    fits_usage: bool | None

    @property
    def fits(self) -> bool:
        """Cap and, where it was given, usage agree with what was seen."""
        return self.fits_cap and self.fits_usage is not False


def explain_cap(
    shape: ModelShape,
    flags: Flags,
    rules: Rules,
    free: Free,
    *,
    cap: int,
    slots_in_use: int | None = None,
    mamba_usage: float | None = None,
    fractions: Sequence[float] = FRACTIONS,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
) -> list[Explanation]:
    """Every fraction and dtype with what it would show, those that fit first.

    Args: cap, the `max_running_requests` that the server settled on; slots_in_use with mamba_usage, as its gauges or
    log show them (usage has two decimals).
    """
    found = []
    for dtype in dtypes:
        for fraction in fractions:
            try:
                plan = plan_memory(
                    shape, replace(flags, mem_fraction_static=fraction, mamba_ssm_dtype=dtype), rules, free
                )
            except CapacityError:
                continue
            usage = slots_in_use / plan.max_mamba_cache_size if slots_in_use and plan.max_mamba_cache_size else None
            found.append(
                Explanation(
                    mem_fraction_static=fraction,
                    mamba_ssm_dtype=dtype,
                    max_mamba_cache_size=plan.max_mamba_cache_size,
                    max_running_requests=plan.max_running_requests,
                    max_total_num_tokens=plan.max_total_num_tokens,
                    mamba_usage=usage,
                    fits_cap=plan.max_running_requests == cap,
                    fits_usage=None if usage is None or mamba_usage is None else abs(usage - mamba_usage) <= 0.005,
                )
            )
    return sorted(found, key=lambda item: (not item.fits, not item.fits_cap))
