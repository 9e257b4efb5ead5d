"""JSON lines that survive a crash: one encoder, one reader, one append-only log, one atomic replace.

A record is one line of ASCII JSON ended by `\n`, the only separator. Non-ASCII is escaped, so no reader that splits at
U+2028, U+0085 or a form feed can tear a record, and a raw NUL byte in a file can only come from a lost write.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dfexp.errors import CorruptShardError, StorageError


def repair_text(text: str) -> tuple[str, bool]:
    """Join surrogate pairs and replace lone surrogates by U+FFFD. Returns the text and whether it had to change."""
    try:
        text.encode("utf-8")
        return text, False
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), True


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One record as one line, `\n` included. Raises ValueError for NaN and infinities, TypeError for foreign types."""
    return json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


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
    the old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror or error}. Free space or fix the folder.") from error


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = 0o644) -> None:
    """`write_atomic` for a JSON document that people also read."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=True).encode("ascii") + b"\n", mode=mode)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises FileNotFoundError, and CorruptShardError if it does not hold one object."""
    try:
        return decode_line(path.read_bytes())
    except ValueError as error:
        raise CorruptShardError(f"{path} is not a JSON object: {error}. Restore it or move it away.") from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line number from 1 and bytes without the `\n`, split at `\n` alone; a file that is not there has no lines."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line.removesuffix(b"\n")


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log that may be growing or torn: a last line without its `\n` is not there yet.

    Raises CorruptShardError for a whole line that is no record.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode_line(line)
            except ValueError as error:
                raise CorruptShardError(
                    f"{path}:{number} is not a record: {error}. The file was edited or damaged."
                ) from error


class AppendLog:
    """An append-only file of records. Opening cuts off a torn last line; `append` returns once the records are safe.

    A context manager. Not for two writers at once: the run's lock guards it.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """Args: durable, whether `append` waits for the disk (False for what may be lost, such as samples)."""
        self._path, self._durable = path, durable
        try:
            created = not path.exists()
            self._file = path.open("ab+", buffering=0)
            end = _whole_lines_end(self._file)
            if end < os.fstat(self._file.fileno()).st_size:
                self._file.truncate(end)
            if created:
                fsync_dir(path.parent)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror or error}. Fix the folder.") from error

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append all records or none. Raises StorageError if the disk refuses."""
        data = b"".join(map(encode_line, records))
        if not data:
            return
        start = os.fstat(self._file.fileno()).st_size
        try:
            write_all(self._file.fileno(), data)
            if self._durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise StorageError(f"cannot append to {self._path}: {error.strerror or error}. Free space.") from error

    def close(self) -> None:
        """Close the file; what was appended stays."""
        self._file.close()

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


def _whole_lines_end(file: Any) -> int:
    """Offset just after the last `\n`, found from the end, so that opening a long log costs nothing."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - 65536)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        position = start
    return 0
