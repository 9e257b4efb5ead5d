"""Prompts: found in the user's files, frozen into the run's folder, read back by index; all of it streams."""

import contextlib
import itertools
import os
from array import array
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dfexp.errors import CorruptShardError, FingerprintError, StorageError
from dfexp.jsonl import fsync_dir, parse_line, sha256_of, temporary_name, write_json, write_new
from dfexp.layout import RunFolder
from dfexp.params import PromptsGroup
from dfexp.records import Prompt
from dfexp.sources.reading import Reading as Reading
from dfexp.sources.report import render as render

_TOGETHER = 500  # prompts that are written at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """What `freeze` did: `asked` prompts are in prompts.jsonl, whose SHA-256 is `sha256` (hexadecimal).

    `sources`: path as given, sha256, rows (records read), prompts (in them; a record without any is one) and kept:
    what is not kept is dropped. `dropped`: source, line from 1 (row number in Parquet), reason and detail of the first
    100 dropped for each reason; `dropped_by_reason` counts all of them, `odd_by_reason` what was kept and is worth a
    look. `shared_prefix_share`: part of all text, 0-1, with which an earlier prompt begins too. prompts_report.json
    beside the prompts says more.
    """

    asked: int
    sha256: str
    sources: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    dropped_by_reason: dict[str, int]
    odd_by_reason: dict[str, int]
    shared_prefix_share: float

    def to_json(self) -> dict[str, Any]:
        """The `prompts` part of run.json."""
        return asdict(self)


def read(group: PromptsGroup, root: Path) -> Reading:
    """The prompts that `group` names, its relative paths resolved against `root`."""
    return Reading(group, root)


def measured(group: PromptsGroup, root: Path) -> dict[str, Any]:
    """Read them all, as a run would: what its prompts_report.json would hold. Raises PromptsError."""
    reading = read(group, root)
    for _ in reading.lines():
        pass
    return reading.report()


def freeze(group: PromptsGroup, root: Path, folder: RunFolder) -> Frozen:
    """Write the prompts of `group` to the run's prompts.jsonl; line i is index i.

    A crash leaves the file whole or absent, and perhaps one that was begun, which the next call removes: two at once
    must not freeze one run. A file that is there already with the same bytes is success.
    Raises PromptsError (see `Reading`), FingerprintError if other prompts are there, StorageError if the disk refuses.
    """
    reading, path, temporary = read(group, root), folder.prompts, temporary_name(folder.prompts)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        for left in folder.path.glob(".prompts*.tmp"):
            left.unlink()
        lines = reading.lines(folder.path)
        write_new(temporary, iter(lambda: b"".join(itertools.islice(lines, _TOGETHER)), b""))
        sha256 = sha256_of(temporary)
        if path.exists() and (there := sha256_of(path)) != sha256:
            raise FingerprintError(f"{path} holds other prompts (SHA-256 {there}), left as it is. Rename the run.")
        os.replace(temporary, path)
        fsync_dir(path.parent)
        write_json(folder.prompts_report, report := reading.report())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}. Free space or fix the folder.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return Frozen(sha256=sha256, **{each.name: report[each.name] for each in fields(Frozen) if each.name != "sha256"})


class FrozenPrompts(contextlib.AbstractContextManager["FrozenPrompts"]):
    """The prompts of a run by index, one read from the disk each; 8 bytes of memory a prompt. A context manager."""

    def __init__(self, path: Path, *, asked: int | None = None, sha256: str | None = None) -> None:
        """Open prompts.jsonl and check it against what run.json says of it. Raises CorruptShardError."""
        self._path = path
        try:
            with path.open("rb") as file:
                self._starts = array("Q", itertools.accumulate(map(len, file), initial=0))
            found = sha256_of(path)
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
