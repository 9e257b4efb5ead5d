"""What a run knows of itself while it goes: its clock, what it did, its servers' samples, and what limits them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Any

from dfexp import control
from dfexp.capacity.plan_command import predicted
from dfexp.capacity.planner import make_plan
from dfexp.capacity.workload import shared_prefix_share
from dfexp.diagnose import Finding, Planned, Watched, diagnose
from dfexp.errors import DfexpError, StorageError
from dfexp.fleet import Fleet
from dfexp.generate.lane import Lane
from dfexp.generate.progress import Progress, Traffic
from dfexp.params import AnyFleet, SimulatedFleet
from dfexp.quality import garbage
from dfexp.records import Answer, EngineSample, Failure, ServerLimits
from dfexp.sampler import Sampler
from dfexp.virtual_time import CLOCK, LiveClock

if TYPE_CHECKING:
    from dfexp.generate.loop import Setup

_GAUGES = ("num_running_reqs", "num_queue_reqs", "full_token_usage", "mamba_usage", "gen_throughput")
_MOST_FINDINGS, _FORGOTTEN_S = 5, 600.0  # shown; a finding that was away for so long is told anew
_LOOKS = 2  # samples between two diagnoses
_JUDGED_S, _JUDGED_CHARACTERS = 0.06, 2000  # of one answer in so many seconds so much is judged: 1 % of a core
_PROMPTS = 2000  # tell how much prompts share


def clock_of(fleet: Fleet) -> Callable[[], float]:
    """The clock that rates and times of a run are by: of simulated servers their own, else seconds since the epoch."""
    if isinstance(fleet.group, SimulatedFleet):
        return LiveClock(fleet.folder.path / CLOCK)
    zero_at = time.time() - time.monotonic()  # a clock that is set does not bend rates
    return lambda: zero_at + time.monotonic()


class Overview:
    """Gathers what the status file says; `run` goes on beside the loop, which tells of its requests."""

    def __init__(self, setup: Setup, lanes: Sequence[Lane], queue: Sized) -> None:
        """Args: lanes, as they come to be; queue, the rows that are not sent."""
        self._s, self._lanes, self._queue, self._now = setup, lanes, queue, clock_of(setup.fleet)
        self._started_at, self._done_before = time.time(), setup.shards.done
        known = (control.read_status(setup.folder) or {}).get("lengths", {}) if setup.shards.done else {}
        lengths = {int(tokens): int(number) for tokens, number in known.items()}
        self.progress = Progress(self._now(), lengths=lengths)
        self._sampler = Sampler(
            fleet=setup.fleet, path=setup.folder.metrics, interval_s=setup.spec.generation.sample_interval_s,
            now=self._now, limits=self._limits, taken=self._sampled,
        )  # fmt: skip
        self._findings: list[Finding] = []
        self._told: dict[tuple[str, str | None], float] = {}  # and when it was last so, monotonic seconds
        self._plan: Planned | None = None
        self._planned_for: AnyFleet | None = None
        self._state, self._next_judged, self._has_failed = "running", 0.0, False
        self._estimated = self.progress.estimates(self._now(), left=0, limit=None, samples={})

    async def run(self) -> None:
        """Sample and look for findings until cancelled. A defect in that costs knowledge, never a row."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sampler.run())
                tasks.create_task(self._look())
        except* Exception as errors:
            self._failed(errors.exceptions[0])

    def _failed(self, error: BaseException) -> None:
        if not self._has_failed:
            traceback.print_exception(error)
            self._s.events.record("watching_failed", detail=repr(error))
        self._has_failed = True

    def sent(self, server: str, index: int) -> None:
        """A row goes to a server."""
        self._traffic(server).sent(index, self._now())

    def answered(self, server: str, index: int, answer: Answer) -> None:
        """A row is done."""
        now, real_now = self._now(), time.monotonic()
        self.progress.answered(server, index, now, answer)
        if real_now >= self._next_judged:
            self._next_judged = real_now + _JUDGED_S
            why = garbage(answer.text[:_JUDGED_CHARACTERS], answer.completion_tokens)
            self._traffic(server).judged(now, is_garbage=why is not None)

    def left(self, server: str, index: int) -> None:
        """A request is over, whatever came of it."""
        self._traffic(server).left(index, self._now())

    def _traffic(self, server: str) -> Traffic:
        return self.progress.servers[server]

    def _sampled(self, sample: EngineSample) -> None:
        if sample.num_queue_reqs is not None:
            self._traffic(sample.server).flight.sampled(sample.at, round(sample.num_queue_reqs))

    def _limits(self, server: str) -> ServerLimits:
        return next((lane.limits for lane in self._lanes if lane.name == server), ServerLimits())

    async def _look(self) -> None:
        """Diagnose now and then. The plan of the servers' settings, which takes a second, is made when they change."""
        while True:
            await asyncio.sleep(_LOOKS * self._sampler.interval_s)
            if self._planned_for != (group := self._s.fleet.group):
                self._plan, self._planned_for = await asyncio.to_thread(self._planned, group), group
            if self._state == "running":
                watched, left = [self._watched(lane) for lane in self._lanes], len(self._queue)
                self._tell(await asyncio.to_thread(diagnose, watched, rows_left=left, planned=self._plan))

    def _watched(self, lane: Lane) -> Watched:
        state = "draining" if lane.is_held else lane.state
        samples, flags = tuple(self._sampler.recent[lane.name]), getattr(self._s.fleet.settings(lane.name), "flags", {})
        seen = self._traffic(lane.name).watched(self._now())
        return Watched(
            name=lane.name, samples=samples, limits=lane.limits, flags=flags, state=state, limit=lane.limit, **seen
        )

    def _planned(self, group: AnyFleet) -> Planned | None:
        """What the capacity model says of these servers; None where it says nothing."""
        spec, prompts = self._s.spec.model_copy(update={"fleet": group}), self._s.prompts
        if spec.planned is None:
            return None
        known: dict[str, Any] = {"prompts": len(prompts)}
        if spec.planned.shared_prefix_share is None:
            some = range(0, len(prompts), max(1, len(prompts) // _PROMPTS))
            texts = ["\n".join(str(one.get("content")) for one in prompts[index].messages) for index in some]
            known["shared_prefix_share"] = shared_prefix_share(texts)
        prepared, _ = predicted(spec, self._s.root, **known)
        with contextlib.suppress(DfexpError, ArithmeticError, LookupError, TypeError, ValueError):
            if prepared is not None:
                return Planned(setting=prepared.setting, plan=make_plan(prepared.setting))
        return None

    def _tell(self, found: list[Finding]) -> None:
        """Keep findings, and record the new ones. Of several servers only faults are told of each."""
        first, now = {each.kind: each for each in reversed(found)}, time.monotonic()
        self._findings = [each for each in found if each.severity == "fault" or each is first[each.kind]]
        for each in self._findings:
            key = each.kind, each.server if each.severity == "fault" else None
            if now - self._told.get(key, -inf) > _FORGOTTEN_S:
                self._s.events.record(
                    "finding", server=each.server, kind=each.kind, severity=each.severity, detail=each.evidence,
                    change=each.change or None, gain=each.gain and round(each.gain, 3),
                )  # fmt: skip
            self._told[key] = now

    def write(self, state: str, held: Sequence[Failure], **more: Any) -> None:
        """Write the status file; a disk that refuses it does not stop the run.

        Args: held, rows that count as failed as soon as one succeeds; more, what else it is to say.
        """
        self._state = state
        with contextlib.suppress(StorageError):
            control.write_status(self._s.folder, self._status(held, **more))

    def _status(self, held: Sequence[Failure], **more: Any) -> dict[str, Any]:
        setup, now, shards = self._s, self._now(), self._s.shards
        try:
            self._estimated = self.progress.estimates(
                now, left=len(self._queue), limit=self._longest(), samples=self._sampler.recent,
                alone_tok_per_s=self._plan.tok_per_s(1) if self._plan else None,
            )  # fmt: skip
        except Exception as error:
            self._failed(error)
        kinds = Counter(shards.failures_by_kind()) + Counter(one.kind for one in held)
        return {
            "state": self._state,
            "engine": setup.fleet.engine.name,
            "pid": setup.me.pid,
            "process_started": setup.me.started,
            "at": time.time(),
            "started_at": self._started_at,
            "asked": len(setup.prompts),
            "done": shards.done,
            "failed": shards.failed + len(held),
            "pending": len(self._queue),
            "in_flight": sum(len(lane.tasks) for lane in self._lanes),
            "done_before": self._done_before,
            **{name: value for name, value in self._estimated.items() if name != "rates"},
            "failures_by_kind": dict(kinds),
            "flags": dict(self.progress.flags),
            **more,
            "findings": [asdict(each) for each in self._findings[:_MOST_FINDINGS]],
            "servers": [self._server(lane, now, self._estimated["window_s"]) for lane in self._lanes],
        }

    def _longest(self) -> float | None:
        """Tokens that no answer can exceed, as far as that is known."""
        asked = self._s.spec.generation.max_tokens
        contexts = [lane.limits.context_length for lane in self._lanes if lane.limits.context_length]
        return float(asked) if asked != "fit" else float(max(contexts)) if contexts else None

    def _server(self, lane: Lane, now: float, window_s: float) -> dict[str, Any]:
        """A server's part: its lane, its gauges where it has told them of late, and the rates of both sides."""
        samples = self._sampler.recent[lane.name]
        is_told = samples and samples[-1].at >= now - window_s and self._state not in control.FINAL_STATES
        last = samples[-1] if is_told else None
        gauges = {name: getattr(last, name, None) for name in _GAUGES}
        if gauges["full_token_usage"] is None:
            gauges["full_token_usage"] = getattr(last, "token_usage", None)  # of a model with one pool
        rates = self._estimated["rates"].get(lane.name, {"server_tok_per_s": None, "client_tok_per_s": 0.0})
        return {**lane.status(), **gauges, **rates}
