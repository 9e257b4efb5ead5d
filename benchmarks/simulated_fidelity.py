"""The simulated scheduler against real servers, and against decode lines that others have published.

    [DFEXP_SGLANG=FOLDER:FOLDER] python benchmarks/simulated_fidelity.py

Prints, for each environment with SGLang that DFEXP_SGLANG names (`make test-sglang` builds them), the largest deviation
of any log line from that of a real server on the CPU; then every row of tests/data/capacity/cases.jsonl that reports
how a server decoded, with what the simulator says, or why it can say nothing. Pools and requests in flight are taken
from the report, so little is left to test: who waits, and the state slots held. Rates against published ones are in
benchmarks/simulated_core.py: no report here has a rate of a GPU and a model whose speed is known.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dfexp.engines.simulated.core import Line, Simulator, run_closed_loop
from tests.engines.simulated.support import config
from tests.sglang.support import OnCpu
from tests.sglang.test_simulated_fidelity import LONG, SCENARIOS, compared

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "data" / "capacity" / "cases.jsonl"
NAMES = {
    "num_running_reqs": ("running_req", "running", "peak_concurrency_14d"),
    "num_queue_reqs": ("queue_req",),
    "mamba_used_tokens": ("mamba_num", "peak_slots_used_14d", "mamba_used"),
    "mamba_usage": ("mamba_usage",),
    "full_token_usage": ("full_token_usage",),
    "mamba_evictable_tokens": ("mamba_evictable",),
    "mamba_available_tokens": ("mamba_available",),
}
"""SGLang's gauges, and what the reports call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A report, and the server that it is about.

    Attributes:
        path: keys that lead to the numbers inside `logged`.
        tokens: of the KV pool; each: tokens of a request while it is looked at.
        history: requests that ended before, which the radix cache has kept.
        given: gauges that went into the numbers here, and so are no test.

    """

    case: str
    in_flight: int
    slots: int
    cap: int
    path: tuple[str | int, ...] = ()
    strategy: str = "no_buffer"
    radix: bool = True
    tokens: int = 1_000_000
    each: int = 1000
    history: int = 0
    given: tuple[str, ...] = ("num_running_reqs",)


SALA = {"case": "minicpm-sala_decode_full_pool", "slots": 20, "cap": 20, "radix": False}
ROWS = (
    Row(
        **SALA, path=("decode", 0), in_flight=26, tokens=16_619_971, each=116_340,
        given=("full_token_usage", "mamba_usage"),
    ),
    Row(
        **SALA, path=("decode", 1), in_flight=18, tokens=16_343_789, each=81_719,
        given=("full_token_usage", "num_running_reqs"),
    ),
    Row(case="qwen3.8-flash-next_radix_off_collapse", in_flight=6, slots=6, cap=6, radix=False),
    Row(
        case="qwen3.8_uneven_tp3_k37_gauges",
        path=("gauges",), in_flight=2, slots=37, cap=12, history=40, given=("mamba_used_tokens",),
    ),
    Row(case="qwen3.6-27b_rdna4_60slots", in_flight=16, slots=60, cap=20, tokens=183_240),
    Row(
        case="qwen3.8-flash-next_gb10_159552_hang",
        path=("hang_1",), in_flight=1, slots=8, cap=1, strategy="extra_buffer", tokens=159_552, each=156_360,
        given=("num_running_reqs", "mamba_usage", "full_token_usage"),
    ),
)  # fmt: skip
"""Prompts come in one chunk. Where a pool's size is not reported it is what is in use over its usage, and requests in
flight are those that run and wait, or half of the slots in use.
"""
LEFT_OUT = {
    "npu_prefill_usage_increments": "neither the slots of its pool nor the strategy are reported",
    "qwen3.8-flash-next_skip_decode_lock_45_of_15": "an option that changes what a request holds is set",
    "qwen2.5-0.5b_docs_server_info": "its rate is that of an unknown number of requests",
    "rdna4_qwen3.6-35b-a3b-fp8_1.61M": "rates of one stream on GPUs that the table of GPUs does not have",
}


def reported(row: Row) -> dict[str, float]:
    """The numbers of a report, under SGLang's names."""
    found: Any = logged(row.case)
    for key in row.path:
        found = found[key]
    values = {gauge: found[name] for gauge, names in NAMES.items() for name in names if name in found}
    return {gauge: value for gauge, value in values.items() if isinstance(value, int | float)}


def logged(case: str) -> Mapping[str, Any]:
    """What a report has logged."""
    for line in CASES.read_text(encoding="utf-8").split("\n"):
        if line and json.loads(line)["id"] == case:
            return dict(json.loads(line)["logged"])
    raise LookupError(f"no report {case!r} in {CASES}")


def simulated(row: Row) -> dict[str, float]:
    """Gauges of a decode line with as many requests as run at most, just before one of them ends."""
    server = config(
        tokens=row.tokens, cap=row.cap, slots=row.slots, radix=row.radix, overlap=not row.radix, interval=1,
        context_length=262_144, schedule_conservativeness=0.3, chunked_prefill_size=-1, max_prefill_tokens=10_000_000,
    )  # fmt: skip
    resolved = replace(server.memory.resolved, strategy=row.strategy)  # type: ignore[arg-type]
    server = replace(server, memory=replace(server.memory, resolved=resolved))
    past = [(200 + 7 * number, 20 + number, 100) for number in range(row.history)]
    requests = [*past, *[(row.each - 29, 30, 30)] * row.in_flight]
    told = [each for _, each in run_closed_loop([Simulator(server)], requests, row.in_flight)]
    decoded = [each.gauges for each in told if isinstance(each, Line) and not each.new_seqs]
    return max(decoded, key=lambda gauges: (gauges["num_running_reqs"], gauges["kv_used_tokens"]))


def public_rows() -> None:
    """Print what others have published."""
    print("Published decode lines; pools and requests in flight as reported, the rest simulated")
    print(f"  {'report':<45}{'gauge':<24}{'seen':>10}{'simulated':>11}{'error':>8}")
    for row in ROWS:
        said = simulated(row)
        for gauge, seen in reported(row).items():
            error = "given" if gauge in row.given else f"{said[gauge] / seen - 1:+.1%}" if seen else f"{said[gauge]:+g}"
            digits = 2 if "usage" in gauge else 0
            print(f"  {row.case:<45}{gauge:<24}{seen:>10,.{digits}f}{said[gauge]:>11,.{digits}f}{error:>8}")
    for case, reason in LEFT_OUT.items():
        logged(case)
        print(f"  {case:<45}not simulated: {reason}")


def real_servers() -> None:
    """Print the largest deviations from real servers."""
    print("Largest deviation of any log line from a real server's; usages are logged with two digits")
    print(
        f"  {'version':<9}{'requests':<21}{'lines':>6}{'prefills':>9}{'retracted':>10}{'most running':>13}  deviations"
    )
    for folder in filter(None, os.environ.get("DFEXP_SGLANG", "").split(":")):
        server = OnCpu.of(Path(folder))
        for name, scenario in {**SCENARIOS, **LONG}.items():
            if server.version not in scenario.versions:
                continue
            with tempfile.TemporaryDirectory() as logs:
                found = compared(server, scenario, Path(logs) / "server.log")
            deviations = ", ".join(f"{what} {most:.3g}" for what, most in found.deviations.items())
            print(
                f"  {server.version:<9}{name:<21}{found.lines:>6}{found.prefills:>9}{found.retractions:>10}"
                f"{found.most_running:>13}  {deviations}"
            )


def main() -> None:
    """Print both tables."""
    real_servers()
    public_rows()


if __name__ == "__main__":
    main()
