"""What is in a completions folder: its names, its lock, and manifest.json and .done_indices.

Both say what the sealed shards hold, so that opening a run reads none of them. One line of manifest.json is one shard,
in the order of the numbers, so a person can read it and take a line out.
"""

import fcntl
import os
import re
import socket
import time
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from dfexp.errors import CorruptShardError, FingerprintError, LockedError, ShardError
from dfexp.jsonl import decode_line, disk, encode_line, write_atomic

FAILURES = "failures.jsonl"
MANIFEST = "manifest.json"
DONE_INDICES = ".done_indices"
LOCK = ".lock"

_NOTE = b'{"pid":'  # how the note in the lock begins
_NAME = re.compile(r"completions_(\d{6,})\.jsonl(\.partial)?")
_Count = Annotated[int, Field(ge=0)]
_Index = Annotated[int, Field(ge=0, lt=2**32)]
_Indices = Annotated[
    list[_Index], AfterValidator(lambda given: array("I", given)), PlainSerializer(list, return_type=list[int])
]
"""Four bytes an index in memory, where a list takes 36."""


def sealed_name(number: int) -> str:
    """The name of a sealed shard."""
    return f"completions_{number:06d}.jsonl"


def partial_name(number: int) -> str:
    """The name of a shard that still grows."""
    return f"{sealed_name(number)}.partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One shard as its name describes it."""

    number: int
    path: Path
    sealed: bool


def list_shards(folder: Path) -> list[ShardFile]:
    """The shard files of a folder by number, a sealed one before an open one; none if there is no folder."""
    found = [
        ShardFile(number=int(match[1]), path=path, sealed=match[2] is None)
        for path in (folder.iterdir() if folder.exists() else ())
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda shard: (shard.number, not shard.sealed))


def foreign_file(path: Path) -> ShardError:
    """The error for a file that stands where one of ours has to go."""
    return ShardError(
        f"{path} exists, and this run did not write it. Move it away and resume: dfexp never replaces a file."
    )


def lock(folder: Path) -> int:
    """Take the folder for this process until the returned descriptor is closed; the kernel frees it on any death.

    Raises LockedError, naming the holder, if another process has it, ShardError if the file is not of dfexp, and
    StorageError if the disk refuses.
    """
    path = folder / LOCK
    with disk(f"lock {path}", "Fix the folder."), ExitStack() as undo:
        # The file stays for ever: removing it would let two writers lock two files of one name.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        undo.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(f"{folder} is being written by {_holder(fd)}. Stop it, or wait until it ends.") from None
        # A killed writer leaves it empty, a loss of power torn or zeroed.
        if not _NOTE.startswith(os.pread(fd, len(_NOTE), 0).rstrip(b"\0")):
            raise foreign_file(path)
        os.ftruncate(fd, 0)
        os.pwrite(fd, encode_line({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}), 0)
        undo.pop_all()
        return fd


def _holder(fd: int) -> str:
    """Whom the note in the lock names; it may be half written at this instant."""
    try:
        note = decode_line(os.pread(fd, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["since"]))
        return f"process {note['pid']} on {note['host']}, since {since}"
    except (ValueError, KeyError, TypeError, OSError):
        return "another process"


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ShardEntry(_Stored):
    """One sealed shard: `indices` in the order of its rows, and what the store noted when it had put it (`uploaded`).

    Its size and `mtime_ns` (modification time in ns) tell that the file was not touched since.
    """

    name: str
    rows: _Count
    bytes: _Count
    sha256: str
    mtime_ns: int
    uploaded: dict[str, Any] | None = None
    indices: _Indices

    @property
    def number(self) -> int:
        """The number in the name. Raises ValueError if that is no shard's."""
        match = _NAME.fullmatch(self.name)
        if match is None:
            raise ValueError(f"{self.name!r} is not the name of a shard")
        return int(match[1])


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
        for entry in self.shards:
            if len(entry.indices) != entry.rows or max(entry.indices, default=-1) >= self.total:
                raise ValueError(f"{entry.name} has {entry.rows} rows, but not as many indices below {self.total}")
        return self


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a completions folder, also while a run is writing; None before the run has written one.

    Raises CorruptShardError if the file was edited or damaged; it is replaced whole, so no crash does that.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().replace(b",\n]}", b"\n]}")  # whoever took the last line out left its comma
        return Manifest.model_validate_json(text)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CorruptShardError(
            f"{path} is not a manifest: {first['msg']} at {first['loc']}. Restore it from a copy, or remove it: the "
            "next resume builds it again from the shards."
        ) from error


class ManifestWriter:
    """Replaces manifest.json and .done_indices; encodes each entry once, since a seal adds one to thousands."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._encoded = folder, dict[str, tuple[ShardEntry, bytes]]()

    def write(self, manifest: Manifest) -> None:
        """Make both say what `manifest` says. Raises StorageError."""
        for entry in manifest.shards:
            if self._encoded.get(entry.name, (None,))[0] is not entry:
                self._encoded[entry.name] = entry, entry.model_dump_json().encode("ascii")
        lines = [self._encoded[entry.name][1] for entry in manifest.shards]
        head = manifest.model_dump_json(exclude={"shards"}).removesuffix("}").encode("ascii") + b',"shards":[\n'
        write_atomic(self._folder / MANIFEST, head + b",\n".join(lines) + b"\n]}\n")
        # The indices stand last in each line.
        rows = (line[line.rindex(b"[") + 1 : -2].replace(b",", b"\n") for line in lines)
        write_atomic(self._folder / DONE_INDICES, b"".join(part + b"\n" for part in rows if part))


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


def done_lines(entry: ShardEntry) -> bytes:
    """What .done_indices holds of one shard: the index of each of its rows, one a line."""
    return ("%d\n" * len(entry.indices) % tuple(entry.indices)).encode("ascii")


def refuse_foreign(folder: Path) -> None:
    """Raise ShardError for a link or a folder under a name that is written to: writing would hit something else."""
    growing = [shard.path for shard in list_shards(folder) if not shard.sealed]
    for path in (folder / MANIFEST, folder / FAILURES, folder / DONE_INDICES, *growing):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise foreign_file(path)


def is_listed(folder: Path, manifest: Manifest) -> bool:
    """Whether .done_indices says what `manifest` says.

    Raises ShardError if it cannot be of dfexp: a wrong, lost or torn one has numbers in it, or zeros, and nothing else.
    """
    path, listed = folder / DONE_INDICES, b"".join(map(done_lines, manifest.shards))
    there = path.read_bytes() if path.exists() else None
    if there not in (None, listed) and there.strip(b"0123456789\n\0"):
        raise foreign_file(path)
    return there == listed
