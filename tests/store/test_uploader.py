"""Shards of a run on a real S3 server: put once, in the background, and found again at the next start."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from dfexp import control
from dfexp.errors import StoreError, StoreTaken, StoreUnavailable
from dfexp.shards import not_uploaded, read_manifest
from dfexp.store import Uploader, check, restore, verify
from tests.store.conftest import Events, Place, Run, failure, open_shards, row
from tests.store.proxy import Proxy
from tests.store.server import S3Server

BASE = "expansion/r/"


def names(count: int) -> list[str]:
    return [f"{BASE}completions/completions_{number:06d}.jsonl" for number in range(count)]


def upload(run: Run, place: Place, rows: range, told: Events | None = None, **group: Any) -> list[str]:
    """One start of the run: these rows, two a shard. Returns what is left."""
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(**group), shards, Events() if told is None else told)
        for index in rows[::2]:
            shards.commit([row(index), row(index + 1)])
        return uploads.finish(30.0)


def until(condition: Any) -> None:
    assert control.wait_until(condition, 30.0, step_s=0.01)


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
    others = [f"{BASE}{name}" for name in ("manifest.json", "prompts.jsonl.gz", "run.json")]
    assert place.all_keys() == [*names(5), f"{BASE}failures/failures_000000.jsonl", *others]
    for path in run.folder.completions.glob("completions_*.jsonl"):
        assert place.read(f"{BASE}completions/{path.name}") == path.read_bytes()
    assert gzip.decompress(place.read(f"{BASE}prompts.jsonl.gz")) == run.folder.prompts.read_bytes()
    failures = (run.folder.completions / "failures.jsonl").read_bytes()
    assert place.read(f"{BASE}failures/failures_000000.jsonl") == failures
    record = json.loads(place.read(f"{BASE}manifest.json"))
    assert [shard["name"] for shard in record["manifest"]["shards"]] == [Path(key).name for key in names(5)]
    assert record["owner"]["is_released"]
    assert record["run"] == json.loads(run.folder.run_json.read_text())
    manifest = read_manifest(run.folder.completions)
    assert manifest is not None
    assert [(entry.uploaded or {})["to"] for entry in manifest.shards] == [
        f"s3://{place.name}/{key}" for key in names(5)
    ]
    assert told.names == ["store_opened"]
    verdict = verify(run.folder, place.group())
    assert (verdict.shards, verdict.problems) == (5, [])


def test_a_later_start_puts_what_is_missing_and_nothing_twice(place: Place, run: Run) -> None:
    assert upload(run, place, range(4)) == []
    with run.open() as shards:  # a start whose store was switched off
        shards.commit([row(4), row(5)], [failure(9)])
    with Proxy(place.url) as proxy:
        assert upload(run, place, range(6, 8), endpoint_url=proxy.url) == []
        puts = {path.partition(BASE)[2]: count for (method, path), count in proxy.seen.items() if method == "PUT"}
    assert {name: count for name, count in puts.items() if "probe" not in name and name != "manifest.json"} == {
        "completions/completions_000002.jsonl": 1,
        "completions/completions_000003.jsonl": 1,
        "failures/failures_000000.jsonl": 1,
    }
    assert verify(run.folder, place.group()).problems == []


def test_a_killed_process_leaves_nothing_that_its_next_start_does_not_mend(place: Place, run: Run) -> None:
    """Its shards are there and the record does not list them; nor does its own manifest."""

    def no_record(method: str, path: str, before: int) -> str | None:
        return "slow_down" if method == "PUT" and path.endswith("manifest.json") and before else None

    with Proxy(place.url, no_record) as proxy, run.open() as shards:
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url), shards, Events())
        for index in range(0, 6, 2):
            shards.commit([row(index), row(index + 1)], [failure(6)] if index == 0 else [])
        until(lambda: not uploads.left)
    uploads.finish(0.0)  # it reaches nothing any more, as if it were gone
    assert names(3) == [key for key in place.all_keys() if "completions_" in key]
    told = Events()
    assert upload(run, place, range(0), told) == []
    assert told[0]["stored"] == 0
    assert told[0]["waiting"] == 3
    verdict = verify(run.folder, place.group())
    assert (verdict.shards, verdict.problems) == (3, [])


def test_generation_does_not_wait_for_a_store_that_is_away(place: Place, run: Run) -> None:
    told = Events()
    with Proxy(place.url) as proxy, run.open() as shards:
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url), shards, told)
        proxy.rule = lambda method, path, before: "stall"
        for index in range(0, 10, 2):
            shards.commit([row(index), row(index + 1)])
        assert len(uploads.left) == 5
        assert uploads.finish(0.2) == [f"completions_{number:06d}.jsonl" for number in range(5)]
    assert "store_incomplete" in told.names
    assert len(not_uploaded(run.folder.completions)) == 5
    assert upload(run, place, range(0)) == []
    assert not_uploaded(run.folder.completions) == []


def test_a_store_that_is_killed_only_delays(tmp_path: Path, run: Run) -> None:
    told = Events()
    with S3Server(tmp_path / "own") as server:
        place = Place(server.url)
        with run.open() as shards:
            uploads = Uploader(run.folder, place.group(), shards, told)
            shards.commit([row(0), row(1)])
            until(lambda: not uploads.left)
            server.kill()
            for index in range(2, 8, 2):
                shards.commit([row(index), row(index + 1)])
            until(lambda: "store_away" in told.names)
            server.start()
            shards.commit([row(8), row(9)])
            assert uploads.finish(60.0) == []
        assert verify(run.folder, place.group()).problems == []
        assert names(5) == [key for key in place.all_keys() if "completions_" in key]
    assert told.names == ["store_opened", "store_away", "store_answers_again"]


def test_a_store_that_is_away_at_the_start_is_opened_later(place: Place, run: Run) -> None:
    told, is_away = Events(), threading.Event()
    is_away.set()
    with Proxy(place.url, lambda *_: "slow_down" if is_away.is_set() else None) as proxy, run.open() as shards:
        shards.commit([row(0), row(1)])
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url), shards, told, patience_s=0.3)
        shards.commit([row(2), row(3)])
        is_away.clear()
        assert uploads.finish(60.0) == []
    assert told.names == ["store_away", "store_answers_again", "store_opened"]
    assert verify(run.folder, place.group()).shards == 2


def test_a_foreign_object_keeps_one_shard_here_and_no_other(place: Place, run: Run) -> None:
    told = Events()
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(), shards, told)
        place.put(names(2)[1], b"foreign")
        for index in range(0, 6, 2):
            shards.commit([row(index), row(index + 1)])
        assert uploads.finish(30.0) == ["completions_000001.jsonl"]
    assert place.read(names(2)[1]) == b"foreign"
    assert told.names == ["store_opened", "store_refused", "store_incomplete"]
    assert names(2)[1] in told[1]["detail"]
    assert not_uploaded(run.folder.completions) == ["completions_000001.jsonl"]
    assert len(verify(run.folder, place.group()).problems) == 1


def test_a_place_that_is_not_empty_is_told_before_anything_is_put(place: Place, run: Run) -> None:
    for number in range(12):
        place.put(f"{BASE}notes/{number:02d}.txt", b"foreign")
    for start in (lambda: upload(run, place, range(2)), lambda: check(run.folder, place.group())):
        with pytest.raises(StoreError, match=r"12 object\(s\): notes/00.txt, .*notes/09.txt, \.\.\.") as raised:
            start()
        assert f"s3://{place.name}/{BASE}" in str(raised.value)
    assert len(place.all_keys()) == 12


def test_another_run_of_the_same_name_is_refused(place: Place, run: Run, tmp_path: Path) -> None:
    assert upload(run, place, range(2)) == []
    before = {key: place.read(key) for key in place.all_keys()}
    with pytest.raises(StoreError, match="holds another run"):
        upload(Run(tmp_path / "two"), place, range(2))
    assert {key: place.read(key) for key in place.all_keys()} == before


def test_what_others_put_beside_a_run_is_left_alone_and_told(place: Place, run: Run) -> None:
    assert upload(run, place, range(2)) == []
    place.put(f"{BASE}notes.txt", b"foreign")
    told = Events()
    assert upload(run, place, range(2, 4), told) == []
    assert told.names == ["store_opened", "store_foreign"]
    assert "notes.txt" in check(run.folder, place.group())
    assert verify(run.folder, place.group()).problems == [f"s3://{place.name}/{BASE}notes.txt: foreign"]


def test_a_shard_that_was_changed_after_it_was_sealed_is_not_uploaded(place: Place, run: Run) -> None:
    told = Events()
    with (
        Proxy(place.url, lambda _, path, __: "slow_down" if "completions_" in path else None) as proxy,
        run.open() as shards,
    ):
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url), shards, told)
        shards.commit([row(0), row(1)])
        uploads.finish(0.2)
    path = run.folder.completions / "completions_000000.jsonl"
    data = path.read_bytes()
    with run.open() as shards:
        path.write_bytes(data.replace(b"answer 1", b"answer 7"))
        assert Uploader(run.folder, place.group(), shards, told).finish(30.0) == [path.name]
    assert "changed after it was sealed" in told[-2]["detail"]
    assert path.name not in str(place.all_keys())


def test_an_old_gateway_is_refused_unless_that_is_allowed(place: Place, run: Run) -> None:
    with Proxy(place.url, is_old=True) as proxy:
        for start in (lambda: upload(run, place, range(2), endpoint_url=proxy.url),
                      lambda: check(run.folder, place.group(endpoint_url=proxy.url))):  # fmt: skip
            with pytest.raises(StoreError, match="allow_unconditional"):
                start()
        assert place.all_keys() == []
        told, group = Events(), {"endpoint_url": proxy.url, "allow_unconditional": True}
        assert upload(run, place, range(4), told, **group) == []
        assert "If-None-Match" in told[0]["unconditional"]
        assert "looks before each put" in check(run.folder, place.group(**group))
    assert verify(run.folder, place.group()).problems == []


def test_two_machines_do_not_write_to_one_place(place: Place, run: Run, tmp_path: Path) -> None:
    """A copy of the folder is another machine: it lies elsewhere."""
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(), shards, Events())
        shards.commit([row(0), row(1)])
        until(lambda: not uploads.left)
        other = run.copied(tmp_path / "copy")
        with pytest.raises(StoreTaken, match=r"is written by process \d+ on .*one/outputs/r"):
            upload(other, place, range(2, 4))
        with pytest.raises(StoreTaken, match="is written by"):
            check(other.folder, place.group())
        assert uploads.finish(30.0) == []
    assert upload(other, place, range(2, 4)) == []  # the first has let go
    with pytest.raises(StoreTaken, match="has shards that this folder lacks"):
        upload(run, place, range(2, 4))


def test_a_machine_whose_place_was_taken_over_stops_uploading(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Events()
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(), shards, told)
        shards.commit([row(0), row(1)])
        until(lambda: not uploads.left)
        other = run.copied(tmp_path / "copy")
        monkeypatch.setattr("dfexp.store.contents.STALE_S", -60.0)
        assert upload(other, place, range(2, 4)) == []
        left = uploads.finish(30.0)
    assert left == ["manifest.json"], "the record does not tell of this run's end"
    assert told.names[-2:] == ["store_ended", "store_incomplete"]
    assert "replaced by another process" in told[-1]["detail"]
    assert json.loads(place.read(f"{BASE}manifest.json"))["owner"]["folder"] == str(other.folder.path)


def test_a_machine_that_slept_through_a_take_over_puts_nothing_more(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Events()
    with Proxy(place.url) as proxy, run.open() as shards:
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url, timeout_s=1), shards, told)
        shards.commit([row(0), row(1)])
        until(lambda: not uploads.left)
        other = run.copied(tmp_path / "copy")
        proxy.rule = lambda *_: "stall"
        for index in (2, 4, 6):  # sealed, and not sent
            shards.commit([row(index), row(index + 1)])
        monkeypatch.setattr("dfexp.store.contents.STALE_S", -60.0)
        assert upload(other, place, range(8, 10)) == []
        proxy.rule = lambda *_: None
        until(lambda: uploads.ended_by)
        assert len(uploads.finish(30.0)) == 3
    assert "replaced by another process" in (uploads.ended_by or "")
    assert "store_refused" not in told.names
    assert [key for key in place.all_keys() if "completions_" in key] == names(2)
    assert verify(other.folder, place.group()).problems == []


def test_failures_that_meet_those_of_a_machine_that_took_over_are_told_as_that(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(), shards, Events())
        shards.commit([row(0), row(1)])
        until(lambda: not uploads.left)
        other = run.copied(tmp_path / "copy")
        with monkeypatch.context() as patch, other.open() as theirs:
            patch.setattr("dfexp.store.contents.STALE_S", -60.0)
            taking = Uploader(other.folder, place.group(), theirs, Events())
            theirs.commit([], [failure(8)])
            assert taking.finish(30.0) == []
        shards.commit([], [failure(9)])
        uploads.finish(30.0)
    assert "replaced by another process" in (uploads.ended_by or "")


def test_the_record_is_renewed_while_nothing_is_new(place: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfexp.store.uploader.RECORD_EVERY_S", 0.05)
    monkeypatch.setattr("dfexp.store.uploader.RENEW_S", 0.1)
    with Proxy(place.url) as proxy, run.open() as shards:
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url), shards, Events())
        until(lambda: proxy.seen["PUT", f"/{place.name}/{BASE}manifest.json"] >= 4)
        assert uploads.finish(30.0) == []


def test_a_shard_that_the_bucket_lost_or_has_otherwise_is_not_uploaded(place: Place, run: Run, tmp_path: Path) -> None:
    """Whether it is here or not, so that the run's exit status says so."""
    assert upload(run, place, range(6)) == []
    folder = restore("r", place.group(), tmp_path / "two").folder
    data = place.read(names(2)[1])
    place.put(names(2)[1], data[:-9])
    told = Events()
    assert upload(run, place, range(0), told) == ["completions_000001.jsonl"]
    assert told.names == ["store_opened", "store_refused", "store_incomplete"]
    assert not_uploaded(run.folder.completions) == ["completions_000001.jsonl"]
    told = Events()
    for _ in range(2):
        with open_shards(folder) as shards:
            assert list(shards.pending()) == [6, 7, 8, 9]
            assert Uploader(folder, place.group(), shards, told).finish(30.0) == ["completions_000001.jsonl"]
        assert told.names == ["store_opened", "store_refused", "store_incomplete"]
        assert "neither here nor, as it was uploaded, in the bucket" in told.pop()["detail"]
        assert not_uploaded(folder.completions) == ["completions_000001.jsonl"]
        told.clear()
    place.put(names(2)[1], data)
    with open_shards(folder) as shards:
        assert Uploader(folder, place.group(), shards, told).finish(30.0) == []
    assert not_uploaded(folder.completions) == []
    assert verify(folder, place.group()).problems == []


