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


GPUS = (
    Gpu(
        name="rtx-pro-6000",
        aliases=("rtx pro 6000 blackwell", "rtx pro 6000 blackwell server edition", "rtx6000pro"),
        memory_mib=97_887,
        bandwidth_bytes_per_s=1.792e12,
        flops_16=503.8e12,
        flops_8=1007.6e12,
        source="NVIDIA RTX PRO 6000 Blackwell data sheet (512 bit x 28 Gbit/s; 4,000 sparse FP4 TOPS / 8 and / 4)",
    ),
    Gpu(
        name="h100",
        aliases=("h100 sxm", "h100 80gb hbm3", "h100 sxm5 80gb"),
        memory_mib=81_559,
        bandwidth_bytes_per_s=3.35e12,
        flops_16=989e12,
        flops_8=1979e12,
        source="NVIDIA H100 SXM data sheet, halved from the sparse figures",
    ),
    Gpu(
        name="h100-pcie",
        aliases=("h100 pcie", "h100 pcie 80gb"),
        memory_mib=81_559,
        bandwidth_bytes_per_s=2.0e12,
        flops_16=756e12,
        flops_8=1513e12,
        source="NVIDIA H100 PCIe data sheet, halved from the sparse figures",
    ),
    Gpu(
        name="h200",
        aliases=("h200 sxm", "h200 141gb", "h200 nvl"),
        memory_mib=143_771,
        bandwidth_bytes_per_s=4.8e12,
        flops_16=989e12,
        flops_8=1979e12,
        source="NVIDIA H200 data sheet, halved from the sparse figures",
    ),
    Gpu(
        name="b200",
        aliases=("b200 sxm", "b200 180gb", "hgx b200"),
        memory_mib=183_359,
        bandwidth_bytes_per_s=8.0e12,
        flops_16=2250e12,
        flops_8=4500e12,
        source="NVIDIA HGX B200 data sheet, halved from the sparse figures",
    ),
    Gpu(
        name="b300",
        aliases=("b300 sxm", "b300 288gb", "hgx b300"),
        memory_mib=275_040,
        bandwidth_bytes_per_s=8.0e12,
        flops_16=2250e12,
        flops_8=4500e12,
        source="NVIDIA HGX B300 data sheet, halved from the sparse figures",
    ),
    Gpu(
        name="a100",
        aliases=("a100 80gb", "a100 sxm4 80gb", "a100 80gb pcie"),
        memory_mib=81_920,
        bandwidth_bytes_per_s=2.039e12,
        flops_16=312e12,
        flops_8=312e12,
        source="NVIDIA A100 80GB data sheet; no FP8",
    ),
    Gpu(
        name="l40s",
        aliases=("l40s 48gb",),
        memory_mib=46_068,
        bandwidth_bytes_per_s=0.864e12,
        flops_16=362e12,
        flops_8=733e12,
        source="NVIDIA L40S data sheet",
    ),
    Gpu(
        name="rtx-6000-ada",
        aliases=("rtx 6000 ada generation",),
        memory_mib=49_140,
        bandwidth_bytes_per_s=0.960e12,
        flops_16=364e12,
        flops_8=728e12,
        source="NVIDIA RTX 6000 Ada data sheet, halved from the sparse figures",
    ),
    Gpu(
        name="rtx-4090",
        aliases=("geforce rtx 4090",),
        memory_mib=24_564,
        bandwidth_bytes_per_s=1.008e12,
        flops_16=165e12,
        flops_8=330e12,
        source="NVIDIA Ada architecture paper (FP32 accumulation)",
    ),
    Gpu(
        name="rtx-5090",
        aliases=("geforce rtx 5090",),
        memory_mib=32_607,
        bandwidth_bytes_per_s=1.792e12,
        flops_16=209.5e12,
        flops_8=419e12,
        source="NVIDIA RTX Blackwell architecture paper (FP32 accumulation)",
    ),
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
