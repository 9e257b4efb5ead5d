"""Which flags finish the run soonest: every combination that leaves the outputs alone, ranked, each winner explained.

What changes outputs (weights, state or KV in another dtype) is listed apart and never ranked with the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from dfexp.capacity import why
from dfexp.capacity.cost import Efficiency, Server
from dfexp.capacity.errors import CapacityError, DoesNotFit, FlagsRefused
from dfexp.capacity.flags import Flags, Strategy, resolve, to_argv
from dfexp.capacity.memory import Free, MemoryPlan, plan_memory
from dfexp.capacity.shape import dtype_bytes
from dfexp.capacity.throughput import Prediction, chunk_tokens, predict
from dfexp.capacity.units import GiB, to_gib
from dfexp.capacity.versions import Rules
from dfexp.capacity.workload import Workload

MOST_REQUESTS = 1024
PATIENCE = 4
CLOSE = 0.005
"""Caps within half a percent of the fastest count as equal; the smallest of them leaves the most room."""
CHUNKS = (2048, 4096, 8192, 16384)
_ACTIVATION_GIB_PER_TOKEN = 1.5 / 1024
_SPARE_GIB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything about a run that the planner may not change.

    Attributes:
        concurrency: requests that the client keeps at each server today; None = as many as it runs.
        available_gib: measured `available_gpu_mem` of this GPU, model and chunk size; None = not measured.
        prompts: completions to make; servers: independent servers, each on `flags.tp_size` GPUs.

    """

    server: Server
    rules: Rules
    free: Free
    efficiency: Efficiency
    workload: Workload
    prompts: int
    servers: int
    concurrency: int | None = None
    available_gib: GiB | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration, what it does, and why it is better or worse than the current one, in one sentence.

    `changes`: flag to (current, new) value; `marks`: what to know before using it.
    """

    flags: Flags
    argv: tuple[str, ...]
    memory: MemoryPlan
    prediction: Prediction
    hours: float
    gpu_hours: float
    changes: dict[str, tuple[Any, Any]]
    why: str
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RadixVerdict:
    """Whether the radix cache may go: the measured share of shared prefixes against the one at which it pays."""

    share: float | None
    threshold: float
    considered: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. `ranked[0]` is the best; `changing` alters outputs; `tried`, `dropped`: combinations, and why not."""

    current: Candidate
    ranked: tuple[Candidate, ...]
    changing: tuple[Candidate, ...]
    radix: RadixVerdict
    tried: int
    dropped: dict[str, int]


def make_plan(setting: Setting, *, keep: int = 6) -> Plan:
    """Rank the flag space. Args: keep, winners to return, the best of each kind of configuration.

    Raises CapacityError, DoesNotFit or FlagsRefused when the current flags themselves cannot run.
    """
    current = candidate(setting, setting.server, setting, concurrency=setting.concurrency)
    search = _Search(setting)
    with_radix, without = search.best(radix=True), search.best(radix=False)
    radix = _verdict(setting, search, with_radix, without)
    pool = with_radix + (without if radix.considered else [])
    ranked = [candidate(setting, server, setting) for server in _winners(setting, pool)]
    unleashed = candidate(setting, setting.server, setting)
    if setting.concurrency is not None and unleashed.prediction.running > current.prediction.running:
        ranked.append(unleashed)
    ranked.sort(key=lambda item: (round(item.hours / current.hours, 3), len(item.changes)))
    changing = _changing(setting, without_radix=radix.considered)
    return Plan(
        current=current,
        ranked=tuple(replace(item, why=why.sentence(item, current)) for item in ranked[:keep]),
        changing=tuple(
            replace(item, why=why.sentence(item, current)) for item in sorted(changing, key=lambda item: item.hours)
        ),
        radix=radix,
        tried=search.tried,
        dropped=search.dropped,
    )


_Scored = tuple[float, Server]


