"""A pid alone is nobody; with its start stamp it is one process."""

from __future__ import annotations

import os
import subprocess
import sys

from dfexp.processes import ProcessId


def test_the_current_process_is_alive_and_survives_writing_down() -> None:
    me = ProcessId.current()
    assert me.pid == os.getpid()
    assert me.is_alive()
    assert ProcessId.parse(str(me)) == me
    assert ProcessId.of(me.pid) == me


def test_a_used_again_pid_is_another_process() -> None:
    assert not ProcessId(pid=os.getpid(), started="earlier").is_alive()


def test_a_number_that_no_process_can_have_is_nobody() -> None:
    assert [ProcessId.of(pid) for pid in (-1, 2**40)] == [None, None]
    assert not ProcessId.parse("-1@earlier").is_alive()


def test_a_dead_child_that_nobody_reaped_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # the end of its output: it has exited or is about to
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessId.of(child.pid) is None
    child.wait()
    assert ProcessId.of(child.pid) is None
