"""Processes that do not want to end, and workers that outlive their leader: nothing stays."""

import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dfexp.engines.base import Server, start_log
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


@pytest.mark.parametrize("change", [{"argv": (sys.executable, "a\0b")}, {"env": {"A": "a\0b"}}])
def test_a_character_that_no_program_can_be_given(tmp_path, change):
    server = Server(name="h:1", url="http://h:1", argv=(sys.executable,), log=str(tmp_path / "log"))
    with pytest.raises(EngineStartError, match=r"cannot run .*: embedded null byte"):
        spawn.spawn(replace(server, **change), "abc123", tmp_path)
    assert marked("abc123") == []


def test_only_the_last_start_is_read_from_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"the failure of yesterday\n")
    say = "import sys; sys.stdout.buffer.write(b'first ' + b'.' * 1000 + b' \\xff last')"
    server = Server(name="h:1", url="http://h:1", argv=(sys.executable, "-c", say), log=str(log))
    server = spawn.spawn(server, "abc123", tmp_path)
    wait_for(lambda: b"last" in log.read_bytes())
    assert start_log(server).startswith("first .")
    assert start_log(server).endswith(". \ufffd last")
    assert start_log(server, 7) == "first . \ufffd last"
    assert start_log(replace(server, log=str(tmp_path / "none"))) == ""
    assert start_log(replace(server, log=None)) == ""


def test_who_owns_a_port(tmp_path):
    serve = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0));"
        " print(s.getsockname()[1], flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    server = Server(
        name="h:1", url="http://127.0.0.1:1", log=str(log),
        argv=(sys.executable, "-c", serve),
    )  # fmt: skip
    server = spawn.spawn(server, "abc123", tmp_path)
    try:
        wait_for(lambda: start_log(server).strip().isdigit())
        port = start_log(server).strip()
        assert spawn.owns_port("abc123", replace(server, url=f"http://127.0.0.1:{port}"))
        with socket.create_server(("127.0.0.1", 0)) as other:
            assert not spawn.owns_port("abc123", replace(server, url=f"http://127.0.0.1:{other.getsockname()[1]}"))
    finally:
        spawn.stop("abc123", [server], drain_s=0)