class _Search:
    """Walks the flag space and counts what it meets; keeps the best of each kind (radix, strategy, chunk, fraction)."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.tried = 0
        self.dropped: dict[str, int] = {}

    def best(self, *, radix: bool, workload: Workload | None = None, chunks: tuple[int, ...] = CHUNKS) -> list[_Scored]:
        """The best number of requests of every kind of configuration; `chunks` to try besides the present one."""
        found: list[_Scored] = []
        for flags in _kinds(self._setting, radix=radix, chunks=chunks):
            scored = self._best_requests(replace(self._setting.server, flags=flags), workload or self._setting.workload)
            if scored is not None:
                found.append(scored)
        return found

    def _best_requests(self, server: Server, workload: Workload) -> _Scored | None:
        """The smallest request cap that is as good as the fastest; more is tried until several in a row are slower."""
        try:
            resolve(server.flags, server.shape, self._setting.rules)
        except FlagsRefused:
            self._drop("refused by SGLang")
            return None
        tried: list[tuple[int, float]] = []
        best, worse = float("inf"), 0
        for requests in _caps():
            hours = self.hours(_sized(server, requests, self._setting.rules), workload)
            if hours is not None:
                tried.append((requests, hours))
            worse = worse + 1 if tried and (hours is None or hours >= best) else 0
            best = min(best, hours if hours is not None else best)
            if worse >= PATIENCE:
                break
        chosen = next(((requests, hours) for requests, hours in tried if hours <= best * (1 + CLOSE)), None)
        return None if chosen is None else (chosen[1], _sized(server, chosen[0], self._setting.rules))

    def hours(self, server: Server, workload: Workload) -> float | None:
        """Predicted hours; None, and counted by reason, for what cannot run or leaves too little room."""
        self.tried += 1
        setting = self._setting
        try:
            memory = plan_memory(server.shape, server.flags, setting.rules, setting.free)
            prediction = predict(server, memory, setting.efficiency, workload)
        except DoesNotFit:
            self._drop("does not fit")
            return None
        except CapacityError:
            self._drop("impossible")
            return None
        if prediction.retraction_sigmas < why.LEAST_SIGMAS:
            self._drop("too close to retraction")
            return None
        return prediction.hours(setting.prompts, setting.servers)

    def _drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def _caps() -> Iterator[int]:
    """Request caps to try: every one up to 256, then every fourth."""
    yield from range(1, 257)
    yield from range(260, MOST_REQUESTS + 1, 4)


def _kinds(setting: Setting, *, radix: bool, chunks: tuple[int, ...]) -> Iterable[Flags]:
    """Flags of every kind of configuration, the request cap left open."""
    now = setting.server.flags
    hybrid = setting.server.shape.state is not None
    strategies: tuple[Strategy, ...] = ("auto",)
    if hybrid and radix:
        strategies = (
            ("no_buffer", "extra_buffer", "extra_buffer_lazy")
            if setting.rules.has_lazy
            else ("no_buffer", "extra_buffer")
        )
    elif hybrid:
        strategies = ("auto",) if setting.rules.extra_buffer_with_radix_off else ("no_buffer",)
    for strategy in strategies:
        for chunk in sorted({chunk_tokens(setting.server), *chunks}):
            for fraction in _fractions(setting, chunk):
                yield replace(
                    now,
                    mamba_radix_cache_strategy=strategy,
                    disable_radix_cache=not radix,
                    disable_overlap_schedule=strategy == "no_buffer" and radix and setting.rules.strict_no_buffer,
                    page_size=None if strategy == "no_buffer" and radix else now.page_size,
                    chunked_prefill_size=now.chunked_prefill_size if chunk == chunk_tokens(setting.server) else chunk,
                    mem_fraction_static=fraction,
                )


def _fractions(setting: Setting, chunk: int) -> list[float]:
    """The file's own mem_fraction_static; a higher one only where measured free memory shows the room."""
    now = setting.server.flags.mem_fraction_static or 0.0
    if setting.available_gib is None:
        return [now]
    more = max(0, chunk - chunk_tokens(setting.server)) * _ACTIVATION_GIB_PER_TOKEN
    working = chunk_tokens(setting.server) * _ACTIVATION_GIB_PER_TOKEN / setting.server.flags.tp_size
    room = setting.available_gib - _SPARE_GIB - more - working
    steps = int(room / setting.free.pre * 100)
    return [now, round(now + steps / 100, 4)] if steps > 0 else [now]


def _sized(server: Server, requests: int, rules: Rules) -> Server:
    """The server with a request cap, and exactly the state slots that it needs."""
    flags = replace(server.flags, max_running_requests=requests, max_mamba_cache_size=None)
    if server.shape.state is not None and not flags.disable_radix_cache:
        slots = requests * resolve(flags, server.shape, rules).slots_per_request
        flags = replace(flags, max_mamba_cache_size=slots, mamba_full_memory_ratio=0.9)
    shards = flags.dp_size if flags.enable_dp_attention or rules.divides_by_dp else 1
    total = flags.max_mamba_cache_size
    if total is not None and flags.enable_dp_attention:
        total *= flags.dp_size
    return replace(server, flags=replace(flags, max_running_requests=requests * shards, max_mamba_cache_size=total))


