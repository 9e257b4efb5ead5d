"""Uploads beside a run: shards as they are sealed, failures in slices, the record. Nothing here is waited for."""

from __future__ import annotations

import gzip
import hashlib
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from dfexp.errors import DfexpError, StoreError, StoreTaken, StoreUnavailable
from dfexp.jsonl import read_json, write_atomic
from dfexp.layout import RunFolder
from dfexp.params import StoreGroup
from dfexp.shards import ShardEntry, Shards, read_manifest
from dfexp.store import contents
from dfexp.store.bucket import Bucket
from dfexp.store.contents import COMPLETIONS, PROMPTS, RECORD, RUN, Contents, Owner, Record

RECORD_EVERY_S, RENEW_S = 15.0, 120.0
"""The record follows new shards after so long at the most, and is written anew so often without any."""
_TOKEN = ".store_owner"  # noqa: S105 (tells who writes, and opens nothing)
Tell = Callable[..., None]


def me(folder: RunFolder) -> Owner:
    """The folder on this machine, as owner of its place in the bucket."""
    path = folder.path / _TOKEN
    if folder.path.exists() and not path.exists():
        write_atomic(path, secrets.token_hex(16).encode())
    token, here = path.read_text() if path.exists() else "", str(folder.path.resolve())
    return Owner(token=token, host=socket.gethostname(), folder=here, pid=os.getpid())


def look(bucket: Bucket, folder: RunFolder, owner: Owner) -> tuple[Contents, list[str]]:
    """What is in the place, which is this run's or free, and the foreign names there.

    Raises StoreError for a store without conditional writes that are not done without, for a place that is another's,
    and StoreTaken for another writer.
    """
    bucket.is_conditional = bucket.probe()
    if not bucket.is_conditional and not bucket.group.allow_unconditional:
        raise StoreError(
            f"the store at {bucket.group.endpoint_url or 'AWS'} ignores If-None-Match, so nothing keeps it from "
            "overwriting. Use another, or accept a look before each put: store.allow_unconditional: true."
        )
    manifest, found = read_manifest(folder.completions), contents.read(bucket)
    run = read_json(folder.run_json) if folder.run_json.exists() else None
    others = contents.require_place(bucket, found, run, [entry.name for entry in manifest.shards] if manifest else [])
    if who := contents.writer(found, owner):
        raise StoreTaken(
            f"{bucket.url()} is written by {who}. Stop that run; if it is gone, start again {contents.STALE_S / 60:g} "
            "minutes after it."
        )
    return found, others


def check(folder: RunFolder, group: StoreGroup) -> str:
    """What is found in the place of a run, in words. Writes nothing but a probe, which it removes again.

    Raises StoreError for what would keep the run from being uploaded, StoreUnavailable if the store does not answer.
    """
    bucket = Bucket(group, folder.name)
    found, others = look(bucket, folder, me(folder))
    there = f"{len(found.listed):,} shards of this run" if found.run else "empty"
    words = f"{bucket.url()}: {there}, can be written"
    words += "" if bucket.is_conditional else "; If-None-Match is ignored, so dfexp looks before each put"
    return words + f"; left alone there: {contents.shown(others)}" * bool(others)


