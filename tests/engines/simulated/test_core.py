"""The simulator against the slow scheduler, and what must hold whatever comes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfexp.engines.simulated.core import DECODED, PREFILLED, Config, Event, Line, Simulator, Sizes
from dfexp.errors import PromptTooLong
from tests.engines.simulated.support import config, events, lines, run, slow

SIZES = st.tuples(st.integers(1, 150), st.integers(1, 450), st.integers(300, 500))
ARRIVALS = st.lists(st.tuples(st.floats(0, 30), SIZES), min_size=1, max_size=16)
SERVERS = st.builds(
    config,
    tokens=st.sampled_from([704, 704, 960, 20_032]),
    cap=st.integers(2, 8),
    page=st.sampled_from([1, 16]),
    radix=st.booleans(),
    slots=st.integers(24, 60),
    chunked_prefill_size=st.sampled_from([64, 208, 8192]),
    schedule_conservativeness=st.sampled_from([1.0, 0.3]),
    late=st.booleans(),
)
ANY = st.builds(lambda server, overlap: overlapping(server) if overlap else server, SERVERS, st.booleans())


def overlapping(server: Config) -> Config:
    """The same server with overlap scheduling on."""
    return replace(server, memory=replace(server.memory, resolved=replace(server.memory.resolved, overlap=True)))


def submitted(server: Config, requests: list[tuple[float, Sizes]]) -> Simulator:
    simulator = Simulator(server)
    for number, (at_s, sizes) in enumerate(requests):
        simulator.submit(at_s, number, *sizes)
    return simulator


@settings(max_examples=100, deadline=None)
@given(server=SERVERS, requests=ARRIVALS)
def test_jumps_give_what_single_steps_give(server: Config, requests: list[tuple[float, Sizes]]) -> None:
    same_as_slow(server, requests)


def test_jumps_give_what_single_steps_give_where_requests_are_retracted() -> None:
    retracted = 0
    for seed in range(40):
        chance = random.Random(seed)
        server = config(
            tokens=chance.choice([1000, 1600]),
            cap=chance.randint(8, 20),
            page=chance.choice([1, 1, 16]),
            schedule_conservativeness=0.01,
            late=seed % 2 == 0,
            chunked_prefill_size=chance.choice([64, 208, 8192]),
        )
        requests = [
            (chance.uniform(0, 20), (chance.randint(1, 150), chance.randint(100, 450), chance.randint(100, 500)))
            for _ in range(40)
        ]
        retracted += same_as_slow(server, requests)
    assert retracted > 60


def same_as_slow(server: Config, requests: list[tuple[float, Sizes]]) -> int:
    """Both do the same at the same times; the number of retractions."""
    wanted = slow(server, requests)
    expected = sorted(wanted.go())
    found = sorted(
        (each.at_s, each.kind, each.request_id, each.tokens) for each in events(run(submitted(server, requests)))
    )
    assert sorted(each[1:] for each in found) == sorted(each[1:] for each in expected)
    times = {each[1:]: each[0] for each in found if each[1] != "retracted"}
    assert times == pytest.approx({each[1:]: each[0] for each in expected if each[1] != "retracted"}, rel=1e-9)
    assert wanted.peaks["kv"] <= server.memory.max_total_num_tokens
    return sum(each[1] == "retracted" for each in expected)


@settings(max_examples=60, deadline=None)
@given(server=ANY, requests=ARRIVALS)
def test_every_request_ends_once_and_no_pool_overflows(server: Config, requests: list[tuple[float, Sizes]]) -> None:
    simulator = submitted(server, requests)
    told = run(simulator)
    ended = [each for each in events(told) if each.kind == "finished"]
    assert sorted(str(each.request_id) for each in ended) == sorted(map(str, range(len(requests))))
    retracted = [each for each in events(told) if each.kind == "retracted"]
    counters = simulator.counters
    assert counters["num_requests_total"] == len(requests)
    assert counters["prompt_tokens_total"] == sum(prompt for _, (prompt, _, _) in requests)
    assert counters["generation_tokens_total"] == sum(each.tokens for each in ended)
    assert counters["num_retracted_requests_total"] == len(retracted)
    # Each prefill gives a token too, and after a retraction computes the tokens that were there once more.
    prefills = len(requests) + len(retracted)
    assert counters[DECODED] == counters["generation_tokens_total"] - prefills
    computed_again = sum(requests[int(each.request_id)][1][0] + each.tokens for each in retracted)
    assert counters[PREFILLED] == counters["prompt_tokens_total"] + computed_again
    for line in lines(told):
        gauges = line.gauges
        assert gauges["num_running_reqs"] <= server.memory.max_running_requests
        for pool, total in (("kv", server.memory.max_total_num_tokens), ("mamba", server.memory.max_mamba_cache_size)):
            parts = [gauges[f"{pool}_{part}_tokens"] for part in ("used", "evictable", "available")]
            assert min(parts) >= 0
            assert sum(parts) == total
    assert simulator.gauges(1e9)["kv_used_tokens"] == 0


@settings(max_examples=40, deadline=None)
@given(server=ANY, requests=ARRIVALS, cuts=st.lists(st.floats(0, 60), max_size=12))
def test_how_time_is_cut_changes_nothing(
    server: Config, requests: list[tuple[float, Sizes]], cuts: list[float]
) -> None:
    requests.sort()  # of two that end with the same step, the first submitted is told first
    whole = run(submitted(server, requests))
    simulator, parts = Simulator(server), list[Event | Line]()
    coming = list(enumerate(requests))
    for until_s in [*sorted(cuts), 1e9]:
        while coming and coming[0][1][0] <= until_s:
            number, (at_s, sizes) = coming.pop(0)
            parts += simulator.advance(at_s)
            simulator.submit(at_s, number, *sizes)
        parts += simulator.advance(until_s)
    assert [(each.kind, each.tokens) for each in events(parts)] == [(each.kind, each.tokens) for each in events(whole)]
    assert [each.at_s for each in parts] == pytest.approx([each.at_s for each in whole], rel=1e-9)
    assert [each.gauges["num_running_reqs"] for each in lines(parts)] == [
        each.gauges["num_running_reqs"] for each in lines(whole)
    ]


def test_a_prompt_without_room_for_an_answer_is_refused() -> None:
    simulator = Simulator(config(tokens=700, cap=4))
    with pytest.raises(PromptTooLong, match="697 prompt tokens leave no room for an answer in 698"):
        simulator.submit(0.0, "a", 697, 10, 10)
    simulator.submit(0.0, "b", 696, 10, 10)
    assert [each.kind for each in events(run(simulator))] == ["first_token", "finished"]
