"""Estimates against simulated runs whose truth is known, and what must hold whatever comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dfexp.capacity.cost import decode_step_s
from dfexp.capacity.plan_command import prepared_for
from dfexp.capacity.planner import Setting
from dfexp.engines.simulated.core import DECODED, Config, Event, Simulator, Sizes, run_closed_loop
from dfexp.estimate import (
    Estimate,
    InFlight,
    Lengths,
    Rows,
    Samples,
    Slots,
    away,
    client_rate,
    flights_rate,
    lengths_of,
    reconcile,
    server_rate,
    slots_between,
    time_left,
    tokens_in_flight,
)
from dfexp.params import RunSpec
from dfexp.records import EngineSample

ROOT = Path(__file__).resolve().parent.parent
SERVERS, PROMPTS, EVERY_S = 8, 20_000, 5.0
CONCURRENCY = {"before": 32, "after": 64, "planned": 157}
STEADY = {"before": (3000.0, 6600.0), "after": (2000.0, 5000.0), "planned": (1500.0, 3000.0)}


@cache
def settings() -> dict[str, Setting]:
    """The reference run's two settings, and the one that would be faster."""
    text = (ROOT / "params/expansion_v1.yaml").read_text()
    variants = prepared_for(RunSpec.model_validate(yaml.safe_load(text)), ROOT).variants
    flags = replace(variants["after"].server.flags, disable_radix_cache=True, max_running_requests=157)
    return {**variants, "planned": variants["after"].with_flags(flags)}


