"""What opening makes of a folder that a crash, a person or a copy left in some state."""

import errno
import json
import os
import shutil

import pytest

from dfexp.errors import CorruptShardError, FingerprintError, ShardError, StorageError
from dfexp.jsonl import encode_line
from dfexp.shards import read_manifest, read_rows
from tests.shards.os_tap import REAL, RefuseAt, tapped
from tests.shards.support import check_consistent, failure, finish, open_run, read_indices, row, rows

SEALED = "completions_{:06d}.jsonl"


@pytest.fixture
def folder(quick):
    """Shards 0 and 1 sealed, rows 10 to 12 in the open shard 2, row 20 failed."""
    folder = quick / "completions"
    with open_run(folder) as run:
        run.commit(rows(range(13)), [failure(20)])
    return folder


def sealed(folder, number):
    return folder / SEALED.format(number)


def partial(folder, number):
    return folder / (SEALED.format(number) + ".partial")


def state(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def refused(folder, words, error=CorruptShardError):
    """Opening raises, and changes nothing."""
    before = state(folder)
    with pytest.raises(error, match=words) as caught:
        open_run(folder)
    assert type(caught.value) is error
    assert state(folder) == before
    return str(caught.value)


def line(index):
    return encode_line(row(index).to_json())


def test_a_torn_last_line_is_cut_and_counted(folder):
    whole = partial(folder, 2).read_bytes()
    with partial(folder, 2).open("ab") as file:
        file.write(line(13)[:-1])
    assert read_indices(folder) == list(range(13))
    with open_run(folder) as run:
        assert run.repairs["cut_bytes"] == len(line(13)) - 1
        assert partial(folder, 2).read_bytes() == whole
        assert run.done == 13
    finish(folder)


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\0\n", line(13)[:40] + b"\0" * 60 + b"\n" + line(14)])
def test_what_follows_a_lost_page_is_cut(folder, tail):
    whole = partial(folder, 2).read_bytes()
    with partial(folder, 2).open("ab") as file:
        file.write(tail)
    assert read_indices(folder) == list(range(13))
    with open_run(folder) as run:
        assert (run.repairs["cut_bytes"], run.done) == (len(tail), 13)
        assert partial(folder, 2).read_bytes() == whole
    finish(folder)


def test_a_whole_line_that_no_commit_returned_for_counts_as_done(folder):
    with partial(folder, 2).open("ab") as file:
        file.write(line(13))
    with open_run(folder) as run:
        assert (run.done, run.is_done(13)) == (14, True)
    finish(folder)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"{torn\n", r"2\.jsonl\.partial:4 is not a record"),
        (b"[]\n", r":4 is not a record: a JSON object was expected, found list"),
        (b"\n", ":4 is not a record"),
        (b"\xff\xfe\n", ":4 is not a record"),
        (b'{"index": 14, "text": ""}\n', ":4 is not a row of this run: it has no 'messages'"),
        (
            line(14).replace(b'"index":14', b'"index":40'),
            r":4 is not a row of this run: its index 40 is not in 0\.\.39",
        ),
        (line(14).replace(b'"index":14', b'"index":true'), "its index True"),
        (line(14).replace(b'"index":14', b'"index":"14"'), "its index '14'"),
    ],
)
def test_a_malformed_line_in_the_middle_is_refused(folder, bad, words):
    with partial(folder, 2).open("ab") as file:
        file.write(bad + line(15))
    refused(folder, words)


def test_a_malformed_line_stops_readers_too(folder):
    data = sealed(folder, 0).read_bytes()
    sealed(folder, 0).write_bytes(data.replace(b"{", b"(", 1))
    with pytest.raises(CorruptShardError, match=r"completions_000000\.jsonl:1 "):
        list(read_rows(folder))
    sealed(folder, 0).write_bytes(data[:-1])
    with pytest.raises(CorruptShardError, match=r"completions_000000\.jsonl:5 ends in the middle"):
        list(read_rows(folder))


@pytest.mark.parametrize("change", [lambda data: data.replace(b"0", b"1", 1), lambda data: data[:-9], lambda data: b""])
def test_an_edited_sealed_shard_is_refused_with_both_checksums(folder, change):
    entry = read_manifest(folder).shards[0]
    sealed(folder, 0).write_bytes(change(sealed(folder, 0).read_bytes()))
    message = refused(folder, r"completions_000000\.jsonl was changed after it was sealed")
    assert entry.sha256 in message
    assert message.count("SHA-256") == 1


