"""Whether a run can be uploaded where its parameters say: before anything starts, and when it does."""

from __future__ import annotations

from dfexp.jsonl import read_json
from dfexp.layout import RunFolder
from dfexp.params import StoreGroup
from dfexp.shards import Shards, read_manifest
from dfexp.store import contents
from dfexp.store.bucket import Bucket
from dfexp.store.uploader import Tell, Uploader, me, require_conditional


def check(folder: RunFolder, group: StoreGroup) -> str:
    """What is found in the place of a run, in words. Writes nothing but a probe, which it removes again.

    Raises StoreError for what would keep the run from being uploaded, StoreUnavailable if the store does not answer.
    """
    bucket = Bucket(group, folder.name)
    require_conditional(bucket)
    is_begun, manifest = folder.run_json.exists(), read_manifest(folder.completions)
    found = contents.read(bucket)
    names = [entry.name for entry in manifest.shards] if manifest else []
    others = contents.require_place(bucket, found, read_json(folder.run_json) if is_begun else None, names)
    if is_begun:
        contents.require_owner(bucket, found, me(folder))
    there = len(found.record.manifest.shards) if found.record else 0
    words = f"{bucket.url()}: {f'{there:,} shards of this run' if found.run else 'empty'}, can be written"
    words += "" if bucket.is_conditional else "; If-None-Match is ignored, so dfexp looks before each put"
    return words + f"; left alone there: {contents.shown(others)}" * bool(others)


def open_uploads(folder: RunFolder, group: StoreGroup, shards: Shards, tell: Tell) -> Uploader | None:
    """The uploads of a run whose shards are open; None without a bucket. Raises as `Uploader` does."""
    return Uploader(folder, group, shards, tell) if group.bucket else None
