"""What SGLang's startup log says of sizes; any version, any rank prefix, nothing needed in full.

Logs print GiB and call them GB. A value whose line is not there is None, which is never the same as zero.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
_SIZE = rf"(?: size)?\s*[:=]?\s*{_NUMBER}\s*GB"
_AVAIL, _USED = rf"avail mem=\s*{_NUMBER}\s*GB", rf"mem usage=\s*{_NUMBER}\s*GB"
_STATE_LINE = r"^(?!.*(?:capped to|Computed|total_rest_memory)).*?"
_KV_LINE = rf"^(?=.*(?:KV|K size))(?=.*(?:#tokens|KV cache(?: tokens)?):\s*{_NUMBER[1:-1]})"

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
    name: rf"(?<![\w-]){name}={_NUMBER}" for name in ("max_total_num_tokens", "max_running_requests", "context_len")
}
"""Values of which the last counts."""
_RANK = re.compile(r"^\[[^\]]*?((?:DP\d+ ?)?(?:TP\d+)?(?: ?PP\d+)?(?: ?EP\d+)?)\]")
_ARGUMENT = re.compile(r"'?(\w+)'?[=:] ?('[^']*'|\"[^\"]*\"|-?[\d.]+(?:e-?\d+)?|None|True|False)(?=[,)}])")
_SECRETS = re.compile(r"(key|token|secret|password|launch_command)$", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Startup:
    """A startup log, as far as it goes. `values`: of each field, by rank (`""` where none is named); `server_args`:
    simple values as echoed, secrets left out.
    """

    values: dict[str, dict[str, float]] = field(default_factory=dict)
    server_args: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> float | None:
        """A value, of several ranks the least: the fullest rank decides."""
        return min(self.values.get(name, {}).values(), default=None)


def read_startup(lines: Iterable[str], last: Mapping[str, str] = LAST) -> Startup:
    """Read a log, up to where it ends. Lines of other kinds are passed over.

    Args: last, patterns of the values of which the last counts, by name.
    """
    found = Startup()
    for line in lines:
        _, is_echo, arguments = line.partition("server_args=")
        if is_echo:
            values = {name: _literal(value) for name, value in _ARGUMENT.findall(arguments)}
            found.server_args = {name: value for name, value in values.items() if not _SECRETS.search(name)}
            continue
        match = _RANK.match(line)
        rank = match.group(1).strip() if match else ""
        for name, pattern in {**FIRST, **last}.items():
            if match := re.search(pattern, line):
                by_rank = found.values.setdefault(name, {})
                if name in last or rank not in by_rank:
                    by_rank[rank] = float(match.group(1).replace(",", ""))
    return found


def _literal(text: str) -> Any:
    """The value that an echoed argument stands for; as text where it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text.strip("'\"")
