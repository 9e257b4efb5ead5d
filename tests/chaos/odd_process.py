"""The generating process on an odd machine: `python -m tests.chaos.odd_process HOW ARGUMENTS...`, which go to it."""

from __future__ import annotations

import asyncio
import os
import random
import stat
import sys
import time
from typing import Any

from dfexp.generate import process
from dfexp.generate.process import main
from tests.shards.os_tap import REAL, tapped

SLOW_S = 2.0
"""What one flush of a slow disk takes."""


def on_a_slow_disk(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Flushes of rows, failures and events take seconds; those of a start, of folders and lists, are not waited for."""
    if os.readlink(f"/proc/self/fd/{args[0]}").endswith((".partial", "/failures.jsonl", "/events.jsonl")):
        time.sleep(SLOW_S)
    return REAL[name](*args, **kwargs)


def with_a_jumping_clock() -> None:
    """The clock of the machine is set forward and back by up to a day, at every look."""
    real, draw = time.time, random.Random(1)
    time.time = lambda: real() + draw.uniform(-86_400, 86_400)


def forgetting_a_row() -> None:
    """A defect of ours that is not there, as far as anybody knows: one row is neither sent nor counted as left."""
    real = process.portion

    def portion(*args: Any) -> Any:
        rows, rest = real(*args)
        return rows[:-1], rest

    process.portion = portion


class Renames:
    """Looks at each new name: what it names has to be flushed before, and the folder after it.

    A name that comes without either may be there with nothing behind it, or gone, when the power is. And a flush, which
    may take seconds, must not be waited for by the event loop, where requests are.
    """

    names = ("fsync", "rename", "replace", "link")

    def __init__(self) -> None:
        self.flushed: dict[int, tuple[int, int]] = {}  # by inode: size and time of change when it was flushed
        self.waiting: dict[int, str] = {}  # by inode of the folder: a name that came since it was flushed
        self.faults: list[str] = []
        self.seen: set[str] = set()

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "fsync":
            result, found = REAL[name](*args, **kwargs), os.fstat(args[0])
            if asyncio._get_running_loop() is not None:
                self.faults.append(f"{os.readlink(f'/proc/self/fd/{args[0]}')} was flushed on the event loop")
            if stat.S_ISDIR(found.st_mode):
                self.waiting.pop(found.st_ino, None)
            self.flushed[found.st_ino] = found.st_size, found.st_mtime_ns
            return result
        source, target = map(os.fspath, args[:2])
        found = os.stat(source)
        if self.flushed.get(found.st_ino) != (found.st_size, found.st_mtime_ns):
            self.faults.append(f"{name} of {source}, which was not flushed")
        result = REAL[name](*args, **kwargs)
        self.waiting[os.stat(os.path.dirname(target)).st_ino] = target
        self.seen.add(os.path.basename(target))
        return result

    def told(self) -> int:
        """Print what is wrong, and the names that came; the exit status that fits."""
        faults = [
            *self.faults,
            *(f"the folder of {name} was not flushed after it came" for name in self.waiting.values()),
        ]
        sys.stdout.write("\n".join([*faults, *sorted(self.seen), ""]))
        return 9 if faults else 0


def run(how: str, argv: list[str]) -> int:
    """What the process ends with; 9 if a name came unsafely."""
    if how == "slow":
        with tapped(on_a_slow_disk, ("fsync",)):
            return main(argv)
    if how == "clock":
        with_a_jumping_clock()
        return main(argv)
    if how == "forgetful":
        forgetting_a_row()
        return main(argv)
    renames = Renames()
    with tapped(renames, renames.names):
        return main(argv) or renames.told()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
