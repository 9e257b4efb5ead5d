import os
import pathlib
import subprocess
import sys
import threading

import pytest

from dfexp.errors import FingerprintError, LockedError, ShardError
from dfexp.jsonl import read_log
from dfexp.shards import list_shards, read_failures, read_manifest, read_rows
from tests.shards.support import AnyKind, check_consistent, failure, finish, open_run, read_indices, row, rows


@pytest.fixture
def folder(quick):
    return quick / "run" / "completions"


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("completions_"))


def test_rows_come_back_as_they_were_committed(folder):
    with open_run(folder) as run:
        run.commit(rows([3, 1, 2]))
        assert (run.done, run.is_done(3), run.is_done(0)) == (3, True, False)
        assert read_indices(folder) == [3, 1, 2]
        first = next(read_rows(folder))
    keys = "index id messages text finish_reason prompt_tokens completion_tokens max_tokens server config_id attempt"
    assert " ".join(first) == keys + " submitted_at latency_s flags"


def test_one_commit_may_fill_several_shards(folder):
    with open_run(folder) as run:
        sealed = run.commit(rows(range(12)))
        assert [entry.name for entry in sealed] == ["completions_000000.jsonl", "completions_000001.jsonl"]
        assert [[*entry.indices] for entry in sealed] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        assert names(folder) == [*(entry.name for entry in sealed), "completions_000002.jsonl.partial"]
        check_consistent(folder, run)


def test_a_full_shard_leaves_no_empty_one_behind(folder):
    with open_run(folder, total=10) as run:
        run.commit(rows(range(10)))
        assert run.seal() == []
    assert names(folder) == ["completions_000000.jsonl", "completions_000001.jsonl"]


def test_a_drained_run_seals_short_and_goes_on_with_the_next_number(folder):
    with open_run(folder) as run:
        run.commit(rows([7]))
        assert [entry.rows for entry in run.seal()] == [1]
        run.commit(rows([8]))
        assert names(folder) == ["completions_000000.jsonl", "completions_000001.jsonl.partial"]
    finish(folder)


def test_resume_goes_on_in_the_open_shard(folder):
    with open_run(folder) as run:
        run.commit(rows([0, 1, 2]))
    with open_run(folder) as run:
        assert (run.done, bool(run.repairs)) == (3, False)
        assert [[*entry.indices] for entry in run.commit(rows([9, 8, 7]))] == [[0, 1, 2, 9, 8]]
        check_consistent(folder, run)
    finish(folder)


@pytest.mark.parametrize(
    ("before", "after", "sizes"), [(8, 3, [7, 3, 3, 3, 3, 1]), (3, 8, [3, 3, 8, 6]), (7, 7, [7, 7, 6])]
)
def test_rows_per_shard_may_change_between_runs(folder, before, after, sizes):
    with open_run(folder, rows_per_shard=before) as run:
        run.commit(rows(range(7)))
    with open_run(folder, rows_per_shard=after) as run:
        check_consistent(folder, run)
        run.commit(rows(range(7, 20)))
        check_consistent(folder, run)
        run.seal()
    assert [entry.rows for entry in read_manifest(folder).shards] == sizes
    finish(folder, rows_per_shard=after)


def test_a_shard_that_was_full_when_the_run_died_is_sealed_on_opening(folder):
    with open_run(folder, rows_per_shard=9) as run:
        run.commit(rows(range(7)))
    open_run(folder, rows_per_shard=7).close()
    assert names(folder) == ["completions_000000.jsonl"]


def test_a_run_without_prompts_opens(folder):
    with open_run(folder, total=0) as run:
        assert (len(run.pending()), run.seal()) == (0, [])


@pytest.mark.parametrize(("total", "rows_per_shard"), [(-1, 5), (5, 0)])
def test_a_run_that_cannot_be_is_refused(folder, total, rows_per_shard):
    with pytest.raises(ShardError, match=f"rows_per_shard is {rows_per_shard} and total {total}"):
        open_run(folder, total=total, rows_per_shard=rows_per_shard)
    assert not folder.exists()


