"""Which flags finish the run soonest: every combination that leaves the outputs alone, ranked, each winner explained.

What changes outputs (weights, state or KV in another dtype) is listed apart and never ranked with the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from dfexp.capacity.cost import Server
from dfexp.capacity.errors import CapacityError
from dfexp.capacity.flags import Flags, Rules, Since, Strategy, differing, resolve, to_argv
from dfexp.capacity.memory import Free, MemoryPlan, plan_memory
from dfexp.capacity.shape import GIB
from dfexp.capacity.throughput import Prediction, chunk_tokens, largest_graph, predict
from dfexp.capacity.workload import Workload
from dfexp.hardware import Efficiency

REQUEST_CAPS = (*range(1, 257), *range(264, 1025, 8))
PATIENCE = 4
"""Caps in a row that must be slower than the best before the search for it ends."""
CLOSE = 0.005
"""Caps within half a percent of the fastest count as equal; the smallest of them leaves the most room."""
CHUNKS = (2048, 4096, 8192, 16384)
LEAST_SIGMAS = 3.0
"""Room in the KV pool that a winner must leave, in standard deviations of what running requests hold together."""
_ACTIVATION_GIB_PER_TOKEN = 1.5 / 1024
_SPARE_GIB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything about a run that the planner may not change.

    Attributes:
        concurrency: requests that the client keeps at each server today; None = as many as it runs.
        available_gib: measured `available_gpu_mem` of this GPU, model and chunk size; None = not measured.
        prompts: completions to make; servers: independent servers, each on `flags.tp_size` GPUs.
        measured_tok_per_s: of one server, where it was seen.

    """

    server: Server
    rules: Rules
    free: Free
    efficiency: Efficiency
    workload: Workload
    prompts: int
    servers: int
    concurrency: int | None = None
    available_gib: float | None = None
    measured_tok_per_s: float | None = None

    def memory(self) -> MemoryPlan:
        """The memory plan of its server. Raises CapacityError."""
        return plan_memory(self.server.shape, self.server.flags, self.rules, self.free)

    def predict(self, memory: MemoryPlan, concurrency: int | None = None) -> Prediction:
        """The steady state under that plan. Raises CapacityError."""
        return predict(self.server, memory, self.efficiency, self.workload, concurrency=concurrency)

    def with_flags(self, flags: Flags) -> Self:
        """The same run under other flags."""
        return replace(self, server=replace(self.server, flags=flags))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration and what it does. `changes`: flag to (current, new) value; `why`: the difference in a sentence;
    `marks`: what to know before using it; `weights`: their dtype.
    """

    weights: str
    flags: Flags
    argv: tuple[str, ...]
    memory: MemoryPlan
    prediction: Prediction
    hours: float
    gpu_hours: float
    changes: dict[str, tuple[Any, Any]]
    why: str
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. `ranked[0]` is the best; `changing` alters outputs; `radix_threshold`: the shared-prefix share below
    which going without the radix cache is faster, and `radix` what follows from it, in words.
    """

    current: Candidate
    ranked: tuple[Candidate, ...]
    changing: tuple[Candidate, ...]
    radix_threshold: float
    radix: str


def make_plan(setting: Setting) -> Plan:
    """Rank the flag space: the best of each radix mode and strategy, and the present flags with a client that keeps up.

    Raises CapacityError, DoesNotFit or FlagsRefused when the current flags themselves cannot run.
    """
    current = candidate(setting, concurrency=setting.concurrency)
    with_radix, without = _best(setting, radix=True), _best(setting, radix=False)
    threshold, share = _threshold(setting, with_radix, without), setting.workload.shared_prefix_share
    may_go = share is not None and share < threshold
    measured = "was not measured, so it stays on" if share is None else f"is {share:.1%}"
    unleashed = candidate(setting, current)
    ranked = [candidate(found, current) for found in _winners(setting, with_radix + (without if may_go else []))]
    if setting.concurrency is not None and unleashed.prediction.running > current.prediction.running:
        ranked.append(unleashed)
    return Plan(
        current=current,
        ranked=tuple(sorted(ranked, key=lambda item: (round(item.hours / current.hours, 3), len(item.changes)))),
        changing=_changing(setting, current, without_radix=may_go),
        radix_threshold=threshold,
        radix=f"going without it is faster below a shared-prefix share of {threshold:.1%}; that of these prompts "
        f"{measured}.",
    )


_Scored = tuple[float, Setting]


