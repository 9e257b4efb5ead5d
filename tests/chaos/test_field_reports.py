"""What broke for others, as whole runs: each test has the right answer."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dfexp import control, generate
from tests.generate.conftest import Project
from tests.scripted_server import ScriptedServer, chat

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def asked(bodies: list[dict[str, Any]]) -> Counter[str]:
    """What was asked how often."""
    return Counter(body["messages"][-1]["content"] for body in bodies)


async def test_resume_knows_rows_by_index_though_the_first_one_is_slow_and_they_end_out_of_order(
    project: Project,
) -> None:
    """Not by how many there are; and one slow row at the head keeps no other from the disk."""
    release = asyncio.Event()

    async def answer(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["content"] == "question 0":
            await release.wait()
        await asyncio.sleep(0.01)
        return chat()

    async with ScriptedServer(lambda body, n: answer(body)) as server:
        spec = project.spec([server.url], 1000, concurrency=64, rows_per_shard=50)
        folder = await project.start(spec)
        await project.until(folder, lambda status: status.get("done", 0) >= 500)
        await asyncio.to_thread(project.kill, folder)
        kept = set(project.counts(folder))
        assert 0 not in kept
        assert len(kept) >= 500
        before = len(server.bodies)
        release.set()
        status = await project.run(spec)
        again = asked(server.bodies[before:])
    assert (status["state"], status["done"]) == ("ended", 1000)
    assert project.counts(folder) == Counter(range(1000))
    assert not again.keys() & {f"question {index}" for index in kept}


async def test_a_prompt_that_is_there_five_times_gets_five_rows_over_a_kill(project: Project) -> None:
    async with ScriptedServer(lambda body, n: chat(f"answer {n}"), delay_s=0.03) as server:
        spec = project.spec([server.url], 1)
        (project.root / "params" / "prompts.jsonl").write_text("".join(
            json.dumps({"prompt": f"one of {n % 40}", "id": f"{n % 40}"}) + "\n" for n in range(200)
        ))  # fmt: skip
        folder = await project.start(spec)
        await project.until(folder, lambda status: status.get("done", 0) >= 60)
        await asyncio.to_thread(project.kill, folder)
        status = await project.run(spec)
    rows = project.rows(folder)
    assert status["state"] == "ended"
    assert project.counts(folder) == Counter(range(200))
    assert set(Counter(row["id"] for row in rows).values()) == {5}
    assert all(row["messages"][0]["content"] == f"one of {row['index'] % 40}" for row in rows)


async def test_the_same_command_again_appends_and_repeats_nothing(project: Project) -> None:
    async with ScriptedServer(lambda body, n: chat()) as server:
        spec = project.spec([server.url], 30)
        folder = await project.start(spec)
        await project.end(folder)
        before = {path.name: path.read_bytes() for path in folder.completions.glob("*.json*")}
        sent = len(server.bodies)
        for _ in range(2):
            assert (await project.run(spec))["state"] == "ended"
        assert not any(text.startswith("question") for text in asked(server.bodies[sent:]))
    assert {path.name: path.read_bytes() for path in folder.completions.glob("*.json*")} == before


async def test_prompts_that_are_a_link_to_files_of_the_run_itself_are_read_and_never_written(project: Project) -> None:
    async with ScriptedServer(lambda body, n: chat()) as server:
        spec = project.spec([server.url], 20)
        folder = generate.run_folder(spec, project.root)
        folder.path.mkdir(parents=True)
        source = project.root / "params" / "prompts.jsonl"
        source.rename(folder.path / "mine.jsonl")
        source.symlink_to(folder.path / "mine.jsonl")
        before = source.read_bytes()
        assert (await project.run(spec))["state"] == "ended"
    assert source.is_symlink()
    assert source.read_bytes() == before
    assert project.counts(folder) == Counter(range(20))


async def test_a_low_limit_of_open_files_and_many_requests_in_flight_end_no_run(project: Project) -> None:
    """One connection a request in flight, and none of them more: 150 in flight need few beyond 150."""
    async with ScriptedServer(lambda body, n: chat(), delay_s=0.05) as server:
        spec = project.spec([server.url], 1500, concurrency=150)
        folder = generate.prepare(spec, project.root)
        started = await project.start(spec)
        await asyncio.to_thread(project.kill, started)
        limit = 256
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dfexp.generate", "--folder", str(folder.path), "--root", str(project.root),
            cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        )  # fmt: skip
        _, err = await asyncio.wait_for(process.communicate(), 60.0)
        assert server.most_in_flight > 100
    assert process.returncode == 0, err
    assert "Too many open files" not in folder.events.read_text()
    assert (control.read_status(folder) or {})["done"] == 1500
    assert project.counts(folder) == Counter(range(1500))
