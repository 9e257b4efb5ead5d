"""Checks before anything starts: facts are gathered at the edges, and pure functions (`of_...`) judge them."""

import json
import os
import re
import resource
import shlex
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from dfexp.capacity.errors import DoesNotFit, FlagsRefused
from dfexp.capacity.flags import own_name, rules
from dfexp.capacity.models import spans
from dfexp.capacity.plan_command import Prepared, predicted, require_room
from dfexp.capacity.shape import GIB
from dfexp.engines.base import engine_for
from dfexp.engines.sglang import SglangEngine
from dfexp.engines.sglang_flags import SHIPPED, argv_for, gpus_per_server
from dfexp.engines.sglang_install import FIX, Installation
from dfexp.engines.simulated import SimulatedEngine
from dfexp.errors import DfexpError, FleetError, StoreUnavailable
from dfexp.hardware import CONTEXT_MIB, GpuNow, find_gpu, gpus_now
from dfexp.jsonl import read_json
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from dfexp.records import ServerLimits
from dfexp.shards import list_shards

BYTES_PER_TOKEN, LEAST_DISK_GIB, SPARE_FILES, GIB_PER_SIMULATED = 6, 5, 256, 1 / 32
IDLE_SHARE = 0.03
"""Part of a GPU's memory that the driver may hold while nobody uses it."""
_TABLE = json.loads(files("dfexp").joinpath("preflight.json").read_text(encoding="utf-8"))
_BLACKWELL = (10, 11, 12)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (not everywhere)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: what was found, and what to do where it failed. A note neither passes nor fails."""

    name: str
    state: Literal["pass", "fail", "note"]
    found: str
    fix: str = ""


def judged(name: str, problem: str, found: str) -> Check:
    """Failed where there is a problem, else passed."""
    fix = _TABLE["fix"][name] if problem else ""
    return Check(name=name, state="fail" if problem else "pass", found=problem or found, fix=fix)


def noted(name: str, found: str) -> Check:
    """Neither passed nor failed."""
    return Check(name=name, state="note", found=found)


def enough(name: str, have: float, needed: float, what: str) -> Check:
    """Passed where there is as much as is needed."""
    found = f"{have:,.0f} {what}, {needed:,.0f} needed"
    return judged(name, found if have < needed else "", found)


def checks_for(spec: RunSpec, root: Path) -> list[Check]:
    """What can be known about a run's servers before they start. Starts nothing; takes seconds, most for SGLang's."""
    engine, checks, chosen, version = engine_for(spec.fleet, root), list[Check](), list[GpuNow](), ""
    if isinstance(engine, SglangEngine):
        checks, chosen, version = _sglang(engine)
    if isinstance(engine, SimulatedEngine):
        checks = _simulated(engine)
    prepared, capacity = _capacity(spec, root, version, chosen)
    checks += [*capacity, *_machine(spec, root, prepared), *_store(spec, root)]
    return accepted(checks, getattr(spec.fleet, "accepted_checks", ()))


def accepted(checks: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """The checks, those of these names as notes where they failed. Raises FleetError: no check has such a name."""
    known = [check.name for check in checks]
    if unknown := sorted(set(names).difference(known)):
        raise FleetError(f"fleet.accepted_checks: there is no check {unknown[0]!r}, but {', '.join(known)}.")
    return [
        replace(check, state="note", found=f"failed, and accepted: {check.found}")
        if check.state == "fail" and check.name in names
        else check
        for check in checks
    ]


def require(spec: RunSpec, root: Path, *, is_store_alone: bool = False) -> list[Check]:
    """The checks, or that of the store alone. Raises FleetError that lists every failed one with its fix."""
    checks = _store(spec, root) if is_store_alone else checks_for(spec, root)
    if failed := [check for check in checks if check.state == "fail"]:
        accept = "\nTo start in spite of a check that is wrong here, name it in fleet.accepted_checks."
        words = f"{len(failed)} check(s) failed; nothing was started.\n{render(failed)}"
        raise FleetError(words + accept * (not is_store_alone))
    return checks


def render(checks: Sequence[Check]) -> str:
    """A line for each check, and below a failed one the fix."""
    width = max(len(check.name) for check in checks)
    lines = [(f"{check.state.replace('fail', 'FAIL')}  {check.name:<{width}}  ", check) for check in checks]
    return "\n".join(head + check.found + f"\n{'':{len(head)}}{check.fix}" * bool(check.fix) for head, check in lines)


def launches_for(spec: RunSpec, root: Path) -> dict[str, list[str]]:
    """By SGLang version, the installed one or else the shipped ones: the command of each server, but for its key.

    Port 0 stands for one that is chosen at the start. Empty for other engines.
    """
    engine, found = engine_for(spec.fleet, root), {}
    if isinstance(engine, SglangEngine):
        first, count, gpus = engine.group.first_port, engine.group.servers, _tried(engine.gpus)[0]
        heads = [f"CUDA_VISIBLE_DEVICES={','.join(names)} " if names else "" for names in gpus or [()] * count]
        pairs = list(zip(heads, range(first, first + count) if first else [0] * count, strict=True))
        for version, (flags, problem) in _arguments(engine, _tried(engine.installation)[0]).items():
            commands = [head + shlex.join((*engine.command(port), *(flags or ()))) for head, port in pairs]
            found[version] = [problem] if problem else commands
    return found


def _arguments(engine: SglangEngine, installed: Installation | None) -> dict[str, tuple[list[str] | None, str]]:
    """By version, as above: the flags as arguments, or why this version would not take them."""
    version, table = (installed.sglang_version, installed.flags) if installed else (None, {})
    versions = [version] if version else SHIPPED
    return {each: _tried(partial(argv_for, engine.group.flags, each, table)) for each in versions}


def _tried(call: Callable[[], T]) -> tuple[T | None, str]:
    """What a call gives, or the words of its error."""
    try:
        return call(), ""
    except (DfexpError, OSError, psutil.Error) as error:
        return None, str(error)


def _sglang(engine: SglangEngine) -> tuple[list[Check], list[GpuNow], str]:
    """The checks of a fleet of SGLang servers, its GPUs as far as they are there, and the version that would run."""
    group, folder = engine.group, Path(engine.model_path)
    flags = {own_name(name): value for name, value in group.flags.items()}
    installed, problem = _tried(engine.installation)
    refused = {}
    for version, (argv, words) in _arguments(engine, installed).items():
        refused[version] = words
        if installed and installed.flags and argv is not None:
            again, words = _tried(partial(engine.installation, (*engine.command(30000)[3:], *argv)))
            refused[version] = (again.refused or "") if again else words
    seen, fault = _tried(lambda: model_faults(folder, flags) if folder.is_dir() else ([], {}))
    faults, config = seen or ([fault], {})
    checks = [of_sglang(installed, problem), of_flags(installed, refused), of_model(engine.model_path, faults, config)]
    version = (installed and installed.sglang_version) or ""
    if group.device == "cpu":
        return [*checks, noted("GPUs", "device: cpu, so GPUs, driver and CUDA toolkit are not looked at")], [], version
    groups, problem = _tried(engine.gpus)
    names, now = [name for names in groups or () for name in names], gpus_now()
    chosen = [gpu for gpu in now.gpus if {str(gpu.index), gpu.uuid} & set(names)]
    checks += [of_gpus(names, chosen, problem or now.reason), of_gpu_memory(chosen, flags)]
    checks += [of_attention(flags, chosen, version, is_hybrid="linear_num_value_heads" in str(config))]
    return [*checks, of_driver(installed, now.driver_cuda), of_toolkit(installed, chosen)], chosen, version


def _simulated(engine: SimulatedEngine) -> list[Check]:
    """The checks of simulated servers, which need neither SGLang nor a GPU."""
    spelled, problem = _tried(engine.spelled)
    free_gib, servers = psutil.virtual_memory().available / GIB, engine.group.servers
    memory = enough("memory", free_gib, 1 + servers * GIB_PER_SIMULATED, f"GiB for {servers} server(s)")
    return [judged("flags", problem, f"spelled right for SGLang {spelled and spelled[0]}, which is simulated"), memory]


def of_sglang(installed: Installation | None, problem: str) -> Check:
    """Whether there is an SGLang that can be imported and is new enough. `problem`: with the interpreter itself."""
    if installed is None:
        return judged("SGLang", problem.removesuffix(f" {FIX}"), "")
    version, where = installed.sglang_version, f"in {installed.python} (Python {installed.python_version})"
    problem = "there is no package sglang" if version is None else _tried(partial(rules, version))[1]
    if version and not problem and not installed.flags:
        problem = f"{version} cannot be imported: {installed.error}"
    beside = f"torch {installed.torch_version}, FlashInfer {installed.flashinfer_version}"
    return judged("SGLang", problem and f"{problem}, {where}", f"{version}, {beside}, {where}")


def of_flags(installed: Installation | None, refused: Mapping[str, str]) -> Check:
    """Whether the flags are spelled for the version and taken by its own parser. `refused`: its words, by version."""
    said = "; ".join(f"{version}: {words or 'spelled right'}" for version, words in refused.items())
    if not all(refused.values()) and not (installed and installed.flags):
        return noted("flags", f"not checked by SGLang's own parser: needs SGLang. {said}")
    return judged("flags", said if all(refused.values()) else "", f"taken by the parser of SGLang {', '.join(refused)}")


def model_faults(folder: Path, flags: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
    """What is missing in a model's folder, and its config. Reads names, sizes and small files."""
    there = {path.name: path.stat().st_size if path.exists() else 0 for path in folder.iterdir()}
    config, problem = _tried(partial(read_json, folder / "config.json")) if "config.json" in there else (None, "")
    index, name = None, "model.safetensors.index.json"
    if name in there:
        index, problem = _tried(partial(read_json, folder / name)) if not problem else (None, problem)
    named = (index or {}).get("weight_map")
    found = [name for name in there if name.endswith(".safetensors")]
    weights = set(map(str, named.values() if isinstance(named, dict) else found))
    lost = sorted(name for name in weights if there.get(name, 0) < 512)  # a pointer of Git LFS has some 130 bytes
    cut = sorted(name for name in weights.difference(lost) if is_cut(folder / name))
    settings = folder / "tokenizer_config.json"
    has_template = "chat_template" in flags or any(name.startswith("chat_template.") for name in there)
    has_template = has_template or (settings.is_file() and '"chat_template"' in settings.read_text("utf-8", "replace"))
    faults = {
        problem: True,
        "no config.json that names architectures": not problem and not (config or {}).get("architectures"),
        "no *.safetensors": not weights and flags.get("load_format") != "dummy",
        f"{len(lost)} of {len(weights)} weight files missing, empty or pointers of Git LFS: {lost[:1]}": bool(lost),
        f"{len(cut)} of {len(weights)} weight files cut short or damaged: {cut[:1]}": bool(cut),
        "no tokenizer": not there.keys() & _TABLE["tokenizers"],
        "no chat template": not has_template,
    }
    return [fault for fault, is_so in faults.items() if fault and is_so], config or {}


