"""`dfexp plan` and `dfexp capacity check`: from files to settings and rows, and the answers as text."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import yaml

from dfexp import prompts
from dfexp.capacity import check, workload
from dfexp.capacity.cost import Server
from dfexp.capacity.errors import CapacityError, DoesNotFit, FlagsRefused, TooLittleRoom, UnknownModel
from dfexp.capacity.flags import Flags, differing, modelled, own_name, parse_flags, rules
from dfexp.capacity.memory import Free, MemoryPlan
from dfexp.capacity.models import Model, load_model
from dfexp.capacity.planner import Candidate, Plan, Setting, make_plan
from dfexp.capacity.shape import GIB
from dfexp.capacity.throughput import calibrate
from dfexp.errors import CorruptShardError, DfexpError, PromptsError
from dfexp.hardware import Efficiency, UnknownGpu, find_gpu
from dfexp.jsonl import read_json
from dfexp.layout import RunFolder
from dfexp.params import PromptsGroup, RunSpec, SglangServers, SimulatedFleet
from dfexp.params_plan import LengthPart, PlanGroup
from dfexp.records import ServerLimits

Z95 = 1.6448536269514722
"""Standard deviations from the median to the 95th percentile."""
MEASURED = {"prompts": "asked", "shared_prefix_share": "shared_prefix_share"}
_WORDS = ("why", "flags")
MISTAKES = (DoesNotFit, FlagsRefused, UnknownGpu, UnknownModel)
"""Why a launch with this plan must not begin; after other errors nothing is predicted, so that nothing is required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan group understood: the model, the setting, and each variant as a setting of its own."""

    model: Model
    setting: Setting
    variants: dict[str, Setting]


def prepared_for(spec: RunSpec, root: Path) -> Prepared:
    """The setting of a run's `plan` group; what it leaves open is that of its frozen prompts, else of their source.

    Raises CapacityError: the file has no `plan` group, or its values are impossible; UnknownGpu.
    """
    plan = plan_of(spec, root)
    open_keys = {name: key for name, key in MEASURED.items() if getattr(plan, name) is None}
    found = _prompts(spec, root) if open_keys else {}
    return prepare(plan.model_copy(update={name: found.get(key) for name, key in open_keys.items()}))


def _prompts(spec: RunSpec, root: Path) -> Mapping[str, Any]:
    """How many prompts a run has and how much they share: as run.json says, else measured; empty without either."""
    with suppress(FileNotFoundError, CorruptShardError):  # a run that goes on elsewhere may lack their source
        run = read_json(RunFolder(root / spec.outputs / spec.run).run_json)
        if PromptsGroup.model_validate(run["spec"]["prompts"]) == spec.prompts:
            return dict(run["prompts"])
    with suppress(PromptsError):
        return prompts.measured(spec.prompts, root)
    return {}


def plan_of(spec: RunSpec, root: Path) -> PlanGroup:
    """The plan that counts; what it leaves open is taken from a fleet of SGLang servers. Raises CapacityError."""
    plan = spec.planned
    if plan is None:
        raise CapacityError("the parameter file has no `plan` group; add one (docs/capacity.md shows it whole).")
    if isinstance(spec.fleet, SglangServers):
        plan = completed(plan, spec.fleet, root)
    if plan.model is None or plan.flags is None:
        raise CapacityError("plan.model and plan.flags are needed where fleet.engine is not sglang. Give them.")
    return plan


def completed(plan: PlanGroup, group: SglangServers, root: Path) -> PlanGroup:
    """The plan with the model, the number and the flags of these servers, where it has none of its own.

    Simulated servers have its flags too, and their own on top.
    """
    folder = root / Path(group.model).expanduser()
    model = str(folder) if folder.exists() else group.model.rpartition("/")[2]
    flags = modelled(group.flags) if plan.flags is None else plan.flags
    if isinstance(group, SimulatedFleet):
        flags = {own_name(name): value for name, value in (flags | modelled(group.flags)).items()}
    servers = plan.servers or group.servers
    return plan.model_copy(update={"model": plan.model or model, "servers": servers, "flags": flags})


def predicted(spec: RunSpec, root: Path, **known: Any) -> tuple[Prepared | None, MemoryPlan | DfexpError]:
    """The setting of a run's `plan` group and the room of a server in it, as far as they can be had.

    Args: known, what counts instead of the group's own values.
    """
    prepared = None
    try:
        prepared = prepare(plan_of(spec, root).model_copy(update=known))
        return prepared, prepared.setting.memory()
    except DfexpError as error:
        return prepared, error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return prepared, CapacityError(f"a field of the model's config.json is not what it should be: {error!r}.")


def require_room(spec: RunSpec, root: Path, limits: Mapping[str, ServerLimits | None]) -> None:
    """Raise TooLittleRoom where a server has less than fleet.least_share_of_plan of what the plan predicts.

    Args: limits, what each server says of itself; None for one that does not answer. Raises any of MISTAKES; returns
    where the plan cannot be predicted, or where fleet.accepted_checks names `capacity`.
    """
    group = spec.fleet
    if spec.planned is None or not isinstance(group, SglangServers) or not group.least_share_of_plan:
        return
    if "capacity" in group.accepted_checks:
        return
    said = next((each.engine_version for each in limits.values() if each and each.engine_version), None)
    version = said.rpartition(" ")[2] if said else spec.planned.sglang_version
    _, expected = predicted(spec, root, sglang_version=version, prompts=1, shared_prefix_share=0.0)
    if isinstance(expected, MISTAKES):
        raise expected
    if isinstance(expected, DfexpError):
        return
    short = [
        f"  {name}: {number} is {actual:,}, {actual / planned:.0%} of the {planned:,} predicted"
        for name, each in limits.items()
        if each is not None
        for number in ("max_running_requests", "max_total_num_tokens")
        if (actual := getattr(each, number)) and (planned := getattr(expected, number))
        if actual < group.least_share_of_plan * planned
    ]
    if short:
        lines = "\n".join(short)
        raise TooLittleRoom(
            f"servers have much less room than the plan predicts; no prompt was sent.\n{lines}\nTheir flags, version or"
            " free memory are not those of the plan: compare fleet.flags and plan with the servers' logs. To go on all"
            " the same: --set fleet.least_share_of_plan=0."
        )


def prepare(plan: PlanGroup) -> Prepared:
    """Read the model, find the GPU, build the workload, calibrate.

    Raises CapacityError, UnsupportedModel, UnknownGpu, FlagsRefused.
    """
    assert plan.model, "plan_of has filled it in"
    model = load_model(plan.model, weights_gib=plan.weights_gib, weight_dtype=plan.weight_dtype)
    flags, gpu = plan.flags or {}, find_gpu(plan.gpu)
    server = Server(shape=model.shape, weight_dtype=model.weight_dtype, gpu=gpu, flags=parse_flags(flags))
    if not plan.prompts:
        raise CapacityError("plan.prompts is not given, and no prompts were counted; say how many completions to make.")
    limit = float(server.context_length)
    prompt = _lengths(plan.prompt, limit)
    completion = _lengths(plan.completion, max(1.0, limit - prompt.mean))
    most = plan.max_tokens
    share = plan.shared_prefix_share
    load = workload.Workload(prompt=prompt, completion=completion, max_tokens=most, shared_prefix_share=share)
    setting = Setting(
        server=server,
        rules=rules(plan.sglang_version),
        free=_free(plan, model, server),
        efficiency=_efficiency(plan, server, load),
        workload=load,
        prompts=plan.prompts,
        servers=plan.servers or 1,
        concurrency=plan.concurrency,
        available_gib=plan.available_gpu_mem_gib,
    )
    variants = {
        name: replace(
            setting.with_flags(parse_flags({**flags, **part.flags})),
            concurrency=part.concurrency,
            measured_tok_per_s=part.measured_tok_per_s,
        )
        for name, part in plan.variants.items()
    }
    return Prepared(model=model, setting=setting, variants=variants)


def _lengths(part: LengthPart, limit: float) -> workload.Lengths:
    """The distribution that a group describes, cut at `limit` tokens. Raises CapacityError."""
    if part.tokens is not None:
        return workload.constant(min(part.tokens, limit))
    if part.early is not None:
        early = part.early
        return workload.fit_completions(
            completions=early.completions / early.in_flight,
            mean_completion=early.mean_tokens,
            generated=early.tok_per_s / early.in_flight * early.after_s,
            limit=limit,
        )
    median = part.median or 0.0
    sigma = part.sigma if part.p95 is None else log(part.p95 / median) / Z95
    return workload.log_normal(median, sigma or 0.0, limit=limit)


def _free(plan: PlanGroup, model: Model, server: Server) -> Free:
    """Free memory before and after loading, measured where it was, else from the GPU's total and the weights."""
    pre_gib = plan.free_gib or server.gpu.free_gib
    weights_gib = model.weights_bytes / server.flags.tp_size / GIB
    return Free(pre_gib=pre_gib, post_gib=plan.free_after_load_gib or pre_gib - weights_gib)


