"""A running fleet of real servers: limits, secrets, death and restart, stop, lease."""

import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time

import psutil
import pytest

from dfexp.engines import get_json, get_text, probe
from dfexp.engines.llamacpp import _bundled_model
from dfexp.errors import AccessDenied, EngineStartError, FleetError, LockedError, StorageError
from dfexp.fleet import Fleet, attach
from tests.fleet.conftest import READY_S, marked, start_python, wait_for
from tests.http_stub import Quiet, serving
from tests.shards.test_disk import files_at_most

STATES = """
import json, sys
from pathlib import Path
from dfexp.fleet import attach
from dfexp.layout import FleetFolder
fleet = attach(FleetFolder(Path(sys.argv[1])))
print(json.dumps([[s.name, s.state, s.pid] for s in fleet.status()]))
"""

SILENT = """
import os, signal, sys
from pathlib import Path
import psutil
from dfexp.fleet import up
from tests.fleet.conftest import spec_of
fleet, _ = up(spec_of("one"), Path(sys.argv[1]))
os.kill(fleet.servers[0].pid, signal.SIGSTOP)
try:
    print(fleet.identity, psutil.Process().num_threads(), flush=True)
    fleet.wait_ready(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""

HOLD = """
import sys
from pathlib import Path
from dfexp.fleet import attach
from dfexp.layout import FleetFolder
with attach(FleetFolder(Path(sys.argv[1]))).lease("run seven"):
    print("held", flush=True)
    sys.stdin.read()
