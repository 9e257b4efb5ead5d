"""Startup reports against the sizing arithmetic: predicted beside logged, with the promise that each must keep.

Rows are JSON lines as described in docs/capacity.md. Nothing in a row is trusted: what cannot be read or is not
modelled is reported as such, never guessed and never a crash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dfexp.capacity.check_row import Row, RowError, read_row
from dfexp.capacity.errors import CapacityError
from dfexp.capacity.memory import MULTIMODAL_RESERVE_GIB, Free, pool_bytes, request_cap, split
from dfexp.capacity.units import LOG_ROUNDING_GIB, GiB, to_gib

TOKENS_SHARE = 0.005
_COUNTS = ("max_mamba_cache_size", "max_total_num_tokens", "max_running_requests")
_POOLS = {
    "ssm_state_gib": ("ssm",),
    "conv_state_gib": ("conv",),
    "intermediate_ssm_gib": ("intermediate_ssm",),
    "intermediate_ssm_state_gib": ("intermediate_ssm",),
    "intermediate_ssm_state_cache_gib": ("intermediate_ssm",),
    "intermediate_conv_gib": ("intermediate_conv",),
    "intermediate_conv_window_gib": ("intermediate_conv",),
    "intermediate_conv_window_cache_gib": ("intermediate_conv",),
    "k_gib": ("k",),
    "v_gib": ("v",),
    "kv_gib": ("k", "v"),
    "state_gib": ("ssm", "conv"),
    "state_pool_gib": ("ssm", "conv"),
}
_NEEDS_SLOTS = {"ssm", "conv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One number. `error`: predicted - logged, for tokens as a share; `allowed`: its promise; `basis`: from what."""

    name: str
    predicted: float
    logged: float
    error: float
    allowed: float
    ok: bool
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One row: what was compared, what was not and why, and what stopped it, if anything."""

    id: str
    kind: str
    rules: str
    compared: tuple[Compared, ...] = ()
    not_checked: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """No number is outside its promise."""
        return all(item.ok for item in self.compared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All rows, in their order."""

    rows: tuple[Checked, ...]

    @property
    def status(self) -> int:
        """0: every number keeps its promise; 1: one does not; 2: a line is unreadable, or nothing was compared."""
        if not all(row.ok for row in self.rows):
            return 1
        if any(row.kind == "unreadable" for row in self.rows) or not any(row.compared for row in self.rows):
            return 2
        return 0


def check_lines(lines: Iterable[str]) -> Report:
    """Check JSON lines; blank ones are skipped, malformed ones reported by their number."""
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise RowError(f"a row must be a JSON object, not {type(value).__name__}")
            rows.append(check_row(value, number))
        except (ValueError, ArithmeticError, RecursionError) as error:
            rows.append(Checked(id=f"line {number}", kind="unreadable", rules="", problem=str(error)))
    return Report(rows=tuple(rows))


def check_row(value: Mapping[str, Any], number: int = 0) -> Checked:
    """Check one row. Raises RowError when a field has a wrong type."""
    row = read_row(value, number)
    try:
        counts, basis, missing = _counts(row)
    except CapacityError as error:
        problem: str | None = str(error)
        counts, basis, missing = dict.fromkeys(_COUNTS, 0), "no plan", {}
        counts["max_mamba_cache_size"] = getattr(error, "slots", 0)
    else:
        problem = row.no_shape
    compared, skipped = _compare(row, counts, basis)
    reasons = {name: missing.get(name, why) for name, why in skipped.items()}
    return Checked(
        id=row.id,
        kind=row.kind,
        rules=row.rules.version,
        compared=tuple(compared),
        not_checked=reasons,
        problem=problem,
    )


