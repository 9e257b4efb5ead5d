"""Bucket and manifest compared both ways."""

import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dfexp.errors import StoreError, StoreUnavailable
from dfexp.jsonl import read_json
from dfexp.layout import RunFolder
from dfexp.params import StoreGroup
from dfexp.shards import ShardEntry, read_manifest
from dfexp.store import contents
from dfexp.store.bucket import Bucket
from dfexp.store.contents import COMPLETIONS, PROMPTS, Contents


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a comparison came to: shards and bytes that agree, and a line for everything that does not."""

    url: str
    shards: int
    bytes: int
    problems: list[str]


def prompts_into(bucket: Bucket, file: IO[bytes], sha256: str) -> None:
    """Read the prompts there into a file. Raises StoreError if they are missing, damaged or not those of `sha256`."""
    with tempfile.TemporaryFile() as packed:
        if bucket.fetch(PROMPTS, packed) is None:
            raise StoreError(
                f"{bucket.url(PROMPTS)}: missing; upload it with dfexp store upload {Path(bucket.base).name}"
            )
        digest = hashlib.sha256()
        packed.seek(0)
        try:
            with gzip.open(packed) as unpacked:
                while piece := unpacked.read(2**20):
                    file.write(piece)
                    digest.update(piece)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise StoreError(f"{bucket.url(PROMPTS)}: damaged: {error}") from None
    if digest.hexdigest() != sha256:
        raise StoreError(f"{bucket.url(PROMPTS)}: holds other prompts than run.json says")


def verify(folder: RunFolder, group: StoreGroup) -> Verdict:
    """Compare what the run's folder lists with what the bucket has. Reads the prompts there, and of shards the heads.

    Raises StoreError if the store cannot be used.
    """
    bucket = Bucket(group, folder.name, limit_s=60.0)
    manifest, found, run = read_manifest(folder.completions), contents.read(bucket), read_json(folder.run_json)
    shards = list(manifest.shards) if manifest else []
    if found.run is None or not contents.same_run(found.run, run):
        what = "another run" if found.run else "no run"
        return Verdict(url=bucket.url(), shards=0, bytes=0, problems=[f"{bucket.url()} holds {what}"])
    with ThreadPoolExecutor(2 * group.concurrency) as pool:
        faults = list(pool.map(lambda entry: _difference(bucket, found, folder, entry), shards))
    good = [entry for entry, fault in zip(shards, faults, strict=True) if not fault]
    problems = [fault for fault in faults if fault]
    problems += [f"{bucket.url(name)}: foreign" for name in contents.foreign(found, [entry.name for entry in shards])]
    gone = sorted(found.listed.keys() - {entry.name for entry in shards})
    problems += [f"{bucket.url(COMPLETIONS + name)}: not in this folder: another machine has gone on" for name in gone]
    problems += [*_prompts(bucket, run), *_failures(bucket, found, folder)]
    return Verdict(url=bucket.url(), shards=len(good), bytes=sum(entry.bytes for entry in good), problems=problems)


def _difference(bucket: Bucket, found: Contents, folder: RunFolder, entry: ShardEntry) -> str:
    """In what the object of a shard differs from its line in the manifest; empty if in nothing."""
    name = COMPLETIONS + entry.name
    if name not in found.sizes:
        is_here = (folder.completions / entry.name).exists()
        fix = "this folder lacks it too. Restore it in the bucket"
        fix = f"upload it with dfexp store upload {folder.name}" if is_here else fix
        return f"{bucket.url(name)}: missing; {fix}"
    if found.sizes[name] != entry.bytes:
        return f"{bucket.url(name)}: {found.sizes[name]:,} bytes, the manifest has {entry.bytes:,}"
    there = bucket.sha256_of(name)
    return "" if there == entry.sha256 else f"{bucket.url(name)}: SHA-256 {there}, the manifest has {entry.sha256}"


def _prompts(bucket: Bucket, run: Any) -> Iterator[str]:
    try:
        with open(os.devnull, "wb") as nothing:
            prompts_into(bucket, nothing, run["prompts"]["sha256"])
    except StoreUnavailable:
        raise
    except StoreError as error:
        yield str(error)


def _failures(bucket: Bucket, found: Contents, folder: RunFolder) -> Iterator[str]:
    """Whether the slices one after the other are failures.jsonl."""
    path = folder.completions / "failures.jsonl"
    text, at = path.read_bytes() if path.exists() else b"", 0
    for name, size in found.parts.items():
        here, at = text[at : at + size], at + size
        if name not in found.sizes:
            yield f"{bucket.url(name)}: missing; upload it with dfexp store upload {folder.name}"
        elif bucket.sha256_of(name) != hashlib.sha256(here).hexdigest():
            yield f"{bucket.url(name)}: is not that part of failures.jsonl"
    if at < len(text):
        yield f"{len(text) - at:,} bytes of failures.jsonl are not uploaded: dfexp store upload {folder.name}"
