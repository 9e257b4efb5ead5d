"""Counts and rates of a run, as its status file shows them. Pure: the time is passed in."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

WINDOW_S = 60.0
"""Client rates are means over the last so many seconds, or since the start when that is less."""


class Recent:
    """Rows and tokens of the last seconds, summed by tenths of a second: memory does not grow with the rate."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, int, int]] = deque()

    def add(self, now: float, tokens: int) -> None:
        """Count one row of so many tokens."""
        slot, rows, so_far = int(now * 10), 0, 0
        if self._slots and self._slots[-1][0] == slot:
            _, rows, so_far = self._slots.pop()
        self._slots.append((slot, rows + 1, so_far + tokens))

    def since(self, then: float) -> tuple[int, int]:
        """Rows and tokens since `then`, which is later at every call."""
        while self._slots and self._slots[0][0] < int(then * 10):
            self._slots.popleft()
        return sum(slot[1] for slot in self._slots), sum(slot[2] for slot in self._slots)


class Progress:
    """What this process did. Rates count rows and tokens at the moment a completion arrived whole."""

    def __init__(self, started: float) -> None:
        """Args: started, monotonic seconds."""
        self._started = started
        self._recent = Recent()
        self._tokens = 0
        self._counted = 0
        self.rows = 0
        self.failures = 0
        self.flags: Counter[str] = Counter()

    def completed(self, now: float, completion_tokens: int | None, flags: tuple[str, ...]) -> None:
        """Count one completion."""
        self.rows += 1
        self.flags.update(flags)
        if completion_tokens is not None:
            self._tokens += completion_tokens
            self._counted += 1
        self._recent.add(now, completion_tokens or 0)

    def failed(self) -> None:
        """Count one row that will not succeed."""
        self.failures += 1

    def rates(self, now: float, *, left: int) -> dict[str, Any]:
        """Client rates over the window, mean length, and the time that `left` rows need at the rate since the start."""
        rows, tokens = self._recent.since(now - WINDOW_S)
        since_start_s = max(now - self._started, 1e-9)
        window_s = min(WINDOW_S, since_start_s)
        settled = self.rows + self.failures
        return {
            "rows_per_s": rows / window_s,
            "tok_per_s": tokens / window_s,
            "window_s": window_s,
            "mean_completion_tokens": self._tokens / self._counted if self._counted else None,
            "eta_s": left * since_start_s / settled if settled and left else (0.0 if not left else None),
        }
