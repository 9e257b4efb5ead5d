"""What a person watches, and that an interrupt always becomes a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from dfexp import control, display
from dfexp.errors import RunError, RunStopped
from dfexp.layout import RunFolder
from tests.finished_run import status

# A process that behaves like a generating one: reports, obeys, and ends as the command says.
RUN = """
import sys, time
from pathlib import Path
from dfexp import control
from dfexp.layout import RunFolder
from dfexp.processes import ProcessId
from tests.finished_run import status
folder, plan = RunFolder(Path(sys.argv[1])), sys.argv[2]
me = ProcessId.current()
folder.control.mkdir(parents=True, exist_ok=True)
def report(state, **changes):
    control.write_status(folder, status(state, pid=me.pid, process_started=me.started, **changes))
report("running")
stops = 0
while True:
    if plan == "ends" and (folder.path / "go").exists():
        report("ended", done=98, failed=2)
        break
    for command in control.take_commands(folder, me):
        with (folder.path / "verbs").open("a") as file:
            file.write(command.verb + "\\n")
        stops += 1
        report("draining", reason=command.args.get("reason"))
    if stops == (2 if plan == "needs two stops" else 1):
        report("stopped", reason="the notebook was interrupted", done=60)
        break
    time.sleep(0.02)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "outputs" / "demo")


def begin(folder: RunFolder, plan: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", RUN, str(folder.path), plan])
    assert control.wait_until(lambda: control.living_process(folder) is not None, 20)
    return process


def watch(folder: RunFolder) -> dict[str, Any]:
    with display.interrupts() as seen:
        return display.watch(folder, seen, interval_s=0.05)


def interrupt_when(condition: str, folder: RunFolder) -> subprocess.Popen[bytes]:
    """Interrupts this process once the file `condition` in the run's folder exists, from outside, as a kernel is."""
    script = (
        "import os, signal, sys, time, pathlib\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "while not path.exists(): time.sleep(0.01)\n"
        "os.kill(int(sys.argv[2]), signal.SIGINT)\n"
    )
    return subprocess.Popen([sys.executable, "-c", script, str(folder.path / condition), str(os.getpid())])


def interrupt_myself_and_wait() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    control.wait_until(lambda: False, 10)


def test_watching_to_the_end_returns_the_final_status(folder: RunFolder) -> None:
    process = begin(folder, "ends")
    (folder.path / "go").touch()
    assert watch(folder)["done"] == 98
    assert process.wait(10) == 0


def test_an_interrupt_stops_the_run_and_says_how_to_resume(folder: RunFolder) -> None:
    process = begin(folder, "stops")
    before = signal.getsignal(signal.SIGINT)
    helper = interrupt_when("control", folder)
    with pytest.raises(
        RunStopped, match=r"60 of 100 done, 2 failed; 38 left.*`dfexp resume demo`.*`dfexp report demo`"
    ):
        watch(folder)
    assert (folder.path / "verbs").read_text().split() == [control.STOP]
    assert signal.getsignal(signal.SIGINT) is before
    assert (process.wait(10), helper.wait(10)) == (0, 0)


def test_a_second_interrupt_does_not_wait_for_answers(folder: RunFolder) -> None:
    process = begin(folder, "needs two stops")
    helpers = [interrupt_when("control", folder), interrupt_when("verbs", folder)]
    with pytest.raises(RunStopped):
        watch(folder)
    assert (folder.path / "verbs").read_text().split() == [control.STOP, control.STOP_NOW]
    assert [each.wait(10) for each in (process, *helpers)] == [0, 0, 0]


def test_an_interrupt_while_the_run_starts_is_passed_on(folder: RunFolder) -> None:
    with display.interrupts() as seen:
        os.kill(os.getpid(), signal.SIGINT)
        assert control.wait_until(lambda: len(seen) == 1, 10)
        process = begin(folder, "stops")
        with pytest.raises(RunStopped):
            display.watch(folder, seen, interval_s=0.05)
    assert (folder.path / "verbs").read_text().split() == [control.STOP]
    assert process.wait(10) == 0


def test_the_third_interrupt_leaves(folder: RunFolder) -> None:
    with display.interrupts() as seen:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert control.wait_until(lambda: len(seen) == 2, 10)
        with pytest.raises(KeyboardInterrupt, match="Run the cell again"):
            interrupt_myself_and_wait()


def test_a_killed_run_is_reported_at_once(folder: RunFolder) -> None:
    process = begin(folder, "ends")
    process.kill()
    process.wait()
    began = time.monotonic()
    with pytest.raises(RunError, match=r"gone without having stopped.*40 of 100 done.*dfexp resume"):
        watch(folder)
    assert time.monotonic() - began < 5


def test_a_failed_run_gives_its_reason_and_its_log(folder: RunFolder) -> None:
    folder.control.mkdir(parents=True)
    control.write_status(folder, status("failed", reason="every server is quarantined"))
    with pytest.raises(RunError, match=r"every server is quarantined.*generate.log"):
        watch(folder)


def test_one_display_is_updated_in_place(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = InteractiveShell.instance()
    try:
        with capture_output() as captured:
            process = begin(folder, "ends")
            control.wait_until(lambda: (folder.path / "go").touch() is None, 1)
            watch(folder)
        process.wait(10)
    finally:
        shell.clear_instance()
    first, *later = captured.outputs
    assert not first.update
    assert later
    assert {output.update for output in later} == {True}
    assert {output.transient["display_id"] for output in captured.outputs} == {first.transient["display_id"]}


def test_a_conclusion_tells_starts_apart_and_how_to_stop_the_fleet() -> None:
    told = display.conclusion(status("ended", done=98), "demo")
    assert "98 of 100 rows are done" in told
    assert "10 of them before the last start" in told
    assert "made 88 rows in 30 s" in told
    assert "dfexp fleet down demo" in told
    assert "real time" not in told
    assert "S3" not in told
    assert "5 object(s) are not on S3" in display.conclusion(status("ended", not_uploaded=5), "demo")
    assert "30 s of real time, not" in display.conclusion(status("ended", engine="simulated"), "demo")
