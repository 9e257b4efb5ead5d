"""Bringing a fleet up: attach or launch, never both, never half, never two at once."""

import json
import os
import signal

import pytest

from dfexp.errors import EngineStartError, FleetError
from dfexp.fleet import attach, list_fleets, up
from dfexp.layout import FleetFolder
from tests.fleet.conftest import READY_S, marked, spec_of, start_python, wait_for
from tests.http_stub import Quiet, serving

UP = """
import json, sys
from pathlib import Path
from dfexp.fleet import up
from tests.fleet.conftest import spec_of
fleet, started = up(spec_of("one"), Path(sys.argv[1]))
if sys.argv[2] == "wait":
    fleet.wait_ready(60)
print(json.dumps([fleet.identity, started, [s.state for s in fleet.status()]]), flush=True)
if sys.argv[2] == "die":
    import os
    os.kill(os.getpid(), 9)
"""


def test_up_twice_is_one_fleet(launch, tmp_path):
    first = launch()
    second, started = up(spec_of("one", start_timeout_s=7.0), tmp_path)
    assert not started
    second.wait_ready(READY_S)
    assert (second.identity, second.servers, second.key) == (first.identity, first.servers, first.key)
    assert len(marked(first.identity)) == 1
    assert [folder.path for folder in list_fleets(tmp_path)] == [first.folder.path]


def test_other_parameters_are_named_and_nothing_changes(launch, tmp_path):
    fleet = launch(wait=False)
    with pytest.raises(FleetError) as caught:
        up(spec_of("one", max_running_requests=2, context_length=512), tmp_path)
    message = str(caught.value)
    assert "fleet.max_running_requests is 1, asked for is 2" in message
    assert "fleet.context_length is 256, asked for is 512" in message
    assert "dfexp fleet down one" in message
    assert attach(fleet.folder).servers == fleet.servers
    with pytest.raises(FleetError, match=r"fleet\.engine is 'llamacpp'"):
        up(spec_of("one", engine="external", urls=["http://127.0.0.1:1"]), tmp_path)


def test_two_at_the_same_time_are_one_fleet(tmp_path):
    both = [start_python(UP, tmp_path, "wait") for _ in range(2)]
    seen = [json.loads(one.communicate(timeout=120)[0]) for one in both]
    folder = FleetFolder(tmp_path / "outputs" / "fleets" / "one")
    fleet = attach(folder)
    try:
        assert sorted(started for _, started, _ in seen) == [False, True]
        assert {identity for identity, _, _ in seen} == {fleet.identity}
        assert [states for _, _, states in seen] == [["ready"], ["ready"]]
        assert len(marked(fleet.identity)) == 1
    finally:
        fleet.down(drain_s=0)


def test_the_fleet_outlives_its_launcher_and_an_unfinished_launch_is_finished(tmp_path):
    with start_python(UP, tmp_path, "die") as launcher:
        identity, _, _ = json.loads(launcher.communicate(timeout=60)[0])
    assert launcher.returncode == -signal.SIGKILL
    fleet, started = up(spec_of("one"), tmp_path)
    try:
        assert (fleet.identity, started) == (identity, False)
        fleet.wait_ready(READY_S)
        assert fleet.status()[0].state == "ready"
    finally:
        fleet.down(drain_s=0)
    assert marked(identity) == []


def test_a_server_started_but_not_noted_is_found(launch, tmp_path):
    """The launcher was killed between the start of a process and the note of its pid."""
    fleet = launch()
    record = json.loads(fleet.folder.fleet_json.read_text())
    lost = record["servers"][0]["pid"]
    record["servers"][0]["pid"] = record["servers"][0]["process_started"] = None
    fleet.folder.fleet_json.write_text(json.dumps(record))
    again, started = up(spec_of("one"), tmp_path)
    again.wait_ready(READY_S)
    assert not started
    assert marked(fleet.identity) == [again.servers[0].pid] != [lost]


def test_records_of_a_dead_fleet_are_replaced(launch, tmp_path):
    dead = launch()
    key = dead.key
    os.kill(dead.servers[0].pid, signal.SIGKILL)
    record = json.loads(dead.folder.fleet_json.read_text())
    with start_python("import sys; sys.stdin.read()") as innocent:
        record["servers"][0]["pid"] = innocent.pid
        dead.folder.fleet_json.write_text(json.dumps(record))
        wait_for(lambda: not dead.is_process_alive(dead.servers[0].name))
        fleet = launch(max_running_requests=2)
        assert fleet.identity != dead.identity
        assert fleet.key != key
        assert innocent.poll() is None
        innocent.stdin.close()


def test_a_dead_server_is_started_again_by_up_unless_a_run_looks_after_it(launch, tmp_path):
    fleet = launch(servers=2)
    victim = fleet.servers[0]
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(lambda: not fleet.is_process_alive(victim.name))
    with fleet.lease("run"):
        attached, started = up(spec_of("one", servers=2), tmp_path)
        attached.wait_ready(READY_S)
        assert not started
        assert [status.state for status in attached.status()] == ["dead", "ready"]
    attached, started = up(spec_of("one", servers=2), tmp_path)
    assert not started
    assert attached.servers[0].pid != victim.pid
    assert attached.servers[0].url == victim.url


