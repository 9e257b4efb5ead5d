"""What is rehearsed: a run file on simulated servers, or variants of it, each beside what operators saw."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue

from dfexp import params
from dfexp.capacity.plan_command import prepared_for
from dfexp.capacity.planner import Setting
from dfexp.errors import DfexpError, ParamsError
from dfexp.params import Name, RunSpec, SglangServers, SimulatedFleet
from dfexp.params_plan import Amount, Group

Part = dict[str, JsonValue]
Range = Amount | Annotated[list[Amount], Field(min_length=2, max_length=2)] | None

SPARE = 1.3
"""Prompts for so many times the completions that are predicted, so that none are missing at the end."""
SAMPLE_INTERVAL_S = 0.25
"""Real seconds, of which each may be minutes of the servers' clock."""
LEAST_STALL_S = 30.0
"""A rehearsal looks stuck for up to ten real seconds while a server is away, since the clock then waits for it."""
_OF_THE_REAL_RUN = ("store", "notify", "limits")  # no bucket gets made up rows, nobody is called for them
_NO_PLAN: Part = {"flags": None, "servers": None}
"""Flags and servers of the fleet are launched, whatever the plan compares them with."""


class SeenPart(Group):
    """What operators saw, each a number or the least and the most; descriptions are the names of the table's lines."""

    at_s: float = Field(gt=0, description="looked at (s)")
    max_mamba_cache_size: Range = Field(None, description="state slots")
    max_running_requests: Range = Field(None, description="request cap")
    max_total_num_tokens: Range = Field(None, description="KV tokens")
    num_running_reqs: Range = Field(None, description="running")
    num_queue_reqs: Range = Field(None, description="queued")
    full_token_usage: Range = Field(None, description="KV usage")
    mamba_usage: Range = Field(None, description="state usage")
    tok_per_s_per_gpu: Range = Field(None, description="tok/s a GPU")
    fleet_tok_per_s: Range = Field(None, description="fleet tok/s")
    completions: Range = Field(None, description="completions")
    mean_completion_tokens: Range = Field(None, description="mean tokens")
    completions_per_s: Range = Field(None, description="completions/s")


class VariantPart(Group):
    """Parts of a run's parameters that are laid over the run file; `fleet.flags` are replaced as a whole."""

    fleet: Part = Field(default_factory=dict, description="flags, faults, servers and other keys of a fleet")
    prompts: Part = Field(default_factory=dict, description="as in a run file")
    generation: Part = Field(default_factory=dict, description="as in a run file")
    plan: Part = Field(default_factory=dict, description="as in a run file")
    seen: SeenPart | None = Field(None, description="what operators saw of this variant, and when they looked")


