"""What a run begins with: its prompts and run.json, whatever becomes of the machine meanwhile."""

from __future__ import annotations

import fcntl
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any

import pytest

from dfexp import generate
from dfexp.errors import PromptsError
from dfexp.generate.start import _one_at_a_time
from dfexp.params import RunSpec
from tests.generate.conftest import Project
from tests.shards.os_tap import tapped
from tests.shards.power import Recorder, write_to

PROMPTS = 1200  # more than are written at once


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def begun(project: Project) -> tuple[RunSpec, Recorder]:
    """A run that was prepared in `live`, and what the disk saw of it."""
    spec = project.spec(["http://127.0.0.1:1"], PROMPTS)
    shutil.copytree(project.root / "params", project.root / "live" / "params")
    recorder = Recorder(generate.run_folder(spec, project.root / "live").path)
    with tapped(recorder, recorder.names):
        folder = generate.prepare(spec, project.root / "live")
    assert [step for step, *_ in recorder.log].count("replace") == 3  # prompts, their report, run.json
    assert {path.name for path in folder.path.iterdir()} == {
        "prompts.jsonl",
        "prompts_report.json",
        "run.json",
        ".start.lock",
    }
    return spec, recorder


def recorded(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "run.json").read_text())
    return {key: found[key] for key in ("run", "spec", "prompts", "configs")}


def test_power_lost_while_prompts_are_frozen_leaves_what_the_next_start_completes(project: Project) -> None:
    """At any instant, whatever of the unflushed the disk kept: no prompt is lost or torn, and no file is left."""
    spec, recorder = begun(project)
    live = generate.run_folder(spec, project.root / "live").path
    states = 0
    for length in range(len(recorder.log) + 1):
        for contents in recorder.crash_states(length):
            after = project.root / "after"
            (after / "outputs").mkdir(parents=True)
            shutil.copytree(project.root / "params", after / "params")
            write_to(after / "outputs" / "r", contents)
            if "run.json" in contents:  # a run is begun once it is there, and then its prompts are
                assert contents["prompts.jsonl"] == (live / "prompts.jsonl").read_bytes()
            folder = generate.prepare(spec, after)
            assert folder.prompts.read_bytes() == (live / "prompts.jsonl").read_bytes()
            assert recorded(folder.path) == recorded(live)
            left = {path.name for path in folder.path.iterdir()} - {".start.lock"}
            assert {name for name in left if "prompts" in name} == {"prompts.jsonl", "prompts_report.json"}
            shutil.rmtree(after)
            states += 1
    assert states > 20


def test_a_run_that_is_refused_leaves_no_folder_that_it_made(project: Project) -> None:
    spec = project.spec(["http://127.0.0.1:1"], PROMPTS)
    folder, prompts = generate.run_folder(spec, project.root).path, project.root / "params" / "prompts.jsonl"
    kept = prompts.read_text()
    prompts.unlink()
    for is_there in (False, True):
        with pytest.raises(PromptsError):
            generate.prepare(spec, project.root)
        assert folder.exists() == is_there
        folder.mkdir(exist_ok=True)
    prompts.write_text(kept)
    assert generate.prepare(spec, project.root).run_json.exists()


def test_a_start_that_waited_for_a_refused_one_still_keeps_others_waiting(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock that it waits for is removed with the folder; the next one would lock another file, and go ahead."""
    folder = generate.run_folder(project.spec(["http://127.0.0.1:1"]), project.root)
    asked, inside, leave = Queue[None](), Queue[None](), Event()

    def flock(file: Any, how: int) -> None:
        asked.put(None)
        real(file, how)

    def hold() -> None:
        with _one_at_a_time(folder):
            inside.put(None)
            assert leave.wait(30.0)

    def refused() -> None:
        with _one_at_a_time(folder):
            asked.get(timeout=30.0)
            held.append(pool.submit(hold))
            asked.get(timeout=30.0)  # it has opened the file
            raise PromptsError("refused")

    real, held = fcntl.flock, list[Future[None]]()
    monkeypatch.setattr("fcntl.flock", flock)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(PromptsError):
            refused()
        inside.get(timeout=30.0)
        with (folder.path / ".start.lock").open("a") as file, pytest.raises(BlockingIOError):
            real(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leave.set()
        held[0].result(30.0)


def test_a_refused_start_whose_folder_another_one_uses_tells_why_it_was_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, unlink = generate.run_folder(project.spec(["http://127.0.0.1:1"]), project.root), Path.unlink

    def unlink_and_come(path: Path, **options: Any) -> None:
        unlink(path, **options)
        path.touch()

    monkeypatch.setattr(Path, "unlink", unlink_and_come)
    with pytest.raises(PromptsError, match="refused"), _one_at_a_time(folder):
        raise PromptsError("refused")
    assert folder.path.exists()


def test_a_run_that_an_older_version_began_goes_on(project: Project) -> None:
    """Its run.json lacks the keys of the group prompts that came later."""
    spec = project.spec(["http://127.0.0.1:1"], PROMPTS)
    folder = generate.prepare(spec, project.root)
    recorded = json.loads(folder.run_json.read_text())
    recorded["spec"]["prompts"] = {
        key: value for key, value in recorded["spec"]["prompts"].items() if key in ("path", "column", "limit")
    }
    del recorded["prompts"]["shared_prefix_share"]
    folder.run_json.write_text(json.dumps(recorded))
    assert generate.prepare(spec, project.root).path == folder.path
