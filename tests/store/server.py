"""A real S3 server on this machine: SeaweedFS, one process with all of its parts, on free ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config

from dfexp import control

KEY, SECRET = "test", "testtest"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
_GRPC = 10_000  # each part listens on its port and on that plus this
_PARTS = ("s3.port", "master.port", "filer.port", "volume.port", "admin.port")


def client(url: str, **secrets: str) -> Any:
    """A plain boto3 client, to look at what is there without the code under test."""
    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, **secrets}
    config = Config(retries={"total_max_attempts": 8}, s3={"addressing_style": "path"})
    return boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=config, **keys)


def free_ports(count: int) -> list[int]:
    """Ports that are free, and whose neighbours for gRPC are."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            with contextlib.suppress(OSError, OverflowError):
                first = held.enter_context(socket.socket())
                first.bind(("127.0.0.1", 0))
                port = first.getsockname()[1]
                held.enter_context(socket.socket()).bind(("127.0.0.1", port + _GRPC))
                found.append(port)
    return found


class S3Server:
    """A SeaweedFS that can be killed and started again over the same files; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ports = folder, free_ports(len(_PARTS))
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it, and wait until it is healthy."""
        self._folder.mkdir(parents=True, exist_ok=True)
        argv = [
            str(Path(sys.executable).with_name("weed")), "mini", f"-dir={self._folder}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", "-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0",
            "-s3.port.lance=0", "-s3.autoCreateBucket=false",
            "-volume.max=1000",  # a bucket takes one at least; by default free disk space says how many there are
            *(f"-{part}={port}" for part, port in zip(_PARTS, self._ports, strict=True)),
        ]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, cwd=self._folder, env={**os.environ, **ENVIRONMENT, "HOME": str(self._folder)},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert control.wait_until(self._is_healthy, 60.0), (self._folder / "log").read_text()[-2000:]
        return self

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/healthz", timeout=2.0) as answer:
            return bool(answer.status == 200)
        return False

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