def test_a_touched_or_copied_folder_is_read_again_and_trusted_from_then_on(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    with open_run(copy) as run:
        check_consistent(copy, run)
        assert not run.repairs
    assert [entry.mtime_ns for entry in read_manifest(copy).shards] == [
        sealed(copy, number).stat().st_mtime_ns for number in (0, 1)
    ]
    finish(copy)


def test_an_untouched_sealed_shard_is_not_read(folder):
    entry = read_manifest(folder).shards[0]
    sealed(folder, 0).write_bytes(b"x" * entry.bytes)
    os.utime(sealed(folder, 0), ns=(0, entry.mtime_ns))
    with open_run(folder) as run:
        assert run.done == 13


@pytest.mark.parametrize("number", [0, 1])
def test_a_missing_shard_is_refused_and_the_fix_works(folder, number):
    """Its line, and no more than that, is deleted: also the last one, which leaves a comma behind."""
    moved = sealed(folder, number).rename(folder.parent / "moved")
    refused(folder, rf"completions_00000{number}\.jsonl is missing.*delete its line")
    with pytest.raises(CorruptShardError, match=rf"completions_00000{number}\.jsonl is missing"):
        list(read_rows(folder))
    kept = (folder / "manifest.json").read_text().splitlines(keepends=True)
    (folder / "manifest.json").write_text("".join(line for line in kept if sealed(folder, number).name not in line))
    with open_run(folder) as run:
        assert sorted(run.pending())[:6] == [*range(5 * number, 5 * number + 5), 13]
        check_consistent(folder, run)
    finish(folder)
    assert moved.exists()


def test_a_gap_without_a_manifest_is_refused_and_the_fix_works(folder):
    (folder / "manifest.json").unlink()
    sealed(folder, 0).unlink()
    refused(folder, r"no completions_000000\.jsonl, though it has later shards.*an empty file")
    sealed(folder, 0).touch()
    with open_run(folder) as run:
        assert list(run.pending())[:5] == [0, 1, 2, 3, 4]
    finish(folder)


@pytest.mark.parametrize(
    "content", [None, b"", b"0\n1\n", b"9\n" * 10, b"\0" * 20, b"0\n1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n"]
)
def test_the_done_list_is_rebuilt_from_the_shards(folder, content):
    path = folder / ".done_indices"
    path.unlink() if content is None else path.write_bytes(content)
    with open_run(folder) as run:
        assert run.repairs["rebuilt_done_indices"]
        check_consistent(folder, run)
    with open_run(folder) as run:
        assert not run.repairs
    finish(folder)


@pytest.mark.parametrize(
    "content", [b"my notes\n", b"0\n1\n2 # checked by hand\n", b'["0"]', b"1 2 3\n", b"0.5\n", b"-1\n", b"\xff\xfe"]
)
def test_a_done_list_that_dfexp_cannot_have_written_is_never_replaced(folder, content):
    path = folder / ".done_indices"
    path.write_bytes(content)
    refused(folder, r"\.done_indices exists, and this run did not write it\. Move it away", ShardError)
    path.rename(folder.parent / "moved")
    finish(folder)
    assert (folder.parent / "moved").read_bytes() == content


@pytest.mark.parametrize("content", [b"my notes\n", b"{}", b"[1]\n", b'{"name": "lock"}', b"123\n", b"\0\0notes"])
def test_a_lock_that_dfexp_cannot_have_written_is_never_replaced(folder, content):
    path = folder / ".lock"
    path.write_bytes(content)
    refused(folder, r"\.lock exists, and this run did not write it\. Move it away", ShardError)
    assert path.read_bytes() == content
    path.unlink()
    finish(folder)


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
@pytest.mark.parametrize(
    "name", [".lock", ".done_indices", "manifest.json", "failures.jsonl", "completions_000002.jsonl.partial"]
)
def test_a_link_or_a_folder_under_a_name_of_the_run_is_never_replaced_nor_written_through(folder, name, kind):
    path, target = folder / name, folder.parent / "precious"
    path.rename(target)
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    before = target.read_bytes()
    if kind == "dangling link":
        target.unlink()
    with pytest.raises(ShardError, match=f"{name}"):
        open_run(folder)
    assert path.is_symlink() == (kind != "folder")
    assert target.exists() == (kind != "dangling link")
    assert kind == "dangling link" or target.read_bytes() == before


@pytest.mark.parametrize("torn_bytes", [None, 1, 200, 3000])
def test_a_lost_manifest_is_rebuilt_from_the_shards_and_a_torn_one_once_it_is_removed(folder, torn_bytes):
    """It is replaced whole, so a torn one is no crash: it may not pass for another run's, nor for none."""
    path = folder / "manifest.json"
    data = path.read_bytes()
    if torn_bytes is not None:
        path.write_bytes(data[: -torn_bytes - 1])
        refused(folder, "manifest.json is not a manifest: .* remove it")
    path.unlink()
    with open_run(folder) as run:
        assert run.repairs["adopted"] == ["completions_000000.jsonl", "completions_000001.jsonl"]
        check_consistent(folder, run)
    assert path.read_bytes() == data
    finish(folder)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda value: value.update(extra=1), "Extra inputs are not permitted at .*'extra'"),
        (lambda value: value.pop("fingerprint"), "Field required at .*'fingerprint'"),
        (lambda value: value["shards"][0].update(rows=4), "4 rows"),
        (lambda value: value["shards"][0]["indices"].__setitem__(0, 40), "indices below 40"),
        (lambda value: value["shards"][0].update(indices="x"), "valid array at .*'indices'"),
        (lambda value: value["shards"][0].update(name="../x"), "is not the name of a shard"),
        (lambda value: value["shards"].reverse(), "order of their numbers"),
        (lambda value: value["shards"].append(value["shards"][1]), "is there twice"),
    ],
)
def test_a_manifest_edited_into_something_else_is_refused(folder, edit, words):
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    refused(folder, f"manifest.json is not a manifest: .*{words}")


