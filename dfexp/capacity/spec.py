"""From the `plan` group of a parameter file to the setting that the planner works on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dfexp.capacity.cost import Efficiency, Server
from dfexp.capacity.efficiency import efficiency_of
from dfexp.capacity.errors import CapacityError
from dfexp.capacity.flags import parse_flags
from dfexp.capacity.memory import Free
from dfexp.capacity.planner import Setting
from dfexp.capacity.sources import Model, load_model
from dfexp.capacity.throughput import Sample, calibrate
from dfexp.capacity.units import GiB, from_mib, to_gib
from dfexp.capacity.versions import rules
from dfexp.capacity.workload import Lengths, Workload, constant, fit_completions, log_normal, sigma_of
from dfexp.hardware import find_gpu
from dfexp.params_plan import LengthPart, PlanGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan group understood: the model, the setting, each variant as a setting of its own, and its measured tok/s."""

    model: Model
    setting: Setting
    variants: dict[str, Setting]
    measured: dict[str, float]


def prepare(plan: PlanGroup, *, prompts: int | None = None, shared_prefix_share: float | None = None) -> Prepared:
    """Read the model, find the GPU, build the workload, calibrate.

    Args: prompts, shared_prefix_share: measured on the frozen prompts; what the group says beats them.
    Raises CapacityError, UnsupportedModel, UnknownGpu, FlagsRefused.
    """
    model = load_model(plan.model, weights_gib=plan.weights_gib, weight_dtype=plan.weight_dtype)
    flags = parse_flags(plan.flags)
    gpu, found = find_gpu(plan.gpu), rules(plan.sglang_version)
    server = Server(shape=model.shape, weight_dtype=model.weight_dtype, gpu=gpu, flags=flags)
    limit = float(flags.context_length or model.shape.context_length)
    prompt = lengths(plan.prompt, limit)
    completions = plan.prompts or prompts
    if completions is None:
        raise CapacityError("plan.prompts is not given, and no prompts were counted; say how many completions to make.")
    share = plan.shared_prefix_share if plan.shared_prefix_share is not None else shared_prefix_share
    workload = Workload(
        prompt=prompt,
        completion=lengths(plan.completion, max(1.0, limit - prompt.mean)),
        max_tokens=plan.max_tokens,
        shared_prefix_share=share,
    )
    setting = Setting(
        server=server,
        rules=found,
        free=_free(plan, model, server),
        efficiency=_efficiency(plan, server, workload),
        workload=workload,
        prompts=completions,
        servers=plan.servers,
        concurrency=plan.concurrency,
        available_gib=None if plan.available_gpu_mem_gib is None else GiB(plan.available_gpu_mem_gib),
    )
    variants = {
        name: replace(
            setting,
            server=replace(server, flags=parse_flags({**plan.flags, **variant.flags})),
            concurrency=variant.concurrency,
        )
        for name, variant in plan.variants.items()
    }
    seen = {name: item.measured_tok_per_s for name, item in plan.variants.items()}
    measured = {name: rate for name, rate in seen.items() if rate is not None}
    return Prepared(model=model, setting=setting, variants=variants, measured=measured)


def lengths(part: LengthPart, limit: float) -> Lengths:
    """The distribution that a group describes, cut at `limit` tokens. Raises CapacityError."""
    if part.tokens is not None:
        return constant(min(part.tokens, limit))
    if part.early is not None:
        early = part.early
        return fit_completions(
            completions=early.completions / early.in_flight,
            mean_completion=early.mean_tokens,
            generated=early.tok_per_s / early.in_flight * early.after_s,
            limit=limit,
        )
    assert part.median is not None
    sigma = part.sigma if part.sigma is not None else sigma_of(part.median, part.p95 or part.median)
    return log_normal(part.median, sigma, limit=limit)


def _free(plan: PlanGroup, model: Model, server: Server) -> Free:
    """Free memory before and after loading, measured where it was, else from the GPU's total and the weights."""
    tp = server.flags.tp_size
    pre = GiB(plan.free_gib) if plan.free_gib is not None else from_mib(server.gpu.free_mib)
    weights = to_gib(int(model.weights_bytes / tp))
    post = GiB(plan.free_after_load_gib) if plan.free_after_load_gib is not None else GiB(pre - weights)
    if weights > pre and plan.free_after_load_gib is None:
        raise CapacityError(
            f"weights of {weights:.1f} GiB per GPU do not fit {server.gpu.name} with {pre:.1f} GiB free. "
            "Raise flags.tp_size, choose an FP8 checkpoint, or a GPU with more memory."
        )
    return Free(pre=pre, post=post)


def _efficiency(plan: PlanGroup, server: Server, workload: Workload) -> Efficiency:
    start = efficiency_of(server.gpu)
    if not plan.samples:
        return start
    samples = [
        Sample(running=item.running, context=item.context or workload.context, tok_per_s=item.tok_per_s)
        for item in plan.samples
    ]
    return calibrate(server, workload, samples, start, provenance=f"fitted on {len(samples)} sample(s) of the file")
