"""The queue hands out each row exactly once, and again only what was put back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
