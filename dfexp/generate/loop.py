"""The generation loop: rows to servers, answers to the disk, until every row is accounted for or a stop is asked."""

import asyncio
import contextlib
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dfexp import control
from dfexp.errors import DfexpError, RunError, StorageError
from dfexp.fleet import Fleet
from dfexp.fleet.record import read_group
from dfexp.generate.configs import Configs
from dfexp.generate.events import EventLog
from dfexp.generate.lane import Lane
from dfexp.generate.notify import Lookout, tell
from dfexp.generate.recorder import Recorder
from dfexp.generate.rolling import Rolling
from dfexp.generate.serve import Serving
from dfexp.generate.status import Overview
from dfexp.generate.verdicts import end_of
from dfexp.generate.work import Job, WorkQueue
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from dfexp.processes import ProcessId
from dfexp.prompts import FrozenPrompts
from dfexp.records import ServerLimits
from dfexp.rollout import Terms
from dfexp.shards import Shards

if TYPE_CHECKING:
    from dfexp.store import Uploader  # which takes boto3: slow to import

TICK_S, _FILLING_TICK_S = 0.1, 0.01
STATUS_EVERY_S = 1.0
MOST_BACKLOG = 2000
"""Rows not yet safe on the disk after which servers are fed no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a run works with; whoever made it closes it. `limits` (None: silent) and `config_ids` are by server.

    `rows` are the rows to do, in order; `rest` says why they are not all that are left, None where they are, and
    `later` how many are.
    """

    folder: RunFolder
    root: Path
    spec: RunSpec
    fleet: Fleet
    model: str
    limits: Mapping[str, ServerLimits | None]
    config_ids: Mapping[str, str]
    configs: Configs
    prompts: FrozenPrompts
    shards: Shards
    events: EventLog
    uploads: "Uploader | None"
    me: ProcessId
    owner: ProcessId | None
    rows: Sequence[int]
    rest: str | None
    later: int


