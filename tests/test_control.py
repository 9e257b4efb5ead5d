"""Commands reach the living process they are meant for, once, and nobody else."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from dfexp import control
from dfexp.errors import ControlError
from dfexp.layout import RunFolder
from dfexp.processes import ProcessId


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "demo")
    made.control.mkdir(parents=True)
    return made


def claim(folder: RunFolder, process: ProcessId) -> None:
    control.write_status(folder, {"state": "running", "pid": process.pid, "process_started": process.started})


def test_a_command_is_taken_once(folder: RunFolder) -> None:
    me = ProcessId.current()
    claim(folder, me)
    control.send(folder, control.STOP, reason="because")
    (command,) = control.take_commands(folder, me)
    assert (command.verb, command.args) == ("stop", {"reason": "because"})
    assert control.take_commands(folder, me) == []


def test_commands_keep_their_order(folder: RunFolder) -> None:
    me = ProcessId.current()
    claim(folder, me)
    for verb in ("stop", "stop_now", "stop"):
        control.send(folder, verb)
    assert [command.verb for command in control.take_commands(folder, me)] == ["stop", "stop_now", "stop"]


def test_a_command_for_a_dead_process_is_never_obeyed_by_the_next(folder: RunFolder) -> None:
    claim(folder, ProcessId.current())
    control.send(folder, control.STOP)
    assert control.take_commands(folder, ProcessId(pid=1, started="other")) == []
    assert control.take_commands(folder, ProcessId.current()) == []


def test_without_a_living_process_a_command_is_an_error(folder: RunFolder) -> None:
    with pytest.raises(ControlError, match="'demo' has no running process"):
        control.send(folder, control.STOP)
    claim(folder, ProcessId(pid=ProcessId.current().pid, started="before this boot"))
    with pytest.raises(ControlError):
        control.send(folder, control.STOP)


def test_a_damaged_status_or_command_is_as_good_as_none(folder: RunFolder) -> None:
    (folder.control / "status.json").write_bytes(b'{"pid"')
    assert control.read_status(folder) is None
    assert control.living_process(folder) is None
    (folder.control / "1.command.json").write_bytes(b"nonsense")
    assert control.take_commands(folder, ProcessId.current()) == []


def test_a_status_says_for_how_long_none_came_since(folder: RunFolder) -> None:
    control.write_status(folder, {"state": "running", "at": time.time() - 60.0})
    assert 60.0 <= (control.read_status(folder) or {})["silent_s"] < 90.0
    (folder.control / "status.json").write_bytes(b'{"at": "noon"}')
    assert control.read_status(folder) is None


def test_a_foreign_folder_among_the_commands_disturbs_nobody(folder: RunFolder) -> None:
    (folder.control / "a.command.json").mkdir(parents=True)
    assert control.take_commands(folder, ProcessId.current()) == []
    assert (folder.control / "a.command.json").is_dir()


def test_a_control_folder_that_was_tidied_away_comes_back(folder: RunFolder) -> None:
    shutil.rmtree(folder.control, ignore_errors=True)
    control.write_status(folder, {"state": "running"})
    assert control.read_status(folder) == {"state": "running"}