def is_cut(weights: Path) -> bool:
    """Whether a safetensors file is not as long as its header says."""
    try:
        start, parts = spans(weights)
        return not parts or weights.stat().st_size != start + max(end for _, end in parts)
    except (ValueError, KeyError, TypeError):
        return True


def of_model(path: str, faults: Sequence[str], config: Mapping[str, Any]) -> Check:
    """Whether the model's folder is complete. Neither faults nor a config: there is no such folder."""
    if not faults and not config and re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return noted("model", f"there is no folder {path}; SGLang would download the model of that name")
    problem = "; ".join(faults) or ("" if config else "there is no such folder")
    return judged("model", problem and f"{path}: {problem}", f"{path}: {config.get('architectures')}, complete")


def of_gpus(names: Sequence[str], chosen: Sequence[GpuNow], problem: str) -> Check:
    """Whether the GPUs are there that the servers take. `problem`: with the driver, or with counting them."""
    missing = ", ".join(sorted(set(names) - {name for gpu in chosen for name in (str(gpu.index), gpu.uuid)}))
    divided = ", ".join(f"GPU {gpu.index} is divided by MIG" for gpu in chosen if gpu.is_mig)
    problem, found = problem or (missing and f"there is no GPU {missing}") or divided, [gpu.name for gpu in chosen]
    return judged("GPUs", problem and f"{len(names)} needed: {problem}", f"{', '.join(names)}: {', '.join(found)}")


