"""`dfexp capacity check`: startup reports of servers beside the sizing arithmetic, each number with its promise.

Rows are JSON lines as described in docs/capacity.md. Nothing in a row is trusted: what cannot be read or is not
modelled is reported as such, never guessed and never a crash.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dfexp.capacity.config import Fields
from dfexp.capacity.errors import CapacityError, DoesNotFit, first_mistake
from dfexp.capacity.flags import FLAG_NAMES, Flags, Resolved, Rules, parse_flags, resolve, rules, rules_at
from dfexp.capacity.memory import Free, fixed_slots, multimodal_reserve_gib, pool_bytes, request_cap, split
from dfexp.capacity.models import load_model
from dfexp.capacity.shape import GIB, Attention, ModelShape, StateLayers, dtype_bytes

TOKENS_SHARE = 0.005
LOG_ROUNDING_GIB = 0.005
"""Half of the last digit that SGLang's startup log prints."""
LONGEST_CONTEXT = 262_144
SLOTS, TOKENS, CAP = "max_mamba_cache_size", "max_total_num_tokens", "max_running_requests"
_POOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ssm_state_gib": (SLOTS, ("ssm",)),
    "conv_state_gib": (SLOTS, ("conv",)),
    "k_gib": (TOKENS, ("k",)),
    "v_gib": (TOKENS, ("v",)),
    "kv_gib": (TOKENS, ("k", "v")),
    "intermediate_ssm_gib": (CAP, ("intermediate_ssm",)),
    "intermediate_conv_gib": (CAP, ("intermediate_conv",)),
}
"""What a logged size is called: the count that it follows from, and the pools that it adds up."""
_ROW_NAMES = {
    "strategy": "mamba_strategy", "ssm_dtype": "mamba_ssm_dtype", "kv_dtype": "kv_cache_dtype",
    "tp": "tp_size", "dp": "dp_size", "pp": "pp_size",
}  # fmt: skip
_Number = Annotated[float, Field(ge=-1e15, le=1e15)]


