"""One real server of each version: it starts, answers, counts and stops. Plain subprocesses, none of dfexp."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from .support import LIGHT, NO_BUFFER, OnCpu

START_S, STOP_S = 300, 30
GREEDY = Path(__file__).parent / "cpu" / "greedy.py"


def argv(sglang: OnCpu, model: Path, port: int, flags: Mapping[str, Any]) -> list[str]:
    """The command of a server; a flag that is True is written without a value."""
    fixed = {"model_path": model, "host": "127.0.0.1", "port": port, "device": "cpu", "enable_metrics": True}
    words = [str(sglang.python), "-m", "sglang.launch_server"]
    for name, value in {**fixed, **LIGHT, **flags}.items():
        words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words


def members(group: int) -> list[psutil.Process]:
    """The living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def running(words: list[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own. At the end it gets SIGTERM; what is left of its group then gets SIGKILL."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        left = members(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        psutil.wait_procs(left, timeout=STOP_S)


def get(url: str, body: object = None) -> str:
    """What a server answers. Raises OSError for everything but a 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200
        return answer.read().decode()


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> float:
    """Seconds until a token came back. Fails with the end of the log."""
    started = time.monotonic()
    while time.monotonic() - started < START_S and process.poll() is None:
        with contextlib.suppress(OSError):
            get(f"{url}/health")
            return time.monotonic() - started
        time.sleep(0.2)
    pytest.fail(f"{process.args} is not healthy, exit status {process.poll()}:\n{log.read_text()[-4000:]}")


def free_port() -> int:
    """One that SGLang takes: the port 10,000 above it, for gRPC, must exist too. The system would offer higher ones."""
    for port in range(20_000, 30_000):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port below 30000")


def asked(url: str, text: str, tokens: int) -> Any:
    """One chat completion without chance."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}
    return json.loads(get(f"{url}/v1/chat/completions", body))


@pytest.mark.slow
def test_a_server_starts_answers_counts_and_stops(
    sglang: OnCpu, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    port, log = free_port(), tmp_path / "server.log"
    flags = {**NO_BUFFER[sglang.version], "max_running_requests": 4, "max_mamba_cache_size": 20, "dtype": "float32"}
    url = f"http://127.0.0.1:{port}"
    with running(argv(sglang, sglang.hybrid, port, flags), sglang.env, log) as process:
        record_property("start_s", wait_until_healthy(process, url, log))
        answer = asked(url, "hi", 8)
        page = get(f"{url}/metrics")
        children = members(process.pid)
        record_property("rss_mb", sum(child.memory_info().rss for child in children) // 1_000_000)
        record_property("cpu_s", sum(sum(child.cpu_times()[:2]) for child in children))

    # One token a byte, and one for each of the template's three marks: <start>user\nhi<end>\n<start>assistant\n
    assert answer["usage"]["prompt_tokens"] == len("user\nhi" + "\n" + "assistant\n") + 3
    assert answer["usage"]["completion_tokens"] == 8
    # The stand-ins compute what the model means: transformers, which needs none of them, says the same.
    words = [str(sglang.python), str(GREEDY), str(sglang.hybrid), "hi", "8"]
    said = subprocess.run(words, env={**os.environ, **sglang.env}, check=True, capture_output=True, text=True)
    assert answer["choices"][0]["message"]["content"].split() == said.stdout.split()
    assert "sglang:realtime_tokens_total{" in page
    assert "max_running_requests=4," in log.read_text()
    assert len(children) == 3
    assert not members(process.pid)
    with pytest.raises(OSError, match="refused"):
        get(f"{url}/health")
