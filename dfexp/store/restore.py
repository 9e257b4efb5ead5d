"""A run from its bucket alone: enough to go on from, and on request its rows."""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from dfexp import params
from dfexp.errors import CorruptShardError, StoreError
from dfexp.jsonl import disk, fsync_dir, write_atomic, write_json
from dfexp.layout import RunFolder
from dfexp.params import StoreGroup
from dfexp.shards import ShardEntry, only_stored
from dfexp.shards.files import FAILURES, ManifestWriter, lock
from dfexp.shards.reader import read_entry
from dfexp.store import contents
from dfexp.store.bucket import Bucket
from dfexp.store.contents import COMPLETIONS, Contents
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
    if found.run is None or found.record is None:
        raise StoreError(f"{bucket.url()} holds no run: no run.json or manifest.json. Correct bucket, prefix or name.")
    run, given = dict(found.record.run), group.model_dump(exclude_unset=True)
    run["spec"] = {**run["spec"], "store": {**run["spec"].get("store", {}), **given}}
    spec = params.validate(run["spec"], bucket.url(contents.RUN))
    folder = RunFolder(root / spec.outputs / name)
    if os.path.lexists(folder.path):
        raise StoreError(f"{folder.path} is there already. For its rows: dfexp store restore {name} --rows.")
    made = RunFolder(folder.path.with_name(f".{name}.restoring-{secrets.token_hex(4)}"))  # two may be at it
    with disk(f"write to {made.path}"), ExitStack() as stack:
        stack.callback(shutil.rmtree, made.path, ignore_errors=True)  # there is none any more if all went well
        made.completions.mkdir(parents=True)
        with made.prompts.open("wb") as file:
            prompts_into(bucket, file, run["prompts"]["sha256"])
            file.flush()
            os.fsync(file.fileno())
        write_atomic(made.completions / FAILURES, b"".join(_parts(bucket, found)))
        shards, unread = _shards(bucket, found, made, found.record.manifest.total)
        manifest = found.record.manifest.model_copy(update={"shards": shards})
        ManifestWriter(made.completions).write(manifest)
        write_json(made.run_json, run)
        made.path.rename(folder.path)
        fsync_dir(folder.path.parent)
    return Restored(
        folder=folder, shards=len(shards), rows=sum(entry.rows for entry in shards), asked=manifest.total,
        writer=contents.writer(found), unread=unread,
    )  # fmt: skip


def _parts(bucket: Bucket, found: Contents) -> Iterator[bytes]:
    """The slices of failures.jsonl. Raises StoreError if one is missing, or has another size than the record says."""
    for name, size in found.parts.items():
        got = bucket.get(name)
        if got is None or len(got.data) != size:
            raise StoreError(f"{bucket.url(name)} is missing, or not as it was put. Restore it in the bucket.")
        yield got.data


def _shards(bucket: Bucket, found: Contents, made: RunFolder, total: int) -> tuple[list[ShardEntry], list[str]]:
    """All shards there by number, and the names of those that are not ours. The few that are not listed are read."""
    listed, unread = found.listed, list[str]()
    if gone := [name for name, entry in listed.items() if found.sizes.get(COMPLETIONS + name) != entry.bytes]:
        raise StoreError(f"{bucket.url()} lacks shards, or has others of their names: {contents.shown(gone)}.")
    done = {index for entry in listed.values() for index in entry.indices}
    for key in sorted(filter(_SHARD.fullmatch, found.sizes)):
        if (path := made.completions / key.removeprefix(COMPLETIONS)).name not in listed:
            _download(bucket, path, None)
            with suppress(CorruptShardError):
                entry = read_entry(path, total=total)
                if not done.intersection(entry.indices):
                    listed[path.name] = entry.model_copy(update={"uploaded": {"to": bucket.url(key)}})
                    done.update(entry.indices)
                    continue
            path.unlink()
            unread.append(path.name)
    return sorted(listed.values(), key=lambda entry: entry.number), unread


def _download(bucket: Bucket, path: Path, entry: ShardEntry | None) -> None:
    """A shard under its name, whole, flushed and with the checksum of its entry, or not at all."""
    temporary, key = path.with_name(f".{path.name}.tmp"), COMPLETIONS + path.name
    try:
        with temporary.open("w+b") as file:
            is_there = bucket.fetch(key, file) is not None
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if entry is not None and (not is_there or sha256 != entry.sha256):
            problem = f"has SHA-256 {sha256}, the manifest {entry.sha256}" if is_there else "is missing"
            raise StoreError(f"{bucket.url(key)} {problem}. Restore it in the bucket.")
        if entry is not None:
            os.utime(temporary, ns=(entry.mtime_ns, entry.mtime_ns))  # so that opening the run need not read it again
        os.link(temporary, path)  # never replaces a file
    finally:
        temporary.unlink(missing_ok=True)


def fetch_rows(folder: RunFolder, group: StoreGroup) -> int:
    """Download the shards that are in the store alone, each checked. Returns how many. Safe to call again.

    Raises StoreError if one is missing or differs, LockedError while a run writes here.
    """
    bucket, held = Bucket(group, folder.name, limit_s=60.0), lock(folder.completions)
    try:
        missing = only_stored(folder.completions)
        with ThreadPoolExecutor(group.concurrency) as pool, disk(f"write to {folder.completions}"):
            list(pool.map(lambda entry: _download(bucket, folder.completions / entry.name, entry), missing))
        fsync_dir(folder.completions)
        return len(missing)
    finally:
        os.close(held)
