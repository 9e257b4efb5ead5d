"""From the bucket alone: a folder to go on from, and its rows; bucket and folder compared."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier

import pytest

from dfexp import cli, control, params
from dfexp.cli.attendant import _conclude
from dfexp.errors import CorruptShardError, LockedError, StorageError, StoreError
from dfexp.generate.identity import sampling_text
from dfexp.jsonl import write_json
from dfexp.layout import RunFolder
from dfexp.report.data import load
from dfexp.report.overview import on_s3
from dfexp.shards import Shards, list_shards, only_stored, read_failures, read_manifest, read_rows
from dfexp.store import Uploader, fetch_rows, restore, verify
from tests.store.conftest import FINGERPRINT, Events, Place, Run, failure, open_shards, row
from tests.store.proxy import Proxy
from tests.store.test_uploader import BASE, names, until, upload


def uploaded(run: Run, place: Place) -> None:
    """Eight rows in four shards, and a failure."""
    assert upload(run, place, range(8)) == []
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(), shards, Events())
        shards.commit([], [failure(9)])
        assert uploads.finish(30.0) == []


def test_generation_goes_on_from_the_bucket_alone(place: Place, run: Run, tmp_path: Path) -> None:
    uploaded(run, place)
    made = restore("r", place.group(), tmp_path / "two")
    assert (made.shards, made.rows, made.asked, made.writer, made.unread) == (4, 8, 10, None, [])
    there, here = run.folder, made.folder
    assert here.path == tmp_path / "two" / "outputs" / "r"
    assert here.prompts.read_bytes() == there.prompts.read_bytes()
    assert list(read_failures(here.completions)) == list(read_failures(there.completions))
    assert json.loads(here.run_json.read_text())["prompts"] == json.loads(there.run_json.read_text())["prompts"]
    assert list_shards(here.completions) == []
    assert [entry.number for entry in only_stored(here.completions)] == [0, 1, 2, 3]
    with open_shards(here) as shards:
        assert list(shards.pending()) == [8]
        uploads = Uploader(here, place.group(), shards, Events())
        shards.commit([row(8)])
        shards.seal()
        assert uploads.finish(30.0) == []
    assert [shard.path.name for shard in list_shards(here.completions)] == ["completions_000004.jsonl"]
    assert names(5) == [key for key in place.all_keys() if "completions_" in key]
    assert [each["index"] for each in read_rows(here.completions)] == [8]
    assert verify(here, place.group()).problems == []
    with open_shards(here) as shards:
        assert list(shards.pending()) == []


def test_rows_are_fetched_once_and_checked(place: Place, run: Run, tmp_path: Path) -> None:
    uploaded(run, place)
    folder = restore("r", place.group(), tmp_path / "two").folder
    with open_shards(folder), pytest.raises(LockedError):
        fetch_rows(folder, place.group())
    assert fetch_rows(folder, place.group()) == 4
    assert fetch_rows(folder, place.group()) == 0
    assert list(read_rows(folder.completions)) == list(read_rows(run.folder.completions))
    with open_shards(folder) as shards:
        assert shards.done == 8


def test_a_shard_with_other_content_is_not_fetched(place: Place, run: Run, tmp_path: Path) -> None:
    uploaded(run, place)
    data = place.read(names(2)[1])
    place.put(names(2)[1], data.replace(b"answer", b"ANSWER"))
    folder = restore("r", place.group(), tmp_path / "two").folder
    with pytest.raises(StoreError, match=r"completions_000001\.jsonl has SHA-256"):
        fetch_rows(folder, place.group())
    assert not (folder.completions / "completions_000001.jsonl").exists()
    assert [problem for problem in verify(folder, place.group()).problems if "SHA-256" in problem]


@contextmanager
def no_room(most: int) -> Iterator[None]:
    """The system lets no file grow beyond `most` bytes, as it does when a disk is full."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_told_at_once_and_nothing_is_left_behind(place: Place, run: Run, tmp_path: Path) -> None:
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(), shards, Events())
        shards.commit([row(0, "x" * 100_000), row(1)])
        assert uploads.finish(30.0) == []
    with Proxy(place.url) as proxy:
        group = place.group(endpoint_url=proxy.url)
        folder = restore("r", group, tmp_path / "two").folder
        with no_room(50_000), pytest.raises(StorageError, match="File too large"):
            fetch_rows(folder, group)
        assert proxy.seen["GET", f"/{place.name}/{names(1)[0]}"] == 1
        assert [path.name for path in folder.completions.iterdir() if "completions_" in path.name] == []
        with no_room(100), pytest.raises(StorageError, match="File too large"):
            restore("r", group, tmp_path / "three")
    assert [path for path in (tmp_path / "three").rglob("*") if path.is_file()] == []
    assert fetch_rows(folder, place.group()) == 1


