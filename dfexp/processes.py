"""Who is a process: a pid is trusted only together with its start time, since pids are used again."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this machine and this boot. `started` is opaque: equal for the same process, else different."""

    pid: int
    started: str

    @classmethod
    def current(cls) -> Self:
        """The process that asks."""
        found = cls.of(os.getpid())
        assert found is not None, "the process that asks is alive"
        return found

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The living process with this pid; None when there is none, or only a zombie that nobody has reaped."""
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return cls(pid, _start_stamp(process))
        except (psutil.Error, OSError, ValueError):  # ValueError: a pid below 0, as a damaged file may have it
            return None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises ValueError."""
        pid, _, started = text.partition("@")
        return cls(int(pid), started)

    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return type(self).of(self.pid) == self

    def __str__(self) -> str:
        return f"{self.pid}@{self.started}"


def _start_stamp(process: psutil.Process) -> str:
    """Start time that a change of the wall clock does not move: kernel ticks since boot where the kernel tells."""
    if sys.platform == "linux":
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        return f"{boot}-{fields[19]}"
    return f"{process.create_time():.2f}"