def _efficiency(plan: PlanGroup, server: Server, load: workload.Workload) -> Efficiency:
    if not plan.samples:
        return server.gpu.efficiency
    provenance = f"fitted on {len(plan.samples)} sample(s) of the file"
    return calibrate(server, load, plan.samples, server.gpu.efficiency, provenance=provenance)


def plan_text(spec: RunSpec, root: Path, *, as_json: bool) -> str:
    """`dfexp plan PARAMS`: the ranked table, or everything as JSON. Raises CapacityError, UnknownGpu."""
    prepared = prepared_for(spec, root)
    made = make_plan(prepared.setting)
    if not as_json:
        given = getattr(spec.fleet, "flags", None) or {}
        return table(prepared, made, {name: given[name] for name in given.keys() - modelled(given).keys()})
    setting, load = prepared.setting, prepared.setting.workload
    tree = {
        "model": asdict(prepared.model),
        "gpu": asdict(setting.server.gpu),
        "efficiency": asdict(setting.efficiency),
        "workload": {"prompt": load.prompt.label, "completion": load.completion.label, "context": load.context},
        **asdict(made),
    }
    return json.dumps(tree, indent=1)


def check_text(path: Path, *, as_json: bool) -> tuple[str, int]:
    """`dfexp capacity check FILE`: predicted beside logged, and `status`. Raises CapacityError: no such file."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
    except OSError as error:
        raise CapacityError(f"cannot read {path}: {error.strerror}. Give a file of JSON lines.") from error
    rows = check.check_lines(lines)
    return json.dumps(check.to_json(rows), indent=1) if as_json else check.render(rows), check.status(rows)


def table(prepared: Prepared, made: Plan, others: Mapping[str, Any]) -> str:
    """The plan for a reader. Args: others, flags of the servers that have no part in it and stay."""
    setting, model, lengths = prepared.setting, prepared.model, prepared.setting.workload.completion
    efficiency, server = setting.efficiency, setting.server
    lines = [
        f"{model.shape.name}, {model.weights_bytes / GIB:.1f} GiB of {model.weight_dtype} ({model.weights_source})",
        f"{setting.servers} server(s) x {server.flags.tp_size} {server.gpu.name}, sglang {setting.rules.version}",
        f"{setting.prompts:,} completions of {lengths.mean:,.0f} tokens on average ({lengths.label})",
        f"efficiency: {efficiency.bandwidth:.2f} of bandwidth, {efficiency.compute:.2f} of compute, "
        f"+/- {efficiency.uncertainty:.0%} ({efficiency.provenance})",
        "",
        _line(dict(zip(row("", made.current), row("", made.current), strict=True))),
        _line(row("now", made.current)),
        *(f"     {mark}" for mark in made.current.marks),
    ]
    for position, item in enumerate(made.ranked, 1):
        lines += _paragraph(str(position), item, others)
    lines += ["", "flags: {...} as it is, in place of that of the file's fleet group, is the same in a parameter file."]
    lines += ["", f"Radix cache: {made.radix}", "", "These change the outputs, so they are not ranked with the rest:"]
    for item in made.changing:
        lines += _paragraph("*", item, others)
    return "\n".join(lines)


def row(name: str, item: Candidate) -> dict[str, Any]:
    """One candidate as the values of a table's columns; rates are of one server."""
    memory, predicted = item.memory, item.prediction
    return {
        "": name,
        "running": round(predicted.running),
        "cap": memory.max_running_requests,
        "slots": memory.max_mamba_cache_size,
        "KV tokens": memory.max_total_num_tokens,
        "KV use": round(predicted.full_token_usage, 2),
        "state use": "-" if predicted.mamba_usage is None else round(predicted.mamba_usage, 2),
        "step ms": round(predicted.step_s * 1e3, 1),
        "tok/s": round(predicted.tok_per_s),
        "hours": round(item.hours, 1),
        "GPU hours": round(item.gpu_hours),
        "why": " ".join((item.why, *item.marks)),
        "flags": ("FP8 weights, " if "weights" in item.changes else "") + " ".join(item.argv),
    }


def _line(values: dict[str, Any]) -> str:
    texts = [value if isinstance(value, str) else f"{value:,}" for key, value in values.items() if key not in _WORDS]
    return f"{texts[0]:<4}" + "".join(f"{text:>10}" for text in texts[1:])


def _paragraph(name: str, item: Candidate, others: Mapping[str, Any]) -> list[str]:
    values, changed = row(name, item), differing(Flags(), item.flags)
    tree = {**others, **{flag: pair[1] for flag, pair in changed.items()}}
    text = yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=10**6).strip()
    pasted = [] if "weights" in item.changes else [f"     flags: {text}"]  # other weights are no flag
    return [_line(values), f"     {values['flags']}", *pasted, f"     {values['why']}"]
