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
from dfexp.capacity.memory import MULTIMODAL_RESERVE_GIB, Free, fixed_slots, pool_bytes, request_cap, split
from dfexp.capacity.units import LOG_ROUNDING_GIB, GiB, to_gib

TOKENS_SHARE = 0.005
SLOTS, TOKENS, CAP = "max_mamba_cache_size", "max_total_num_tokens", "max_running_requests"
_POOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ssm_state_gib": (SLOTS, ("ssm",)),
    "conv_state_gib": (SLOTS, ("conv",)),
    "state_gib": (SLOTS, ("ssm", "conv")),
    "k_gib": (TOKENS, ("k",)),
    "v_gib": (TOKENS, ("v",)),
    "kv_gib": (TOKENS, ("k", "v")),
    **{f"intermediate_ssm{rest}": (CAP, ("intermediate_ssm",)) for rest in ("_gib", "_state_gib", "_state_cache_gib")},
    **{
        f"intermediate_conv{rest}": (CAP, ("intermediate_conv",))
        for rest in ("_gib", "_window_gib", "_window_cache_gib")
    },
}
"""What a logged size is called: the count that it follows from, and the pools that it adds up."""


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
    problem, not_checked = row.no_shape, {}
    try:
        counts, basis = _counts(row)
    except CapacityError as error:  # a report of a server that ran: no plan is a wrong prediction
        counts, basis, problem = {SLOTS: getattr(error, "slots", 0), TOKENS: 0, CAP: 0}, "no plan", str(error)
    compared = []
    for name, logged in row.expected.items():
        if name in (SLOTS, TOKENS, CAP):
            found = _count(name, counts, row.expected, basis) if name in counts else _why_not(name, row)
        elif name in _POOLS:
            found = _pool(row, name, logged, counts)
        else:
            found = "not a number that this check knows"
        if isinstance(found, Compared):
            compared.append(found)
        else:
            not_checked[name] = found
    return Checked(
        id=row.id,
        kind=row.kind,
        rules=row.rules.version,
        compared=tuple(compared),
        not_checked=not_checked,
        problem=problem,
    )


def _why_not(name: str, row: Row) -> str:
    return row.no_shape or ("given, not asked" if name == SLOTS else "no free memory is given to predict it from")


def _counts(row: Row) -> tuple[dict[str, int], str]:
    """Predicted slots, tokens and cap, and from what. Raises CapacityError."""
    rest = _rest(row)
    if rest is not None and row.shape is not None:
        plan = split(row.shape, row.flags, row.rules, rest, row.resolved)
        counts = {TOKENS: plan.max_total_num_tokens, CAP: plan.max_running_requests}
        slots_there = {SLOTS: plan.max_mamba_cache_size} if row.has_state else {}
        return counts | slots_there, "free memory" if row.rest_gib is None else "rest"
    given = fixed_slots(row.flags, row.resolved) if row.has_state else None
    counts = {} if given is None else {SLOTS: given}
    if row.flags.max_total_tokens is not None:
        counts[TOKENS] = row.flags.max_total_tokens // row.resolved.page_size * row.resolved.page_size
    slots, tokens = row.expected.get(SLOTS, given), row.expected.get(TOKENS)
    if slots is not None or not row.has_state:
        counts[CAP], _ = request_cap(
            row.flags, row.rules, row.resolved, context=row.context, tokens=None if tokens is None else int(tokens),
            slots=int(slots) if slots is not None and row.has_state else None,
        )  # fmt: skip
    return counts, "flags" if given is not None else "logged slots"


def _rest(row: Row) -> GiB | None:
    """GiB for both pools, by the row's kind where it gives both ways."""
    if row.rest_gib is not None and not (row.kind == "boot" and row.pre_gib is not None):
        return row.rest_gib
    if row.pre_gib is None or row.post_gib is None or row.flags.mem_fraction_static is None:
        return None
    rest = Free(pre=row.pre_gib, post=row.post_gib).rest(row.flags.mem_fraction_static, state=row.has_state)
    return GiB(rest - (MULTIMODAL_RESERVE_GIB if row.multimodal and row.rules.reserves_multimodal else 0.0))


def _count(name: str, counts: Mapping[str, int], expected: Mapping[str, float], basis: str) -> Compared:
    predicted, logged = counts[name], expected[name]
    error, allowed = float(predicted - logged), 0.0
    if name == TOKENS:
        error, allowed = error / max(abs(logged), 1), TOKENS_SHARE
    elif name == SLOTS or abs(counts.get(SLOTS, 0) - expected.get(SLOTS, float("inf"))) == 1:
        allowed = 1.0
    return _compared(name, predicted, logged, error, allowed, basis)


def _pool(row: Row, name: str, logged: float, counts: Mapping[str, int]) -> Compared | str:
    """A pool's size at the logged counts where they are there (so that it tests bytes alone), else at the predicted."""
    count, parts = _POOLS[name]
    at = {key: int(row.expected.get(key, counts.get(key, 0))) for key in (SLOTS, TOKENS, CAP)}
    if row.shape is None or not (count in row.expected or count in counts):
        return row.no_shape or f"{count} is neither given nor predicted"
    sizes = pool_bytes(
        row.shape,
        row.flags,
        row.rules,
        slots=at[SLOTS],
        tokens=at[TOKENS],
        page=row.resolved.page_size,
        requests=at[CAP],
    )
    predicted = to_gib(sum(sizes[part] for part in parts))
    slack = predicted / (at[SLOTS] + 1) if count == SLOTS else TOKENS_SHARE * logged
    allowed = LOG_ROUNDING_GIB * len(parts) + (0.0 if count in row.expected else slack) + 1e-9
    basis = f"{'logged' if count in row.expected else 'predicted'} {count}"
    return _compared(name, predicted, logged, predicted - logged, allowed, basis)


def _compared(name: str, predicted: float, logged: float, error: float, allowed: float, basis: str) -> Compared:
    return Compared(
        name=name,
        predicted=predicted,
        logged=logged,
        error=error,
        allowed=allowed,
        ok=abs(error) <= allowed,
        basis=basis,
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
    if item.name in (SLOTS, TOKENS, CAP):
        numbers = f"{item.predicted:>12.0f} {item.logged:>12.0f}"
        share = item.name == TOKENS
        error, allowed = (
            (f"{item.error:+.2%}", f"{item.allowed:.1%}") if share else (f"{item.error:+.0f}", f"{item.allowed:.0f}")
        )
    else:
        numbers = f"{item.predicted:>12.3f} {item.logged:>12.2f}"
        error, allowed = f"{item.error:+.3f}", f"{item.allowed:.3f}"
    verdict = "ok" if item.ok else "OUTSIDE"
    return f"{row_id:<34} {item.name:<22} {numbers} {error:>10} {allowed:>9}  {verdict}  ({item.basis})"
