"""The queue hands out each row exactly once, and again only what was put back."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dfexp.generate.work import Job, WorkQueue


def test_fresh_rows_come_in_order() -> None:
    queue = WorkQueue([3, 5, 9], 3)
    assert [queue.take("a", 0.0) for _ in range(4)] == [Job(index=3), Job(index=5), Job(index=9), None]
    assert len(queue) == 0


def test_a_row_put_back_comes_first_once_its_time_has_come() -> None:
    queue = WorkQueue([0, 1], 2)
    job = queue.take("a", 0.0)
    assert job is not None
    again = Job(index=0, attempt=2, avoid="a")
    queue.put_back(again, not_before=10.0)
    assert queue.take("b", 9.0) == Job(index=1)
    assert queue.take("b", 9.0) is None
    assert len(queue) == 1
    assert queue.take("b", 10.0) == again


def test_a_row_is_not_given_back_to_the_server_where_it_failed_unless_there_is_no_other() -> None:
    queue = WorkQueue([], 0)
    again = Job(index=0, attempt=2, avoid="a")
    queue.put_back(again, not_before=0.0)
    assert queue.take("a", 1.0) is None
    assert queue.take("a", 1.0, alone=True) == again


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 3)), max_size=200), st.integers(0, 20))
def test_no_row_is_lost_or_handed_out_twice(steps: list[tuple[str, bool, int]], count: int) -> None:
    queue, out, done, now = WorkQueue(range(count), count), {}, set(), 0.0
    for server, fails, wait in steps:
        now += 1.0
        job = queue.take(server, now)
        if job is not None:
            assert job.index not in out
            assert job.index not in done
            if fails:
                queue.put_back(Job(index=job.index, attempt=job.attempt + 1, avoid=server), not_before=now + wait)
            else:
                done.add(job.index)
        assert len(queue) + len(done) == count
    while len(queue):
        now += 5.0
        job = queue.take("c", now)
        assert job is not None
        assert job.index not in done
        done.add(job.index)
    assert done == set(range(count))


ROWS, SERVERS = 12, "abc"
PLACES = st.integers(0, ROWS)  # of a row in flight, modulo how many there are


class TakenBack(RuleBasedStateMachine):
    """Rows that are taken, taken back, fail, finish, and lose their server, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.now = WorkQueue(range(ROWS), ROWS), 0.0
        self.flying: list[tuple[str, Job]] = []
        self.done: list[int] = []
        self.attempts = dict.fromkeys(range(ROWS), 1)
        self.up = set(SERVERS)

    def _picked(self, place: int) -> tuple[str, Job]:
        return self.flying.pop(place % len(self.flying))

    @rule(server=st.sampled_from(SERVERS))
    def take(self, server: str) -> None:
        alone = self.up == {server}
        if server not in self.up or (job := self.queue.take(server, self.now, alone=alone)) is None:
            return
        assert alone or job.avoid != server
        assert job.attempt == self.attempts[job.index], "only a failure is an attempt"
        self.flying.append((server, job))

    @precondition(lambda self: self.flying)
    @rule(place=PLACES)
    def take_back(self, place: int) -> None:
        server, job = self._picked(place)
        self.queue.put_back(replace(job, avoid=server), not_before=0.0)

    @precondition(lambda self: self.flying)
    @rule(place=PLACES, wait_s=st.integers(0, 3))
    def fail(self, place: int, wait_s: int) -> None:
        server, job = self._picked(place)
        self.attempts[job.index] += 1
        self.queue.put_back(Job(index=job.index, attempt=job.attempt + 1, avoid=server), not_before=self.now + wait_s)

    @precondition(lambda self: self.flying)
    @rule(place=PLACES)
    def finish(self, place: int) -> None:
        self.done.append(self._picked(place)[1].index)

    @rule(server=st.sampled_from(SERVERS), is_up=st.booleans())
    def server_goes_or_comes(self, server: str, is_up: bool) -> None:
        (self.up.add if is_up else self.up.discard)(server)
        for each in [each for each in self.flying if each[0] not in self.up]:
            self.flying.remove(each)
            self.queue.put_back(replace(each[1], avoid=server), not_before=0.0)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def each_row_is_in_one_place(self) -> None:
        places = [job.index for _, job in self.flying] + self.done
        assert len(set(places)) == len(places)
        assert len(self.queue) + len(places) == ROWS

    def teardown(self) -> None:
        """Whatever happened, one server that stays finishes the rest."""
        self.done += [job.index for _, job in self.flying]
        while len(self.queue):
            self.now += 5.0
            job = self.queue.take("a", self.now, alone=True)
            assert job is not None
            self.done.append(job.index)
        assert sorted(self.done) == list(range(ROWS)), "every row once"


test_each_row_is_in_one_place_whatever_is_taken_back = TakenBack.TestCase