def _best(setting: Setting, *, radix: bool, chunks: tuple[int, ...] = CHUNKS, stride: int = 1) -> list[_Scored]:
    """Hours and setting of the best request cap of every kind of configuration; `chunks`: to try besides today's;
    `stride`: above 1, look at every so many caps only, for an answer within a percent.
    """
    kinds = (setting.with_flags(flags) for flags in _kinds(setting, radix=radix, chunks=chunks))
    return [scored for kind in kinds if (scored := _best_requests(kind, stride)) is not None]


def _best_requests(setting: Setting, stride: int) -> _Scored | None:
    """The smallest request cap that is as good as the fastest; more is tried until several in a row are slower."""
    scored: list[_Scored] = []
    best, worse = float("inf"), 0
    for requests in REQUEST_CAPS[::stride]:
        sized = _sized(setting, requests)
        hours = _hours(sized)
        scored.append((hours, sized))
        worse = worse + 1 if hours >= best and best < float("inf") else 0
        best = min(best, hours)
        if worse >= max(1, PATIENCE // stride):
            break
    fits = best < float("inf")
    return next(item for item in scored if item[0] <= best * (1 + CLOSE)) if fits else None


def _hours(setting: Setting) -> float:
    """Predicted hours; infinite for what SGLang refuses, does not fit, or leaves too little room."""
    try:
        prediction = setting.predict(setting.memory())
    except CapacityError:
        return float("inf")
    if prediction.retraction_sigmas < LEAST_SIGMAS:
        return float("inf")
    return prediction.hours(setting.prompts, setting.servers)


def _kinds(setting: Setting, *, radix: bool, chunks: tuple[int, ...]) -> Iterator[Flags]:
    """Flags of every kind of configuration, the request cap left open."""
    now, version, present = setting.server.flags, setting.rules, chunk_tokens(setting.server)
    strategies: tuple[Strategy, ...] = ("auto",)
    if setting.server.shape.state is not None and radix:
        lazy: tuple[Strategy, ...] = ("extra_buffer_lazy",) if version.since(Since.LAZY_BUFFER) else ()
        strategies = ("no_buffer", "extra_buffer", *lazy)
    elif setting.server.shape.state is not None and not version.since(Since.IGNORED_WITHOUT_RADIX):
        strategies = ("no_buffer",)
    for strategy in strategies:
        is_plain = strategy == "no_buffer" and radix
        for chunk in sorted({present, *chunks}):
            for fraction in _fractions(setting, chunk):
                yield replace(
                    now,
                    mamba_strategy=strategy,
                    disable_radix_cache=not radix,
                    disable_overlap_schedule=is_plain and version.since(Since.STRICT_NO_BUFFER),
                    page_size=None if is_plain else now.page_size,
                    chunked_prefill_size=now.chunked_prefill_size if chunk == present else chunk,
                    mem_fraction_static=fraction,
                )


def _fractions(setting: Setting, chunk: int) -> list[float | None]:
    """The file's own mem_fraction_static; a higher one only where measured free memory shows the room."""
    flags, present = setting.server.flags, chunk_tokens(setting.server)
    now = flags.mem_fraction_static
    if setting.available_gib is None or now is None:
        return [now]
    tokens = present / flags.tp_size + max(0, chunk - present)
    room = setting.available_gib - _SPARE_GIB - tokens * _ACTIVATION_GIB_PER_TOKEN
    steps = int(room / setting.free.pre_gib * 100)
    return [now, round(now + steps / 100, 4)] if steps > 0 else [now]


def _sized(setting: Setting, requests: int) -> Setting:
    """The setting with a request cap, and exactly the state slots that it needs."""
    flags = replace(setting.server.flags, max_running_requests=requests, max_mamba_cache_size=None)
    if setting.server.shape.state is not None and not flags.disable_radix_cache:
        slots = requests * resolve(flags, setting.rules, has_state=True).slots_per_request
        flags = replace(flags, max_mamba_cache_size=slots, mamba_full_memory_ratio=0.9)
    return setting.with_flags(flags)


def _winners(setting: Setting, pool: list[_Scored]) -> list[Setting]:
    """The best of each radix mode and strategy; of equals, the one that changes least."""
    best: dict[tuple[bool, str], tuple[tuple[float, int], Setting]] = {}
    for hours, found in pool:
        flags = found.server.flags
        key = (flags.disable_radix_cache, flags.mamba_strategy)
        rank = (round(hours, 3), len(differing(setting.server.flags, flags)))
        if key not in best or rank < best[key][0]:
            best[key] = (rank, found)
    return [found for _, found in best.values()]


def _threshold(setting: Setting, with_radix: list[_Scored], without: list[_Scored]) -> float:
    """The shared-prefix share at which the best configuration with the radix cache catches up with the best without;
    1.0: never, 0.0: it is ahead already, or nothing else fits.
    """
    if not with_radix or not without:
        return 0.0
    target = min(hours for hours, _ in without)

    def pays(share: float) -> bool:
        trial = replace(setting, workload=replace(setting.workload, shared_prefix_share=share))
        return any(hours < target for hours, _ in _best(trial, radix=True, chunks=(), stride=4))

    if pays(0.0):
        return 0.0
    if not pays(0.999):
        return 1.0
    low, high = 0.0, 1.0
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _changing(setting: Setting, current: Candidate, *, without_radix: bool) -> tuple[Candidate, ...]:
    """The best configuration under each change of outputs, fastest first."""
    server, flags, shape = setting.server, setting.server.flags, setting.server.shape
    trials: list[Setting] = []
    if server.element == 2 and server.gpu.flops_8 > server.gpu.flops_16:
        saved_gib = (shape.body_parameters + shape.expert_parameters) * 0.98 / flags.tp_size / GIB
        post_gib = min(setting.free.post_gib + saved_gib, setting.free.pre_gib)
        eight_bit = replace(server, weight_dtype="fp8")
        trials.append(replace(setting, server=eight_bit, free=replace(setting.free, post_gib=post_gib)))
    if shape.state is not None:
        other = "bfloat16" if flags.ssm_element(shape) == 4 else "float32"
        trials.append(setting.with_flags(replace(flags, mamba_ssm_dtype=other)))
    if flags.kv_element(shape) == 2:
        trials.append(setting.with_flags(replace(flags, kv_cache_dtype="fp8_e4m3")))
    found = []
    for trial in trials:
        pool = _best(trial, radix=True) + (_best(trial, radix=False) if without_radix else [])
        found += sorted((candidate(won, current) for won in _winners(trial, pool)), key=lambda item: item.hours)[:1]
    return tuple(sorted(found, key=lambda item: item.hours))


def candidate(setting: Setting, current: Candidate | None = None, *, concurrency: int | None = None) -> Candidate:
    """What one setting does, against the current one where that is given. Raises CapacityError."""
    flags, weights, memory = setting.server.flags, setting.server.weight_dtype, setting.memory()
    prediction = setting.predict(memory, concurrency)
    hours = prediction.hours(setting.prompts, setting.servers)
    changes = differing(current.flags, flags) if current else {}
    if current and current.weights != weights:
        changes = {"weights": (current.weights, weights), **changes}
    item = Candidate(
        weights=weights,
        flags=flags,
        argv=tuple(to_argv(flags, setting.rules)),
        memory=memory,
        prediction=prediction,
        hours=hours,
        gpu_hours=hours * setting.servers * flags.tp_size,
        changes=changes,
        why="The flags as they are.",
        marks=_marks(setting.server, prediction),
    )
    return item if current is None else replace(item, why=_why(item, current))


def _marks(server: Server, prediction: Prediction) -> tuple[str, ...]:
    """What to know of a configuration before using it."""
    marks = []
    if prediction.beyond_graph:
        marks.append(
            f"{prediction.running:.0f} requests exceed the largest CUDA graph ({largest_graph(server)}), so steps run "
            "eagerly; raise the largest graph if memory allows."
        )
    if prediction.retraction_sigmas < LEAST_SIGMAS:
        marks.append(f"the KV pool has {prediction.retraction_sigmas:.1f} sigmas of room: expect retractions.")
    return tuple(marks)


def _why(item: Candidate, current: Candidate) -> str:
    """One sentence: what differs, what that does to the number of running requests, and the gain."""
    new, old = item.memory, current.memory
    facts = {
        "weights in GiB": (new.weights_bytes / GIB, old.weights_bytes / GIB),
        "MiB per state slot": (new.slot_bytes / 2**20, old.slot_bytes / 2**20),
        "KiB per KV token": (new.kv_token_bytes / 1024, old.kv_token_bytes / 1024),
        "state slots per request": (new.resolved.slots_per_request, old.resolved.slots_per_request),
        "KV tokens": (new.max_total_num_tokens, old.max_total_num_tokens),
    }
    changed = {name: values for name, values in facts.items() if values[0] != values[1]}
    parts = [f"{name} {round(now, 1):,} (was {round(was, 1):,})" for name, (now, was) in changed.items()]
    if new.resolved.overlap and not old.resolved.overlap:
        parts.append("overlap scheduling on")
    if not item.changes:
        parts = ["A client that keeps more requests in flight"]
    return (
        f"{', '.join(parts) or 'The same pools'}: {item.prediction.running:.0f} requests run instead of "
        f"{current.prediction.running:.0f}, {current.hours / item.hours:.2f} times the rate."
    )
