"""Samples of real HTTP servers: every one that answers, whatever the others and the disk do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dfexp import params
from dfexp.engines.base import free_ports
from dfexp.fleet import Fleet, up
from dfexp.generate.events import EventLog, Guard
from dfexp.records import EngineSample, ServerLimits
from dfexp.sampler import KEPT_S, Sampler
from tests.http_stub import Quiet, serving

PAGE = (Path(__file__).parent / "data" / "metrics" / "0.5.12_hybrid_busy.prom").read_bytes()


class Pages(Quiet):
    """/metrics of SGLang."""

    def do_GET(self) -> None:
        self.reply(200 if self.path == "/metrics" else 404, PAGE)


class Silent(Quiet):
    """Takes requests and says nothing."""

    def do_GET(self) -> None:
        self.server.released.wait(60)


class Other(Quiet):
    """A server of another kind."""

    def do_GET(self) -> None:
        self.reply(404, b"<html>nothing here</html>")


def fleet_of(root: Path, *urls: str) -> Fleet:
    tree = {"run": "r", "fleet": {"engine": "external", "urls": list(urls)}, "prompts": {"path": "p.jsonl"}}
    return up(params.validate(tree, "test"), root)[0]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def sampled(
    fleet: Fleet,
    path: Path,
    enough: Callable[[list[EngineSample]], object],
    *,
    now: Callable[[], float] = lambda: 7.0,
    interval_s: float = 0.02,
    broken: str = "",
) -> Sampler:
    """Samples until `enough` holds of what was taken; whoever is called with those of server `broken` raises."""
    taken, held = list[EngineSample](), asyncio.Event()

    def take(sample: EngineSample) -> None:
        if sample.server == broken:
            raise ZeroDivisionError(sample.server)
        taken.append(sample)
        if enough(taken):
            held.set()

    limits = ServerLimits(max_running_requests=16)
    with EventLog(fleet.folder.path / "events.jsonl") as events:
        sampler = Sampler(
            fleet=fleet, path=path, interval_s=interval_s, now=now, limits=lambda name: limits, taken=take,
            guard=Guard(events),
        )  # fmt: skip
        task = asyncio.create_task(sampler.run())
        await asyncio.wait_for(held.wait(), 30.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return sampler


async def test_a_server_that_answers_is_sampled_whatever_others_do(tmp_path: Path) -> None:
    with ExitStack() as stack:
        good, silent, other = (stack.enter_context(serving(kind)) for kind in (Pages, Silent, Other))
        (gone,) = free_ports("127.0.0.1", 1)
        fleet = fleet_of(tmp_path, good.url, silent.url, other.url, f"http://127.0.0.1:{gone}")
        path = tmp_path / "metrics.jsonl"
        sampler = await sampled(fleet, path, lambda taken: len(taken) == 2)
    name = good.url.removeprefix("http://")
    assert {server: len(kept) for server, kept in sampler.recent.items() if kept} == {name: 2}
    (first,) = lines(path)  # the second round still waited for the silent one
    assert first["server"] == name
    assert first["max_running_requests"] == 16, "which no page tells"
    assert first["max_total_num_tokens"] > 0
    assert first["at"] > 1e9, "in the file it is real time"
    assert sampler.recent[name][0].at == 7.0, "in memory it is that of the run's clock"


async def test_what_fails_with_one_server_is_told_once_and_ends_no_sampling(tmp_path: Path) -> None:
    with serving(Pages) as good, serving(Pages) as bad:
        fleet, broken = fleet_of(tmp_path, bad.url, good.url), bad.url.removeprefix("http://")
        await sampled(fleet, tmp_path / "metrics.jsonl", lambda taken: len(taken) == 5, broken=broken)
    told = lines(fleet.folder.path / "events.jsonl")
    assert [(each["event"], each["part"], each["detail"]) for each in told] == [
        ("watching_failed", f"samples of {broken}", f"ZeroDivisionError({broken!r})")
    ]
    assert "in take" in told[0]["traceback"]
    assert len(lines(tmp_path / "metrics.jsonl")) >= 4


async def test_a_disk_that_refuses_costs_lines_and_no_sample(tmp_path: Path) -> None:
    with serving(Pages) as good:
        path, refused = tmp_path / "later" / "metrics.jsonl", list[int]()

        def enough(taken: list[EngineSample]) -> bool:
            if len(taken) == 5:
                refused.append(len(taken))
                path.parent.mkdir()
            return path.exists() and path.stat().st_size > 0

        sampler = await sampled(fleet_of(tmp_path, good.url), path, enough)
    (kept,) = sampler.recent.values()
    assert refused
    assert len(kept) >= 6
    assert 0 < len(lines(path)) <= len(kept) - 4


async def test_a_torn_last_line_of_a_killed_process_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"at":1.0,"server":"a"}\n{"at":2.0,"ser')
    with serving(Pages) as good:
        await sampled(fleet_of(tmp_path, good.url), path, lambda taken: len(taken) == 3)
    found = lines(path)
    assert found[0] == {"at": 1.0, "server": "a"}
    assert {line["server"] for line in found[1:]} == {good.url.removeprefix("http://")}


async def test_memory_holds_the_last_minutes(tmp_path: Path) -> None:
    clock = iter(range(0, 100_000, 10))
    with serving(Pages) as good:
        fleet, now = fleet_of(tmp_path, good.url), lambda: float(next(clock))
        sampler = await sampled(fleet, tmp_path / "m", lambda taken: len(taken) == 60, now=now, interval_s=0.001)
    (kept,) = sampler.recent.values()
    assert len(kept) == KEPT_S / 10 + 1
    assert kept[-1].at - kept[0].at == KEPT_S


@pytest.mark.parametrize("step", [100, 1000])
async def test_a_clock_that_is_fast_keeps_enough_samples_to_judge(tmp_path: Path, step: int) -> None:
    clock = iter(range(0, 10_000_000, step))
    with serving(Pages) as good:
        fleet, now = fleet_of(tmp_path, good.url), lambda: float(next(clock))
        sampler = await sampled(fleet, tmp_path / "m", lambda taken: len(taken) == 30, now=now, interval_s=0.001)
    (kept,) = sampler.recent.values()
    assert len(kept) == 24
