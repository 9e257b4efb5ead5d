"""What a run says of itself while it goes, on simulated servers and on real ones of llama.cpp."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dfexp import control, fleet, generate, params
from dfexp.cli.attendant import Attendant
from dfexp.estimate import Samples, reconcile
from dfexp.generate.events import EventLog
from dfexp.generate.status import Overview
from dfexp.layout import RunFolder
from dfexp.processes import ProcessId
from dfexp.shards import read_rows
from dfexp.virtual_time import CLOCK, VirtualTime
from tests.generate.conftest import Project
from tests.generate.test_progress import answer
from tests.scripted_server import ScriptedServer, chat
from tests.shards.support import open_run

SIMULATED: dict[str, Any] = {
    "fleet": {
        "engine": "simulated", "model": "/models/Qwen3.6-27B", "servers": 2, "load_s": 1,
        "flags": {"context_length": 8192, "mem_fraction_static": 0.9, "mamba_scheduler_strategy": "no_buffer"},
    },
    "generation": {"concurrency": 32, "sample_interval_s": 0.25},
    "plan": {
        "gpu": "rtx-pro-6000", "shared_prefix_share": 0.0, "prompt": {"median": 40, "p95": 90},
        "completion": {"median": 900, "p95": 1200},
    },
}  # fmt: skip


class Watched:
    """One run, and the statuses that it wrote."""

    def __init__(self, root: Path, prompts: int, **over: Any) -> None:
        (root / "params").mkdir(exist_ok=True)
        lines = [json.dumps({"prompt": f"question {n}"}) for n in range(prompts)]
        (root / "params" / "prompts.jsonl").write_text("\n".join(lines))
        tree = {"run": "s", "prompts": {"path": "params/prompts.jsonl"}}
        self.root, self.spec = root, params.validate(params.merge(tree, over), "test")
        self.seen: list[dict[str, Any]] = []

    @property
    def folder(self) -> RunFolder:
        return generate.run_folder(self.spec, self.root)

    def launch(self) -> None:
        the_fleet, _ = fleet.up(self.spec, self.root)
        the_fleet.wait_ready(60.0)

    def run(self, until: Any = lambda status: False) -> dict[str, Any]:
        """Start it and watch it, until it ends or a condition holds; the last status."""
        generate.start(self.spec, self.root)

        def is_over() -> bool:
            status = control.read_status(self.folder)
            if status and (not self.seen or status["at"] > self.seen[-1]["at"]):
                self.seen.append(status)
            return bool(status and until(status)) or control.living_process(self.folder) is None

        assert control.wait_until(is_over, 240.0)
        is_over()
        return self.seen[-1]

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.folder.events.read_text().splitlines())
        return [line for line in lines if line["event"] == kind]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Any]:
    """Makes runs, whose fleets and processes are gone at the end."""
    made = list[Watched]()

    def make(prompts: int, **over: Any) -> Watched:
        run = Watched(tmp_path, prompts, **over)
        run.launch()
        made.append(run)
        return run

    yield make
    for each in made:
        if control.living_process(each.folder):
            generate.stop(each.folder, reason="the test ends", now=True)
            control.wait_until(lambda run=each: control.living_process(run.folder) is None, 30.0)  # type: ignore[misc]
        fleet.attach(generate.fleet_folder(each.spec, each.root)).down(0.0, force=True)


def merged(**over: Any) -> dict[str, Any]:
    return params.merge(SIMULATED, over)


@pytest.mark.slow
def test_rates_reconcile_and_the_time_left_is_right_early(watched: Any) -> None:
    """A thousand seconds of the servers' time; the run is limited by its client."""
    run = watched(1500, **merged(fleet={"speed": 30}))
    last = run.run()
    assert (last["state"], last["done"]) == ("ended", 1500)
    early = next(status for status in run.seen if status["done"] >= 75)
    assert early["done"] < 150
    truth = last["elapsed_s"] - early["elapsed_s"]
    assert early["eta_s"] == pytest.approx(truth, rel=0.05)
    assert early["eta_low_s"] < truth < early["eta_high_s"]
    tokens = [row["completion_tokens"] for row in read_rows(run.folder.completions)]
    mean = early["mean_completion_tokens"]
    assert mean["low"] < sum(tokens) / len(tokens) < mean["high"]
    middle = next(status for status in run.seen if status["done"] >= 750)
    assert middle["client_tok_per_s"] == pytest.approx(middle["server_tok_per_s"], rel=0.1)
    assert_reconciled(run)
    assert_told(run, middle)


