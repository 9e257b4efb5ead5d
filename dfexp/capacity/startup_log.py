"""What SGLang's startup log and `/server_info` say of sizes; any version, any rank prefix, nothing needed in full.

Logs print GiB and call them GB. Values are None when their line is not there, which is never the same as zero.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dfexp.capacity.errors import CapacityError
from dfexp.capacity.flags import OLD_NAMES, Flags, parse_flags
from dfexp.capacity.units import GiB

_NUMBER = r"(-?[\d,]+(?:\.\d+)?)"
_SIZE = r"(?: size)?\s*[:=]?\s*" + _NUMBER + r"\s*GB"
_RANK = re.compile(r"^\[[^\]]*?((?:DP\d+ ?)?(?:TP\d+)?(?: ?PP\d+)?(?: ?EP\d+)?)\]")
_SECRETS = re.compile(r"(key|token|secret|password|launch_command)$", re.IGNORECASE)
_STATE_SIZES = {
    "conv_gib": r"(?<!_)conv_state",
    "ssm_gib": r"(?<!intermediate_)ssm_state",
    "intermediate_ssm_gib": r"intermediate_ssm_state_cache",
    "intermediate_conv_gib": r"intermediate_conv_window_cache",
}
_LIMITS = ("max_total_num_tokens", "max_running_requests", "chunked_prefill_size", "max_prefill_tokens", "context_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """One `KV Cache is allocated` line. MLA prints one size (`kv_gib`), others two."""

    rank: str
    tokens: int
    k_gib: GiB | None
    v_gib: GiB | None
    kv_gib: GiB | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePool:
    """One `Mamba Cache is allocated` line."""

    rank: str
    max_mamba_cache_size: int | None = None
    conv_gib: GiB | None = None
    ssm_gib: GiB | None = None
    intermediate_ssm_gib: GiB | None = None
    intermediate_conv_gib: GiB | None = None


@dataclass(slots=True, kw_only=True)
class Startup:
    """A startup log, as far as it goes; `read_startup` fills it and nothing changes it afterwards.

    Memory by rank where ranks are named (`""` otherwise); pools in the order of their lines, a draft model's after the
    target's. `capped`: cap, slots and slots per request of the warning that names all three; `swa`: full and sliding
    tokens; `failed_state_pool`: slots, rest in GiB and MiB per slot of a boot that had no room; `errors`: last lines of
    exceptions; `server_args`: as echoed, secrets left out.
    """

    load_begin_gib: dict[str, GiB] = field(default_factory=dict)
    load_end_gib: dict[str, GiB] = field(default_factory=dict)
    weights_gib: dict[str, GiB] = field(default_factory=dict)
    pool_end_gib: dict[str, list[GiB]] = field(default_factory=dict)
    graph_gib: dict[str, list[GiB]] = field(default_factory=dict)
    after_graph_gib: dict[str, GiB] = field(default_factory=dict)
    state_pools: list[StatePool] = field(default_factory=list)
    kv_pools: list[KvPool] = field(default_factory=list)
    kv_dtype: str | None = None
    model_type: str | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    context_len: int | None = None
    available_gpu_mem_gib: GiB | None = None
    capped: tuple[int, int, int] | None = None
    swa: tuple[int, int] | None = None
    failed_state_pool: tuple[int, GiB, float] | None = None
    errors: list[str] = field(default_factory=list)
    server_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state_pool(self) -> StatePool | None:
        """The target model's state pool: the first line."""
        return self.state_pools[0] if self.state_pools else None

    @property
    def kv_pool(self) -> KvPool | None:
        """The target model's KV pool: the first line."""
        return self.kv_pools[0] if self.kv_pools else None

    @property
    def max_mamba_cache_size(self) -> int | None:
        """State slots, from the pool's line or from the warning about the cap."""
        if self.state_pool and self.state_pool.max_mamba_cache_size is not None:
            return self.state_pool.max_mamba_cache_size
        return self.capped[1] if self.capped else None

    @property
    def pre_gib(self) -> GiB | None:
        """Free memory before loading on the fullest rank."""
        return min(self.load_begin_gib.values(), default=None)

    @property
    def post_gib(self) -> GiB | None:
        """Free memory after loading on the fullest rank."""
        return min(self.load_end_gib.values(), default=None)


def read_startup(lines: Iterable[str]) -> Startup:
    """Read a log, up to where it ends. Lines of other kinds are passed over; of one kind the last wins."""
    found = Startup()
    for line in lines:
        start = line.find("server_args=")
        if start >= 0:
            found.server_args = _echoed(line[start + len("server_args=") :].strip())
            continue
        match = _RANK.match(line)
        rank = match.group(1).strip() if match else ""
        _read_memory(found, line, rank)
        _read_pools(found, line, rank)
        _read_limits(found, line)
    return found


def _read_memory(found: Startup, line: str, rank: str) -> None:
    free_gib = _gib(r"avail mem=\s*" + _NUMBER + r"\s*GB", line)
    used = _gib(r"mem usage=\s*" + _NUMBER + r"\s*GB", line)
    graph = re.search(r"Capture .*graph end", line, re.IGNORECASE) is not None
    if "Load weight begin" in line and free_gib is not None:
        found.load_begin_gib.setdefault(rank, free_gib)  # a draft model prints the same line later
    elif "Load weight end" in line:
        kind = re.search(r"type=(\w+)", line)
        found.model_type = found.model_type or (kind.group(1) if kind else None)
        if free_gib is not None:
            found.load_end_gib.setdefault(rank, free_gib)
        if used is not None:
            found.weights_gib.setdefault(rank, used)
    elif "Memory pool end" in line and free_gib is not None:
        found.pool_end_gib.setdefault(rank, []).append(free_gib)
    elif graph and used is not None:
        found.graph_gib.setdefault(rank, []).append(used)
    if graph and free_gib is not None:
        found.after_graph_gib[rank] = free_gib


