"""Processes that do not want to end, and workers that outlive their leader: nothing stays."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from dfexp.engines.base import Server
from dfexp.errors import EngineStartError
from dfexp.fleet import spawn
from tests.fleet.conftest import marked, wait_for

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
workers = [subprocess.Popen([sys.executable, "-c", worker], start_new_session=own) for own in (False, True)]
print("leader up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def stubborn(tmp_path: Path):
    """A leader with two workers, one in a session of its own; all ignore SIGTERM."""
    log = tmp_path / "log"
    server = Server(name="127.0.0.1:9", url="http://127.0.0.1:9", argv=(sys.executable, "-c", STUBBORN), log=str(log))
    server = spawn.spawn(server, "abc123", tmp_path)
    try:
        # not "up" with its line end: an unbuffered print writes that apart, and two workers may interleave
        wait_for(lambda: log.read_text().count("up") == 3)
        yield server
    finally:
        spawn.stop("abc123", [server], drain_s=0)


def test_all_processes_of_a_server_are_found(stubborn):
    server = stubborn
    found = spawn.members("abc123", [server])[server.name]
    assert sorted(one.pid for one in found) == sorted(marked("abc123"))
    assert len(found) == 3
    assert spawn.members("another", [server])[server.name] == {server.process}
    assert spawn.rss_bytes(server) > psutil.Process(server.pid).memory_info().rss


def test_none_survives_a_stop(stubborn):
    server = stubborn
    (line,) = spawn.stop("abc123", [server], drain_s=0.2)
    assert "killed" in line
    assert marked("abc123") == []
    wait_for(lambda: not psutil.pid_exists(server.pid))


def test_workers_whose_leader_died_are_stopped_too(stubborn):
    server = stubborn
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(server.pid))
    assert len(marked("abc123")) == 2
    spawn.stop("abc123", [server], drain_s=0)
    assert marked("abc123") == []


def test_a_stop_of_what_is_gone_says_so(stubborn):
    server = stubborn
    spawn.stop("abc123", [server], drain_s=0)
    assert spawn.stop("abc123", [server], drain_s=60) == ["127.0.0.1:9: was not running"]


def test_a_program_that_is_not_there(tmp_path):
    server = Server(name="h:1", url="http://h:1", argv=("/nonexistent/python",), log=str(tmp_path / "log"))
    with pytest.raises(EngineStartError, match="/nonexistent/python"):
        spawn.spawn(server, "abc123", tmp_path)


def test_only_the_last_start_is_read_from_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "dfexp: starting server a at t\nold failure\ndfexp: starting server a at t\nnew \udcff failure\n",
        "utf-8",
        "surrogateescape",
    )
    server = Server(name="a", url="http://a", log=str(log))
    assert "old" not in spawn.last_start(server)
    assert "new" in spawn.last_start(server)
    assert spawn.last_start(Server(name="a", url="http://a", log=str(tmp_path / "none"))) == ""
    assert spawn.last_start(Server(name="a", url="http://a")) == ""
