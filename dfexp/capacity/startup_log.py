"""What SGLang's startup log says of sizes; any version, any rank prefix, nothing needed in full.

Logs print GiB and call them GB. A value whose line is not there is None, which is never the same as zero.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
_SIZE = rf"(?: size)?\s*[:=]?\s*{_NUMBER}\s*GB"
_AVAIL, _USED = rf"avail mem=\s*{_NUMBER}\s*GB", rf"mem usage=\s*{_NUMBER}\s*GB"
_STATE_LINE = r"^(?!.*(?:capped to|Computed|total_rest_memory)).*?"
_KV_LINE = rf"^(?=.*(?:KV|K size))(?=.*(?:#tokens|KV cache(?: tokens)?):\s*{_NUMBER[1:-1]})"
_FAILED = r"max_mamba_cache_size=(-?\d+) \(total_rest_memory=(-?[\d.]+) GB, mamba_cache_per_req=([\d.]+) MB"

FIRST = {
    "load_begin_gib": rf"Load weight begin.*?{_AVAIL}",
    "load_end_gib": rf"Load weight end.*?{_AVAIL}",
    "weights_gib": rf"Load weight end.*?{_USED}",
    "pool_end_gib": rf"Memory pool end.*?{_AVAIL}",
    "max_mamba_cache_size": rf"{_STATE_LINE}max_(?:mamba_cache_)?size\s*[:=]\s*{_NUMBER}",
    "conv_gib": rf"(?<!_)conv_state{_SIZE}",
    "ssm_gib": rf"(?<!intermediate_)ssm_state{_SIZE}",
    "intermediate_ssm_gib": rf"intermediate_ssm_state_cache{_SIZE}",
    "intermediate_conv_gib": rf"intermediate_conv_window_cache{_SIZE}",
    "kv_tokens": rf"^(?=.*(?:KV|K size)).*?(?:#tokens|KV cache(?: tokens)?):\s*{_NUMBER}",
    "k_gib": rf"{_KV_LINE}.*?\bK{_SIZE}",
    "v_gib": rf"{_KV_LINE}.*?\bV{_SIZE}",
    "kv_gib": rf"{_KV_LINE}.*?\bKV{_SIZE}",
}
"""Values of which the first of each rank counts: a draft model prints the same lines later."""
LAST = {
    "graph_gib": rf"Capture .*graph end.*?{_USED}",
    "after_graph_gib": rf"Capture .*graph end.*?{_AVAIL}",
    **{
        name: rf"(?<![\w-]){name}={_NUMBER}"
        for name in (
            "max_total_num_tokens", "max_running_requests", "chunked_prefill_size", "max_prefill_tokens", "context_len",
        )
    },
    "available_gpu_mem_gib": rf"available_(?:gpu|cpu|xpu|npu)_mem=\s*{_NUMBER}\s*GB",
    "capped_requests": r"is capped to (\d+) by",
    "capped_slots": r"is capped to .*?max_mamba_cache_size=(\d+)",
    "capped_slots_per_request": r"is capped to .*?(\d+) state slots per request",
    "full_tokens": r"full_layer_tokens=(\d+)",
    "sliding_tokens": r"swa_layer_tokens=(\d+)",
    "failed_slots": _FAILED,
    "failed_rest_gib": r"total_rest_memory=(-?[\d.]+) GB",
    "failed_slot_mib": r"mamba_cache_per_req=([\d.]+) MB",
}  # fmt: skip
"""Values of which the last counts; `capped_*`: from the warning about a cap, `failed_*`: from a boot without room."""
_NAMES = {"model_type": r"Load weight end.*?type=(\w+)", "kv_dtype": r"^(?=.*KV).*?dtype: *([\w.]*\w)"}
_RANK = re.compile(r"^\[[^\]]*?((?:DP\d+ ?)?(?:TP\d+)?(?: ?PP\d+)?(?: ?EP\d+)?)\]")
_ERROR = re.compile(r"^(?:\[[^\]]*\] ?)?\w*(?:Error|Exception): ")
_ARGUMENT = re.compile(r"'?(\w+)'?[=:] ?('[^']*'|\"[^\"]*\"|-?[\d.]+(?:e-?\d+)?|None|True|False)(?=[,)}])")
_SECRETS = re.compile(r"(key|token|secret|password|launch_command)$", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Startup:
    """A startup log, as far as it goes. `values`: of each field of FIRST and LAST, by rank (`""` where none is named);
    `names`: model_type and kv_dtype; `errors`: last lines of exceptions; `server_args`: simple values as echoed,
    secrets left out.
    """

    values: dict[str, dict[str, float]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    server_args: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> float | None:
        """A value, of several ranks the least: the fullest rank decides."""
        return min(self.values.get(name, {}).values(), default=None)


def read_startup(lines: Iterable[str]) -> Startup:
    """Read a log, up to where it ends. Lines of other kinds are passed over."""
    found = Startup()
    for line in lines:
        _, is_echo, arguments = line.partition("server_args=")
        if is_echo:
            values = {name: _literal(value) for name, value in _ARGUMENT.findall(arguments)}
            found.server_args = {name: value for name, value in values.items() if not _SECRETS.search(name)}
            continue
        if _ERROR.match(line):
            found.errors.append(line.strip()[:500])
        match = _RANK.match(line)
        _read_line(found, line, match.group(1).strip() if match else "")
    return found


def _literal(text: str) -> Any:
    """The value that an echoed argument stands for; as text where it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text.strip("'\"")


def _read_line(found: Startup, line: str, rank: str) -> None:
    for name, pattern in (FIRST | LAST).items():
        match = re.search(pattern, line)
        if match is None:
            continue
        value, by_rank = float(match.group(1).replace(",", "")), found.values.setdefault(name, {})
        if name in LAST or rank not in by_rank:
            by_rank[rank] = value
    for name, pattern in _NAMES.items():
        if match := re.search(pattern, line):
            found.names[name] = match.group(1)