def test_a_record_that_was_lost_is_made_anew_of_what_is_there(place: Place, run: Run, tmp_path: Path) -> None:
    assert upload(run, place, range(6)) == []
    folder = restore("r", place.group(), tmp_path / "two").folder
    place.s3.delete_object(Bucket=place.name, Key=f"{BASE}manifest.json")
    told = Events()
    with open_shards(folder) as shards:
        uploads = Uploader(folder, place.group(), shards, told)
        shards.commit([row(6), row(7)])
        assert uploads.finish(30.0) == []
    assert told.names == ["store_opened"]
    record = json.loads(place.read(f"{BASE}manifest.json"))
    assert [shard["name"] for shard in record["manifest"]["shards"]] == [Path(key).name for key in names(4)]
    assert verify(folder, place.group()).problems == []


def test_a_store_whose_answers_do_not_end_holds_up_no_start(
    place: Place, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfexp.store.uploader.OPEN_S", 1.0)
    told = Events()
    with Proxy(place.url, lambda method, *_: "dribble" if method == "GET" else None) as proxy, run.open() as shards:
        group = place.group(endpoint_url=proxy.url)
        with pytest.raises(StoreUnavailable, match="did not answer whole in 1 s"):
            check(run.folder, group)
        uploads = Uploader(run.folder, group, shards, told)
        shards.commit([row(0), row(1)])
        assert uploads.finish(0.1) == ["completions_000000.jsonl"]
    assert told.names == ["store_away", "store_incomplete"]
    assert "did not answer whole in 1 s" in told[0]["detail"]


def test_keys_that_are_denied_hold_up_no_others(place: Place, run: Run) -> None:
    told, denied = Events(), [f"/{place.name}/{key}" for key in names(3)[:2]]
    with Proxy(place.url, lambda _, path, __: "forbidden" if path in denied else None) as proxy, run.open() as shards:
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url, concurrency=2), shards, told)
        for index in range(0, 10, 2):
            shards.commit([row(index), row(index + 1)])
        until(lambda: len(uploads.left) == 2)
        until(lambda: proxy.seen["PUT", denied[0]] > 2 and proxy.seen["PUT", denied[1]] > 2)
        assert uploads.left == [Path(key).name for key in names(2)]
        assert "AccessDenied (HTTP 403): explicit deny" in uploads.why
        assert told.names.count("store_away") <= 2  # once a key, however often it is tried
        denied.clear()
        assert uploads.finish(60.0) == []
    assert verify(run.folder, place.group()).problems == []


