"""How fast a run goes, how long its answers are, and when it ends, while many requests are still in flight. Pure.

Answers that have finished early are short: their mean is too low, a rate made of them is too low, and a time left made
of either is wrong. Here what is in flight counts too. Times are seconds of any one clock, tokens those of answers.

A running process keeps an `InFlight` for each server and one `Counter` of finished lengths; both cost constant time for
an answer. A report, which has all rows, uses `reconcile`, and `lengths_of` with its counts of lengths.

    flight.sent(key, now)    flight.sampled(now, num_queue_reqs)    flight.ended(key, now, tokens); counts[tokens] += 1

    ages = [age for flight in flights for age in flight.ages(now)]
    lengths = lengths_of(counts, ages, limit=context)
    rate = not_sent and server_rate(samples, now - 60, now) or flights_rate(flights)
    time_left(lengths, rows_left=not_sent, ages=ages, rate=rate)

At the end of a run, with nothing left to send, a window's rate is that of more requests than there are now.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dfexp.records import EngineSample

Array = NDArray[np.float64]
Samples = tuple[Sequence[float], Sequence[float | None]]
"""Of one server: times in seconds, and its counter of decoded tokens at each, None where it did not say."""
Rows = tuple[ArrayLike, ArrayLike, ArrayLike]
"""Of each answer: when it was sent and when it ended, in seconds, and its tokens."""
_PIECES = 6  # of a window, whose spread gives the error of its rate
_POINTS = 128  # of a curve that is not made of steps
_RECENT = 0.25  # of the answers that are over: the last so many tell how fast those still open end
_GUESSED = 1 / 3  # the standard error of what is extrapolated, as a part of it
_TOLD = 0.1  # where fewer are old enough to tell, of those that would be if none were in flight, lengths are not known
_ALONE = 1.5  # a request that has a server for itself is so many times as fast, where nobody measured it
_SPEED = 0.03  # the standard error of a request's speed, as a part of it
_GAIN, _KEPT = 0.25, 63 / 64  # by how much one answer corrects a server's steps; what its speed is a mean of


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number that is not negative, and its standard error, both in the unit of whoever gives it."""

    value: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """Lowest and highest, at 95 %."""
        return max(0.0, self.value - 1.96 * self.error), self.value + 1.96 * self.error


def server_rate(servers: Iterable[Samples], start_s: float, end_s: float) -> Estimate | None:
    """Tokens/s that servers decoded together from `start_s` to `end_s`, by their counters.

    None: no server has two, or one has been silent for the greater part of the window. Nobody knows then what it does:
    a page may be late while requests are answered. Of one that is surely away the caller adds a count of 0 at the end
    of the window (`away`). Silence that is shorter, and follows on what is known, has the same rate.

    Servers are sampled at different instants: each counter is interpolated, also over looks that failed, and goes on
    for two intervals beyond its samples. One that falls belongs to a server that began again at 0. The error is that of
    the mean of the window's parts. SGLang's counter leaves out the first token of each answer.
    """
    edges, made = np.linspace(start_s, end_s, _PIECES + 1), []
    for times, values in servers:
        pairs = np.array([(at_s, value) for at_s, value in zip(times, values, strict=True) if value is not None])
        if len(pairs) > 1 and end_s > start_s:
            at, steps = np.maximum.accumulate(pairs[:, 0]), np.diff(pairs[:, 1])
            total = np.append(0.0, np.cumsum(np.where(steps < 0, pairs[1:, 1], steps)))
            beyond_s = 2 * float(np.median(np.diff(at)))
            more = beyond_s * total[-1] / max(at[-1] - at[0], 1e-9)
            known = [-min(more, pairs[0, 1]), *total, total[-1] + more]
            at = np.array([at[0] - beyond_s, *at, at[-1] + beyond_s])
            if (silent_s := end_s - at[-1]) > (known_s := at[-1] - max(start_s, at[0])):
                return None
            if silent_s > 0:
                more = (known[-1] - np.interp(start_s, at, known)) * silent_s / known_s
                at, known = np.append(at, end_s), [*known, known[-1] + more]
            made.append(np.diff(np.interp(edges, at, known)))
    rates = np.sum(made, axis=0) * _PIECES / (end_s - start_s) if made else np.zeros(0)
    return Estimate(value=float(rates.mean()), error=float(rates.std()) / sqrt(_PIECES - 1)) if made else None


