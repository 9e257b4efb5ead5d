"""What a failed request means for its row, its server and the run. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dfexp.errors import PromptTooLong, RequestError
from dfexp.params import GenerationGroup
from dfexp.records import Failure

_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 30.0


def is_final(error: RequestError, attempt: int, max_attempts: int) -> bool:
    """Whether a row has failed for good. An error that is not the row's doing never is final."""
    if not error.retryable:
        return not error.stops_run
    return error.counts_as_attempt and attempt >= max_attempts


def retry_wait_s(error: RequestError, attempt: int, draw: random.Random) -> float:
    """Seconds before the next try: what the server asked for, else doubling with each attempt, with jitter."""
    if error.retry_after_s is not None:
        return min(error.retry_after_s, 600.0)
    if not error.counts_as_attempt:
        return 0.0
    return min(_MOST_WAIT_S, _FIRST_WAIT_S * float(2 ** (attempt - 1))) * draw.uniform(0.5, 1.5)


def answer_s(generation: GenerationGroup, most_tokens: int | None) -> float:
    """The most that an answer of so many tokens may take, in seconds.

    A request may wait for a slot as long as one answer takes, and then be as slow as the slowest healthy one.
    """
    return 60.0 + 2 * (most_tokens or 32768) / generation.slowest_tok_per_s


@dataclass(slots=True)
class FailureStreak:
    """Holds failures back while nothing succeeds, so that a run in which everything fails leaves no failed rows behind.

    A prompt that is too long is the prompt's own fault: once anything has succeeded it does not lengthen the streak.
    """

    most: int
    held: list[Failure]
    succeeded: bool = False
    length: int = 0

    @classmethod
    def of(cls, most: int) -> FailureStreak:
        """A streak that is broken by a success and too long at `most` failures."""
        return cls(most=most, held=[])

    def success(self) -> list[Failure]:
        """A row succeeded: the failures held so far, which now count."""
        self.succeeded, self.length = True, 0
        return self.flush()

    def failure(self, failure: Failure) -> bool:
        """Hold one more. True when the streak is too long for anything but a fault that all rows share."""
        self.held.append(failure)
        if not (self.succeeded and failure.kind == PromptTooLong.kind):
            self.length += 1
        return self.length >= self.most

    def flush(self) -> list[Failure]:
        """All failures held, for good."""
        held, self.held = self.held, []
        return held
