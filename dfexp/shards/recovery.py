"""Opening a run's completions: check everything first, then put right what a crash can have left.

With a manifest, that says which shards there are. Without one (or with its end lost) the shards say it themselves,
and then their numbers have to run from 0 without a gap, since nothing else could tell that one is missing.
"""

from __future__ import annotations

import filecmp
import sys
from array import array
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dfexp.errors import CorruptShardError, StorageError
from dfexp.jsonl import AppendLog, fsync_dir
from dfexp.shards.files import (
    DONE_INDICES,
    FAILURES,
    MANIFEST,
    Contents,
    file_sha256,
    list_shards,
    read_contents,
    read_failure_log,
    sealed_name,
)
from dfexp.shards.manifest import (
    Ledger,
    Manifest,
    ShardEntry,
    check_same_run,
    load_for_writing,
    pack_indices,
    unpack_indices,
)
from dfexp.shards.open_shard import OpenShard, foreign_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """What opening found and put right.

    Attributes:
        cut_bytes: bytes of rows that were cut off the open shard because they never were written whole.
        cut_failure_bytes: the same of failures.jsonl.
        adopted: sealed shards that no manifest listed, read and added to it.
        rebuilt_manifest: manifest.json was missing or had lost its end, although there were shards.
        rebuilt_done_indices: .done_indices was not what the shards say.

    """

    cut_bytes: int = 0
    cut_failure_bytes: int = 0
    adopted: tuple[str, ...] = ()
    rebuilt_manifest: bool = False
    rebuilt_done_indices: bool = False

    def __bool__(self) -> bool:
        return self != Repairs()


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """An opened folder: what `Shards` goes on from. `done` has one byte an index; `failed` the last failure's kind."""

    ledger: Ledger
    failures_log: AppendLog
    open_shards: list[OpenShard]
    next_number: int
    done: bytearray
    failed: dict[int, str]
    repairs: Repairs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the checks found, before anything is changed."""

    manifest: Manifest
    save: bool
    adopted: tuple[str, ...]
    rebuilt: bool
    twins: list[Path]
    partials: dict[int, array[int]]
    done: bytearray
    failed: dict[int, str]


def recover(folder: Path, *, total: int, fingerprint: Mapping[str, str], rows_per_shard: int) -> State:
    """Check the folder, then repair it. The caller holds its lock. Raises as `Shards.open` does."""
    try:
        found = _check(folder, total=total, fingerprint=fingerprint, rows_per_shard=rows_per_shard)
        return _repair(folder, found)
    except OSError as error:
        raise StorageError(f"cannot read {folder}: {error}. Fix the folder.") from error


def _check(folder: Path, *, total: int, fingerprint: Mapping[str, str], rows_per_shard: int) -> _Found:
    old, whole = load_for_writing(folder)
    if old is not None:
        check_same_run(folder, old, total=total, fingerprint=fingerprint)
    files = list_shards(folder)
    sealed = {file.number: file.path for file in files if file.sealed}
    growing = {file.number: file.path for file in files if not file.sealed}
    twins = [_twin(sealed[number], growing.pop(number)) for number in sealed if number in growing]
    if not whole:
        _check_no_gap(folder, [*sealed, *growing])
    listed = old.shards if old is not None and whole else []
    entries = {entry.number: _listed_entry(folder, entry) for entry in listed}
    adopted = [number for number in sealed if number not in entries]
    entries |= {number: _read_entry(sealed[number], total) for number in adopted}
    partials = [(growing[number], read_contents(growing[number], total=total, growing=True)) for number in growing]
    _check_partials(partials, list(growing), last_sealed=max(sealed, default=-1))
    manifest = Manifest(
        fingerprint=dict(fingerprint),
        total=total,
        rows_per_shard=rows_per_shard,
        shards=[entries[number] for number in sorted(entries)],
    )
    holders = [(folder / entry.name, unpack_indices(entry.indices)) for entry in manifest.shards]
    holders += [(path, contents.indices) for path, contents in partials]
    return _Found(
        manifest=manifest,
        save=old != manifest or not whole,
        adopted=tuple(sealed_name(number) for number in adopted),
        rebuilt=bool(files) and not whole,
        twins=twins,
        partials=dict(zip(growing, [contents.indices for _, contents in partials], strict=True)),
        done=_mark_done(holders, total),
        failed=_read_failed(folder / FAILURES, total),
    )


def _twin(final: Path, partial: Path) -> Path:
    """The open name of a shard that has its final name too: a crash between the two steps of publishing."""
    if not partial.samefile(final) and not filecmp.cmp(partial, final, shallow=False):
        raise foreign_file(final)
    return partial


def _check_no_gap(folder: Path, numbers: Iterable[int]) -> None:
    numbers = set(numbers)
    missing = [number for number in range(max(numbers, default=-1)) if number not in numbers]
    if missing:
        raise CorruptShardError(
            f"{folder} has no {MANIFEST} and no {sealed_name(missing[0])}, though it has later shards. Restore one of "
            "the two; if that shard is lost for good, an empty file of its name has its rows generated again."
        )


def _listed_entry(folder: Path, entry: ShardEntry) -> ShardEntry:
    """Trust a shard that looks untouched, else read it again. Raises CorruptShardError if it is missing or differs."""
    path = folder / entry.name
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise CorruptShardError(
            f"{path} is missing, though {MANIFEST} lists it. Restore it from a copy, or delete its line from "
            f"{MANIFEST} to have its {entry.rows} rows generated again."
        ) from None
    if (stat.st_size, stat.st_mtime_ns) == (entry.bytes, entry.mtime_ns):
        return entry
    found = file_sha256(path)
    if found != entry.sha256:
        raise CorruptShardError(
            f"{path} was changed after it was sealed: its SHA-256 is {found}, {MANIFEST} has {entry.sha256}. Restore "
            f"it from a copy; or move it away and delete its line from {MANIFEST} to have its rows generated again."
        )
    return entry.model_copy(update={"mtime_ns": stat.st_mtime_ns})


def _read_entry(path: Path, total: int) -> ShardEntry:
    """The entry of a sealed shard that no manifest lists: the crash came between its last two steps."""
    contents = read_contents(path, total=total, growing=False)
    return ShardEntry(
        name=path.name,
        rows=len(contents.indices),
        bytes=contents.size,
        sha256=contents.sha256,
        indices=pack_indices(contents.indices),
        mtime_ns=path.stat().st_mtime_ns,
    )


def _check_partials(partials: list[tuple[Path, Contents]], numbers: list[int], *, last_sealed: int) -> None:
    """Several open shards are ours only if all but the last are whole: each was flushed before the next was created."""
    for (path, contents), number in zip(partials, numbers, strict=True):
        is_last = number == numbers[-1]
        if number <= last_sealed or (not is_last and (contents.torn or number + 1 not in numbers)):
            raise CorruptShardError(
                f"{path} is an open shard, though later shards exist. If it was copied here, move it away; else "
                "restore the folder from a copy."
            )


def _mark_done(holders: list[tuple[Path, array[int]]], total: int) -> bytearray:
    done = bytearray(total)
    for position, (path, indices) in enumerate(holders):
        for index in indices:
            if index >= total:
                raise CorruptShardError(f"{path} has row {index}, but the run has {total} prompts. Restore {MANIFEST}.")
            if done[index]:
                first = next(path for path, held in holders[: position + 1] if index in held)
                raise CorruptShardError(
                    f"row {index} is in {first} and in {path}. Move away the file that does not belong here, and its "
                    f"line in {MANIFEST} with it."
                )
            done[index] = 1
    return done


def _read_failed(path: Path, total: int) -> dict[int, str]:
    failed: dict[int, str] = {}
    for row in read_failure_log(path):
        if row["index"] >= total:
            raise CorruptShardError(
                f"{path} has index {row['index']}, but the run has {total} prompts. Delete the line."
            )
        failed[row["index"]] = sys.intern(row["kind"])
    return failed


def _repair(folder: Path, found: _Found) -> State:
    for left in [*folder.glob(f".{MANIFEST}.*.tmp"), *folder.glob(f".{DONE_INDICES}.*.tmp"), *found.twins]:
        left.unlink()
    fsync_dir(folder)  # a killed writer may have renamed without it
    ledger = Ledger(folder, found.manifest)
    if found.save:
        ledger.save()
    rebuilt_done = ledger.repair_done(found.manifest.shards)
    with ExitStack() as undo:
        failures_log = undo.enter_context(AppendLog(folder / FAILURES))
        open_shards = []
        for number, indices in found.partials.items():
            open_shards.append(OpenShard(folder, number, indices))
            undo.callback(open_shards[-1].close)
        undo.pop_all()
    return State(
        ledger=ledger,
        failures_log=failures_log,
        open_shards=open_shards,
        next_number=max([entry.number for entry in found.manifest.shards] + list(found.partials), default=-1) + 1,
        done=found.done,
        failed=found.failed,
        repairs=Repairs(
            cut_bytes=sum(shard.cut_bytes for shard in open_shards),
            cut_failure_bytes=failures_log.cut_bytes,
            adopted=found.adopted,
            rebuilt_manifest=found.rebuilt,
            rebuilt_done_indices=rebuilt_done and bool(found.manifest.shards),
        ),
    )
