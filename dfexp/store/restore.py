"""A run from its bucket alone: enough to go on from, and on request its rows."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dfexp import params
from dfexp.errors import CorruptShardError, StoreError
from dfexp.jsonl import disk, fsync_dir, write_json
from dfexp.layout import RunFolder
from dfexp.params import StoreGroup
from dfexp.shards import Manifest, ShardEntry, read_manifest
from dfexp.shards.files import FAILURES, ManifestWriter, lock
from dfexp.shards.reader import read_entry
from dfexp.store import contents
from dfexp.store.bucket import Bucket
from dfexp.store.contents import COMPLETIONS, STALE_S, Contents
from dfexp.store.verify import prompts_into

_SHARD = re.compile(r"completions/completions_\d{6,}\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What came of it. `writer`: who may still write there, in words, or None; `unread`: shards that are not ours."""

    folder: RunFolder
    shards: int
    rows: int
    asked: int
    writer: str | None
    unread: list[str]


def restore(name: str, group: StoreGroup, root: Path) -> Restored:
    """Make the folder of run `name` from the bucket: run.json, prompts, failures, manifest, but none of the shards.

    The folder appears whole or not at all. Raises StoreError: there is no such run, it is damaged, or the folder is
    there already.
    """
    bucket = Bucket(group, name, limit_s=60.0)
    found = contents.read(bucket)
    if found.run is None:
        raise StoreError(f"{bucket.url()} holds no run: there is no run.json. Correct bucket, prefix or name.")
    run = dict(found.record.run if found.record else found.run)
    given = group.model_dump(exclude_unset=True)
    run["spec"] = {**run["spec"], "store": {**run["spec"].get("store", {}), **given}}
    spec = params.validate(run["spec"], bucket.url(contents.RUN))
    folder = RunFolder(root / spec.outputs / name)
    if os.path.lexists(folder.path):
        raise StoreError(f"{folder.path} is there already. For its rows: dfexp store restore {name} --rows.")
    made = RunFolder(folder.path.with_name(f".{name}.restoring"))
    shutil.rmtree(made.path, ignore_errors=True)
    with disk(f"write to {made.path}"):
        made.completions.mkdir(parents=True)
        with made.prompts.open("wb") as file:
            prompts_into(bucket, file, run["prompts"]["sha256"])
        _failures(bucket, found, made)
        manifest, unread = _manifest(bucket, found, made, run)
        ManifestWriter(made.completions).write(manifest)
        write_json(made.run_json, run)
        made.path.rename(folder.path)
        fsync_dir(folder.path.parent)
    rows = sum(entry.rows for entry in manifest.shards)
    return Restored(
        folder=folder,
        shards=len(manifest.shards),
        rows=rows,
        asked=manifest.total,
        writer=_writer(found),
        unread=unread,
    )


def _writer(found: Contents) -> str | None:
    if found.record is None or found.got is None or found.record.owner.is_released or found.got.age_s >= STALE_S:
        return None
    owner = found.record.owner
    return f"process {owner.pid} on {owner.host} ({owner.folder}), {found.got.age_s:.0f} s ago"


def _failures(bucket: Bucket, found: Contents, made: RunFolder) -> None:
    if found.parts != [contents.part_name(number) for number in range(len(found.parts))]:
        raise StoreError(
            f"{bucket.url(contents.FAILURES)} lacks a part: {contents.shown(found.parts)}. Restore it there."
        )
    got = [bucket.get(name) for name in found.parts]
    (made.completions / FAILURES).write_bytes(b"".join(one.data for one in got if one))


def _manifest(bucket: Bucket, found: Contents, made: RunFolder, run: dict[str, Any]) -> tuple[Manifest, list[str]]:
    """The manifest of all shards there. The few that the record does not list yet are read."""
    listed = {entry.name: entry for entry in found.record.manifest.shards} if found.record else {}
    if gone := [name for name, entry in listed.items() if found.sizes.get(COMPLETIONS + name) != entry.bytes]:
        raise StoreError(f"{bucket.url()} lacks shards, or has others of their names: {contents.shown(gone)}.")
    done, unread = {index for entry in listed.values() for index in entry.indices}, []
    for key in sorted(name for name in found.sizes if _SHARD.fullmatch(name)):
        if (name := key.removeprefix(COMPLETIONS)) not in listed:
            entry = _read(bucket, made.completions / name, run["prompts"]["asked"])
            if entry is None or done.intersection(entry.indices):
                unread.append(name)
                (made.completions / name).unlink()
            else:
                listed[name] = entry
                done.update(entry.indices)
    base = found.record.manifest if found.record else None
    shards = sorted(listed.values(), key=lambda entry: entry.number)
    rows_per_shard = run["spec"]["generation"]["rows_per_shard"]
    if base is None:
        base = Manifest(
            fingerprint=run.get("fingerprint", {}), total=run["prompts"]["asked"], rows_per_shard=rows_per_shard
        )
    return base.model_copy(update={"shards": shards}), unread


def _read(bucket: Bucket, path: Path, total: int) -> ShardEntry | None:
    """A shard that is downloaded to be read; None if it is not of this run."""
    _download(bucket, path, None)
    with suppress(CorruptShardError):
        entry = read_entry(path, total=total)
        return entry.model_copy(update={"uploaded": {"to": bucket.url(COMPLETIONS + path.name)}})
    return None


def _download(bucket: Bucket, path: Path, entry: ShardEntry | None) -> None:
    """A shard under its name, whole, flushed and with the checksum of its entry, or not at all."""
    temporary, key = path.with_name(f".{path.name}.tmp"), COMPLETIONS + path.name
    with temporary.open("w+b") as file:
        is_there = bucket.fetch(key, file) is not None
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if entry is not None and (not is_there or sha256 != entry.sha256):
        temporary.unlink()
        problem = f"has SHA-256 {sha256}, the manifest {entry.sha256}" if is_there else "is missing"
        raise StoreError(f"{bucket.url(key)} {problem}. Restore it in the bucket.")
    if entry is not None:
        os.utime(temporary, ns=(entry.mtime_ns, entry.mtime_ns))  # so that opening the run need not read it again
    os.link(temporary, path)  # never replaces a file
    temporary.unlink()


def fetch_rows(folder: RunFolder, group: StoreGroup, say: Callable[[str], None]) -> int:
    """Download the shards that are in the store alone, each checked. Returns how many. Safe to call again.

    Raises StoreError if one is missing or differs, LockedError while a run writes here.
    """
    bucket, held = Bucket(group, folder.name, limit_s=60.0), lock(folder.completions)
    try:
        manifest = read_manifest(folder.completions)
        missing = [one for one in manifest.shards if not (folder.completions / one.name).exists()] if manifest else []
        with ThreadPoolExecutor(group.concurrency) as pool, disk(f"write to {folder.completions}"):
            jobs = pool.map(lambda entry: _download(bucket, folder.completions / entry.name, entry), missing)
            for count, _ in enumerate(jobs, 1):
                if count % 100 == 0:
                    say(f"  {count:,} of {len(missing):,} shards")
        fsync_dir(folder.completions)
        return len(missing)
    finally:
        os.close(held)