def test_shards_that_the_record_does_not_list_yet_count(place: Place, run: Run, tmp_path: Path) -> None:
    uploaded(run, place)
    record = json.loads(place.read(f"{BASE}manifest.json"))
    record["manifest"]["shards"] = record["manifest"]["shards"][:2]
    place.put(f"{BASE}manifest.json", json.dumps(record).encode())
    place.put(names(9)[8], b"foreign\n")
    made = restore("r", place.group(), tmp_path / "two")
    assert (made.rows, made.unread) == (8, ["completions_000008.jsonl"])
    with open_shards(made.folder) as shards:
        assert list(shards.pending()) == [8]


def test_what_is_damaged_is_told_and_no_folder_made(place: Place, run: Run, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        restore("r", place.group(), tmp_path / "two")
    uploaded(run, place)
    place.s3.delete_object(Bucket=place.name, Key=names(1)[0])
    with pytest.raises(StoreError, match=r"lacks shards.*completions_000000\.jsonl"):
        restore("r", place.group(), tmp_path / "two")
    place.put(f"{BASE}prompts.jsonl.gz", b"no gzip")
    with pytest.raises(StoreError, match="damaged"):
        restore("r", place.group(), tmp_path / "two")
    assert not (tmp_path / "two" / "outputs" / "r").exists()
    with pytest.raises(StoreError, match="there already"):
        restore("r", place.group(), tmp_path / "one")


def test_a_run_that_is_still_written_is_told(place: Place, run: Run, tmp_path: Path) -> None:
    with run.open() as shards:
        uploads = Uploader(run.folder, place.group(), shards, Events())
        shards.commit([row(0), row(1)])
        until(lambda: not uploads.left)
        made = restore("r", place.group(), tmp_path / "two")
        assert made.writer is not None
        assert "one/outputs/r" in made.writer
        assert made.rows == 2  # by its shard, which the record has not yet
        uploads.finish(30.0)


def test_a_shard_that_is_missing_here_and_was_never_uploaded_is_an_error(place: Place, run: Run) -> None:
    with run.open() as shards:
        shards.commit([row(0), row(1)])
    (run.folder.completions / "completions_000000.jsonl").unlink()
    with pytest.raises(CorruptShardError, match="is missing"):
        run.open()


def test_verify_finds_differences_both_ways(place: Place, run: Run) -> None:
    uploaded(run, place)
    first, second, third, _ = names(4)
    place.s3.delete_object(Bucket=place.name, Key=first)
    place.put(second, b"short")
    place.put(third, place.read(third).replace(b"answer", b"ANSWER"))
    place.put(f"{BASE}completions/completions_000009.jsonl", b"foreign")
    place.s3.delete_object(Bucket=place.name, Key=f"{BASE}prompts.jsonl.gz")
    with (run.folder.completions / "failures.jsonl").open("ab") as file:
        file.write(b'{"index":8}\n')
    verdict = verify(run.folder, place.group())
    assert verdict.shards == 1
    found = [problem.removeprefix(f"s3://{place.name}/{BASE}") for problem in verdict.problems]
    assert found[0].startswith("completions/completions_000000.jsonl: missing")
    assert found[1].startswith("completions/completions_000001.jsonl: 5 bytes, the manifest has")
    assert found[2].startswith("completions/completions_000002.jsonl: SHA-256")
    assert found[3] == "completions/completions_000009.jsonl: foreign"
    assert found[4] == "prompts.jsonl.gz: missing; upload it with dfexp store upload r"
    assert found[5] == "12 bytes of failures.jsonl are not uploaded: dfexp store upload r"
    assert len(found) == 6


def test_the_commands(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "one", store=place.group())
    monkeypatch.chdir(tmp_path / "one")
    with run.open() as shards:
        shards.commit([row(0), row(1), row(2)])
    assert cli.main(["store", "verify", "r"]) == 1
    assert "holds no run" in capsys.readouterr().out
    assert cli.main(["store", "upload", "r"]) == 0
    assert "2 shard(s)" in capsys.readouterr().out
    assert cli.main(["store", "verify", "r"]) == 0
    place.put(f"{BASE}notes.txt", b"foreign")
    assert cli.main(["store", "verify", "r"]) == 1
    (tmp_path / "two" / "outputs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "two")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", place.url)
    capsys.readouterr()
    assert cli.main(["store", "restore", "r"]) == 2
    assert cli.main(["store", "restore", "r", "--from", f"s3://{place.name}/expansion/other"]) == 2
    assert cli.main(["store", "restore", "r", "--from", f"s3://{place.name}/expansion/r"]) == 0
    said = capsys.readouterr().out
    assert f"looking in bucket {place.name} at {place.url} ..." in said
    assert "3 of 10 rows are done, in 2 shard(s)" in said
    assert cli.main(["store", "restore", "r", "--rows"]) == 0
    assert len(list(read_rows(tmp_path / "two" / "outputs" / "r" / "completions"))) == 3
    (tmp_path / "three" / "outputs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "three")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    Path("p.yaml").write_text(f"store: {{bucket: {place.name}, prefix: wrong, endpoint_url: '{place.url}'}}\n")
    asked = ["store", "restore", "r", "--params", "p.yaml", "--set", "store.prefix=expansion", "--rows"]
    assert cli.main(asked) == 0
    assert len(list(read_rows(tmp_path / "three" / "outputs" / "r" / "completions"))) == 3


def test_an_upload_by_hand_is_known_to_the_next_start(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, store=place.group())
    monkeypatch.chdir(tmp_path)
    with run.open() as shards:
        shards.commit([row(index) for index in range(10)])
    control.write_status(run.folder, {"state": "ended", "not_uploaded": 5})
    assert cli.main(["store", "upload", "r"]) == 0
    place.put(f"{BASE}README", b"of somebody")
    assert cli.main(["store", "upload", "r"]) == 1, "and it differs"
    assert "README: foreign" in capfd.readouterr().out
    assert control.read_status(run.folder) == {"state": "ended", "not_uploaded": 0}


def test_a_count_of_a_start_that_had_a_store_is_nothing_to_a_run_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, ended = Run(tmp_path), {"state": "ended", "asked": 10, "done": 10, "failed": 0, "not_uploaded": 5}
    with run.open() as shards:
        shards.commit([row(index) for index in range(10)])
    assert _conclude(run.folder, ended) == 0
    assert "NOT on S3" not in capsys.readouterr().out


def test_a_store_needs_a_bucket_and_holds_no_secret() -> None:
    with pytest.raises(Exception, match=r"prefix is given, but no bucket"):
        params.StoreGroup(prefix="p")
    assert params.StoreGroup().bucket is None
    assert not [name for name in params.StoreGroup.model_fields if "key" in name or "secret" in name or "token" in name]


def test_the_manifest_keeps_what_is_needed_of_a_shard_elsewhere(place: Place, run: Run, tmp_path: Path) -> None:
    uploaded(run, place)
    folder = restore("r", place.group(), tmp_path / "two").folder
    old, new = read_manifest(run.folder.completions), read_manifest(folder.completions)
    assert old is not None
    assert new is not None
    assert [(one.name, one.sha256, one.indices) for one in new.shards] == [
        (one.name, one.sha256, one.indices) for one in old.shards
    ]
    assert all(one.uploaded for one in new.shards)


@pytest.mark.slow
def test_a_run_with_no_row_left_is_uploaded_without_servers(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, store=place.group())
    recorded = json.loads(run.folder.run_json.read_text())
    sampling = {"sampling": sampling_text(params.validate(recorded["spec"], "it").generation)}
    write_json(run.folder.run_json, {**recorded, "fingerprint": sampling, "fleet": {"engine": "external"}})
    about = {"total": 10, "fingerprint": sampling, "rows_per_shard": 4}
    with Shards.open(run.folder.completions, **about) as shards:
        shards.commit([row(index) for index in range(9)], [failure(9)])
    monkeypatch.chdir(tmp_path)
    assert cli.main(["resume", "r"]) == 0
    said = capsys.readouterr().out
    assert "nothing is left to do: 9 succeeded + 1 failed = 10 of 10 asked" in said
    assert "3 shard(s)" in said
    assert verify(run.folder, place.group()).problems == []
    place.put(f"{BASE}README", b"of somebody")
    assert cli.main(["resume", "r"]) == 0, "a foreign object is left alone"
    said = capsys.readouterr().out
    assert "README: foreign" in said
    assert "NOT on S3" not in said
    place.s3.delete_object(Bucket=place.name, Key=f"{BASE}README")
    (tmp_path / "two" / "outputs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "two")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", place.url)
    assert cli.main(["store", "restore", "r", "--from", f"s3://{place.name}/expansion/r"]) == 0
    assert "Nothing is left to do: 9 succeeded + 1 failed" in capsys.readouterr().out


def test_restores_at_once_make_one_whole_folder(place: Place, run: Run, tmp_path: Path) -> None:
    uploaded(run, place)
    started = Barrier(3, timeout=30.0)

    def once() -> object:
        started.wait()
        try:
            return restore("r", place.group(), tmp_path / "two").shards
        except (StoreError, StorageError) as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        results = [future.result() for future in [pool.submit(once) for _ in range(3)]]
    assert results.count(4) == 1
    assert [path.name for path in (tmp_path / "two" / "outputs").iterdir()] == ["r"]
    assert fetch_rows(RunFolder(tmp_path / "two" / "outputs" / "r"), place.group()) == 4


def test_a_record_that_is_written_while_it_is_read_is_no_damage(place: Place, run: Run, tmp_path: Path) -> None:
    assert upload(run, place, range(4)) == []

    def rule(method: str, path: str, before: int) -> None:
        if method == "GET" and path.endswith("manifest.json") and not before:
            assert upload(run, place, range(4, 8)) == []

    with Proxy(place.url, rule) as proxy:
        assert restore("r", place.group(endpoint_url=proxy.url), tmp_path / "two").rows == 8


def test_a_shard_that_is_gone_everywhere_is_in_no_count(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the report and of the last lines of `dfexp run`, which does not say that it could be uploaded."""
    run = Run(tmp_path / "one", rows=8, store=place.group())
    recorded = json.loads(run.folder.run_json.read_text())
    monkeypatch.setitem(FINGERPRINT, "sampling", sampling_text(params.validate(recorded["spec"], "it").generation))
    write_json(run.folder.run_json, {**recorded, "fingerprint": FINGERPRINT})
    assert upload(run, place, range(8)) == []
    folder = restore("r", place.group(), tmp_path / "two").folder
    place.s3.delete_object(Bucket=place.name, Key=names(1)[0])
    monkeypatch.chdir(tmp_path / "two")
    (tmp_path / "two" / "pyproject.toml").touch()
    assert cli.main(["store", "upload", "r"]) == 1
    assert "neither here nor, as it was uploaded, in the bucket" in capfd.readouterr().err
    count, _, words = on_s3(load(folder))
    assert (count, "LOST: 1, " in words) == (3, True)
    assert _conclude(folder, {"state": "ended", "asked": 8, "done": 8, "failed": 0}) == 1
    said = capfd.readouterr().out
    assert "LOST on S3: 1 shard(s), from completions_000000.jsonl" in said
    assert "NOT on S3" not in said