def _counts(row: Row) -> tuple[dict[str, int], str, dict[str, str]]:
    """Predicted slots, tokens and cap, from what they were predicted, and what could not be and why."""
    rest = _rest(row)
    counts: dict[str, int]
    if rest is not None and row.shape is not None:
        plan = split(row.shape, row.flags, row.rules, rest, row.resolved)
        counts = {"max_total_num_tokens": plan.max_total_num_tokens, "max_running_requests": plan.max_running_requests}
        if row.has_state:
            counts["max_mamba_cache_size"] = plan.max_mamba_cache_size
        return counts, "free memory" if row.rest_gib is None else "rest", {}
    missing = {"max_total_num_tokens": row.no_shape or "no free memory is given, so tokens cannot be predicted"}
    counts = {}
    if row.flags.max_total_tokens is not None:
        counts["max_total_num_tokens"] = row.flags.max_total_tokens // row.resolved.page_size * row.resolved.page_size
    given = _given_slots(row)
    slots = row.expected.get("max_mamba_cache_size", given)
    if given is not None:
        counts["max_mamba_cache_size"] = given
    else:
        missing["max_mamba_cache_size"] = "given, not asked" if slots is not None else "no free memory is given"
    if slots is None and row.has_state:
        missing["max_running_requests"] = "neither free memory nor slots are given"
        return counts, "", missing
    tokens = row.expected.get("max_total_num_tokens")
    cap, _ = request_cap(
        row.flags,
        row.rules,
        row.resolved,
        context=row.context,
        slots=int(slots) if slots is not None and row.has_state else None,
        tokens=int(tokens) if tokens is not None else None,
    )
    counts["max_running_requests"] = cap
    return counts, "flags" if given is not None else "logged slots", missing


def _rest(row: Row) -> GiB | None:
    """GiB for both pools, by the row's kind where it gives both ways."""
    if row.rest_gib is not None and not (row.kind == "boot" and row.pre_gib is not None):
        return row.rest_gib
    if row.pre_gib is None or row.post_gib is None or row.flags.mem_fraction_static is None:
        return None
    rest = Free(pre=row.pre_gib, post=row.post_gib).rest(row.flags.mem_fraction_static, state=row.has_state)
    return GiB(rest - (MULTIMODAL_RESERVE_GIB if row.multimodal and row.rules.reserves_multimodal else 0.0))


