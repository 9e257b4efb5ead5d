"""What a run knows of itself while it goes: its clock, what it did, its servers' samples, and what limits them."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfexp import control
from dfexp.capacity.plan_command import MEASURED, predicted
from dfexp.capacity.planner import make_plan
from dfexp.diagnose import Finding, Planned, Watched, diagnose
from dfexp.errors import DfexpError, StorageError
from dfexp.estimate import Slots, slots_between
from dfexp.fleet import Fleet
from dfexp.generate.events import Guard
from dfexp.generate.progress import Progress, Traffic
from dfexp.jsonl import read_json
from dfexp.params import AnyFleet, RunSpec, SimulatedFleet
from dfexp.quality import flags
from dfexp.records import GARBAGE, Answer, EngineSample, Failure, ServerLimits
from dfexp.sampler import Sampler
from dfexp.virtual_time import CLOCK, LiveClock

if TYPE_CHECKING:
    from dfexp.generate.lane import Lane
    from dfexp.generate.loop import Setup

_GAUGES = ("num_running_reqs", "num_queue_reqs", "full_token_usage", "mamba_usage", "gen_throughput")
_MOST_FINDINGS, _FORGOTTEN_S = 5, 600.0  # shown; a finding that was away for so long is told anew
_LOOKS = 2  # samples between two diagnoses
_FULL = 0.98  # of a start's rows: after that its slots run empty


def clock_of(fleet: Fleet) -> Callable[[], float]:
    """The clock that rates and times of a run are by: of simulated servers their own, else seconds since the epoch."""
    if isinstance(fleet.group, SimulatedFleet):
        return LiveClock(fleet.folder.path / CLOCK)
    zero_at = time.time() - time.monotonic()  # a clock that is set does not bend rates
    return lambda: zero_at + time.monotonic()


def planned(spec: RunSpec, root: Path, frozen: Mapping[str, Any]) -> Planned | None:
    """What the capacity model says of a run's servers; None where it says nothing. Takes a second.

    Args: frozen, what run.json says of the prompts: it counts where the plan leaves open how many there are and how
    much they share.
    """
    if spec.planned is None:
        return None
    known = {name: frozen.get(key) for name, key in MEASURED.items() if getattr(spec.planned, name) is None}
    with contextlib.suppress(DfexpError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        prepared, _ = predicted(spec, root, **known)
        return Planned(setting=prepared.setting, plan=make_plan(prepared.setting)) if prepared else None
    return None


class Overview:
    """Gathers what the status file says; `run` goes on beside the loop, which tells of its requests.

    Whatever fails in it costs knowledge, never a row: an event tells of that, and the rest goes on.
    """

    def __init__(self, setup: "Setup", lanes: "Sequence[Lane]", queue: Sized) -> None:
        """Args: lanes, as they come to be; queue, the rows that are not sent."""
        self._s, self._lanes, self._queue, self._now = setup, lanes, queue, clock_of(setup.fleet)
        self._started_at, self._done_before = time.time(), setup.shards.done
        known = (control.read_status(setup.folder) or {}) if setup.shards.done else {}
        lengths = {int(tokens): int(number) for tokens, number in known.get("lengths", {}).items()}
        self.progress = Progress(self._now(), lengths=lengths)
        self._sampler = Sampler(
            fleet=setup.fleet, path=setup.folder.metrics, interval_s=setup.spec.generation.sample_interval_s,
            now=self._now, limits=self._limits, taken=self._sampled, guard=(guard := Guard(setup.events)),
        )  # fmt: skip
        self._guard, self._writer = guard, ThreadPoolExecutor(1)
        self._written: asyncio.Future[None] | None = None
        self._findings: list[Finding] = []
        self._told: dict[tuple[str, str | None], float] = {}  # and when it was last so, monotonic seconds
        self._plan: Planned | None = None
        self._planned_for: AnyFleet | None = None
        self._state = "running"
        slots = known.get("slots") or {}
        self._away_s, self._slots = slots.pop("away_s", 0.0), Slots(**slots)
        self._looks: dict[str, tuple[EngineSample, float | None]] = {}  # the last at each, and since when it served
        self._shown_at = self._now()
        self._shown = self.progress.estimates(self._now(), left=0, limit=None, samples={})
        self._shown |= {"findings": [], "servers": []}  # until a look at them has succeeded

    async def run(self) -> None:
        """Sample and look for findings until cancelled."""
        await asyncio.gather(self._sampler.run(), self._look())

    def flags(self, server: str, answer: Answer) -> tuple[str, ...]:
        """What its row is to say of an answer, kept or not: the flags it came with, and what its content shows."""
        with self._guard("answers"):
            thinking = self._s.spec.generation.enable_thinking is True
            found = flags(answer.text, answer.finish_reason, answer.completion_tokens, thinking=thinking)
            self._traffic(server).judged(self._now(), is_garbage=GARBAGE in found)
            return answer.flags + found
        return (*answer.flags, "not_judged")  # it must not pass for one that was found good

    def sent(self, server: str, index: int) -> None:
        """A row goes to a server."""
        with self._guard("requests"):
            self._traffic(server).sent(index, self._now())

    def answered(self, server: str, index: int, answer: Answer, flags: Sequence[str]) -> None:
        """A row is done."""
        with self._guard("requests"):
            self.progress.answered(server, index, self._now(), answer, flags)

    def left(self, server: str, index: int) -> None:
        """A request is over, whatever came of it."""
        with self._guard("requests"):
            self._traffic(server).left(index, self._now())

    def _traffic(self, server: str) -> Traffic:
        return self.progress.servers[server]

    @property
    def _is_full_time(self) -> bool:
        """Whether slots should be full: from the first row of this start to 98 % of them."""
        over = self.progress.rows + self.progress.failures
        return self._state == "running" and self.progress.rows > 0 and over < _FULL * len(self._s.rows)

    def _sampled(self, sample: EngineSample) -> None:
        lane = next(lane for lane in self._lanes if lane.name == sample.server)
        lane.sampled(sample)
        before, look = self._looks.pop(lane.name, None), (sample, lane.fed_from if lane.serves else None)
        if self._is_full_time:
            self._looks[lane.name] = look
            if before and before[1] == look[1] is not None:
                self._slots += slots_between(before[0], sample)
        if sample.num_queue_reqs is not None:
            self._traffic(sample.server).flight.sampled(sample.at, round(sample.num_queue_reqs))

    def _limits(self, server: str) -> ServerLimits:
        return next((lane.limits for lane in self._lanes if lane.name == server), ServerLimits())

    async def _look(self) -> None:
        """Diagnose now and then. The plan of the servers' settings, which takes a second, is made when they change."""
        while True:
            await asyncio.sleep(_LOOKS * self._sampler.interval_s)
            with self._guard("plan"):
                if self._planned_for != (group := self._s.fleet.group):
                    self._plan, self._planned_for = None, group
                    self._plan = await asyncio.to_thread(self._planned, group)
            with self._guard("findings"):
                if self._state == "running":
                    watched, left = [self._watched(lane) for lane in self._lanes], len(self._queue)
                    self._tell(await asyncio.to_thread(diagnose, watched, rows_left=left, planned=self._plan))

    def _watched(self, lane: "Lane") -> Watched:
        state = "draining" if lane.is_held else lane.state
        samples, group = tuple(self._sampler.recent[lane.name]), self._s.fleet.settings(lane.name)
        flags = getattr(group, "flags", {"max_running_requests": getattr(group, "max_running_requests", None)})
        seen, words = self._traffic(lane.name).watched(self._now()), lane.rejections.words
        return Watched(
            name=lane.name, samples=samples, limits=lane.limits, flags=flags, state=state, limit=lane.limit,
            rejected=lane.rejections.in_a_row if words else 0, rejection=words, **seen,
        )  # fmt: skip

    def _planned(self, group: AnyFleet) -> Planned | None:
        """What the capacity model says of these servers."""
        spec = self._s.spec.model_copy(update={"fleet": group})
        return planned(spec, self._s.root, read_json(self._s.folder.run_json)["prompts"])

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

    def write(self, state: str, held: Sequence[Failure], **more: Any) -> asyncio.Future[None]:
        """Write the status file, in a thread of its own; while the disk is at one, none but a final one is begun.

        A disk that refuses it does not stop the run. Args: held, rows that count as failed as soon as one succeeds;
        more, what else it is to say. Returns the write that is the last.
        """
        self._state = state
        if self._written is None or self._written.done() or state in control.FINAL_STATES:
            status = self._status(held, **more)
            self._written = asyncio.get_running_loop().run_in_executor(self._writer, self._save, status)
        return self._written

    def _save(self, status: dict[str, Any]) -> None:
        with contextlib.suppress(StorageError):
            control.write_status(self._s.folder, status)

    def _status(self, held: Sequence[Failure], **more: Any) -> dict[str, Any]:
        """The status, of which nothing changes any more."""
        setup, now, shards = self._s, self._now(), self._s.shards
        if self._is_full_time:
            self._away_s += (now - self._shown_at) * sum(not lane.serves for lane in self._lanes)
        self._shown_at = now
        with self._guard("status"):
            shown = self.progress.estimates(
                now, left=len(self._queue), later=setup.later, limit=self._longest(), samples=self._sampler.recent,
                gone=[lane.name for lane in self._lanes if lane.state in ("down", "quarantined", "changing")],
                alone_tok_per_s=self._plan.tok_per_s(1) if self._plan else None,
            )  # fmt: skip
            shown["findings"] = [asdict(each) for each in self._findings[:_MOST_FINDINGS]]
            rates, window_s = shown.pop("rates"), shown["window_s"]
            shown["servers"] = [self._server(lane, now - window_s, rates.get(lane.name, {})) for lane in self._lanes]
            self._shown = shown
        kinds = Counter(shards.failures_by_kind()) + Counter(one.kind for one in held)
        return {
            "state": self._state, "engine": setup.fleet.engine.name,
            "pid": setup.me.pid, "process_started": setup.me.started, "at": time.time(), "started_at": self._started_at,
            "asked": len(setup.prompts), "done": shards.done, "failed": shards.failed + len(held),
            "pending": len(self._queue), "in_flight": sum(len(lane.tasks) for lane in self._lanes),
            "done_before": self._done_before, "rows_of_start": len(setup.rows), "rows_of_later_starts": setup.later,
            "failures_by_kind": dict(kinds), "flags": dict(self.progress.flags), **more,
            "slots": asdict(self._slots) | {"away_s": self._away_s}, **self._shown,
        }  # fmt: skip

    def _longest(self) -> float | None:
        """Tokens that no answer can exceed, as far as that is known."""
        asked = self._s.spec.generation.max_tokens
        contexts = [lane.limits.context_length for lane in self._lanes if lane.limits.context_length]
        return float(asked) if asked != "fit" else float(max(contexts)) if contexts else None

    def _server(self, lane: "Lane", since: float, rates: Mapping[str, Any]) -> dict[str, Any]:
        """A server's part: its lane, its gauges where it has told them `since` then, and the rates of both sides."""
        samples = self._sampler.recent[lane.name]
        is_told = samples and samples[-1].at >= since and self._state not in control.FINAL_STATES
        last = samples[-1] if is_told else None
        gauges = {name: getattr(last, name, None) for name in _GAUGES}
        if gauges["full_token_usage"] is None:
            gauges["full_token_usage"] = getattr(last, "token_usage", None)  # of a model with one pool
        return {**lane.status(), **gauges, "server_tok_per_s": None, "client_tok_per_s": 0.0, **rates}
