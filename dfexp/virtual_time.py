"""The virtual clock of simulated servers, as clock.jsonl in their fleet's folder tells it.

Each line ties a real time to a virtual one: {"real_at": seconds since the Unix epoch, "virtual_s": seconds since the
first server was started}. Between two lines time is linear, before the first and after the last it stands still.
"""

import contextlib
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dfexp.jsonl import decode_line, read_log

CLOCK = "clock.jsonl"
_LOOK_S, _LINES_S = 0.02, 0.05  # between two looks at the file; between two lines of a clock that moves, at the most


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualTime:
    """The lines of one file, in order; none while the clock has not begun."""

    real_at: NDArray[np.float64]
    virtual_s: NDArray[np.float64]

    @classmethod
    def read(cls, path: Path) -> Self:
        """All lines of a file that may be missing or growing. Raises CorruptShardError: a line that is no record."""
        pairs = np.array([(line["real_at"], line["virtual_s"]) for line in read_log(path)], dtype=float).reshape(-1, 2)
        return cls(real_at=pairs[:, 0], virtual_s=pairs[:, 1])

    def of(self, real_at: NDArray[np.float64]) -> NDArray[np.float64]:
        """Virtual seconds at real times (epoch seconds, any shape). Raises ValueError while there are no lines."""
        return np.asarray(np.interp(real_at, self.real_at, self.virtual_s))

    def of_stamp(self, stamped_at: float) -> float:
        """Virtual seconds at a time in a simulated server's log, which counts on from the real time of the first line.

        Raises IndexError while there are no lines.
        """
        return float(stamped_at - self.real_at[0] + self.virtual_s[0])


class LiveClock:
    """A virtual clock while a host moves it.

    Between two looks at the file it goes on as fast as between the last two lines, and after `_LINES_S` not at all.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._looked, self._now_s, self._lines = path, -inf, 0.0, [(0.0, 0.0)]

    def __call__(self) -> float:
        """Virtual seconds now; never fewer than before."""
        if abs((at := time.time()) - self._looked) > _LOOK_S:
            self._looked = at
            with contextlib.suppress(OSError, ValueError, KeyError), self._path.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 512))
                lines = [decode_line(line) for line in file.read().split(b"\n")[-3:-1] if line.startswith(b"{")]
                self._lines = [(line["real_at"], line["virtual_s"]) for line in lines] or self._lines
        (before_at, before_s), (real_at, virtual_s) = self._lines[0], self._lines[-1]
        speed = (virtual_s - before_s) / max(real_at - before_at, 1e-3)
        self._now_s = max(self._now_s, virtual_s + speed * min(max(0.0, at - real_at), _LINES_S))
        return self._now_s
