"""What SGLang's startup log and `/server_info` say of sizes; any version, any rank prefix, nothing needed in full.

Logs print GiB and call them GB. Values are None when their line is not there, which is never the same as zero.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dfexp.capacity.errors import CapacityError
from dfexp.capacity.flags import Flags, parse_flags
from dfexp.capacity.units import GiB

_NUMBER = r"(-?[\d,]+(?:\.\d+)?)"
_SIZE = r"\s*[:=]?\s*" + _NUMBER + r"\s*GB"
_PREFIX = re.compile(r"^\[[^\]]*?((?:DP\d+ ?)?(?:TP\d+)?(?: ?PP\d+)?(?: ?EP\d+)?)\]")
_SECRETS = re.compile(r"(key|token|secret|password|launch_command)$", re.IGNORECASE)


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
    max_mamba_cache_size: int | None
    conv_gib: GiB | None
    ssm_gib: GiB | None
    intermediate_ssm_gib: GiB | None
    intermediate_conv_gib: GiB | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """A startup log, as far as it goes.

    Memory by rank where ranks are named (`""` otherwise); pools in the order of their lines, a draft model's after the
    target's. `capped`: the cap, slots and slots per request of the warning that names all three. `errors`: last lines
    of exceptions. `server_args`: as echoed, secrets left out.
    """

    load_begin_gib: Mapping[str, GiB]
    load_end_gib: Mapping[str, GiB]
    weights_gib: Mapping[str, GiB]
    pool_end_gib: Mapping[str, tuple[GiB, ...]]
    graph_gib: Mapping[str, tuple[GiB, ...]]
    after_graph_gib: Mapping[str, GiB]
    state_pools: tuple[StatePool, ...]
    kv_pools: tuple[KvPool, ...]
    kv_dtype: str | None
    model_type: str | None
    graph_batches: tuple[int, ...]
    max_total_num_tokens: int | None
    max_running_requests: int | None
    chunked_prefill_size: int | None
    max_prefill_tokens: int | None
    context_len: int | None
    available_gpu_mem_gib: GiB | None
    capped: tuple[int, int, int] | None
    swa: tuple[int, int] | None
    failed_state_pool: tuple[int, GiB, float] | None
    errors: tuple[str, ...]
    server_args: Mapping[str, Any]

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
    """Read a log, up to where it ends. Lines of other kinds are passed over."""
    reader = _Reader()
    for line in lines:
        reader.line(line)
    return reader.result()


class _Reader:
    """Collects values line by line; later lines of a kind win for single values, pools are kept in order."""

    def __init__(self) -> None:
        self._by_rank: dict[str, dict[str, Any]] = {
            name: {} for name in ("begin", "end", "weights", "pool_end", "graph", "after_graph")
        }
        self._state: list[StatePool] = []
        self._kv: list[KvPool] = []
        self._one: dict[str, Any] = {}
        self._errors: list[str] = []
        self._args: dict[str, Any] = {}

    def line(self, line: str) -> None:
        """Take one line."""
        match = _PREFIX.match(line)
        rank = match.group(1).strip() if match else ""
        for handle in (self._memory, self._pools, self._limits, self._other):
            handle(line, rank)

    def result(self) -> Startup:
        """What was read."""
        tables = self._by_rank
        return Startup(
            load_begin_gib=tables["begin"],
            load_end_gib=tables["end"],
            weights_gib=tables["weights"],
            pool_end_gib=tables["pool_end"],
            graph_gib=tables["graph"],
            after_graph_gib=tables["after_graph"],
            state_pools=tuple(self._state),
            kv_pools=tuple(self._kv),
            errors=tuple(self._errors),
            server_args=self._args,
            graph_batches=self._one.pop("graph_batches", ()),
            **{
                name: self._one.get(name)
                for name in (
                    "kv_dtype", "model_type", "max_total_num_tokens", "max_running_requests", "chunked_prefill_size",
                    "max_prefill_tokens", "context_len", "available_gpu_mem_gib", "capped", "swa", "failed_state_pool",
                )
            },
        )  # fmt: skip

    def _memory(self, line: str, rank: str) -> None:
        free = _gib(r"avail mem=\s*" + _NUMBER + r"\s*GB", line)
        used = _gib(r"mem usage=\s*" + _NUMBER + r"\s*GB", line)
        if "Load weight begin" in line:
            _first(self._by_rank["begin"], rank, free)
        elif "Load weight end" in line:
            _first(self._by_rank["end"], rank, free)
            _first(self._by_rank["weights"], rank, used)
            kind = re.search(r"type=(\w+)", line)
            self._one.setdefault("model_type", kind.group(1) if kind else None)
        elif "Memory pool end" in line and free is not None:
            self._by_rank["pool_end"][rank] = (*self._by_rank["pool_end"].get(rank, ()), free)
        elif re.search(r"Capture .*graph end", line, re.IGNORECASE):
            if used is not None:
                self._by_rank["graph"][rank] = (*self._by_rank["graph"].get(rank, ()), used)
            if free is not None:
                self._by_rank["after_graph"][rank] = free
        batches = re.search(r"Capture .*graph.*\bbs[ =]*\[([\d, ]+)\]", line, re.IGNORECASE)
        if batches:
            self._one["graph_batches"] = tuple(int(part) for part in batches.group(1).split(",") if part.strip())

    def _pools(self, line: str, rank: str) -> None:
        if "server_args=" in line:
            return
        state = (
            _count(r"max_(?:mamba_cache_)?size\s*[:=]\s*" + _NUMBER, line),
            _gib(r"(?<!_)conv_state(?: size)?" + _SIZE, line),
            _gib(r"(?<!intermediate_)ssm_state(?: size)?" + _SIZE, line),
            _gib(r"intermediate_ssm_state_cache(?: size)?" + _SIZE, line),
            _gib(r"intermediate_conv_window_cache(?: size)?" + _SIZE, line),
        )
        if "capped to" not in line and "Computed" not in line and any(value is not None for value in state):
            self._add_state(rank, state)
        tokens = _count(r"#tokens:\s*" + _NUMBER, line) or _count(r"KV cache(?: tokens)?:\s*" + _NUMBER, line)
        if tokens is not None and ("KV Cache is allocated" in line or "KV cache" in line or "K size" in line):
            self._kv.append(
                KvPool(
                    rank=rank,
                    tokens=tokens,
                    k_gib=_gib(r"\bK(?: size)?" + _SIZE, line),
                    v_gib=_gib(r"\bV(?: size)?" + _SIZE, line),
                    kv_gib=_gib(r"\bKV size" + _SIZE, line),
                )
            )
        dtype = re.search(r"dtype: *([\w.]+)", line) or re.search(r"Using KV cache dtype: *([\w.]+)", line)
        if dtype and "KV" in line:
            self._one["kv_dtype"] = dtype.group(1).rstrip(".")

    def _add_state(self, rank: str, values: Sequence[Any]) -> None:
        """A pool, or more of the last one when its line was quoted in pieces."""
        names = ("max_mamba_cache_size", "conv_gib", "ssm_gib", "intermediate_ssm_gib", "intermediate_conv_gib")
        given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        last = self._state[-1] if self._state and self._state[-1].rank == rank else None
        if last is not None and all(getattr(last, name) is None for name in given):
            self._state[-1] = replace(last, **given)
        else:
            self._state.append(StatePool(rank=rank, **{name: given.get(name) for name in names}))

    def _limits(self, line: str, rank: str) -> None:
        del rank
        if "server_args=" in line:
            return
        for name in (
            "max_total_num_tokens",
            "max_running_requests",
            "chunked_prefill_size",
            "max_prefill_tokens",
            "context_len",
        ):
            value = _count(r"(?<![\w-])" + name + "=" + _NUMBER, line)
            if value is not None:
                self._one[name] = value
        free = _gib(r"available_(?:gpu|cpu|xpu|npu)_mem=\s*" + _NUMBER + r"\s*GB", line)
        if free is not None:
            self._one["available_gpu_mem_gib"] = free
        capped = re.search(
            r"max_running_requests is capped to (\d+) by .*?max_mamba_cache_size=(\d+), (\d+) state slots per request",
            line,
        )
        if capped:
            self._one["capped"] = tuple(int(part) for part in capped.groups())
            self._one.setdefault("max_running_requests", int(capped.group(1)))
        swa = re.search(r"full_layer_tokens=(\d+), swa_layer_tokens=(\d+)", line)
        if swa:
            self._one["swa"] = (int(swa.group(1)), int(swa.group(2)))

    def _other(self, line: str, rank: str) -> None:
        del rank
        failed = re.search(
            r"Computed max_mamba_cache_size=(-?\d+) \(total_rest_memory=(-?[\d.]+) GB, mamba_cache_per_req=([\d.]+) MB",
            line,
        )
        if failed:
            slots, rest, slot_mib = failed.groups()
            self._one["failed_state_pool"] = (int(slots), GiB(float(rest)), float(slot_mib))
        if re.match(r"^(?:\[[^\]]*\] ?)?\w*(?:Error|Exception): ", line):
            self._errors.append(line.strip()[:500])
        start = line.find("server_args=")
        if start >= 0:
            self._args = _echoed(line[start + len("server_args=") :].strip())


def _first(table: dict[str, Any], rank: str, value: GiB | None) -> None:
    """Keep a rank's first value: a draft model loads after the target and prints the same line."""
    if value is not None:
        table.setdefault(rank, value)


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
        if isinstance(node, ast.Dict):
            pairs = [(ast.literal_eval(key), value) for key, value in zip(node.keys, node.values, strict=True) if key]
        elif isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
        else:
            pairs = []
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
    renamed = {
        "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
        "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    }
    known = {item.name for item in fields(Flags)}
    flags: dict[str, Any] = {}
    for raw, value in server_args.items():
        name = renamed.get(raw, raw)
        if name not in known or value is None:
            continue
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
