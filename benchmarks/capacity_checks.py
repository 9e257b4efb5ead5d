"""Startup reports of real servers against the sizing arithmetic, and the log reader against what each log records.

    python benchmarks/capacity_checks.py

Prints predicted beside logged for every row of checks.jsonl, then what the reader finds in every raw log.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

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


def main() -> int:
    """Print both tables; the status is that of the checks."""
    report = check.check_lines((DATA / "checks.jsonl").read_text(encoding="utf-8").split("\n"))
    print(check.render(report))
    print("\nReal logs of SGLang on a CPU:")
    for path in sorted((DATA / "logs").glob("*.log")):
        print(f"  {path.stem:<42} {summary(read_startup(path.read_text(encoding='utf-8').split(chr(10))))}")
    print("\nLines quoted in public reports:")
    for line in (DATA / "cases.jsonl").read_text(encoding="utf-8").split("\n"):
        if line.strip():
            case = json.loads(line)
            if case["raw_lines"]:
                print(f"  {case['id']:<42} {summary(read_startup(case['raw_lines']))}")
    return report.status


if __name__ == "__main__":
    sys.exit(main())