def test_a_killed_process_goes_on_at_once_where_it_was(place: Place, run: Run) -> None:
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(), shards, Events())
        shards.commit([row(0), row(1)])
        until(lambda: not uploads.left)
        uploads.finish(0.0)
    record = json.loads(place.read(f"{BASE}manifest.json"))
    record["owner"]["is_released"] = False
    place.put(f"{BASE}manifest.json", json.dumps(record).encode())
    assert upload(run, place, range(2, 4)) == []


def test_failures_are_slices_that_are_the_file(place: Place, run: Run) -> None:
    for index in (7, 8, 9):
        with run.open() as shards:
            uploads = Uploader(run.folder, place.group(), shards, Events())
            shards.commit([], [failure(index)])
            assert uploads.finish(30.0) == []
    keys = [key for key in place.all_keys() if "failures_" in key]
    assert len(keys) == 3
    assert b"".join(map(place.read, keys)) == (run.folder.completions / "failures.jsonl").read_bytes()


def test_what_is_no_shard_holds_up_no_shard_and_no_record_when_it_is_denied(
    place: Place, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfexp.store.uploader.RECORD_EVERY_S", 0.05)
    told, denied = Events(), ["prompts.jsonl.gz", "failures_000000.jsonl"]
    with (
        Proxy(place.url, lambda _, path, __: "forbidden" if Path(path).name in denied else None) as proxy,
        run.open() as shards,
    ):
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url), shards, told)
        shards.commit([row(0), row(1)], [failure(9)])
        until(lambda: json.loads(place.read(f"{BASE}manifest.json"))["manifest"]["shards"])
        until(lambda: len(uploads.left) == 2)
        assert uploads.finish(30.0) == ["failures/failures_000000.jsonl", "prompts.jsonl.gz"]
    assert told.names.count("store_away") in (1, 2)  # once an object, unless the other's is going on
    assert told.names[-1] == "store_incomplete"
    assert "AccessDenied" in told[-1]["detail"]
    assert json.loads(place.read(f"{BASE}manifest.json"))["owner"]["is_released"]
    assert upload(run, place, range(2, 4)) == []
    assert verify(run.folder, place.group()).problems == []


