"""Shards of a run on a real S3 server: put once, in the background, and found again at the next start."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dfexp import control
from dfexp.errors import StoreError, StoreTaken
from dfexp.shards import read_manifest
from dfexp.store import Uploader, verify
from tests.store.conftest import Events, Place, Run, failure, row

BASE = "expansion/r/"


def names(count: int) -> list[str]:
    return [f"{BASE}completions/completions_{number:06d}.jsonl" for number in range(count)]


def test_everything_of_a_run_is_put_under_its_name(place: Place, run: Run) -> None:
    told = Events()
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(), shards, told)
        for index in range(0, 8, 2):
            shards.commit([row(index), row(index + 1)])
        shards.commit([], [failure(8)])
        shards.commit([row(9)])
        shards.seal()
        assert uploads.finish(30.0) == []
    assert place.keys() == [
        *names(5), f"{BASE}failures/failures_000000.jsonl", f"{BASE}manifest.json", f"{BASE}prompts.jsonl.gz", f"{BASE}run.json",
    ]  # fmt: skip
    for path in run.folder.completions.glob("completions_*.jsonl"):
        assert place.read(f"{BASE}completions/{path.name}") == path.read_bytes()
    assert gzip.decompress(place.read(f"{BASE}prompts.jsonl.gz")) == run.folder.prompts.read_bytes()
    assert (
        place.read(f"{BASE}failures/failures_000000.jsonl") == (run.folder.completions / "failures.jsonl").read_bytes()
    )
    record = json.loads(place.read(f"{BASE}manifest.json"))
    assert [shard["name"] for shard in record["manifest"]["shards"]] == [f"completions_{n:06d}.jsonl" for n in range(5)]
    assert record["owner"]["is_released"]
    manifest = read_manifest(run.folder.completions)
    assert [entry.uploaded["to"] for entry in manifest.shards] == [f"s3://{place.name}/{key}" for key in names(5)]
    assert told.names == ["store_opened"]
    verdict = verify(run.folder, place.group())
    assert (verdict.shards, verdict.problems) == (5, [])
