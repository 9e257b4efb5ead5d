"""Facts about GPUs from gpus.json: memory, bandwidth, arithmetic peaks, and what was measured to be reached of them."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from importlib import resources

from dfexp.errors import DfexpError

CONTEXT_MIB = 810
"""What a CUDA context and SGLang's start take before "Load weight begin"."""


class UnknownGpu(DfexpError):
    """A GPU's name is not in the table; the message lists the nearest names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that a GPU kind reaches. `provenance`: the measurement behind them; `uncertainty`: relative
    error (one sigma) to expect of a rate predicted with them.
    """

    bandwidth: float
    compute: float
    uncertainty: float
    provenance: str


UNMEASURED = Efficiency(
    bandwidth=0.75,
    compute=0.4,
    uncertainty=0.25,
    provenance="not measured on this kind of GPU: middle of those that were; calibrate with a run's own samples",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU: memory that the driver reports, dense peaks in FLOP/s (flops_8 equals flops_16 where FP8 brings
    nothing), and where the numbers are from.
    """

    name: str
    aliases: tuple[str, ...]
    memory_mib: int
    bandwidth_bytes_per_s: float
    flops_16: float
    flops_8: float
    source: str
    efficiency: Efficiency = UNMEASURED

    @property
    def free_gib(self) -> float:
        """Memory that is free before weights are loaded, when nothing else runs on the GPU."""
        return (self.memory_mib - CONTEXT_MIB) / 1024

    def flops(self, element_bytes: int) -> float:
        """Dense peak for weights of this many bytes per element."""
        return self.flops_8 if element_bytes == 1 else self.flops_16


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the table."""
    rows = json.loads(resources.files("dfexp").joinpath("gpus.json").read_text(encoding="utf-8"))
    for row in rows:
        row["aliases"] = tuple(row["aliases"])
        row["efficiency"] = Efficiency(**row["efficiency"]) if "efficiency" in row else UNMEASURED
    return tuple(Gpu(**row) for row in rows)


def _key(name: str) -> str:
    """A name without vendor, case and spaces."""
    plain = re.sub(r"\b(nvidia|geforce|generation|edition|server|workstation|max-q)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", plain)


def find_gpu(name: str) -> Gpu:
    """The GPU of this name, spelled as people or `nvidia-smi` do. Raises UnknownGpu."""
    by_key = {_key(alias): gpu for gpu in gpus() for alias in (gpu.name, *gpu.aliases)}
    if _key(name) in by_key:
        return by_key[_key(name)]
    near = difflib.get_close_matches(_key(name), by_key, n=1, cutoff=0.75)
    hint = f"Did you mean {by_key[near[0]].name}? " if near else ""
    raise UnknownGpu(f"GPU {name!r} is not in the table. {hint}Known: {', '.join(gpu.name for gpu in gpus())}.")