def test_nothing_is_left_of_a_launch_that_cannot_be(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"bad")
    with pytest.raises(EngineStartError, match="not a GGUF"):
        up(spec_of("one", model="bad.gguf"), tmp_path)
    assert list_fleets(tmp_path) == []
    assert sorted(path.name for path in (tmp_path / "outputs/fleets/one").iterdir()) == ["launch.lock", "logs"]


def test_a_damaged_record_stops_everything_with_a_message(tmp_path):
    folder = FleetFolder(tmp_path / "outputs" / "fleets" / "one")
    folder.path.mkdir(parents=True)
    folder.fleet_json.write_text('{"identity": "x", "servers": [')
    with pytest.raises(FleetError, match="damaged"):
        up(spec_of("one"), tmp_path)
    folder.fleet_json.write_text('{"identity": "x"}')
    with pytest.raises(FleetError, match="damaged"):
        attach(folder)


class Compatible(Quiet):
    """A server with the least that an OpenAI-compatible one has. Needs the key `sekret`."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer sekret":
            self.reply(401, b'{"error": {"message": "wrong key"}}')
        elif self.path == "/v1/models":
            self.reply(200, b'{"data": [{"id": "theirs", "max_model_len": 4096}]}')
        elif self.command == "POST":
            self.reply(200, b'{"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 1}}')
        else:
            self.reply(404, b"{}")

    do_POST = do_GET


def external(*urls: str, **keys: object) -> dict[str, object]:
    return {"engine": "external", "urls": list(urls), "api_key_env": "THEIR_KEY", **keys}


def test_external_servers_are_used_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "sekret")
    with serving(Compatible) as one, serving(Compatible) as two:
        spec = spec_of("ext", **external(one.url, f"{two.url}/v1", max_running_requests=8))
        fleet, started = up(spec, tmp_path)
        fleet.wait_ready(20)
        assert started
        assert fleet.model_name() == "theirs"
        for status in fleet.status():
            assert (status.state, status.pid) == ("ready", None)
            assert (status.limits.max_running_requests, status.limits.context_length) == (8, 4096)
        assert up(spec, tmp_path)[1] is False
        with pytest.raises(FleetError, match="somebody else"):
            fleet.restart(fleet.servers[0].name)
        written = [path for path in fleet.folder.path.rglob("*") if path.is_file() and "sekret" in path.read_text()]
        assert written == []
        lines = fleet.down()
        assert [line.partition(": ")[2] for line in lines] == ["left alone, somebody else runs it"] * 2
        assert list_fleets(tmp_path) == []


def test_an_external_fleet_with_a_wrong_key_says_so_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "another")
    with serving(Compatible) as one:
        fleet, _ = up(spec_of("ext", **external(one.url)), tmp_path)
        with pytest.raises(EngineStartError, match=r"wrong key"):
            fleet.wait_ready(20)
    assert list_fleets(tmp_path) == []


def test_an_external_fleet_without_its_key_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with pytest.raises(FleetError, match="THEIR_KEY"):
        up(spec_of("ext", **external("http://127.0.0.1:1")), tmp_path)
    assert not (tmp_path / "outputs").exists()


def test_an_external_server_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "sekret")
    with serving(Compatible) as one:
        fleet, _ = up(spec_of("ext", **external(one.url, "http://127.0.0.1:1")), tmp_path)
        with pytest.raises(EngineStartError, match=r"127\.0\.0\.1:1 did not become ready.*\n.*refused"):
            fleet.wait_ready(0.5)


def test_an_external_fleet_may_change_when_nobody_uses_it(tmp_path, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "sekret")
    first, _ = up(spec_of("ext", **external("http://127.0.0.1:1")), tmp_path)
    other = spec_of("ext", **external("http://127.0.0.1:2"))
    with first.lease("run"), pytest.raises(FleetError, match=r"in use by run.*fleet\.urls"):
        up(other, tmp_path)
    second, started = up(other, tmp_path)
    assert started
    assert second.servers[0].url == "http://127.0.0.1:2"


def test_another_fleets_servers_can_be_used_from_outside(two, tmp_path, monkeypatch):
    """A real llama.cpp server known by URL and key alone tells the same limits."""
    monkeypatch.setenv("THEIR_KEY", two.key)
    fleet, _ = up(spec_of("ext", **external(*[server.url for server in two.servers])), tmp_path)
    fleet.wait_ready(READY_S)
    for theirs, ours in zip(fleet.status(), two.status(), strict=True):
        assert theirs.name == ours.name
        assert theirs.limits.max_running_requests == ours.limits.max_running_requests == 4
        assert theirs.limits.context_length == ours.limits.context_length == 2048
        assert theirs.limits.model == ours.limits.model
    fleet.down()
    assert all(status.state == "ready" for status in two.status())
