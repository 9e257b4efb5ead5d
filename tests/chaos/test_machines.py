"""Machines that misbehave under a whole generating process: slow disks, clocks that jump, folders that move, rivals."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dfexp import control, fleet, generate
from dfexp.generate.loop import MOST_BACKLOG
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from tests.generate.conftest import Project
from tests.scripted_server import ScriptedServer, chat

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


async def prepared(project: Project, spec: RunSpec) -> RunFolder:
    """The run's folder, with a fleet that is up."""
    folder = generate.prepare(spec, project.root)
    the_fleet, _ = await asyncio.to_thread(fleet.up, spec, project.root)
    await asyncio.to_thread(the_fleet.wait_ready, 60.0)
    folder.control.mkdir(exist_ok=True)
    return folder


@asynccontextmanager
async def running(
    project: Project, folder: RunFolder, *module: str, more: Sequence[str] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A generating process as a child, the real one unless another module is named; it is gone at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *(module or ("dfexp.generate",)), "--folder", str(folder.path), "--root",
        str(project.root), *more, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process, timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Its exit status and what it said."""
    out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def whole(project: Project, how: str, prompts: int, **generation: Any) -> tuple[RunFolder, str]:
    """A run from its start to its end on such a machine, and what the process said."""
    async with ScriptedServer(lambda body, n: chat()) as server:
        folder = await prepared(project, project.spec([server.url], prompts, **generation))
        async with running(project, folder, "tests.chaos.odd_process", how) as process:
            code, out, err = await ended(process)
    assert code == 0, out + err
    assert project.counts(folder) == Counter(range(prompts))
    return folder, out


async def test_no_file_of_the_process_is_renamed_before_it_is_flushed_nor_the_folder_left_unflushed(
    project: Project,
) -> None:
    """So a loss of power leaves each of them old or new, and whatever a later one builds on is there.

    And no flush is waited for where the requests are.
    """
    _, out = await whole(project, "renames", 30)
    assert {"run.json", "manifest.json", ".done_indices", "status.json", "completions_000004.jsonl"} <= set(out.split())


async def test_a_clock_that_jumps_by_a_day_at_every_look_costs_nothing(project: Project) -> None:
    folder, _ = await whole(project, "clock", 60)
    assert all(0 <= row["latency_s"] < 60 for row in project.rows(folder))
    status = control.read_status(folder)
    assert status is not None
    assert (status["state"], status["done"]) == ("ended", 60)


async def test_a_run_that_forgets_a_row_never_says_that_it_has_ended(project: Project) -> None:
    async with ScriptedServer(lambda body, n: chat()) as server:
        folder = await prepared(project, project.spec([server.url], 30))
        async with running(project, folder, "tests.chaos.odd_process", "forgetful") as process:
            code, _, err = await ended(process)
        status = control.read_status(folder)
        assert code == 1
        assert "29 succeeded + 0 failed = 29 of 30 asked" in err
        assert status is not None
        assert (status["state"], status["done"], status["failed"]) == ("failed", 29, 0)
        async with running(project, folder) as process:
            code, _, err = await ended(process)
    assert code == 0, err
    assert project.counts(folder) == Counter(range(30))


async def test_a_process_that_is_told_to_stop_ends_with_3_and_the_next_one_with_0(project: Project) -> None:
    async with ScriptedServer(lambda body, n: chat(), delay_s=0.05) as server:
        folder = await prepared(project, project.spec([server.url], 1000))
        async with running(project, folder) as process:
            await project.until(folder, lambda status: status.get("done", 0) >= 10)
            process.terminate()
            code, _, err = await ended(process)
        assert code == 3, err
        assert 10 <= len(project.counts(folder)) < 1000
        server.delay_s = 0.0
        async with running(project, folder) as process:
            code, _, err = await ended(process)
    assert code == 0, err
    assert project.counts(folder) == Counter(range(1000))


@pytest.mark.slow
async def test_on_a_disk_whose_flushes_take_seconds_the_run_goes_on_and_memory_is_bounded(project: Project) -> None:
    """Then it is killed in the middle of such a flush, and a usual disk finishes the run."""
    prompts = 3 * MOST_BACKLOG
    async with ScriptedServer(lambda body, n: chat()) as server:
        folder = await prepared(project, project.spec([server.url], prompts, rows_per_shard=10 * MOST_BACKLOG))
        partial = folder.completions / "completions_000000.jsonl.partial"
        most = 0
        async with running(project, folder, "tests.chaos.odd_process", "slow") as process:
            while len(server.bodies) < 2 * MOST_BACKLOG and process.returncode is None:
                written = partial.read_bytes().count(b"\n") if partial.exists() else 0
                most = max(most, len(server.bodies) - written)
                await asyncio.sleep(0.1)
            process.kill()
            await process.wait()
            reported = (control.read_status(folder) or {}).get("done", 0)
            kept = project.counts(folder)
        assert 0 < reported <= len(kept) < prompts
        assert kept.total() == len(kept)
        assert most > 100  # requests went on while rows waited for the disk
        assert most < MOST_BACKLOG + 100
        async with running(project, folder) as process:
            code, _, err = await ended(process)
    assert code == 0, err
    assert project.counts(folder) == Counter(range(prompts))


async def test_a_folder_that_is_moved_away_and_back_under_the_run_costs_no_row(project: Project) -> None:
    async with ScriptedServer(lambda body, n: chat(), delay_s=0.03) as server:
        folder = await prepared(project, project.spec([server.url], 300, rows_per_shard=5))
        elsewhere = folder.path.with_name("moved")
        async with running(project, folder) as process:
            await project.until(folder, lambda status: status.get("done", 0) >= 20)
            os.rename(folder.path, elsewhere)
            sent = len(server.bodies)
            while len(server.bodies) < sent + 40 and process.returncode is None:
                await asyncio.sleep(0.05)
            assert not folder.path.exists(), "a moved folder is not made anew"
            os.rename(elsewhere, folder.path)
            code, _, err = await ended(process)
    assert code == 0, err
    assert project.counts(folder) == Counter(range(300))


@pytest.mark.parametrize("what", ["run", "completions"])
async def test_a_folder_that_is_removed_under_the_run_ends_it_before_more_rows_are_made_in_vain(
    project: Project, what: str
) -> None:
    async with ScriptedServer(lambda body, n: chat(), delay_s=0.03) as server:
        folder = await prepared(project, project.spec([server.url], 3000, rows_per_shard=5))
        async with running(project, folder) as process:
            await project.until(folder, lambda status: status.get("done", 0) >= 20)
            # In one instant: what is removed file by file, the process may fill again meanwhile.
            os.rename(folder.path if what == "run" else folder.completions, project.root / "away")
            shutil.rmtree(project.root / "away")
            code, _, err = await ended(process)
    assert code == 1
    assert "failures.jsonl was removed while in use" in err
    assert len(server.bodies) < 1500
    assert not folder.completions.exists(), "nobody would look for rows there"


async def test_of_two_processes_that_start_at_once_one_works_and_the_other_names_it(project: Project) -> None:
    async with ScriptedServer(lambda body, n: chat(), delay_s=0.05) as server:
        folder = await prepared(project, project.spec([server.url], 120))
        async with running(project, folder) as one, running(project, folder) as two:
            ends = await asyncio.gather(ended(one), ended(two))
    assert sorted(code for code, _, _ in ends) == [0, 2]
    (words,) = [err for code, _, err in ends if code == 2]
    assert "is in use by run r (pid " in words
    assert project.counts(folder) == Counter(range(120))
    assert len(server.bodies) <= 120 + 4  # and what asks whether a server serves


async def test_many_who_start_one_run_at_once_join_the_same_process(project: Project) -> None:
    async with ScriptedServer(lambda body, n: chat(), delay_s=0.05) as server:
        spec = project.spec([server.url], 120)
        await prepared(project, spec)
        found = await asyncio.gather(*(asyncio.to_thread(generate.start, spec, project.root) for _ in range(4)))
        status = await project.end(found[0])
    assert (status["state"], status["done"]) == ("ended", 120)
    assert project.counts(found[0]) == Counter(range(120))
    assert project.events(found[0]).count("run_started") == 1