def assert_reconciled(run: Watched) -> None:
    """In simulated seconds, from the files that a run leaves."""
    clock = VirtualTime.read(generate.fleet_folder(run.spec, run.root).path / CLOCK)
    rows = [
        (row["submitted_at"], row["latency_s"], row["completion_tokens"]) for row in read_rows(run.folder.completions)
    ]
    sent, took, tokens = (np.array(column, float) for column in zip(*rows, strict=True))
    sent, ended = clock.of(sent), clock.of(sent + took)
    pairs: dict[str, list[tuple[float, float | None]]] = {}
    for line in run.metrics():
        pairs.setdefault(line["server"], []).append((line["at"], line.get("realtime_decode_tokens_total")))
    samples: list[Samples] = [
        (clock.of(np.array([at for at, _ in each])).tolist(), [count for _, count in each]) for each in pairs.values()
    ]
    first, end = sent.min(), ended.max()
    for start, stop in ((0.1, 0.5), (0.3, 0.8), (0.1, 0.9)):
        window = first + start * (end - first), first + stop * (end - first)
        found = reconcile(samples, (sent, ended, tokens), *window, uncounted=1)
        assert found is not None
        assert abs(found.unexplained) < 0.02 * found.server


def assert_told(run: Watched, middle: dict[str, Any]) -> None:
    """Findings, gauges and events of a run whose client keeps 32 of 36 slots busy."""
    first, *_ = middle["findings"]
    assert (first["kind"], first["server"], first["change"]) == ("client-limited", None, "generation.concurrency: 36")
    assert first["gain"] == pytest.approx(36 / 32, rel=0.05)
    assert len(middle["findings"]) <= 5
    kinds = [event["kind"] for event in run.events("finding")]
    assert kinds.count("client-limited") == 1, "told once, however long it lasts"
    looks = [status for status in run.seen if 300 <= status["done"] <= 1200]
    assert len(looks) >= 5
    for at, server in enumerate(middle["servers"]):
        # One look may fall on a moment in which a busy machine left a slot or three empty.
        assert median(look["servers"][at]["num_running_reqs"] for look in looks) == pytest.approx(32, abs=1)
        assert (server["num_queue_reqs"], server["cap"]) == (0, 36)
        assert 0 < server["full_token_usage"] < server["mamba_usage"] < 1
        assert server["server_tok_per_s"] == pytest.approx(middle["server_tok_per_s"] / 2, rel=0.05)
    points = middle["history"]["tok_per_s"]
    assert len(points) * middle["history"]["step_s"] == pytest.approx(middle["elapsed_s"], rel=0.15)
    assert points[-1] == pytest.approx(middle["server_tok_per_s"], rel=0.1)


@pytest.mark.slow
def test_slots_are_full_while_there_are_rows_and_servers_that_are_away_are_told(watched: Any) -> None:
    """Eight simulated servers of 17 slots, one of which dies and loads its model again, at a fixed speed."""
    crash = {"kind": "crash", "server": 3, "at_s": 120.0}
    flags = {**SIMULATED["fleet"]["flags"], "max_running_requests": 17}
    fleets = {"servers": 8, "speed": 10, "load_s": 40, "flags": flags, "faults": [crash]}
    run = watched(40_000, **merged(fleet=fleets, generation={"concurrency": "auto"}))
    last = run.run(lambda status: bool(status["slots"]["there"] > 45_000 and status["slots"]["away_s"]))
    slots = last["slots"]
    assert slots["there"] > 45_000, last
    assert slots["occupied"] / slots["there"] >= 0.99, slots
    assert 0.9 <= slots["running"] / slots["there"] <= slots["occupied"] / slots["there"]
    assert 20 < slots["away_s"] < 200, "it loads for 40 s and is looked at once a second, which is ten of its own"


