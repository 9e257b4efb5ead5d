"""Stops that nobody chose: preemption, a killed command, an interrupted notebook. Each leaves a run that goes on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from dfexp import control, fleet, generate
from dfexp.cli.common import EXIT_STOPPED
from dfexp.generate.start import fleet_folder
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from tests.chaos.simulated import Ledger, spec_of
from tests.generate.conftest import Project
from tests.scripted_server import Hang, ScriptedServer, chat

ROOT = Path(__file__).parents[2]
PROMPTS, LONG = 120, 1500


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A project folder; at the end no process works in it."""
    (tmp_path / "params").mkdir()
    yield tmp_path
    gone = control.wait_until(
        lambda: not processes_of(tmp_path), 20.0
    )  # what simulates servers ends after the last one
    left = [" ".join(process.cmdline()) for process in processes_of(tmp_path)]
    for process in processes_of(tmp_path):
        process.kill()
    assert gone, left


def processes_of(place: Path) -> list[psutil.Process]:
    """Those that belong to the folder."""
    return [process for process in psutil.process_iter() if is_of(process, place)]


def is_of(process: psutil.Process, place: Path) -> bool:
    """Whether a living process names the folder or works in it."""
    try:
        is_alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
        return is_alive and (str(place) in " ".join(process.cmdline()) or process.cwd().startswith(str(place)))
    except (psutil.Error, OSError):
        return False


def written(place: Path, prompts: int = PROMPTS, **generation: object) -> tuple[RunSpec, RunFolder]:
    """params/run.yaml, a run on simulated servers without faults, but for prompts that they refuse."""
    spec = spec_of(
        place, "r", prompts, faults=[{"kind": "status", "status": 400, "contains": "impossible"}], **generation
    )
    tree = spec.model_dump(mode="json", exclude_unset=True)
    (place / "params" / "run.yaml").write_text(yaml.safe_dump(tree))
    return spec, generate.run_folder(spec, place)


async def test_preempted_in_the_middle_of_a_drain_it_keeps_every_answer_that_came(project: Project) -> None:
    """SIGTERM, as a spot machine gets it, with requests that will not end in the seconds left; then SIGKILL."""
    hangs = True
    async with ScriptedServer(lambda body, n: Hang() if hangs and n >= 30 else chat()) as server:
        spec = project.spec([server.url], 100, drain_s=600.0)
        folder = await project.start(spec)
        await project.until(folder, lambda status: status.get("done", 0) >= 26)
        process = control.living_process(folder)
        assert process is not None
        os.kill(process.pid, signal.SIGTERM)
        await project.until(folder, lambda status: status.get("state") == "draining")
        reported = (control.read_status(folder) or {})["done"]
        os.kill(process.pid, signal.SIGKILL)
        assert await asyncio.to_thread(control.wait_until, lambda: not process.is_alive(), 10.0)
        kept = project.counts(folder)
        assert reported <= len(kept) < 100
        hangs = False
        status = await project.run(spec)
    assert (status["state"], status["done"], status["done_before"]) == ("ended", 100, len(kept))
    assert project.counts(folder) == Counter(range(100))


async def test_preempted_with_answers_on_their_way_it_seals_them_within_the_time_that_is_left(project: Project) -> None:
    async with ScriptedServer(lambda body, n: chat(), delay_s=1.0) as server:
        folder = await project.start(project.spec([server.url], 100, drain_s=25.0))
        await project.until(folder, lambda status: status.get("done", 0) >= 4)
        process = control.living_process(folder)
        assert process is not None
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        status = await project.end(folder, 30.0)
    assert time.monotonic() - began < 30
    assert status["state"] == "stopped"
    assert status["done"] == len(project.counts(folder))
    assert not list(folder.completions.glob("*.partial"))


def signalled(place: Path, folder: RunFolder, number: int) -> str:
    """What a papermill that gets a signal in mid-run says on stderr; it ends with an error."""
    with papermill(place) as command:
        assert control.wait_until(lambda: done(folder) >= 5, 90)
        command.send_signal(number)
        _, err = command.communicate(timeout=90)
    assert command.returncode not in (0, None), err
    return err


