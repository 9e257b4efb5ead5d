"""What a failed request means for its row, its server and the run. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dfexp.errors import PromptTooLong, RateLimited, Refused, RequestError
from dfexp.params import GenerationGroup, Policy, SpoiledGroup
from dfexp.records import GARBAGE, Failure

_FIRST_WAIT_S, _MOST_WAIT_S, _LEAST_PAUSE_S, _MOST_ASKED_S = 0.5, 30.0, 0.05, 600.0
_UNKNOWN_TOK_PER_S, _SLOWER = 2.0, 4.0  # until answers tell how fast a server is; and how much slower one may be
_MANY, _LEAST_REST_S, _MOST_REST_S = 8, 0.5, 300.0
_RESEED = 21_000_001  # far more than a run has rows, so that no two rows and attempts share a seed


def is_final(error: RequestError, attempt: int, max_attempts: int, *, may_move: bool = False) -> bool:
    """Whether a row has failed for good. An error that is not the row's doing never is final.

    Args: may_move, whether a refusal leaves another server to ask.
    """
    if not error.retryable and not error.stops_run and not (may_move and isinstance(error, Refused)):
        return True
    return error.counts_as_attempt and attempt >= max_attempts


def retry_wait_s(error: RequestError, attempt: int, draw: random.Random, *, elsewhere: bool = False) -> float:
    """Seconds before a row's next try: what the server asked for, else doubling with each attempt, with jitter.

    None where the row is not to blame, since then its server is left alone; nor the first time where it can go
    `elsewhere`.
    """
    if not error.counts_as_attempt or (elsewhere and attempt == 1):
        return 0.0
    if error.retry_after_s is not None:
        return min(error.retry_after_s, _MOST_ASKED_S)
    return min(_MOST_WAIT_S, _FIRST_WAIT_S * float(2 ** (attempt - 1))) * draw.uniform(0.5, 1.5)


def look_again_s(tries: int, draw: random.Random, *, owned: bool) -> float:
    """Seconds until the next look at a server that is away, after so many; one that is `owned` is started each time."""
    return min(60.0 if owned else 16.0, 0.5 * 2.0 ** min(tries, 10)) * draw.uniform(0.75, 1.25)


def is_other_model(asked: str, answered: str | None) -> bool:
    """Whether an answer comes from another model, by its name. Servers shorten a path, or tell their file's."""
    if answered is None or answered == asked:
        return False
    one, other = (name.rpartition("/")[2].casefold().removesuffix(".gguf") for name in (asked, answered))
    return one != other


def pause_s(error: RateLimited, draw: random.Random) -> float:
    """Seconds for which a server that turns requests away gets none: what it asked for, else about one.

    Never none at all: a server that says 0 with every refusal would be asked thousands of times a second.
    """
    asked = draw.uniform(0.5, 1.5) if error.retry_after_s is None else error.retry_after_s
    return min(max(asked, _LEAST_PAUSE_S), _MOST_ASKED_S)


def answer_s(generation: GenerationGroup, most_tokens: int | None, measured_tok_per_s: float | None = None) -> float:
    """The most that an answer of so many tokens may take, in seconds.

    Of a speed that was asked for: a request may wait for a slot as long as one answer takes, and then be as slow as the
    slowest healthy one. A measured one has the waiting in it already; an answer may be four times as slow.
    """
    tokens, asked = most_tokens or 32768, generation.slowest_tok_per_s
    if asked is None and measured_tok_per_s is not None:
        return 60.0 + _SLOWER * tokens / measured_tok_per_s
    return 60.0 + 2 * tokens / (asked or _UNKNOWN_TOK_PER_S)


def drain_s(generation: GenerationGroup, context: int | None, tok_per_s: float | None, in_flight: int) -> float:
    """The most that it may take until all requests in flight to one server have ended, in seconds.

    Args: context, the most tokens of a request; tok_per_s, of the whole server, as far as that was measured.
    """
    most = context if generation.max_tokens == "fit" else generation.max_tokens
    return answer_s(generation, most, tok_per_s / in_flight if tok_per_s and in_flight else None)


