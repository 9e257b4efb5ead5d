"""Startup reports of real servers against the sizing arithmetic, and the log reader against what each log records.

    python benchmarks/capacity_checks.py

Prints predicted beside logged for every row of checks.jsonl, then what the reader finds in every raw log.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dfexp.capacity import check
from dfexp.capacity.startup_log import Startup, read_startup

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "capacity"


def summary(startup: Startup) -> str:
    """What was read, in one line; a dash is a line that is not in the log."""
    state, kv = startup.state_pool, startup.kv_pool
    parts = {
        "pre": startup.pre_gib,
        "post": startup.post_gib,
        "slots": startup.max_mamba_cache_size,
        "conv": state and state.conv_gib,
        "ssm": state and state.ssm_gib,
        "tokens": kv and kv.tokens,
        "K": kv and kv.k_gib,
        "V": kv and kv.v_gib,
        "total": startup.max_total_num_tokens,
        "cap": startup.max_running_requests,
        "free": startup.available_gpu_mem_gib,
    }
    shown = "  ".join(f"{name} {'-' if value is None else value}" for name, value in parts.items())
    pools = f"  ({len(startup.kv_pools)} KV pools)" if len(startup.kv_pools) > 1 else ""
    return f"{shown}{pools}{'  error: ' + startup.errors[-1][:80] if startup.errors else ''}"


def recorded(case: dict[str, Any], startup: Startup) -> list[tuple[str, Any, Any]]:
    """What a case records of its own lines, and what the reader found, field by field."""
    logged = case["logged"]
    state, kv, failed = startup.state_pool, startup.kv_pool, startup.failed_state_pool
    found = {
        "load_weight_begin.avail_mem_gb": startup.load_begin_gib,
        "load_weight_end.avail_mem_gb": startup.load_end_gib,
        "load_weight_end.mem_usage_gb": startup.weights_gib,
        "memory_pool_end.avail_mem_gb": {rank: values[0] for rank, values in startup.pool_end_gib.items()},
        "cuda_graph_mem_usage_gb": {rank: values[-1] for rank, values in startup.graph_gib.items()},
        "avail_after_graph_gb": startup.after_graph_gib,
        "max_mamba_cache_size": failed[0] if failed else startup.max_mamba_cache_size,
        "total_rest_memory_gb": failed and failed[1],
        "mamba_cache_per_req_mb": failed and failed[2],
        "conv_state_gb": state and state.conv_gib,
        "ssm_state_gb": state and state.ssm_gib,
        "intermediate_ssm_state_cache_gb": state and state.intermediate_ssm_gib,
        "intermediate_conv_window_cache_gb": state and state.intermediate_conv_gib,
        "kv_tokens": kv and kv.tokens,
        "k_size_gb": kv and kv.k_gib,
        "v_size_gb": kv and kv.v_gib,
        "kv_size_gb": kv and kv.kv_gib,
        "max_total_num_tokens": startup.max_total_num_tokens,
        "max_running_requests": startup.max_running_requests,
        "chunked_prefill_size": startup.chunked_prefill_size,
        "max_prefill_tokens": startup.max_prefill_tokens,
        "context_len": startup.context_len,
        "available_gpu_mem_gb": startup.available_gpu_mem_gib,
        "full_layer_tokens": startup.swa and startup.swa[0],
        "swa_layer_tokens": startup.swa and startup.swa[1],
        "max_running_requests_effective": startup.max_running_requests,
    }
    compared = []
    for name, value in logged.items():
        if name not in found or value is None or isinstance(value, str):
            continue
        got = found[name]
        if isinstance(got, dict) and not isinstance(value, dict):
            got = min(got.values(), default=None)
        compared.append((name, value, got))
    return compared


def main() -> int:
    """Print both tables; the status is that of the checks."""
    texts = [(DATA / name).read_text(encoding="utf-8") for name in ("checks.jsonl", "more_checks.jsonl")]
    report = check.check_lines("\n".join(texts).split("\n"))
    print(check.render(report))
    print("\nReal logs of SGLang on a CPU:")
    for path in sorted((DATA / "logs").glob("*.log")):
        print(f"  {path.stem:<42} {summary(read_startup(path.read_text(encoding='utf-8').split(chr(10))))}")
    print("\nLines quoted in public reports, field by field:")
    for line in (DATA / "cases.jsonl").read_text(encoding="utf-8").split("\n"):
        case = json.loads(line) if line.strip() else {"raw_lines": []}
        for name, value, got in recorded(case, read_startup(case["raw_lines"])) if case["raw_lines"] else ():
            print(f"  {case['id']:<42} {name:<36} recorded {value!s:<34} read {'-' if got is None else got}")
    return report.status


if __name__ == "__main__":
    sys.exit(main())
