"""A bulk-generation run on eight RTX PRO 6000, two settings, against the model; then the plan that it gives, timed.

    python benchmarks/capacity_reference.py

Throughput is calibrated on the first setting alone and the completion lengths are fitted on its early counters alone;
all figures of the second setting are predicted. The prompt lengths are assumed (none were recorded).
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import yaml

from dfexp.capacity.errors import DoesNotFit
from dfexp.capacity.plan_command import Prepared, prepare, table
from dfexp.capacity.planner import Setting, make_plan
from dfexp.capacity.throughput import calibrate
from dfexp.capacity.workload import early_figures
from dfexp.hardware import UNMEASURED
from dfexp.params_plan import PlanGroup, SamplePart

FRACTIONS = tuple(round(0.70 + 0.01 * step, 2) for step in range(26))
PARAMS = Path(__file__).resolve().parent.parent / "params" / "expansion_v1.yaml"


def main() -> None:
    """Print sizes, rates, usages, what explains the caps, and the plan."""
    prepared = prepare(PlanGroup.model_validate(yaml.safe_load(PARAMS.read_text())["plan"]), [])
    before, after = prepared.variants["before"], prepared.variants["after"]
    prepared = _calibrated(prepared, before)
    before, after = (replace(part, efficiency=prepared.setting.efficiency) for part in (before, after))
    _sizes(before, after)
    _early(after)
    _explain(before, cap=37, slots_in_use=113, usage=0.61)
    _explain(after, cap=72, slots_in_use=128, usage=0.59)
    started = time.process_time()
    made = make_plan(prepared.setting)
    spent = time.process_time() - started
    print(f"\n{table(prepared, made)}\n\n{spent:.2f} s of one core for the plan")


def _calibrated(prepared: Prepared, before: Setting) -> Prepared:
    """One efficiency, from the first setting: 32 requests, 0.205 of its KV tokens used, 670 tok/s."""
    tokens = before.memory().max_total_num_tokens
    sample = SamplePart(running=32, context=0.205 * tokens / 32, tok_per_s=670)
    found = calibrate(before.server, before.workload, [sample], UNMEASURED, provenance="fitted on the first setting")
    return replace(prepared, setting=replace(prepared.setting, efficiency=found))


def _sizes(before: Setting, after: Setting) -> None:
    print(f"{'':<26}{'before':>10}{'seen':>10}{'after':>10}{'seen':>12}")
    rows: dict[str, list[str]] = {}
    for part in (before, after):
        memory = part.memory()
        got = part.predict(memory, part.concurrency)
        for name, value in {
            "state slots": f"{memory.max_mamba_cache_size}",
            "max_running_requests": f"{memory.max_running_requests}",
            "KV tokens": f"{memory.max_total_num_tokens:,}",
            "mamba usage": f"{got.mamba_usage:.2f}",
            "full token usage": f"{got.full_token_usage:.2f}",
            "decode tok/s a GPU": f"{got.tok_per_s:,.0f}",
            "step ms": f"{got.step_s * 1e3:.1f}",
        }.items():
            rows.setdefault(name, []).append(value)
    seen = {
        "state slots": ("185-187", "216-218"), "max_running_requests": ("37", "72"), "mamba usage": ("0.61", "0.59"),
        "KV tokens": ("~248,000", "~289,000"), "full token usage": ("0.20-0.21", "0.36-0.49"),
        "decode tok/s a GPU": ("670", "1,180"), "step ms": ("47.8", "54.2"),
    }  # fmt: skip
    for name, (first, second) in rows.items():
        print(f"{name:<26}{first:>10}{seen[name][0]:>10}{second:>10}{seen[name][1]:>12}")
    print(f"efficiency: {before.efficiency.bandwidth:.3f} of the bandwidth, fitted on the first setting")


def _early(after: Setting) -> None:
    """The second setting's counters at 480 s, from lengths fitted on the first."""
    completion = after.workload.completion
    generated = 1180 / 64 * 480
    completions, in_flight = early_figures(completion, generated)
    print(f"\ncompletions: {completion.label}, mean {completion.mean:,.0f} (the counter said 2,473 so far)")
    print(f"after, at 480 s: {completions * 512:,.0f} completions of mean {(generated - in_flight) / completions:,.0f}"
          " predicted, 1,397 of mean 2,660 seen")  # fmt: skip


def explain_cap(part: Setting, *, cap: int, slots_in_use: int, mamba_usage: float) -> list[tuple[float, str]]:
    """Memory fractions (0.70 to 0.95) and state dtypes under which a server shows this request cap and, with so many
    state slots in use, this usage (two decimals).
    """
    found = []
    for dtype in ("bfloat16", "float32"):
        for fraction in FRACTIONS:
            flags = replace(part.server.flags, mem_fraction_static=fraction, mamba_ssm_dtype=dtype)
            try:
                memory = part.with_flags(flags).memory()
            except DoesNotFit:
                continue
            usage = slots_in_use / memory.max_mamba_cache_size
            if memory.max_running_requests == cap and abs(usage - mamba_usage) <= 0.005:
                found.append((fraction, dtype))
    return found


def _explain(part: Setting, *, cap: int, slots_in_use: int, usage: float) -> None:
    found = explain_cap(part, cap=cap, slots_in_use=slots_in_use, mamba_usage=usage)
    fits = [f"{fraction} with {dtype} states" for fraction, dtype in found]
    print(f"a cap of {cap} with {slots_in_use} slots at usage {usage} means a fraction of {', '.join(fits) or 'none'}")


if __name__ == "__main__":
    main()