class Loop:
    """One run of the generation loop, with one lane per server."""

    def __init__(self, setup: Setup) -> None:
        self._s, self._generation = setup, setup.spec.generation
        self._queue = WorkQueue(setup.rows, len(setup.rows))
        self._lanes: list[Lane] = []
        self._started = time.monotonic()
        self._recorder = Recorder(setup.shards, setup.events)
        self._overview = Overview(setup, self._lanes, self._queue)
        self._progress = self._overview.progress
        self._lookout = Lookout(self._generation.stall_s, self._started)
        self._telling = set[asyncio.Task[None]]()
        self._serving = Serving(setup, self._queue, self._recorder, self._overview, self._fail)
        self._wake = asyncio.Event()
        self._state = "running"
        self._reason: str | None = None
        self._drain_until: float | None = None
        self._is_cut = False
        self._next_status = self._next_look = 0.0
        self._all_down_since: float | None = None
        self._rolling = Rolling(
            fleet=setup.fleet, lanes=self._lanes, events=setup.events, generation=self._generation,
            configs=setup.configs, prompts=setup.prompts,
        )  # fmt: skip
        self._refusals: dict[str, str] = {}  # of changes that were asked for, by their names

    def ask_to_stop(self, reason: str, *, now: bool = False) -> None:
        """Feed no more and let requests in flight finish; with `now`, cut them off. Safe to call again."""
        if self._state == "running":
            self._state, self._reason = "draining", reason
            self._s.events.record("stop_asked", detail=reason, in_flight=self._in_flight)
            self._drain_until = time.monotonic() + self._generation.drain_s
            if self._rolling.task is not None:
                self._rolling.task.cancel()
        if now:
            self._drain_until, self._is_cut = time.monotonic(), True
        self._wake.set()

    def _signalled(self) -> None:
        """A signal came: ask to stop; a second one cuts off the requests in flight."""
        self.ask_to_stop("a signal asked to stop", now=self._state != "running")

    async def run(self) -> tuple[str, str | None]:
        """Work until the end, and write the last status. Returns the state (ended, stopped, failed) and why."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        async with AsyncExitStack() as stack:
            for server in self._s.fleet.servers:
                limits, config_id = self._s.limits[server.name], self._s.config_ids[server.name]
                lane = Lane(self._s.fleet, server, limits, self._s.model, self._s.spec, self._s.events, config_id)
                stack.push_async_callback(lane.client.aclose)
                self._lanes.append(lane)
            try:
                state, self._reason = await self._work()
            except Exception as error:  # a defect: what is done is safe, and the status must say why it ended
                state, self._reason = "failed", f"{type(error).__name__}: {error}"
                traceback.print_exc()
            self._serving.streak.flush()  # what is held still is on no disk and counts as not done
            await self._upload_rest()
            await asyncio.wait({self._write_status(state)})
            return state, self._reason

    async def _upload_rest(self) -> None:
        """Give the store its time; being told twice to stop ends that too. What is left stays in the run's folder."""
        uploads, end = self._s.uploads, time.monotonic() + self._s.spec.store.drain_s
        if uploads is None:
            return
        self._state = "draining"
        while not await asyncio.to_thread(uploads.wait, 0.5) and time.monotonic() < end and not self._is_cut:
            self._obey()
            self._show()
        uploads.finish(0.0)

    async def _work(self) -> tuple[str, str | None]:
        recorder, watching = asyncio.create_task(self._recorder.run()), asyncio.create_task(self._overview.run())
        for lane in self._lanes:
            lane.start_watch()
        try:
            while not self._is_over():
                for task in (recorder, *self._watches()):
                    if task.done() and not task.cancelled() and (defect := task.exception()) is not None:
                        raise defect
                self._obey()
                self._look_after_the_fleet()
                self._feed()
                self._show()
                is_filling = any(lane.is_filling(time.monotonic()) for lane in self._lanes)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _FILLING_TICK_S if is_filling else TICK_S)
                self._wake.clear()
            state, reason = await self._finish(recorder)
            shards = self._s.shards
            return end_of(state, reason, done=shards.done, failed=shards.failed, asked=len(self._s.prompts))
        finally:
            for task in (tasks := (recorder, watching, *self._watches(), *self._all_tasks())):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _in_flight(self) -> int:
        return sum(len(lane.tasks) for lane in self._lanes)

    def _all_tasks(self) -> list[asyncio.Task[None]]:
        requests = [task for lane in self._lanes for task in lane.tasks]
        return [*requests, *self._telling, *filter(None, (self._rolling.task,))]

    def _watches(self) -> list[asyncio.Task[None]]:
        return [lane.watching for lane in self._lanes if lane.watching is not None]

    def _is_over(self) -> bool:
        if self._in_flight == 0:
            # A disk that refuses the last answers is waited for, like one that refuses any others.
            return self._state != "running" or (not self._queue and not self._recorder.backlog)
        return self._drain_until is not None and time.monotonic() >= self._drain_until

    def _feed(self) -> None:
        """Give every server what it has room for: empty slots come before the few that wait at each server.

        Servers take turns, so that a short queue is shared.
        """
        if self._state != "running" or self._recorder.backlog > MOST_BACKLOG:
            return
        now = time.monotonic()
        serving = sum(lane.serves_soon(now) for lane in self._lanes)
        ready = [lane for lane in self._lanes if lane.has_room(now)]
        for may_wait in (False, True):
            left = list(ready)
            while left := [lane for lane in left if lane.has_room(now) and (may_wait or lane.free_slots)]:
                for lane in list(left):
                    job = self._queue.take(lane.name, now, alone=serving == 1)
                    if job is None:
                        left.remove(lane)
                    else:
                        self._submit(lane, job)
        idle = [lane for lane in ready if lane.has_room(now)]
        for lane in idle:
            lane.starved()
        self._take_back(sum(lane.free_slots for lane in idle))

    def _take_back(self, slots: int) -> None:
        """Nothing is left for slots that are empty: what waits at other servers is sent to them, the last sent first.

        A request that is being decoded stays where it is, and so does one that failed or was taken back before.
        """
        slots -= sum(1 for lane in self._lanes for task in lane.tasks if task.cancelling())  # are on their way
        waiting = [lane.waiting() for lane in self._lanes]
        while slots > 0 and (longest := max(waiting, key=len, default=[])):
            longest.pop(0).cancel()
            slots -= 1

    def _submit(self, lane: Lane, job: Job) -> None:
        task = asyncio.create_task(self._serving.serve(lane, job))
        lane.tasks[task] = time.monotonic()
        if job.avoid is not None:
            lane.staying.add(task)
        self._overview.sent(lane.name, job.index)
        task.add_done_callback(lambda finished: self._settled(lane, job, finished))

    def _settled(self, lane: Lane, job: Job, task: asyncio.Task[None]) -> None:
        """A request is over: its place is free. An exception here is a defect: the run stops and says so."""
        del lane.tasks[task]
        lane.staying.discard(task)
        self._overview.left(lane.name, job.index)
        self._wake.set()
        if task.cancelled():  # cut off by us: as if it had never been sent
            self._queue.put_back(replace(job, avoid=lane.name), not_before=0.0)
        elif task.exception() is not None:
            self._fail(f"{type(task.exception()).__name__}: {task.exception()}")

    def _fail(self, reason: str) -> None:
        """Stop because going on would burn rows. The first reason counts."""
        if self._state == "running":
            self.ask_to_stop(reason)
            self._state = "failing"

    def _obey(self) -> None:
        """Commands from other processes, and the loss of the one that started this; both cost a look at the disk."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + TICK_S
        for command in control.take_commands(self._s.folder, self._s.me):
            if command.verb in (control.STOP, control.STOP_NOW):
                self.ask_to_stop(command.args.get("reason", "asked to stop"), now=command.verb == control.STOP_NOW)
            elif command.verb == control.RECONFIGURE:
                self._reconfigure(command.args)
        owner, policy = self._s.owner, self._generation.on_orphan
        if self._state == "running" and policy == "stop" and owner is not None and not owner.is_alive():
            self.ask_to_stop(f"the process that started this run ({owner.pid}) is gone")

    def _reconfigure(self, args: Mapping[str, Any]) -> None:
        """Begin a change of the servers' settings, or say why not where its sender looks for that."""
        try:
            if self._state != "running":
                raise RunError("the run is stopping. Ask again when it has ended.")
            self._rolling.start(Terms(**{**args, "group": read_group(args["group"])}))
        except (DfexpError, ValidationError, KeyError, TypeError) as error:
            self._refusals[str(args.get("ident"))] = str(error)
            self._s.events.record("rollout_refused", detail=str(error))

    def _look_after_the_fleet(self) -> None:
        """Give up when no server is left that could come back, or when none has answered for too long."""
        lanes, now, hours = self._lanes, time.monotonic(), self._s.spec.limits.hours
        if self._state != "running":
            return
        if hours is not None and now - self._started >= hours * 3600:
            self.ask_to_stop(f"limits.hours = {hours:g} is reached")
            return
        if stall := self._lookout.look(now, self._progress.rows + self._progress.failures, lanes):
            self._s.events.record("run_stalled", detail=stall)
            task = asyncio.create_task(tell(self._s.spec.notify, self._s.folder, self._s.events, "stall", stall))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        if all(lane.state == "quarantined" for lane in lanes):
            self._fail("every server is quarantined after it kept dying; its log and events.jsonl say why")
        if not self._progress.rows and all(lane.rejections.denial for lane in lanes):
            self._fail(f"{lanes[0].name}: {lanes[0].rejections.denial}. Every row would fail like this one.")
        self._look_for_refusals(now)
        for lane in self._lanes:
            if lane.state in ("down", "quarantined") and any(other.serves for other in lanes):
                lane.cut_off()  # nobody knows whether it still works on them
        if any(lane.state == "ready" for lane in lanes):
            self._all_down_since = None
            return
        self._all_down_since = self._all_down_since or now
        silent_s = now - self._all_down_since
        if silent_s > self._generation.give_up_s:
            self._fail(f"no server has answered for {silent_s:.0f} s (generation.give_up_s)")

    def _look_for_refusals(self, now: float) -> None:
        """Give up when all that servers did for too long was to turn requests away, as a gateway without quota does."""
        give_up_s, refused_since = self._generation.give_up_s, self._serving.refused_since
        if refused_since is None or now - refused_since < give_up_s:
            return
        if not any(now - sent > give_up_s / 2 for lane in self._lanes for sent in lane.tasks.values()):
            self._fail(f"servers turned requests away for {give_up_s:.0f} s without completing one (give_up_s)")

    def _show(self) -> None:
        """Write the status file about once a second."""
        if time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + STATUS_EVERY_S
            self._write_status(self._state if self._state != "failing" else "draining")

    def _write_status(self, state: str) -> asyncio.Future[None]:
        return self._overview.write(
            state, self._serving.streak.held, reason=self._reason, rollout=deepcopy(self._rolling.status),
            refusals=dict(self._refusals), disk_refuses=self._recorder.refusal,
            not_uploaded=len(self._s.uploads.left) if self._s.uploads else 0,
        )  # fmt: skip

    async def _finish(self, recorder: asyncio.Task[None]) -> tuple[str, str | None]:
        """Cut off what is still in flight, make every answer safe, seal the open shard."""
        for task in self._all_tasks():
            task.cancel()
        await asyncio.gather(*self._all_tasks(), return_exceptions=True)
        if self._state != "failing":
            for failure in self._serving.streak.flush():
                self._recorder.add_failure(failure)
        self._recorder.finish(within_s=max(5.0, self._generation.drain_s))
        try:
            await recorder
            for shard in await asyncio.to_thread(self._s.shards.seal):
                self._s.events.record("shard_sealed", shard=shard.name, rows=shard.rows)
        except StorageError as error:
            return "failed", f"{error} {self._recorder.backlog} answers could not be written and will be made again."
        if self._state == "running":
            return ("stopped", self._s.rest) if self._s.rest else ("ended", None)
        return ("failed" if self._state == "failing" else "stopped"), self._reason
