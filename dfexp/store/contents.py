"""What is in a run's place in a bucket: the names, the record that manifest.json holds, and whose it is.

    run.json                                 as it was when the run was first uploaded: whose place this is
    prompts.jsonl.gz                         the frozen prompts
    completions/completions_000000.jsonl     the sealed shards, byte for byte
    failures/failures_000000.jsonl           failures.jsonl in slices: one after the other they are the file
    manifest.json                            the record: who writes, run.json as it is now, the shards that are here

All but the record are put once and never replaced. The record is replaced by its owner alone, conditional on its ETag.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dfexp.errors import StoreError, StoreTaken
from dfexp.jsonl import decode_line
from dfexp.shards import Manifest, ShardEntry
from dfexp.store.bucket import PROBE, Bucket, Got

RUN, PROMPTS, RECORD = "run.json", "prompts.jsonl.gz", "manifest.json"
COMPLETIONS, FAILURES = "completions/", "failures/"
STALE_S = 600.0
"""An owner that has not written the record for so long is taken to be gone."""
_SHOWN = 10


class Owner(BaseModel):
    """Who writes: a folder of a machine, known again by `token`, which is nowhere else."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token: str
    host: str
    folder: str
    pid: int
    is_released: bool = False


class Record(BaseModel):
    """The content of manifest.json in the bucket. `run` is run.json, `manifest` has the shards that are there.

    `failures`: bytes of each slice of failures.jsonl, in order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    owner: Owner
    run: dict[str, Any]
    failures: list[int] = []
    manifest: Manifest

    def encoded(self) -> bytes:
        """The record as it is put: a line for each shard, as in the run's folder."""
        head = json.dumps(self.model_dump(include={"owner", "run", "failures"})).removesuffix("}")
        manifest = self.manifest.model_dump_json(exclude={"shards"}).removesuffix("}")
        shards = ",\n".join(entry.model_dump_json() for entry in self.manifest.shards)
        return f'{head},"manifest":{manifest},"shards":[\n{shards}\n]}}}}\n'.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What was found. `sizes`: bytes by name; `run`: the run.json there; `got`: the record as it was read."""

    sizes: Mapping[str, int]
    run: Mapping[str, Any] | None
    record: Record | None
    got: Got | None

    @property
    def listed(self) -> dict[str, ShardEntry]:
        """The shards of the record by name."""
        return {entry.name: entry for entry in self.record.manifest.shards} if self.record else {}

    @property
    def parts(self) -> dict[str, int]:
        """The slices of failures.jsonl in order, and their bytes: of the record, there or not, and what follows."""
        parts = {part_name(number): size for number, size in enumerate(self.record.failures if self.record else ())}
        while (name := part_name(len(parts))) in self.sizes:
            parts[name] = self.sizes[name]
        return parts


def part_name(number: int) -> str:
    """The name of a slice of failures.jsonl."""
    return f"{FAILURES}failures_{number:06d}.jsonl"


def own_parts(bucket: Bucket, contents: Contents, folder: Path) -> list[int]:
    """Bytes of the slices of failures.jsonl: those of the record, and those after it that are of the file here."""
    sizes, text = list(contents.record.failures) if contents.record else [], b""
    with suppress(FileNotFoundError):
        text = (folder / "failures.jsonl").read_bytes()
    for name, size in list(contents.parts.items())[len(sizes) :]:
        here = text[sum(sizes) : sum(sizes) + size]
        if bucket.sha256_of(name) != hashlib.sha256(here).hexdigest():
            break
        sizes.append(size)
    return sizes


def read(bucket: Bucket) -> Contents:
    """List the place and read its two small objects. Raises StoreError, also for a record that dfexp did not write."""
    got = bucket.get(RECORD)
    sizes = bucket.sizes()  # listed after, so that all that the record names is in it, also of a run that goes on
    there = bucket.get(RUN) if RUN in sizes else None
    try:
        run = decode_line(there.data) if there else None
    except ValueError:
        run = {}
    try:
        record = Record.model_validate_json(got.data) if got else None
    except ValidationError:
        raise StoreError(f"{bucket.url(RECORD)} is not of dfexp. Choose another prefix, or move it away.") from None
    return Contents(sizes=sizes, run=run, record=record, got=got)


def same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two versions of run.json are of one run: of one name, and begun at one instant."""
    return [one.get(key) for key in ("run", "created_at")] == [other.get(key) for key in ("run", "created_at")]


def foreign(contents: Contents, shards: Iterable[str]) -> list[str]:
    """Names there that are not of a run with these shards, in order."""
    ours = {RUN, PROMPTS, RECORD, *contents.parts, *(COMPLETIONS + name for name in {*contents.listed, *shards})}
    return sorted(name for name in contents.sizes if name not in ours and not name.startswith(PROBE))


def shown(names: list[str]) -> str:
    """So many names as a person can read, and how many there are."""
    return f"{len(names):,} object(s): {', '.join(names[:_SHOWN])}" + ", ..." * (len(names) > _SHOWN)


def require_place(
    bucket: Bucket, contents: Contents, run: Mapping[str, Any] | None, shards: Iterable[str]
) -> list[str]:
    """Whether the place is free or this run's. Returns the foreign names beside our own.

    Args: run, the local run.json, None before there is one; shards, names of those sealed here.

    Raises StoreError for a place that is another's, and StoreTaken if more shards are there than this folder knows.
    """
    there = [name for name in contents.sizes if not name.startswith(PROBE)]
    if contents.run is None or run is None or not same_run(contents.run, run):
        if there:
            what = " It holds another run." if contents.run else ""
            raise StoreError(
                f"{bucket.url()} is not empty, and this run did not write what is there: {shown(sorted(there))}.{what} "
                "Nothing was changed. Choose another store.prefix or name for `run`, or go on with that run by "
                "dfexp store restore."
            )
        return []
    known = set(shards)
    if unknown := [name for name in contents.listed if name not in known]:
        raise StoreTaken(
            f"{bucket.url()} has shards that this folder lacks: {shown(unknown)}. Another machine has gone on with the "
            "run. Go on there, or here in another folder after dfexp store restore."
        )
    return foreign(contents, known)


def writer(contents: Contents, me: Owner | None = None) -> str | None:
    """Who writes there, other than `me`, and has shown so of late, in words; None if nobody does."""
    if contents.record is None or contents.got is None:
        return None
    owner, age_s = contents.record.owner, contents.got.age_s
    is_me = me is not None and (owner.token, owner.host, owner.folder) == (me.token, me.host, me.folder)
    if is_me or owner.is_released or age_s >= STALE_S:
        return None
    last = f"which last did so {age_s:.0f} s ago, and counts as gone in {STALE_S - age_s:.0f} s"
    return f"process {owner.pid} on {owner.host} ({owner.folder}), {last}"
