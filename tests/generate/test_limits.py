"""Where one start of a run stops before all rows are done, and that the next goes on."""

from __future__ import annotations

from collections import Counter

import pytest

from dfexp import generate
from dfexp.generate.limits import portion
from dfexp.params import LimitsGroup
from tests.generate.conftest import Project
from tests.scripted_server import ScriptedServer, chat

ALL = LimitsGroup()


def test_a_sample_is_drawn_again_with_its_seed_and_is_never_larger_than_the_prompts() -> None:
    assert generate.drawn(1000, 20, 3) == generate.drawn(1000, 20, 3) != generate.drawn(1000, 20, 4)
    assert len(set(generate.drawn(1000, 20, 3))) == 20
    assert sorted(generate.drawn(5, 20, 3)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("limits", "pending", "sample", "rows", "why"),
    [
        (ALL, [0, 1, 2], None, [0, 1, 2], None),
        (LimitsGroup(rows=3), [0, 1, 2], None, [0, 1, 2], None),
        (LimitsGroup(rows=2), [0, 1, 2], None, [0, 1], "limits.rows = 2 is reached"),
        (ALL, [0, 1, 2, 5], [5, 3, 1], [5, 1], "the sample of 3 rows is done"),
        (ALL, [1, 5], [5, 3, 1], [5, 1], None),
        (ALL, [2], [5, 3, 1], [], "the sample of 3 rows is done"),
        (LimitsGroup(rows=1), [0, 1, 2], [2, 1], [2], "limits.rows = 1 is reached"),
    ],
)
def test_the_rows_of_one_start(
    limits: LimitsGroup, pending: list[int], sample: list[int] | None, rows: list[int], why: str | None
) -> None:
    assert portion(limits, pending, sample) == (rows, why)


async def test_each_start_sends_so_many_rows_and_the_last_one_ends_the_run(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat()) as server:
        spec = project.spec([server.url]).model_copy(update={"limits": LimitsGroup(rows=8)})
        ends = [await project.run(spec) for _ in range(3)]
        asked = Counter(body["messages"][-1]["content"] for body in server.bodies)
    assert [(one["state"], one["done"]) for one in ends] == [("stopped", 8), ("stopped", 16), ("ended", 20)]
    assert ends[0]["reason"] == "limits.rows = 8 is reached"
    told = [(one["rows_of_start"], one["rows_of_later_starts"]) for one in ends]
    assert told == [(8, 12), (8, 4), (4, 0)]
    assert {asked[f"question {n}"] for n in range(20)} == {1}


async def test_a_limit_of_time_drains_and_the_next_start_goes_on(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.3) as server:
        spec = project.spec([server.url], 40)
        limited = spec.model_copy(update={"limits": LimitsGroup(hours=0.7 / 3600)})
        folder = await project.start(limited)
        status = await project.end(folder)
        assert (status["state"], status["reason"]) == ("stopped", f"limits.hours = {0.7 / 3600:g} is reached")
        assert 0 < status["done"] < 40
        assert (await project.run(spec))["state"] == "ended"
    assert project.counts(folder) == Counter(range(40))


async def test_a_sample_goes_first_and_the_run_does_the_rest(project: Project) -> None:
    async with ScriptedServer(lambda b, n: chat()) as server:
        spec = project.spec([server.url], 30)
        folder = await project.start(spec, sample=(6, 3))
        first = await project.end(folder)
        assert set(project.counts(folder)) == set(generate.drawn(30, 6, 3))
        again = await project.run(spec, sample=(6, 3))
        rest = await project.run(spec)
    assert [(one["state"], one["done"]) for one in (first, again, rest)] == [
        ("stopped", 6), ("stopped", 6), ("ended", 30),
    ]  # fmt: skip
    assert again["done"] == again["done_before"] == 6
    assert project.counts(folder) == Counter(range(30))
