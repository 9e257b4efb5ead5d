"""JSON lines that survive a crash: one encoder, one reader, one append-only log, one atomic replace.

A record is one line of ASCII JSON ended by a newline, the only separator. Non-ASCII is escaped, so no reader that
splits at U+2028, U+0085 or a form feed can tear a record, and a raw NUL byte in a file can only come from a lost write.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dfexp.errors import CorruptShardError, StorageError

_SCAN_BYTES = 1 << 20


def repair_text(text: str) -> tuple[str, bool]:
    """Join surrogate pairs and replace lone surrogates by U+FFFD. Returns the text and whether it had to change."""
    try:
        text.encode("utf-8")
        return text, False
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), True


def repair(value: Any) -> tuple[Any, bool]:
    """`repair_text` for every text and key anywhere in a JSON value. Returns the value and whether it had to change."""
    if isinstance(value, str):
        return repair_text(value)
    if isinstance(value, Mapping):
        pairs = [(repair(key), repair(item)) for key, item in value.items()]
        changed = any(key[1] or item[1] for key, item in pairs)
        return ({key[0]: item[0] for key, item in pairs}, True) if changed else (value, False)
    if isinstance(value, list | tuple):
        items = [repair(item) for item in value]
        return ([item[0] for item in items], True) if any(item[1] for item in items) else (value, False)
    return value, False


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One record as one line, newline included; lone surrogates are repaired, because strict readers refuse the line.

    Raises ValueError for NaN, infinities and circular records, TypeError for foreign types.
    """
    line = _dumps(record)
    if "\\ud" in line:  # an escaped surrogate: half of a pair, or a lone one
        line = _dumps(repair(record)[0])
    return line.encode("ascii") + b"\n"


def _dumps(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def decode_line(line: bytes) -> dict[str, Any]:
    """The record of one line. Raises ValueError unless it is one JSON object."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, found {type(value).__name__}")
    return value


def fsync_dir(folder: Path) -> None:
    """Make names created, renamed or removed in `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data` so that a crash at any instant leaves the old bytes or the new ones, never a mixture.

    Written beside it, flushed to the disk, renamed, and the folder flushed. Raises StorageError if the disk refuses;
    the file then holds all of the old bytes, or all of the new ones if only the last flush was refused.
    """
    temporary = temporary_name(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # left by a killed process of the same number, perhaps with another mode
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise StorageError(f"cannot write {path}: {error.strerror or error}. Free space or fix the folder.") from error


def temporary_name(path: Path) -> Path:
    """Where `write_atomic` of this process and thread puts the bytes first."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = 0o644) -> None:
    """`write_atomic` for a JSON document that people also read. Raises ValueError for NaN and infinities."""
    text = json.dumps(repair(value)[0], indent=2, ensure_ascii=True, allow_nan=False)
    write_atomic(path, text.encode("ascii") + b"\n", mode=mode)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises FileNotFoundError, and CorruptShardError if it does not hold one object."""
    try:
        return decode_line(path.read_bytes())
    except ValueError as error:
        raise CorruptShardError(f"{path} is not a JSON object: {error}. Restore it or move it away.") from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line number from 1 and bytes without the newline, split at newlines alone; a missing file has no lines."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line.removesuffix(b"\n")


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log that may be growing, torn or hit by a power loss.

    A last line without its newline is not there yet; from the first raw NUL byte on, nothing ever was. Raises
    CorruptShardError for a whole line that is no record.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") or b"\0" in line:
                return
            yield parse_line(path, number, line)


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """`decode_line` for line `number` of `path`. Raises CorruptShardError, which names both, if it is no record."""
    try:
        return decode_line(line)
    except ValueError as error:
        raise CorruptShardError(
            f"{path}:{number} is not a record: {error}. The file was edited or damaged; restore it or remove the line."
        ) from error


class AppendLog:
    """An append-only file of records. Opening cuts off a torn tail; `append` returns once the records are safe.

    A context manager. Not for two writers at once: the run's lock guards it.

    Attributes:
        size: bytes of the records in it; what a refused write left beyond them is cut off before the next one.
        cut_bytes: bytes of torn lines that opening cut off.

    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """Args: durable, whether `append` waits for the disk (False for what may be lost, such as samples)."""
        self._path, self._durable = path, durable
        try:
            created = not path.exists()
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                self._cut_tail()
                if durable:
                    # What a killed writer wrote without a flush is read as safe from now on, so it has to be.
                    os.fsync(self._fd)
                if created:
                    fsync_dir(path.parent)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror or error}. Fix the folder.") from error

    def _cut_tail(self) -> None:
        found = os.fstat(self._fd).st_size
        self.size = whole_lines_end(self._fd)
        self.cut_bytes = found - self.size
        if self.cut_bytes:
            os.ftruncate(self._fd, self.size)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append all records or none. Raises StorageError if the disk refuses; a later call may succeed."""
        self.append_bytes(b"".join(map(encode_line, records)))

    def append_bytes(self, data: bytes) -> None:
        """`append` for lines that are encoded already, each with its newline."""
        if not data:
            return
        try:
            self._drop_leftovers()
            write_all(self._fd, data)
            if self._durable:
                os.fsync(self._fd)
        except BaseException as error:
            self.truncate(self.size)
            if isinstance(error, OSError):
                raise StorageError(f"cannot append to {self._path}: {error.strerror or error}. Free space.") from error
            raise
        self.size += len(data)

    def truncate(self, size: int) -> None:
        """Take back everything after the first `size` bytes. If the disk refuses now, the next append does it."""
        self.size = size
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, size)

    def _drop_leftovers(self) -> None:
        found = os.fstat(self._fd)
        if self._durable and found.st_nlink == 0:
            raise CorruptShardError(f"{self._path} was removed while in use. Stop the process and restore the file.")
        if found.st_size < self.size:
            raise CorruptShardError(
                f"{self._path} was shortened from {self.size} to {found.st_size} bytes while in use. Restore the file."
            )
        if found.st_size > self.size:
            os.ftruncate(self._fd, self.size)

    def fileno(self) -> int:
        """The file's descriptor, for what only it can answer (which inode, which times)."""
        return self._fd

    def close(self) -> None:
        """Close the file; what was appended stays. Closing twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_all(fd: int, data: bytes) -> None:
    """Write every byte: a plain write to a nearly full disk may take only some."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def whole_lines_end(fd: int) -> int:
    """Offset just after the last line that was certainly written: before any raw NUL byte, and ended by a newline.

    A page that a power loss kept from the disk reads as NUL bytes, and nothing after it was ever flushed.
    """
    end = size = os.fstat(fd).st_size
    for start in range(0, size, _SCAN_BYTES):
        found = os.pread(fd, _SCAN_BYTES, start).find(b"\0")
        if found >= 0:
            end = start + found
            break
    while end > 0:
        start = max(0, end - _SCAN_BYTES)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
