"""Whole runs in a real process, against real HTTP servers that answer as scripted."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections import Counter
from typing import Any

import pytest

from dfexp import control, generate, params
from dfexp.errors import FingerprintError, RunError, StorageError
from tests.generate.conftest import Project
from tests.scripted_server import Cut, Hang, Raw, ScriptedServer, chat, error

STARTER = """
import sys
from pathlib import Path
from dfexp import generate
from dfexp.layout import RunFolder
generate.start(generate.read_spec(RunFolder(Path(sys.argv[1]))), Path(sys.argv[2]))
"""


def question(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


async def test_every_row_is_completed_once_over_all_servers(project: Project) -> None:
    async with (
        ScriptedServer(lambda b, n: chat("a"), delay_s=0.02) as one,
        ScriptedServer(lambda b, n: chat("b"), delay_s=0.02) as two,
    ):
        folder = await project.start(project.spec([one.url, two.url], 40, seed=5, temperature=0.5))
        status = await project.end(folder)
    assert (status["state"], status["done"], status["failed"]) == ("ended", 40, 0)
    assert project.counts(folder) == Counter(range(40))
    assert {row["server"] for row in project.rows(folder)} == {s["name"] for s in status["servers"]}
    row = min(project.rows(folder), key=lambda r: r["index"])
    assert list(row) == [
        "index", "id", "messages", "text", "finish_reason", "prompt_tokens", "completion_tokens", "max_tokens",
        "server", "config_id", "attempt", "submitted_at", "latency_s", "flags",
    ]  # fmt: skip
    assert row["messages"] == [{"role": "user", "content": "question 0"}]
    seeds = {question(body): body["seed"] for body in one.bodies + two.bodies if "seed" in body}
    assert seeds == {f"question {n}": 5 + n for n in range(40)}
    assert max(one.most_in_flight, two.most_in_flight) <= 5
    assert sorted(p.name for p in folder.completions.glob("completions_*")) == [
        f"completions_{n:06d}.jsonl" for n in range(6)
    ]


async def test_a_second_start_of_a_finished_run_sends_nothing(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat()) as server:
        spec = project.spec([server.url])
        await project.run(spec)
        sent = [question(b) for b in server.bodies].count("question 3")
        status = await project.run(spec)
        assert (status["state"], status["done"], status["done_before"]) == ("ended", 20, 0), "no process was started"
        assert [question(b) for b in server.bodies].count("question 3") == sent


async def test_every_passing_fault_costs_a_retry_and_no_row(project: Project) -> None:
    faults = [
        error(500, "boom"), error(503, "later"), error(429, "slow", **{"Retry-After": "0.2"}), error(408, "late"),
        Cut(), Cut(b"{"), Raw(502, "<html>proxy</html>", "text/html"), Raw(200, "<html>ok?</html>", "text/html"),
        Raw(200, '{"id"'),
    ]  # fmt: skip
    seen: Counter[str] = Counter()

    def script(body: dict[str, Any], n: int) -> Any:
        asked = question(body)
        seen[asked] += 1
        number = int(asked.split()[1]) if asked.startswith("question") else len(faults)
        return faults[number] if number < len(faults) and seen[asked] == 1 else chat()

    async with ScriptedServer(script) as server:
        folder = await project.start(project.spec([server.url]))
        status = await project.end(folder)
    assert (status["state"], status["done"], status["failed"]) == ("ended", 20, 0)
    assert project.counts(folder) == Counter(range(20))
    assert {seen[f"question {n}"] for n in range(len(faults))} == {2}
    attempts = {row["index"]: row["attempt"] for row in project.rows(folder)}
    assert attempts[0] == 2
    assert attempts[2] == 1, "being asked to wait is no attempt"


async def test_a_row_that_cannot_succeed_becomes_a_failure_with_the_servers_words(project: Project) -> None:
    too_long = "The input (9012 tokens) is longer than the model's context length (8192 tokens)."

    def script(body: dict[str, Any], n: int) -> Any:
        return {
            "question 3": error(400, too_long),
            "question 4": error(400, "bad word"),
            "question 5": error(500, "x"),
        }.get(question(body), chat())

    async with ScriptedServer(script) as server:
        folder = await project.start(project.spec([server.url], max_attempts=2))
        status = await project.end(folder)
        sent = Counter(question(b) for b in server.bodies)
    assert (status["state"], status["done"], status["failed"]) == ("ended", 17, 3)
    kinds = {row["index"]: (row["kind"], row["attempts"]) for row in project.failures(folder)}
    assert kinds == {3: ("prompt_too_long", 1), 4: ("refused", 1), 5: ("server_error", 2)}
    assert too_long in next(r["message"] for r in project.failures(folder) if r["index"] == 3)
    assert (sent["question 3"], sent["question 4"], sent["question 5"]) == (1, 1, 2)


async def test_failures_stay_failures_until_they_are_asked_for_again(project: Project) -> None:
    broken = True

    def script(body: dict[str, Any], n: int) -> Any:
        return error(400, "no") if broken and question(body) == "question 3" else chat()

    async with ScriptedServer(script) as server:
        spec = project.spec([server.url])
        assert (await project.run(spec))["failed"] == 1
        broken = False
        assert (await project.run(spec))["failed"] == 1
        assert (await project.run(spec, retry_failed=["timeout"]))["failed"] == 1
        status = await project.run(spec, retry_failed=["refused"])
        assert (status["done"], status["failed"]) == (20, 0)


async def test_when_everything_fails_the_run_stops_early_and_burns_nothing(project: Project) -> None:
    async with ScriptedServer(
        lambda b, n: error(400, "unknown field") if "question" in question(b) else chat()
    ) as server:
        folder = await project.start(project.spec([server.url], 500))
        status = await project.end(folder)
        assert status["state"] == "failed"
        assert "unknown field" in status["reason"]
        assert project.failures(folder) == []
        assert len(server.bodies) < 100


async def test_a_wrong_key_or_model_stops_the_run_at_once(project: Project) -> None:
    async with ScriptedServer(lambda b, n: error(401, "wrong key") if "question" in question(b) else chat()) as server:
        folder = await project.start(project.spec([server.url], 500))
        status = await project.end(folder)
        assert status["state"] == "failed"
        assert "wrong key" in status["reason"]
        assert len(server.bodies) < 20


async def test_a_server_that_denies_in_mid_run_is_left_alone_until_it_serves_again(project: Project) -> None:
    denied = list[bool]()  # whether it was a row

    def script(body: dict[str, Any], n: int) -> Any:
        if n < 12 or denied.count(False) >= 3:  # until it was asked for a token three times
            return chat()
        denied.append("question" in question(body))
        return error(404, "model is being swapped")

    async with ScriptedServer(script) as server:
        folder = await project.start(project.spec([server.url], 60))
        status = await project.end(folder)
        sent = Counter(question(b) for b in server.bodies if "question" in question(b))
    assert (status["state"], status["done"], status["failed"]) == ("ended", 60, 0)
    # Those in flight; and, as answers and denials may cross, as many that were sent on an answer that came late.
    assert 2 <= denied.count(True) <= 10
    assert sum(sent.values()) == 60 + denied.count(True)


async def test_kill_9_loses_nothing_that_was_reported_and_resume_completes(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.05) as server:
        spec = project.spec([server.url], 400)
        folder = await project.start(spec)
        await project.until(folder, lambda s: s.get("done", 0) >= 80)
        reported = control.read_status(folder)["done"]
        await asyncio.to_thread(project.kill, folder)
        kept = {row["index"] for row in project.rows(folder)}
        assert len(kept) >= reported
        sent_before = len(server.bodies)
        folder = await project.start(spec)
        status = await project.end(folder)
        again = {int(question(b).split()[1]) for b in server.bodies[sent_before:] if "question" in question(b)}
    assert (status["state"], status["done"], status["done_before"]) == ("ended", 400, len(kept))
    assert project.counts(folder) == Counter(range(400))
    assert not kept & again


async def test_stop_lets_requests_in_flight_finish_and_seals_short(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.3) as server:
        spec = project.spec([server.url], 100)
        folder = await project.start(spec)
        await project.until(folder, lambda s: s.get("done", 0) >= 10)
        await asyncio.to_thread(generate.stop, folder, reason="test")
        status = await project.end(folder)
        sent = {question(b) for b in server.bodies if "question" in question(b)}
    assert (status["state"], status["reason"]) == ("stopped", "test")
    assert len(sent) == status["done"]
    assert not list(folder.completions.glob("*.partial"))


async def test_a_stop_while_the_last_rows_are_on_their_way_is_the_end_once_they_are_there(project: Project) -> None:
    go = asyncio.Event()

    async def later() -> dict[str, Any]:
        await go.wait()
        return chat()

    async with ScriptedServer(lambda b, n: later() if "question" in question(b) else chat()) as server:
        folder = await project.start(project.spec([server.url], 4, drain_s=60.0))
        await project.until(folder, lambda s: (s.get("pending"), s.get("in_flight")) == (0, 4))
        await asyncio.to_thread(generate.stop, folder, reason="test")
        await project.until(folder, lambda s: s.get("state") == "draining")
        go.set()
        status = await project.end(folder)
    assert (status["state"], status["reason"], status["done"]) == ("ended", None, 4)
    assert project.events(folder)[-1] == "run_ended"


async def test_stop_now_cuts_off_what_is_in_flight(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat() if n < 12 else Hang()) as server:
        folder = await project.start(project.spec([server.url], 100, drain_s=300.0))
        await project.until(folder, lambda s: s.get("done", 0) >= 8)
        await asyncio.to_thread(lambda: generate.stop(folder, reason="test", now=True))
        status = await project.end(folder, 15.0)
    assert status["state"] == "stopped"
    assert project.counts(folder) == Counter({row["index"]: 1 for row in project.rows(folder)})


async def test_a_signal_drains_and_a_second_one_cuts_off(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat() if n < 12 else Hang()) as server:
        folder = await project.start(project.spec([server.url], 100, drain_s=300.0))
        await project.until(folder, lambda s: s.get("done", 0) >= 8)
        process = control.living_process(folder)
        assert process is not None
        os.kill(process.pid, signal.SIGTERM)
        await project.until(folder, lambda s: s.get("state") == "draining")
        assert process.is_alive()
        os.kill(process.pid, signal.SIGTERM)
        status = await project.end(folder, 15.0)
    assert status["state"] == "stopped"


async def test_the_loss_of_the_process_that_started_it_stops_the_run(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.2) as server:
        spec = project.spec([server.url], 1000)
        folder = await project.start(spec)
        await asyncio.to_thread(project.kill, folder)
        starter = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STARTER, str(folder.path), str(project.root),
        )  # fmt: skip
        assert await starter.wait() == 0
        status = await project.end(folder, 20.0)
    assert status["state"] == "stopped"
    assert "is gone" in status["reason"]


async def test_a_server_that_is_away_for_a_while_costs_time_and_no_row(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.05) as lasting:
        async with ScriptedServer(lambda b, n: chat(), delay_s=0.05) as leaving:
            spec = project.spec([lasting.url, leaving.url], 800)
            folder = await project.start(spec)
            await project.until(folder, lambda s: s.get("done", 0) >= 20)
        status = await project.end(folder)
    assert (status["state"], status["done"], status["failed"]) == ("ended", 800, 0)
    assert project.counts(folder) == Counter(range(800))
    assert "server_down" in project.events(folder)


async def test_without_any_server_for_too_long_the_run_gives_up_and_can_be_resumed(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.05) as server:
        spec = project.spec([server.url], 300, give_up_s=2.0)
        folder = await project.start(spec)
        await project.until(folder, lambda s: s.get("done", 0) >= 20)
    status = await project.end(folder)
    assert status["state"] == "failed"
    assert "give_up_s" in status["reason"]
    assert project.failures(folder) == []


async def test_a_storm_of_refusals_does_not_hang_the_run(project: Project) -> None:
    refusal = error(429, "no quota", **{"Retry-After": "0.1"})
    async with ScriptedServer(lambda b, n: chat() if n < 12 else refusal) as server:
        folder = await project.start(project.spec([server.url], 100, give_up_s=2.0))
        status = await project.end(folder)
    assert status["state"] == "failed"
    assert "turned requests away for 2 s" in status["reason"]
    assert project.failures(folder) == []


async def test_refusals_beside_long_answers_are_no_storm(project: Project) -> None:
    """A server that turns away what is above its cap works: the run waits for the answers that are being made."""

    async def long_answer() -> dict[str, Any]:
        await asyncio.sleep(3.0)
        return chat()

    def script(body: dict[str, Any], n: int) -> Any:
        if "question" not in question(body):
            return chat()
        return long_answer() if server.in_flight <= 2 else error(429, "full", **{"Retry-After": "0.1"})

    async with ScriptedServer(script) as server:
        folder = await project.start(project.spec([server.url], 4, give_up_s=2.0))
        status = await project.end(folder)
    assert (status["state"], status["done"]) == ("ended", 4)


async def test_a_slow_server_does_not_hold_back_a_fast_one(project: Project) -> None:
    async with (
        ScriptedServer(lambda b, n: chat(), delay_s=0.5) as slow,
        ScriptedServer(lambda b, n: chat(), delay_s=0.1) as fast,
    ):
        folder = await project.start(project.spec([slow.url, fast.url], 200))
        status = await project.end(folder)
    done = {server["name"]: server["done"] for server in status["servers"]}
    assert done[f"127.0.0.1:{fast.port}"] > 3 * done[f"127.0.0.1:{slow.port}"]


async def test_other_prompts_model_or_sampling_are_refused_and_nothing_changes(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat()) as server:
        spec = project.spec([server.url])
        folder = await project.start(spec)
        await project.end(folder)
        before = {p: p.read_bytes() for p in folder.completions.iterdir() if p.name != ".lock"}
        recorded = folder.run_json.read_bytes()
        with pytest.raises(FingerprintError, match=r"another sampling \(temperature: None -> 0\.1\)"):
            await project.start(project.spec([server.url], temperature=0.1))
        with pytest.raises(FingerprintError, match=r"has changed since run 'r' froze its prompts"):
            await project.start(project.spec([server.url], prompts=21))
        assert {p: p.read_bytes() for p in folder.completions.iterdir() if p.name != ".lock"} == before
        assert folder.run_json.read_bytes() == recorded, "a refused resume must not spoil the next"


async def test_joining_a_running_process_with_other_parameters_is_refused(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.2) as server:
        folder = await project.start(project.spec([server.url], 1000))
        assert (await project.start(project.spec([server.url], 1000))).path == folder.path
        with pytest.raises(RunError, match=r"generation\.drain_s: 5\.0 -> 6\.0"):
            await project.start(project.spec([server.url], 1000, drain_s=6.0))
        await asyncio.to_thread(lambda: generate.stop(folder, reason="test", now=True))
        await project.end(folder)


async def test_an_outage_behind_a_proxy_is_waited_out_like_any_other(project: Project) -> None:
    """The proxy answers everything with errors: rows must not use up their attempts on it."""
    probes = 0

    def script(body: dict[str, Any], n: int) -> Any:
        nonlocal probes
        if n < 12 or probes >= 3:
            return chat()
        probes += question(body) == "Hi"
        return Raw(502, "<html>bad gateway</html>", "text/html")

    async with ScriptedServer(script) as server:
        folder = await project.start(project.spec([server.url], 100))
        status = await project.end(folder)
        sent = Counter(question(b) for b in server.bodies)
    assert (status["state"], status["done"], status["failed"]) == ("ended", 100, 0)
    assert sum(sent.values()) < 100 + 12 + 20
    assert {"server_down", "server_back"} <= set(project.events(folder))


async def test_a_disk_that_refuses_the_last_answers_is_waited_for(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.05) as server:
        spec = project.spec([server.url], 200, drain_s=0.0)
        folder = await project.start(spec)
        await project.until(folder, lambda s: s.get("done", 0) >= 8)
        process = control.living_process(folder)
        assert process is not None
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        gone = await asyncio.to_thread(control.wait_until, lambda: not process.is_alive(), 7.0)
        assert not gone, folder.log.read_text()
        assert len({question(b) for b in server.bodies if "question" in question(b)}) == 200
        assert sum(project.counts(folder).values()) < 200
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
        status = await project.end(folder)
    assert (status["state"], status["done"]) == ("ended", 200)
    assert project.counts(folder) == Counter(range(200))


@pytest.mark.parametrize("content", ["{}", '{"name": "a node project", "spec": 1}', "my notes"])
async def test_a_folder_of_something_else_is_left_alone(project: Project, content: str) -> None:
    spec = project.spec(["http://127.0.0.1:1"])
    folder = project.root / "outputs" / "r"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(content)
    with pytest.raises(RunError, match=r"run\.json"):
        generate.prepare(spec, project.root)
    assert (folder / "run.json").read_text() == content


async def test_a_name_that_is_taken_is_told_and_a_link_is_not_written_through(project: Project) -> None:
    spec = project.spec(["http://127.0.0.1:1"])
    (project.root / "outputs").mkdir()
    taken = project.root / "outputs" / "r"
    taken.write_text("mine")
    with pytest.raises(StorageError, match=r"outputs/r: File exists.*another name"):
        generate.prepare(spec, project.root)
    assert taken.read_text() == "mine"
    taken.rename(project.root / "mine")
    taken.mkdir()
    (taken / ".start.lock").symlink_to(project.root / "mine")
    generate.prepare(spec, project.root)
    assert (project.root / "mine").read_text() == "mine"


async def test_a_key_that_a_server_repeats_is_not_written(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-0123456789abcdef"
    monkeypatch.setenv("DFEXP_TEST_KEY", key)

    def script(body: dict[str, Any], n: int) -> Any:
        asked = question(body)
        return error(400, f"you sent Bearer {key}") if asked == "question 3" else chat(completion_tokens=10**400)

    async with ScriptedServer(script) as server:
        tree = project.spec([server.url]).model_dump()
        tree["fleet"]["api_key_env"] = "DFEXP_TEST_KEY"
        folder = await project.start(params.validate(tree, "test"))
        status = await project.end(folder)
        assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {key}"}
    assert (status["state"], status["done"], status["failed"]) == ("ended", 19, 1), "no count is too odd"
    assert {row["completion_tokens"] for row in project.rows(folder)} == {None}
    assert "you sent Bearer (key hidden)" in project.failures(folder)[0]["message"]
    assert not [path for path in project.root.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
