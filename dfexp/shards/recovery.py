"""Opening a run's completions: what is there, checked before anything is changed.

With a manifest, that says which shards there are. Without one the shards say it themselves, and then their numbers have
to run from 0 without a gap, since nothing else could tell that one is missing.
"""

import filecmp
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dfexp.errors import CorruptShardError
from dfexp.jsonl import sha256_of
from dfexp.shards import files
from dfexp.shards.files import MANIFEST, Manifest, ShardEntry
from dfexp.shards.reader import read_entry, read_failure_log


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a folder holds: the manifest as it has to be and as it is on disk, and the open shards by number.

    `is_listed`: whether .done_indices agrees. `leftovers` are of no more use, `done` has one byte an index, and
    `failed` the last failure's kind of the others.
    """

    manifest: Manifest
    old: Manifest | None
    is_listed: bool
    growing: dict[int, ShardEntry]
    leftovers: list[Path]
    done: bytearray
    failed: dict[int, str]


def inspect(folder: Path, *, total: int, fingerprint: Mapping[str, str], rows_per_shard: int) -> Found:
    """Check everything in a folder, whose lock the caller holds. Raises as `Shards.open` does, and OSError."""
    files.refuse_foreign(folder)
    old = files.read_manifest(folder)
    if old is not None:
        files.check_same_run(folder, old, total=total, fingerprint=fingerprint)
    shards = files.list_shards(folder)
    sealed = {shard.number: shard.path for shard in shards if shard.sealed}
    growing = {shard.number: shard.path for shard in shards if not shard.sealed}
    leftovers = [path for number, path in growing.items() if _is_leftover(path, sealed.get(number))]
    growing = {number: path for number, path in growing.items() if path not in leftovers}
    if old is None:
        _check_no_gap(folder, {*sealed, *growing})
    entries = {} if old is None else {entry.number: _checked(folder, entry) for entry in old.shards}
    entries |= {number: read_entry(sealed[number], total=total) for number in sealed if number not in entries}
    opened = {number: read_entry(path, total=total) for number, path in growing.items()}
    _check_order(growing, opened, last_sealed=max(sealed, default=-1))
    manifest = Manifest(
        fingerprint=dict(fingerprint),
        total=total,
        rows_per_shard=rows_per_shard,
        shards=[entries[number] for number in sorted(entries)],
    )
    holders = {folder / entry.name: entry for entry in manifest.shards}
    done = _mark_done(holders | {growing[number]: entry for number, entry in opened.items()}, total)
    failures = read_failure_log(folder, total=total)
    return Found(
        manifest=manifest,
        old=old,
        is_listed=files.is_listed(folder, manifest),
        growing=opened,
        leftovers=[*leftovers, *folder.glob(f".{MANIFEST}.*.tmp"), *folder.glob(f".{files.DONE_INDICES}.*.tmp")],
        done=done,
        failed={row["index"]: sys.intern(row["kind"]) for row in failures if not done[row["index"]]},
    )


def _is_leftover(partial: Path, final: Path | None) -> bool:
    """A shard that was begun and got no row, or the open name of one that a crash left under both."""
    if final is None:
        return partial.stat().st_size == 0
    if not partial.samefile(final) and not filecmp.cmp(partial, final, shallow=False):
        raise files.foreign_file(final)
    return True


def _check_no_gap(folder: Path, numbers: set[int]) -> None:
    missing = set(range(max(numbers, default=-1))) - numbers
    if missing:
        raise CorruptShardError(
            f"{folder} has no {MANIFEST} and no {files.sealed_name(min(missing))}, though it has later shards. Restore "
            "one of the two; if that shard is lost for good, an empty file of its name has its rows generated again."
        )


def _checked(folder: Path, entry: ShardEntry) -> ShardEntry:
    """Trust a listed shard that looks untouched, else read it. Raises CorruptShardError if it is missing or differs."""
    path = folder / entry.name
    fix = f"Restore it from a copy; or move it away and delete its line from {MANIFEST} to have its rows made again."
    if not path.exists() and entry.uploaded is not None:
        return entry  # it is in the store, and the manifest has all that is needed of it
    if not path.exists():
        raise CorruptShardError(f"{path} is missing, though {MANIFEST} lists it. {fix}")
    stat = path.stat()
    if (stat.st_size, stat.st_mtime_ns) == (entry.bytes, entry.mtime_ns):
        return entry
    if (found := sha256_of(path)) != entry.sha256:
        raise CorruptShardError(
            f"{path} was changed after it was sealed: its SHA-256 is {found}, {MANIFEST} has {entry.sha256}. {fix}"
        )
    return entry.model_copy(update={"mtime_ns": stat.st_mtime_ns})


def _check_order(growing: dict[int, Path], entries: dict[int, ShardEntry], *, last_sealed: int) -> None:
    """Several open shards are ours only if all but the last are whole: each was flushed before the next was created."""
    for number, path in growing.items():
        is_followed = number + 1 in growing and path.stat().st_size == entries[number].bytes
        if number <= last_sealed or not (is_followed or number == max(growing)):
            raise CorruptShardError(
                f"{path} is an open shard, though later shards exist. If it was copied here, move it away; else "
                "restore the folder from a copy."
            )


def _mark_done(holders: dict[Path, ShardEntry], total: int) -> bytearray:
    """One byte an index. Raises CorruptShardError if two rows have one index."""
    done = bytearray(total)
    for path, entry in holders.items():
        for index in entry.indices:
            if done[index]:
                first = next(path for path, held in holders.items() if index in held.indices)
                raise CorruptShardError(
                    f"row {index} is in {first} and in {path}. Move away the file that does not belong here, and its "
                    f"line in {MANIFEST} with it."
                )
            done[index] = 1
    return done