def policy_of(spoiled: SpoiledGroup, flags: Sequence[str]) -> tuple[Policy, str]:
    """What becomes of an answer with such flags, and the one that decides it: fail before retry before keep."""
    asked = [(getattr(spoiled, flag, "keep"), flag) for flag in flags]
    for policy in ("fail", "retry"):
        if found := [flag for each, flag in asked if each == policy]:
            return policy, found[0]
    return "keep", ""


def end_of(state: str, reason: str | None, *, done: int, failed: int, asked: int) -> tuple[str, str | None]:
    """The last state of a run, and why it is that: it has ended when, and only when, every row is accounted for."""
    if state == "stopped" and done + failed == asked:  # a stop that came while the last rows were on their way
        return "ended", None
    if state == "ended" and done + failed != asked:
        why = f"{tally(done, failed, asked)}, though nothing is left to send: a defect of dfexp"
        return "failed", f"{why}. What is counted is safe; resuming the run makes the other rows."
    return state, reason


def tally(done: int, failed: int, asked: int) -> str:
    """The rows of a run in words, so that the sum can be checked."""
    return f"{done:,} succeeded + {failed:,} failed = {done + failed:,} of {asked:,} asked"


def seed_of(seed: int, index: int, attempt: int) -> int:
    """The seed of a row; `attempt` above 1 where the answer itself was the reason, which must not come again."""
    return (seed + index + (attempt - 1) * _RESEED) % 2**31


@dataclass(slots=True)
class Pace:
    """How slow answers of one server have been at the most, in tokens/s of one request, over a number of them together.

    The slowest counts: an answer that began while the server was full must not be judged by those of an empty one.
    """

    slowest: float | None = None
    _answers: int = 0
    _tokens: int = 0
    _seconds: float = 0.0

    def answered(self, tokens: int | None, latency_s: float, together: int = 32) -> bool:
        """Count an answer. True when the slowest is another one now."""
        if not tokens:
            return False
        self._answers, self._tokens, self._seconds = self._answers + 1, self._tokens + tokens, self._seconds + latency_s
        if self._answers < together:
            return False
        rate = self._tokens / max(self._seconds, 1e-9)
        self._answers, self._tokens, self._seconds = 0, 0, 0.0
        is_slower = self.slowest is None or rate < self.slowest
        self.slowest = rate if is_slower else self.slowest
        return is_slower


@dataclass(slots=True)
class Rejections:
    """Rows in a row, with no answer between them, that one server would not take: refused, or denied access.

    `denial`: why the server seems to take no row at all, in its words. `words`: its last ones, once it rests for them.
    """

    in_a_row: int = 0
    denial: str | None = None
    words: str = ""
    _rest_s: float = _LEAST_REST_S / 2

    @property
    def many(self) -> bool:
        """Whether they may be the server's own fault."""
        return self.in_a_row >= _MANY

    def add(self, words: str, *, is_denied: bool) -> None:
        """Count one."""
        self.in_a_row += 1
        self.denial = words if is_denied and self.many else self.denial

    def rest_s(self) -> float:
        """Seconds for which the server gets no row, twice as long each time."""
        self._rest_s = min(2 * self._rest_s, _MOST_REST_S)
        return self._rest_s


@dataclass(slots=True)
class SpoiledStreak:
    """Answers without content that came one after the other.

    One broken server answers faster than those that work, so the streak is too long only when all servers are in it.
    """

    most: int
    length: int = 0
    servers: set[str] = field(default_factory=set)

    def answered(self, server: str, flags: Collection[str], serving: Collection[str]) -> bool:
        """Count an answer. True when all that `serving` servers gave for too long was empty or garbage."""
        if not {"empty", GARBAGE} & set(flags):
            self.length = 0
            self.servers.clear()
            return False
        self.length += 1
        self.servers.add(server)
        return self.length >= self.most and self.servers >= set(serving)


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
