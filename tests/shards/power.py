"""A disk with a volatile cache: record what a writer does, then say what may be left when the power goes."""

import fcntl
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.shards.os_tap import REAL

Names = dict[str, int]
Contents = dict[str, bytes]
HOW = ("gone", "there", "zeroed", "half")


@dataclass
class File:
    """What one inode holds: as the writer sees it, and as it was when it was last flushed."""

    live: bytearray = field(default_factory=bytearray)
    safe: bytes = b""

    def after_loss(self, how: str) -> bytes:
        """Bytes not flushed are gone, all there, read as zeros, or the first half of them is there."""
        if how == "gone":
            return self.safe
        if how == "zeroed":
            return self.safe + bytes(len(self.live) - len(self.safe))
        if how == "half":
            return bytes(self.live[: (len(self.safe) + len(self.live)) // 2])
        return bytes(self.live)


class Recorder:
    """A handler for `tapped`: makes every call, and logs those that change one folder, as steps on inodes."""

    names = ("open", "close", "write", "fsync", "link", "unlink", "rename", "replace")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.log: list[tuple[Any, ...]] = []
        self._ids = itertools.count(1)
        self._names: Names = {}
        self._fds: dict[int, int] = {}  # 0 is the folder itself

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._position(args[0]) if name == "write" else 0
        result = REAL[name](*args, **kwargs)
        getattr(self, f"_{name}")(*args, result=result, before=before)
        return result

    @staticmethod
    def _position(fd: int) -> int:
        appends = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        return os.fstat(fd).st_size if appends else os.lseek(fd, 0, os.SEEK_CUR)

    def _open(self, path: Path, *_: Any, result: int, **__: Any) -> None:
        if path == self._folder:
            self._fds[result] = 0
        elif path.parent == self._folder:
            if path.name not in self._names:
                self._names[path.name] = next(self._ids)
                self.log.append(("create", path.name, self._names[path.name]))
            self._fds[result] = self._names[path.name]

    def _close(self, fd: int, **_: Any) -> None:
        self._fds.pop(fd, None)

    def _write(self, fd: int, data: bytes, *, result: int, before: int) -> None:
        if fd in self._fds:
            self.log.append(("write", self._fds[fd], before, bytes(data)[:result]))

    def _fsync(self, fd: int, **_: Any) -> None:
        if fd in self._fds:
            self.log.append(("fsync", self._fds[fd]))

    def _link(self, path: Path, final: Path, **_: Any) -> None:
        self._names[final.name] = self._names[path.name]
        self.log.append(("link", path.name, final.name))

    def _unlink(self, path: Path, **_: Any) -> None:
        del self._names[path.name]
        self.log.append(("unlink", path.name))

    def _replace(self, path: Path, final: Path, **_: Any) -> None:
        self._names[final.name] = self._names.pop(path.name)
        self.log.append(("replace", path.name, final.name))

    _rename = _replace

    def crash_states(self, length: int) -> Iterator[Contents]:
        """What the folder may hold if the power went after the first `length` steps.

        Any of the changes of names since the folder was last flushed may be lost, in whatever order they were made.
        """
        files, names, unsafe = replay(self.log[:length])
        seen: list[Contents] = []
        for survived, how in itertools.product(itertools.product([True, False], repeat=len(unsafe)), HOW):
            kept = dict(names)
            for change in itertools.compress(unsafe, survived):
                kept |= change
            contents = {
                name: files[number].after_loss(how) for name, number in kept.items() if number and name != ".lock"
            }
            if contents not in seen:
                seen.append(contents)
                yield contents


def replay(log: list[tuple[Any, ...]]) -> tuple[dict[int, File], Names, list[Names]]:
    """The files after the steps, the names that are safe, and the changes of names since (inode 0: removed)."""
    files: dict[int, File] = {}
    now: Names = {}
    safe: Names = {}
    unsafe: list[Names] = []
    for step, *what in log:
        change: Names = {}
        if step == "create":
            files[what[1]] = File()
            change = {what[0]: what[1]}
        elif step == "link":
            change = {what[1]: now[what[0]]}
        elif step == "replace":
            change = {what[0]: 0, what[1]: now[what[0]]}
        elif step == "unlink":
            change = {what[0]: 0}
        elif step == "write":
            number, at, data = what
            files[number].live[at : at + len(data)] = data
        elif what[0]:
            files[what[0]].safe = bytes(files[what[0]].live)
        else:
            safe, unsafe = dict(now), []
        now |= change
        unsafe += [change] if change else []
    return files, safe, unsafe


def write_to(folder: Path, contents: Contents) -> None:
    """Make a folder hold that."""
    folder.mkdir()
    for name, data in contents.items():
        (folder / name).write_bytes(data)