def away(server: Samples, at_s: float) -> Samples:
    """A server's samples with what `server_rate` takes for its being away since the last one, until `at_s` at least."""
    return [*server[0], at_s], [*server[1], 0.0]


def client_rate(rows: Rows, start_s: float, end_s: float) -> float:
    """Tokens/s of answers that arrived after `start_s` and by `end_s`, all their tokens at that moment.

    Below the servers' rate while what is in flight grows, as in the first minutes, and above it at the end.
    """
    _, ended, tokens = (np.asarray(each, float) for each in rows)
    return float(tokens[(ended > start_s) & (ended <= end_s)].sum()) / max(end_s - start_s, 1e-9)


def tokens_in_flight(rows: Rows, at_s: float) -> float:
    """Tokens that answers in flight at `at_s` had by then: each grows evenly from when it was sent until it ended."""
    sent, ended, tokens = (np.asarray(each, float) for each in rows)
    is_open = (sent <= at_s) & (at_s < ended)
    return float((tokens[is_open] * (at_s - sent[is_open]) / (ended - sent)[is_open]).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """Servers' tokens are those of answers that finished plus what has come to be in flight; all in tokens/s.

    Attributes:
        server: decoded by the servers' counters, with the tokens of answers that those leave out.
        client: of answers that finished.
        in_flight: growth of the tokens in flight; negative while a run ends.
        unexplained: server - client - in_flight, with what servers decoded for requests that gave no row.

    """

    server: float
    client: float
    in_flight: float
    unexplained: float


def reconcile(
    servers: Iterable[Samples], rows: Rows, start_s: float, end_s: float, *, uncounted: int
) -> Reconciled | None:
    """The rates of one window, and what lies between them. None: servers have no counters, or were silent.

    Args: rows, all that were in flight in the window (of a run that goes on it ends before anything that is still open
    was sent); uncounted, tokens of each answer that the counters leave out (1: SGLang, whose prefill gives the first).
    """
    decoded, sent = server_rate(servers, start_s, end_s), np.asarray(rows[0], float)
    if decoded is None:
        return None
    server = decoded.value + uncounted * int(((sent > start_s) & (sent <= end_s)).sum()) / (end_s - start_s)
    client = client_rate(rows, start_s, end_s)
    grown = (tokens_in_flight(rows, end_s) - tokens_in_flight(rows, start_s)) / (end_s - start_s)
    return Reconciled(server=server, client=client, in_flight=grown, unexplained=server - client - grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long answers are, in tokens: `alive[i]` of them are longer than any x from `edges[i]` to `edges[i + 1]`.

    Attributes:
        left: for each edge, the area under these steps from there on, in tokens.
        mean: of one answer, those in flight included.

    """

    edges: Array
    alive: Array
    left: Array
    mean: Estimate

    def longer(self, x: Array) -> Array:
        """The share of answers that are longer than each x."""
        return np.append(self.alive, 0.0)[np.searchsorted(self.edges, x, "right") - 1]

    def residual(self, ages: Array) -> Array:
        """Tokens that answers which have so many by now can be expected to go on for."""
        share = self.longer(ages)
        return np.interp(ages, self.edges, self.left) / np.where(share > 0, share, 1.0)


def lengths_of(finished: Mapping[int, int], ages: ArrayLike = (), *, limit: float | None = None) -> Lengths | None:
    """The Kaplan-Meier estimate of answers' lengths, those in flight counted as longer. None: nothing has finished.

    Args: finished, how many answers had so many tokens; ages, tokens so far of those in flight; limit, tokens that no
    answer can exceed (max_tokens, or the context).

    What is longer than anything seen yet is extrapolated: it goes on ending like the last quarter of what has ended,
    and all of it by `limit`. The mean's error is Greenwood's, and a third of what is extrapolated (more after few).
    """
    if not finished:
        return None
    x, ended = np.array([[*finished], [*finished.values()]], float)
    x, ended = x[x.argsort()], ended[x.argsort()]
    flying = np.sort(np.clip(np.asarray(ages, float), 0.0, limit))
    at_risk = ended[::-1].cumsum()[::-1] + len(flying) - np.searchsorted(flying, x, "left")
    edges = np.array([0.0, *x, max(0.0, x[-1], *flying[-1:])])
    alive = np.append(1.0, np.cumprod(1 - ended / at_risk))
    known = at_risk >= _TOLD * alive[:-1] * (ended.sum() + np.count_nonzero(flying))
    if not known.all():
        kept = max(1, int(known.argmin()))
        edges, alive, ended, at_risk = edges[: kept + 2], alive[: kept + 1], ended[:kept], at_risk[:kept]
    left, stay = _left(edges, alive), at_risk - ended
    variance = (left[1:-1] ** 2 * ended / at_risk / np.where(stay > 0, stay, np.inf)).sum()
    seen, last = left[0], edges[-1]
    if alive[-1] > 0 and last > 0 and (limit is None or last < limit):
        before = np.flatnonzero(alive >= alive[-1] + _RECENT * (1 - alive[-1]))[-1]
        hazard = log(alive[before] / alive[-1]) / (last - edges[before])
        tail = np.linspace(last, last + 12 / hazard if limit is None else limit, _POINTS)
        shares = -np.diff(alive[-1] * np.exp(-hazard * (tail - last))) / (hazard * np.diff(tail))
        edges, alive = np.append(edges, tail[1:]), np.append(alive, shares)
        left = _left(edges, alive)
    guessed = (left[0] - seen) ** 2 * (_GUESSED**2 + 1 / max(1.0, _RECENT * ended.sum()))
    mean = Estimate(value=float(left[0]), error=sqrt(variance + guessed))
    return Lengths(edges=edges, alive=alive, left=left, mean=mean)


def _left(edges: Array, alive: Array) -> Array:
    return np.append((np.diff(edges) * alive)[::-1].cumsum()[::-1], 0.0)


def time_left(
    lengths: Lengths | None, *, rows_left: int, ages: ArrayLike, rate: Estimate, alone_tok_per_s: float | None = None
) -> Estimate | None:
    """Seconds until a run ends. None: nothing with a token has finished, or nothing is decoded now.

    Args: rows_left, not sent yet; ages, tokens so far of the requests in flight; rate, tokens/s of all servers;
    alone_tok_per_s, speed of a request that has a server for itself.

    It is the time of all tokens that are still to come at this rate, and of the end, when slots run empty: what the
    longest of the last answers has beyond their mean. The error is that of mean, rate, draw of lengths, and end.
    """
    flying = np.asarray(ages, float)
    if not (rows_left or len(flying)):
        return Estimate(value=0.0, error=0.0)
    if lengths is None or not (lengths.mean.value > 0 and rate.value > 0 and len(flying)):
        return None
    x = np.linspace(0.0, lengths.edges[-1], _POINTS)
    if rows_left:  # the last requests will then be met at any point of theirs
        stay = np.interp(x, lengths.edges, lengths.left) / lengths.left[0]
    else:
        share = lengths.longer(flying)
        stay = (lengths.longer(flying + x[:, None]) / np.where(share > 0, share, 1.0)).mean(axis=1)
    beyond = float(np.trapezoid(1 - (1 - stay) ** len(flying) - stay, x))
    end_s = beyond / (alone_tok_per_s or (_ALONE if rows_left else 1.0) * rate.value / len(flying))
    mean, rest = lengths.mean, float(lengths.residual(flying).sum())
    draw = float((np.diff(lengths.edges**2) * lengths.alive).sum()) - mean.value**2
    tokens_error = sqrt((rows_left * mean.error) ** 2 + (rows_left + len(flying)) * max(0.0, draw))
    value_s = (rows_left * mean.value + rest) / rate.value
    errors_s = (tokens_error / rate.value, value_s * rate.error / rate.value, _GUESSED * end_s)
    return Estimate(value=value_s + end_s, error=sqrt(sum(each**2 for each in errors_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Request slots of servers over time, each number in slots times seconds.

    Attributes:
        there: what servers could decode at once, by their caps.
        occupied: of these, with a request that was being decoded or waited at that server, so that more of them would
            change nothing. SGLang's gauge of running requests leaves out those that it has just admitted.
        running: of these, with a request that was being decoded, by that gauge; less also where memory runs out first.

    """

    there: float = 0.0
    occupied: float = 0.0
    running: float = 0.0

    def __add__(self, other: Slots) -> Slots:
        """Both together: of other servers, or of another time."""
        there, occupied = self.there + other.there, self.occupied + other.occupied
        return Slots(there=there, occupied=occupied, running=self.running + other.running)


def slots_between(before: EngineSample, now: EngineSample) -> Slots:
    """A server's slots from one look at it to the next, the mean of both; none where it does not tell.

    Whoever adds these up leaves out the time in which the server was away.
    """
    cap, half_s, slots = now.max_running_requests, max(0.0, now.at - before.at) / 2, Slots()
    if cap and before.num_running_reqs is not None and now.num_running_reqs is not None:
        for running, queued in ((each.num_running_reqs or 0.0, each.num_queue_reqs or 0.0) for each in (before, now)):
            occupied, running = half_s * min(running + queued, cap), half_s * min(running, cap)
            slots += Slots(there=half_s * cap, occupied=occupied, running=running)
    return slots


class InFlight:
    """The requests that one server has, and their tokens so far, which nobody tells before they end.

    A server gives all that it decodes one token in each step, so any answer that ends tells its steps up to then. Of
    its requests those wait that were sent last, as many as it says.
    """

    def __init__(self) -> None:
        self._began: dict[Hashable, float | None] = {}  # in the order of sending: the step of each; None, it waits
        self._at_s = self._step = self._looked = self._steps = self._seconds = 0.0

    @property
    def tok_per_s_each(self) -> float:
        """Tokens/s of one request of late; 0 until an answer has ended."""
        return max(0.0, self._steps) / self._seconds if self._seconds > 0 else 0.0

    @property
    def running(self) -> int:
        """Requests that do not wait."""
        return sum(began is not None for began in self._began.values())

    def sent(self, key: Hashable, at_s: float) -> None:
        """A request has gone to the server."""
        self._at_s = self._at_s if self._began else at_s  # no steps while it had nothing to do
        self._began[key] = self._step_at(at_s)

    def sampled(self, at_s: float, num_queue_reqs: int) -> None:
        """The server says how many wait. Those that did at the look before, and no more, began in between."""
        running, step = len(self._began) - num_queue_reqs, self._step_at(at_s)
        for place, (key, began) in enumerate(self._began.items()):
            self._began[key] = None if place >= running else (self._looked + step) / 2 if began is None else began
        self._looked = step

    def ended(self, key: Hashable, at_s: float, tokens: int | None) -> None:
        """A request is over; `tokens` is None where it gave no answer."""
        began, step = self._began.pop(key), self._step_at(at_s)
        if began is None or not tokens or at_s <= self._at_s or step <= began:
            return  # an answer without a token says nothing of steps
        if not self._seconds:  # until the first answer a step stands for a second
            scale = tokens / (step - began)
            self._began = {key: began and began * scale for key, began in self._began.items()}
            began, step, self._looked, self._step = (scale * each for each in (began, step, self._looked, self._step))
        step += _GAIN * (began + tokens - step)
        self._steps = _KEPT * self._steps + step - self._step
        self._seconds = _KEPT * self._seconds + at_s - self._at_s
        self._at_s, self._step = at_s, step
        if self._steps <= 0:  # with no speed no step would ever be past another: begin again
            self._steps = self._seconds = 0.0

    def ages(self, at_s: float) -> list[float]:
        """Tokens so far of each request; 0 for those that wait. Until an answer has ended a second counts as one."""
        step = self._step_at(at_s)
        return [0.0 if began is None else max(0.0, step - began) for began in self._began.values()]

    def _step_at(self, at_s: float) -> float:
        return self._step + (self.tok_per_s_each if self._seconds else 1.0) * max(0.0, at_s - self._at_s)


def flights_rate(flights: Iterable[InFlight]) -> Estimate:
    """Tokens/s of all requests together by the speed of each: what servers decode now, also those without counters."""
    value = sum(flight.tok_per_s_each * flight.running for flight in flights)
    return Estimate(value=value, error=_SPEED * value)