def _given_slots(row: Row) -> int | None:
    """Slots that the flags fix whatever the memory."""
    shards = row.flags.dp_size if row.flags.enable_dp_attention else 1
    if not row.has_state:
        return None
    if row.flags.max_mamba_cache_size is not None:
        return row.flags.max_mamba_cache_size // shards
    if not row.resolved.radix_cache and row.resolved.max_running_requests is not None:
        return max(1, row.resolved.max_running_requests // shards)
    return None


def _compare(row: Row, counts: Mapping[str, int], basis: str) -> tuple[list[Compared], dict[str, str]]:
    compared, skipped = [], {}
    for name, logged in row.expected.items():
        if name in _COUNTS:
            if name in counts:
                compared.append(_count(name, counts, row.expected, basis))
            else:
                skipped[name] = row.no_shape or "not predicted"
        elif name in _POOLS:
            result = _pool(row, name, logged, counts)
            if isinstance(result, str):
                skipped[name] = result
            else:
                compared.append(result)
        else:
            skipped[name] = "not a number that this check knows"
    return compared, skipped


def _count(name: str, counts: Mapping[str, int], expected: Mapping[str, float], basis: str) -> Compared:
    predicted, logged = counts[name], expected[name]
    difference = predicted - logged
    if name == "max_total_num_tokens":
        error, allowed = difference / max(abs(logged), 1), TOKENS_SHARE
    else:
        slots = abs(counts.get("max_mamba_cache_size", 0) - expected.get("max_mamba_cache_size", float("inf")))
        error, allowed = difference, 1.0 if name == "max_mamba_cache_size" or slots == 1 else 0.0
    return Compared(
        name=name,
        predicted=predicted,
        logged=logged,
        error=error,
        allowed=allowed,
        ok=abs(error) <= allowed,
        basis=basis,
    )


def _pool(row: Row, name: str, logged: float, counts: Mapping[str, int]) -> Compared | str:
    """A pool's size at the logged counts where they are there (so that it tests bytes alone), else at the predicted."""
    if row.shape is None:
        return row.no_shape or "no shape is given"
    wanted = _POOLS[name]
    draft = "intermediate" in name
    key = "max_mamba_cache_size" if wanted[0] in _NEEDS_SLOTS else "max_total_num_tokens"
    key = "max_running_requests" if draft else key
    count = row.expected.get(key, counts.get(key))
    if count is None:
        return f"{key} is neither given nor predicted"
    at = {"max_mamba_cache_size": 0, "max_total_num_tokens": 0, "max_running_requests": 0, key: int(count)}
    if draft:
        at["max_mamba_cache_size"] = 1
    try:
        sizes = pool_bytes(
            row.shape, row.flags, row.rules, slots=at["max_mamba_cache_size"], tokens=at["max_total_num_tokens"],
            page=row.resolved.page_size, requests=at["max_running_requests"],
        )  # fmt: skip
    except CapacityError as error:
        return str(error)
    predicted = to_gib(sum(sizes[part] for part in wanted))
    exact = key in row.expected
    slack = predicted / (count + 1) if key == "max_mamba_cache_size" else TOKENS_SHARE * logged
    allowed = LOG_ROUNDING_GIB * len(wanted) + (0.0 if exact else slack)
    return Compared(
        name=name,
        predicted=predicted,
        logged=logged,
        error=predicted - logged,
        allowed=allowed,
        ok=abs(predicted - logged) <= allowed + 1e-9,
        basis=f"{'logged' if exact else 'predicted'} {key}",
    )


def to_json(report: Report) -> dict[str, Any]:
    """The report for machines; `error` of tokens is a share, of everything else a difference."""
    compared = [item for row in report.rows for item in row.compared]
    return {
        "status": report.status,
        "rows": [{**asdict(row), "ok": row.ok} for row in report.rows],
        "summary": {
            "rows": len(report.rows),
            "numbers": len(compared),
            "outside": sum(not item.ok for item in compared),
            "rows_outside": sum(not row.ok for row in report.rows),
            "unreadable": sum(row.kind == "unreadable" for row in report.rows),
        },
    }


def render(report: Report) -> str:
    """The report as a table, and below it what was not checked and why."""
    lines = [f"{'row':<34} {'number':<22} {'predicted':>12} {'logged':>12} {'error':>10} {'allowed':>9}  "]
    lines.append("-" * len(lines[0]))
    for row in report.rows:
        lines += [_line(row.id, item) for item in row.compared]
    notes = [f"{row.id}: {row.problem}" for row in report.rows if row.problem]
    notes += [f"{row.id}: {name} not checked: {why}" for row in report.rows for name, why in row.not_checked.items()]
    summary = to_json(report)["summary"]
    lines += ["", *notes, ""] if notes else [""]
    lines.append(
        f"{summary['rows']} rows, {summary['numbers']} numbers compared, {summary['outside']} outside the promise, "
        f"{summary['unreadable']} lines unreadable."
    )
    return "\n".join(lines)


def _line(row_id: str, item: Compared) -> str:
    if item.name in _COUNTS:
        numbers = f"{item.predicted:>12.0f} {item.logged:>12.0f}"
        share = item.name == "max_total_num_tokens"
        error, allowed = (
            (f"{item.error:+.2%}", f"{item.allowed:.1%}") if share else (f"{item.error:+.0f}", f"{item.allowed:.0f}")
        )
    else:
        numbers = f"{item.predicted:>12.3f} {item.logged:>12.2f}"
        error, allowed = f"{item.error:+.3f}", f"{item.allowed:.3f}"
    verdict = "ok" if item.ok else "OUTSIDE"
    return f"{row_id:<34} {item.name:<22} {numbers} {error:>10} {allowed:>9}  {verdict}  ({item.basis})"
