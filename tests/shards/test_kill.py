"""Real processes: killed at random instants, and read while they write."""

import itertools
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dfexp.shards import list_shards, read_failures, read_rows
from tests.shards.support import check_consistent, open_run, read_indices

ROOT = Path(__file__).parents[2]
TOTAL, PER_SHARD = 4000, 40


def start(folder: Path, seed: int) -> subprocess.Popen[str]:
    arguments = [folder, TOTAL, PER_SHARD, seed]
    command = [sys.executable, "-m", "tests.shards.writer_process", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def told(lines: list[str]) -> set[int]:
    """Indices in the whole lines of a writer."""
    return {int(word) for line in lines if line.endswith("\n") and line != "open\n" for word in line.split()}


@pytest.mark.parametrize("kills", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_instants_loses_nothing_it_reported(tmp_path, kills):
    """Killed from right after opening on; each resume must find all that was ever reported."""
    folder, choose, safe = tmp_path / "completions", random.Random(7), set()
    for kill in itertools.count():
        process = start(folder, kill)
        lines = [process.stdout.readline()]
        assert lines == ["open\n"]
        if kill < kills:
            lines += itertools.islice(process.stdout, choose.randint(0, 14))
            process.kill()  # it goes on writing meanwhile, so this hits it anywhere
        lines += process.stdout.readlines()
        code = process.wait()
        assert code in (0, -signal.SIGKILL)
        safe |= told(lines)
        with open_run(folder, total=TOTAL, rows_per_shard=PER_SHARD) as run:
            assert not safe & set(run.pending())
            check_consistent(folder, run)
            ended = not run.pending()
        if ended:
            break
    assert kill == kills  # each kill came in time, or TOTAL has to grow
    assert sorted(read_indices(folder)) == [index for index in range(TOTAL) if index % 50 != 49]
    assert {record["index"] for record in read_failures(folder)} == set(range(49, TOTAL, 50))


def test_readers_see_every_safe_row_once_while_shards_are_sealed(tmp_path):
    folder = tmp_path / "completions"
    process, reads = start(folder, 1), 0
    safe: list[str] = []
    reader = threading.Thread(target=lambda: safe.extend(process.stdout))
    reader.start()
    while reader.is_alive():
        expected = {index for index in told(list(safe)) if index % 50 != 49}
        failed = {index for index in told(list(safe)) if index % 50 == 49}
        found = [record["index"] for record in read_rows(folder)]
        assert len(found) == len(set(found))
        assert expected <= set(found)
        assert failed <= {record["index"] for record in read_failures(folder)}
        reads += 1
    assert process.wait() == 0
    assert reads >= 3
    assert len(list(read_rows(folder))) == TOTAL - TOTAL // 50
    assert all(shard.sealed for shard in list_shards(folder))
