"""The processes of simulated servers and the host behind them, as a fleet starts them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import pytest

from dfexp.engines.simulated import server
from dfexp.engines.simulated.server.attach import LOCK, LOG, SOCKET
from dfexp.engines.simulated.server.spec import parse_argv
from dfexp.virtual_time import CLOCK, VirtualTime

ATTACH = Path(server.__file__).with_name("attach.py")
PLAN: dict[str, Any] = {
    "model": "Qwen3.6-27B", "gpu": "rtx-pro-6000", "prompt": {"tokens": 100}, "completion": {"tokens": 200},
    "flags": {"context_length": 8192, "mamba_ssm_dtype": "bfloat16", "max_running_requests": 16},
}  # fmt: skip
FLAGS = (
    "--mamba-scheduler-strategy", "no_buffer", "--mem-fraction-static", "0.9", "--max-running-requests", "128",
    "--chunked-prefill-size", "8192",
)  # fmt: skip
MARK = "DFEXP_TEST"


@dataclass
class Folder:
    """A fleet's folder, and the processes that were started in it."""

    path: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, port: int, *flags: str, **simulation: Any) -> subprocess.Popen[bytes]:
        """The process of one server, which may go on loading."""
        told = {
            "version": "0.5.12", "index": len(self.processes), "servers": 2, "seed": 1, "speed": "max", "load_s": 60.0,
            "thinking": True, "plan": PLAN, "faults": [], **simulation,
        }  # fmt: skip
        (self.path / "logs").mkdir(exist_ok=True)
        (self.path / f"server-{port}.json").write_text(json.dumps(told))
        (self.path / f"server-{port}.yaml").write_text('api-key: "secret"\n')
        argv = [sys.executable, "-S", "-P", str(ATTACH), "--model-path", "/m/tiny", "--served-model-name", "tiny"]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--enable-metrics", "--config", f"server-{port}.yaml"]
        argv += ["--simulation", f"server-{port}.json", *FLAGS, *flags]
        with self.log(port).open("ab") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=self.path, env={**os.environ, MARK: str(port)})
        self.processes.append(process)
        return process

    def log(self, port: int) -> Path:
        return self.path / "logs" / f"server-{port}.log"

    def hosts(self) -> list[psutil.Process]:
        """The living host processes of this folder."""
        found = []
        for process in psutil.process_iter(["cmdline", "cwd"]):
            is_host = "dfexp.engines.simulated.server" in (process.info["cmdline"] or [])
            if is_host and process.info["cwd"] == str(self.path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def host(self) -> psutil.Process:
        """The one host."""
        (found,) = self.hosts()
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    hosts = made.hosts()
    for process in made.processes:
        process.kill()
        process.wait()
    assert psutil.wait_procs(hosts, timeout=20)[1] == [], "the host ends with the last server"


def ports(number: int) -> list[int]:
    """Free ports below those that outgoing connections take."""
    found: list[int] = []
    for port in range(28_000 + os.getpid() % 1000, 32_000):
        if not _is_open(port):
            found.append(port)
        if len(found) == number:
            break
    return found


def ask(port: int, path: str = "/v1/chat/completions") -> dict[str, Any]:
    """A page of a server, or a completion; connections are tried until it listens. Raises URLError, OSError."""
    body = {"messages": [{"role": "user", "content": "Hello"}]} if path.startswith("/v1/chat") else None
    request = Request(f"http://127.0.0.1:{port}{path}", data=None if body is None else json.dumps(body).encode())
    request.add_header("Authorization", "Bearer secret")
    with urlopen(request, timeout=60) as reply:
        page = json.loads(reply.read() or b"{}")
    assert isinstance(page, dict)
    return page


def _is_open(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def serving(folder: Folder, port: int) -> dict[str, Any]:
    """Wait, by looking, until a server of a living process answers; its answer."""
    while True:
        try:
            return ask(port)
        except URLError:
            assert all(process.poll() is None for process in folder.processes), folder.log(port).read_text()


def test_flags_are_read_as_they_were_written() -> None:
    words = "--model-path 7 --served-model-name 8 --cuda-graph-bs 1 2 --chunked-prefill-size=-1 --disable-radix-cache"
    assert dict(parse_argv([*words.split(), "--mem-fraction-static", "0.9", "--mamba-scheduler-strategy", "auto"])) == {
        "model_path": "7", "served_model_name": "8", "cuda_graph_bs_decode": [1, 2], "chunked_prefill_size": -1,
        "mem_fraction_static": 0.9, "disable_radix_cache": True, "mamba_strategy": "auto",
    }  # fmt: skip
    with pytest.raises(ValueError, match="'8' belongs to no flag"):
        dict(parse_argv(["8", "--port", "1"]))


def test_a_server_listens_behind_its_own_process(folder: Folder) -> None:
    (port,) = ports(1)
    process = folder.start(port)
    answer = serving(folder, port)
    assert answer["usage"] == {
        "prompt_tokens": 10, "total_tokens": 210, "completion_tokens": 200, "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }  # fmt: skip
    (link,) = [each for each in psutil.Process(process.pid).net_connections("tcp") if each.laddr.port == port]
    assert link.status == psutil.CONN_LISTEN
    info = ask(port, "/server_info")
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 72, "flags beat those of the plan"
    assert (info["mamba_scheduler_strategy"], info["max_running_requests"]) == ("no_buffer", 128)
    log = folder.log(port).read_text()
    assert "fired up and ready to roll" in log
    assert "secret" not in log + json.dumps(info)
    host = folder.host()
    assert MARK not in host.environ()
    assert os.getsid(host.pid) == host.pid
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM
    host.wait(20)
    assert not (folder.path / SOCKET).exists()
    assert (folder.path / LOG).read_text() == ""


def test_servers_that_start_at_once_have_one_host_and_one_clock(folder: Folder) -> None:
    both = ports(2)
    for port in both:
        folder.start(port)
    for port in both:
        serving(folder, port)
    assert len(folder.hosts()) == 1
    told = VirtualTime.read(folder.path / CLOCK)
    assert told.virtual_s[-1] > 60


def test_a_process_looks_for_a_host_only_while_it_has_the_lock(folder: Folder) -> None:
    (port,) = ports(1)
    with (folder.path / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = folder.start(port)
        while not re.search(rf"-> FLOCK .* {process.pid} ", Path("/proc/locks").read_text()):  # until it waits
            assert process.poll() is None
            assert not (folder.path / SOCKET).exists()
    serving(folder, port)


def test_killing_a_process_ends_its_server_alone(folder: Folder) -> None:
    first, other = ports(2)
    process = folder.start(first)
    folder.start(other)
    serving(folder, first)
    serving(folder, other)
    process.kill()
    process.wait()
    folder.processes.remove(process)
    while _is_open(first):  # until the host has seen it
        pass
    assert ask(other, "/server_info")["model_path"] == "/m/tiny"
    folder.start(first)
    assert serving(folder, first)["usage"]["completion_tokens"] == 200


def test_killing_the_host_ends_all_processes(folder: Folder) -> None:
    both = ports(2)
    processes = [folder.start(port) for port in both]
    for port in both:
        serving(folder, port)
    ended_s = VirtualTime.read(folder.path / CLOCK).virtual_s[-1]
    folder.host().kill()
    assert [process.wait(20) for process in processes] == [1, 1]
    folder.processes.clear()
    folder.start(both[0])
    serving(folder, both[0])
    assert VirtualTime.read(folder.path / CLOCK).virtual_s[-1] > ended_s + 60


def test_a_crash_is_the_exit_status_of_the_process(folder: Folder) -> None:
    (port,) = ports(1)
    process = folder.start(port, servers=1, faults=[{"kind": "crash", "contains": "Hello"}])
    with pytest.raises(ConnectionError):
        serving(folder, port)
    assert process.wait(20) == 1
    assert "RuntimeError: simulated crash" in folder.log(port).read_text()


def test_a_process_without_memory_says_so_and_ends(folder: Folder) -> None:
    (port,) = ports(1)
    faults = [{"kind": "oom_at_start"}]
    assert folder.start(port, faults=faults).wait(60) == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in folder.log(port).read_text()
    folder.processes.clear()
    folder.start(port, faults=faults)  # another host, which knows that this is the second start
    serving(folder, port)


def test_flags_that_sglang_refuses_end_the_process(folder: Folder) -> None:
    (port,) = ports(1)
    assert folder.start(port, "--max-mamba-cache-size", "1").wait(60) == 1
    assert "DoesNotFit" in folder.log(port).read_text()


def test_a_taken_port_is_told_in_sglang_s_words(folder: Folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert folder.start(port).wait(20) == 1
    assert f"error while attempting to bind on address ('127.0.0.1', {port})" in folder.log(port).read_text()
    assert not (folder.path / LOCK).exists()
