"""What a run did and how it goes on, as its status file shows it. Pure: times are passed in, by the run's clock."""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from dfexp.diagnose import STALLED_S
from dfexp.estimate import Estimate, InFlight, away, flights_rate, lengths_of, server_rate, time_left
from dfexp.records import Answer, EngineSample
from dfexp.sampler import KEPT_S

WINDOW_S = 60.0
"""Rates are means over the last so many seconds, or since the start when that is less."""
_LEAST = 4  # samples that make a rate
_SAMPLES = 12  # as many lie in a window, so that it is longer where the clock is fast and samples are far apart
_STILL_S = 15.0
_POINTS = 120


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
        """Rows and tokens since `then`, which may be at most `KEPT_S` before the last row."""
        while self._slots and self._slots[0][0] < self._slots[-1][0] - KEPT_S * 10:
            self._slots.popleft()
        kept = list(takewhile(lambda slot: slot[0] >= int(then * 10), reversed(self._slots)))
        return sum(slot[1] for slot in kept), sum(slot[2] for slot in kept)


class Traffic:
    """What goes to one server and comes back."""

    def __init__(self) -> None:
        self.flight, self.recent = InFlight(), Recent()
        self._sent: dict[int, float] = {}
        self._judged: deque[tuple[float, bool]] = deque(maxlen=2000)
        self._took_s = [0.0, 0.0]  # by how many answers, and how long

    def sent(self, index: int, now: float) -> None:
        """A row has gone to the server."""
        self._sent[index] = now
        self.flight.sent(index, now)

    def left(self, index: int, now: float, answer: Answer | None = None) -> None:
        """It is there no more; the first call counts, and only the one with its answer says what it gave."""
        if (sent := self._sent.pop(index, None)) is None:
            return
        tokens = None if answer is None else answer.completion_tokens
        self.flight.ended(index, now, tokens)
        if answer is not None:
            self.recent.add(now, tokens or 0)
            self._took_s = [self._took_s[0] + 1, self._took_s[1] + now - sent]

    def judged(self, now: float, *, is_garbage: bool) -> None:
        """An answer was looked at."""
        self._judged.append((now, is_garbage))

    def watched(self, now: float) -> dict[str, Any]:
        """What `diagnose.Watched` has of this."""
        judged = [is_garbage for at, is_garbage in self._judged if at >= now - KEPT_S]
        answers, seconds = self._took_s
        return {
            "long_in_flight": sum(now - sent >= STALLED_S for sent in self._sent.values()),
            "request_s": seconds / answers if answers else None,
            "finished": round(answers),
            "answers": len(judged),
            "garbage": sum(judged),
        }


class History:
    """A rate since the start in at most so many points: when they are full, every other one goes."""

    def __init__(self) -> None:
        self.step_s, self.points = 1.0, list[float]()

    def add(self, since_start_s: float, value: float) -> None:
        """The rate at a time, which is later at every call."""
        while since_start_s >= self.step_s * (len(self.points) + 1):
            self.points.append(round(value, 1))
            if len(self.points) == _POINTS:
                self.points, self.step_s = self.points[1::2], self.step_s * 2


