"""Whole runs over servers that fail, hang and talk nonsense: what becomes of rows, and when a run stops."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from typing import Any

import pytest

from dfexp.report.data import load
from dfexp.report.details import findings
from tests.generate.conftest import Project
from tests.scripted_server import Cut, Hang, Raw, ScriptedServer, chat, error

EMPTY, GARBAGE = chat(""), chat("!" * 400)


def index_of(body: dict[str, Any]) -> int | None:
    """The row that a request is of; None of what is asked to see whether a server is well."""
    words = str(body["messages"][-1]["content"]).split()
    return int(words[1]) if words[0] == "question" else None


def ended(reason: Any, text: str = "An answer.") -> dict[str, Any]:
    body = chat(text)
    body["choices"][0]["finish_reason"] = reason
    return body


def rows_of(project: Project, folder: Any) -> dict[int, dict[str, Any]]:
    return {row["index"]: row for row in project.rows(folder)}


FAULTS = {
    "server error": error(500, "boom"), "queue": error(500, "The request queue is full."),
    "now": error(429, "slow", **{"Retry-After": "0"}), "proxy": Raw(502, "<html>nginx</html>", "text/html"),
    "page": Raw(200, "<html>proxy</html>", "text/html"), "truncated": Raw(200, '{"id": "x", "choi'),
    "cut": Cut(b'{"id": '), "reset": Cut(), "types": chat(["no", "text"]), "aborted": ended("abort"),
    "told": Raw(200, json.dumps({"error": {"message": "out of memory", "code": 500}})),
}  # fmt: skip


async def test_every_fault_that_passes_sends_its_row_to_the_other_server_and_costs_nothing_else(
    project: Project,
) -> None:
    kinds, places = list(FAULTS.values()), defaultdict[int, list[str]](list)

    def script(name: str) -> Any:
        def answer(body: dict[str, Any], n: int) -> Any:
            if (index := index_of(body)) is None:
                return chat()
            places[index].append(name)
            return kinds[index // 4] if index % 4 == 0 and len(places[index]) == 1 else chat()

        return answer

    async with (
        ScriptedServer(script("a"), delay_s=0.05) as first,
        ScriptedServer(script("b"), delay_s=0.05) as second,
    ):
        folder = await project.start(project.spec([first.url, second.url], 4 * len(kinds), seed=5))
        status = await project.end(folder)
        bodies = [*first.bodies, *second.bodies]
    assert (status["state"], status["done"], status["failed"]) == ("ended", 4 * len(kinds), 0)
    assert Counter(map(len, places.values())) == {1: 3 * len(kinds), 2: len(kinds)}
    counted = {i: row["attempt"] for i, row in rows_of(project, folder).items() if row["attempt"] > 1}
    assert counted == {4 * n: 2 for n, kind in enumerate(FAULTS) if kind not in ("queue", "now")}
    moved = [seen[0] != seen[1] for index, seen in places.items() if index in counted]
    assert all(moved)
    seeds = {(index_of(body), body["seed"]) for body in bodies if index_of(body) is not None}
    assert seeds == {(index, 5 + index) for index in range(4 * len(kinds))}, "a lost answer may come again as it was"


async def test_an_empty_answer_is_asked_for_again_with_another_seed_and_the_last_one_is_kept(project: Project) -> None:
    seeds = defaultdict[int, list[int]](list)

    def script(body: dict[str, Any], n: int) -> Any:
        if (index := index_of(body)) is None:
            return chat()
        seeds[index].append(body["seed"])
        return EMPTY if index == 3 or (index == 7 and len(seeds[7]) == 1) else chat()

    async with ScriptedServer(script) as server:
        folder = await project.start(project.spec([server.url], 12, seed=5, max_attempts=3))
        status = await project.end(folder)
    rows = rows_of(project, folder)
    assert (status["done"], status["failed"]) == (12, 0)
    assert (len(set(seeds[3])), len(set(seeds[7])), seeds[0]) == (3, 2, [5])
    assert (rows[3]["attempt"], rows[3]["flags"]) == (3, ["empty", "reseeded"])
    assert (rows[7]["attempt"], rows[7]["text"], rows[7]["flags"]) == (2, "hello", ["reseeded"])
    assert status["flags"] == {"empty": 1, "reseeded": 2, "empty_retried": 3}


async def test_each_kind_of_poison_becomes_what_was_asked_for(project: Project) -> None:
    poison = {
        0: chat("!" * 400), 1: ended("length"), 2: ended("length", "<think>\nso far"), 3: chat("<think>\nso far"),
        4: ended(None), 5: chat("a\0b"), 6: chat("a\u2028b\u2029c\x85d\x0be"), 7: chat("\ud83d"), 8: chat(""),
    }  # fmt: skip
    policy = {"garbage": "fail", "unknown_end": "fail", "empty": "keep"}

    def script(body: dict[str, Any], n: int) -> Any:
        found = poison.get(index_of(body) if index_of(body) is not None else -1, chat())
        return Raw(200, json.dumps(found))

    async with ScriptedServer(script) as server:
        folder = await project.start(project.spec([server.url], 20, spoiled=policy))
        status = await project.end(folder)
        sent = Counter(index_of(body) for body in server.bodies)
    failed = {row["index"]: (row["kind"], row["message"]) for row in project.failures(folder)}
    assert (status["state"], status["done"], status["failed"]) == ("ended", 18, 2)
    assert {index: kind for index, (kind, _) in failed.items()} == {0: "garbage", 4: "unknown_end"}
    assert "'An answer.'" in failed[4][1]
    assert len(failed[0][1]) < 300, "the first words are enough"
    rows = rows_of(project, folder)
    assert {index: row["flags"] for index, row in rows.items() if row["flags"]} == {
        1: ["truncated"], 2: ["unclosed_thought", "truncated"], 3: ["unclosed_thought"], 5: ["nul"],
        7: ["surrogates_repaired"], 8: ["empty"],
    }  # fmt: skip
    assert (rows[5]["text"], rows[6]["text"]) == ("a\0b", "a\u2028b\u2029c\x85d\x0be")
    assert {sent[index] for index in range(20)} == {1}
    assert status["failures_by_kind"] == {"garbage": 1, "unknown_end": 1}


@pytest.mark.parametrize(("reply", "shown"), [(EMPTY, "''"), (GARBAGE, "!!!")], ids=["empty", "garbage"])
async def test_when_all_servers_give_only_nonsense_the_run_stops_after_a_good_start(
    project: Project, reply: Any, shown: str
) -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return reply if (index_of(body) or 0) >= 30 else chat()

    async with ScriptedServer(script, delay_s=0.01) as first, ScriptedServer(script, delay_s=0.01) as second:
        folder = await project.start(project.spec([first.url, second.url], 1000))
        status = await project.end(folder)
        sent = len(first.bodies) + len(second.bodies)
    assert status["state"] == "failed"
    assert "empty or garbage" in status["reason"]
    assert shown in status["reason"]
    assert sent < 200


async def test_one_server_that_gives_only_nonsense_stops_nothing_where_another_works(project: Project) -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return chat() if index_of(body) is None else EMPTY

    async with ScriptedServer(script) as broken, ScriptedServer(lambda b, n: chat(), delay_s=0.1) as good:
        folder = await project.start(project.spec([broken.url, good.url], 200))
        status = await project.end(folder)
        assert len(broken.bodies) > 50
    assert (status["state"], status["done"], status["failed"]) == ("ended", 200, 0)
    kept = Counter(flag for row in project.rows(folder) for flag in row["flags"])
    assert kept["empty"] == 0, "every row was answered by the server that works"


async def test_when_everything_fails_after_a_good_start_the_run_stops_and_burns_nothing(project: Project) -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return error(400, "unknown field") if (index_of(body) or 0) >= 30 else chat()

    async with ScriptedServer(script) as server:
        folder = await project.start(project.spec([server.url], 500))
        status = await project.end(folder)
        assert len(server.bodies) < 150
    assert (status["state"], status["done"]) == ("failed", 30)
    assert "unknown field" in status["reason"]
    assert project.failures(folder) == []
    assert (status["failed"], status["failures_by_kind"]) == (0, {}), "as on the disk"
    assert project.events(folder).count("run_failed") == 1


async def test_turns_that_do_not_alternate_go_out_as_they_are_and_a_refusal_is_the_rows_alone(project: Project) -> None:
    chats = [
        [{"role": "user", "content": "question 0"}, {"role": "user", "content": "question 0"}],
        [{"role": "assistant", "content": "hm"}, {"role": "user", "content": "question 1"}],
        [{"role": "user", "content": "question 2"}],
    ]

    def script(body: dict[str, Any], n: int) -> Any:
        return error(400, "Conversation roles must alternate") if index_of(body) == 1 else chat()

    async with ScriptedServer(script) as server:
        spec = project.spec([server.url], 3)
        lines = "".join(json.dumps({"messages": messages}) + "\n" for messages in chats)
        (project.root / "params" / "prompts.jsonl").write_text(lines)
        folder = await project.start(spec)
        status = await project.end(folder)
        sent = [body["messages"] for body in server.bodies if index_of(body) is not None]
    assert (status["state"], status["done"], status["failed"]) == ("ended", 2, 1)
    assert sorted(sent, key=str) == sorted(chats, key=str)
    (failed,) = project.failures(folder)
    assert (failed["index"], failed["kind"]) == (1, "refused")
    assert "must alternate" in failed["message"]


@pytest.mark.slow
async def test_a_request_that_hangs_while_its_server_serves_others_is_found_by_their_speed(project: Project) -> None:
    """Two tokens a second, the guess before the first answers, would give it 260 s; their 40 give it 80 s."""
    asked = Counter[int | None]()

    def script(body: dict[str, Any], n: int) -> Any:
        asked[index_of(body)] += 1
        return Hang() if index_of(body) == 0 and asked[0] == 1 else chat()

    async with ScriptedServer(script, delay_s=0.05) as server:
        folder = await project.start(project.spec([server.url], 100, max_tokens=200))
        status = await project.end(folder, 180.0)
    assert (status["state"], status["done"], asked[0]) == ("ended", 100, 2)
    assert rows_of(project, folder)[0]["attempt"] == 2


@pytest.mark.parametrize("status", [401, 403, 404])
@pytest.mark.parametrize("barred", [0, 30])
async def test_a_prompt_that_a_gateway_bars_for_good_fails_alone(project: Project, status: int, barred: int) -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return error(status, "moderated") if index_of(body) == barred else chat()

    async with ScriptedServer(script, delay_s=0.02) as first, ScriptedServer(script, delay_s=0.02) as second:
        folder = await project.start(project.spec([first.url, second.url], 60))
        ended = await project.end(folder)
        sent = Counter(map(index_of, [*first.bodies, *second.bodies]))
    assert (ended["state"], ended["done"], ended["failed"], sent[barred]) == ("ended", 59, 1, 4)
    (failed,) = project.failures(folder)
    assert (failed["index"], failed["kind"], failed["attempts"]) == (barred, "access_denied", 4)
    assert "moderated" in failed["message"]


@pytest.mark.parametrize("probed", [False, True], ids=["rows alone", "probes too"])
@pytest.mark.parametrize(("status", "event"), [(400, "server_rejects"), (401, None)])
async def test_one_server_that_takes_no_row_costs_none(
    project: Project, status: int, event: str | None, probed: bool
) -> None:
    """It says so at once, before the others have answered any."""

    def script(body: dict[str, Any], n: int) -> Any:
        return error(status, "not here") if index_of(body) is not None or (probed and n > 3) else chat()

    async with (
        ScriptedServer(script) as wrong,
        ScriptedServer(lambda b, n: chat(), delay_s=0.1) as one,
        ScriptedServer(lambda b, n: chat(), delay_s=0.1) as two,
    ):
        spec = project.spec([wrong.url, one.url, two.url], 200, sample_interval_s=0.2)
        folder = await project.start(spec)
        ended = await project.end(folder)
        assert 0 < sum(index_of(body) is not None for body in wrong.bodies) < 60
    assert (ended["state"], ended["done"], ended["failed"]) == ("ended", 200, 0)
    assert event is None or event in project.events(folder)
    if event:  # and whoever looks at the run, or at its report, sees it
        name = next(each["name"] for each in ended["servers"] if each["done"] == 0)
        live = next(each for each in ended["findings"] if each["kind"] == "rejects rows")
        line = next(each for each in findings(load(folder), None).rows if each["finding"] == "rejects rows")
        assert (live["server"], line["of"], line["change"]) == (name, name, live["change"])
        assert "not here" in live["evidence"]
        assert "not here" in line["evidence"]


async def test_a_row_that_two_servers_refuse_is_asked_of_no_third(project: Project) -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return error(422, "odd") if index_of(body) == 7 else chat()

    async with (
        ScriptedServer(script) as first, ScriptedServer(script) as second, ScriptedServer(script) as third
    ):  # fmt: skip
        folder = await project.start(project.spec([first.url, second.url, third.url], 60))
        ended = await project.end(folder)
        sent = [sum(index_of(body) == 7 for body in server.bodies) for server in (first, second, third)]
    assert (ended["state"], ended["done"], ended["failed"]) == ("ended", 59, 1)
    assert sorted(sent) == [0, 1, 1]
    assert [(row["kind"], row["attempts"]) for row in project.failures(folder)] == [("refused", 2)]


async def test_a_row_does_not_wait_for_a_server_that_pauses_for_long(project: Project) -> None:
    """One server turns all away for ten minutes; what fails once at the other goes on there."""
    failed = Counter[int | None]()

    def turns_away(body: dict[str, Any], n: int) -> Any:
        return chat() if index_of(body) is None else error(429, "later", **{"Retry-After": "600"})

    def fails_once(body: dict[str, Any], n: int) -> Any:
        index = index_of(body)
        failed[index] += 1
        return error(500, "boom") if index == 30 and failed[index] == 1 else chat()

    async with ScriptedServer(turns_away) as one, ScriptedServer(fails_once, delay_s=0.05) as other:
        folder = await project.start(project.spec([one.url, other.url], 60))
        ended = await project.end(folder, 30.0)
        assert sum(index_of(body) is not None for body in one.bodies) <= 5
    assert (ended["state"], ended["done"], failed[30]) == ("ended", 60, 2)


async def test_a_server_is_left_alone_for_as_long_as_it_asks(project: Project) -> None:
    came: list[float] = []

    def script(body: dict[str, Any], n: int) -> Any:
        if index_of(body) is None:
            return chat()
        came.append(time.monotonic())
        return error(429, "later", **{"Retry-After": "3"}) if len(came) == 1 else chat()

    async with ScriptedServer(script) as server:
        ended = await project.run(project.spec([server.url], 2, concurrency=1))
    assert (ended["state"], ended["done"], len(came)) == ("ended", 2, 3)
    assert came[1] - came[0] >= 3.0


async def test_a_retried_row_whose_server_goes_away_is_put_back_as_it_was(project: Project) -> None:
    """It fails once, then hangs where nobody can connect any more: being cut off there is no attempt, and no loss."""
    asked, hanging = Counter[int | None](), list[ScriptedServer]()

    def script(place: int) -> Any:
        async def answer(body: dict[str, Any]) -> Any:
            asked[index := index_of(body)] += 1
            if index == 0 and asked[0] == 2:
                hanging.append(servers[place])
                for site in list(servers[place]._runner.sites):
                    await site.stop()
                return Hang()
            if servers[place] in hanging:
                return Cut()
            return error(500, "boom") if index == 0 and asked[0] == 1 else chat()

        return lambda body, n: answer(body)

    servers = [ScriptedServer(script(0), delay_s=0.05), ScriptedServer(script(1), delay_s=0.05)]
    async with servers[0], servers[1]:
        folder = await project.start(project.spec([one.url for one in servers], 200))
        ended = await project.end(folder, 40.0)
    assert (ended["state"], ended["done"], ended["failed"]) == ("ended", 200, 0)
    assert (asked[0], rows_of(project, folder)[0]["attempt"]) == (3, 2)
