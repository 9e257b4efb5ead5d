"""Uploads beside a run: shards as they are sealed, failures in slices, the record. Nothing here is waited for."""

import gzip
import hashlib
import os
import random
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from dfexp.errors import CorruptShardError, DfexpError, StoreConflict, StoreError, StoreTaken, StoreUnavailable
from dfexp.jsonl import read_json, sha256_of, write_atomic
from dfexp.layout import RunFolder
from dfexp.params import StoreGroup
from dfexp.shards import ShardEntry, Shards, read_manifest
from dfexp.store import contents
from dfexp.store.bucket import Bucket
from dfexp.store.contents import COMPLETIONS, PROMPTS, RECORD, RUN, Contents, Owner, Record

RECORD_EVERY_S, RENEW_S = 15.0, 120.0
"""The record follows new shards after so long at the most, and is written anew so often without any."""
OPEN_S = 30.0
"""What a start waits for the store, however its answers come."""
_MOST_ASIDE_S, _SAFE = 5.0, 0.9
_TOKEN = ".store_owner"  # noqa: S105 (tells who writes, and opens nothing)
Tell = Callable[..., None]
T = TypeVar("T")


def _begun(work: Callable[[], T]) -> Future[T]:
    """Do it in a thread that nothing waits for, not even the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="dfexp-store-open").start()
    return future


def _in_time(future: Future[T], bucket: Bucket) -> T:
    """What came of it. Raises StoreUnavailable if that takes too long: each of its bytes may come in time."""
    try:
        return future.result(OPEN_S)
    except TimeoutError:
        raise StoreUnavailable(f"{bucket.url()}: the store did not answer whole in {OPEN_S:g} s") from None


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
            f"the store at {bucket.endpoint} ignores If-None-Match, so nothing keeps it from "
            "overwriting. Use another, or accept a look before each put: store.allow_unconditional: true."
        )
    manifest, found = read_manifest(folder.completions), contents.read(bucket)
    run = read_json(folder.run_json) if folder.run_json.exists() else None
    others = contents.require_place(bucket, found, run, [entry.name for entry in manifest.shards] if manifest else [])
    if who := contents.writer(found, owner):
        raise StoreTaken(f"{bucket.url()} is written by {who}. Stop that run; if it is gone, start again after that.")
    return found, others


def check(folder: RunFolder, group: StoreGroup) -> str:
    """What is found in the place of a run, in words. Writes nothing but a probe, which it removes again.

    Raises StoreError for what would keep the run from being uploaded, StoreUnavailable if the store does not answer.
    """
    bucket = Bucket(group, folder.name)
    found, others = _in_time(_begun(partial(look, bucket, folder, me(folder))), bucket)
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
        self._stopped, self._changed, self._away = threading.Event(), threading.Condition(), ""
        self._stored, self.refused, self._denied = dict[str, ShardEntry](), dict[str, str](), dict[str, str]()
        self.ended_by: str | None = None
        self._owner, self._slices, self._lost = me(folder), list[int](), list[int]()
        self._etag: str | None = None
        self._is_open = self._is_ready = self._is_dirty = self._is_finishing = False
        self._recording, self._renewed_at = threading.RLock(), 0.0
        self._bucket = Bucket(group, folder.name, limit_s=patience_s, stopped=self._stopped, told=self._told)
        self._queue, self._known = SimpleQueue[ShardEntry](), read_manifest(folder.completions)
        self._waiting = {entry.name: entry for entry in self._known.shards} if self._known else {}
        self._opening = _begun(self._claim)
        try:
            _in_time(self._opening, self._bucket)
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
        """Names of the shards that are sealed and not in the bucket, and of what else is refused or denied there."""
        with self._changed:
            return sorted({*self._waiting, *self.refused, *self._denied})

    @property
    def why(self) -> str:
        """Why something is left, as far as it is known."""
        with self._changed:
            return self.ended_by or next(iter([*self.refused.values(), *self._denied.values()]), self._away)

    def wait(self, within_s: float) -> bool:
        """Take no more shards, and wait until all are uploaded or cannot be. Returns whether that is so."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()
        self._keeper.join(within_s)
        return not self._keeper.is_alive()

    def finish(self, within_s: float) -> list[str]:
        """Upload the rest, release the place and end the threads. Returns the objects that are not in the bucket."""
        is_over = self.wait(within_s)
        if not self.left and (self.ended_by or not is_over):  # whatever else is missing, the record does not list it
            self._denied[RECORD] = self.ended_by or self._away or "the store did not take it in time"
        self._stopped.set()
        if left := self.left:
            why = self.why or "the store did not take them in time"
            self._tell("store_incomplete", left=len(left), shards=left[:10], detail=why)
        return left

    def _told(self, error: Exception | None) -> None:
        """Of an outage its beginning and its end are told."""
        with self._changed:
            is_new, self._away = (error is None) == bool(self._away), str(error or "")
        if is_new and not self._stopped.is_set():
            self._tell("store_away" if error else "store_answers_again", **({"detail": str(error)} if error else {}))

    def _claim(self) -> None:
        """See that the place is ours, make it so, and sort the shards into those that are there and those that wait."""
        bucket = self._bucket
        found, others = look(bucket, self._folder, self._owner)
        if found.run is None:
            text = self._folder.run_json.read_bytes()
            bucket.put_once(RUN, text, hashlib.sha256(text).hexdigest())
        listed = self._unlisted(found, found.listed) | found.listed
        with self._changed:
            for name, entry in self._waiting.items():
                there = listed.get(name)
                if there and there.sha256 == entry.sha256 and found.sizes.get(COMPLETIONS + name) == entry.bytes:
                    self._stored[name] = entry.model_copy(update={"uploaded": there.uploaded})
                    self._shards.note_uploaded(self._stored[name])
                elif not (self._folder.completions / name).exists():
                    self.refused[name] = f"{name} is neither here nor, as it was uploaded, in the bucket"
                    self._shards.note_uploaded(entry.model_copy(update={"uploaded": {"gone": self.refused[name]}}))
                elif entry.uploaded is not None:  # it is not as it was, and has to be uploaded again
                    self._shards.note_uploaded(entry.model_copy(update={"uploaded": None}))
            self._waiting = {n: e for n, e in self._waiting.items() if n not in self._stored and n not in self.refused}
        self._etag = found.got.etag if found.got else None
        self._slices = contents.own_parts(bucket, found, self._folder.completions)
        self._lost = [number for number, name in enumerate(found.parts) if name not in found.sizes]
        self._put_record()
        self._is_open = True
        mode = {} if bucket.is_conditional else {"unconditional": "it ignores If-None-Match: looked for, then put"}
        self._tell("store_opened", url=bucket.url(), stored=len(self._stored), waiting=len(self._waiting), **mode)
        if others:
            self._tell("store_foreign", detail=f"not of this run, and left alone: {contents.shown(others)}")
        for name, why in self.refused.items():
            self._tell("store_refused", shard=name, detail=why)

    def _unlisted(self, found: Contents, listed: Mapping[str, ShardEntry]) -> dict[str, ShardEntry]:
        """The shards that are there alone, as their content shows, and that the record does not list: it was lost."""
        with self._changed:
            gone = [one for one in self._waiting.values() if not (self._folder.completions / one.name).exists()]
        return {
            one.name: one.model_copy(update={"uploaded": {"to": self._bucket.url(key)}})
            for one in gone
            if one.name not in listed
            and found.sizes.get(key := COMPLETIONS + one.name) == one.bytes
            and self._bucket.sha256_of(key) == one.sha256
        }

    def _keep(self, concurrency: int) -> None:
        """The thread that begins, writes slices and the record, and ends."""
        try:
            with suppress(StoreUnavailable):
                self._opening.result()
            if not self._is_open:  # the store was away at the start
                self._claim()
            self._put_aside(PROMPTS, self._put_prompts)
            with self._changed:
                self._is_ready = True
                for entry in self._waiting.values():
                    self._queue.put(entry)
            for number in range(concurrency):
                threading.Thread(target=self._work, daemon=True, name=f"dfexp-store-{number}").start()
            while not self._is_over():
                self._put_failures()
                if self._is_dirty or self._age_s > RENEW_S:
                    self._put_record()
            if self._stopped.is_set():
                return
            self._put_failures()
            self._put_aside(PROMPTS, self._put_prompts)  # if they were denied
            self._owner = self._owner.model_copy(update={"is_released": True})
            self._put_record()
        except Exception as error:  # also a defect of this part: the run goes on without it, and says so
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Nothing more is uploaded."""
        with self._changed:
            if self._stopped.is_set():
                return
            self.ended_by = str(error) if isinstance(error, DfexpError) else repr(error)
            self._stopped.set()
            self._changed.notify_all()
        self._tell("store_ended", detail=self.ended_by)

    def _is_over(self) -> bool:
        """Wait for the next record's time. Whether all is uploaded and nothing more will come."""
        ends = self._stopped.is_set
        with self._changed:
            return self._changed.wait_for(lambda: ends() or (self._is_finishing and not self._waiting), RECORD_EVERY_S)

    def _work(self) -> None:
        """One of the threads that put shards. One that is denied goes to the end of the queue: others may go."""
        denied = 0
        while not self._stopped.is_set():
            entry = self._queue.get()
            try:
                done, error = self._put_shard(entry), ""
            except StoreTaken as problem:
                return self._end(problem)
            except Exception as problem:
                if self._stopped.is_set():
                    return None
                if type(problem) is StoreError:
                    if entry.name not in self._denied:  # told once
                        self._told(problem)
                    self._denied[entry.name], denied = str(problem), min(denied + 1, 5)
                    self._stopped.wait(random.uniform(0, min(_MOST_ASIDE_S, 0.25 * 2**denied)))  # noqa: S311 (jitter)
                    self._queue.put(entry)
                    continue
                done, error = entry, str(problem) if isinstance(problem, DfexpError) else repr(problem)
                self._tell("store_refused", shard=entry.name, detail=error)
            denied = 0
            with self._changed:
                del self._waiting[entry.name]
                self._denied.pop(entry.name, None)
                (self.refused if error else self._stored)[entry.name] = error or done  # type: ignore[assignment]
                self._is_dirty = True
                self._changed.notify_all()
        return None

    def _put_shard(self, entry: ShardEntry) -> ShardEntry:
        """Returns the entry with what there is to note. Raises StoreError, CorruptShardError."""
        data = (self._folder.completions / entry.name).read_bytes()
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise CorruptShardError(f"{entry.name} was changed after it was sealed. Restore it from a copy.")
        key = COMPLETIONS + entry.name
        put = self._bucket.put_once(key, data, entry.sha256, before=self._keep_place, is_patient=False)
        note = {"to": self._bucket.url(key), "etag": put.etag, "at": time.time()}
        entry = entry.model_copy(update={"uploaded": note})
        self._shards.note_uploaded(entry)
        return entry

    def _put_prompts(self) -> None:
        """The frozen prompts, compressed. Whose they are run.json tells, so they may be there."""
        if PROMPTS in self._bucket.sizes():
            return
        packed = self._folder.path / f".{PROMPTS}.tmp"
        try:
            with self._folder.prompts.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target, 2**20)
            self._bucket.put_once(PROMPTS, packed, sha256_of(packed), is_patient=False)
        finally:
            packed.unlink(missing_ok=True)

    def _put_failures(self) -> None:
        """What failures.jsonl has got since the last slice, as the next one, and again those that the bucket lost."""
        slices = list(self._slices)
        if (more := self._shards.failure_bytes - sum(slices)) > 0:
            slices.append(more)
        for number in [*self._lost, *range(len(self._slices), len(slices))]:
            with (self._folder.completions / "failures.jsonl").open("rb") as file:
                file.seek(sum(slices[:number]))
                data = file.read(slices[number])
            name, sha256 = contents.part_name(number), hashlib.sha256(data).hexdigest()
            put = partial(self._bucket.put_once, name, data, sha256, before=self._keep_place, is_patient=False)
            if len(data) == slices[number] and self._put_aside(name, put):
                self._slices, self._is_dirty = slices[: max(len(self._slices), number + 1)], True
                self._lost = [one for one in self._lost if one != number]

    def _put_aside(self, name: str, put: Callable[[], object]) -> bool:
        """Put what is no shard; whether that was done. What is refused or denied is told, and holds up nothing else."""
        if name in self.refused:
            return False
        try:
            put()
            self._denied.pop(name, None)
            return True
        except StoreConflict as problem:
            self._put_record()  # if it is of a process that has taken over, this says so
            self.refused[name] = str(problem)
            self._tell("store_refused", shard=name, detail=str(problem))
        except (StoreError, OSError) as problem:
            if isinstance(problem, StoreTaken | StoreUnavailable):
                raise
            if name not in self._denied:  # told once
                self._told(problem)
            self._denied[name] = str(problem)
        return False

    @property
    def _age_s(self) -> float:
        """Since the record was written, by the clock that goes on while a machine sleeps."""
        return abs(time.time() - self._renewed_at)

    def _keep_place(self) -> None:
        """Before a put: see that nobody can have taken the place over. Raises StoreTaken if somebody has."""
        with self._recording:
            if self._age_s > _SAFE * contents.STALE_S:
                self._put_record()

    def _put_record(self) -> None:
        with self._recording:
            with self._changed:
                self._is_dirty = False
                shards = sorted(self._stored.values(), key=lambda entry: entry.number)
            assert self._known is not None  # Shards.open has written one
            manifest, began = self._known.model_copy(update={"shards": shards}), time.time()
            run = read_json(self._folder.run_json)
            data = Record(owner=self._owner, run=run, failures=self._slices, manifest=manifest).encoded()
            self._etag = self._bucket.replace(RECORD, data, hashlib.sha256(data).hexdigest(), self._etag)
            self._renewed_at = began
