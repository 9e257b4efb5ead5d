"""Slots are full as long as there is work: servers start without a herd, and what waits goes to one that is idle."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from dfexp.generate.events import EventLog
from dfexp.generate.lane import Lane
from dfexp.params import GenerationGroup, SimulatedFleet
from dfexp.records import ServerLimits
from tests.generate.conftest import Project
from tests.scripted_server import Hang, ScriptedServer, chat


def asked(body: dict[str, Any]) -> str:
    """The row that a request is for; another word for a probe."""
    return str(body["messages"][-1]["content"])


async def test_what_waits_at_a_slow_server_is_taken_back_when_another_is_idle(project: Project) -> None:
    """The slow one decodes 4 at once and has one that waits; the end of the run does not wait for that."""
    held = asyncio.Semaphore(4)

    async def slow_answer() -> dict[str, Any]:
        async with held:
            await asyncio.sleep(1.5)
        return chat()

    def slowly(body: dict[str, Any], n: int) -> Any:
        return slow_answer() if asked(body).startswith("question") else chat()

    async with ScriptedServer(slowly) as slow, ScriptedServer(lambda b, n: chat(), delay_s=0.02) as fast:
        folder = await project.start(project.spec([slow.url, fast.url], 60))
        status = await project.end(folder)
        sent = {server: Counter(map(asked, server.bodies)) for server in (slow, fast)}
    rows = project.rows(folder)
    assert (status["state"], status["done"], status["failed"]) == ("ended", 60, 0)
    assert project.counts(folder) == Counter(range(60)), "none lost, none doubled"
    assert {row["attempt"] for row in rows} == {1}, "taking back is no attempt"
    twice = {word for word in sent[slow] if word in sent[fast] and word.startswith("question")}
    assert len(twice) == 1, "the one that waited, and none of the four that were being decoded"
    for each in sent.values():
        assert {number for word, number in each.items() if word.startswith("question")} == {1}, "none comes back"
    assert Counter(row["server"] for row in rows)[f"127.0.0.1:{slow.port}"] == 4
    assert max(row["latency_s"] for row in rows) < 2.9, "no row waited for a slot and then for an answer"


async def test_a_fast_server_does_its_full_share(project: Project) -> None:
    """Both decode four at once; one takes five times as long for an answer. Taking turns would give both the same."""
    served = Counter[str]()

    def answering(name: str, seconds: float, slots: asyncio.Semaphore) -> Any:
        async def answer() -> dict[str, Any]:
            async with slots:
                await asyncio.sleep(seconds)
            served[name] += 1
            return chat()

        return lambda body, n: answer() if asked(body).startswith("question") else chat()

    fast, slow = answering("fast", 0.2, asyncio.Semaphore(4)), answering("slow", 1.0, asyncio.Semaphore(4))
    async with ScriptedServer(fast) as one, ScriptedServer(slow) as other:
        folder = await project.start(project.spec([one.url, other.url], 120))
        status = await project.end(folder)
    assert (status["state"], status["done"]) == ("ended", 120)
    ideal = 120 * 5 / 6
    assert served["fast"] >= 0.9 * ideal, served
    rows = project.rows(folder)
    took = max(row["submitted_at"] + row["latency_s"] for row in rows) - min(row["submitted_at"] for row in rows)
    assert took < 0.75 * 60 / 4 * 1.0, "by turns the slow one would need this long for its half"


def usual_count(came: list[float]) -> float:
    """Of the first second, before answers: how many come in 0.1 s, by the median. 20 of 200; of a herd 0 or 100.

    A process that stalls for half a second changes at most one half of the windows.
    """
    return median(sum(k <= 10 * (each - came[0]) < k + 1 for each in came) for k in range(10))


async def test_the_first_requests_come_one_after_the_other(project: Project) -> None:
    came: list[float] = []

    async def answer() -> dict[str, Any]:
        came.append(time.monotonic())
        await asyncio.sleep(1.0 if len(came) <= 200 else 0.0)
        return chat()

    async with ScriptedServer(lambda b, n: answer() if asked(b).startswith("question") else chat()) as server:
        await project.run(project.spec([server.url], 250, concurrency=200))
    assert 5 <= usual_count(came) <= 30, "no herd"


async def test_a_server_that_comes_back_gets_them_so_again(project: Project) -> None:
    came: list[float] = []

    async def answer() -> dict[str, Any]:
        came.append(time.monotonic())
        await asyncio.sleep(1.0)
        return chat()

    def script(body: dict[str, Any], n: int) -> Any:
        return answer() if asked(body).startswith("question") else chat()

    async with ScriptedServer(lambda body, n: Hang() if n > 300 else chat()) as server:
        folder = await project.start(project.spec([server.url], 700, concurrency=200))
        await project.until(folder, lambda status: status["in_flight"] == 200)
    await project.until(folder, lambda status: status["servers"][0]["state"] == "down")
    async with ScriptedServer(script, port=server.port):
        status = await project.end(folder)
    assert (status["state"], status["done"]) == ("ended", 700)
    assert 5 <= usual_count(came) <= 30, "no herd"


@pytest.mark.parametrize(("speed", "at_once", "later_s"), [("max", 170, 0.0), (1.0, 1, 1.0), (50.0, 1, 0.02)])
async def test_the_first_requests_are_spread_by_the_servers_own_time(
    tmp_path: Path, speed: Any, at_once: int, later_s: float
) -> None:
    """A simulated clock that waits for the client alone would take a pause for its end, and move on."""
    group = {"engine": "simulated", "model": "m", "speed": speed}
    spec: Any = SimpleNamespace(fleet=SimulatedFleet.model_validate(group), generation=GenerationGroup())
    one: Any = SimpleNamespace(name="a", url="http://127.0.0.1:1", argv=None)
    with EventLog(tmp_path / "events.jsonl") as events:
        limits = ServerLimits(max_running_requests=160)
        lane = Lane(SimpleNamespace(key=""), one, limits, "m", spec, events, "")  # type: ignore[arg-type]
        for now, most in ((1000.0, at_once), (1000.0 + later_s + 1e-6, 170)):
            while lane.has_room(now):
                lane.tasks[asyncio.create_task(asyncio.sleep(0))] = now
            assert len(lane.tasks) == most
            assert lane.is_filling(now) == (most < 170)
        await asyncio.gather(*lane.tasks)
        await lane.client.aclose()


async def test_a_server_that_does_not_tell_its_room_is_asked_for_it(project: Project) -> None:
    """It decodes 40 at once; what it does not say is found by its rate, at one that a busy machine can keep."""
    slots = asyncio.Semaphore(40)

    async def answer() -> dict[str, Any]:
        async with slots:
            await asyncio.sleep(0.25)
        return chat()

    async with ScriptedServer(lambda b, n: answer()) as server:
        tree = project.spec([server.url], 900)
        tree = tree.model_copy(update={"fleet": tree.fleet.model_copy(update={"max_running_requests": None})})
        folder = await project.start(tree)
        status = await project.end(folder)
        assert server.most_in_flight >= 24
    assert (status["done"], status["failed"]) == (900, 0)
    assert status["servers"][0]["limit"] > 16
