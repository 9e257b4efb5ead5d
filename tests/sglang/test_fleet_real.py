"""Two real servers as a fleet: launched, fed, killed, frozen, changed and stopped; nothing is lost, nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dfexp import control, generate, params
from dfexp.engines import get_text
from dfexp.errors import AccessDenied, FleetError
from dfexp.fleet import Fleet, attach, up
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from dfexp.shards import read_rows
from tests.fleet.conftest import marked

from .support import LIGHT, OnCpu

READY_S, RUN_S = 600.0, 900.0
LONG = 2000  # prompts of a run that is still going on when two servers have been started again
DFEXP = [sys.executable, "-m", "dfexp.cli"]
# 8 requests are asked for; 20 state slots, of which each takes three, allow six.
SIX = {"mamba_strategy": "no_buffer", "max_running_requests": 8, "max_mamba_cache_size": 20}
FOUR = {**SIX, "max_running_requests": 4}


def tree(sglang: OnCpu, run: str, prompts: int = 60, **fleet: Any) -> dict[str, Any]:
    """The parameters of a run on servers of one version."""
    flags = {**LIGHT, **SIX, **fleet.pop("flags", {})}
    group = {
        "engine": "sglang", "name": "real", "model": str(sglang.hybrid), "python": str(sglang.python), "device": "cpu",
        "servers": 2, "env": dict(sglang.env), "start_timeout_s": READY_S, "flags": flags, **fleet,
    }  # fmt: skip
    generation = {"max_tokens": 48, "temperature": 1.0, "rows_per_shard": 25, "stall_s": 20.0, "max_attempts": 10}
    source = {"path": "prompts.jsonl", "limit": prompts}
    return {"run": run, "fleet": group, "prompts": source, "generation": generation}


def spec_of(sglang: OnCpu, run: str, prompts: int = 60, **fleet: Any) -> RunSpec:
    return params.validate(tree(sglang, run, prompts, **fleet), "test")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    (root / "params").mkdir()
    rows = (json.dumps({"prompt": f"tell me a story about {number} servers"}) + "\n" for number in range(LONG))
    (root / "prompts.jsonl").write_text("".join(rows))
    return root


@pytest.fixture(scope="module")
def fleet(sglang: OnCpu, project: Path) -> Iterator[Fleet]:
    """Two servers, by one command. Tests that share it leave it with the settings of SIX."""
    path = project / "params" / "real.yaml"
    path.write_text(json.dumps(tree(sglang, "real")))  # JSON is YAML
    started = time.monotonic()
    done = subprocess.run([*DFEXP, "fleet", "up", str(path)], cwd=project, capture_output=True, text=True)
    print(f"{sglang.version}: two servers to the first token in {time.monotonic() - started:.0f} s\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ready") == 2
    fleet = attach(generate.fleet_folder(spec_of(sglang, "real"), project))
    yield fleet
    everything = marked(fleet.identity)
    assert len(everything) >= 6  # each is a leader, a scheduler and a detokenizer
    down = subprocess.run([*DFEXP, "fleet", "down", "real"], cwd=project, capture_output=True, text=True)
    print(down.stdout)
    assert down.returncode == 0, down.stderr
    assert down.stdout.count("stopped") == 2  # by SIGTERM, none had to be killed
    assert not any(map(lives, everything))
    assert not marked(fleet.identity)
    assert not list(fleet.folder.path.glob("server-*"))
    assert not fleet.folder.key.exists()


def lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def start(sglang: OnCpu, project: Path, run: str, prompts: int = 60) -> RunFolder:
    """A run over the fleet as it is, in a process of its own."""
    spec = spec_of(sglang, run, prompts)
    the_fleet, launched = up(spec, project)
    the_fleet.wait_ready(READY_S)
    assert not launched
    return generate.start(spec, project)


def until(folder: RunFolder, done: int) -> None:
    """Wait until so many rows are done."""
    assert control.wait_until(lambda: (control.read_status(folder) or {}).get("done", 0) >= done, RUN_S)


def ended(folder: RunFolder, prompts: int) -> dict[str, Any]:
    """Wait for the end of a run. Each index exactly once, and nothing but good rows."""
    assert control.wait_until(lambda: control.living_process(folder) is None, RUN_S), control.read_status(folder)
    status = control.read_status(folder)
    assert status is not None
    assert (status["state"], status["failed"]) == ("ended", 0), status
    counts = Counter(row["index"] for row in read_rows(folder.completions))
    assert counts == Counter(range(prompts))
    return status


def events(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    found = map(json.loads, folder.events.read_text().splitlines())
    return [event for event in found if event["event"] == name]


@pytest.mark.slow
def test_what_real_servers_say_of_themselves(fleet: Fleet, sglang: OnCpu) -> None:
    for status in fleet.status():
        assert status.limits is not None
        said = status.limits
        assert (said.max_running_requests, said.max_mamba_cache_size, said.max_total_num_tokens) == (6, 20, 20_000)
        assert (said.context_length, said.model, said.engine_version) == (8192, "hybrid", f"sglang {sglang.version}")
    server = fleet.servers[0]
    page = json.loads(get_text(f"{server.url}/server_info", key=fleet.key))
    assert page["internal_states"][0]["effective_max_running_requests_per_dp"] == 6  # and says what the log says
    count = fleet.progress(server.name)
    assert count is not None
    assert count.computed > count.decoded > 0


@pytest.mark.slow
def test_the_key_is_needed_and_is_seen_nowhere(fleet: Fleet) -> None:
    server, key = fleet.servers[0], fleet.key
    with pytest.raises(AccessDenied):
        get_text(f"{server.url}/v1/models")
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not any(key in command for command in commands)
    assert key not in fleet.folder.fleet_json.read_text()
    private = [Path(server.log), fleet.folder.key, *fleet.folder.path.glob("server-*.yaml")]
    assert {oct(path.stat().st_mode & 0o777) for path in private} == {"0o600"}
    assert key in Path(server.log).read_text()  # SGLang prints it: what is shown of a log is scrubbed
    assert key not in fleet.start_failure(server.name)
    for link in psutil.Process(server.pid).net_connections("tcp"):
        assert link.laddr.ip == "127.0.0.1"


@pytest.mark.slow
def test_a_killed_server_comes_back_and_nothing_is_lost(fleet: Fleet, sglang: OnCpu, project: Path) -> None:
    folder = start(sglang, project, "killed")
    until(folder, 5)
    os.kill(fleet.server(fleet.servers[0].name).pid, signal.SIGKILL)
    status = ended(folder, 60)
    assert events(folder, "server_down")[0]["server"] == fleet.servers[0].name
    assert sum(server["restarts"] for server in status["servers"]) >= 1
    assert control.wait_until(lambda: all(one.state == "ready" for one in fleet.status()), READY_S)


@pytest.mark.full
@pytest.mark.slow
def test_a_scheduler_that_dies_takes_its_server_along_and_it_comes_back(
    fleet: Fleet, sglang: OnCpu, project: Path
) -> None:
    folder = start(sglang, project, "scheduler")
    until(folder, 5)
    leader = psutil.Process(fleet.server(fleet.servers[1].name).pid)
    scheduler = next(child for child in leader.children() if "scheduler" in " ".join(child.cmdline()))
    scheduler.kill()
    ended(folder, 60)
    assert [event["server"] for event in events(folder, "server_down")] == [fleet.servers[1].name]
    assert control.wait_until(lambda: all(one.state == "ready" for one in fleet.status()), READY_S)


@pytest.mark.full
@pytest.mark.slow
def test_a_frozen_server_is_found_and_replaced(fleet: Fleet, sglang: OnCpu, project: Path) -> None:
    folder = start(sglang, project, "frozen", 100)
    until(folder, 5)
    name = fleet.servers[0].name
    frozen = [psutil.Process(fleet.server(name).pid), *psutil.Process(fleet.server(name).pid).children(recursive=True)]
    for process in frozen:
        process.suspend()
    ended(folder, 100)
    assert [event["server"] for event in events(folder, "server_down")] == [name]
    assert not any(process.is_running() and process.status() == psutil.STATUS_STOPPED for process in frozen)
    assert control.wait_until(lambda: all(one.state == "ready" for one in fleet.status()), READY_S)


def reconfigure(sglang: OnCpu, project: Path, run: str, flags: dict[str, Any], *options: str) -> str:
    """`dfexp fleet reconfigure`; what it says."""
    path = project / "params" / f"{run}.yaml"
    path.write_text(json.dumps(tree(sglang, run, flags=flags)))
    command = [*DFEXP, "fleet", "reconfigure", str(path), *options]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=RUN_S)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.slow
def test_a_rolling_change_of_the_cap_loses_nothing(fleet: Fleet, sglang: OnCpu, project: Path) -> None:
    folder = start(sglang, project, "changed", LONG)
    until(folder, 20)
    said = reconfigure(sglang, project, "changed", FOUR, "--canary-s", "10", "--least-speed", "0.05")
    assert "of the expected speed" in said
    ended(folder, LONG)
    changed = events(folder, "server_reconfigured")
    assert [(event["old_cap"], event["new_cap"]) for event in changed] == [(6, 4)] * 2
    assert len(events(folder, "rollout_done")) == 1
    rows = list(read_rows(folder.completions))
    assert len({row["config_id"] for row in rows}) == 2
    flags = (control.read_status(folder) or {})["flags"]  # a model of random weights says nothing now and then
    assert sum(row["attempt"] - 1 for row in rows) == flags.get("empty_retried", 0) + flags.get("garbage_retried", 0)
    drained, back = (events(folder, name)[0]["at"] for name in ("server_draining", "server_reconfigured"))
    meanwhile = [row for row in rows if drained < row["submitted_at"] + row["latency_s"] < back]
    print(f"{len(meanwhile)} rows while the first server was changed, for {back - drained:.0f} s")
    assert {row["server"] for row in meanwhile} >= {changed[1]["server"]}  # the other served all the while
    assert [status.limits.max_running_requests for status in fleet.status()] == [4, 4]

    assert "no run uses this fleet" in reconfigure(sglang, project, "back", SIX)
    assert [status.limits.max_running_requests for status in fleet.status()] == [6, 6]


def failed_start(sglang: OnCpu, project: Path, name: str, **fleet: Any) -> str:
    """What is said of a fleet that cannot be launched. Nothing of it is left."""
    spec = spec_of(sglang, name, name=name, servers=1, **fleet)
    with pytest.raises(FleetError) as caught:
        up(spec, project)[0].wait_ready(READY_S)
    folder = generate.fleet_folder(spec, project)
    assert not folder.fleet_json.exists()
    print(f"{name}:\n{caught.value}\n")
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fleet", "words"),
    [
        ("misspelt", {"flags": {"max_runing_requests": 4}}, "Did you mean max_running_requests"),
        ("choice", {"flags": {"attention_backend": "flashinfr"}}, "flashinfr"),
        ("no-model", {"model": "nowhere"}, "nowhere"),
        ("no-python", {"python": "/no/python"}, "/no/python"),
        ("no-sglang", {"python": sys.executable}, "there is no package sglang"),
        ("no-gpu", {"device": "cuda"}, "NVIDIA driver"),
    ],
)
def test_what_can_be_known_is_said_before_anything_starts(
    sglang: OnCpu, project: Path, name: str, fleet: dict[str, Any], words: str
) -> None:
    assert words in failed_start(sglang, project, name, **fleet)
    assert not list((project / "outputs" / "fleets" / name / "logs").glob("*"))


@pytest.mark.slow
def test_a_port_in_use_is_said_before_anything_starts(sglang: OnCpu, project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = failed_start(sglang, project, "busy", first_port=other.getsockname()[1])
    assert f"{other}" not in said
    assert "ports" in said
    assert "in use" in said


@pytest.mark.full
@pytest.mark.slow
def test_a_port_that_is_lost_while_it_loads(sglang: OnCpu, project: Path) -> None:
    spec = spec_of(sglang, "lost", name="lost", servers=1, flags={"skip_server_warmup": False})
    the_fleet, _ = up(spec, project)
    port = int(the_fleet.servers[0].url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(FleetError) as caught:
        the_fleet.wait_ready(READY_S)
    print(caught.value)
    assert "port" in str(caught.value)
    assert "in use" in str(caught.value)
    assert not marked(the_fleet.identity)


@pytest.mark.full
@pytest.mark.slow
def test_a_server_that_dies_while_it_loads(sglang: OnCpu, project: Path) -> None:
    the_fleet, _ = up(spec_of(sglang, "dies", name="dies", servers=1), project)
    log = Path(the_fleet.servers[0].log)

    async def die() -> str:
        waiting = asyncio.create_task(asyncio.to_thread(the_fleet.wait_ready, READY_S))
        await asyncio.to_thread(control.wait_until, lambda: "server_args=" in log.read_text(), READY_S)
        os.kill(the_fleet.servers[0].pid, signal.SIGKILL)
        with pytest.raises(FleetError) as caught:
            await waiting
        return str(caught.value)

    said = asyncio.run(die())
    print(said)
    assert f"server {the_fleet.servers[0].name} ended" in said
    assert not marked(the_fleet.identity)


@pytest.mark.full
@pytest.mark.slow
def test_a_model_that_sglang_does_not_know(sglang: OnCpu, project: Path, tmp_path: Path) -> None:
    model = tmp_path / "strange"
    model.mkdir()
    for path in sglang.hybrid.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    assert "NoSuchForCausalLM" in failed_start(sglang, project, "strange", model=str(model))
