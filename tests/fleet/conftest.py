"""Real llama.cpp servers, as small as they can be; what a test starts is gone when it ends."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dfexp.fleet import Fleet, attach, up
from dfexp.params import RunSpec, validate

TINY = {"engine": "llamacpp", "servers": 1, "max_running_requests": 1, "context_length": 256}
READY_S = 60.0


def spec_of(name: str, **fleet: object) -> RunSpec:
    """Parameters of a run whose fleet is as small as can be, but for what is given."""
    group = fleet if fleet.get("engine") else {**TINY, **fleet}
    return validate({"run": name, "fleet": group, "prompts": {"path": "none.jsonl"}}, "test")


def marked(fleet_identity: str) -> list[int]:
    """Pids of all processes that carry a fleet's mark, found without the code under test."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get("DFEXP_SERVER", "")
            if mark.startswith(fleet_identity) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def start_python(code: str, *arguments: object, **options: object) -> subprocess.Popen:
    """Another Python process that runs `code`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Poll until `condition` holds; the test fails when it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers of four slots, ready. Tests that share it leave it ready."""
    spec = spec_of("two", servers=2, max_running_requests=4, context_length=2048)
    fleet, started = up(spec, tmp_path_factory.mktemp("two"))
    assert started
    fleet.wait_ready(READY_S)
    yield fleet
    fleet.down(drain_s=0)
    assert marked(fleet.identity) == []


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Launches fleets under `tmp_path` and stops them at the end."""
    launched: list[Fleet] = []

    def make(name: str = "one", *, wait: bool = True, **group: object) -> Fleet:
        fleet, started = up(spec_of(name, **group), tmp_path)
        assert started
        launched.append(fleet)
        if wait:
            fleet.wait_ready(READY_S)
        return fleet

    yield make
    for folder in {fleet.folder.path: fleet.folder for fleet in launched}.values():
        if folder.fleet_json.exists():
            attach(folder).down(drain_s=0, force=True)
    assert [marked(fleet.identity) for fleet in launched] == [[]] * len(launched)
