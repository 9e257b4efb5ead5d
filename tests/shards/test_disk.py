"""Real disks that refuse: full, too small for a file, read-only, not a folder."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dfexp.errors import StorageError
from dfexp.jsonl import encode_line
from tests.shards.support import check_consistent, failure, open_run, read_indices, row, rows


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """The kernel takes the first `size` bytes of any file and refuses the rest with EFBIG, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_at_any_byte_leaves_the_files_as_they_were(quick):
    line = len(encode_line(row(0).to_json()))
    refusals = []
    for room in range(0, 5 * line, 11):
        folder = quick / str(room)
        with open_run(folder) as run:
            run.commit(rows([0]), [failure(30)])
            before = {path.name: path.read_bytes() for path in folder.iterdir()}
            try:
                with files_at_most(room):
                    run.commit(rows([1, 2, 3]), [failure(31), failure(32)])
            except StorageError as error:
                refusals.append(str(error))
                assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
                assert (run.done, run.failed) == (1, 1)
                run.commit(rows([1, 2, 3]), [failure(31), failure(32)])
            assert (run.done, run.failed) == (4, 3)
            check_consistent(folder, run)
    assert len(refusals) > 50
    assert all("File too large" in message for message in refusals)


def test_a_seal_that_the_disk_refuses_is_made_up_for(quick):
    folder = quick / "completions"
    with open_run(folder, total=4000, rows_per_shard=5) as run:
        run.commit(rows(range(2000)))
        with files_at_most(20_000):  # less than the manifest of 400 shards, more than a shard
            sealed = run.commit(rows(range(2000, 2005)))
            assert [[*entry.indices] for entry in sealed] == [[2000, 2001, 2002, 2003, 2004]]
            assert "manifest.json" in str(run.seal_error)
            run.commit(rows([2005]))
            with pytest.raises(StorageError, match="File too large"):
                run.seal()
            assert run.done == 2006
        run.commit(rows([2006]))
        assert run.seal_error is None
        check_consistent(folder, run)


def test_a_disk_that_fills_up_behind_a_border_of_shards_leaves_the_files_as_they_were(quick):
    """The rows fit, into two shards; the failures after them do not."""
    folder = quick / "completions"
    long, failed = [row(index, "x" * 5000) for index in (8, 9, 10)], [failure(20, message="x" * 30_000)]
    with open_run(folder) as run:
        run.commit(rows(range(8)))
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        for _ in range(3):
            with files_at_most(20_000), pytest.raises(StorageError, match="File too large"):
                run.commit(long, failed)
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        run.commit(long, failed)
        assert (run.done, run.failed) == (11, 1)
    with open_run(folder) as run:
        assert (run.done, run.failed) == (11, 1)


def as_somebody_else(act) -> str:
    """What `act` raises in a process without the powers of root, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            act()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def shared():
    """A folder that other users can reach."""
    folder = Path(tempfile.mkdtemp(prefix="dfexp-test-"))
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_folder_is_named(shared):
    folder = shared / "completions"
    with open_run(folder) as run:
        run.commit(rows(range(7)))
    for path in [*folder.iterdir(), folder, shared]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    message = as_somebody_else(lambda: open_run(folder))
    assert message == f"StorageError: cannot lock {folder}/.lock: Permission denied. Fix the folder."
    message = as_somebody_else(lambda: open_run(shared / "new"))
    assert message == f"StorageError: cannot create {shared}/new: Permission denied. Fix the folder above it."
    assert as_somebody_else(lambda: read_indices(folder) == list(range(7)) or 1 / 0) == ""


def test_a_folder_that_becomes_read_only_keeps_what_it_has(shared):
    folder = shared / "completions"
    folder.mkdir()
    folder.chmod(0o777)

    def write() -> None:
        with open_run(folder) as run:
            run.commit(rows(range(3)))
            folder.chmod(0o555)
            run.commit(rows([3]))  # the open file still takes rows
            with pytest.raises(StorageError, match="Permission denied"):
                run.commit(rows(range(4, 7)))
            assert (run.done, read_indices(folder)) == (4, [0, 1, 2, 3])
            folder.chmod(0o777)
            run.commit(rows(range(4, 7)))
            check_consistent(folder, run)

    if os.getuid() == 0:
        os.chown(folder, 65534, 65534)
    assert as_somebody_else(write) == ""


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "completions").write_text("x")
    with pytest.raises(StorageError, match=r"completions.*Fix the folder"):
        open_run(tmp_path / "completions")