def test_a_record_that_is_denied_is_missing_at_the_end(place: Place, run: Run) -> None:
    def rule(method: str, path: str, before: int) -> str | None:
        return "forbidden" if method == "PUT" and path.endswith("manifest.json") and before else None

    told = Events()
    with Proxy(place.url, rule) as proxy, run.open() as shards:
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url), shards, told)
        shards.commit([row(0), row(1)])
        until(lambda: not uploads.left)
        assert uploads.finish(0.5) == ["manifest.json"]
    assert (told.names[-1], "explicit deny" in told[-1]["detail"]) == ("store_incomplete", True)
    assert upload(run, place, range(0)) == []


def test_foreign_objects_in_the_way_of_failures_and_prompts_keep_no_shard_here(place: Place, run: Run) -> None:
    told, keys = Events(), [f"{BASE}failures/failures_000000.jsonl", f"{BASE}prompts.jsonl.gz"]

    def rule(method: str, path: str, before: int) -> None:
        if method == "PUT" and not before and path.removeprefix(f"/{place.name}/") in keys:
            place.put(path.removeprefix(f"/{place.name}/"), b"foreign")  # at this very moment

    with Proxy(place.url, rule) as proxy, run.open() as shards:
        uploads = Uploader(run.folder, place.group(endpoint_url=proxy.url), shards, told)
        shards.commit([row(0), row(1)], [failure(9)])
        assert uploads.finish(30.0) == ["failures/failures_000000.jsonl", "prompts.jsonl.gz"]
    assert [place.read(key) for key in keys] == [b"foreign"] * 2
    assert told.names == ["store_opened", "store_refused", "store_refused", "store_incomplete"]
    assert uploads.ended_by is None
    assert [key for key in place.all_keys() if "completions_" in key] == names(1)
    assert len(verify(run.folder, place.group()).problems) == 3
    assert upload(run, place, range(2, 4)) == ["failures/failures_000000.jsonl"]  # taken for none of ours


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_slice_of_failures_that_the_bucket_lost_is_told_and_put_again(
    place: Place, run: Run, tmp_path: Path, lost: int
) -> None:
    for index in (7, 8, 9):
        with run.open() as shards:
            uploads = Uploader(run.folder, place.group(), shards, Events())
            shards.commit([], [failure(index)])
            assert uploads.finish(30.0) == []
    key = f"{BASE}failures/failures_{lost:06d}.jsonl"
    before = place.read(key)
    place.s3.delete_object(Bucket=place.name, Key=key)
    assert verify(run.folder, place.group()).problems == [
        f"s3://{place.name}/{key}: missing; upload it with dfexp store upload r"
    ]
    with pytest.raises(StoreError, match=rf"failures_{lost:06d}.jsonl is missing"):
        restore("r", place.group(), tmp_path / "two")
    assert upload(run, place, range(2)) == []
    assert place.read(key) == before
    assert verify(run.folder, place.group()).problems == []