@pytest.mark.slow
def test_papermill_that_is_interrupted_ends_with_an_error_that_says_how_to_resume(place: Path) -> None:
    """And a kernel that dies under it; then the same command finishes the run."""
    spec, folder = written(place, LONG, progress_interval_s=1.0)
    the_fleet, _ = fleet.up(spec, place)
    try:
        the_fleet.wait_ready(60.0)
        err = signalled(place, folder, signal.SIGINT)
        kept = (place / "out.ipynb").read_text()
        assert "RunStopped" in kept
        for said in (err, kept):  # papermill itself says no more than that it was aborted
            assert "To go on: `dfexp resume r`" in said
        assert control.wait_until(lambda: control.living_process(folder) is None, 60)
        ledger = Ledger(folder)
        ledger.check()
        before = len(ledger.done)
        assert 5 <= before < LONG
        with papermill(place) as command:
            assert control.wait_until(lambda: control.living_process(folder) is not None, 90)
            (kernel,) = [
                child for child in psutil.Process(command.pid).children(recursive=True)
                if "ipykernel" in " ".join(child.cmdline())
            ]  # fmt: skip
            kernel.kill()
            _, err = command.communicate(timeout=90)
        assert command.returncode != 0, err
        assert control.wait_until(lambda: control.living_process(folder) is None, 60)
        ledger.check()
        with papermill(place) as command:
            _, err = command.communicate(timeout=180)
        assert command.returncode == 0, err[-3000:]
        ledger.check_end(LONG)
    finally:
        fleet.attach(fleet_folder(spec, place)).down()


@pytest.mark.slow
async def test_papermill_that_is_interrupted_says_how_to_go_on_though_answers_take_longer_than_it_waits(
    project: Project,
) -> None:
    """It gives its kernel five seconds; the run drains for as long as it may."""
    place = project.root
    async with ScriptedServer(lambda body, n: Hang() if n >= 20 else chat()) as server:
        spec = project.spec([server.url], 50, drain_s=600.0)
        tree = spec.model_dump(mode="json", exclude_unset=True)
        (place / "params" / "run.yaml").write_text(yaml.safe_dump(tree))
        folder = generate.run_folder(spec, place)
        with papermill(place) as command:
            assert await asyncio.to_thread(control.wait_until, lambda: done(folder) >= 5, 90)
            command.send_signal(signal.SIGINT)
            _, err = await asyncio.to_thread(command.communicate, timeout=90)
        assert command.returncode not in (0, None), err
        assert "run 'r' drains and stops" in err
        assert "To go on: `dfexp resume r`, once it has stopped." in err
        assert (control.read_status(folder) or {})["state"] == "draining"
        generate.stop(folder, reason="the test is over", now=True)
        assert (await project.end(folder))["state"] == "stopped"


@pytest.mark.slow
def test_papermill_that_is_terminated_says_how_to_resume_and_its_run_stops(place: Path) -> None:
    spec, folder = written(place, LONG, progress_interval_s=1.0)
    the_fleet, _ = fleet.up(spec, place)
    try:
        the_fleet.wait_ready(60.0)
        err = signalled(place, folder, signal.SIGTERM)
        assert "to go on: `dfexp resume r`" in err.lower()
        assert "dfexp fleet down r" in err
        assert control.wait_until(lambda: control.living_process(folder) is None, 60)
        (ledger := Ledger(folder)).check()
        assert 5 <= len(ledger.done) < LONG
    finally:
        fleet.attach(fleet_folder(spec, place)).down(force=True)


def papermill(place: Path) -> subprocess.Popen[str]:
    """03_generate as papermill runs it, with a kernel that does not know that this is a test."""
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    argv = [sys.executable, "-m", "papermill", str(ROOT / "notebooks" / "03_generate.ipynb"), "out.ipynb"]
    argv += ["--no-progress-bar", "-p", "params", "params/run.yaml"]
    return subprocess.Popen(argv, cwd=place, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def done(folder: RunFolder) -> int:
    return int((control.read_status(folder) or {}).get("done", 0))


@pytest.mark.slow
def test_commands_cut_short_and_killed_at_any_instant_of_a_launch_leave_what_the_next_one_finishes(place: Path) -> None:
    """No server and no process is forgotten, and no command ends with 0 while rows are unaccounted for.

    The last one ends with all rows and nothing alive; tests of the commands have the other ends.
    """
    _, folder = written(place)
    dfexp = [sys.executable, "-m", "dfexp.cli"]

    def ended(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*dfexp, *argv], cwd=place, capture_output=True, text=True, timeout=240, check=False)

    cut = ended("pilot", "params/run.yaml", "--rows", "30", "--set", "limits.rows=5")
    assert (cut.returncode, "25 rows of the sample are missing" in cut.stderr) == (EXIT_STOPPED, True), cut.stderr
    command, draw = [*dfexp, "run", "params/run.yaml"], random.Random(3)
    for _ in range(3):
        with subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                process.wait(draw.uniform(0.5, 9.0))
            except subprocess.TimeoutExpired:
                process.kill()
        assert control.wait_until(lambda: control.living_process(folder) is None, 90), "nobody watches it any more"
    last = ended("resume", "r", "--set", "limits.rows=null")
    assert last.returncode == 0, last.stderr
    assert f"{PROMPTS - 3} succeeded + 3 failed = {PROMPTS} of {PROMPTS} asked" in last.stdout
    Ledger(folder).check_end(PROMPTS)