class Progress:
    """What this process did. An answer counts at the moment that it arrived whole."""

    def __init__(self, started: float, *, lengths: Mapping[int, int] | None = None) -> None:
        """Args: lengths, how many earlier answers had about so many tokens, as `lengths` had them."""
        self._started, self._recent = started, Recent()
        self.rows = self.failures = 0
        self.flags: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter(lengths or {})
        self.servers: defaultdict[str, Traffic] = defaultdict(Traffic)
        self.history = History()

    def answered(self, server: str, index: int, now: float, answer: Answer, flags: Sequence[str] = ()) -> None:
        """Count one completion. Args: flags, of its row."""
        self.rows += 1
        self.flags.update(flags)
        self.servers[server].left(index, now, answer)
        self._recent.add(now, answer.completion_tokens or 0)
        if answer.completion_tokens is not None:
            self.lengths[_about(answer.completion_tokens)] += 1

    def estimates(
        self, now: float, *, left: int, later: int = 0, limit: float | None,
        samples: Mapping[str, Sequence[EngineSample]], gone: Collection[str] = (), alone_tok_per_s: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Rates over a window that ends now, the mean length, and the seconds that are left, each with 95 % bounds.

        `eta_*` is of the rows of this start, `whole_eta_*` of all.

        Args: left, rows of this start that were not sent; later, rows that are not of this start; limit, tokens that no
        answer can exceed; samples, by server; gone, servers that surely make nothing now; alone_tok_per_s, speed of a
        request that has a server for itself.
        """
        since_s = max(now - self._started, 1e-9)
        window_s = min(since_s, max(WINDOW_S, *map(_spanned, samples.values()), 0.0))
        then = now - window_s
        rows, tokens = self._recent.since(then)
        # Of a server that stands still nobody knows how far its requests are: they would seem to go on.
        flights = [traffic.flight for name, traffic in self.servers.items() if not _stands(samples.get(name, ()))]
        ages = [age for flight in flights for age in flight.ages(now)]
        lengths, counted = lengths_of(self.lengths, ages, limit=limit), rate_of(samples, then, now, gone)
        mean = lengths and lengths.mean
        rate = counted if counted and counted.value and left else flights_rate(flights)
        etas = dict[str, float | None]()
        for name, rows_left in (("eta", left), ("whole_eta", left + later)):
            eta = time_left(lengths, rows_left=rows_left, ages=ages, rate=rate, alone_tok_per_s=alone_tok_per_s)
            is_guess = eta and rows_left and eta.error > eta.value / 2  # after a handful of answers
            ends = (eta.value, *eta.interval) if eta and not is_guess else (None, None, None)
            etas |= dict(zip((f"{name}_s", f"{name}_low_s", f"{name}_high_s"), ends, strict=True))
        self.history.add(since_s, counted.value if counted else tokens / window_s)
        return {
            "elapsed_s": since_s,
            "window_s": window_s,
            "rows_per_s": rows / window_s,
            "client_tok_per_s": tokens / window_s,
            "server_tok_per_s": counted and counted.value,
            "mean_completion_tokens": mean and {"value": mean.value, "low": mean.interval[0], "high": mean.interval[1]},
            **etas,
            "history": {"step_s": self.history.step_s, "tok_per_s": [*self.history.points]},
            "rates": {
                name: {
                    "server_tok_per_s": (one := rate_of({name: samples.get(name, ())}, then, now, gone)) and one.value,
                    "client_tok_per_s": traffic.recent.since(then)[1] / window_s,
                }
                for name, traffic in self.servers.items()
            },
            "lengths": {str(tokens): number for tokens, number in self.lengths.items()},
        }


def rate_of(
    samples: Mapping[str, Sequence[EngineSample]], start: float, end: float, gone: Collection[str]
) -> Estimate | None:
    """Tokens/s that servers decoded, by their counters. None: none has any, there are few samples yet, or one has been
    silent for long and is not `gone`.
    """
    enough = {name: one for name, one in samples.items() if len(one) >= _LEAST}
    pairs = {n: ([each.at for each in one], [each.realtime_decode_tokens_total for each in one])
             for n, one in enough.items()}  # fmt: skip
    return server_rate((away(pair, end) if name in gone else pair for name, pair in pairs.items()), start, end)


def _stands(samples: Sequence[EngineSample]) -> bool:
    """Whether a server's counter has not moved of late."""
    last = samples[-1].realtime_decode_tokens_total if samples else None
    still = list(takewhile(lambda each: each.realtime_decode_tokens_total == last, reversed(samples)))
    return last is not None and still[0].at - still[-1].at >= _STILL_S


def _spanned(samples: Sequence[EngineSample]) -> float:
    """Seconds of the last so many samples."""
    return samples[-1].at - samples[-_SAMPLES].at if len(samples) >= _SAMPLES else 0.0


def _about(tokens: int) -> int:
    """A length to within 1 %, so that all lengths that there are fit in a status file."""
    step = 1 << max(0, tokens.bit_length() - 7)
    return tokens // step * step + step // 2
