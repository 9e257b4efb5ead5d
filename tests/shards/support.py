"""Rows to write and checks on what is on disk afterwards."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from dfexp.records import Completion, Failure
from dfexp.shards import Shards, list_shards, read_manifest, read_rows

FINGERPRINT = {"prompts": "p" * 64, "model": "some/model", "sampling": "s" * 64}
ODD = ("line\u2028two", "nul \0 nul", "form\ffeed\u0085\r\n", '\U0001f600 é \\ud800 "quoted"', "", "plain " * 9)


def text_of(index: int) -> str:
    """The text that every test writes for an index, so that a row in the wrong place shows."""
    return f"{index}:{ODD[index % len(ODD)]}"


def row(index: int, text: str | None = None, **changes: object) -> Completion:
    values = {
        "index": index,
        "id": f"id-{index % 3}",  # equal ids are legal
        "messages": ({"role": "user", "content": f"question\u2029{index}"},),
        "text": text_of(index) if text is None else text,
        "finish_reason": "stop",
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "max_tokens": 64,
        "server": "127.0.0.1:8080",
        "config_id": "c0",
        "attempt": 1,
        "submitted_at": 1000.5,
        "latency_s": 0.25,
    }
    return Completion(**(values | changes))


def rows(indices: Iterable[int]) -> list[Completion]:
    return [row(index) for index in indices]


def failure(index: int, kind: str = "timeout", message: str = "no answer") -> Failure:
    return Failure(index=index, id="f", kind=kind, message=message, attempts=3, server=None, config_id="c0", at=5.0)


def open_run(folder: Path, *, total: int = 40, rows_per_shard: int = 5, **changes: str) -> Shards:
    return Shards.open(folder, total=total, fingerprint=FINGERPRINT | changes, rows_per_shard=rows_per_shard)


def read_indices(folder: Path) -> list[int]:
    """Indices on disk in reading order; every row is checked against what was written for it."""
    found = []
    for record in read_rows(folder):
        assert record["text"] == text_of(record["index"])
        assert record["messages"] == [{"role": "user", "content": f"question\u2029{record['index']}"}]
        found.append(record["index"])
    return found


def check_consistent(folder: Path, run: Shards) -> None:
    """The files, the manifest, the done-list and the opened run say the same, and no index is there twice."""
    found = read_indices(folder)
    assert len(found) == len(set(found)) == run.done
    assert all(map(run.is_done, found))
    manifest = read_manifest(folder)
    assert manifest is not None
    sealed = [shard for shard in list_shards(folder) if shard.sealed]
    assert [shard.path.name for shard in sealed] == [entry.name for entry in manifest.shards]
    done_list = []
    for entry in manifest.shards:
        data = (folder / entry.name).read_bytes()
        indices = [json.loads(line)["index"] for line in data.splitlines()]
        assert (entry.bytes, entry.rows) == (len(data), len(indices))
        assert entry.sha256 == hashlib.sha256(data).hexdigest()
        assert [*entry.indices] == indices
        done_list += indices
    assert (folder / ".done_indices").read_text().split() == [str(index) for index in done_list]


def finish(folder: Path, *, total: int = 40, rows_per_shard: int = 5) -> None:
    """Resume, complete what is pending, and check that every index is there once."""
    with open_run(folder, total=total, rows_per_shard=rows_per_shard) as run:
        run.commit(rows(run.pending(AnyKind())))
        run.seal()
        assert run.seal_error is None
        check_consistent(folder, run)
    assert sorted(read_indices(folder)) == list(range(total))
    assert not list(folder.glob("*.partial")) + list(folder.glob("*.tmp"))


class AnyKind:
    """All kinds of failures."""

    def __contains__(self, kind: object) -> bool:
        return True