def test_a_lone_surrogate_anywhere_is_repaired_and_flagged(folder):
    odd = row(0, "half \ud83d, pair \ud83d\ude00", messages=({"role": "user", "content": [{"te\udc00xt": "\udfff"}]},))
    with open_run(folder) as run:
        run.commit(
            [odd, row(1, "\ud800", flags=("surrogates_repaired", "empty")), row(2)], [failure(3, message="\ud800")]
        )
    found = list(read_rows(folder))
    assert found[0]["text"] == "half \ufffd, pair \U0001f600"
    assert found[0]["messages"] == [{"role": "user", "content": [{"te\ufffdxt": "\ufffd"}]}]
    assert [record["flags"] for record in found] == [["surrogates_repaired"], ["surrogates_repaired", "empty"], []]
    assert next(read_failures(folder))["message"] == "\ufffd"
    for path in (*folder.glob("*.partial"), folder / "failures.jsonl"):
        assert path.read_bytes().isascii()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([3], "row 3 is done already"),
        ([5, 5], "row 5 is there twice"),
        ([5, 40], r"index 40 is not in 0\.\.39"),
        ([-1], "index -1"),
        ([True], "index True"),
    ],
)
def test_a_row_that_must_not_be_written_is_refused_before_anything_is(folder, bad, words):
    with open_run(folder) as run:
        run.commit(rows([3]))
        with pytest.raises(ShardError, match=words):
            run.commit([row(9), *map(row, bad)], [failure(10)])
        assert (run.done, run.failed, read_indices(folder)) == (1, 0, [3])
        run.commit(rows([9]))
    assert read_indices(folder) == [3, 9]


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_a_row_that_is_no_json_is_refused(folder, value):
    with open_run(folder) as run:
        with pytest.raises(ShardError, match="row 4 cannot be written"):
            run.commit([row(3), row(4, latency_s=value)])
        assert read_indices(folder) == []


def test_a_failure_outside_the_run_is_refused(folder):
    with open_run(folder) as run, pytest.raises(ShardError, match="index 40"):
        run.commit(rows([1]), [failure(40)])
    assert read_indices(folder) == []


def test_failures_stay_failures_until_they_are_asked_for(folder):
    with open_run(folder, total=6) as run:
        run.commit(rows([0]), [failure(1, "timeout"), failure(2, "refused"), failure(3, "timeout")])
        assert (run.done, run.failed) == (1, 3)
        assert list(run.pending()) == [4, 5]
    with open_run(folder, total=6) as run:
        assert (run.done, run.failed, run.failures_by_kind()) == (1, 3, {"timeout": 2, "refused": 1})
        assert list(run.pending()) == [4, 5]
        assert list(run.pending({"timeout"})) == [1, 3, 4, 5]
        assert list(run.pending(AnyKind())) == [1, 2, 3, 4, 5]
        run.commit(rows([1]), [failure(3, "refused")])
        assert (run.done, run.failed, run.failures_by_kind()) == (2, 2, {"refused": 2})
    with open_run(folder, total=6) as run:
        assert (run.done, run.failed, run.failures_by_kind()) == (2, 2, {"refused": 2})
        assert list(run.pending({"refused"})) == [2, 3, 4, 5]
    assert [(record["index"], record["kind"]) for record in read_failures(folder)] == [(2, "refused"), (3, "refused")]
    assert len(list(read_log(folder / "failures.jsonl"))) == 4


def test_failures_that_stand_come_in_the_order_of_the_last_ones(folder):
    with open_run(folder) as run:
        run.commit([], [failure(1, "timeout"), failure(2), failure(1, "refused")])
    assert [(record["index"], record["kind"]) for record in read_failures(folder)] == [(2, "timeout"), (1, "refused")]


def test_an_index_both_done_and_failed_is_done(folder):
    with open_run(folder, total=5) as run:
        run.commit(rows([1]), [failure(1)])
        run.commit([], [failure(1), failure(2)])
        run.commit(rows([2]))
        assert (run.done, run.failed, list(run.pending(AnyKind()))) == (2, 0, [0, 3, 4])
        run.seal()
        run.commit(rows([3]), [failure(3)])
    with open_run(folder, total=5) as run:
        assert (run.done, run.failed, run.failures_by_kind()) == (3, 0, {})
    assert list(read_failures(folder)) == []


