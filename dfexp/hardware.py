"""Facts about GPUs: memory, bandwidth and arithmetic peaks, each with where it is from.

Peaks are dense (no structured sparsity), in FLOP/s; bandwidth in bytes per second; memory as drivers state it, in MiB.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from dfexp.errors import DfexpError


class UnknownGpu(DfexpError):
    """A GPU's name is not in the table; the message lists the nearest names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_mib: total memory that the driver reports.
        context_mib: what a CUDA context and SGLang's start take before "Load weight begin".
        flops_16, flops_8: dense BF16 and FP8 peak; flops_8 equals flops_16 where FP8 brings nothing.
        source: where the numbers are from.

    """

    name: str
    aliases: tuple[str, ...]
    memory_mib: int
    bandwidth_bytes_per_s: float
    flops_16: float
    flops_8: float
    source: str
    context_mib: int = 810

    @property
    def free_mib(self) -> int:
        """Memory that is free before weights are loaded, when nothing else runs on the GPU."""
        return self.memory_mib - self.context_mib

    def flops(self, element_bytes: int) -> float:
        """Dense peak for weights of this many bytes per element."""
        return self.flops_8 if element_bytes == 1 else self.flops_16


_SPARSE = "data sheet, halved from the sparse figures"
_TABLE: tuple[tuple[str, int, float, float, float, str, tuple[str, ...]], ...] = (
    # name, MiB, TB/s, dense TFLOP/s in 16 and in 8 bits, source, other spellings
    ("rtx-pro-6000", 97_887, 1.792, 503.8, 1007.6, "NVIDIA RTX PRO 6000 Blackwell " + _SPARSE,
     ("rtx pro 6000 blackwell", "rtx6000pro")),
    ("h100", 81_559, 3.35, 989, 1979, "NVIDIA H100 SXM " + _SPARSE, ("h100 sxm", "h100 80gb hbm3", "h100 sxm5 80gb")),
    ("h100-pcie", 81_559, 2.0, 756, 1513, "NVIDIA H100 PCIe " + _SPARSE, ("h100 pcie 80gb",)),
    ("h200", 143_771, 4.8, 989, 1979, "NVIDIA H200 " + _SPARSE, ("h200 sxm", "h200 141gb", "h200 nvl")),
    ("b200", 183_359, 8.0, 2250, 4500, "NVIDIA HGX B200 " + _SPARSE, ("b200 sxm", "b200 180gb", "hgx b200")),
    ("b300", 275_040, 8.0, 2250, 4500, "NVIDIA HGX B300 " + _SPARSE, ("b300 sxm", "b300 288gb", "hgx b300")),
    ("a100", 81_920, 2.039, 312, 312, "NVIDIA A100 80GB data sheet; no FP8", ("a100 80gb", "a100 sxm4 80gb")),
    ("l40s", 46_068, 0.864, 362, 733, "NVIDIA L40S data sheet", ("l40s 48gb",)),
    ("rtx-6000-ada", 49_140, 0.960, 364, 728, "NVIDIA RTX 6000 Ada " + _SPARSE, ()),
    ("rtx-4090", 24_564, 1.008, 165, 330, "NVIDIA Ada architecture paper (FP32 accumulation)", ()),
    ("rtx-5090", 32_607, 1.792, 209.5, 419, "NVIDIA RTX Blackwell architecture paper (FP32 accumulation)", ()),
)  # fmt: skip
GPUS = tuple(
    Gpu(
        name=name,
        aliases=aliases,
        memory_mib=memory,
        bandwidth_bytes_per_s=bandwidth * 1e12,
        flops_16=flops_16 * 1e12,
        flops_8=flops_8 * 1e12,
        source=source,
    )
    for name, memory, bandwidth, flops_16, flops_8, source, aliases in _TABLE
)


def _key(name: str) -> str:
    """A name without vendor, case, spaces and memory size in capacity-only suffixes."""
    plain = re.sub(r"\b(nvidia|geforce|generation|edition|server|workstation|max-q)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", plain)


def find_gpu(name: str) -> Gpu:
    """The GPU of this name, spelled as people or `nvidia-smi` do. Raises UnknownGpu."""
    by_key = {_key(alias): gpu for gpu in GPUS for alias in (gpu.name, *gpu.aliases)}
    if _key(name) in by_key:
        return by_key[_key(name)]
    near = difflib.get_close_matches(_key(name), by_key, n=1, cutoff=0.75)
    hint = f"Did you mean {by_key[near[0]].name}?" if near else f"Known: {', '.join(gpu.name for gpu in GPUS)}."
    raise UnknownGpu(f"GPU {name!r} is not in the table. {hint} Or give its memory, bandwidth and FLOP/s yourself.")
