"""manifest.json and .done_indices: what the sealed shards hold, so that opening a run reads none of them.

One line of manifest.json is one shard, in the order of the numbers, so a person can read it and take a line out.
`indices` are in the order of the rows: "0-3,5,4,7" is 0, 1, 2, 3, 5, 4, 7.
"""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dfexp.errors import CorruptShardError, FingerprintError, StorageError
from dfexp.jsonl import write_all, write_atomic
from dfexp.shards.files import DONE_INDICES, MANIFEST, shard_number

_Count = Annotated[int, Field(ge=0)]


def pack_indices(indices: Iterable[int]) -> str:
    """Indices as compact text that keeps their order; ascending neighbours become a range."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def unpack_indices(text: str) -> array[int]:
    """The inverse of `pack_indices`. Raises ValueError for any other text."""
    if not text:
        return array("Q")
    if "-" not in text:
        return array("Q", map(int, text.split(",")))
    indices = array("Q")
    for part in text.split(","):
        first, dash, last = part.partition("-")
        run = range(int(first), int(last if dash else first) + 1)
        if not run:
            raise ValueError(f"{part!r} is no range of indices")
        indices.extend(run)
    return indices


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ShardEntry(_Stored):
    """One sealed shard.

    Attributes:
        mtime_ns: modification time in ns; with name and size it tells that the file was not touched since.
        uploaded: what the store noted when it had put the shard; None until then.

    """

    name: str
    rows: _Count
    bytes: _Count
    sha256: str
    indices: str
    mtime_ns: int
    uploaded: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        shard_number(self.name)
        if len(unpack_indices(self.indices)) != self.rows:
            raise ValueError(f"{self.name}: {self.rows} rows, but other than as many indices")
        return self

    @property
    def number(self) -> int:
        """The number in the name."""
        return shard_number(self.name)


class Manifest(_Stored):
    """manifest.json: whose run it is and which shards are sealed, by number."""

    fingerprint: dict[str, str]
    total: _Count
    rows_per_shard: Annotated[int, Field(ge=1)]
    shards: list[ShardEntry] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        numbers = [entry.number for entry in self.shards]
        if numbers != sorted(set(numbers)):
            raise ValueError("the shards are not in the order of their numbers, or one is there twice")
        return self


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a completions folder, also while a run is writing; None before the run has written one.

    Raises CorruptShardError if the file is damaged or was edited into something else.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise CorruptShardError(f"{path} is not a manifest: {_first(error)}. {_REMOVE_IT}") from error


_REMOVE_IT = "Restore it from a copy, or remove it: the next resume builds it again from the shards."


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False)[0]
    where = ".".join(map(str, detail["loc"]))
    return f"{where}: {detail['msg']}" if where else detail["msg"]


def load_for_writing(folder: Path) -> tuple[Manifest | None, bool]:
    """The manifest and whether it is whole. A file whose end a disk lost is not, nor is a missing one.

    Its first line alone still tells whose run it is; it comes back as a manifest without shards. Raises as
    `read_manifest` does for a whole file that is no manifest.
    """
    path = folder / MANIFEST
    data = path.read_bytes() if path.exists() else b""
    try:
        json.loads(data)
    except ValueError:
        with contextlib.suppress(ValidationError):
            return Manifest.model_validate_json(data.split(b"\n", 1)[0] + b"]}"), False
        return None, False
    return read_manifest(folder), True


def check_same_run(folder: Path, manifest: Manifest, *, total: int, fingerprint: Mapping[str, str]) -> None:
    """Raises FingerprintError, naming the parts that differ, unless the manifest is of this very run."""
    asked = {**fingerprint, "total": str(total)}
    found = {**manifest.fingerprint, "total": str(manifest.total)}
    parts = [part for part in {**asked, **found} if asked.get(part) != found.get(part)]
    if parts:
        differences = "; ".join(f"{part} was {found.get(part)}, is now {asked.get(part)}" for part in parts)
        raise FingerprintError(
            f"{folder} holds completions of another run ({differences}). Undo that change to go on with it, or give "
            "the changed run another name."
        )


class Ledger:
    """The manifest and the done-list on disk, kept as the lines that they are written in.

    A seal rewrites the whole manifest: a few ms for the 1,310 shards of 654,676 rows, since all but one line are ready.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._head = manifest.model_dump_json(exclude={"shards"}).removesuffix("}").encode() + b',"shards":['
        self.names = [entry.name for entry in manifest.shards]
        self._lines = [entry.model_dump_json().encode() for entry in manifest.shards]
        self._unlisted: list[bytes] = []
        self._listed_bytes = 0

    def add(self, entry: ShardEntry) -> None:
        """Note a sealed shard; `save` puts it on disk."""
        self.names.append(entry.name)
        self._lines.append(entry.model_dump_json().encode())
        self._unlisted.append(done_lines([entry]))

    def save(self) -> None:
        """Write what `add` noted. Raises StorageError; a later call does it then."""
        if self._unlisted:
            data = b"".join(self._unlisted)
            self._extend_done(data)
            self._listed_bytes += len(data)
            self._unlisted.clear()
        write_atomic(self._folder / MANIFEST, self._head + b"\n" + b",\n".join(self._lines) + b"\n]}\n")

    def _extend_done(self, data: bytes) -> None:
        """Written at a fixed place and not flushed: it is derived, so a resume repairs whatever a crash makes of it."""
        path = self._folder / DONE_INDICES
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.lseek(fd, self._listed_bytes, os.SEEK_SET)
                write_all(fd, data)
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageError(f"cannot extend {path}: {error.strerror or error}. Free space.") from error

    def repair_done(self, entries: Sequence[ShardEntry]) -> bool:
        """Make .done_indices what the shards say. Returns whether it was anything else."""
        path = self._folder / DONE_INDICES
        expected = done_lines(entries)
        self._listed_bytes = len(expected)
        self._unlisted.clear()
        if path.exists() and path.stat().st_size == len(expected) and path.read_bytes() == expected:
            return False
        write_atomic(path, expected)
        return True


def done_lines(entries: Iterable[ShardEntry]) -> bytes:
    """What .done_indices holds for some shards: one index a line, in the order of the rows."""
    return b"".join(_done_lines(entry.indices) for entry in entries if entry.rows)


def _done_lines(packed: str) -> bytes:
    text = packed if "-" not in packed else ",".join(map(str, unpack_indices(packed)))
    return text.replace(",", "\n").encode() + b"\n"
