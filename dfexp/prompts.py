"""Prompts: found in the user's files, frozen into the run's folder, read back by index; all of it streams."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dfexp.errors import CorruptShardError, FingerprintError, PromptsError, StorageError
from dfexp.jsonl import encode_line, fsync_dir, parse_line, temporary_name, write_all
from dfexp.layout import RunFolder
from dfexp.params import PromptsGroup
from dfexp.records import Prompt
from dfexp.sources import FIELDS, Unusable, existing_file, messages_of, record_of, rows_of

_TOGETHER = 500  # prompts that are written at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """What `freeze` did: `asked` prompts are in prompts.jsonl, whose SHA-256 is `sha256` (hexadecimal).

    `sources`: path as given, sha256, rows (records read, dropped ones included). `dropped`: source, line from 1 (row
    number in Parquet), reason and detail of the first 1,000 dropped records; `dropped_by_reason` counts all of them.
    """

    asked: int
    sha256: str
    sources: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    dropped_by_reason: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """The `prompts` part of run.json."""
        return asdict(self)


class Reading:
    """The prompts of a group, one by one. Its counts and lists are as in `Frozen`, complete when the iteration ends."""

    def __init__(self, group: PromptsGroup, root: Path) -> None:
        """Check that every file is there. Raises PromptsError: missing, a folder, unknown suffix."""
        paths = [group.path] if isinstance(group.path, str) else group.path
        self._files = [(given, existing_file(given, root)) for given in paths]
        self._fields = (group.column,) if group.column else FIELDS
        self._id_field, self._id_seen = group.id_column or "id", group.id_column is None
        self._system, self._limit = group.system, group.limit or sys.maxsize
        self.asked = 0
        self.sources: list[dict[str, Any]] = []
        self.dropped: list[dict[str, Any]] = []
        self.dropped_by_reason: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Prompt]:
        """Read all files in order, once. Raises PromptsError: unreadable, no usable prompt, no row with the id."""
        for given, path in self._files:
            if self.asked < self._limit:
                yield from self._file(given, path)
        names = ", ".join(given for given, _ in self._files)
        if self.asked == 0:
            counts = ", ".join(f"{count} x {reason}" for reason, count in self.dropped_by_reason.items()) or "no rows"
            first = "".join("\n  {source}:{line}: {reason}: {detail}".format(**drop) for drop in self.dropped[:3])
            raise PromptsError(f"no usable prompt in {names} ({counts}). Name its field with prompts.column.{first}")
        if not self._id_seen:
            raise PromptsError(f"prompts.id_column = {self._id_field!r}: no row of {names} has that field.")

    def _file(self, given: str, path: Path) -> Iterator[Prompt]:
        rows = 0
        try:
            before = path.stat()
            for line, row in rows_of(path, self._fields, ("input", self._id_field)):
                if self.asked == self._limit:
                    break
                rows += 1
                try:
                    prompt = self._prompt(row)
                except Unusable as problem:
                    reason, detail = problem.args
                    self.dropped_by_reason[reason] += 1
                    if len(self.dropped) < 1000:
                        self.dropped.append({"source": given, "line": line, "reason": reason, "detail": detail[:200]})
                else:
                    yield prompt
            sha256, after = _sha256(path), path.stat()
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise PromptsError(f"cannot read {given} after row {rows}: {error}. Repair or replace the file.") from error
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise PromptsError(f"{given} changed while it was read. Start again when nothing writes to it.")
        self.sources.append({"path": given, "sha256": sha256, "rows": rows})

    def _prompt(self, row: Any) -> Prompt:
        record = record_of(row)
        messages, given_id = messages_of(record, self._fields), record.get(self._id_field)
        if self._system and not any(message["role"] in ("system", "developer") for message in messages):
            messages = ({"role": "system", "content": self._system}, *messages)
        has_id = isinstance(given_id, str | int | float) and given_id != ""
        prompt = Prompt(index=self.asked, id=str(given_id if has_id else self.asked), messages=messages)
        self.asked += 1
        self._id_seen |= self._id_field in record
        return prompt


def read(group: PromptsGroup, root: Path) -> Reading:
    """The prompts that `group` names, its relative paths resolved against `root`."""
    return Reading(group, root)


def freeze(group: PromptsGroup, root: Path, folder: RunFolder) -> Frozen:
    """Write the prompts of `group` to the run's prompts.jsonl; line i is index i.

    A crash leaves the file whole or absent, and perhaps one that was begun, which the next call removes: two at once
    must not freeze one run. A file that is there already with the same bytes is success.
    Raises PromptsError (see `Reading`), FingerprintError if other prompts are there, StorageError if the disk refuses.
    """
    reading, path, temporary = read(group, root), folder.prompts, temporary_name(folder.prompts)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        for left in folder.path.glob(f".{path.name}.*.tmp"):
            left.unlink()
        _write(temporary, reading)
        sha256 = _sha256(temporary)
        if path.exists() and (there := _sha256(path)) != sha256:
            raise FingerprintError(f"{path} holds other prompts (SHA-256 {there}), left as it is. Rename the run.")
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except (TypeError, ValueError) as error:  # a NaN or a date among the tool calls
        raise PromptsError(f"prompt {reading.asked} cannot be written as JSON: {error}. Remove it.") from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}. Free space or fix the folder.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return Frozen(
        asked=reading.asked,
        sha256=sha256,
        sources=reading.sources,
        dropped=reading.dropped,
        dropped_by_reason=dict(reading.dropped_by_reason),
    )


def _write(path: Path, reading: Reading) -> None:
    """Write prompts to a new file, safe when this returns."""
    lines = (encode_line({"index": one.index, "id": one.id, "messages": one.messages}) for one in reading)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        while together := b"".join(itertools.islice(lines, _TOGETHER)):
            write_all(fd, together)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FrozenPrompts(contextlib.AbstractContextManager["FrozenPrompts"]):
    """The prompts of a run by index, one read from the disk each; 8 bytes of memory a prompt. A context manager."""

    def __init__(self, path: Path, *, asked: int | None = None, sha256: str | None = None) -> None:
        """Open prompts.jsonl and check it against what run.json says of it. Raises CorruptShardError."""
        self._path = path
        try:
            with path.open("rb") as file:
                self._starts = array("Q", itertools.accumulate(map(len, file), initial=0))
            found = _sha256(path)
            self._file = path.open("rb")
        except OSError as error:
            raise CorruptShardError(f"cannot open {path}: {error.strerror}. Restore it from a copy.") from error
        if asked not in (None, len(self)) or sha256 not in (None, found):
            self._file.close()
            raise CorruptShardError(
                f"{path} has {len(self)} prompts and SHA-256 {found}, but run.json says {asked} and {sha256}. "
                "Restore it from a copy."
            )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Prompt:
        """The prompt with this index. Raises IndexError, and CorruptShardError for a line that is no record."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        start, end = self._starts[index], self._starts[index + 1]
        record = parse_line(self._path, index + 1, os.pread(self._file.fileno(), end - start, start))
        return Prompt(index=index, id=record["id"], messages=tuple(record["messages"]))

    def __exit__(self, *_: object) -> None:
        self._file.close()