def test_a_second_writer_is_told_who_the_first_one_is(folder):
    child = "import sys, pathlib; from tests.shards.support import open_run; open_run(pathlib.Path(sys.argv[1]))"
    root = pathlib.Path(__file__).parents[2]
    with open_run(folder):
        ended = subprocess.run([sys.executable, "-c", child, folder], cwd=root, capture_output=True, text=True)
    assert "LockedError" in ended.stderr
    assert f"process {os.getpid()} on {os.uname().nodename}" in ended.stderr
    with open_run(folder) as run, pytest.raises(LockedError, match=f"process {os.getpid()}"):
        open_run(folder)
    run.close()


@pytest.mark.parametrize("note", ["", "\0" * 40, '{"pi', '{"pid":1}', '{"pid":1,"host":"h","since":"x"}'])
def test_a_lock_without_a_readable_note_still_locks(folder, note):
    with open_run(folder):
        (folder / ".lock").write_text(note)
        with pytest.raises(LockedError, match="another process"):
            open_run(folder)
    open_run(folder).close()


@pytest.mark.parametrize("part", ["prompts", "model", "sampling"])
def test_another_fingerprint_is_named(folder, part):
    with open_run(folder) as run:
        run.commit(rows(range(6)))
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    with pytest.raises(FingerprintError, match=rf"\({part} was \S+, is now other\)"):
        open_run(folder, **{part: "other"})
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == before
    finish(folder)


def test_another_number_of_prompts_is_another_run(folder):
    open_run(folder, total=40).close()
    with pytest.raises(FingerprintError, match="total was 40, is now 41"):
        open_run(folder, total=41)


def test_a_reentrant_commit_is_refused_and_the_outer_one_succeeds(folder):
    class Rows(list):
        def __iter__(self):
            with pytest.raises(ShardError, match="two threads"):
                run.commit(rows([9]))
            return super().__iter__()

    with open_run(folder) as run:
        run.commit(Rows(rows([1])))
    assert read_indices(folder) == [1]


def test_close_waits_for_the_commit_under_way(folder):
    close = threading.Thread(target=lambda: run.close())

    class Rows(list):
        def __iter__(self):
            close.start()
            close.join(0.3)
            assert close.is_alive()
            return super().__iter__()

    run = open_run(folder)
    run.commit(Rows(rows([1])))
    close.join(30)
    assert read_indices(folder) == [1]
    with pytest.raises(ShardError, match="closed"):
        run.commit(rows([2]))
    run.close()


def test_only_a_seal_rewrites_the_manifest(folder):
    with open_run(folder) as run:
        run.commit(rows(range(6)))
        before = (folder / "manifest.json").stat().st_ino
        run.commit(rows([6, 7, 8]), [failure(20)])
        assert (folder / "manifest.json").stat().st_ino == before
        run.commit(rows([9]))
        assert (folder / "manifest.json").stat().st_ino != before


def test_a_shard_sealed_between_listing_and_reading_is_read_once(folder):
    with open_run(folder) as run:
        run.commit(rows(range(8)))
        reading = read_rows(folder)
        found = [next(reading)["index"]]
        run.commit(rows(range(8, 14)))
        found += [record["index"] for record in reading]
    assert found == list(range(10))  # the third shard did not exist when the reading began


def test_a_folder_that_no_run_has_begun_is_empty_to_readers(folder):
    assert (list(read_rows(folder)), list(read_failures(folder)), read_manifest(folder), list_shards(folder)) == (
        [],
        [],
        None,
        [],
    )
    assert not folder.exists()


def test_shards_are_listed_by_number_and_other_files_are_not(folder):
    with open_run(folder) as run:
        run.commit(rows(range(6)))
        for name in ("completions_1.jsonl", "completions_000001.jsonl.bak", "completions_000001.json", "notes"):
            (folder / name).write_text("x")
        (folder / "completions_1000000.jsonl").write_text("")
        assert [(shard.number, shard.sealed) for shard in list_shards(folder)] == [
            (0, True),
            (1, False),
            (1000000, True),
        ]