class Uploader:
    """Uploads what a run makes safe, in threads of its own.

    Made before the first row, which tells what can be known then: StoreError for a store that cannot be used as it is
    told to, a place that is another's, or another writer. A store that does not answer is no error: rows are spooled in
    the run's folder, and it is tried again for as long as the run goes on.

    Attributes: refused, why shards will not be uploaded, by name; ended_by, why nothing more is, or None.
    """

    def __init__(
        self, folder: RunFolder, group: StoreGroup, shards: Shards, tell: Tell, *, patience_s: float = 20.0
    ) -> None:
        """Args: tell, records an event with its details, in any thread; patience_s, what a store gets to answer now."""
        self._folder, self._shards, self._tell = folder, shards, tell
        self._stopped, self._changed, self._is_away = threading.Event(), threading.Condition(), False
        self._queue: SimpleQueue[ShardEntry] = SimpleQueue()
        self._waiting: dict[str, ShardEntry] = {}
        self._stored: dict[str, ShardEntry] = {}
        self.refused: dict[str, str] = {}
        self.ended_by: str | None = None
        self._owner, self._sent_bytes, self._parts = me(folder), 0, 0
        self._etag: str | None = None
        self._is_open = self._is_ready = self._is_dirty = self._is_finishing = False
        self._last_record = 0.0
        self._bucket = Bucket(group, folder.name, limit_s=patience_s, stopped=self._stopped, told=self._told)
        self._known = read_manifest(folder.completions)
        self._waiting = {entry.name: entry for entry in self._known.shards} if self._known else {}
        try:
            self._claim()
        except StoreUnavailable as error:
            self._told(error)
        self._bucket.limit_s = None
        shards.on_sealed = self.add
        self._keeper = threading.Thread(target=self._keep, args=(group.concurrency,), daemon=True, name="dfexp-store")
        self._keeper.start()

    def add(self, entries: Sequence[ShardEntry]) -> None:
        """Take sealed shards. Returns at once; may be called in any thread."""
        with self._changed:
            for entry in entries:
                self._waiting[entry.name] = entry
                if self._is_ready:
                    self._queue.put(entry)

    @property
    def left(self) -> list[str]:
        """Names of the shards that are sealed and not in the bucket."""
        with self._changed:
            return sorted([*self._waiting, *self.refused])

    def wait(self, within_s: float) -> bool:
        """Take no more shards, and wait until all are uploaded or cannot be. Returns whether that is so."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()
        self._keeper.join(within_s)
        return not self._keeper.is_alive()

    def finish(self, within_s: float) -> list[str]:
        """Upload the rest, release the place and end the threads. Returns the shards that are not in the bucket."""
        self.wait(within_s)
        self._stopped.set()
        if left := self.left:
            why = self.ended_by or next(iter(self.refused.values()), f"the store did not take them in {within_s:g} s")
            self._tell("store_incomplete", left=len(left), shards=left[:10], detail=why)
        return left

    def _told(self, error: StoreError | None) -> None:
        """Of an outage its beginning and its end are told."""
        with self._changed:
            is_new, self._is_away = (error is None) == self._is_away, error is not None
        if is_new and not self._stopped.is_set():
            self._tell("store_away" if error else "store_answers_again", **({"detail": str(error)} if error else {}))

    def _claim(self) -> None:
        """See that the place is ours, make it so, and sort the shards into those that are there and those that wait."""
        bucket = self._bucket
        found, others = look(bucket, self._folder, self._owner)
        if found.run is None:
            text = self._folder.run_json.read_bytes()
            bucket.put_once(RUN, text, hashlib.sha256(text).hexdigest())
        listed = found.listed
        with self._changed:
            for name, entry in self._waiting.items():
                there = listed.get(name)
                if there and there.sha256 == entry.sha256 and found.sizes.get(COMPLETIONS + name) == entry.bytes:
                    self._stored[name] = entry.model_copy(update={"uploaded": there.uploaded})
                    self._shards.note_uploaded(self._stored[name])
                elif not (self._folder.completions / name).exists():
                    self.refused[name] = f"{name} is neither here nor in the bucket"
            self._waiting = {n: e for n, e in self._waiting.items() if n not in self._stored and n not in self.refused}
        self._etag = found.got.etag if found.got else None
        self._parts, self._sent_bytes = len(found.parts), sum(found.sizes[name] for name in found.parts)
        self._put_record()
        self._is_open = True
        mode = {} if bucket.is_conditional else {"unconditional": "it ignores If-None-Match: looked for, then put"}
        self._tell("store_opened", url=bucket.url(), stored=len(self._stored), waiting=len(self._waiting), **mode)
        if others:
            self._tell("store_foreign", detail=f"not of this run, and left alone: {contents.shown(others)}")

    def _keep(self, concurrency: int) -> None:
        """The thread that begins, writes slices and the record, and ends."""
        try:
            if not self._is_open:  # the store was away at the start
                self._claim()
            self._put_prompts()
            with self._changed:
                self._is_ready = True
                for entry in self._waiting.values():
                    self._queue.put(entry)
            for number in range(concurrency):
                threading.Thread(target=self._work, daemon=True, name=f"dfexp-store-{number}").start()
            while not self._is_over():
                self._put_failures()
                if self._is_dirty or time.monotonic() - self._last_record > RENEW_S:
                    self._put_record()
            self._put_failures()
            self._owner = self._owner.model_copy(update={"is_released": True})
            self._put_record()
        except Exception as error:  # also a defect of this part: the run goes on without it, and says so
            if not self._stopped.is_set():
                self.ended_by = str(error) if isinstance(error, DfexpError) else repr(error)
                self._tell("store_ended", detail=self.ended_by)
                self._stopped.set()

    def _is_over(self) -> bool:
        """Wait for the next record's time. Whether all is uploaded and nothing more will come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_finishing and not self._waiting, RECORD_EVERY_S)

    def _work(self) -> None:
        """One of the threads that put shards."""
        while not self._stopped.is_set():
            entry, error = self._queue.get(), None
            try:
                data = (self._folder.completions / entry.name).read_bytes()
                if hashlib.sha256(data).hexdigest() != entry.sha256:
                    raise StoreError(f"{entry.name} was changed after it was sealed. Restore it from a copy.")
                put = self._bucket.put_once(COMPLETIONS + entry.name, data, entry.sha256)
                note = {"to": self._bucket.url(COMPLETIONS + entry.name), "etag": put.etag, "at": time.time()}
                entry = entry.model_copy(update={"uploaded": note})
                self._shards.note_uploaded(entry)
            except Exception as problem:
                if self._stopped.is_set():
                    return
                error = str(problem) if isinstance(problem, DfexpError) else repr(problem)
                self._tell("store_refused", shard=entry.name, detail=error)
            with self._changed:
                del self._waiting[entry.name]
                (self.refused if error else self._stored)[entry.name] = error or entry  # type: ignore[assignment]
                self._is_dirty = True
                self._changed.notify_all()

    def _put_prompts(self) -> None:
        """The frozen prompts, compressed. Whose they are run.json tells, so they may be there."""
        if PROMPTS in self._bucket.sizes():
            return
        packed = self._folder.path / f".{PROMPTS}.tmp"
        try:
            with self._folder.prompts.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target, 2**20)
            with packed.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self._bucket.put_once(PROMPTS, packed, sha256)
        finally:
            packed.unlink(missing_ok=True)

    def _put_failures(self) -> None:
        """What failures.jsonl has got since the last slice, as the next one."""
        size = self._shards.failure_bytes
        if size <= self._sent_bytes:
            return
        with (self._folder.completions / "failures.jsonl").open("rb") as file:
            file.seek(self._sent_bytes)
            data = file.read(size - self._sent_bytes)
        self._bucket.put_once(contents.part_name(self._parts), data, hashlib.sha256(data).hexdigest())
        self._parts, self._sent_bytes = self._parts + 1, size

    def _put_record(self) -> None:
        with self._changed:
            self._is_dirty = False
            shards = sorted(self._stored.values(), key=lambda entry: entry.number)
        assert self._known is not None  # Shards.open has written one
        manifest = self._known.model_copy(update={"shards": shards})
        data = Record(owner=self._owner, run=read_json(self._folder.run_json), manifest=manifest).encoded()
        self._etag = self._bucket.replace(RECORD, data, hashlib.sha256(data).hexdigest(), self._etag)
        self._last_record = time.monotonic()
