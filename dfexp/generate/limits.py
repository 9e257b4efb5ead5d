"""Which rows one start of a run does. Pure."""

import random
from collections.abc import Sequence

from dfexp.params import LimitsGroup


def drawn(asked: int, rows: int, seed: int) -> list[int]:
    """So many indices of `asked` prompts, or all if there are fewer, drawn at random: the same for the same seed."""
    return random.Random(seed).sample(range(asked), min(rows, asked))  # noqa: S311 (a sample, no secret)


def portion(
    limits: LimitsGroup, pending: Sequence[int], sample: Sequence[int] | None
) -> tuple[Sequence[int], str | None]:
    """The rows to do, in order, and why these are not all that are left; None where they are.

    A limit of rows is one of the rows that are sent, so that nothing is in flight when it is reached: no answer that
    took minutes is thrown away for it.

    Args: pending, the rows that are left, in order; sample, those that alone are to be done; None: all.
    """
    rows, why = pending, None
    if sample is not None:
        left = set(sample).intersection(pending)
        rows, why = [index for index in sample if index in left], f"the sample of {len(sample):,} rows is done"
    if limits.rows is not None and limits.rows < len(rows):
        rows, why = rows[: limits.rows], f"limits.rows = {limits.rows:,} is reached"
    return rows, why if len(rows) < len(pending) else None