def test_what_the_store_noted_survives_a_seal(folder):
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    value["shards"][0]["uploaded"] = {"etag": "x"}
    path.write_text(json.dumps(value))
    finish(folder)
    assert read_manifest(folder).shards[0].uploaded == {"etag": "x"}


def test_the_manifest_of_another_run_is_never_merged(folder, tmp_path):
    with open_run(tmp_path / "other", model="other/model") as other:
        other.commit(rows(range(5)))
    shutil.copy(tmp_path / "other" / "manifest.json", folder / "manifest.json")
    refused(folder, "model was other/model, is now some/model", FingerprintError)


def test_a_published_shard_that_no_manifest_lists_is_adopted(folder):
    os.rename(partial(folder, 2), sealed(folder, 2))
    with open_run(folder) as run:
        assert run.repairs["adopted"] == ["completions_000002.jsonl"]
        check_consistent(folder, run)
    finish(folder)


@pytest.mark.parametrize("link", [os.link, shutil.copyfile])
def test_a_shard_under_both_names_is_healed(folder, link):
    link(sealed(folder, 1), partial(folder, 1))
    partial(folder, 2).rename(folder.parent / "later")
    with open_run(folder) as run:
        assert not partial(folder, 1).exists()
        check_consistent(folder, run)
    finish(folder)


def test_an_index_twice_names_both_files(folder):
    with partial(folder, 2).open("ab") as file:
        file.write(line(3))
    refused(folder, r"row 3 is in \S+/completions_000000\.jsonl and in \S+/completions_000002\.jsonl\.partial")
    partial(folder, 2).write_bytes(line(13) * 2)
    refused(folder, r"row 13 is in (\S+partial) and in \1\.")


def test_a_shard_copied_in_from_another_run_is_refused(folder, tmp_path):
    with open_run(tmp_path / "other") as other:
        other.commit(rows([30, 4, 31, 32, 33]))
    partial(folder, 2).unlink()
    shutil.copy(sealed(tmp_path / "other", 0), sealed(folder, 2))
    refused(folder, r"row 4 is in \S+000000\.jsonl and in \S+000002\.jsonl")


@pytest.mark.parametrize("foreign", [b"not ours\n", b""])
def test_a_foreign_file_under_the_next_name_is_never_replaced(folder, foreign):
    with open_run(folder) as run:
        sealed(folder, 2).write_bytes(foreign)
        before = state(folder)
        with pytest.raises(ShardError, match=r"completions_000002\.jsonl exists.*Move it away"):
            run.commit(rows([13, 14]))
        assert state(folder) == before
        run.commit(rows([13]))  # what does not fill the shard goes on
        with pytest.raises(ShardError, match=r"completions_000002\.jsonl exists"):
            run.seal()
    assert sealed(folder, 2).read_bytes() == foreign
    refused(folder, r"completions_000002\.jsonl exists", ShardError)
    sealed(folder, 2).rename(folder.parent / "moved")
    with open_run(folder) as run:
        assert run.done == 14
    finish(folder)


def test_a_foreign_open_shard_is_never_replaced(folder):
    with open_run(folder) as run:
        partial(folder, 3).write_bytes(b"not ours")
        with pytest.raises(ShardError, match=r"completions_000003\.jsonl\.partial exists"):
            run.commit(rows(range(13, 17)))
        assert (run.done, read_indices(folder)) == (13, list(range(13)))
        partial(folder, 3).unlink()
        run.commit(rows(range(13, 17)))
        check_consistent(folder, run)