"""


def port_of(fleet: Fleet, position: int = 0) -> int:
    return int(fleet.servers[position].name.rpartition(":")[2])


def test_the_servers_tell_their_limits_and_the_memory_they_imply(two):
    for status in two.status():
        assert status.state == "ready"
        assert status.limits.max_running_requests == 4
        assert status.limits.context_length == 2048
        assert status.limits.max_total_num_tokens == 4 * 2048
        assert status.limits.model == two.model_name() == "smollm2-135m-instruct"
        assert status.limits.state_bytes["kv"] == 23040 * 4 * 2048
        assert 90e6 < status.limits.state_bytes["weights"] < 100e6
        assert status.rss_bytes > status.limits.state_bytes["weights"]
        assert psutil.Process(status.pid).is_running()


def test_a_server_answers_to_its_key_alone(two):
    for server in two.servers:
        assert probe(server.url, two.key, "m").ready
        assert isinstance(probe(server.url, "wrong", "m").error, AccessDenied)
        assert "llamacpp:requests_processing" in get_text(f"{server.url}/metrics", key=two.key)
        for path in ("/metrics", "/props", "/slots"):
            with pytest.raises(AccessDenied, match="401"):
                get_text(server.url + path)


def test_servers_listen_on_loopback_alone(two):
    for server in two.servers:
        listening = [c.laddr.ip for c in psutil.Process(server.pid).net_connections("tcp") if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"]


def test_slots_are_decoded_together(two):
    url, key = two.servers[0].url, two.key
    body = {"messages": [{"role": "user", "content": "Count to a hundred."}], "max_tokens": 25, "ignore_eos": True}
    threads = [
        threading.Thread(
            target=get_json, args=(f"{url}/v1/chat/completions",), kwargs={"key": key, "timeout_s": 60, "body": body}
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: [slot["is_processing"] for slot in get_json(f"{url}/slots", key=key)] == [True] * 4)
    for thread in threads:
        thread.join()


def test_the_key_is_in_private_files_alone(two):
    folder, key = two.folder, two.key
    assert len(key) >= 32
    assert key.isalnum()  # "-" at its beginning would make it a flag
    holding = {path.name for path in folder.path.rglob("*") if path.is_file() and key in path.read_text()}
    assert holding == {"key", *(path.name for path in folder.path.glob("server-*"))}
    assert len(holding) == 3
    for path in [folder.path / name for name in holding] + list(folder.logs.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for server in two.servers:
        process = psutil.Process(server.pid)
        assert key not in " ".join(process.cmdline())
        assert key not in json.dumps(process.environ())
    assert key not in subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=True).stdout
    assert key not in repr(vars(two))


def test_the_record_says_who_the_servers_are(two):
    record = json.loads(two.folder.fleet_json.read_text())
    assert record["identity"] == two.identity
    assert record["spec"]["servers"] == 2
    for server in record["servers"]:
        assert os.getpgid(server["pid"]) == os.getsid(server["pid"]) == server["pid"]


def test_another_process_attaches(two):
    with start_python(STATES, two.folder.path) as other:
        seen = json.loads(other.communicate()[0])
    assert seen == [[server.name, "ready", server.pid] for server in two.servers]


def test_a_killed_server_is_seen_and_starts_again_at_its_address(two):
    victim, other = two.servers
    witness = attach(two.folder)
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(lambda: not two.is_process_alive(victim.name))
    wait_for(lambda: not witness.is_process_alive(victim.name))
    assert [status.state for status in two.status()] == ["dead", "ready"]
    assert two.restart(victim.name) is two
    two.wait_ready(READY_S)
    wait_for(lambda: probe(victim.url, two.key, "m").ready)
    again = two.server(victim.name)
    assert again.url == victim.url
    assert again.pid != victim.pid
    assert two.servers[1] == other
    assert attach(two.folder).servers == two.servers


def test_two_threads_restart_two_servers(two):
    before = {server.name: server.pid for server in two.servers}
    threads = [threading.Thread(target=two.restart, args=(name,)) for name in before]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = {server.name: server.pid for server in two.servers}
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert attach(two.folder).servers == two.servers
    assert sorted(marked(two.identity)) == sorted(after.values())
    wait_for(lambda: all(status.state == "ready" for status in two.status()))


def test_a_restart_by_another_process_is_seen(two):
    server = two.servers[0]
    attach(two.folder).restart(server.name)
    wait_for(lambda: two.status()[0].state == "ready")
    assert two.servers[0].pid not in (server.pid, None)


def test_a_frozen_server_is_unreachable_and_restart_replaces_it(two):
    frozen = two.servers[1]
    os.kill(frozen.pid, signal.SIGSTOP)
    assert [status.state for status in two.status(timeout_s=0.5)][1] == "unreachable"
    two.restart(frozen.name)
    wait_for(lambda: probe(frozen.url, two.key, "m").ready)


def test_an_unknown_server_is_named_with_those_there_are(two):
    with pytest.raises(FleetError, match=two.servers[1].name):
        two.restart("127.0.0.1:1")


def test_one_user_at_a_time(two):
    with start_python(HOLD, two.folder.path) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=rf"run seven \(pid {holder.pid}\)"), two.lease("mine"):
            pass
        with pytest.raises(LockedError, match="run seven"):
            two.down()
        assert two.lease_holder() == f"run seven (pid {holder.pid})"
        assert all(status.state == "ready" for status in two.status())
        holder.kill()
        holder.wait()
        assert two.lease_holder() is None
        with two.lease("mine"):
            assert two.lease_holder() == f"mine (pid {os.getpid()})"
    assert two.lease_holder() is None
    with pytest.raises(RuntimeError, match="on purpose"), two.lease("mine"):
        raise RuntimeError("on purpose")
    assert two.lease_holder() is None
    with files_at_most(0), pytest.raises(StorageError, match=r"cannot lock .*File too large"), two.lease("mine"):
        pass


def test_a_lock_that_cannot_be_opened_is_told_with_its_path(two):
    two.folder.lock.unlink(missing_ok=True)
    two.folder.lock.mkdir()
    try:
        with pytest.raises(StorageError, match=rf"cannot lock {two.folder.lock}: Is a directory"), two.lease("mine"):
            pass
    finally:
        two.folder.lock.rmdir()


def test_down_lets_requests_finish_and_leaves_nothing(launch):
    fleet = launch()
    url, key, pid = fleet.servers[0].url, fleet.key, fleet.servers[0].pid
    answers = []

    def ask() -> None:
        body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 40, "ignore_eos": True}
        answers.append(get_json(f"{url}/v1/chat/completions", key=key, timeout_s=60, body=body))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: get_json(f"{url}/slots", key=key)[0]["is_processing"])
    assert fleet.down(drain_s=60) == [f"{fleet.servers[0].name}: stopped (pid {pid})"]
    thread.join()
    assert answers[0]["usage"]["completion_tokens"] == 40
    wait_for(lambda: not psutil.pid_exists(pid))
    assert sorted(path.name for path in fleet.folder.path.iterdir()) == ["launch.lock", "logs"]
    with pytest.raises(FleetError, match="Launch it first"):
        attach(fleet.folder)
    with pytest.raises(FleetError, match="stopped"):
        fleet.restart(fleet.servers[0].name)


def test_down_kills_what_does_not_stop(launch):
    fleet = launch()
    pid = fleet.servers[0].pid
    os.kill(pid, signal.SIGSTOP)
    with start_python(HOLD, fleet.folder.path) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockedError):
            fleet.down(drain_s=0)
        assert "killed" in fleet.down(drain_s=0.2, force=True)[0]
        holder.kill()
    wait_for(lambda: not psutil.pid_exists(pid))


def test_a_reused_pid_is_not_touched(launch):
    fleet = launch()
    with start_python("import sys; sys.stdin.read()") as innocent:
        record = json.loads(fleet.folder.fleet_json.read_text())
        real, record["servers"][0]["pid"] = record["servers"][0]["pid"], innocent.pid
        fleet.folder.fleet_json.write_text(json.dumps(record))
        witness = attach(fleet.folder)
        assert not witness.is_process_alive(witness.servers[0].name)
        lines = witness.down(drain_s=0.2)
        assert innocent.poll() is None
        innocent.stdin.close()
    assert str(real) in lines[0]
    assert marked(fleet.identity) == []


def test_somebody_else_at_the_address_of_a_dead_server(launch):
    fleet = launch()
    server = fleet.servers[0]
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(server.pid))  # until then its threads may hold the port

    class Stranger(Quiet):
        def do_GET(self) -> None:
            self.reply(200, b'{"hello": 1}')

    with serving(Stranger, port_of(fleet)):
        status = fleet.status()[0]
        assert (status.state, status.pid, status.limits) == ("dead", None, None)
        fleet.restart(server.name)
        wait_for(lambda: not fleet.is_process_alive(server.name))
        assert "Another process holds its port." in fleet.start_failure(server.name)
        assert "was not running" in fleet.down()[0]
        assert get_json(f"http://127.0.0.1:{port_of(fleet)}/") == {"hello": 1}


def test_a_port_lost_before_the_start_fails_the_launch_with_the_reason(launch):
    fleet = launch(wait=False)
    server = fleet.servers[0]
    os.kill(server.pid, signal.SIGSTOP)
    with serving(Quiet, port_of(fleet)):
        os.kill(server.pid, signal.SIGCONT)
        with pytest.raises(EngineStartError, match=r"Another process holds its port\. Launch again\."):
            fleet.wait_ready(READY_S)
    assert marked(fleet.identity) == []


def test_a_failed_start_says_why_and_leaves_nothing(launch, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(_bundled_model().read_bytes()[:20_000_000])
    fleet = launch(model="cut.gguf", servers=2, wait=False)
    key, start = fleet.key, time.monotonic()
    with pytest.raises(EngineStartError) as caught:
        fleet.wait_ready(READY_S)
    message = str(caught.value)
    assert time.monotonic() - start < READY_S / 2
    assert "The model file is incomplete or damaged" in message
    assert "not within the file bounds" in message
    assert " ended. " in message
    assert key not in message
    assert marked(fleet.identity) == []
    assert sorted(path.name for path in fleet.folder.path.iterdir()) == ["launch.lock", "logs"]


def test_a_server_that_stays_silent_is_given_up_and_stopped(launch):
    fleet = launch(wait=False)
    os.kill(fleet.servers[0].pid, signal.SIGSTOP)
    with pytest.raises(EngineStartError, match="did not become ready"):
        fleet.wait_ready(0.3)
    assert marked(fleet.identity) == []


def test_an_interrupted_launch_is_undone(tmp_path):
    with start_python(SILENT, tmp_path) as launcher:
        identity, threads = launcher.stdout.readline().split()
        assert len(marked(identity)) == 1
        wait_for(lambda: psutil.Process(launcher.pid).num_threads() > int(threads))  # it asks the server
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "interrupted\n"
        assert launcher.wait(timeout=30) == 0
    assert marked(identity) == []


def test_a_key_that_a_server_prints_is_not_repeated(launch):
    fleet = launch()
    with open(fleet.servers[0].log, "a") as log:
        log.write(f"server_args: api_key={fleet.key!r}\n")
    failure = fleet.start_failure(fleet.servers[0].name)
    assert "api_key='(key hidden)'" in failure
    assert fleet.key not in failure


def test_ports_stay_out_of_the_range_of_outgoing_connections(two):
    with socket.create_connection(("127.0.0.1", port_of(two))) as outgoing:
        assert port_of(two) < 32000 < outgoing.getsockname()[1]
