"""A whole run in its own process, with servers that are scripted and a real S3 server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dfexp import params
from dfexp.errors import FleetError
from dfexp.fleet import up
from dfexp.generate.start import read_spec, run_folder
from dfexp.preflight import checks_for
from dfexp.report.data import load
from dfexp.report.overview import on_s3
from dfexp.shards import not_uploaded
from dfexp.store import restore, verify
from tests.generate.conftest import Project, project
from tests.scripted_server import ScriptedServer, chat
from tests.store.conftest import Place
from tests.store.proxy import Proxy
from tests.store.server import SECRET

__all__ = ["project"]
ROOT = Path(__file__).resolve().parents[2]


def spec_of(project: Project, server: ScriptedServer, place: Place, **group: Any) -> params.RunSpec:
    spec = project.spec([server.url], prompts=30)
    return spec.model_copy(update={"store": place.group(**group)})


async def test_a_run_is_on_s3_when_it_has_ended_and_goes_on_elsewhere(
    project: Project, place: Place, tmp_path: Path
) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.02) as server:
        spec = spec_of(project, server, place)
        part = spec.model_copy(update={"limits": params.LimitsGroup(rows=17)})
        folder = await project.start(part)
        assert (await project.end(folder))["done"] == 17
        assert verify(folder, spec.store).problems == []
        (tmp_path / "two").mkdir()
        other = Project(tmp_path / "two")
        made = await asyncio.to_thread(restore, "r", spec.store, other.root)
        assert read_spec(made.folder).store == spec.store
        other.spec([server.url], prompts=30)
        status = await other.run(spec)
    assert (status["state"], status["done"]) == ("ended", 30)
    assert not_uploaded(made.folder.completions) == []
    assert len({each["index"] for each in other.rows(made.folder)}) == 13
    assert Counter(each["index"] for each in [*project.rows(folder), *other.rows(made.folder)]) == Counter(range(30))
    assert verify(made.folder, spec.store).problems == []
    events = [json.loads(line) for line in made.folder.events.read_text().splitlines()]
    assert next(event for event in events if event["event"] == "store_opened")["stored"] == 3
    data = load(made.folder)
    assert (data.elsewhere, data.missing) == (17, 0)
    count, _, words = on_s3(data)
    assert (count, words.split(";")[0]) == (5, f"of 5 sealed, in bucket {place.name}")
    assert "17 rows are there alone" in words
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        assert SECRET.encode() not in file.read_bytes(), file


async def test_a_run_that_is_killed_while_it_uploads_goes_on_at_once(project: Project, place: Place) -> None:
    async with ScriptedServer(lambda b, n: chat(), delay_s=0.3) as server:
        spec = spec_of(project, server, place)
        folder = await project.start(spec)
        await project.until(folder, lambda status: status.get("done", 0) >= 8)
        project.kill(folder)
        status = await project.run(spec)
    assert (status["state"], status["done"]) == ("ended", 30)
    assert project.counts(folder) == Counter(range(30))
    assert verify(folder, spec.store).problems == []
    assert not_uploaded(folder.completions) == []


async def test_a_run_ends_without_a_store_that_stays_away_and_says_what_is_missing(
    project: Project, place: Place
) -> None:
    with Proxy(place.url) as proxy:
        async with ScriptedServer(lambda b, n: chat(), delay_s=0.02) as server:
            spec = spec_of(project, server, place, endpoint_url=proxy.url, drain_s=1.0)
            opened = f"/{place.name}/expansion/r/manifest.json"
            proxy.rule = lambda _, path, before: (
                "slow_down" if proxy.seen["PUT", opened] and (path != opened or before) else None
            )
            folder = await project.start(spec)
            status = await project.end(folder)
    assert (status["state"], status["done"], status["not_uploaded"]) == ("ended", 30, 5)
    assert len(not_uploaded(folder.completions)) == 5
    assert {"store_away", "store_incomplete"} <= set(project.events(folder))
    assert place.url != proxy.url


async def test_what_was_denied_at_the_end_is_tried_again_when_the_cell_is(project: Project, place: Place) -> None:
    with Proxy(place.url, lambda _, path, __: "forbidden" if path.endswith("prompts.jsonl.gz") else None) as proxy:
        async with ScriptedServer(lambda b, n: chat()) as server:
            spec = spec_of(project, server, place, endpoint_url=proxy.url)
            first = await project.run(spec)
            folder = run_folder(spec, project.root)
            assert (first["state"], first["not_uploaded"], not_uploaded(folder.completions)) == ("ended", 1, [])
            proxy.rule = lambda *_: None
            again = await project.run(spec)
            assert (again["state"], again["not_uploaded"]) == ("ended", 0)
            assert (await project.run(spec))["pid"] == again["pid"], "then nothing is left to do"
    assert verify(folder, place.group()).problems == []


async def test_a_place_that_is_not_empty_is_told_before_a_row_is_sent(project: Project, place: Place) -> None:
    place.put("expansion/r/completions/completions_000000.jsonl", b"foreign")
    async with ScriptedServer(lambda b, n: chat()) as server:
        spec = spec_of(project, server, place)
        check = next(check for check in checks_for(spec, project.root) if check.name == "store")
        assert check.state == "fail"
        assert "completions_000000.jsonl" in check.found
        with pytest.raises(FleetError, match=r"nothing was started.*\n.*is not empty.*completions_000000\.jsonl"):
            await project.start(spec)
        assert [body for body in server.bodies if body["max_tokens"] > 1] == []  # that one is the readiness probe
    assert place.read("expansion/r/completions/completions_000000.jsonl") == b"foreign"


async def test_preflight_looks_at_the_store(project: Project, place: Place) -> None:
    async with ScriptedServer(lambda b, n: chat()) as server:
        for group, state, words in (
            ({}, "pass", "empty, can be written"),
            ({"bucket": "no-such-bucket"}, "fail", "NoSuchBucket"),
        ):
            checks = checks_for(spec_of(project, server, place, **group), project.root)
            check = next(check for check in checks if check.name == "store")
            assert check.state == state
            assert words in check.found
        with pytest.raises(FleetError, match=r"nothing was started.*\n.*NoSuchBucket"):
            up(spec_of(project, server, place, bucket="no-such-bucket"), project.root)
        no_store = spec_of(project, server, place).model_copy(update={"store": params.StoreGroup()})
        assert "store" not in [check.name for check in checks_for(no_store, project.root)]
    assert place.all_keys() == []


@pytest.mark.slow
def test_the_benchmark_in_small(tmp_path: Path) -> None:
    """A store that is killed for seconds while shards of 5 MB are written: nothing lost, nothing twice, no waiting."""
    command = [sys.executable, "benchmarks/store.py", "--shards", "14", "--away-s", "2", "--turn-s", "2"]
    command += ["--rows-per-s", "1500", "--least-ratio", "0", "--folder", str(tmp_path / "b")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line[:34].strip(): line[34:] for line in done.stdout.splitlines()}
    assert said["shards uploaded"].startswith("14 of 14, 0.07 GB")
    assert said["lost, differing, foreign, twice"] == "0, 0 [], 0, rows 7,000"
    assert float(said["answers/s while S3 was killed"]) > 0
    assert said["events"] == "{'store_opened': 1, 'store_away': 1, 'store_answers_again': 1}"
    assert said["restore of the done-set"].startswith("7,000 rows in ")
    assert said["puts over 20 foreign objects"] == "20 errors, 0 replaced, 20 as they were"