def _read_pools(found: Startup, line: str, rank: str) -> None:
    sizes: dict[str, Any] = {name: _gib(pattern + _SIZE, line) for name, pattern in _STATE_SIZES.items()}
    sizes["max_mamba_cache_size"] = _count(r"max_(?:mamba_cache_)?size\s*[:=]\s*" + _NUMBER, line)
    given = {name: value for name, value in sizes.items() if value is not None}
    if given and "capped to" not in line and "Computed" not in line:
        last = found.state_pools[-1] if found.state_pools else StatePool(rank=rank)
        if last.rank == rank and found.state_pools and all(getattr(last, name) is None for name in given):
            found.state_pools[-1] = replace(last, **given)  # one line, quoted in pieces
        else:
            found.state_pools.append(StatePool(rank=rank, **given))
    tokens = _count(r"(?:#tokens|KV cache(?: tokens)?):\s*" + _NUMBER, line)
    if tokens is not None and ("KV" in line or "K size" in line):
        k, v, kv = (_gib(rf"\b{name}" + _SIZE, line) for name in ("K", "V", "KV"))
        found.kv_pools.append(KvPool(rank=rank, tokens=tokens, k_gib=k, v_gib=v, kv_gib=kv))
    dtype = re.search(r"dtype: *([\w.]+)", line)
    if dtype and "KV" in line:
        found.kv_dtype = dtype.group(1).rstrip(".")


def _read_limits(found: Startup, line: str) -> None:
    for name in _LIMITS:
        value = _count(r"(?<![\w-])" + name + "=" + _NUMBER, line)
        if value is not None:
            setattr(found, name, value)
    free = _gib(r"available_(?:gpu|cpu|xpu|npu)_mem=\s*" + _NUMBER + r"\s*GB", line)
    found.available_gpu_mem_gib = free if free is not None else found.available_gpu_mem_gib
    capped = re.search(r"is capped to (\d+) by .*?max_mamba_cache_size=(\d+), (\d+) state slots per request", line)
    if capped:
        found.capped = (int(capped[1]), int(capped[2]), int(capped[3]))
        found.max_running_requests = found.max_running_requests or found.capped[0]
    swa = re.search(r"full_layer_tokens=(\d+), swa_layer_tokens=(\d+)", line)
    found.swa = (int(swa[1]), int(swa[2])) if swa else found.swa
    failed = re.search(
        r"max_mamba_cache_size=(-?\d+) \(total_rest_memory=(-?[\d.]+) GB, mamba_cache_per_req=([\d.]+) MB", line
    )
    if failed:
        found.failed_state_pool = (int(failed[1]), GiB(float(failed[2])), float(failed[3]))
    if re.match(r"^(?:\[[^\]]*\] ?)?\w*(?:Error|Exception): ", line):
        found.errors.append(line.strip()[:500])


def _gib(pattern: str, line: str) -> GiB | None:
    match = re.search(pattern, line)
    return GiB(float(match.group(1).replace(",", ""))) if match else None


def _count(pattern: str, line: str) -> int | None:
    match = re.search(pattern, line)
    return int(float(match.group(1).replace(",", ""))) if match else None


def _echoed(text: str) -> dict[str, Any]:
    """The echoed arguments, `ServerArgs(...)` or `{...}`, without secrets; item by item where not all is literal."""
    try:
        node = ast.parse(text, mode="eval").body
        pairs: list[tuple[Any, ast.expr]] = []
        if isinstance(node, ast.Dict):
            pairs = [(ast.literal_eval(key), value) for key, value in zip(node.keys, node.values, strict=True) if key]
        elif isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
        found = {str(key): _literal(value) for key, value in pairs}
    except (SyntaxError, ValueError):
        items = re.findall(r"'?(\w+)'?[=:] ?('[^']*'|[-\d.e]+|None|True|False)(?=[,)}])", text)
        found = {key: _literal(ast.parse(value, mode="eval").body) for key, value in items}
    return {key: value for key, value in found.items() if not _SECRETS.search(key)}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def flags_of(server_args: Mapping[str, Any]) -> Flags:
    """The flags that decide sizes, from echoed arguments or `/server_info`; what is of another type is passed over."""
    known = {item.name for item in fields(Flags)}
    flags: dict[str, Any] = {}
    for raw, value in server_args.items():
        name = OLD_NAMES.get(raw, raw)
        if name in known and value is not None:
            try:
                parse_flags({name: value})
            except CapacityError:
                continue
            flags[name] = value
    return parse_flags(flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """Sizes in a `/server_info` reply. The cap is the effective one; `requested` is what its top level echoes."""

    version: str | None
    max_running_requests: int | None
    requested: int | None
    max_total_num_tokens: int | None
    max_mamba_cache_size: int | None
    flags: Flags


def read_server_info(info: Mapping[str, Any]) -> ServerInfo:
    """Read a reply; unknown or missing fields are None."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}

    def number(source: Mapping[str, Any], name: str) -> int | None:
        value = source.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return ServerInfo(
        version=str(info["version"]) if isinstance(info.get("version"), str) else None,
        max_running_requests=number(state, "effective_max_running_requests_per_dp"),
        requested=number(info, "max_running_requests"),
        max_total_num_tokens=number(info, "max_total_num_tokens") or number(state, "max_total_num_tokens"),
        max_mamba_cache_size=number(state, "max_mamba_cache_size"),
        flags=flags_of(info),
    )
