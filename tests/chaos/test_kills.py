"""`kill -9` of the generating process at random instants, again and again, while servers misbehave."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dfexp import control, fleet, generate
from dfexp.layout import RunFolder
from tests.generate.conftest import Project
from tests.scripted_server import Cut, ScriptedServer, chat, error

KILLS, PROMPTS = 20, 3000


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


class Ledger:
    """What was ever seen safe: it may only grow, and no index may be there twice."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.reported = 0

    def check(self) -> None:
        """Raises AssertionError for a row that was lost, doubled or torn, or reported done and is not there."""
        rows = Project.rows(self.folder)
        done, failures = {row["index"] for row in rows}, Project.failures(self.folder)
        failed = {row["index"] for row in failures}
        assert (len(done), len(failed)) == (len(rows), len(failures)), "doubled"
        assert self.done <= done, "a row was lost"
        assert self.failed <= failed, "a failure was lost"
        assert not done & failed
        self.reported = max(self.reported, (control.read_status(self.folder) or {}).get("done", 0))
        assert len(done) >= self.reported, "reported done, and not there"
        for row in rows:
            assert row["messages"] == [{"role": "user", "content": f"question {row['index']}"}]
            assert set(row["text"]) == {"x"}, "torn or mixed up"
        self.done, self.failed = done, failed


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_shard", [3, 50])
async def test_a_run_killed_at_any_instant_loses_doubles_and_tears_nothing(
    project: Project, rows_per_shard: int
) -> None:
    draw = random.Random(rows_per_shard)

    def script(body: dict[str, Any], n: int) -> Any:
        asked = body["messages"][-1]["content"]
        if asked.startswith("question") and int(asked.split()[1]) % 50 == 49:
            return error(400, "no")
        if draw.random() < 0.02:
            return draw.choice([Cut(), error(500, "x"), error(429, "y", **{"Retry-After": "0.1"})])
        return chat("x" * draw.randint(1, 3000))

    async with ScriptedServer(script, delay_s=0.02) as one, ScriptedServer(script, delay_s=0.04) as two:
        spec = project.spec([one.url, two.url], PROMPTS, rows_per_shard=rows_per_shard, max_attempts=30)
        folder = generate.prepare(spec, project.root)
        the_fleet, _ = await asyncio.to_thread(fleet.up, spec, project.root)
        await asyncio.to_thread(the_fleet.wait_ready, 10.0)
        ledger = Ledger(folder)
        for kill in range(KILLS // 2 + 1):
            process = await start(folder, project.root)
            try:
                if kill < KILLS // 2:  # from the first import on to some seconds of work
                    await asyncio.wait_for(process.wait(), draw.uniform(0.3, 2.0))
                assert await asyncio.wait_for(process.wait(), 60.0) == 0
            except TimeoutError:
                process.kill()
                await process.wait()
            ledger.check()
    status = control.read_status(folder)
    assert status is not None
    assert status["state"] == "ended"
    assert (len(ledger.done), len(ledger.failed)) == (PROMPTS - PROMPTS // 50, PROMPTS // 50)


async def start(folder: RunFolder, root: Path) -> asyncio.subprocess.Process:
    """The generating process alone, so that it can be killed before it has said anything."""
    folder.control.mkdir(exist_ok=True)
    with folder.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dfexp.generate", "--folder", str(folder.path), "--root", str(root),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