def of_gpu_memory(chosen: Sequence[GpuNow], flags: Mapping[str, Any]) -> Check:
    """Whether nobody else holds memory there, and all that mem_fraction_static asks for is free."""
    problems, asked = [], flags.get("mem_fraction_static")
    fraction = asked if isinstance(asked, float) else 1 - IDLE_SHARE
    for gpu in chosen:
        room = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        if gpu.processes or gpu.free_bytes < fraction * gpu.total_bytes:
            problems.append(f"GPU {gpu.index}: {room}; there: {', '.join(gpu.processes) or 'nothing that can be seen'}")
    if not chosen:
        return noted("GPU memory", "not checked: needs the GPUs")
    return judged("GPU memory", "; ".join(problems), f"each has at least {fraction:.0%} free, and nobody else is there")


def of_attention(flags: Mapping[str, Any], chosen: Sequence[GpuNow], version: str, *, is_hybrid: bool) -> Check:
    """Whether the attention backends of the flags run on these GPUs. `is_hybrid`: the model has gated delta nets."""
    name, problem, (version_rules, _) = "attention backend", "", _tried(partial(rules, version or SHIPPED[-1]))
    patch, hybrid = version_rules.patch if version_rules else 0, _TABLE["gated_delta_net_on_blackwell"]
    wanted = sorted({str(value) for flag, value in flags.items() if flag.endswith("attention_backend")})
    rows = {row["backend"]: row for row in reversed(_TABLE["attention"]) if patch < row.get("before", 1000)}
    for gpu, each in [(gpu, each) for gpu in chosen for each in wanted if each in rows]:
        (major, minor), why = gpu.capability, rows[each]["source"]
        is_narrow = is_hybrid and major in _BLACKWELL and each not in hybrid
        if is_narrow or major not in rows[each]["majors"]:
            why = f"with gated delta nets only {', '.join(hybrid)}" if is_narrow else why
            problem = f"{each} does not run on GPU {gpu.index}, {gpu.name}, compute capability {major}.{minor} ({why})"
    unknown = ", ".join(set(wanted) - rows.keys())
    if problem or (wanted and chosen and not unknown):
        return judged(name, problem, f"{', '.join(wanted)} on {chosen[0].name}")
    needs = f"not known on which GPUs {unknown} runs" if unknown else "not checked: needs the GPUs"
    return noted(name, needs if wanted else "SGLang chooses one")


