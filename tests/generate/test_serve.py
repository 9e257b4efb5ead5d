"""Rows that a bad server rejects while the good one is away, and answers that come from another model."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.generate.conftest import Project
from tests.generate.test_faults import index_of
from tests.scripted_server import Hang, ScriptedServer, chat, error


def rejects(status: int, *indices: int) -> Any:
    """Rejects these rows, or all; and is well when asked."""
    return lambda body, n: (
        error(status, "no such adapter")
        if (index := index_of(body)) is not None and (not indices or index in indices)
        else chat()
    )


async def is_away(project: Project, folder: Any, good: ScriptedServer) -> None:
    """Take the good server away in mid-run, and wait until that is seen."""
    await project.until(folder, lambda s: s.get("done", 0) >= 20)
    await good.__aexit__()
    await project.until(folder, lambda s: any(one["state"] == "down" for one in s["servers"]))


@pytest.mark.parametrize("status", [400, 403])
async def test_a_bad_server_costs_no_row_while_the_good_one_is_away(project: Project, status: int) -> None:
    good = ScriptedServer(lambda b, n: chat(), delay_s=0.05)
    async with ScriptedServer(rejects(status)) as bad, good:
        folder = await project.start(project.spec([bad.url, good.url], 200, max_attempts=2))
        await is_away(project, folder, good)
        sent = len(bad.bodies)
        with pytest.raises(AssertionError):  # it waits
            await project.until(folder, lambda s: s["state"] != "running" or s["failed"], 8.0)
        assert len(bad.bodies) - sent < 60, "it rests"
        async with ScriptedServer(good.script, port=good.port):
            ended = await project.end(folder)
    assert (ended["state"], ended["done"], ended["failed"]) == ("ended", 200, 0)
    assert project.counts(folder) == Counter(range(200))


async def test_rows_wait_for_no_server_that_stays_away(project: Project) -> None:
    good = ScriptedServer(lambda b, n: chat(), delay_s=0.05)
    async with ScriptedServer(rejects(400)) as bad, good:
        folder = await project.start(project.spec([bad.url, good.url], 200, give_up_s=3.0))
        await is_away(project, folder, good)
        ended = await project.end(folder, 40.0)
    assert ended["state"] == "failed"
    assert "no such adapter" in ended["reason"]
    assert project.failures(folder) == []


async def test_one_that_rejects_all_and_one_that_turns_all_away_end_the_run_with_the_cause(project: Project) -> None:
    def turns_away(body: dict[str, Any], n: int) -> Any:
        return chat() if index_of(body) is None else error(429, "later", **{"Retry-After": "600"})

    async with ScriptedServer(rejects(400)) as bad, ScriptedServer(turns_away) as busy:
        folder = await project.start(project.spec([bad.url, busy.url], 200, give_up_s=3.0))
        ended = await project.end(folder, 40.0)
    assert ended["state"] == "failed"
    assert "50 rows failed one after the other, the last with: HTTP 400: no such adapter" in ended["reason"]
    assert project.failures(folder) == []


async def test_a_server_that_answers_others_is_believed_while_the_other_is_away(project: Project) -> None:
    # Where the good one gets the row before it is away, it does not answer it.
    good = ScriptedServer(lambda b, n: Hang() if index_of(b) == 150 else chat(), delay_s=0.05)
    async with ScriptedServer(rejects(400, 150), delay_s=0.05) as left, good:
        folder = await project.start(project.spec([left.url, good.url], 500))
        await is_away(project, folder, good)
        ended = await project.end(folder, 40.0)
        assert sum(index_of(body) == 150 for body in left.bodies) <= 2
    assert (ended["state"], ended["done"], ended["failed"]) == ("ended", 499, 1)


async def test_the_last_row_of_all_is_not_waited_with_where_its_server_answered_the_others(project: Project) -> None:
    good = ScriptedServer(lambda b, n: Hang() if index_of(b) == 59 else chat(), delay_s=0.05)
    async with ScriptedServer(rejects(400, 59), delay_s=0.05) as left, good:
        folder = await project.start(project.spec([left.url, good.url], 60, concurrency=1))
        await is_away(project, folder, good)
        ended = await project.end(folder, 40.0)
    assert (ended["state"], ended["done"], ended["failed"]) == ("ended", 59, 1)


async def test_a_server_that_answers_as_another_model_is_told_once(project: Project) -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return {**chat(), "model": "someone/else"}

    async with ScriptedServer(script) as other, ScriptedServer(lambda b, n: chat()) as right:
        folder = await project.start(project.spec([other.url, right.url], 40))
        assert (await project.end(folder))["done"] == 40
    entries = map(json.loads, folder.events.read_text().splitlines())
    (told,) = [one for one in entries if one["event"] == "other_model"]
    assert told["server"] == other.url.partition("://")[2]
    assert "the server answers as model 'someone/else'; asked was 'm'" in told["detail"]
