"""`dfexp plan` and `dfexp capacity check`: read, compute, and say it as text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dfexp import prompts
from dfexp.capacity import check
from dfexp.capacity.errors import CapacityError
from dfexp.capacity.planner import Candidate, Plan, make_plan
from dfexp.capacity.sources import Model
from dfexp.capacity.spec import Prepared, prepare
from dfexp.capacity.workload import shared_prefix_share
from dfexp.errors import PromptsError
from dfexp.params import RunSpec
from dfexp.records import Prompt

OPENING_CHARS = 4096
"""Characters of each prompt that the shared-prefix share looks at, so that 654,676 prompts fit in memory."""


def plan_text(spec: RunSpec, root: Path, *, as_json: bool) -> str:
    """`dfexp plan PARAMS`: the ranked table, or everything as JSON.

    Raises CapacityError (no `plan` group, impossible inputs), UnknownGpu.
    """
    prepared = prepared_for(spec, root)
    made = make_plan(prepared.setting)
    return json.dumps(to_json(prepared, made), indent=1) if as_json else table(prepared, made)


def check_text(path: Path, *, as_json: bool) -> tuple[str, int]:
    """`dfexp capacity check FILE`: predicted beside logged, and `Report.status`. Raises CapacityError: no such file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise CapacityError(
            f"cannot read {path}: {error.strerror}. Give a JSON-lines file of startup reports."
        ) from error
    report = check.check_lines(lines)
    return json.dumps(check.to_json(report), indent=1) if as_json else check.render(report), report.status


def prepared_for(spec: RunSpec, root: Path) -> Prepared:
    """The setting of a run's `plan` group; what it leaves open is measured on the run's prompts.

    Raises CapacityError: the file has no `plan` group, or its values are impossible.
    """
    if spec.plan is None:
        raise CapacityError("the parameter file has no `plan` group; add one (docs/capacity.md shows it whole).")
    count: int | None = None
    share: float | None = None
    if spec.plan.prompts is None or spec.plan.shared_prefix_share is None:
        try:
            texts = [opening(prompt) for prompt in prompts.read(spec.prompts, root)]
        except PromptsError:
            texts = []
        if texts:
            count, share = len(texts), shared_prefix_share(texts)
    return prepare(spec.plan, prompts=count, shared_prefix_share=share)


def opening(prompt: Prompt) -> str:
    """The beginning of a prompt's messages, as one text."""
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt.messages)[:OPENING_CHARS]


def table(prepared: Prepared, made: Plan) -> str:
    """The plan for a reader."""
    setting, model, completion = prepared.setting, prepared.model, prepared.setting.workload.completion
    weights = f"{model.weights_bytes / 2**30:.1f} GiB {model.weight_dtype} ({model.weights_source})"
    gpus = f"{setting.servers} server(s) x {setting.server.flags.tp_size} {setting.server.gpu.name}"
    lines = [
        f"{model.shape.name}, weights {weights}",
        f"{gpus}, sglang {setting.rules.version}",
        f"{setting.prompts:,} completions of {completion.mean:,.0f} tokens on average ({completion.label})",
        f"efficiency: {setting.efficiency.bandwidth:.2f} of bandwidth, {setting.efficiency.compute:.2f} of compute "
        f"({setting.efficiency.provenance})",
        "",
        f"{'':<3}{'running':>8}{'cap':>6}{'slots':>7}{'KV tokens':>11}{'KV use':>8}{'state':>7}"
        f"{'step ms':>9}{'tok/s':>8}{'hours':>8}{'GPU-h':>8}  +/-",
        _row("now", made.current),
    ]
    for position, item in enumerate(made.ranked, 1):
        lines += [_row(f"{position}", item), *_details(item)]
    lines += ["", f"Radix cache: {made.radix.why}", ""]
    if made.changing:
        lines.append("These change the outputs, so they are not ranked with the rest:")
        for item in made.changing:
            lines += [_row("*", item), *_details(item)]
    dropped = ", ".join(f"{count} {reason}" for reason, count in made.dropped.items()) or "none"
    lines += ["", f"{made.tried:,} combinations tried; dropped: {dropped}."]
    return "\n".join(lines)


def _row(name: str, item: Candidate) -> str:
    memory, predicted = item.memory, item.prediction
    state = "-" if predicted.mamba_usage is None else f"{predicted.mamba_usage:.2f}"
    return (
        f"{name:<3}{predicted.running:>8.0f}{memory.max_running_requests:>6}{memory.max_mamba_cache_size:>7}"
        f"{memory.max_total_num_tokens:>11,}{predicted.full_token_usage:>8.2f}{state:>7}{predicted.step_s * 1e3:>9.1f}"
        f"{predicted.tok_per_s:>8,.0f}{item.hours:>8.1f}{item.gpu_hours:>8,.0f}  {predicted.uncertainty:.0%}"
    )


def _details(item: Candidate) -> list[str]:
    weights = "FP8 weights, " if "weights" in item.changes else ""
    return [f"     {weights}{' '.join(item.argv)}", f"     {item.why}", *(f"     note: {mark}" for mark in item.marks)]


def to_json(prepared: Prepared, made: Plan) -> dict[str, Any]:
    """The plan for machines."""
    model: Model = prepared.model
    return {
        "model": {
            "name": model.shape.name,
            "weights_bytes": model.weights_bytes,
            "weight_dtype": model.weight_dtype,
            "sources": {"shape": model.shape_source, "weights": model.weights_source},
        },
        "gpu": asdict(prepared.setting.server.gpu),
        "efficiency": asdict(prepared.setting.efficiency),
        "workload": {
            "prompt": prepared.setting.workload.prompt.label,
            "completion": prepared.setting.workload.completion.label,
            "mean_completion_tokens": prepared.setting.workload.completion.mean,
            "context": prepared.setting.workload.context,
        },
        "current": asdict(made.current),
        "ranked": [asdict(item) for item in made.ranked],
        "changing": [asdict(item) for item in made.changing],
        "radix": asdict(made.radix),
        "tried": made.tried,
        "dropped": made.dropped,
    }
