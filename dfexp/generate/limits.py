"""Which rows one start of a run works on, and when it stops before all are done. Pure: the time is passed in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from dfexp.params import LimitsGroup


def drawn(asked: int, rows: int, seed: int) -> list[int]:
    """So many indices of `asked` prompts, or all if there are fewer, drawn at random: the same for the same seed."""
    return random.Random(seed).sample(range(asked), min(rows, asked))  # noqa: S311 (a sample, no secret)


@dataclass(slots=True, kw_only=True)
class Bounds:
    """What one start may do.

    A limit of rows is one of the rows that are sent, so that nothing is in flight when it is reached: an answer that
    took minutes is never thrown away for it.

    Attributes:
        rows: the indices to do, in order.
        hours: after which no more are sent; None: whenever.
        rest: why these are not all rows that are left; None where they are.
        reached: what ended the start, once it has; None for an end that no limit made.
    """

    rows: Sequence[int]
    hours: float | None = None
    rest: str | None = None
    reached: str | None = None

    @classmethod
    def of(cls, limits: LimitsGroup, pending: Sequence[int], sample: Sequence[int] | None = None) -> Self:
        """Args: pending, the rows that are left, in order; sample, those that alone are to be done, None for all."""
        rows, rest = pending, None
        if sample is not None:
            todo = set(sample).intersection(pending)
            rows, rest = [index for index in sample if index in todo], f"the sample of {len(sample):,} rows is done"
        if limits.rows is not None and limits.rows < len(rows):
            rows, rest = rows[: limits.rows], f"limits.rows = {limits.rows:,} is reached"
        return cls(rows=rows, hours=limits.hours, rest=rest if len(rows) < len(pending) else None)

    def time_is_up(self, elapsed_s: float) -> str | None:
        """What is reached so many seconds after the start; None: nothing."""
        if self.reached is None and self.hours is not None and elapsed_s >= self.hours * 3600:
            self.reached = f"limits.hours = {self.hours:g} is reached"
            return self.reached
        return None

    def end(self) -> tuple[str, str | None]:
        """The state of a run whose `rows` are all settled, and why."""
        self.reached = self.reached or self.rest
        return ("stopped" if self.reached else "ended"), self.reached
