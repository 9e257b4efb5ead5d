"""The virtual clock of a folder's simulated servers."""

import time
from contextlib import suppress
from pathlib import Path

from dfexp.errors import StorageError
from dfexp.jsonl import AppendLog
from dfexp.params_simulated import Speed
from dfexp.virtual_time import CLOCK, VirtualTime

TICK_S = 0.05
"""Real seconds between two lines of clock.jsonl, and between two looks at a clock that runs by itself."""
STOOD_S = 0.02
"""A clock that stood for so long has stood, in clock.jsonl too."""


class Clock:
    """Virtual seconds since the first server of this folder was started; `zero_at` is that moment, in epoch seconds.

    At speed "max" it is moved alone; at another speed it also runs by itself from `runs_until_s` to `stand`.
    clock.jsonl ties real time to virtual time; a clock in the same folder goes on from its last line.
    """

    def __init__(self, folder: Path | None, speed: Speed) -> None:
        """Args: folder, of clock.jsonl; None: it is not written."""
        self.speed: Speed = speed
        self._now_s, self._since_s, self._stands, self._log = 0.0, 0.0, True, None
        self.zero_at = self._moved_at = time.time()
        self._written_at = 0.0
        if folder is not None:
            past = VirtualTime.read(folder / CLOCK)
            if past.real_at.size:
                self._now_s, self.zero_at = float(past.virtual_s[-1]), float(past.real_at[0] - past.virtual_s[0])
            self._log = AppendLog(folder / CLOCK, durable=False)
            self._write(self._moved_at)

    @property
    def now_s(self) -> float:
        """Virtual seconds."""
        if self._stands or self.speed == "max":
            return self._now_s
        return self._now_s + (time.monotonic() - self._since_s) * self.speed

    def go_at(self, speed: Speed) -> None:
        """Change the speed from now on."""
        if speed != self.speed:
            self.move(0.0)
            self.speed = speed

    def runs_until_s(self, virtual_s: float) -> float:
        """Monotonic seconds at which a clock that runs from now on will be so late; one that is moved is there."""
        if self.speed == "max":
            return 0.0
        if self._stands:
            self.move(self._now_s)
        return self._since_s + (virtual_s - self._now_s) / self.speed

    def move(self, to_s: float) -> None:
        """It is so late, or later."""
        at = time.time()
        if self._stands and at - self._moved_at > STOOD_S:
            if self._moved_at > self._written_at:
                self._write(self._moved_at)
            self._write(at)
        self._now_s, self._since_s = max(to_s, self.now_s), time.monotonic()
        self._moved_at, self._stands = at, False
        if at - self._written_at > TICK_S:
            self._write(at)

    def stand(self, *, idle: bool) -> None:
        """It stands until it is moved; `idle`: nothing is to be done."""
        if not self._stands:
            if self.speed != "max":
                self._now_s, self._moved_at = self.now_s, time.time()
            self._stands = True
        if idle and self._moved_at > self._written_at:
            self._write(self._moved_at)

    def close(self) -> None:
        """It ends."""
        self.stand(idle=True)
        if self._log is not None:
            self._log.close()

    def _write(self, at: float) -> None:
        self._written_at = at
        with suppress(StorageError):  # a full disk ends no server
            if self._log is not None:
                self._log.append([{"real_at": at, "virtual_s": self._now_s}])
