"""The engine of simulated servers where none runs: what it would start, and what it tells them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dfexp.engines.base import Server, engine_for
from dfexp.engines.sglang_flags import argv_for
from dfexp.engines.simulated import SimulatedEngine
from dfexp.errors import EngineStartError, FleetError
from dfexp.layout import FleetFolder
from dfexp.params import SglangFleet, SimulatedFleet

PLAN: dict[str, Any] = {"gpu": "rtx-pro-6000", "prompt": {"tokens": 150}, "completion": {"tokens": 900}}
FLAGS: dict[str, Any] = {"mem_fraction_static": 0.9, "mamba_strategy": "no_buffer"}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FAULT: dict[str, Any] = {"kind": "crash", "server": 1, "at_s": 60}


def engine(root: Path = Path("/nowhere"), **keys: Any) -> SimulatedEngine:
    tree = {"engine": "simulated", "model": "Qwen/Qwen3.6-27B", "servers": 2, "flags": FLAGS, "plan": PLAN, **keys}
    found = engine_for(SimulatedFleet.model_validate(tree), root)
    assert isinstance(found, SimulatedEngine)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    found = FleetFolder(tmp_path / "fleet")
    found.logs.mkdir(parents=True)
    return found


def told(server: Server) -> dict[str, Any]:
    assert server.argv is not None
    found: dict[str, Any] = json.loads(Path(server.argv[server.argv.index("--simulation") + 1]).read_text())
    return found


def test_each_server_is_a_thin_process_with_two_private_files(folder: FleetFolder) -> None:
    first, second = engine(first_port=20001, faults=[FAULT], speed=50).plan(folder, "s3cret")
    argv = second.argv or ()
    assert argv[:3] == (sys.executable, "-S", "-P")
    assert Path(argv[3]).parts[-3:] == ("simulated", "server", "attach.py")
    assert argv[4:13] == (
        *("--model-path", "Qwen/Qwen3.6-27B", "--served-model-name", "Qwen3.6-27B"),
        *("--host", "127.0.0.1", "--port", "20002", "--enable-metrics"),
    )
    assert argv[-len(argv_for(FLAGS, "0.5.12", {})) :] == tuple(argv_for(FLAGS, "0.5.12", {}))
    assert "s3cret" not in " ".join((*argv, *second.env.values()))
    assert yaml.safe_load(Path(argv[argv.index("--config") + 1]).read_text()) == {"api-key": "s3cret"}
    assert {path.stat().st_mode & 0o777 for path in folder.path.glob("server-*")} == {0o600}
    assert (first.gpus, first.env, first.version, first.url) == ((), {}, "0.5.12", "http://127.0.0.1:20001")
    said = told(second)
    assert (said["version"], said["index"], said["servers"], said["speed"]) == ("0.5.12", 1, 2, 50.0)
    assert [fault["kind"] for fault in said["faults"]] == ["crash"]
    assert (said["plan"]["model"], said["plan"]["flags"]) == ("Qwen3.6-27B", FLAGS)


@pytest.mark.parametrize("is_elsewhere", [False, True])  # as where a change is tried before it is made
def test_a_server_that_is_planned_again_keeps_its_place_and_port(
    folder: FleetFolder, tmp_path: Path, is_elsewhere: bool
) -> None:
    servers = engine().plan(folder, "k")
    there = FleetFolder(tmp_path) if is_elsewhere else folder
    again = engine(flags={**FLAGS, "max_running_requests": 8}).plan(there, "k", at=servers[1:])
    assert [server.name for server in again] == [servers[1].name]
    assert told(again[0])["index"] == 1
    assert told(again[0])["plan"]["flags"] == {**FLAGS, "max_running_requests": 8}


def test_flags_are_spelled_for_the_version_that_is_simulated(folder: FleetFolder) -> None:
    newest = {**PLAN, "sglang_version": "0.5.23"}
    (server, _) = engine(plan=newest).plan(folder, "k")
    assert server.argv is not None
    assert {"--mamba-radix-cache-strategy", "--disable-overlap-schedule"} <= set(server.argv)
    with pytest.raises(FleetError, match=r"fleet\.flags\.max_running_request = 8: sglang 0\.5\.12 has no"):
        engine(flags={"max_running_request": 8}).plan(folder, "k")
    with pytest.raises(FleetError, match=r"flags of sglang 0\.5\.14 are not known here"):
        engine(plan={**PLAN, "sglang_version": "0.5.14"}).plan(folder, "k")


def test_without_a_plan_it_says_which_keys_are_missing(folder: FleetFolder) -> None:
    with pytest.raises(EngineStartError, match=r"need fleet\.plan: at least its keys gpu, prompt and completion"):
        engine(plan=None).plan(folder, "k")
    assert not list(folder.path.glob("server-*"))


def test_the_folder_of_a_model_is_told_in_full(folder: FleetFolder, tmp_path: Path) -> None:
    (tmp_path / "models" / "m").mkdir(parents=True)
    (server, _) = engine(tmp_path, model="models/m").plan(folder, "k")
    assert told(server)["plan"]["model"] == str(tmp_path / "models" / "m")
    (server, _) = engine(tmp_path, plan={**PLAN, "model": "models/m"}).plan(folder, "k")
    assert told(server)["plan"]["model"] == str(tmp_path / "models" / "m")


def test_what_changes_the_answers_is_another_model_and_never_the_real_one() -> None:
    def seen(**keys: Any) -> str:
        return engine(**keys).model_fingerprint("http://a", "")

    assert seen().startswith("simulated Qwen3.6-27B ")
    assert seen(flags={}, speed=2, load_s=1, servers=4, plan={**PLAN, "gpu": "h100"}) == seen()
    longer = {**PLAN, "completion": {"median": 900, "p95": 2000}}
    assert len({seen(), seen(seed=1), seen(thinking=False), seen(plan=longer)}) == 4


def test_the_cause_of_a_failed_start_is_told_as_of_sglang_with_the_log_of_what_simulates() -> None:
    real = engine_for(SglangFleet.model_validate({"engine": "sglang", "model": "m"})).diagnose_start(OOM)
    assert engine().diagnose_start(OOM).startswith(real)
    assert "logs/simulator.log" in engine().diagnose_start(OOM)
