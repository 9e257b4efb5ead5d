"""Settings of servers are changed under a run: one by one, back when the first fails, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dfexp import control, fleet, generate, params
from dfexp.cli import main
from dfexp.engines import get_json
from dfexp.errors import FleetError, RunError
from dfexp.generate.events import EventLog
from dfexp.generate.lane import Lane
from dfexp.generate.reconfigure import reconfigure
from dfexp.jsonl import read_json, read_log
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from tests.generate.conftest import Project
from tests.scripted_sglang import wrapper


class Rolled:
    """A run over servers of this machine, and changes of their settings."""

    def __init__(self, project: Project) -> None:
        self.project, self.root = project, project.root
        self.python = wrapper(self.root)

    def spec(self, mode: str = "good", cap: int = 2, **changes: Any) -> RunSpec:
        external = self.project.spec(["http://127.0.0.1:1"], 20_000, on_orphan="continue").model_dump()
        group = {
            "engine": "sglang", "model": "nobody/scripted", "device": "cpu", "servers": 2, "python": self.python,
            "flags": {"max_running_requests": cap, "log_level_http": mode}, "stagger_s": 0, "start_timeout_s": 30.0,
        }  # fmt: skip
        if mode == "llamacpp":
            group = {"engine": "llamacpp", "servers": 2, "max_running_requests": cap, "context_length": 512}
        generation = {**external["generation"], **changes.pop("generation", {})}
        tree = {"run": "r", "fleet": {**group, **changes}, "prompts": external["prompts"], "generation": generation}
        return params.validate(tree, "test")

    async def start(self, spec: RunSpec) -> RunFolder:
        return await self.project.start(spec)

    async def change(self, spec: RunSpec, **terms: Any) -> tuple[bool, list[str]]:
        told: list[str] = []
        asked = {"canary_s": 1.0, "least_speed": 0.3, **terms}
        return await asyncio.to_thread(reconfigure, spec, self.root, told.append, **asked), told

    def fleet(self) -> fleet.Fleet:
        return fleet.attach(generate.fleet_folder(self.spec(), self.root))

    async def stop(self, folder: RunFolder) -> dict[str, Any]:
        await asyncio.to_thread(generate.stop, folder, reason="test")
        return await self.project.end(folder)


def told_events(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.events.read_text().splitlines()]


def cap_of(group: dict[str, Any]) -> int:
    return int({**group, **group.get("flags", {})}["max_running_requests"])


def event(folder: RunFolder, name: str) -> dict[str, Any]:
    (found,) = [one for one in told_events(folder) if one["event"] == name]
    return found


async def happened(folder: RunFolder, name: str, count: int = 1) -> dict[str, Any]:
    """Wait for the event of this name and number. The status file, written once a second, may miss it."""

    def found() -> list[dict[str, Any]]:
        return [one for one in told_events(folder) if one["event"] == name]

    assert await asyncio.to_thread(control.wait_until, lambda: len(found()) >= count, 60.0), told_events(folder)[-5:]
    return found()[count - 1]


@pytest.fixture
def rolled(project: Project) -> Iterator[Rolled]:
    made = Rolled(project)
    yield made
    for path in (project.root / "outputs").glob("*/control/status.json"):
        folder = RunFolder(path.parents[1])
        with contextlib.suppress(Exception):
            generate.stop(folder, reason="the test is over", now=True)
        assert control.wait_until(lambda folder=folder: control.living_process(folder) is None, 30.0)
    with contextlib.suppress(FleetError):
        made.fleet().down(drain_s=0.0, force=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["good", "llamacpp"])
async def test_a_change_loses_and_repeats_nothing_and_the_others_serve_meanwhile(rolled: Rolled, mode: str) -> None:
    folder = await rolled.start(rolled.spec(mode, cap=2))
    # A real model on busy cores needs longer for as many tokens; what is asked of them stays the same.
    terms = {"least_speed": 0.05, "canary_s": 4.0 if mode == "good" else 10.0, "answers": 20 if mode == "good" else 4}
    changed, told = await rolled.change(rolled.spec(mode, cap=4), **terms)
    assert changed, told[-1]
    assert "2 servers, one at a time: fleet." in told[0]
    verdict = event(folder, "canary_answers")["detail"]
    assert verdict.startswith(
        "no more difference than by chance: 20 prompts, 100%" if mode == "good" else "too few answers: 4"
    )
    after = (control.read_status(folder) or {})["done"]
    await rolled.project.until(folder, lambda s: s.get("done", 0) > after + 20, 120.0)
    status = await rolled.stop(folder)
    assert {server["cap"] for server in status["servers"]} == {4}
    rows = rolled.project.rows(folder)
    counts = Counter(row["index"] for row in rows)
    assert set(counts.values()) == {1}
    assert {row["attempt"] for row in rows} == {1}
    assert rolled.project.failures(folder) == []
    assert status["done"] == len(rows)

    changes = [one for one in told_events(folder) if one["event"] == "server_reconfigured"]
    assert [(one["old_cap"], one["new_cap"], one["cut_off"]) for one in changes] == [(2, 4, 0)] * 2
    done = event(folder, "rollout_done")
    assert done["cut_off"] == 0
    assert min(done["tok_per_s"]) > 0
    drains = [one for one in told_events(folder) if one["event"] == "server_draining"]
    for drain, change in zip(drains, changes, strict=True):
        ended = [(row["submitted_at"] + row["latency_s"], row) for row in rows]
        meanwhile = [row for at, row in ended if drain["at"] < at < change["at"]]
        assert {row["server"] for row in meanwhile} - {drain["server"]}, "the other one served"

    configs = read_json(folder.run_json)["configs"]
    caps = {ident: cap_of(config["fleet"]) for ident, config in configs.items()}
    assert sorted(caps.values()) == [2, 4]
    changed_at = {one["server"]: one["at"] for one in changes}
    for row in rows:
        assert caps[row["config_id"]] == (4 if row["submitted_at"] > changed_at[row["server"]] else 2)
    assert [server.settings for server in rolled.fleet().servers] == [None, None]
    assert rolled.fleet().group == rolled.spec(mode, cap=4).fleet
    resumed = await rolled.start(generate.read_spec(folder))
    # The run's own parameters have the new settings, so it goes on.
    await rolled.project.until(resumed, lambda s: s.get("done", 0) > len(rows), 120.0)
    await rolled.stop(resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("garbage", "answers at once are garbage"),
        ("dead", "Last lines of"),
        ("slow", "least 0.3 is asked for"),
        ("wordy", "it says other things than before: differs: 24 prompts, 0% of the answers identical; 100% without"),
    ],
)
async def test_a_canary_that_fails_gets_its_old_settings_back(rolled: Rolled, mode: str, why: str) -> None:
    folder = await rolled.start(rolled.spec())
    changed, told = await rolled.change(rolled.spec(mode), answers=24)
    assert not changed
    assert why in told[-1]
    assert why in event(folder, "rollout_rolled_back")["detail"]
    (backed,) = {one["server"] for one in told_events(folder) if one["event"] == "server_draining"}
    assert [rolled.fleet().settings(one.name) for one in rolled.fleet().servers] == [rolled.spec().fleet] * 2
    before = (control.read_status(folder) or {})["servers"]
    done = next(server["done"] for server in before if server["name"] == backed)
    await rolled.project.until(
        folder, lambda s: next(server["done"] for server in s["servers"] if server["name"] == backed) > done + 5
    )
    status = await rolled.stop(folder)
    assert status["failed"] == 0
    rows = rolled.project.rows(folder)
    assert len({row["index"] for row in rows}) == len(rows) == status["done"]
    assert {row["attempt"] for row in rows} == {1}
    assert not [row for row in rows if "!!!" in row["text"]], "garbage was never asked for rows"


@pytest.mark.slow
async def test_requests_that_take_too_long_to_drain_are_sent_again_without_an_attempt(rolled: Rolled) -> None:
    folder = await rolled.start(rolled.spec("slow", cap=4))
    await rolled.project.until(folder, lambda s: s.get("done", 0) > 4)
    changed, told = await rolled.change(rolled.spec(cap=4), canary_s=0.0, drain_s=0.0)
    assert changed, told
    assert event(folder, "rollout_done")["cut_off"] > 0
    cut_before = (control.read_status(folder) or {})["done"]
    await rolled.project.until(folder, lambda s: s.get("done", 0) > cut_before + 50)
    status = await rolled.stop(folder)
    rows = rolled.project.rows(folder)
    indices = sorted(row["index"] for row in rows)
    assert indices == list(range(len(rows))), "what was cut off came first again, and nothing is missing"
    assert {row["attempt"] for row in rows} == {1}
    assert status["failed"] == 0


async def test_a_stop_in_the_middle_ends_cleanly_and_the_next_start_goes_on(rolled: Rolled) -> None:
    folder = await rolled.start(rolled.spec())
    asked = asyncio.create_task(rolled.change(rolled.spec(cap=4), canary_s=30.0))
    await happened(folder, "rollout_started")
    with pytest.raises(RunError, match="another change of this fleet's settings is going on"):
        await rolled.change(rolled.spec(cap=3))
    await rolled.stop(folder)
    changed, told = await asked
    assert not changed
    assert told[-1].startswith("the run ended in the middle of the change; no server differs")
    assert "rollout_refused" in rolled.project.events(folder)


@pytest.mark.slow
async def test_servers_that_differ_after_a_stop_are_told_and_have_their_own_configurations(
    rolled: Rolled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = await rolled.start(rolled.spec())
    asked = asyncio.create_task(rolled.change(rolled.spec("slow", cap=4), canary_s=3.0))
    await happened(folder, "server_reconfigured")
    await rolled.stop(folder)
    assert not (await asked)[0]
    settings = [rolled.fleet().settings(one.name).model_dump() for one in rolled.fleet().servers]
    assert sorted(map(cap_of, settings)) == [2, 4]
    folder = await rolled.start(rolled.spec())
    (differing,) = event(folder, "servers_differ")["servers"]
    await rolled.project.until(folder, lambda s: min(server["done"] for server in s["servers"]) > 5)
    await rolled.stop(folder)
    configs = read_json(folder.run_json)["configs"]
    rows = [row for row in rolled.project.rows(folder) if row["server"] == differing]
    assert cap_of(configs[rows[-1]["config_id"]]["fleet"]) == 4
    monkeypatch.chdir(rolled.root)
    (rolled.root / "params" / "slow.yaml").write_text(
        json.dumps(rolled.spec("slow", cap=4).model_dump(exclude_none=True))
    )
    assert await asyncio.to_thread(main, ["fleet", "reconfigure", "params/slow.yaml"]) == 0
    assert await asyncio.to_thread(main, ["fleet", "reconfigure", "params/slow.yaml"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("no run uses this fleet")
    assert told.endswith("all servers have these settings already: there is nothing to change\n")


@pytest.mark.slow
async def test_deaths_of_servers_and_of_the_run_in_the_middle_lose_nothing(rolled: Rolled) -> None:
    folder = await rolled.start(rolled.spec())
    asked = asyncio.create_task(rolled.change(rolled.spec(cap=4), canary_s=2.0))
    canary = (await happened(folder, "server_reconfigured"))["server"]
    (other,) = [server for server in rolled.fleet().servers if server.name != canary]
    os.kill(other.pid, signal.SIGKILL)
    changed, told = await asked
    assert changed, told
    assert "server_back" in rolled.project.events(folder)

    asked = asyncio.create_task(rolled.change(rolled.spec(cap=2), canary_s=0.0))
    await happened(folder, "server_draining", 3)
    await asyncio.to_thread(rolled.project.kill, folder)
    with pytest.raises(RunError, match="ended before the change"):
        await asked
    folder = await rolled.start(rolled.spec(cap=4))
    done = (control.read_status(folder) or {})["done"]
    await rolled.project.until(folder, lambda s: s.get("done", 0) > done + 50)
    changed, told = await rolled.change(rolled.spec(cap=2), canary_s=0.0)
    assert changed, told
    await rolled.stop(folder)
    rows = rolled.project.rows(folder)
    assert len({row["index"] for row in rows}) == len(rows)
    assert rolled.project.failures(folder) == []


async def test_what_servers_cannot_be_changed_to_costs_nothing(rolled: Rolled) -> None:
    folder = await rolled.start(rolled.spec())
    for change in ({"servers": 3}, {"flags": {"no_such_flag": 1}}):
        with pytest.raises(FleetError, match=next(iter(change))):
            await rolled.change(rolled.spec(**change))
    assert not [name for name in rolled.project.events(folder) if "rollout" in name or "drain" in name]
    await rolled.stop(folder)


async def test_a_stuck_scheduler_behind_a_green_health_page_is_restarted(rolled: Rolled) -> None:
    folder = await rolled.start(rolled.spec(generation={"stall_s": 2.0}))
    await rolled.project.until(folder, lambda s: s.get("done", 0) > 20)
    victim = rolled.fleet().servers[0]
    await asyncio.to_thread(get_json, f"{victim.url}/stick", body={})
    assert await asyncio.to_thread(control.wait_until, lambda: "server_back" in rolled.project.events(folder), 40.0)
    stalled = event(folder, "server_stalled")
    assert stalled["server"] == victim.name
    assert stalled["silent_s"] >= 2.0
    assert stalled["in_flight"] > 0
    done = (control.read_status(folder) or {})["done"]
    await rolled.project.until(folder, lambda s: s.get("done", 0) > done + 50)
    await rolled.stop(folder)
    rows = rolled.project.rows(folder)
    assert len({row["index"] for row in rows}) == len(rows)
    assert {row["attempt"] for row in rows} == {1}, "rows at a stuck server are not to blame"


@pytest.mark.slow
async def test_a_frozen_server_is_found_by_its_silence_and_started_again(rolled: Rolled) -> None:
    """Its process lives, its port takes connections, and nothing ever answers."""
    folder = await rolled.start(rolled.spec())
    await rolled.project.until(folder, lambda s: s.get("done", 0) > 20)
    victim = rolled.fleet().servers[0]
    os.kill(victim.pid, signal.SIGSTOP)
    seen = await asyncio.to_thread(control.wait_until, lambda: "server_back" in rolled.project.events(folder), 150.0)
    assert seen, rolled.project.events(folder)
    assert event(folder, "server_down")["server"] == victim.name
    assert "looks at its /ping without an answer" in event(folder, "server_down")["detail"]
    await rolled.stop(folder)
    rows = rolled.project.rows(folder)
    assert len({row["index"] for row in rows}) == len(rows)
    assert {row["attempt"] for row in rows} == {1}, "rows at a frozen server are not to blame"


@pytest.mark.slow
async def test_a_server_that_keeps_dying_is_quarantined_and_tried_again(rolled: Rolled) -> None:
    spec = rolled.spec(servers=1)
    the_fleet, _ = await asyncio.to_thread(fleet.up, spec, rolled.root)
    await asyncio.to_thread(the_fleet.wait_ready, 30.0)
    server = the_fleet.servers[0]
    with EventLog(rolled.root / "events.jsonl") as events:
        lane = Lane(the_fleet, server, the_fleet.limits(server.name), "scripted", spec, events, "c")
        lane.restart_budget, lane.quarantine_s = 1, 0.2
        lane.start_watch()
        working = Path(rolled.python).read_text()
        Path(rolled.python).write_text("#!/bin/sh\nexit 1\n")
        os.kill(server.pid, signal.SIGKILL)
        assert await in_time(lambda: lane.state == "quarantined")
        Path(rolled.python).write_text(working)
        assert await in_time(lambda: lane.state == "ready")
        lane.watching.cancel()
        await lane.client.aclose()
    names = [entry["event"] for entry in read_log(rolled.root / "events.jsonl")]
    assert names.count("server_quarantined") == 1
    assert names[-1] == "server_back"


async def in_time(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return condition()
