"""Any completion order, any split into commits, any kills, any byte at which a file was cut: each index once."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfexp.jsonl import encode_line, repair_text
from dfexp.shards import list_shards, read_failures, read_rows
from tests.shards.support import AnyKind, check_consistent, failure, finish, open_run, row, rows

TOTAL = 24
RAM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Model:
    """A run's folder, what its commits returned for, and what a crash may do to it."""

    def __init__(self, folder: Path, rows_per_shard: int) -> None:
        self.folder, self.rows_per_shard = folder, rows_per_shard
        self.done: list[int] = []
        self.failed: set[int] = set()
        self.run = open_run(folder, total=TOTAL, rows_per_shard=rows_per_shard)

    def commit(self, done: list[int], failed: list[int]) -> None:
        done = [index for index in done if not self.run.is_done(index)]
        self.run.commit(rows(done), [failure(index) for index in failed])
        self.done += done
        self.failed |= set(failed)

    def reopen(self) -> None:
        self.run = open_run(self.folder, total=TOTAL, rows_per_shard=self.rows_per_shard)
        assert all(map(self.run.is_done, self.done))
        assert not self.failed & set(self.run.pending())
        check_consistent(self.folder, self.run)

    def unfinished_commit(self, index: int, where: float) -> None:
        """The process died while it wrote: a part of one more row, and of one more failure."""
        self.run.close()
        if self.run.is_done(index):
            return
        growing = [(shard.path, row(index)) for shard in list_shards(self.folder) if not shard.sealed]
        for path, record in [*growing, (self.folder / "failures.jsonl", failure(index))]:
            line = encode_line(record.to_json())
            with path.open("ab") as file:
                file.write(line[: round(where * len(line))])

    def cut(self, name: str, where: float) -> None:
        """A file lost its end, at any byte; rows behind that are no longer promised."""
        self.run.close()
        for path in self.folder.glob(name):
            os.truncate(path, round(where * path.stat().st_size))
        if name == ".done_indices":
            return  # derived: nothing is lost with it
        left = {record["index"] for record in read_rows(self.folder)}
        self.done = [index for index in self.done if index in left]
        self.failed = {record["index"] for record in read_failures(self.folder)}

    def drop(self, name: str) -> None:
        self.run.close()
        (self.folder / name).unlink()

    def second_name(self) -> None:
        """Died between giving a shard its final name and taking the other away; the manifest does not list it."""
        self.run.close()
        shards = list_shards(self.folder)
        if shards and shards[-1].sealed:
            os.link(shards[-1].path, f"{shards[-1].path}.partial")


indices = st.integers(0, TOTAL - 1)
places = st.floats(0, 1)
batches = st.lists(indices, unique=True, max_size=8)
derived = st.sampled_from(["manifest.json", ".done_indices"])
cuttable = st.sampled_from([".done_indices", "failures.jsonl", "*.partial"])
steps = st.one_of(
    st.tuples(st.just("commit"), batches, batches),
    st.tuples(st.just("seal")),
    st.tuples(st.just("unfinished_commit"), indices, places),
    st.tuples(st.just("cut"), cuttable, places),
    st.tuples(st.just("drop"), derived),
    st.tuples(st.just("second_name")),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows_per_shard=st.integers(1, 7), actions=st.lists(steps, max_size=14))
def test_each_index_is_there_once_whatever_happens(rows_per_shard, actions):
    scratch = Path(tempfile.mkdtemp(dir=RAM, prefix="dfexp-test-"))
    try:
        model = Model(scratch / "completions", rows_per_shard)
        for step, *arguments in actions:
            if step == "seal":
                model.run.seal()
                check_consistent(model.folder, model.run)
                continue
            getattr(model, step)(*arguments)
            if step != "commit":
                model.reopen()
        model.run.close()
        finish(model.folder, total=TOTAL, rows_per_shard=rows_per_shard)
    finally:
        model.run.close()
        shutil.rmtree(scratch)


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(TOTAL)), sizes=st.lists(st.integers(1, 9), min_size=TOTAL), per=st.integers(1, 9))
def test_any_order_in_any_commits_comes_back_in_that_order(order, sizes, per):
    with tempfile.TemporaryDirectory(dir=RAM, prefix="dfexp-test-") as scratch:
        folder, left = Path(scratch) / "completions", list(order)
        with open_run(folder, total=TOTAL, rows_per_shard=per) as run:
            for size in sizes:
                run.commit(rows(left[:size]))
                del left[:size]
                assert run.done + len(run.pending(AnyKind())) == TOTAL
            check_consistent(folder, run)
        assert [record["index"] for record in read_rows(folder)] == order


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=())))
def test_any_text_comes_back_but_for_lone_surrogates(text):
    with tempfile.TemporaryDirectory(dir=RAM, prefix="dfexp-test-") as scratch:
        folder = Path(scratch) / "completions"
        with open_run(folder) as run:
            run.commit([row(0, text)])
        found = next(read_rows(folder))
        expected, repaired = repair_text(text)
        assert found["text"] == expected
        assert found["flags"] == (["surrogates_repaired"] if repaired else [])