def _winners(setting: Setting, pool: list[_Scored]) -> list[Server]:
    """The best of each radix mode and strategy; of equals, the one that changes least."""
    best: dict[tuple[bool, str], tuple[tuple[float, int], Server]] = {}
    for hours, server in pool:
        key = (server.flags.disable_radix_cache, server.flags.mamba_radix_cache_strategy)
        rank = (round(hours, 3), len(changes(setting.server.flags, server.flags)))
        if key not in best or rank < best[key][0]:
            best[key] = (rank, server)
    return [server for _, server in best.values()]


def _verdict(setting: Setting, search: _Search, with_radix: list[_Scored], without: list[_Scored]) -> RadixVerdict:
    """The shared-prefix share at which the best configuration with the radix cache catches up with the best without."""
    share = setting.workload.shared_prefix_share
    if not with_radix or not without:
        return RadixVerdict(
            share=share, threshold=0.0, considered=False, why="no configuration without the radix cache fits."
        )
    target = min(hours for hours, _ in without)

    def pays(trial: float) -> bool:
        workload = replace(setting.workload, shared_prefix_share=trial)
        return any(hours < target for hours, _ in search.best(radix=True, workload=workload, chunks=()))

    low, high = (0.0, 0.0) if pays(0.0) else (0.0, 1.0)
    if high and not pays(0.999):
        low = high = 1.0
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return RadixVerdict(
        share=share, threshold=high, considered=share is not None and share < high, why=why.verdict(share, high)
    )


def _changing(setting: Setting, *, without_radix: bool) -> list[Candidate]:
    """The best configuration under each change of outputs."""
    server = setting.server
    trials: list[tuple[Server, Free]] = []
    if dtype_bytes(server.weight_dtype) == 2 and server.gpu.flops_8 > server.gpu.flops_16:
        experts = server.shape.experts.total if server.shape.experts else 0
        saved = to_gib(int((server.shape.body_parameters + experts) * 0.98 / server.flags.tp_size))
        post = GiB(setting.free.post + saved)
        trials.append(
            (replace(server, weight_dtype="fp8"), replace(setting.free, post=GiB(min(post, setting.free.pre))))
        )
    if server.shape.state is not None and server.shape.state.state_size:
        other = "bfloat16" if dtype_bytes(server.flags.ssm_dtype(server.shape)) == 4 else "float32"
        trials.append((replace(server, flags=replace(server.flags, mamba_ssm_dtype=other)), setting.free))
    if server.flags.kv_element(server.shape) == 2:
        trials.append((replace(server, flags=replace(server.flags, kv_cache_dtype="fp8_e4m3")), setting.free))
    found = []
    for changed, free in trials:
        altered = replace(setting, server=changed, free=free)
        search = _Search(altered)
        pool = search.best(radix=True) + (search.best(radix=False) if without_radix else [])
        winners = [candidate(altered, winner, setting) for winner in _winners(setting, pool)]
        found += sorted(winners, key=lambda item: item.hours)[:1]
    return found


def changes(now: Flags, new: Flags) -> dict[str, tuple[Any, Any]]:
    """Flags that differ, with both values."""
    return {
        item.name: (getattr(now, item.name), getattr(new, item.name))
        for item in fields(Flags)
        if getattr(now, item.name) != getattr(new, item.name)
    }


def candidate(setting: Setting, server: Server, baseline: Setting, *, concurrency: int | None = None) -> Candidate:
    """What one configuration does. Raises CapacityError, DoesNotFit, FlagsRefused."""
    memory = plan_memory(server.shape, server.flags, setting.rules, setting.free)
    prediction = predict(server, memory, setting.efficiency, setting.workload, concurrency=concurrency)
    hours = prediction.hours(setting.prompts, setting.servers)
    different = changes(baseline.server.flags, server.flags)
    if server.weight_dtype != baseline.server.weight_dtype:
        different = {"weights": (baseline.server.weight_dtype, server.weight_dtype), **different}
    return Candidate(
        flags=server.flags,
        argv=tuple(to_argv(server.flags, setting.rules)),
        memory=memory,
        prediction=prediction,
        hours=hours,
        gpu_hours=hours * setting.servers * server.flags.tp_size,
        changes=different,
        why="",
        marks=why.marks(server, prediction),
    )
