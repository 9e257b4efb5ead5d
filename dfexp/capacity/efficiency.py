"""What kinds of GPUs were measured to reach of their peaks, each with the run that it comes from."""

from __future__ import annotations

from dfexp.capacity.cost import Efficiency
from dfexp.hardware import Gpu

UNMEASURED = Efficiency(
    bandwidth=0.75,
    compute=0.4,
    provenance="not measured on this kind of GPU: middle of those that were; calibrate with a run's own samples",
    uncertainty=0.25,
)

_CSV = "public SGLang measurement of {}, one row (8,192 + 1,024 tokens); see benchmarks/capacity_throughput.py"

MEASURED = {
    "rtx-pro-6000": Efficiency(
        bandwidth=0.718,
        compute=0.4,
        provenance="a bulk-generation run of Qwen3.6-27B BF16 at 32 requests and 670 tok/s a GPU, which predicts its "
        "other setting (64 requests, 1,180 tok/s) within 3 %; compute was not measured, short prompts hardly need it",
        uncertainty=0.05,
    ),
    "h200": Efficiency(
        bandwidth=0.911, compute=0.477, provenance=_CSV.format("Qwen3.6-35B-A3B BF16 on H200"), uncertainty=0.14
    ),
    "b200": Efficiency(
        bandwidth=0.866, compute=0.389, provenance=_CSV.format("Qwen3.6-35B-A3B BF16 on B200"), uncertainty=0.14
    ),
    "b300": Efficiency(
        bandwidth=0.777, compute=0.524, provenance=_CSV.format("Qwen3.6-27B BF16 on B300"), uncertainty=0.14
    ),
    "h100": Efficiency(
        bandwidth=1.0, compute=0.315, provenance=_CSV.format("Qwen3.6-35B-A3B FP8 on H100"), uncertainty=0.14
    ),
}


def efficiency_of(gpu: Gpu) -> Efficiency:
    """The measured efficiency of a kind of GPU, or an honest guess with a wide uncertainty."""
    return MEASURED.get(gpu.name, UNMEASURED)