class _Row(BaseModel):
    """The fields of a row that are not flags. Wrong types are errors, unknown fields are not."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    kind: Any = "unknown"
    date: str | None = None
    sglang_version: str = ""
    charges_padding_slot: bool | None = None
    model: str | None = None
    multimodal: bool = False
    pre_gib: _Number | None = None
    post_gib: _Number | None = None
    rest_gib: _Number | None = None
    logged: dict[str, _Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A row as far as it could be understood; `no_shape` says why `shape` is None."""

    row: _Row
    rules: Rules
    flags: Flags
    resolved: Resolved
    shape: ModelShape | None
    no_shape: str
    has_state: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One number. `error`: predicted - logged, for tokens as a share; `allowed`: its promise; `basis`: from what."""

    name: str
    predicted: float
    logged: float
    error: float
    allowed: float
    basis: str

    @property
    def ok(self) -> bool:
        """The promise is kept."""
        return abs(self.error) <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One row: what was compared, and in `notes` what was not and why, or what stopped it."""

    id: str
    kind: str
    rules: str = ""
    compared: tuple[Compared, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """No number is outside its promise."""
        return all(item.ok for item in self.compared)


def check_lines(lines: Iterable[str]) -> tuple[Checked, ...]:
    """Check JSON lines; blank ones are skipped, malformed ones reported by their number."""
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        value: Any = None
        try:
            value = json.loads(line)
            rows.append(check_row(value, number))
        except (CapacityError, ValueError, ArithmeticError, RecursionError) as error:
            reason = first_mistake(error) if isinstance(error, ValidationError) else str(error)
            rows.append(Checked(id=_name(value, number), kind="unreadable", notes=(reason,)))
    return tuple(rows)


def _name(value: Any, number: int) -> str:
    """The row's own id, else its line."""
    own = value.get("id") if isinstance(value, dict) else None
    return str(own or f"line {number}")


def status(rows: Sequence[Checked]) -> int:
    """0: every number keeps its promise; 1: one does not; 2: a line is unreadable, or nothing was compared."""
    if not all(row.ok for row in rows):
        return 1
    return 2 if any(row.kind == "unreadable" for row in rows) or not any(row.compared for row in rows) else 0


def check_row(value: Any, number: int = 0) -> Checked:
    """Check one row. Raises ValidationError, ValueError or CapacityError when it or a field has a wrong type."""
    case = _understood(value)
    notes = [case.no_shape] if case.no_shape else []
    try:
        counts, basis = _counts(case)
    except CapacityError as error:  # a report of a server that ran: no plan is a wrong prediction
        slots = error.slots if isinstance(error, DoesNotFit) else 0
        counts, basis = {SLOTS: slots, TOKENS: 0, CAP: 0}, "no plan"
        notes.append(str(error))
    compared = []
    for name in case.row.logged:
        found = _pool(case, name, counts) if name in _POOLS else _count(case, name, counts, basis)
        if isinstance(found, Compared):
            compared.append(found)
        else:
            notes.append(f"{name} not checked: {found}")
    unknown = [name for name in value.get("expected") or {} if name not in (*_POOLS, SLOTS, TOKENS, CAP)]
    notes += [f"{name} not checked: not a number that this check knows" for name in unknown]
    return Checked(
        id=_name(value, number),
        kind=str(case.row.kind),
        rules=case.rules.version,
        compared=tuple(compared),
        notes=tuple(notes),
    )


def _understood(value: Any) -> _Case:
    """The parts of a row. Raises as `check_row` does."""
    whole = value if isinstance(value, dict) else {"shape": value}
    inputs, part, expected = (whole.get(key) or {} for key in ("inputs", "shape", "expected"))
    if not all(isinstance(item, dict) for item in (value, inputs, part, expected)):
        raise ValueError("a row, its inputs, shape and expected must be JSON objects")
    given = {key: item for source in (whole, inputs) for key, item in source.items() if item is not None}
    logged = {name: expected[name] for name in (SLOTS, TOKENS, CAP, *_POOLS) if expected.get(name) is not None}
    row = _Row.model_validate({**given, "logged": logged})
    try:
        version = rules(row.sglang_version)
    except CapacityError:  # a commit, a fork or nothing: the date decides
        version = rules_at(row.date, row.charges_padding_slot)
    flags, no_shape = _flags(given)
    shape = None
    try:
        shape = None if no_shape else _shape(row, part)
        if shape is not None and shape.state is not None:
            shape.state.slot_bytes(flags.tp_size, 4)  # fails where tp does not divide it
    except CapacityError as error:
        shape, no_shape = None, str(error)
    has_state = part.get("state_kind") not in (None, "none", "dense")
    if not part:
        has_state = shape.state is not None if shape else SLOTS in logged or flags.max_mamba_cache_size is not None
    resolved = replace(resolve(flags, version, has_state=has_state), page_size=flags.page_size or 1)
    return _Case(
        row=row, rules=version, flags=flags, resolved=resolved, shape=shape, no_shape=no_shape, has_state=has_state
    )


def _flags(given: Mapping[str, Any]) -> tuple[Flags, str]:
    """The row's flags, and what of them is not modelled. A strategy that is not given was `no_buffer`."""
    flags: dict[str, Any] = {"mamba_strategy": "no_buffer"}
    problem = ""
    for raw, value in given.items():
        name = _ROW_NAMES.get(raw, raw)
        if name in FLAG_NAMES:
            flags[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    for name in ("mamba_ssm_dtype", "kv_cache_dtype"):
        try:
            dtype_bytes(str(flags.get(name, "bfloat16")).replace("auto", "bfloat16"))
        except CapacityError as error:
            problem = str(error)
        if problem or flags.get(name) == "auto":
            flags.pop(name, None)
    parsed = parse_flags(flags)
    if parsed.pp_size > 1 or parsed.dp_size > 1:
        problem = "pipeline and data parallelism inside a server are not modelled"
    return parsed, problem


def _shape(row: _Row, part: Mapping[str, Any]) -> ModelShape:
    """The row's shape, or that of the model it names. Raises CapacityError."""
    if not part:
        return load_model(str(row.model)).shape
    get, kind = Fields(part, "shape").count, str(part.get("state_kind") or "none")
    if kind not in ("gdn", "mamba2", "none", "dense"):
        raise CapacityError(f"state_kind {kind!r} is not modelled (gdn and mamba2 are)")
    state = None
    if kind in ("gdn", "mamba2"):
        state = StateLayers(
            kind=kind, layers=get("state_layers"), heads=get("v_heads", "heads"),
            head_dim=get("v_dim", "head_dim_state"), state_size=get("k_dim", "state_size"),
            groups=get("k_heads", "n_groups"), conv_kernel=get("conv_kernel"),
        )  # fmt: skip
    layers = get("attention_layers")
    if part.get("kv_lora_rank") is not None:
        rank, width = get("kv_lora_rank"), get("kv_lora_rank") + get("qk_rope_head_dim")
        attention = Attention(layers=layers, query_heads=1, kv_heads=1, k_dim=width, v_dim=rank, latent=True)
    else:
        k_dim, v_dim = get("k_head_dim", "head_dim"), get("v_head_dim", "head_dim")
        attention = Attention(layers=layers, query_heads=1, kv_heads=get("kv_heads"), k_dim=k_dim, v_dim=v_dim)
    return ModelShape(name="", context_length=LONGEST_CONTEXT, attention=attention, state=state)


def _counts(case: _Case) -> tuple[dict[str, int], str]:
    """Predicted slots, tokens and cap, and from what. Raises CapacityError."""
    flags, resolved, logged = case.flags, case.resolved, case.row.logged
    rest_gib = _rest_gib(case)
    if rest_gib is not None and case.shape is not None:
        plan = split(case.shape, flags, case.rules, rest_gib, resolved)
        counts = {TOKENS: plan.max_total_num_tokens, CAP: plan.max_running_requests}
        slots_there = {SLOTS: plan.max_mamba_cache_size} if case.has_state else {}
        return counts | slots_there, "free memory" if case.row.rest_gib is None else "rest"
    fixed = fixed_slots(flags, resolved) if case.has_state else None
    counts = {} if fixed is None else {SLOTS: fixed}
    if flags.max_total_tokens is not None:
        counts[TOKENS] = flags.max_total_tokens // resolved.page_size * resolved.page_size
    if not case.has_state or SLOTS in logged or fixed is not None:
        slots = int(logged.get(SLOTS, fixed or 0)) if case.has_state else None
        tokens = int(logged[TOKENS]) if TOKENS in logged else None
        context = flags.context_length or (case.shape.context_length if case.shape else LONGEST_CONTEXT)
        counts[CAP], _ = request_cap(case.rules, resolved, context=context, slots=slots, tokens=tokens)
    return counts, "flags" if fixed is not None else "logged slots"


def _rest_gib(case: _Case) -> float | None:
    """GiB for both pools, by the row's kind where it gives both ways."""
    row, fraction = case.row, case.flags.mem_fraction_static
    if row.rest_gib is not None and (row.kind != "boot" or row.pre_gib is None):
        return row.rest_gib
    if row.pre_gib is None or row.post_gib is None or fraction is None:
        return None
    reserve = multimodal_reserve_gib(case.rules, is_multimodal=row.multimodal)
    free = Free(pre_gib=row.pre_gib, post_gib=row.post_gib)
    return free.rest_gib(fraction, has_state=case.has_state, reserve_gib=reserve)


def _count(case: _Case, name: str, counts: Mapping[str, int], basis: str) -> Compared | str:
    logged, is_given = case.row.logged, name == SLOTS
    if name not in counts:
        return case.no_shape or ("given, not asked" if is_given else "no free memory is given to predict it from")
    error, allowed = counts[name] - logged[name], 0.0
    if name == TOKENS:
        error, allowed = error / max(abs(logged[name]), 1), TOKENS_SHARE
    elif name == SLOTS or (SLOTS in counts and SLOTS in logged and abs(counts[SLOTS] - logged[SLOTS]) == 1):
        allowed = 1.0
    return Compared(name=name, predicted=counts[name], logged=logged[name], error=error, allowed=allowed, basis=basis)


def _pool(case: _Case, name: str, counts: Mapping[str, int]) -> Compared | str:
    """A pool's size at the logged counts where they are there (so that it tests bytes alone), else at the predicted."""
    (count, parts), logged, size = _POOLS[name], case.row.logged, case.row.logged[name]
    if case.shape is None or not (count in logged or count in counts):
        return case.no_shape or f"{count} is neither given nor predicted"
    slots, tokens, cap = (int(logged.get(key, counts.get(key, 0))) for key in (SLOTS, TOKENS, CAP))
    page = case.resolved.page_size
    sizes = pool_bytes(case.shape, case.flags, case.rules, slots=slots, tokens=tokens, page=page, requests=cap)
    predicted = sum(sizes.get(part, 0) for part in parts) / GIB
    allowed, basis = LOG_ROUNDING_GIB * len(parts) + 1e-9, f"logged {count}"
    if count not in logged:
        allowed += predicted / (slots + 1) if count == SLOTS else TOKENS_SHARE * size
        basis = f"predicted {count}"
    error = predicted - size
    return Compared(name=name, predicted=predicted, logged=size, error=error, allowed=allowed, basis=basis)


def to_json(rows: Sequence[Checked]) -> dict[str, Any]:
    """The report for machines; `error` of tokens is a share, of everything else a difference."""
    compared = [item for row in rows for item in row.compared]
    summary = {
        "rows": len(rows),
        "numbers": len(compared),
        "outside": sum(not item.ok for item in compared),
        "rows_outside": sum(not row.ok for row in rows),
        "unreadable": sum(row.kind == "unreadable" for row in rows),
    }
    numbers = [[{**asdict(item), "ok": item.ok} for item in row.compared] for row in rows]
    trees = [{**asdict(row), "compared": said, "ok": row.ok} for row, said in zip(rows, numbers, strict=True)]
    return {"status": status(rows), "rows": trees, "summary": summary}


def render(rows: Sequence[Checked]) -> str:
    """The report as a table, and below it what was not checked and why."""
    lines = [f"{'row':<34} {'number':<22} {'predicted':>12} {'logged':>12} {'error':>10} {'allowed':>9}"]
    for row in rows:
        for item in row.compared:
            error, allowed = f"{item.error:+.3f}", f"{item.allowed:.3f}"
            if item.name == TOKENS:
                error, allowed = f"{item.error:+.2%}", f"{item.allowed:.1%}"
            lines.append(
                f"{row.id:<34} {item.name:<22} {item.predicted:>12.3f} {item.logged:>12.2f} {error:>10} {allowed:>9}"
                f"  {'ok' if item.ok else 'OUTSIDE'}  ({item.basis})"
            )
    notes = [f"{row.id}: {note}" for row in rows for note in row.notes]
    summary = "{rows} rows, {numbers} numbers compared, {outside} outside the promise, {unreadable} lines unreadable."
    return "\n".join([*lines, "", *notes, "", summary.format(**to_json(rows)["summary"])])
