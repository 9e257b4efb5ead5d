"""A rolling change of the servers' settings, beside the run that feeds them: one server at a time, a canary first.

Each is drained, started again, asked for content and fed; the others serve all the while. The canary is also timed
against them. When a server does not come up, answers garbage or is slower, every one that was changed gets its old
settings back in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from dfexp import rollout
from dfexp.engines import content
from dfexp.errors import RunError
from dfexp.fleet import Fleet, scrub
from dfexp.fleet.record import check_change, differences
from dfexp.generate.configs import Configs
from dfexp.generate.events import EventLog
from dfexp.generate.identity import request_fields
from dfexp.generate.lane import Lane
from dfexp.generate.verdicts import answer_s
from dfexp.params import AnyFleet, GenerationGroup, RunSpec
from dfexp.rollout import Terms, Window

FINAL_STATES = frozenset({"done", "rolled_back", "stopped", "failed"})


@dataclass(slots=True, kw_only=True)
class Rolling:
    """At most one change at a time. `status` is for the status file: None before the first."""

    fleet: Fleet
    lanes: Sequence[Lane]
    events: EventLog
    generation: GenerationGroup
    configs: Configs | None = None  # None without a run
    rows_lost: Callable[[], int] = int
    status: dict[str, Any] | None = None
    task: asyncio.Task[None] | None = None
    cut_off: int = 0

    def start(self, terms: Terms) -> None:
        """Begin; raises RunError or FleetError for what cannot be done, and then nothing has changed."""
        if self.task is not None and not self.task.done():
            raise RunError("another change of this fleet's settings is going on. Wait until it has ended.")
        check_change(self.fleet.group, terms.group)
        if not (todo := self._todo(terms.group)):
            raise RunError("all servers have these settings already: there is nothing to change.")
        self.status = {"id": terms.ident, "steps": []}
        self.task = asyncio.create_task(self._run(terms, todo))

    def _todo(self, group: AnyFleet) -> list[Lane]:
        """The lanes that have other settings, in the order of their change; those that do not serve come last."""
        lanes = {lane.name: lane for lane in self.lanes if differences(self.fleet.settings(lane.name), group)}
        loads = {name: len(lane.tasks) if lane.serves else lane.limit + 1 for name, lane in lanes.items()}
        return [lanes[name] for name in rollout.order(loads)]

    async def _run(self, terms: Terms, todo: Sequence[Lane]) -> None:
        try:
            await self._roll(terms, todo)
        except asyncio.CancelledError:  # the run ends: nothing is fed again, and what loads is left to load
            left = len(self._todo(terms.group))
            self._end("stopped", f"{left} of {len(self.lanes)} servers still have other settings; ask again to go on")
            raise
        except Exception as error:  # a full disk, a defect: the run itself can go on
            self._end("failed", f"{type(error).__name__}: {error}")
            for lane in self.lanes:
                lane.release(is_well=False)

    async def _roll(self, terms: Terms, todo: Sequence[Lane]) -> None:
        """All servers, the first as a canary; when one fails all go back."""
        old = {lane.name: self.fleet.settings(lane.name) for lane in todo}
        changes = differences(old[todo[0].name], terms.group)
        self.events.record("rollout_started", changes=changes, servers=[lane.name for lane in todo])
        self._say("measuring", None, f"{'; '.join(changes)}; {len(todo)} servers, one at a time")
        before, began, self.cut_off = await self._window(terms.canary_s), time.monotonic(), 0
        for number, lane in enumerate(todo, 1):
            why = await self._change(lane, terms.group, f"{number} of {len(todo)}", terms.drain_s)
            if why is None and number == 1 and terms.canary_s:
                why = await self._prove(lane, before, terms)
            if why is not None:
                await self._roll_back(todo[:number], old, why, terms.drain_s)
                return
        during = (before[1], await self._read())
        await asyncio.to_thread(self.fleet.settle, terms.group)
        if self.configs is not None:
            await asyncio.to_thread(self.configs.settle, terms.group)
        seconds = time.monotonic() - began
        if terms.canary_s:
            self._say("measuring", None, "all servers have the new settings; measuring the rate")
            await asyncio.sleep(rollout.ramp_s(todo[-1].name, before, terms.canary_s))
        rates = [rollout.fleet_rate(window) for window in (before, during, await self._window(terms.canary_s))]
        share = [rate / rates[0] if rate is not None and rates[0] else None for rate in rates]
        told = ", ".join(
            f"{when} {part:.2f}" for when, part in zip(("meanwhile", "now"), share[1:], strict=True) if part
        )
        self._end(
            "done", f"{len(todo)} servers in {seconds:.0f} s, {self.cut_off} requests cut off and sent again"
            + (f"; rate as a share of before: {told}" if told else ""),
            seconds=round(seconds, 1), cut_off=self.cut_off, rows_lost=self.rows_lost(), rate_before=rates[0],
            share_during=share[1], share_after=share[2],
        )  # fmt: skip

    async def _change(self, lane: Lane, group: AnyFleet, position: str, drain_s: float | None) -> str | None:
        """Give one server other settings. None once it serves and answers with sense, else why it does not."""
        began, cap = time.monotonic(), lane.cap
        self._say("draining", lane, f"draining {len(lane.tasks)} requests", position)
        self.events.record("server_draining", server=lane.name, in_flight=len(lane.tasks))
        cut = await lane.drain(answer_s(self.generation, None) if drain_s is None else drain_s)
        self.cut_off += cut
        await lane.reading()  # the last of the counter that the restart sets to zero
        drained = time.monotonic()
        self._say("restarting", lane, "starting with the other settings", position)
        if (why := await lane.reconfigure(group)) is not None:
            return why
        if self.configs is not None:
            lane.config_id = await asyncio.to_thread(self.configs.id_of, lane.name, lane.limits.engine_version)
        self.events.record(
            "server_reconfigured", server=lane.name, position=position, drain_s=round(drained - began, 3), cut_off=cut,
            restart_s=round(time.monotonic() - drained, 3), old_cap=cap, new_cap=lane.cap, config_id=lane.config_id,
        )  # fmt: skip
        timeout_s = answer_s(self.generation, content.MAX_TOKENS)
        reasons = await asyncio.to_thread(
            content.check,
            lane.url,
            self.fleet.key,
            lane.model,
            sampling=request_fields(self.generation),
            timeout_s=timeout_s,
        )
        if not reasons:
            lane.release(is_well=True)
        return "; ".join(reasons) or None

    async def _prove(self, lane: Lane, before: Window, terms: Terms) -> str | None:
        """Feed the canary and time it. None when it may be followed, else why not."""
        ramp_s = rollout.ramp_s(lane.name, before, terms.canary_s)
        self._say("canary", lane, f"serves; judged after {ramp_s:.0f} s, over {terms.canary_s:.0f} s or more")
        await asyncio.sleep(ramp_s)
        first = await self._read()
        for _ in range(rollout.MOST_WINDOWS):
            await asyncio.sleep(terms.canary_s)
            verdict = rollout.judge(lane.name, before, (first, await self._read()), terms)
            if verdict.passed is not None:
                break
        self.events.record(
            "canary_verdict", server=lane.name, passed=bool(verdict.passed), detail=verdict.text, rate=verdict.rate,
            expected=verdict.expected, ramp_s=round(ramp_s, 1),
        )  # fmt: skip
        self._say("canary", lane, verdict.text)
        return None if verdict.passed else verdict.text

    async def _roll_back(
        self, changed: Sequence[Lane], old: Mapping[str, AnyFleet], why: str, drain_s: float | None
    ) -> None:
        """Give servers their old settings back, the last one first."""
        why = scrub(why, self.fleet.key)
        self.events.record("rollout_rolled_back", detail=why, servers=[lane.name for lane in changed])
        failed = []
        for number, lane in enumerate(reversed(changed), 1):
            if not differences(self.fleet.settings(lane.name), old[lane.name]):
                lane.release(is_well=False)  # it was never touched
            elif said := await self._change(lane, old[lane.name], f"back, {number} of {len(changed)}", drain_s):
                failed.append(f"{lane.name} with its old settings: {said}")
                lane.release(is_well=False)
        self._end("rolled_back", " ".join([why, *failed]))

    async def _window(self, seconds: float) -> Window:
        """Two readings of all servers, so many seconds apart."""
        first = await self._read()
        await asyncio.sleep(seconds)
        return first, await self._read() if seconds else first

    async def _read(self) -> dict[str, rollout.Reading]:
        readings = await asyncio.gather(*(lane.reading() for lane in self.lanes))
        return {lane.name: reading for lane, reading in zip(self.lanes, readings, strict=True)}

    def _say(self, state: str, lane: Lane | None, text: str, position: str | None = None) -> None:
        """Tell a step to whoever reads the status."""
        assert self.status is not None, "it has begun"
        name = lane.name if lane else None
        step = " ".join(filter(None, (position and f"[{position}]", name and f"{name}:", text)))
        steps = [*self.status["steps"], step]
        self.status |= {"state": state, "server": name, "position": position, "text": step, "steps": steps}

    def _end(self, state: str, text: str, **numbers: Any) -> None:
        self._say(state, None, scrub(text, self.fleet.key))
        self.events.record(f"rollout_{state}", detail=text, **numbers)


async def change_idle(fleet: Fleet, spec: RunSpec, events: EventLog) -> dict[str, Any]:
    """The same for a fleet that no run feeds: nothing to drain and nothing to compare. Returns the last status."""
    limits = {each.name: each.limits for each in await asyncio.to_thread(fleet.status)}
    model = await asyncio.to_thread(fleet.model_name)
    async with AsyncExitStack() as stack:
        lanes = [Lane(fleet, one, limits[one.name], model, spec, events, "") for one in fleet.servers]
        for lane in lanes:
            stack.push_async_callback(lane.client.aclose)
        rolling = Rolling(fleet=fleet, lanes=lanes, events=events, generation=spec.generation)
        rolling.start(Terms(ident="", group=spec.fleet, canary_s=0.0, least_speed=0.0))
        assert rolling.task is not None, "it was started"
        await rolling.task
    return rolling.status or {}