@pytest.mark.slow
def test_what_is_wrong_with_servers_is_found_while_the_run_goes_on(watched: Any) -> None:
    """Of four servers one is three times slower than its siblings, one says only garbage, and one stands still."""
    faults = [
        {"kind": "slow", "server": 1, "factor": 3.0}, {"kind": "garbage", "server": 2},
        {"kind": "hang", "server": 3, "at_s": 60.0},
    ]  # fmt: skip
    run = watched(6000, **merged(fleet={"servers": 4, "speed": 40, "faults": faults, "check_content": False}))
    _, slow, garbage, still = (one.name for one in fleet.attach(generate.fleet_folder(run.spec, run.root)).servers)
    expected = {("slow server", slow), ("garbage output", garbage), ("stalled", still)}
    last = run.run(lambda status: expected <= {(each["kind"], each["server"]) for each in status["findings"]})
    assert expected <= {(each["kind"], each["server"]) for each in last["findings"]}, last["findings"]
    events = {(event["kind"], event["server"]): event for event in run.events("finding")}
    assert "all with HTTP 200" in events["garbage output", garbage]["detail"]
    assert events["slow server", slow]["gain"] == pytest.approx(3.0, rel=0.1)
    assert ("garbage output", slow) not in events


@pytest.mark.slow
def test_a_run_that_goes_on_knows_how_long_answers_were(watched: Any) -> None:
    run = watched(2000, **merged(generation={"drain_s": 0.0}))
    run.run(lambda status: status["done"] >= 300)
    generate.stop(run.folder, reason="test", now=True)
    assert control.wait_until(lambda: control.living_process(run.folder) is None, 60.0)
    before = control.read_status(run.folder)
    assert before is not None
    again = run.run(lambda status: status["pid"] != before["pid"])
    assert again["done_before"] == before["done"]
    assert again["mean_completion_tokens"]["value"] == pytest.approx(900, rel=0.1), "before an answer has come"
    last = run.run()
    assert (last["state"], last["done"]) == ("ended", 2000)
    assert sum(last["lengths"].values()) >= 2000


@pytest.mark.slow
def test_servers_of_llamacpp_are_sampled_and_tell_what_they_have(watched: Any) -> None:
    run = watched(
        24,
        fleet={"engine": "llamacpp", "servers": 2, "max_running_requests": 2, "context_length": 512},
        generation={"max_tokens": 48, "sample_interval_s": 0.2},
    )
    last = run.run()
    assert (last["state"], last["done"]) == ("ended", 24)
    found = run.metrics()
    assert len({line["server"] for line in found}) == 2
    assert max(line["num_running_reqs"] for line in found) == 2
    assert all("mamba_usage" not in line and line["max_running_requests"] == 2 for line in found)
    going = [status for status in run.seen if status["state"] == "running" and status["done"] >= 8]
    assert going
    assert all(status["server_tok_per_s"] is None and status["client_tok_per_s"] > 0 for status in going)
    assert any(status["eta_s"] for status in going)


async def test_what_cannot_be_watched_is_told_once_and_raises_nothing(project: Project) -> None:
    """A number of tokens that is none breaks the speed of a server, with every answer."""
    spec = project.spec(["http://127.0.0.1:1"])
    the_fleet, folder = fleet.up(spec, project.root)[0], generate.run_folder(spec, project.root)
    folder.control.mkdir(parents=True)
    with open_run(folder.completions) as shards, EventLog(folder.events) as events:
        setup: Any = SimpleNamespace(
            folder=folder, root=project.root, spec=spec, fleet=the_fleet, shards=shards, events=events, prompts=[],
            me=ProcessId.current(), rows=[0, 1, 2], later=0,
        )  # fmt: skip
        overview = Overview(setup, [], [])
        for index in range(3):
            overview.sent("a", index)
            odd = answer(10**400 if index < 2 else 7)
            overview.answered("a", index, odd, overview.flags("a", odd))
            overview.left("a", index)
        overview.flags("b", replace(answer(8), text="!" * 48))  # not kept
        seen = overview.progress.servers["b"].watched(time.time())
        assert (seen["answers"], seen["garbage"]) == (1, 1)
        unreadable: Any = 7
        assert overview.flags("b", replace(answer(8), text=unreadable, flags=("no_usage",))) == (
            "no_usage",
            "not_judged",
        )
        await overview.write("ended", [])
    told = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert [(each["event"], each["part"]) for each in told if each["part"] == "requests"] == [
        ("watching_failed", "requests")
    ]
    assert "OverflowError" in told[0]["detail"]
    status = control.read_status(folder)
    assert status is not None
    assert (status["state"], status["servers"], status["rows_of_start"]) == ("ended", [], 3)


