"""Public throughput measurements against the roofline: one row per GPU kind is fitted, the others are predicted.

    python benchmarks/capacity_throughput.py

Prints every row with its error, and the mean absolute error over the rows that were not fitted.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from dfexp.capacity.cost import Server, decode_bytes, prefill_parts, small_kernels_s
from dfexp.capacity.flags import Flags, rules
from dfexp.capacity.memory import Free, MemoryPlan, plan_memory
from dfexp.capacity.models import load_model
from dfexp.capacity.shape import GIB
from dfexp.capacity.throughput import chunk_tokens, predict
from dfexp.capacity.workload import Workload, constant
from dfexp.hardware import UNMEASURED, Efficiency, find_gpu

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "capacity" / "throughput.csv"
WORKLOAD = Workload(prompt=constant(8192), completion=constant(1024), max_tokens=1024, shared_prefix_share=0.0)
TOTAL_PER_OUTPUT = 9
"""The table counts input and output tokens: 8,192 + 1,024 for each 1,024 of output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row: measured and predicted total tok/s and TPOT, and what was fitted."""

    gpu: str
    model: str
    weights: str
    concurrency: int
    running: float
    fitted: bool
    efficiency: Efficiency
    measured: float
    predicted: float
    tpot_ms: float
    predicted_tpot_ms: float

    @property
    def error(self) -> float:
        """Relative error of the total rate."""
        return self.predicted / self.measured - 1


def lines() -> list[Line]:
    """Every row, in the file's order; the first of each GPU kind is the one that is fitted."""
    rows = csv.DictReader(line for line in DATA.read_text().splitlines() if not line.startswith("#"))
    fitted: dict[str, Efficiency] = {}
    found = []
    for row in rows:
        server, memory = _server(row)
        concurrency, total, tpot_s = (
            int(row["client_concurrency"]),
            float(row["total_tok_per_s"]),
            float(row["tpot_ms"]) / 1e3,
        )
        first = row["gpu"] not in fitted
        running = predict(server, memory, UNMEASURED, WORKLOAD, concurrency=concurrency).running
        if first:
            fitted[row["gpu"]] = _fitted(server, running, total / TOTAL_PER_OUTPUT, tpot_s)
        got = predict(server, memory, fitted[row["gpu"]], WORKLOAD, concurrency=concurrency)
        tpot = got.step_s + got.running / got.tok_per_s * got.prefill_share / 2
        found.append(
            Line(
                gpu=row["gpu"],
                model=row["model"],
                weights=row["weights"],
                concurrency=concurrency,
                running=running,
                fitted=first,
                efficiency=fitted[row["gpu"]],
                measured=total,
                predicted=got.tok_per_s * TOTAL_PER_OUTPUT,
                tpot_ms=tpot_s * 1e3,
                predicted_tpot_ms=tpot * 1e3,
            )
        )
    return found


def _fitted(server: Server, running: float, tok_per_s: float, tpot_s: float) -> Efficiency:
    """The efficiencies that reproduce a row: the bandwidth's and the compute's.

    Requests of one length come in waves: all are prefilled, then all decode, and the median request waits for half of
    the others' prefill.
    """
    moved_at_peak = decode_bytes(server, running, WORKLOAD.context) / server.gpu.bandwidth_bytes_per_s
    cycle, prompt = running / tok_per_s, WORKLOAD.prompt.mean
    step = 2 * tpot_s - cycle
    prefill = (cycle - step) * WORKLOAD.completion.mean / running
    found = replace(UNMEASURED, bandwidth=moved_at_peak / (step - small_kernels_s(server)), provenance="first row")
    tokens = min(running * prompt, chunk_tokens(server))
    for _ in range(8):
        fixed, at_peak = prefill_parts(server, found, tokens, prompt)
        found = replace(found, compute=at_peak / (prefill * tokens / prompt - fixed))
    return found


def _server(row: dict[str, str]) -> tuple[Server, MemoryPlan]:
    model = load_model(row["model"], weight_dtype="fp8" if row["weights"] == "fp8" else "bfloat16")
    gpu = find_gpu(row["gpu"])
    flags = Flags(mem_fraction_static=float(row["mem_fraction_static"]))
    free = Free(pre_gib=gpu.free_gib, post_gib=gpu.free_gib - model.weights_bytes / GIB)
    server = Server(shape=model.shape, weight_dtype=model.weight_dtype, gpu=gpu, flags=flags)
    return server, plan_memory(model.shape, flags, rules("0.5.16"), free)


def mean_absolute_error(found: list[Line]) -> float:
    """Over the rows that were not fitted."""
    errors = [abs(line.error) for line in found if not line.fitted]
    return sum(errors) / len(errors)


def main() -> None:
    """Print the table."""
    found = lines()
    print(f"{'gpu':<6}{'model':<18}{'weights':<9}{'client':>7}{'running':>9}{'measured':>10}{'predicted':>11}{'error':>8}"
          f"{'TPOT ms':>9}{'pred.':>7}")  # fmt: skip
    for line in found:
        fitted = f"  fitted: {line.efficiency.bandwidth:.3f} bandwidth, {line.efficiency.compute:.3f} compute"
        print(
            f"{line.gpu:<6}{line.model:<18}{line.weights:<9}{line.concurrency:>7}{line.running:>9.0f}"
            f"{line.measured:>10,.0f}{line.predicted:>11,.0f}{line.error:>+8.1%}"
            f"{line.tpot_ms:>9.1f}{line.predicted_tpot_ms:>7.1f}{fitted if line.fitted else ''}"
        )
    others = sum(not line.fitted for line in found)
    print(f"\nmean absolute error of the {others} rows not fitted: {mean_absolute_error(found):.1%}")
    for dtype in ("bf16", "fp8"):
        errors = [line.error for line in found if not line.fitted and line.weights == dtype]
        print(f"  {dtype}: mean error {sum(errors) / len(errors):+.1%} over {len(errors)} rows")


if __name__ == "__main__":
    main()
