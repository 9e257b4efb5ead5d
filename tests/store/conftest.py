"""A real S3 server for the whole session, a bucket for each test, and run folders to upload from."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from dfexp.jsonl import encode_line, write_json
from dfexp.layout import RunFolder
from dfexp.params import StoreGroup
from dfexp.records import Completion, Failure
from dfexp.shards import Shards
from dfexp.store import Uploader
from dfexp.store.bucket import Bucket
from tests.store.server import ENVIRONMENT, S3Server, client

_NUMBERS = itertools.count()
FINGERPRINT = {"prompts": "p", "model": "m", "sampling": "{}"}


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no_config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no_credentials"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


class Place:
    """A bucket of its own, looked at with plain boto3."""

    def __init__(self, url: str) -> None:
        self.url, self.name, self.s3 = url, f"bucket-{next(_NUMBERS)}", client(url)
        self.s3.create_bucket(Bucket=self.name)

    def group(self, **more: Any) -> StoreGroup:
        return StoreGroup(**{"bucket": self.name, "prefix": "expansion", "endpoint_url": self.url, **more})

    def all_keys(self) -> list[str]:
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [each["Key"] for page in pages for each in page.get("Contents", ())]

    def read(self, key: str) -> bytes:
        return bytes(self.s3.get_object(Bucket=self.name, Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self.s3.put_object(Bucket=self.name, Key=key, Body=data)


@pytest.fixture
def place(s3: S3Server) -> Place:
    return Place(s3.url)


class Run:
    """A run's folder as generation leaves it, without the servers."""

    def __init__(self, root: Path, *, rows: int = 10, rows_per_shard: int = 2, store: StoreGroup | None = None) -> None:
        self.folder, self.rows, self.rows_per_shard = RunFolder(root / "outputs" / "r"), rows, rows_per_shard
        self.folder.completions.mkdir(parents=True)
        lines = [
            encode_line({"index": n, "id": str(n), "messages": [{"role": "user", "content": f"q{n}"}]})
            for n in range(rows)
        ]
        self.folder.prompts.write_bytes(b"".join(lines))
        spec = {
            "run": "r", "outputs": "outputs", "fleet": {"engine": "external", "urls": ["http://127.0.0.1:9"]},
            "prompts": {"path": "prompts.jsonl"}, "generation": {"rows_per_shard": rows_per_shard},
            "store": store.model_dump() if store else {},
        }  # fmt: skip
        sha256 = hashlib.sha256(b"".join(lines)).hexdigest()
        prompts = {"asked": rows, "sha256": sha256, "sources": [], "dropped": [], "dropped_by_reason": {}}
        write_json(
            self.folder.run_json,
            {
                "run": "r",
                "spec": spec,
                "prompts": prompts,
                "configs": {},
                "created_at": time.time(),
                "fingerprint": FINGERPRINT,
            },
        )

    def open(self) -> Shards:
        return open_shards(self.folder)

    def copied(self, root: Path) -> Run:
        """The same run in another folder, as it is on another machine."""
        other = copy(self)
        other.folder = RunFolder(root / "outputs" / "r")
        shutil.copytree(self.folder.path, other.folder.path)
        return other


def open_shards(folder: RunFolder) -> Shards:
    run = json.loads(folder.run_json.read_text())
    return Shards.open(
        folder.completions, total=run["prompts"]["asked"], fingerprint=FINGERPRINT,
        rows_per_shard=run["spec"]["generation"]["rows_per_shard"],
    )  # fmt: skip


def row(index: int, text: str = "") -> Completion:
    return Completion(
        index=index, id=str(index), messages=({"role": "user", "content": "q"},), text=text or f"answer {index}",
        finish_reason="stop", prompt_tokens=3, completion_tokens=4, max_tokens=16, server="s", config_id="c", attempt=1,
        submitted_at=1.0, latency_s=1.0, flags=(),
    )  # fmt: skip


def failure(index: int) -> Failure:
    return Failure(
        index=index, id=str(index), kind="refused", message="no", attempts=1, server="s", config_id="c", at=1.0
    )


class Events(list[dict[str, Any]]):
    """What was told, instead of an events.jsonl."""

    def __call__(self, event: str, **details: Any) -> None:
        self.append({"event": event, **details})

    @property
    def names(self) -> list[str]:
        return [each["event"] for each in self]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "one")


__all__ = ["Bucket", "Events", "Place", "Run", "Uploader", "failure", "open_shards", "row"]