def test_a_foreign_file_that_wins_the_race_for_the_name_stays(folder):
    def slip_in(name, args, kwargs):
        if name == "link":
            sealed(folder, 2).write_bytes(b"foreign")
        return REAL[name](*args, **kwargs)

    with open_run(folder) as run, tapped(slip_in):
        assert run.commit(rows([13, 14])) == []  # the rows are safe, the shard waits for its name
        assert "Move it away" in str(run.seal_error)
        with pytest.raises(ShardError, match="Move it away"):
            run.commit(rows([15]))
    assert sealed(folder, 2).read_bytes() == b"foreign"
    sealed(folder, 2).unlink()
    with open_run(folder) as run:
        assert run.done == 15
        check_consistent(folder, run)
    finish(folder)


def test_a_file_system_without_hard_links_renames(folder):
    def no_links(name, args, kwargs):
        if name == "link":
            raise OSError(errno.EPERM, "no hard links here")
        return REAL[name](*args, **kwargs)

    with open_run(folder) as run, tapped(no_links):
        assert [[*entry.indices] for entry in run.commit(rows([13, 14]))] == [[10, 11, 12, 13, 14]]
        check_consistent(folder, run)
        run.commit(rows(range(15, 19)))
        sealed(folder, 3).write_bytes(b"foreign")
        with pytest.raises(ShardError, match="Move it away"):
            run.seal()
        assert sealed(folder, 3).read_bytes() == b"foreign"


def test_an_open_shard_before_later_ones_is_refused(folder):
    shutil.copy(partial(folder, 2), partial(folder, 4))
    refused(folder, r"000002\.jsonl\.partial is an open shard, though later shards exist")
    shutil.move(partial(folder, 4), partial(folder, 3))
    refused(folder, r"row 10 is in \S+000002\.jsonl\.partial and in \S+000003\.jsonl\.partial")
    partial(folder, 3).write_bytes(line(15))
    with partial(folder, 2).open("ab") as file:
        file.write(b"{")
    refused(folder, r"000002\.jsonl\.partial is an open shard, though later shards exist")
    partial(folder, 3).unlink()
    sealed(folder, 3).write_bytes(line(15))
    refused(folder, r"000002\.jsonl\.partial is an open shard, though later shards exist")
    sealed(folder, 3).unlink()
    finish(folder)


@pytest.mark.parametrize("name", ["completions_000002.jsonl.partial", "failures.jsonl"])
def test_a_file_that_is_removed_under_the_run_is_noticed(folder, name):
    with open_run(folder) as run:
        (folder / name).unlink()
        for _ in range(2):
            with pytest.raises(CorruptShardError, match=f"{name} was removed while in use"):
                run.commit(rows([13]), [failure(14)])


def test_a_full_shard_that_is_removed_before_it_is_sealed_is_noticed(folder):
    with open_run(folder) as run:
        with tapped(RefuseAt(1), ("link",)):
            run.commit(rows([13, 14]))
        assert "Input/output error" in str(run.seal_error)
        partial(folder, 2).unlink()
        with pytest.raises(CorruptShardError, match=r"000002\.jsonl\.partial was removed while in use"):
            run.commit(rows([15]))


@pytest.mark.parametrize(
    ("bad", "words"),
    [(b"{}\n", ":2 is not a failure"), (b"x\n", ":2 is not a record"), (b"[]\n", ":2 is not a record")],
)
def test_a_damaged_failure_is_refused(folder, bad, words):
    with (folder / "failures.jsonl").open("ab") as file:
        file.write(bad)
    refused(folder, rf"failures\.jsonl{words}")


@pytest.mark.parametrize("tail", [b'{"index":21', b"\0\0\n"])
def test_a_torn_failure_is_cut_and_counted(folder, tail):
    with (folder / "failures.jsonl").open("ab") as file:
        file.write(tail)
    with open_run(folder) as run:
        assert (run.failed, run.repairs["cut_failure_bytes"]) == (1, len(tail))
    finish(folder)


def test_what_killed_writers_left_beside_their_files_is_removed(folder):
    for name in (".manifest.json.77-1.tmp", "..done_indices.77-1.tmp"):
        (folder / name).write_text("half")
    finish(folder)


def test_what_a_disk_would_not_take_back_is_never_sealed(folder):
    with open_run(folder) as run:
        with tapped(RefuseAt(1, times=3), ("write", "ftruncate")), pytest.raises(StorageError):
            run.commit(rows([13]))
        assert partial(folder, 2).read_bytes()[-1:] != b"\n"
        assert [entry.rows for entry in run.seal()] == [3]
        check_consistent(folder, run)
    finish(folder)


def test_an_empty_shard_that_could_not_be_removed_does_not_stop_a_resume(folder):
    """The next shard was begun for a commit that was then refused; later the one before it was torn."""
    partial(folder, 3).touch()
    with partial(folder, 2).open("ab") as file:
        file.write(line(13)[:9])
    with open_run(folder) as run:
        assert (run.done, run.repairs) == (13, {"cut_bytes": 9})
        check_consistent(folder, run)
    finish(folder)
