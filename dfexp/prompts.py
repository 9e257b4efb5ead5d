"""Prompts: found in the user's files, frozen into the run's folder, read back by index.

A record becomes messages in `messages_of`. What cannot be used is dropped with source, line and reason, never fatal;
a file that cannot be read, or no usable prompt at all, is a PromptsError. Everything streams: memory does not grow with
the number of prompts, but for a few bytes each.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dfexp.errors import CorruptShardError, FingerprintError, PromptsError, StorageError
from dfexp.jsonl import decode_line, encode_line, fsync_dir, repair_text
from dfexp.layout import RunFolder
from dfexp.params import PromptsGroup
from dfexp.records import Prompt
from dfexp.sources import FIELDS, Unusable, existing_file, field_names, messages_of, repaired, rows_of

_MAX_DETAILS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file that was read: `path` as the user gave it, `rows` records read from it, dropped ones included."""

    path: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A record that is no prompt. `line` counts from 1 (the row number in Parquet); `reason` is one of a few."""

    source: str
    line: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """What `freeze` did: `asked` prompts are in prompts.jsonl, whose SHA-256 is `sha256` (hexadecimal).

    `dropped` holds the first 1,000 dropped records, `dropped_by_reason` counts all of them. `duplicate_ids` counts
    prompts whose id an earlier one has already; they are kept, since the index is the identity. `repaired` counts
    prompts in which a lone surrogate, which UTF-8 cannot carry, became U+FFFD.
    """

    asked: int
    sha256: str
    sources: tuple[Source, ...]
    dropped: tuple[Dropped, ...]
    dropped_by_reason: Mapping[str, int]
    duplicate_ids: int
    repaired: int

    def to_json(self) -> dict[str, Any]:
        """The `prompts` part of run.json."""
        return asdict(self)


class Reading:
    """The prompts of a group, one by one. Counts, sources and drops are complete once the iteration has ended."""

    def __init__(self, group: PromptsGroup, root: Path) -> None:
        """Check that every file is there. Raises PromptsError: missing, a folder, unknown suffix."""
        self._group = group
        self._paths = [group.path] if isinstance(group.path, str) else list(group.path)
        self._files = [existing_file(given, root) for given in self._paths]
        self._id_field = group.id_column or "id"
        self._column_seen = self._id_seen = False
        self.asked = self.duplicate_ids = self.repaired = 0
        self.sources: list[Source] = []
        self.dropped: list[Dropped] = []
        self.dropped_by_reason: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Prompt]:
        """Read all files in order, once. Raises PromptsError: unreadable, no usable prompt, a column no row has."""
        id_hashes = array("q")
        for given, path in zip(self._paths, self._files, strict=True):
            for prompt in self._file(given, path):
                id_hashes.append(hash(prompt.id))
                yield prompt
            if self._full():
                break
        self._check_columns()
        self.duplicate_ids = sum(a == b for a, b in itertools.pairwise(sorted(id_hashes)))

    def _full(self) -> bool:
        return self._group.limit is not None and self.asked >= self._group.limit

    def _file(self, given: str, path: Path) -> Iterator[Prompt]:
        before, rows = _identity(path), 0
        fields = (self._group.column,) if self._group.column else FIELDS
        try:
            for line, row in rows_of(path, {*fields, "input", self._id_field}):
                rows += 1
                try:
                    prompt = self._prompt(row)
                except Unusable as problem:
                    self._drop(given, line, problem)
                    continue
                yield prompt
                if self._full():
                    break
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, EOFError, zlib.error) as error:
            raise PromptsError(
                f"cannot read {given} after row {rows}: {error}. Fix its permissions, or replace it if it is damaged."
            ) from error
        if _identity(path) != before:
            raise PromptsError(f"{given} changed while it was read. Start again when nothing writes to it.")
        self.sources.append(Source(path=given, sha256=sha256, rows=rows))

    def _prompt(self, row: Mapping[str, Any] | Unusable) -> Prompt:
        if isinstance(row, Unusable):
            raise row
        self._column_seen |= self._group.column in row
        self._id_seen |= self._id_field in row
        given_id, system = row.get(self._id_field), self._group.system
        if isinstance(given_id, bool) or not isinstance(given_id, (str, int, float)) or given_id == "":
            given_id = self.asked
        try:
            messages = messages_of(row, self._group.column)
            if system and not any(message["role"] in ("system", "developer") for message in messages):
                messages = ({"role": "system", "content": system}, *messages)
            (name, *messages_), changed = repaired([str(given_id), *messages])
        except RecursionError:
            raise Unusable("not valid JSON", "nested too deeply") from None
        prompt = Prompt(index=self.asked, id=name, messages=tuple(messages_))
        self.asked += 1
        self.repaired += changed
        return prompt

    def _drop(self, source: str, line: int, why: Unusable) -> None:
        self.dropped_by_reason[why.reason] += 1
        if len(self.dropped) < _MAX_DETAILS:
            detail = repair_text(why.detail)[0][:200]
            self.dropped.append(Dropped(source=source, line=line, reason=why.reason, detail=detail))

    def _check_columns(self) -> None:
        for key, column, seen in (
            ("column", self._group.column, self._column_seen),
            ("id_column", self._group.id_column, self._id_seen),
        ):
            if column is not None and not seen:
                fields = field_names(self._files)
                near = difflib.get_close_matches(column, fields, n=1)
                raise PromptsError(
                    f"prompts.{key} = {column!r}: no row of {', '.join(self._paths)} has that field. "
                    + (f"Did you mean {near[0]!r}? " if near else "")
                    + f"Fields found: {', '.join(fields) or 'none'}."
                )
        if self.asked == 0:
            counts = ", ".join(f"{count} x {reason}" for reason, count in self.dropped_by_reason.most_common())
            first = "".join(f"\n  {d.source}:{d.line}: {d.reason}: {d.detail}" for d in self.dropped[:3])
            raise PromptsError(
                f"no usable prompt in {', '.join(self._paths)} ({counts or 'no rows'}). A row needs one of the fields "
                f"{', '.join(FIELDS)}, or name yours with prompts.column. "
                f"Fields found: {', '.join(field_names(self._files)) or 'none'}.{first}"
            )


def read(group: PromptsGroup, root: Path) -> Reading:
    """The prompts that `group` names, its relative paths resolved against `root`. See `Reading`."""
    return Reading(group, root)


def freeze(group: PromptsGroup, root: Path, folder: RunFolder) -> Frozen:
    """Write the prompts of `group` to the run's prompts.jsonl; line i is index i.

    A crash leaves the file whole or absent. A file that is there already with the same bytes is success.
    Raises PromptsError (see `Reading`), FingerprintError if other prompts are there, StorageError if the disk refuses.
    """
    reading = read(group, root)
    temporary = folder.prompts.with_name(f".{folder.prompts.name}.{os.getpid()}.tmp")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        try:
            sha256 = _write(reading, temporary)
            _publish(temporary, folder.prompts, sha256)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot write {folder.prompts}: {error.strerror or error}. Free space or fix the folder."
        ) from error
    return Frozen(
        asked=reading.asked,
        sha256=sha256,
        sources=tuple(reading.sources),
        dropped=tuple(reading.dropped),
        dropped_by_reason=dict(reading.dropped_by_reason),
        duplicate_ids=reading.duplicate_ids,
        repaired=reading.repaired,
    )


class FrozenPrompts:
    """The prompts of a run by index, one read from the disk each; 8 bytes of memory a prompt. A context manager."""

    def __init__(self, path: Path, *, asked: int | None = None, sha256: str | None = None) -> None:
        """Open and check a whole prompts.jsonl.

        Args: asked and sha256, what run.json says of the file. Raises CorruptShardError when the file differs.
        """
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CorruptShardError(f"cannot open {path}: {error.strerror}. Restore it from a copy.") from error
        try:
            self._offsets, self._sha256 = self._index()
            if (asked is not None and asked != len(self)) or (sha256 is not None and sha256 != self._sha256):
                raise CorruptShardError(
                    f"{path} is not the file that run.json was written for: it has {len(self)} prompts and SHA-256 "
                    f"{self._sha256}, run.json says {asked} and {sha256}. Restore it from a copy."
                )
        except BaseException:
            self.close()
            raise

    def _index(self) -> tuple[array[int], str]:
        """Where each line starts, with the end of the file behind them, and the SHA-256."""
        offsets, digest, position, line = array("Q", [0]), hashlib.sha256(), 0, b"\n"
        with open(self._fd, "rb", buffering=1 << 20, closefd=False) as file:
            for line in file:
                digest.update(line)
                position += len(line)
                offsets.append(position)
        if not line.endswith(b"\n"):
            raise CorruptShardError(f"{self._path} ends in the middle of a line. Restore it from a copy.")
        return offsets, digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Prompt:
        """The prompt with this index. Raises IndexError, and CorruptShardError for a line that is not that prompt."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        start, end = self._offsets[index], self._offsets[index + 1]
        try:
            record = decode_line(os.pread(self._fd, end - start, start))
            if record["index"] != index:
                raise ValueError(f"it has index {record['index']!r}")
            return Prompt(index=index, id=record["id"], messages=tuple(record["messages"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptShardError(
                f"{self._path}:{index + 1} is not prompt {index}: {error}. Restore it from a copy."
            ) from error

    def sha256(self) -> str:
        """Of the file's bytes when it was opened, hexadecimal."""
        return self._sha256

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _write(prompts: Iterable[Prompt], path: Path) -> str:
    """Write the prompts, one a line, safe on the disk on return. Returns the SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=1 << 20) as file:
        for prompt in prompts:
            line = encode_line({"index": prompt.index, "id": prompt.id, "messages": prompt.messages})
            digest.update(line)
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _publish(temporary: Path, path: Path, sha256: str) -> None:
    """Give the finished file its name, unless a file is there: the same bytes are success, others an error."""
    if path.exists():
        with path.open("rb") as file:
            there = hashlib.file_digest(file, "sha256").hexdigest()
        if there != sha256:
            raise FingerprintError(
                f"{path} holds other prompts (SHA-256 {there[:12]}, now {sha256[:12]}); it was left as it is. "
                "Give this run another name, or put the prompts back as they were to go on with the old one."
            )
        return
    os.replace(temporary, path)
    fsync_dir(path.parent)