async def test_every_answer_that_is_garbage_is_flagged_in_its_row(project: Project) -> None:
    def script(body: dict[str, Any], n: int) -> dict[str, Any]:
        return chat("!" * 400 if body["messages"][-1]["content"].endswith("7") else "An answer that says something.")

    async with ScriptedServer(script) as server:
        folder = await project.start(project.spec([server.url], 40))
        last = await project.end(folder)
    flagged = {row["index"] for row in project.rows(folder) if "garbage" in row["flags"]}
    assert flagged == {7, 17, 27, 37}
    assert last["flags"] == {"garbage": 4}


TAPPED = """
import asyncio, os, sys
flush = os.fsync
def told(fd):
    on_loop = asyncio._get_running_loop() is not None
    if "status.json" in os.readlink(f"/proc/self/fd/{fd}"):
        print("loop" if on_loop else "thread", flush=True)
    flush(fd)
os.fsync = told
from dfexp.generate.process import main
sys.exit(main(sys.argv[1:]))
"""


async def test_the_status_is_never_written_where_requests_wait_for_it(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.2) as server:
        spec = project.spec([server.url], 60)
        await project.run(spec.model_copy(update={"limits": params.LimitsGroup(rows=1)}))  # makes fleet and folder
        folder = generate.prepare(spec, project.root)
        argv = [sys.executable, "-c", TAPPED, "--folder", str(folder.path), "--root", str(project.root)]
        process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert set(out.split()) == {b"thread"}
    assert len(out.split()) >= 3
    last = control.read_status(folder)
    assert last is not None
    assert (last["state"], last["done"]) == ("ended", 60)


LINE = re.compile(
    r"  \d\d:\d\d:\d\d running \(simulated\): [\d,]+ of 3,000 done, 0 failed, \d+ in flight, [\d,.]+ tok/s"
    r" \((servers|client), last [^)]+\)(, about [^,]+ of simulated time left \([^)]+ to [^)]+\))?(, [a-zA-Z].*)?"
)


@pytest.mark.slow
def test_without_a_notebook_there_is_one_line_an_interval(watched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What `dfexp run` prints while a run goes: what is done, how fast by whose count, how long, and what limits it."""
    run, interval_s = watched(3000, **merged(fleet={"speed": 100}, generation={"progress_interval_s": 0.5})), 0.5
    attendant = Attendant(run.spec, run.folder, run.root, [])
    generate.start(run.spec, run.root)
    capsys.readouterr()
    began, printed = time.monotonic(), list[tuple[float, str]]()

    def is_over() -> bool:
        attendant.tick()
        printed.extend((time.monotonic() - began, line) for line in capsys.readouterr().out.splitlines())
        status = control.read_status(run.folder)
        return status is not None and status["state"] != "running"

    assert control.wait_until(is_over, 240.0, step_s=0.02)
    lines = [line for _, line in printed if "running" in line]
    assert len(lines) >= 8
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    gaps = np.diff([at for at, _ in printed])
    assert gaps.min() >= 0.9 * interval_s, "one in each interval, not two"
    assert len(printed) >= 0.7 * printed[-1][0] / interval_s, "and none left out, but where the machine was busy"
    assert any("(servers, last" in line for line in lines)
    assert any("client-limited: " in line for line in lines)
    assert any(" of simulated time left (" in line for line in lines)
