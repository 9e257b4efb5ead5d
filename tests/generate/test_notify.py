"""The command of `notify`: what it is told and when, and that it cannot hurt the run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from dfexp import control, fleet, generate
from dfexp.errors import RunError
from dfexp.generate import notify
from dfexp.generate.events import EventLog
from dfexp.layout import RunFolder
from dfexp.params import LimitsGroup
from tests.generate.conftest import Project
from tests.scripted_server import ScriptedServer, chat, error

APPEND = """printf '%s\\n' "$(cat)" >> told.json"""  # one write: two commands may run at once
KEEP = 'cat > told.json; printf "%s|%s|%s" "$DFEXP_EVENT" "$DFEXP_RUN" "$DFEXP_MESSAGE" > told.txt'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").mkdir()
    return RunFolder(tmp_path / "r")


async def failures(folder: RunFolder, line: str | None, message: str = "m") -> list[dict[str, Any]]:
    with EventLog(folder.events) as events:
        await notify.tell(line, folder, events, "stall", message)
    return [json.loads(text) for text in folder.events.read_text().splitlines()]


async def test_it_gets_what_happened_and_the_last_status(folder: RunFolder) -> None:
    control.write_status(folder, {"done": 3})
    words = 'two\nlines; $(touch made) "quoted" \ud83d \0 ü'
    assert await failures(folder, KEEP, words) == []
    told = json.loads(Path("told.json").read_text())
    assert told == {"event": "stall", "run": "r", "message": words, "folder": str(folder.path), "status": {"done": 3}}
    assert Path("told.txt").read_text() == 'stall|r|two\nlines; $(touch made) "quoted" \ufffd  ü'
    assert not Path("made").exists(), "words of a server were run"


async def test_a_run_without_a_command_tells_nobody(folder: RunFolder) -> None:
    assert await failures(folder, None) == []


@pytest.mark.parametrize(("line", "status"), [("exit 3", 3), ("no-such-command-at-all", 127)])
async def test_a_failure_is_an_event(folder: RunFolder, line: str, status: int) -> None:
    (event,) = await failures(folder, line, "m" * 200_000)
    assert (event["event"], event["detail"], event["about"]) == ("notify_failed", f"exit status {status}", "stall")


async def test_a_hang_is_ended_with_all_that_it_started(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.5)
    (event,) = await failures(folder, "sleep 1000 & echo $! > pid; wait")
    assert event["detail"] == "it had not ended after 0 s and was killed"
    pid = int(Path("pid").read_text())
    assert control.wait_until(lambda: not Path(f"/proc/{pid}").exists() or state_of(pid) == "Z", 10.0)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def told(project: Project, spec: Any) -> tuple[str, dict[str, Any]]:
    """The last message of a whole run, and its last status."""
    status = await project.run(spec.model_copy(update={"notify": KEEP}))
    return (project.root / "told.txt").read_text(), status


async def test_an_end_a_limit_and_a_failure_are_told(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat()) as server:
        spec = project.spec([server.url])
        limited = spec.model_copy(update={"limits": LimitsGroup(rows=5)})
        words, _ = await told(project, limited)
        assert words == "stopped|r|5 succeeded + 0 failed = 5 of 20 asked: limits.rows = 5 is reached"
        assert (await told(project, spec))[0] == "ended|r|20 succeeded + 0 failed = 20 of 20 asked"
        assert json.loads((project.root / "told.json").read_text())["status"]["state"] == "ended"
    denied = error(401, "no")
    async with ScriptedServer(lambda b, n: denied if "question" in b["messages"][-1]["content"] else chat()) as server:
        words, status = await told(project, project.spec([server.url]).model_copy(update={"run": "s"}))
    assert status["state"] == "failed"
    assert words.startswith("failed|s|0 succeeded + 0 failed = 0 of 20 asked: ")


async def test_a_command_that_takes_long_at_the_end_holds_nothing(project: Project) -> None:
    go = project.root / "go"
    async with ScriptedServer(lambda b, n: chat()) as server:
        spec = project.spec([server.url]).model_copy(update={"notify": f"until [ -e {go} ]; do sleep 0.05; done"})
        folder = await project.start(spec)
        servers = fleet.attach(generate.fleet_folder(spec, project.root))
        await project.until(folder, lambda status: status.get("state") == "ended" and servers.lease_holder() is None)
        assert control.living_process(folder) is not None
        # Waits for it, and does not take it for a run that goes on.
        again = asyncio.create_task(project.run(spec, retry_failed=["timeout"]))
        go.touch()
        status = await again
    assert (status["state"], status["done"], status["done_before"]) == ("ended", 20, 20)
    assert project.events(folder).count("run_ended") == 2


async def test_a_stall_is_told_once_while_the_run_goes_on(project: Project) -> None:
    moves = asyncio.Event()

    async def late() -> dict[str, Any]:
        await moves.wait()
        return chat()

    def script(body: dict[str, Any], n: int) -> Any:
        return late() if str(body["messages"][-1]["content"]).endswith("7") else chat()

    async with ScriptedServer(script) as server:
        line = APPEND
        folder = await project.start(project.spec([server.url], stall_s=1.0).model_copy(update={"notify": line}))
        path = project.root / "told.json"
        await project.until(folder, lambda _: path.exists() and path.read_text().endswith("\n"))
        assert control.living_process(folder) is not None
        moves.set()
        status = await project.end(folder)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["stall", "ended"], status
    assert lines[0]["message"].startswith("no row was settled for ")
    assert project.events(folder).count("run_stalled") == 1


async def test_a_stall_is_told_though_the_command_of_the_one_before_still_runs(project: Project) -> None:
    moves, go = [asyncio.Event(), asyncio.Event()], project.root / "go"

    async def late(number: int) -> dict[str, Any]:
        await moves[number].wait()
        return chat()

    def script(body: dict[str, Any], n: int) -> Any:
        last = str(body["messages"][-1]["content"])[-1]
        return late(int(last)) if last in "01" else chat()

    async with ScriptedServer(script) as server:
        line = f"echo $DFEXP_EVENT >> told.txt; until [ -e {go} ]; do sleep 0.05; done; echo over >> told.txt"
        spec = project.spec([server.url], 8, stall_s=1.0, drain_s=60.0).model_copy(update={"notify": line})
        folder, path = await project.start(spec), project.root / "told.txt"
        await project.until(folder, lambda _: path.exists() and path.read_text() == "stall\n")
        moves[0].set()
        await project.until(folder, lambda _: path.read_text() == "stall\nstall\n")
        go.touch()
        await project.until(folder, lambda _: path.read_text().count("over") == 2)
        moves[1].set()
        assert (await project.end(folder))["state"] == "ended"


@pytest.mark.parametrize("how", ["prompts", "disk"])
async def test_a_start_that_fails_before_a_row_is_sent_is_told(project: Project, how: str) -> None:
    async with ScriptedServer(lambda b, n: chat()) as server:
        spec = project.spec([server.url]).model_copy(update={"notify": KEEP})
        folder = generate.prepare(spec, project.root)
        if how == "prompts":
            folder.prompts.write_text("{}\n")
        else:
            folder.completions.write_text("in the way")
        with pytest.raises(RunError, match="could not start") as failed:
            await project.start(spec)
    event, run, words = (project.root / "told.txt").read_text().split("|")
    assert (event, run) == ("failed", "r")
    assert words.startswith("could not start: ")
    assert words.removeprefix("could not start: ") in str(failed.value)


async def test_the_loss_of_all_servers_is_told(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.2) as server:
        line = APPEND
        spec = project.spec([server.url], 600, give_up_s=4.0).model_copy(update={"notify": line})
        folder = await project.start(spec)
        await project.until(folder, lambda status: status.get("done", 0) > 0)
    await project.end(folder)
    lines = [json.loads(line) for line in (project.root / "told.json").read_text().splitlines()]
    assert [line["event"] for line in lines][-2:] == ["stall", "failed"]
    assert lines[-2]["message"].endswith(f"; 127.0.0.1:{server.port} is down")
