"""A program that passes for an interpreter with SGLang, so that a fleet starts, watches and changes scripted servers.

What a server does is the value of its flag `--log-level-http`: good, slow, garbage, wordy (says it thrice), or dead
(ends at once). POST /stick makes one stop working behind a green health page until it is started again.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKENS = 8
FLAGS = ("max-running-requests", "log-level-http")


def wrapper(folder: Path) -> str:
    """The path of an executable that runs this file; for `fleet.python`."""
    path = folder / "sglang-python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def installation() -> dict[str, Any]:
    """What the probe of an environment would say."""
    kinds = {"max-running-requests": "int", "log-level-http": "str"}
    flags = {
        f"--{name}": {"action": "_StoreAction", "choices": None, "default": "None", "dest": name.replace("-", "_"),
                      "type": kinds[name]}
        for name in FLAGS
    }  # fmt: skip
    return {"python": sys.executable, "python_version": "3.11", "sglang_version": "0.5.12", "flags": flags}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, given: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", int(given["port"])), Handler)
        self.mode, self.cap = given.get("log-level-http", "good"), int(given.get("max-running-requests", 4))
        self.slots, self.lock = threading.Semaphore(self.cap), threading.Lock()
        self.tokens, self.is_stuck = 0, False


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        pages = {
            "/health": "", "/metrics": f'sglang:realtime_tokens_total{{mode="decode"}} {self.server.tokens}.0\n',
            "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}),
            "/server_info": json.dumps(
                {"version": "0.5.12", "internal_states": [{"effective_max_running_requests_per_dp": self.server.cap}]}
            ),
        }  # fmt: skip
        self._send(200 if self.path in pages else 404, pages.get(self.path, "{}"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/stick":
            self.server.is_stuck = True
            self._send(200, "{}")
            return
        with self.server.slots:
            time.sleep(1.0 if self.server.mode == "slow" and body["max_tokens"] != 1 else 0.05)
            while self.server.is_stuck:
                time.sleep(60.0)
        with self.server.lock:
            self.server.tokens += TOKENS
        text = "!" * 48 if self.server.mode == "garbage" else f"to {body['messages'][-1]['content']}: yes"
        times = 3 if self.server.mode == "wordy" else 1
        text = " ".join([text] * times)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 5, "completion_tokens": TOKENS * times, "total_tokens": 5 + TOKENS * times}
        self._send(200, json.dumps(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        ))  # fmt: skip

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())


def main(argv: list[str]) -> None:
    if argv[0] != "-m":
        print(json.dumps(installation()))
        return
    words = [word for word in argv[2:] if word != "--enable-metrics"]
    given = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    if given.get("log-level-http") == "dead":
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB.")
    Server(given).serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
