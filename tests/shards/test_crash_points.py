"""Die after, in the middle of, and be refused at every single system call of a run; lose power between any two."""

import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dfexp.errors import StorageError
from dfexp.jsonl import encode_line
from dfexp.shards import Shards
from tests.shards.os_tap import DieAt, RefuseAt, tapped
from tests.shards.power import Recorder, write_to
from tests.shards.support import check_consistent, failure, finish, open_run, read_indices, rows

TOTAL, PER_SHARD = 12, 3
Report = Callable[[list[int], list[int]], None]
FAILED = 1000  # added to an index that failed, where one number has to tell


def write_a_run(folder: Path, report: Report) -> None:
    """Begin, commit within and across borders, fail, drain, resume, finish. Reports what each commit returned for."""
    with open_run(folder, total=TOTAL, rows_per_shard=PER_SHARD) as run:
        for batch, failed in (([4, 1], []), ([0, 2], [11]), ([7, 3, 5, 6], []), ([], [10])):
            run.commit(rows(batch), [failure(index) for index in failed])
            report(batch, failed)
        run.seal()
    with open_run(folder, total=TOTAL, rows_per_shard=PER_SHARD) as run:
        run.commit(rows([8]))
        report([8], [])
        run.seal()


def run_until_death(folder: Path, nth: int, *, halfway: bool) -> tuple[set[int], bool]:
    """What a child had reported when it died at its `nth` call, and whether it died at all."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:

            def report(done: list[int], failed: list[int]) -> None:
                told = [*done, *(index + FAILED for index in failed)]
                os.writev(writer, [struct.pack(f"{len(told)}i", *told)])

            death = DieAt(nth, halfway=halfway)
            with tapped(death, death.names):
                write_a_run(folder, report)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return set(struct.unpack(f"{len(data) // 4}i", data)), code == 9


@pytest.mark.parametrize("halfway", [False, True])
def test_a_run_killed_at_any_system_call_resumes(quick, halfway):
    died, nth, reports = True, 0, set()
    while died:
        nth += 1
        folder = quick / str(nth)
        reported, died = run_until_death(folder, nth, halfway=halfway)
        reports.add(len(reported))
        with open_run(folder, total=TOTAL, rows_per_shard=PER_SHARD) as run:
            check_reported(run, reported)
            check_consistent(folder, run)
        finish(folder, total=TOTAL, rows_per_shard=PER_SHARD)
        shutil.rmtree(folder)
    assert nth > (15 if halfway else 60)  # fewer would mean that the protocol went around the tap
    assert reports == {0, 2, 5, 9, 10, 11}


def check_reported(run: Shards, reported: set[int]) -> None:
    """Everything that a commit returned for is there."""
    pending = set(run.pending())
    assert all(run.is_done(index) for index in reported if index < FAILED)
    assert not {index - FAILED for index in reported} & pending


@pytest.mark.parametrize("halfway", [False, True])
def test_a_resume_killed_at_any_system_call_resumes(quick, halfway):
    """The repairs themselves are killed: a torn tail, a shard under two names and a lost manifest at once."""
    start = quick / "start"
    write_a_run(start, lambda done, failed: None)
    (start / "completions_000003.jsonl").rename(start / "completions_000003.jsonl.partial")
    with (start / "completions_000003.jsonl.partial").open("ab") as file:
        file.write(b'{"index":9,')
    os.link(start / "completions_000002.jsonl", start / "completions_000002.jsonl.partial")
    for name in ("manifest.json", ".done_indices"):
        (start / name).unlink()
    died, nth = True, 0
    while died:
        nth += 1
        folder = quick / str(nth)
        shutil.copytree(start, folder)
        child = os.fork()
        if child == 0:
            try:
                death = DieAt(nth, halfway=halfway)
                with tapped(death, death.names):
                    open_run(folder, total=TOTAL, rows_per_shard=PER_SHARD)
                os._exit(0)
            finally:
                os._exit(1)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        with open_run(folder, total=TOTAL, rows_per_shard=PER_SHARD) as run:
            assert run.done == 9
            check_consistent(folder, run)
        finish(folder, total=TOTAL, rows_per_shard=PER_SHARD)
        shutil.rmtree(folder)
    assert nth >= (3 if halfway else 10)


def attempt(act: Callable[[], Any], folder: Path, safe: set[int], *, exact: bool) -> Any:
    """Do it until the disk lets it. A refusal leaves the rows as they were.

    With `exact` false, rows that the disk would not even take back may show until the next attempt.
    """
    for _ in range(4):
        try:
            return act()
        except StorageError:
            after = set(read_indices(folder))
            assert after == safe if exact else after >= safe
    raise AssertionError("refused more often than the disk refused")


def run_on_a_bad_disk(folder: Path, *, exact: bool) -> Shards:
    """Write a run, trying again what the disk refuses. Returns it still open."""
    safe: set[int] = set()
    run = attempt(lambda: open_run(folder, total=TOTAL, rows_per_shard=PER_SHARD), folder, safe, exact=exact)
    for batch, failed in (([4, 1], []), ([0, 2], [11]), ([7, 3, 5, 6], [10]), ([9], [])):
        commit = partial(run.commit, rows(batch), [failure(index) for index in failed])
        attempt(commit, folder, safe, exact=exact)
        safe |= set(batch)
    attempt(run.seal, folder, safe, exact=exact)
    attempt(partial(run.commit, rows([8])), folder, safe, exact=exact)
    return run


@pytest.mark.parametrize("times", [1, 3])
def test_a_disk_that_refuses_any_system_call_costs_nothing(quick, times):
    nth, refusal, seen = 0, None, set()
    while refusal is None or refusal.refused:
        nth += 1
        folder = quick / str(nth)
        refusal = RefuseAt(nth, times=times)
        with tapped(refusal):
            run = run_on_a_bad_disk(folder, exact=times == 1)
        run.seal()
        seen |= set(refusal.refused)
        assert (run.done, run.failed, run.seal_error) == (10, 2, None)
        check_consistent(folder, run)
        run.close()
        finish(folder, total=TOTAL, rows_per_shard=PER_SHARD)
        shutil.rmtree(folder)
    assert nth > 60
    assert seen >= {"open", "write", "fsync", "link", "unlink", "replace"}


def test_power_lost_between_any_two_system_calls_loses_nothing_reported(quick):
    live, after = quick / "live", quick / "after"
    recorder, reported = Recorder(live), []

    def report(done: list[int], failed: list[int]) -> None:
        reported.append((len(recorder.log), {*done, *(index + FAILED for index in failed)}))

    with tapped(recorder, recorder.names):
        write_a_run(live, report)
    states = 0
    for length in range(len(recorder.log) + 1):
        safe = set().union(*(told for at, told in reported if at <= length))
        for contents in recorder.crash_states(length):
            write_to(after, contents)
            with open_run(after, total=TOTAL, rows_per_shard=PER_SHARD) as run:
                check_reported(run, safe)
                check_consistent(after, run)
            finish(after, total=TOTAL, rows_per_shard=PER_SHARD)
            shutil.rmtree(after)
            states += 1
    assert states > 200


def test_rows_that_a_resume_calls_done_survive_a_loss_of_power_too(quick):
    """A killed writer had written rows and a failure that it had not flushed; the next one counts them."""
    live, after = quick / "live", quick / "after"
    recorder = Recorder(live)
    with tapped(recorder, recorder.names):
        with open_run(live, total=TOTAL, rows_per_shard=PER_SHARD) as run:
            run.commit(rows([0]), [failure(10)])
        for name, record in (("completions_000000.jsonl.partial", rows([1])[0]), ("failures.jsonl", failure(11))):
            fd = os.open(live / name, os.O_WRONLY | os.O_APPEND)
            os.write(fd, encode_line(record.to_json()))
            os.close(fd)
        with open_run(live, total=TOTAL, rows_per_shard=PER_SHARD) as run:
            assert (run.done, run.failed) == (2, 2)
            told = len(recorder.log)
    for contents in recorder.crash_states(told):
        write_to(after, contents)
        with open_run(after, total=TOTAL, rows_per_shard=PER_SHARD) as run:
            assert (run.done, run.failed) == (2, 2)
        shutil.rmtree(after)


def test_a_shard_whose_name_was_never_flushed_survives_once_a_resume_writes_to_it(quick):
    live, after = quick / "live", quick / "after"
    recorder = Recorder(live)
    with tapped(recorder, recorder.names):
        open_run(live, total=TOTAL, rows_per_shard=PER_SHARD).close()
        os.close(os.open(live / "completions_000000.jsonl.partial", os.O_CREAT | os.O_WRONLY))
        with open_run(live, total=TOTAL, rows_per_shard=PER_SHARD) as run:
            run.commit(rows([0]))
            told = len(recorder.log)
    for contents in recorder.crash_states(told):
        write_to(after, contents)
        with open_run(after, total=TOTAL, rows_per_shard=PER_SHARD) as run:
            assert run.is_done(0)
        shutil.rmtree(after)