def sizes(setting: Setting, number: int, seed: int) -> list[Sizes]:
    drawn, context, workload = np.random.default_rng(seed), setting.server.context_length, setting.workload
    prompts, answers = (
        np.rint(drawn.choice(lengths.values, size=number, p=lengths.weights)).astype(int).tolist()
        for lengths in (workload.prompt, workload.completion)
    )
    return [
        (min(prompt, context - 16), answer, context - min(prompt, context - 16))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@dataclass
class Look:
    """What a client could say at some moment of a run."""

    at_s: float
    done: int
    finished_mean: float
    lengths: Lengths
    by_counters: Estimate
    by_flights: Estimate
    ages: np.ndarray
    true_ages: np.ndarray
    left: Estimate
    left_by_flights: Estimate


@dataclass
class Run:
    """A client's view of a simulated run: what it sent and got, and each server's page every five seconds."""

    setting: Setting
    concurrency: int
    number: int
    seed: int
    rows: list[tuple[float, float, int]] = field(default_factory=list)
    samples: list[tuple[list[float], list[float | None]]] = field(default_factory=list)
    looks: dict[int, Look] = field(default_factory=dict)

    def go(self, look_at: tuple[int, ...], until: int | None = None) -> Run:
        """Until so many answers have arrived; a look when each number of `look_at` has."""
        requests = sizes(self.setting, self.number, self.seed)
        servers = [Simulator(Config.of(self.setting)) for _ in range(SERVERS)]
        flights, counts, sent_s = [InFlight() for _ in servers], Counter[int](), dict[int, float]()
        next_s = [EVERY_S * (index + 1) / SERVERS for index in range(SERVERS)]
        self.samples = [([], []) for _ in servers]
        for number in range(min(self.concurrency * SERVERS, self.number)):
            flights[number % SERVERS].sent(number, 0.0)
            sent_s[number] = 0.0
        for index, told in run_closed_loop(servers, requests, self.concurrency):
            server, flight = servers[index], flights[index]
            while told.at_s >= next_s[index]:
                next_s[index] += EVERY_S
                self.samples[index][0].append(told.at_s)
                self.samples[index][1].append(float(server.counters[DECODED]))
                flight.sampled(told.at_s, int(server.gauges(told.at_s)["num_queue_reqs"]))
            if not isinstance(told, Event) or told.kind != "finished":
                continue
            assert isinstance(told.request_id, int)
            flight.ended(told.request_id, told.at_s, told.tokens)
            counts[told.tokens] += 1
            self.rows.append((sent_s.pop(told.request_id), told.at_s, told.tokens))
            if (number := len(self.rows) + len(sent_s)) < self.number:
                flight.sent(number, told.at_s)
                sent_s[number] = told.at_s
            if len(self.rows) in look_at:
                true = [
                    server.generated(number) for server in servers for number in sent_s if number in server._requests
                ]
                self.look(told.at_s, counts, flights, np.array(true, float))
            if len(self.rows) == until:
                break
        return self

    def look(self, at_s: float, counts: Counter[int], flights: list[InFlight], true_ages: np.ndarray) -> None:
        done, setting = len(self.rows), self.setting
        ages = np.array([age for flight in flights for age in flight.ages(at_s)])
        lengths = lengths_of(counts, ages, limit=setting.server.context_length)
        recent = [(times[-14:], values[-14:]) for times, values in self.samples]
        by_counters, by_flights = server_rate(recent, at_s - 60, at_s), flights_rate(flights)
        alone = 1 / decode_step_s(setting.server, setting.efficiency, 1, 2000.0)
        assert lengths is not None
        assert by_counters is not None
        left, left_by_flights = (
            time_left(lengths, rows_left=self.number - done - len(ages), ages=ages, rate=rate, alone_tok_per_s=alone)
            for rate in (by_counters, by_flights)
        )
        assert left is not None
        assert left_by_flights is not None
        mean = sum(tokens * count for tokens, count in counts.items()) / done
        self.looks[done] = Look(
            at_s, done, mean, lengths, by_counters, by_flights, ages, true_ages, left, left_by_flights
        )  # fmt: skip

    @property
    def columns(self) -> Rows:
        sent, ended, tokens = np.array(self.rows).T
        return sent, ended, tokens

    def left_s(self, look: Look) -> float:
        """What was really left."""
        return self.rows[-1][1] - look.at_s


@cache
def whole(name: str) -> Run:
    """A run of 20,000 prompts, looked at at 5 %, half way, and when three quarters of the last requests are over."""
    last = PROMPTS - CONCURRENCY[name] * SERVERS // 4
    return Run(settings()[name], CONCURRENCY[name], PROMPTS, seed=1).go((PROMPTS // 20, PROMPTS // 2, last))


@pytest.mark.parametrize("name", CONCURRENCY)
def test_the_three_rates_reconcile_at_steady_state(name: str) -> None:
    run = whole(name)
    found = reconcile(run.samples, run.columns, *STEADY[name], uncounted=1)
    assert found is not None
    assert found.client == pytest.approx(found.server, rel=0.02)
    assert found.client + found.in_flight == pytest.approx(found.server, rel=0.02)
    assert found.unexplained == pytest.approx(found.server - found.client - found.in_flight)


@pytest.mark.parametrize("name", CONCURRENCY)
def test_while_a_run_begins_the_gap_is_what_comes_to_be_in_flight(name: str) -> None:
    run = whole(name)
    found = reconcile(run.samples, run.columns, 20.0, 260.0, uncounted=1)
    assert found is not None
    assert found.client < 0.85 * found.server
    assert abs(found.unexplained) < 0.03 * found.server


@pytest.mark.parametrize("name", CONCURRENCY)
def test_time_left_at_5_percent_is_right_within_5_percent_where_naive_ones_are_not(name: str) -> None:
    run = whole(name)
    look = run.looks[PROMPTS // 20]
    left_s, rows = run.left_s(look), PROMPTS - look.done
    assert look.left.value == pytest.approx(left_s, rel=0.05)
    assert look.left.interval[0] < left_s < look.left.interval[1]
    assert look.left_by_flights.value == pytest.approx(left_s, rel=0.08)
    by_rows, by_tokens = rows * look.at_s / look.done, rows * look.finished_mean / look.by_counters.value
    assert by_rows > 1.05 * left_s
    assert by_tokens < 0.95 * left_s


@pytest.mark.parametrize("name", CONCURRENCY)
def test_what_is_in_flight_is_known_without_anybody_telling(name: str) -> None:
    for look in whole(name).looks.values():
        assert len(look.ages) == len(look.true_ages)
        assert look.ages.sum() == pytest.approx(look.true_ages.sum(), rel=0.03)
        assert look.ages.max() == pytest.approx(look.true_ages.max(), rel=0.05)


@pytest.mark.parametrize("name", CONCURRENCY)
def test_rates_without_counters_are_near_those_of_counters(name: str) -> None:
    look = whole(name).looks[PROMPTS // 2]
    assert look.by_flights.value == pytest.approx(look.by_counters.value, rel=0.05)


@pytest.mark.parametrize("name", CONCURRENCY)
def test_time_left_while_the_last_requests_end(name: str) -> None:
    run = whole(name)
    look = list(run.looks.values())[-1]
    assert look.left_by_flights.value == pytest.approx(run.left_s(look), rel=0.4)


def test_the_early_mean_is_too_short_and_its_correction_is_not() -> None:
    """As operators looked: 438 answers after 280 s. Of 40 runs about 38 have the truth in their interval."""
    setting, within, finished, corrected = settings()["before"], 0, [], []
    for seed in range(40):
        look = Run(setting, 32, 2000, seed).go((438,), until=438).looks[438]
        low, high = look.lengths.mean.interval
        within += low <= setting.workload.completion.mean <= high
        finished.append(look.finished_mean)
        corrected.append(look.lengths.mean.value)
    true = setting.workload.completion.mean
    assert np.mean(finished) < 0.93 * true
    assert np.mean(corrected) == pytest.approx(true, rel=0.02)
    assert within >= 35


COUNTS = st.dictionaries(st.integers(0, 9000), st.integers(1, 300), max_size=30)
AGES = st.lists(st.floats(0, 12_000), max_size=30)
LIMITS = st.none() | st.floats(1, 10_000)


@given(finished=COUNTS, ages=AGES, limit=LIMITS)
def test_lengths_are_a_distribution_whatever_comes(
    finished: dict[int, int], ages: list[float], limit: float | None
) -> None:
    found = lengths_of(finished, ages, limit=limit)
    if not finished:
        assert found is None
        return
    assert found is not None
    assert np.all(np.diff(found.edges) >= 0)
    assert np.all(np.diff(found.alive) <= 1e-12)
    assert np.all((found.alive >= 0) & (found.alive <= 1))
    assert np.isfinite([*found.left, found.mean.value, found.mean.error, *found.mean.interval]).all()
    assert 0 <= found.mean.interval[0] <= found.mean.value <= found.mean.interval[1]
    assert limit is None or found.mean.value <= max(limit, *finished) * (1 + 1e-9)
    rest = found.residual(np.array([*ages, 0.0, 1e6]))
    assert np.isfinite(rest).all()
    assert (rest >= 0).all()
    assert rest[-1] == 0


@given(finished=COUNTS.filter(bool))
def test_with_nothing_in_flight_it_is_the_mean(finished: dict[int, int]) -> None:
    found = lengths_of(finished, limit=8192)
    lengths = np.repeat([*finished], [*finished.values()])
    assert found is not None
    assert found.mean.value == pytest.approx(lengths.mean())
    assert found.mean.error == pytest.approx(lengths.std() / np.sqrt(len(lengths)))
    assert found.residual(np.zeros(1))[0] == pytest.approx(lengths.mean()) or 0 in finished


@given(
    finished=COUNTS, ages=AGES, limit=LIMITS, rows_left=st.integers(0, 10**6),
    rate=st.just(0.0) | st.floats(0.01, 1e5), error=st.floats(0, 1e5), alone=st.none() | st.floats(0.1, 500),
)  # fmt: skip
def test_time_left_is_none_or_a_time(
    finished: dict[int, int], ages: list[float], limit: float | None, rows_left: int, rate: float, error: float,
    alone: float | None,
) -> None:  # fmt: skip
    lengths, given_rate = lengths_of(finished, ages, limit=limit), Estimate(value=rate, error=error)
    found = time_left(lengths, rows_left=rows_left, ages=ages, rate=given_rate, alone_tok_per_s=alone)
    if not rows_left and not ages:
        assert found == Estimate(value=0.0, error=0.0)
    elif not ages or not rate or lengths is None or not lengths.mean.value:
        assert found is None
    else:
        assert found is not None
        assert np.isfinite([found.value, found.error]).all()
        assert 0 <= found.interval[0] <= found.value <= found.interval[1]


def test_one_answer_and_many_in_flight() -> None:
    found = lengths_of({100: 1}, [120.0] * 255, limit=8192)
    assert found is not None
    low, high = found.mean.interval
    assert low < 2500 < high  # next to nothing is known


def test_all_answers_have_the_same_length() -> None:
    found = lengths_of({300: 500}, [0.0, 150.0, 299.0] * 20, limit=8192)
    assert found is not None
    assert (found.mean.value, found.mean.error) == (300.0, 0.0)
    assert found.residual(np.array([0.0, 100.0, 299.0])).tolist() == [300.0, 200.0, 1.0]
    left = time_left(found, rows_left=940, ages=[150.0] * 60, rate=Estimate(value=600.0, error=0.0))
    assert left is not None
    assert left.value == pytest.approx((940 * 300 + 60 * 150) / 600, rel=0.05)


def test_a_few_that_finished_ahead_of_all_others_say_nothing_of_what_is_longer() -> None:
    """At the start all requests have the same age; one told too low lets the farthest answers look like the longest."""
    together = dict.fromkeys(range(1000, 2000, 5), 2)
    found = lengths_of({**together, 2010: 1, 2015: 1}, [2000.0] * 800, limit=8000)
    assert found is not None
    assert found.longer(np.array([2500.0]))[0] > 0.5


def steady(rate: float, every_s: float, start_s: float, end_s: float, first: float = 0.0) -> Samples:
    times = np.arange(start_s, end_s, every_s)
    return times.tolist(), [first + rate * (at_s - start_s) for at_s in times]


def value(estimate: Estimate | None) -> float:
    assert estimate is not None
    return estimate.value


def test_servers_are_sampled_at_different_instants() -> None:
    servers = [steady(100.0, 5.0, 1.0, 100.0), steady(200.0, 7.0, 3.5, 100.0, first=1e9)]
    assert value(server_rate(servers, 30.0, 97.0)) == pytest.approx(300.0)


def test_a_server_that_restarts_counts_on() -> None:
    times = [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert value(server_rate([(times, [500.0, 600.0, 700.0, 50.0, 150.0, 250.0])], 0.0, 50.0)) == pytest.approx(9.0)


def test_a_server_that_is_away_makes_nothing() -> None:
    server = steady(100.0, 5.0, 0.0, 51.0)
    assert value(server_rate([away(server, 120.0)], 0.0, 120.0)) == pytest.approx(100.0 * 50 / 120)
    assert value(server_rate([away(server, 260.0)], 200.0, 260.0)) == 0.0
    other = steady(100.0, 5.0, 0.0, 300.0)
    assert value(server_rate([away(server, 260.0), other], 200.0, 260.0)) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("end_s", "expected"), [(55.0, 200.0), (60.0, 200.0), (109.0, 200.0), (112.0, None), (600, None)]
)
def test_a_server_whose_page_is_silent_loses_no_tokens(end_s: float, expected: float | None) -> None:
    """Its requests may go on being answered: short silence goes on at its rate, of a long one nothing is claimed."""
    silent, other = steady(100.0, 5.0, 0.0, 51.0), steady(100.0, 5.0, 0.0, 700.0)
    found, rows = server_rate([silent, other], end_s - 100.0 if end_s > 100 else 0.0, end_s), ([0.0], [1.0], [1])
    assert (found and found.value) == (expected and pytest.approx(expected))
    if expected is None:
        assert reconcile([silent, other], rows, end_s - 100.0, end_s, uncounted=1) is None


def test_a_page_that_is_back_tells_what_was_made_in_silence() -> None:
    times, values = steady(100.0, 5.0, 0.0, 201.0)
    seen = [(at_s, made) for at_s, made in zip(times, values, strict=True) if not 50 < at_s < 150]
    server = [at_s for at_s, _ in seen], [made for _, made in seen]
    assert value(server_rate([server], 80.0, 140.0)) == pytest.approx(100.0)


def test_a_server_that_says_nothing_is_not_one_that_makes_nothing() -> None:
    assert server_rate([([0.0, 5.0], [None, None]), ([1.0], [7.0]), ([], [])], 0.0, 5.0) is None
    found = server_rate([([0.0, 5.0, 10.0], [0.0, None, 100.0])], 0.0, 10.0)
    assert value(found) == pytest.approx(10.0)
    assert reconcile([], ([], [], []), 0.0, 5.0, uncounted=1) is None


def test_a_rate_that_wavers_is_less_sure() -> None:
    even = server_rate([steady(100.0, 1.0, 0.0, 61.0)], 0.0, 60.0)
    times = np.arange(61.0)
    uneven = server_rate([(times.tolist(), (100 * times + 300 * np.sin(times / 5)).tolist())], 0.0, 60.0)
    assert even is not None
    assert uneven is not None
    assert even.error < 0.01 < uneven.error


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.none() | st.floats(0, 1e7)), max_size=20),
    st.integers(0, 10**7), st.integers(-10, 10**7),
)  # fmt: skip
def test_no_clock_and_no_counter_gives_a_negative_rate(
    samples: list[tuple[int, float | None]], start_ms: int, for_ms: int
) -> None:
    server = [at_ms / 1000 for at_ms, _ in samples], [count for _, count in samples]
    found = server_rate([server, server], start_ms / 1000, (start_ms + for_ms) / 1000)
    if found is not None:
        assert np.isfinite([found.value, found.error]).all()
        assert found.value >= 0


def test_rows_give_what_was_in_flight() -> None:
    rows = [0.0, 5.0, 9.0], [10.0, 7.0, 19.0], [100, 20, 50]
    assert tokens_in_flight(rows, 6.0) == 60 + 10
    assert tokens_in_flight(rows, 10.0) == 5
    assert tokens_in_flight(rows, 30.0) == tokens_in_flight(([], [], []), 3.0) == 0
    assert client_rate(rows, 0.0, 10.0) == 12
    assert client_rate(rows, 7.0, 10.0) == pytest.approx(100 / 3)
    assert client_rate(rows, 10.0, 10.0) == 0


def test_answers_that_end_tell_how_far_the_others_are() -> None:
    flight = InFlight()
    for key in range(4):
        flight.sent(key, 0.0)
    assert (flights_rate([flight]).value, flight.tok_per_s_each) == (0.0, 0.0)
    flight.ended(0, 10.0, 200)
    flight.sent(4, 10.0)
    assert flight.ages(15.0) == pytest.approx([300, 300, 300, 100])
    assert flights_rate([flight, flight]).value == pytest.approx(160)


def test_those_sent_last_wait_and_begin_between_two_looks() -> None:
    flight = InFlight()
    for key in range(3):
        flight.sent(key, 0.0)
    flight.sampled(2.0, 2)
    flight.ended(0, 10.0, 100)
    assert flight.ages(10.0) == [0, 0]
    flight.sampled(10.0, 1)
    flight.sampled(20.0, 0)
    assert flight.running == 2
    assert flight.ages(20.0) == pytest.approx([140, 50])


def test_a_server_that_lost_its_requests_begins_again() -> None:
    flight = InFlight()
    flight.sent("a", 0.0)
    flight.sent("b", 0.0)
    flight.ended("a", 10.0, 100)
    flight.ended("b", 20.0, None)
    assert flight.ages(500.0) == []
    flight.sent("c", 1000.0)
    assert flight.ages(1003.0) == pytest.approx([30])
    assert flight.tok_per_s_each == pytest.approx(10)


@pytest.mark.parametrize("first", [0, 1])
def test_answers_with_no_token_or_one_do_not_stop_the_clock(first: int) -> None:
    flight = InFlight()
    for key in range(50):
        flight.sent(key, 0.0)
    for key in range(20):
        flight.ended(key, 10.0 + key, first)
    flight.sent("later", 40.0)
    for key in range(20, 40):
        flight.ended(key, 40.0 + 20 * (key - 19), 800 + 400 * (key - 19))
    assert flight.tok_per_s_each == pytest.approx(20.0, rel=0.1)
    assert flight.ages(440.0)[-1] == pytest.approx(8000, rel=0.15)
    assert flights_rate([flight]).value == pytest.approx(11 * 20.0, rel=0.1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["sent", "ended", "lost", "sampled"]), st.floats(-50, 50), st.integers(0, 5000)),
        max_size=60,
    )
)
def test_ages_are_never_negative_whatever_the_clock_does(steps: list[tuple[str, float, int]]) -> None:
    flight, now_s, sent, over = InFlight(), 100.0, 0, 0
    for what, seconds, number in steps:
        now_s += seconds
        if what == "sent" or over == sent:
            flight.sent(sent, now_s)
            sent += 1
        elif what == "sampled":
            flight.sampled(now_s, number % 7)
        else:
            flight.ended(over, now_s, number if what == "ended" else None)
            over += 1
        ages = flight.ages(now_s)
        assert len(ages) == sent - over
        assert np.isfinite([*ages, flights_rate([flight]).value]).all()
        assert min([*ages, flights_rate([flight]).value, flight.tok_per_s_each]) >= 0


def seen(at: float, running: float | None, queued: float | None, cap: int | None = 10) -> EngineSample:
    return EngineSample(at=at, server="a", num_running_reqs=running, num_queue_reqs=queued, max_running_requests=cap)


def test_slots_are_weighed_by_time_and_a_request_that_waits_for_one_counts() -> None:
    looks = [seen(0.0, 10, 2), seen(10.0, 9, 1), seen(11.0, 4, 0), seen(31.0, 4, 0)]
    found = sum(map(slots_between, looks, looks[1:]), Slots())
    assert found.there == 310
    assert found.running == pytest.approx(10 * 9.5 + 1 * 6.5 + 20 * 4)
    assert found.occupied == pytest.approx(10 * 10 + 1 * 7 + 20 * 4)
    more = slots_between(seen(0.0, 14, 9), seen(1.0, 10, None))
    assert more == Slots(there=10, occupied=10, running=10), "never more than there are"


@pytest.mark.parametrize("odd", [seen(5.0, None, 3), seen(5.0, 3, 3, cap=None), seen(-1.0, 3, 3)])
def test_slots_of_a_server_that_does_not_tell_are_not_guessed(odd: EngineSample) -> None:
    assert slots_between(seen(0.0, 3, 0), odd) == Slots()
