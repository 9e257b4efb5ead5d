"""Startup reports of real servers against the sizing arithmetic, and the log reader against what each log records.

    python benchmarks/capacity_checks.py

Prints predicted beside logged for every row of checks.jsonl, then what the reader finds in every raw log.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from dfexp.capacity import check
from dfexp.capacity.startup_log import FIRST, LAST, Startup, read_startup

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "capacity"


MORE = LAST | {
    "graph_gib": r"Capture .*graph end.*?mem usage=\s*(-?[\d.]+)\s*GB",
    "after_graph_gib": r"Capture .*graph end.*?avail mem=\s*([\d.]+)\s*GB",
    "chunked_prefill_size": r"(?<![\w-])chunked_prefill_size=(-?\d+)",
    "max_prefill_tokens": r"(?<![\w-])max_prefill_tokens=(\d+)",
    "available_gpu_mem_gib": r"available_(?:gpu|cpu|xpu|npu)_mem=\s*(-?[\d.]+)\s*GB",
    "capped_requests": r"is capped to (\d+) by",
    "capped_slots": r"is capped to .*?max_mamba_cache_size=(\d+)",
    "capped_slots_per_request": r"is capped to .*?(\d+) state slots per request",
    "full_tokens": r"full_layer_tokens=(\d+)",
    "sliding_tokens": r"swa_layer_tokens=(\d+)",
    "failed_slots": r"max_mamba_cache_size=(-?\d+) \(total_rest_memory=",
    "failed_rest_gib": r"total_rest_memory=(-?[\d.]+) GB",
    "failed_slot_mib": r"mamba_cache_per_req=([\d.]+) MB",
}
"""What the logs say besides what dfexp needs; `capped_*`: of a cap's warning, `failed_*`: of a boot without room."""
_ERROR = re.compile(r"^(?:\[[^\]]*\] ?)?\w*(?:Error|Exception): ")


def summary(lines: list[str]) -> str:
    """What was read, in one line; a dash is a line that is not in the log."""
    names = {
        "pre": "load_begin_gib", "post": "load_end_gib", "slots": "max_mamba_cache_size", "conv": "conv_gib",
        "ssm": "ssm_gib", "tokens": "kv_tokens", "K": "k_gib", "V": "v_gib", "total": "max_total_num_tokens",
        "cap": "max_running_requests", "free": "available_gpu_mem_gib",
    }  # fmt: skip
    startup, errors = read_startup(lines, MORE), [line.strip() for line in lines if _ERROR.match(line)]
    values = {short: startup.get(name) for short, name in names.items()}
    shown = "  ".join(f"{short} {'-' if value is None else f'{value:.10g}'}" for short, value in values.items())
    return f"{shown}{'  error: ' + errors[-1][:200] if errors else ''}"


RECORDED = {
    "load_weight_begin.avail_mem_gb": "load_begin_gib",
    "load_weight_end.avail_mem_gb": "load_end_gib",
    "load_weight_end.mem_usage_gb": "weights_gib",
    "memory_pool_end.avail_mem_gb": "pool_end_gib",
    "cuda_graph_mem_usage_gb": "graph_gib",
    "avail_after_graph_gb": "after_graph_gib",
    "total_rest_memory_gb": "failed_rest_gib",
    "mamba_cache_per_req_mb": "failed_slot_mib",
    "conv_state_gb": "conv_gib",
    "ssm_state_gb": "ssm_gib",
    "intermediate_ssm_state_cache_gb": "intermediate_ssm_gib",
    "intermediate_conv_window_cache_gb": "intermediate_conv_gib",
    "kv_tokens": "kv_tokens",
    "k_size_gb": "k_gib",
    "v_size_gb": "v_gib",
    "kv_size_gb": "kv_gib",
    "available_gpu_mem_gb": "available_gpu_mem_gib",
    "full_layer_tokens": "full_tokens",
    "swa_layer_tokens": "sliding_tokens",
}
"""What the cases call a value, and the field of the reader."""
INSTEAD = {
    "max_mamba_cache_size": ("failed_slots", "max_mamba_cache_size", "capped_slots"),
    "max_running_requests": ("max_running_requests", "capped_requests"),
    "max_running_requests_effective": ("max_running_requests", "capped_requests"),
}
"""Values that stand in several lines: the first that is there."""


def recorded(case: dict[str, Any], startup: Startup) -> list[tuple[str, Any, Any]]:
    """What a case records of its own lines, and what the reader found, field by field."""
    compared = []
    for name, value in case["logged"].items():
        fields = INSTEAD.get(name, (RECORDED.get(name, name),))
        if not {*fields} <= FIRST.keys() | MORE.keys() or value is None or isinstance(value, str):
            continue
        got = next((startup.get(field) for field in fields if startup.get(field) is not None), None)
        compared.append((name, value, startup.values.get(fields[0], {}) if isinstance(value, dict) else got))
    return compared


def main() -> int:
    """Print both tables; the status is that of the checks."""
    texts = [(DATA / name).read_text(encoding="utf-8") for name in ("checks.jsonl", "more_checks.jsonl")]
    report = check.check_lines("\n".join(texts).split("\n"))
    print(check.render(report))
    print("\nReal logs of SGLang on a CPU:")
    for path in sorted((DATA / "logs").glob("*.log")):
        print(f"  {path.stem:<42} {summary(path.read_text(encoding='utf-8').split(chr(10)))}")
    print("\nLines quoted in public reports, field by field:")
    for line in (DATA / "cases.jsonl").read_text(encoding="utf-8").split("\n"):
        case = json.loads(line) if line.strip() else {"raw_lines": []}
        if not case["raw_lines"]:
            continue
        for name, value, got in recorded(case, read_startup(case["raw_lines"], MORE)):
            read = f"{got:.10g}" if isinstance(got, float) else got or "-"
            print(f"  {case['id']:<42} {name:<36} recorded {value!s:<34} read {read}")
    return check.status(report)


if __name__ == "__main__":
    sys.exit(main())
