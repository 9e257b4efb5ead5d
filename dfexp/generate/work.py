"""The rows still to do: fresh ones in order, and those that wait for another try. Pure: the time is passed in."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row on its way to a server. `attempt` counts from 1; `avoid` names the server where the last try failed."""

    index: int
    attempt: int = 1
    avoid: str | None = None


class WorkQueue:
    """Hands out each row once, and again when it is put back. Memory: 8 bytes a row, more only for rows put back."""

    def __init__(self, indices: Iterable[int], count: int) -> None:
        """Args: indices of the rows to do, in order; count, how many there are."""
        self._fresh = iter(indices)
        self._fresh_left = count
        self._waiting: list[tuple[float, int, Job]] = []
        self._put_back = 0

    def __len__(self) -> int:
        """Rows that no server has now."""
        return self._fresh_left + len(self._waiting)

    def take(self, server: str, now: float, *, alone: bool = False) -> Job | None:
        """The next row for `server`: one whose waiting time is over before a fresh one; None if there is none now.

        A row is not given back to the server where it just failed, unless that one is `alone`.
        """
        due = self._take_due(server, now, alone)
        if due is not None or self._fresh_left == 0:
            return due
        self._fresh_left -= 1
        return Job(index=next(self._fresh))

    def put_back(self, job: Job, *, not_before: float) -> None:
        """Give a row back, to be taken again from the time `not_before` on."""
        heapq.heappush(self._waiting, (not_before, self._put_back, job))
        self._put_back += 1

    def _take_due(self, server: str, now: float, alone: bool) -> Job | None:
        passed_over, found = [], None
        while self._waiting and self._waiting[0][0] <= now:
            entry = heapq.heappop(self._waiting)
            if alone or entry[2].avoid != server:
                found = entry[2]
                break
            passed_over.append(entry)
        for entry in passed_over:
            heapq.heappush(self._waiting, entry)
        return found