class RehearsalFile(Group):
    """A parameter file with variants over a run file."""

    over: str = Field(description="the run file, relative to this one")
    hours: float = Field(1.0, gt=0, description="virtual hours of each rehearsal")
    variants: dict[Name, VariantPart] = Field(min_length=1, description="name to parameters laid over the run file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One rehearsal. `missing`: files of prompts that are not here; if there are any, all prompts are made up."""

    name: str
    spec: RunSpec
    setting: Setting
    seen: SeenPart | None
    hours: float
    missing: list[str]


def read(path: Path, root: Path, overrides: Sequence[str], only: Collection[str], hours: float | None) -> list[Variant]:
    """The rehearsals that a file describes. Raises ParamsError that lists every mistake in it.

    Args: overrides, as `params.load` has them, for all variants; only, names of variants, none for all; hours, virtual
    ones, instead of the file's.
    """
    tree, source = params.read_yaml(path), str(path)
    if not {"over", "variants"} & tree.keys():  # a run file, rehearsed as it is
        tree = {"over": path.name, "variants": {"run": {}}}
    if hours is not None:
        tree, source = {**tree, "hours": hours}, f"{path} with --hours {hours:g}"
    file = params.checked(source, RehearsalFile, tree)
    if unknown := set(only) - file.variants.keys():
        raise ParamsError(f"--only {unknown.pop()}: no such variant. {path} has: {', '.join(file.variants)}.")
    base, found, mistakes = _base(path.parent / file.over), list[Variant](), list[str]()
    for name in dict.fromkeys(only or file.variants):
        try:
            found.append(_variant(name, base, file.variants[name], overrides, root, file.hours))
        except DfexpError as error:
            mistakes.append(f"{path}, {name}: {error}")
    if mistakes:
        raise ParamsError("\n".join(mistakes))
    return found


def _base(path: Path) -> dict[str, Any]:
    """A run file with simulated servers, its outputs apart. Raises ParamsError: it is wrong, or of other servers."""
    written = params.read_yaml(path)
    if {"over", "variants"} & written.keys():
        raise ParamsError(f"over = {path}: this is a file of variants itself. Name the run file that they lie over.")
    spec = params.validate(written, str(path))
    if not isinstance(spec.fleet, SglangServers):
        raise ParamsError(f"{path}: fleet.engine = {spec.fleet.engine!r} cannot be rehearsed, only 'sglang'.")
    tree = spec.model_dump(exclude_unset=True)
    # Ports are the real fleet's; the time that a start may take is that of real GPUs.
    known = SimulatedFleet.model_fields.keys() - {"name", "first_port", "start_timeout_s", "plan"}
    fleet = {key: value for key, value in tree["fleet"].items() if key in known}
    plan = {**(tree.get("plan") or tree["fleet"].get("plan") or {}), **_NO_PLAN}
    kept = {key: value for key, value in tree.items() if key not in _OF_THE_REAL_RUN}
    return {**kept, "fleet": {**fleet, "engine": "simulated"}, "plan": plan}


def _variant(
    name: str, base: dict[str, Any], part: VariantPart, overrides: Sequence[str], root: Path, hours: float
) -> Variant:
    """One variant, understood. Raises ParamsError; CapacityError, UnknownGpu: its servers could not start."""
    tree = params.merge(base, part.model_dump(exclude_unset=True, exclude={"seen"}))
    tree["fleet"]["flags"] = part.fleet.get("flags", tree["fleet"].get("flags", {}))
    tree = params.overlay(tree, overrides)
    if isinstance(fleet := tree["fleet"], dict) and fleet.get("engine") != "simulated":
        raise ParamsError(f"fleet.engine = {fleet.get('engine')!r}: a rehearsal has simulated servers. Leave it out.")
    if tree["plan"] in (None, _NO_PLAN):
        raise ParamsError("the run file has no plan group, which says what is simulated; docs/capacity.md shows one.")
    apart = {"run": f"{base['run']}-{name}", "outputs": f"{tree.get('outputs', 'outputs')}/rehearsals"}
    spec = params.validate({**tree, **apart}, "laid over the run file")
    assert isinstance(spec.fleet, SimulatedFleet)
    if part.seen and part.seen.at_s > hours * 3600:
        raise ParamsError(f"seen.at_s = {part.seen.at_s:g} is after the end, {hours:g} h. Rehearse longer.")
    setting, generation = prepared_for(spec, root).setting, spec.generation
    setting = replace(setting, workload=replace(setting.workload, max_tokens=generation.max_tokens))
    concurrency, memory = None if generation.concurrency == "auto" else generation.concurrency, setting.memory()
    rate = setting.predict(memory, concurrency).completions_per_s
    in_flight = concurrency or 2 * memory.max_running_requests
    number = min(setting.prompts, ceil(setting.servers * (rate * hours * 3600 * SPARE + in_flight)))
    prompts = spec.prompts.model_copy(update={"limit": min(number, spec.prompts.limit or number)})
    missing = [each for each in prompts.paths if not (root / Path(each).expanduser()).exists()]
    if missing:
        prompts = params.PromptsGroup(path=f"{spec.outputs}/drawn/{spec.run}.jsonl", limit=prompts.limit)
    # Seconds of the servers' clock, not of ours, decide whether one is stuck.
    speed = float("inf") if spec.fleet.speed == "max" else spec.fleet.speed
    stall_s = min(generation.stall_s, max(LEAST_STALL_S, generation.stall_s / speed))
    often = {"stall_s": stall_s, "sample_interval_s": min(generation.sample_interval_s, SAMPLE_INTERVAL_S)}
    changed = {"prompts": prompts, "generation": generation.model_copy(update=often)}
    spec = spec.model_copy(update=changed)
    return Variant(name=name, spec=spec, setting=setting, seen=part.seen, hours=hours, missing=missing)


def remarks(variants: Sequence[Variant]) -> Iterator[str]:
    """What whoever starts these rehearsals should know first."""
    twins = dict[str, str]()
    for each in variants:
        name, fleet = each.name, each.spec.fleet
        assert isinstance(fleet, SimulatedFleet)
        if each.missing:
            yield f"{name}: no file {', '.join(each.missing)}, so prompts are drawn from plan.prompt"
        for fault in fleet.faults:
            if (fault.at_s or 0.0) >= each.hours * 3600:
                yield f"{name}: {fault.kind} at {fault.at_s:g} s comes after the end, {each.hours:g} h: give --hours"
        if fleet.faults and fleet.speed == "max":
            yield f"{name}: pauses of the client are long at full speed: --speed 20 is nearer (docs/rehearsal.md)"
        # Runs are named after their variants, and drawn prompts after the runs; nothing else should be the same.
        twin = twins.setdefault(each.spec.model_dump_json().replace(each.spec.run, ""), name)
        if twin != name:
            yield f"{name}: its parameters are those of {twin}"