def of_driver(installed: Installation | None, driver_cuda: str | None) -> Check:
    """Whether the driver runs the CUDA that torch was built for; one of a lower minor version runs most kernels."""
    torch = installed.torch_cuda if installed else None
    if installed and installed.torch_version and torch is None:
        return judged("driver", f"torch {installed.torch_version} is built for CPUs", "")
    if driver_cuda is None or torch is None:
        return noted("driver", f"not checked: needs {'torch' if driver_cuda else 'a driver'}")
    found, driver = f"CUDA {driver_cuda}, torch's is {torch}", _number(driver_cuda)
    if driver[0] == _number(torch)[0] and driver < _number(torch):
        return noted("driver", f"{found}: most kernels run, some may not")
    return judged("driver", found if driver < _number(torch) else "", found)


def of_toolkit(installed: Installation | None, chosen: Sequence[GpuNow]) -> Check:
    """Whether nvcc, with the headers of CUDA and CCCL, works, is of torch's major version and knows these GPUs."""
    name = "CUDA toolkit"
    if installed is None:
        return noted(name, "not checked: needs the interpreter")
    nvcc, torch, version = installed.nvcc, installed.torch_cuda, _number(installed.nvcc_version or "0")
    found = f"{nvcc}: CUDA {installed.nvcc_version}, with headers; torch's is {torch or 'not known'}"
    needs = {_TABLE["least_cuda"].get(".".join(map(str, gpu.capability)), "0") for gpu in chosen}
    problem = installed.nvcc_error and f"{nvcc} cannot compile: {installed.nvcc_error}"
    if nvcc is None:
        problem = f"there is no nvcc in {installed.cuda_home} (looked for by CUDA_HOME, CUDA_PATH, PATH)"
    elif not problem and (too_new := [least for least in needs if version < _number(least)]):
        problem = f"{found}; {chosen[0].name} needs CUDA {max(too_new, key=_number)} or newer"
    elif not problem and torch and version[0] != _number(torch)[0]:
        problem = found
    if problem or installed.home_has_headers:
        return judged(name, problem or "", found)
    return noted(name, f"{found}; no headers in {installed.cuda_home}/include, where torch looks: set CUDA_HOME")


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _capacity(spec: RunSpec, root: Path, version: str, chosen: Sequence[GpuNow]) -> tuple[Prepared | None, list[Check]]:
    """What the plan says, for the GPUs and the version that are there."""
    plan = spec.planned
    if plan is None:
        return None, []
    known: dict[str, Any] = {"prompts": plan.prompts or 1, "shared_prefix_share": 0.0}
    known |= {"sglang_version": version} if version else {}
    if chosen:
        kind, _ = _tried(partial(find_gpu, chosen[0].name))
        known |= {"free_gib": min(gpu.free_bytes for gpu in chosen) / GIB - CONTEXT_MIB / 1024}
        known |= {"gpu": kind.name} if kind else {}
    prepared, memory = predicted(spec, root, **known)
    # What is required of servers once they are up is required here, of those that are predicted for these GPUs.
    gpu, room, found = known.get("gpu", plan.gpu), ServerLimits(), ""
    if not isinstance(memory, DfexpError):
        cap, tokens = memory.max_running_requests, memory.max_total_num_tokens
        said = f"sglang {version or plan.sglang_version}"
        room = ServerLimits(max_running_requests=cap, max_total_num_tokens=tokens, engine_version=said)
        found = f"{cap} requests at once, {tokens:,} KV tokens a server on {gpu} (predicted)"
    _, problem = _tried(partial(require_room, spec, root, {f"on {gpu}, as predicted": room}))
    problem = str(memory) if isinstance(memory, DoesNotFit | FlagsRefused) else problem
    check = judged("capacity", problem, found) if problem or found else noted("capacity", f"not checked: {memory}")
    return prepared, [check]


