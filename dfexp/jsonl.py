"""JSON lines that survive a crash: one encoder, one reader, one append-only log, one atomic replace.

A record is one line of ASCII JSON ended by a newline, the only separator. Non-ASCII is escaped, so no reader that
splits at U+2028, U+0085 or a form feed can tear a record, and a raw NUL byte in a file can only come from a lost write.
"""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

from dfexp.errors import CorruptShardError, StorageError

_TAIL_BYTES = 2**20  # of samples: those of many minutes, of which a disk has the first
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def repair_text(text: str) -> tuple[str, bool]:
    """Join surrogate pairs and replace lone surrogates by U+FFFD. Returns the text and whether it had to change."""
    try:
        text.encode("utf-8")
        return text, False
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), True


def repair(value: Any) -> tuple[Any, bool]:
    """`repair_text` for every text and key anywhere in a JSON value. Raises as `encode_line` does."""
    text, changed = repair_text(json.dumps(value, ensure_ascii=False))
    return (json.loads(text), True) if changed else (value, False)


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One record as one line, newline included; lone surrogates are repaired, because strict readers refuse the line.

    Raises ValueError for NaN, infinities and circular records, TypeError for foreign types.
    """
    line = _ENCODER.encode(record)
    if "\\ud" in line:  # an escaped surrogate: half of a pair, or a lone one
        line = _ENCODER.encode(repair(record)[0])
    return line.encode("ascii") + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """The record of one line. Raises ValueError unless it is one JSON object."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, found {type(value).__name__}")
    return value


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """`decode_line` for line `number` of `path`. Raises CorruptShardError, which names both, if it is no record."""
    try:
        return decode_line(line)
    except ValueError as error:
        raise CorruptShardError(
            f"{path}:{number} is not a record: {error}. The file was edited or damaged; restore it or remove the line."
        ) from error


def whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines up to the first that a crash may have left: one without its newline, or with a raw NUL byte.

    A page that a power loss kept from the disk reads as NUL bytes, and nothing after it was ever flushed.
    """
    for line in file:
        if not line.endswith(b"\n") or b"\0" in line:
            return
        yield line


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The whole records of a log that may be missing, growing, torn or hit by a power loss.

    Raises CorruptShardError for a whole line that is no record.
    """
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(whole_lines(file), 1):
                yield parse_line(path, number, line)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises FileNotFoundError, and CorruptShardError if it does not hold one object."""
    try:
        return decode_line(path.read_bytes())
    except ValueError as error:
        raise CorruptShardError(f"{path} is not a JSON object: {error}. Restore it or move it away.") from error


@contextlib.contextmanager
def disk(action: str, fix: str = "Free space or fix the folder.") -> Iterator[None]:
    """Raise an OSError of the block as StorageError: what could not be done, why, and the fix."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {action}: {error.strerror or error}. {fix}") from error


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_dir(folder: Path) -> None:
    """Make names created, renamed or removed in `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it that are missing, so that they survive a power loss. Raises OSError."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in made or [folder]:  # one that is there may be of a process that was killed before it flushed
        fsync_dir(each.parent)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data` so that a crash at any instant leaves the old bytes or the new ones, never a mixture.

    Raises StorageError if the disk refuses; the new bytes are then there only if the last flush alone was refused.
    """
    temporary = temporary_name(path)
    with disk(f"write {path}"):
        try:
            temporary.unlink(missing_ok=True)  # left by a killed process of the same number, perhaps with another mode
            write_new(temporary, [data], mode=mode)
            os.replace(temporary, path)
            fsync_dir(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def write_new(path: Path, parts: Iterable[bytes], *, mode: int = 0o644) -> None:
    """Write a file that must not exist yet; its bytes are safe when this returns. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        for part in parts:
            write_all(fd, part)
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(path: Path) -> Path:
    """Where `write_atomic` of this process and thread puts the bytes first."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = 0o644) -> None:
    """`write_atomic` for a JSON document that people also read. Raises ValueError for NaN and infinities."""
    text = json.dumps(repair(value)[0], indent=2, ensure_ascii=True, allow_nan=False)
    write_atomic(path, text.encode("ascii") + b"\n", mode=mode)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte: a plain write to a nearly full disk may take only some."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class AppendLog:
    """An append-only file of records, for one writer; a context manager. `append` returns once the records are safe.

    `size` is the bytes of its records; what a refused write left beyond them is cut off before the next one. Opening
    cuts off a torn tail of `cut_bytes` bytes, and refuses one that no crash leaves: the file is not ours.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """Args: durable, whether `append` waits for the disk (False for what may be lost, such as samples)."""
        self._path, self._durable = path, durable
        with disk(f"open {path}", "Fix the folder."), contextlib.ExitStack() as undo:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            undo.callback(self.close)
            with open(self._fd, "rb", closefd=False) as file:
                # Of what may be lost only the end can be torn, and the rest may be large.
                self.size = 0 if durable else file.seek(max(0, os.fstat(self._fd).st_size - _TAIL_BYTES))
                self.size += len(file.readline()) if self.size else 0  # from the middle of a line
                self.size += sum(map(len, whole_lines(file)))
            self.cut_bytes = os.fstat(self._fd).st_size - self.size
            if self.cut_bytes:
                tail = os.pread(self._fd, 40, self.size)
                if not tail.startswith((b"{", b"\0")):
                    raise CorruptShardError(f"{path} ends with {tail!r}, which no crash leaves. Move the file away.")
                os.ftruncate(self._fd, self.size)
            if durable:
                # What a killed writer wrote without a flush is read as safe from now on, so it has to be.
                os.fsync(self._fd)
                fsync_dir(path.parent)
            undo.pop_all()

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append all records or none. Raises StorageError if the disk refuses; a later call may succeed."""
        self.append_bytes(b"".join(map(encode_line, records)))

    def append_bytes(self, data: bytes) -> None:
        """`append` for lines that are encoded already, each with its newline."""
        if not data:
            return
        with disk(f"append to {self._path}", "Free space."):
            self.check()
            try:
                write_all(self._fd, data)
                if self._durable:
                    os.fsync(self._fd)
            except BaseException:
                self.truncate(self.size)
                raise
        self.size += len(data)

    def truncate(self, size: int) -> None:
        """Take back everything after the first `size` bytes. If the disk refuses now, the next append does it."""
        self.size = size
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, size)

    def check(self) -> None:
        """Cut what a refused write left. Raises CorruptShardError if somebody removed or shortened the file."""
        found = os.fstat(self._fd)
        if self._durable and found.st_nlink == 0:
            raise CorruptShardError(f"{self._path} was removed while in use. Stop the process and restore the file.")
        if found.st_size < self.size:
            raise CorruptShardError(
                f"{self._path} was shortened from {self.size} to {found.st_size} bytes while in use. Restore the file."
            )
        if found.st_size > self.size:
            os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; what was appended stays. Closing twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
