"""A rolling change of the servers' settings, beside the run that feeds them: one server at a time, a canary first.

Each is drained, started again, asked for content and fed; the others serve all the while. The canary is also timed
against them. When a server does not come up, answers garbage or is slower, every one that was changed gets its old
settings back in the same way; so it is when it says other things than before, by what its own answers vary.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from dfexp import rollout
from dfexp.client import answers
from dfexp.engines import content
from dfexp.equivalence import DIFFERS, compare
from dfexp.errors import RunError, StorageError
from dfexp.fleet import Fleet, scrub
from dfexp.fleet.record import change_to, differences
from dfexp.generate.configs import Configs
from dfexp.generate.events import EventLog
from dfexp.generate.identity import request_fields
from dfexp.generate.lane import Lane
from dfexp.generate.verdicts import answer_s, drain_s
from dfexp.params import AnyFleet, GenerationGroup, RunSpec
from dfexp.prompts import FrozenPrompts
from dfexp.records import Answer, Prompt
from dfexp.rollout import DONE, Terms, Window

_ANSWER_TOKENS = 256  # of an answer that is compared: settings that change answers show early


@dataclass(slots=True, kw_only=True)
class Rolling:
    """At most one change at a time. `status` is for the status file: None before the first."""

    fleet: Fleet
    lanes: Sequence[Lane]
    events: EventLog
    generation: GenerationGroup
    configs: Configs | None = None  # None without a run
    prompts: FrozenPrompts | Sequence[Prompt] = ()  # of the run
    status: dict[str, Any] | None = None
    task: asyncio.Task[None] | None = None
    cut_off: int = 0

    def start(self, terms: Terms) -> None:
        """Begin; raises RunError or FleetError for what cannot be done, and then nothing has changed."""
        if self.task is not None and not self.task.done():
            raise RunError("another change of this fleet's settings is going on. Wait until it has ended.")
        terms = replace(terms, group=change_to(self.fleet.group, terms.group))
        self.fleet.check_change(terms.group)
        changing = [lane for lane in self.lanes if differences(self.fleet.settings(lane.name), terms.group)]
        if not changing:
            raise RunError("all servers have these settings already: there is nothing to change.")
        self.status = {"id": terms.ident, "state": "rollout_asked", "text": "changing settings", "steps": []}
        self.cut_off = 0
        # Fewest requests first, since the first may fail; the silent ones last.
        changing.sort(key=lambda lane: (not lane.serves, len(lane.tasks)))
        self.task = asyncio.create_task(self._run(terms, changing))

    async def _run(self, terms: Terms, changing: Sequence[Lane]) -> None:
        try:
            await self._roll(terms, changing)
        except asyncio.CancelledError:  # the run ends: nothing is fed again, and what loads is left to load
            own = [server.name for server in self.fleet.servers if server.settings is not None]
            differ = f"{', '.join(own)} differ from the fleet's settings" if own else "no server differs"
            self._tell("rollout_stopped", f"the run ended in the middle of the change; {differ}. Ask again to go on")
            raise
        except Exception as error:  # a full disk, a defect: the run itself can go on
            self._tell("rollout_failed", f"{type(error).__name__}: {error}")
            for lane in self.lanes:
                lane.release(is_well=False)

    async def _roll(self, terms: Terms, changing: Sequence[Lane]) -> None:
        """All servers, the first as a canary; when one fails all go back."""
        old = {lane.name: self.fleet.settings(lane.name) for lane in changing}
        changes = differences(old[changing[0].name], terms.group)
        self._tell("rollout_started", f"{len(changing)} servers, one at a time: {'; '.join(changes)}")
        if terms.canary_s:
            self._tell("rollout_measures", f"measuring the present speed, {terms.canary_s:g} s")
        said, before = await self._answers(changing[0], terms, 2), await self._window(terms.canary_s)
        began = time.monotonic()
        for number, lane in enumerate(changing, 1):
            limit_s = self._drain_s(lane, before, terms)
            why = await self._change(lane, terms.group, f"{number} of {len(changing)}", limit_s)
            if why is None and number == 1 and terms.canary_s:
                why = await self._prove(lane, before, terms)
            if why is None and number == 1 and said:
                why = await self._compare(lane, said, terms)
            if why is not None:
                await self._roll_back(changing[:number], old, why, before, terms)
                return
        during = (before[1], await self._read())
        await asyncio.to_thread(self.fleet.settle, terms.group)
        if self.configs is not None:
            await asyncio.to_thread(self.configs.settle, terms.group)
        seconds = time.monotonic() - began
        text = f"{len(changing)} servers in {seconds:.0f} s, {self.cut_off} requests cut off and sent again"
        await asyncio.sleep(rollout.RAMP_SHARE * terms.canary_s)
        rates = [rollout.fleet_rate(window) for window in (before, during, await self._window(terms.canary_s))]
        if rates[0]:
            text += f"; tokens/s: {rates[1] / rates[0]:.2f} of before meanwhile, {rates[2] / rates[0]:.2f} afterwards"
        self._tell(DONE, text, cut_off=self.cut_off, tok_per_s=rates)

    def _drain_s(self, lane: Lane, before: Window, terms: Terms) -> float:
        """Seconds for requests in flight: those asked for, else all that they may take at the speed from before."""
        if terms.drain_s is not None:
            return terms.drain_s
        rate = rollout.rate(lane.name, before)
        return drain_s(self.generation, lane.limits.context_length, rate, len(lane.tasks))

    async def _change(self, lane: Lane, group: AnyFleet, position: str, limit_s: float) -> str | None:
        """Give one server other settings. None once it serves and answers with sense, else why it does not."""
        began, cap = time.monotonic(), lane.cap
        self._tell("server_draining", f"draining {len(lane.tasks)} requests", lane, position=position)
        cut = await lane.drain(limit_s)
        self.cut_off += cut
        await lane.reading()  # the last of the counter that the restart sets to zero
        drained = time.monotonic()
        self._tell("server_restarting", "starting with its settings", lane, position=position)
        if (why := await lane.reconfigure(group)) is not None:
            return why
        if self.configs is not None:
            try:  # no row may point to settings that it was not made with
                lane.config_id = await asyncio.to_thread(self.configs.id_of, lane.name, lane.limits.engine_version)
            except StorageError as error:
                return str(error)
        times = {"drain_s": round(drained - began, 1), "restart_s": round(time.monotonic() - drained, 1)}
        self._tell(
            "server_reconfigured", f"drained in {times['drain_s']} s, back in {times['restart_s']} s, requests at once:"
            f" {cap} -> {lane.cap}", lane, position=position, **times, cut_off=cut, old_cap=cap, new_cap=lane.cap,
            config_id=lane.config_id,
        )  # fmt: skip
        sampling = request_fields(self.generation)
        reasons = await asyncio.to_thread(content.check, lane.url, self.fleet.key, lane.model, sampling=sampling)
        if not reasons:
            lane.release(is_well=True)
        return "; ".join(reasons) or None

    async def _prove(self, lane: Lane, before: Window, terms: Terms) -> str | None:
        """Feed the canary and time it. None when it may be followed, else why not."""
        seconds = (1 + rollout.RAMP_SHARE) * terms.canary_s
        self._tell("canary_measures", f"comparing its speed, {seconds:g} s", lane)
        await asyncio.sleep(rollout.RAMP_SHARE * terms.canary_s)
        passed, text = rollout.judge(lane.name, before, await self._window(terms.canary_s), terms.least_speed)
        self._tell("canary_verdict", text, lane, passed=passed)
        return None if passed else text

    async def _answers(self, lane: Lane, terms: Terms, times: int) -> list[dict[int, Answer]]:
        """What a server says to some of the run's prompts, greedily, beside its other requests; so many times."""
        if not (number := min(terms.answers, len(self.prompts))):
            return []
        self._tell("canary_asked", f"asking {number} prompts, {times} times", lane)
        places = random.Random(0).sample(range(len(self.prompts)), number)  # noqa: S311 (a draw, no secret)
        drawn = await asyncio.to_thread(lambda: [self.prompts[place] for place in places])
        asked = {
            "max_tokens": _ANSWER_TOKENS, "context_length": lane.limits.context_length,
            "timeout_s": answer_s(self.generation, _ANSWER_TOKENS),
            "sampling": {**request_fields(self.generation), "temperature": 0.0},
        }  # fmt: skip
        return [await answers(lane.client, drawn, number, **asked) for _ in range(times)]

    async def _compare(self, lane: Lane, said: Sequence[dict[int, Answer]], terms: Terms) -> str | None:
        """None unless the canary says other things than it did. Too few answers prove nothing, and stop nothing."""
        verdict = compare(said[0], (await self._answers(lane, terms, 1))[0], said[1])
        self._tell("canary_answers", str(verdict), lane, verdict=verdict.verdict)
        return f"it says other things than before: {verdict}" if verdict.verdict == DIFFERS else None

    async def _roll_back(
        self, changed: Sequence[Lane], old: Mapping[str, AnyFleet], why: str, before: Window, terms: Terms
    ) -> None:
        """Give servers their old settings back, the last one first."""
        self._tell("rollout_rolls_back", why)
        for number, lane in enumerate(reversed(changed), 1):
            if not differences(self.fleet.settings(lane.name), old[lane.name]):
                lane.release(is_well=False)  # it was never touched
                continue
            limit_s = self._drain_s(lane, before, terms)
            if said := await self._change(lane, old[lane.name], f"back {number} of {len(changed)}", limit_s):
                why += f" {lane.name} with its old settings: {said}"
                lane.release(is_well=False)
        self._tell("rollout_rolled_back", why)

    async def _window(self, seconds: float) -> Window:
        """Two readings of all servers, so many seconds apart."""
        first = await self._read()
        await asyncio.sleep(seconds)
        return first, await self._read() if seconds else first

    async def _read(self) -> dict[str, rollout.Reading]:
        readings = await asyncio.gather(*(lane.reading() for lane in self.lanes))
        return {lane.name: reading for lane, reading in zip(self.lanes, readings, strict=True)}

    def _tell(self, event: str, text: str, lane: Lane | None = None, *, position: str = "", **numbers: Any) -> None:
        """Record a step, and show it to whoever reads the status."""
        name, text = lane.name if lane else None, scrub(text, self.fleet.key)
        self.events.record(event, server=name, detail=text, **numbers)
        step = ": ".join(filter(None, (position, name, text)))
        steps = [*(self.status or {})["steps"], step]
        self.status = {**(self.status or {}), "state": event, "server": name, "position": position, "text": step}
        self.status["steps"] = steps


async def change_idle(fleet: Fleet, spec: RunSpec, events: EventLog, tell: Callable[[str], None]) -> bool:
    """The same for a fleet that no run feeds: nothing to drain and nothing to compare. Whether all was changed."""
    events.repeats, told = False, 0
    limits = {each.name: each.limits for each in await asyncio.to_thread(fleet.status)}
    model = await asyncio.to_thread(fleet.model_name)
    async with AsyncExitStack() as stack:
        lanes = [Lane(fleet, one, limits[one.name], model, spec, events, "") for one in fleet.servers]
        for lane in lanes:
            stack.push_async_callback(lane.client.aclose)
        rolling = Rolling(fleet=fleet, lanes=lanes, events=events, generation=spec.generation)
        rolling.start(Terms(ident="", group=spec.fleet, canary_s=0.0, least_speed=0.0))
        while True:
            over, steps = rolling.task is None or rolling.task.done(), (rolling.status or {})["steps"]
            for step in steps[told:]:
                tell(step)
            if over:
                return bool(rolling.status and rolling.status["state"] == DONE)
            told = len(steps)
            await asyncio.sleep(0.2)