def _store(spec: RunSpec, root: Path) -> list[Check]:
    """Whether the run's shards can be uploaded. That a store is away is no fault of a run that has begun."""
    if spec.store.bucket is None:
        return []
    from dfexp import store  # here, since it takes boto3, which is slow to import

    folder = RunFolder(root / spec.outputs / spec.run)
    try:
        return [judged("store", "", store.check(folder, spec.store))]
    except DfexpError as error:
        is_away = isinstance(error, StoreUnavailable) and list_shards(folder.completions)
        return [
            noted("store", f"{error}; shards wait in the run's folder") if is_away else judged("store", str(error), "")
        ]


def _machine(spec: RunSpec, root: Path, prepared: Prepared | None) -> list[Check]:
    """The checks of every engine: disk, open files, ports, shared memory."""
    outputs, group, asked = root / spec.outputs, spec.fleet, spec.generation.concurrency
    folder = next(path for path in (outputs, *outputs.parents) if os.path.exists(path))
    free_gib = shutil.disk_usage(folder).free / GIB if os.access(folder, os.W_OK) else 0.0
    tokens = prepared.setting.prompts * prepared.setting.workload.completion.mean if prepared else 0.0
    flags = {own_name(name): value for name, value in getattr(group, "flags", {}).items()}
    servers = len(getattr(group, "urls", ())) or getattr(group, "servers", 1)
    cap = getattr(group, "max_running_requests", None) or flags.get("max_running_requests")
    each = asked if isinstance(asked, int) else cap if isinstance(cap, int) else 256
    requests, limit = servers * each, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    what = f"for {requests} requests in flight"
    checks = [enough("disk", free_gib, LEAST_DISK_GIB + tokens * BYTES_PER_TOKEN / GIB, f"GiB to write to in {folder}")]
    checks += [enough("open files", float("inf") if limit < 0 else limit, requests + SPARE_FILES, what)]
    if first := getattr(group, "first_port", None):
        links, problem = _tried(partial(psutil.net_connections, "tcp"))
        used = {item.laddr.port for item in links or () if item.laddr and item.status == "LISTEN"}
        checks += [noted("ports", problem) if problem else of_ports(range(first, first + servers), used)]
    if (_tried(partial(gpus_per_server, flags))[0] or 1) > 1:
        usage, problem = _tried(partial(shutil.disk_usage, _SHARED_MEMORY))
        name = "shared memory"
        checks += [enough(name, usage.free / GIB, servers, "GiB") if usage else noted(name, problem)]
    return checks


def of_ports(ports: Sequence[int], used: Collection[int]) -> Check:
    """Whether nobody listens on the ports."""
    busy = ", ".join(str(port) for port in ports if port in used)
    return judged("ports", busy and f"in use: {busy}", f"{ports[0]} to {ports[-1]} are free")
