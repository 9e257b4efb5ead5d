"""Each rule of the scheduler by a small case, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dfexp.capacity.cost import decode_step_s, prefill_s
from dfexp.engines.simulated.core import Config, Event, Simulator, run_closed_loop
from dfexp.engines.simulated.core.machine import padded_batch
from tests.capacity.support import AFTER, BEFORE, GPU, plan, server
from tests.engines.simulated.support import config, events, lines, run


def at_once(settings: Config, *sizes: tuple[int, int, int]) -> Simulator:
    simulator = Simulator(settings)
    for number, each in enumerate(sizes):
        simulator.submit(0.0, number, *each)
    return simulator


def kinds(told: list[Event], kind: str) -> list[int | str]:
    return [each.request_id for each in told if each.kind == kind]


def test_a_cold_pass_reserves_the_whole_answer() -> None:
    # Each takes 100 + 1,000 + 1 of 10,000: after 8 of them 1,192 are left, enough for the ninth, then 91.
    told = run(at_once(config(tokens=10_000, cap=99), *[(100, 500, 1000)] * 20), until_s=1.0)
    first = lines(told)[0]
    assert first.new_seqs == 9
    assert first.gauges["num_queue_reqs"] == 11


def test_admission_reserves_4096_tokens_of_an_answer_at_most() -> None:
    # 10 + 4,096 + 1 each: 10,000 take two, and 1,786 are left; with the whole 7,000 it would be one.
    told = run(at_once(config(tokens=10_000, cap=99), *[(10, 50, 7000)] * 5), until_s=0.5)
    assert lines(told)[0].new_seqs == 2


def test_the_reserve_of_those_that_run_shrinks_with_every_step() -> None:
    # Two run, one of 101 tokens in all, one of 1,000. When the first ends, after 100 steps, the ratio is
    # 0.7 - 100 x 0.0010033 = 0.59967; the other holds 200 tokens and has 899 of 1,000 to go, which counts 539.1.
    # 3,000 - 200 - 539.1 = 2,260.9 is the room for the third: prompt + 1,000 + 1 must stay below.
    def admitted_after_the_first(prompt: int) -> bool:
        settings = config(tokens=3000, cap=99, late=False)
        told = events(run(at_once(settings, (100, 101, 500), (100, 900, 1000), (prompt, 9, 1000))))
        times = {(each.kind, each.request_id): each.at_s for each in told}
        return times["finished", 0] < times["first_token", 2] < times["finished", 1]

    assert admitted_after_the_first(1259)
    assert not admitted_after_the_first(1260)


def test_the_ratio_is_back_at_its_start_after_idling() -> None:
    # The first, alone, brings the ratio down to 0.098. After idling one runs and 20 come: 10,500 less some 115 tokens
    # of the one, less 0.7 x some 985, leave 9,696: room for 8 of 1,101, and not for a ninth, as 0.098 would.
    simulator = at_once(config(tokens=10_500, cap=99, radix=False), (100, 700, 1000))
    run(simulator)
    simulator.submit(1000.0, "one", 100, 500, 1000)
    for number in range(20):
        simulator.submit(1001.0, f"later {number}", 100, 500, 1000)
    assert [line.new_seqs for line in lines(run(simulator, until_s=1003.0)) if line.new_seqs] == [1, 8]


def test_4096_tokens_at_most_count_of_a_running_request_too() -> None:
    # After some 20 steps 13,000 - 120 - 0.68 x 4,096 leave 10,095 for 8,000 + 11; with 0.68 x 7,980 it would be 7,454.
    simulator = at_once(config(tokens=13_000, cap=99), (100, 500, 8000))
    simulator.submit(1.0, "long", 8000, 5, 10)
    assert kinds(events(run(simulator, until_s=5.0)), "first_token") == [0, "long"]


@pytest.mark.parametrize(
    ("overlap", "late", "ended_at", "steps"),
    [(False, False, 50, 0), (False, True, 50, 1), (True, False, 50, 1), (True, False, 60, 1), (True, True, 50, 2)],
)
def test_a_place_is_given_away_when_the_scheduler_has_seen_its_request_leave(
    overlap: bool, late: bool, ended_at: int, steps: int
) -> None:
    settings = config(tokens=100_000, cap=2, radix=not overlap, overlap=overlap, late=late, interval=1)
    told = run(at_once(settings, (10, ended_at, 60), (10, 80, 90), (10, 5, 9)))
    times = {(each.kind, each.request_id): each.at_s for each in events(told)}
    assert kinds(events(told), "first_token") == [0, 1, 2]
    between = [line for line in lines(told) if times["finished", 0] < line.at_s < times["first_token", 2]]
    assert len(between) == steps
    foreseen = ended_at == 60  # by max_new_tokens: 0.5.23 leaves it out of the next step at once
    assert [line.gauges["num_running_reqs"] for line in between] == [
        1 + (overlap and not foreseen and number == 0) for number in range(steps)
    ]
    assert times["first_token", 2] == pytest.approx(
        max(times["finished", 0], *(line.at_s for line in between), 0)
        + prefill_s(server(AFTER), GPU.efficiency, 10, 10)
    )


def test_who_has_ended_but_is_not_dropped_yet_counts_in_the_next_prefill() -> None:
    # 0 ends after 20 steps and 1 after 21, which is when 3 is tried: 1 has its place still, so 4 waits one step more.
    sizes = ((10, 21, 90), (10, 22, 90), (10, 80, 90), (10, 50, 90), (10, 50, 90))
    told = run(at_once(config(tokens=100_000, cap=3, interval=1), *sizes))
    later = [(line.new_seqs, line.gauges["num_running_reqs"]) for line in lines(told)[20:25]]
    assert later == [(0, 3), (0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize(("late", "admitted"), [(True, 3), (False, 4)])
def test_versions_before_0_5_23_count_a_chunked_prompt_twice(late: bool, admitted: int) -> None:
    # The second pass begins with the rest of the long prompt, and gives away one place less.
    sizes = [(10, 50, 60), (3000, 50, 60), *[(10, 50, 60)] * 5]
    told = run(at_once(config(tokens=100_000, cap=4, chunked_prefill_size=2048, interval=1, late=late), *sizes))
    assert [line.new_seqs for line in lines(told) if line.new_seqs][:2] == [2, admitted - 1]
    assert next(line for line in lines(told) if not line.new_seqs).gauges["num_running_reqs"] == admitted


def test_that_the_first_batch_is_full_is_forgotten_with_the_empty_one_before() -> None:
    # 9 of 1,101 fit at first; with 0.7 x 999 reserved for each of them 2,806 of 10,000 are left: 2 more.
    told = run(at_once(config(tokens=10_000, cap=99), *[(100, 500, 1000)] * 20), until_s=1.0)
    assert [line.new_seqs for line in lines(told)] == [9, 2]


def test_first_come_first_served_even_where_a_later_one_would_fit() -> None:
    told = events(run(at_once(config(tokens=2000, cap=9), (10, 100, 900), (1500, 5, 10), (10, 5, 10))))
    assert kinds(told, "first_token") == [0, 1, 2]


def test_one_prompt_of_a_batch_is_cut_at_the_chunk_and_decoding_waits() -> None:
    simulator = at_once(
        config(tokens=100_000, cap=9, chunked_prefill_size=2048), (3000, 5, 9), (500, 5, 9), (2000, 5, 9)
    )
    told = run(simulator)
    prefills = [(line.new_seqs, line.new_tokens) for line in lines(told) if line.new_seqs]
    # 2,048 of 3,000; the other 952, 500 and 596 of 2,000; the other 1,404.
    assert prefills == [(1, 2048), (3, 2048), (1, 1404)]
    assert [line.gauges["num_running_reqs"] for line in lines(told)] == [0, 0, 2]


def test_prefill_stops_decoding() -> None:
    simulator = at_once(config(tokens=100_000, cap=9, interval=1), (100, 50, 60))
    run(simulator, until_s=0.5)
    simulator.submit(0.5, "late", 5000, 5, 9)
    after = [line for line in lines(run(simulator)) if line.at_s > 0.5]
    prefill = next(index for index, line in enumerate(after) if line.new_seqs)
    pause_s = after[prefill + 1].at_s - after[prefill - 1].at_s
    step_s = decode_step_s(server(AFTER), GPU.efficiency, 2, 2600)
    assert pause_s == pytest.approx(prefill_s(server(AFTER), GPU.efficiency, 5000, 5000) + step_s, rel=0.01)


def test_retraction_takes_the_fewest_tokens_first() -> None:
    # 1 and 2 join at once, and 3 after 20 steps, one after 0 has ended. Together they hold 150 + s + 140 + s + 110 + s
    # - 20 tokens after s steps: 998 after 206, and three more do not fit. 3 has 187 tokens then, the others have 207.
    settings = config(tokens=1000, cap=3, schedule_conservativeness=0.01)
    told = events(run(at_once(settings, (100, 20, 200), (150, 400, 420), (140, 400, 420), (110, 400, 420))))
    first = next(each for each in told if each.kind == "retracted")
    assert (first.request_id, first.tokens) == (3, 187)
    assert kinds(told, "finished")[0] == 0


LONG = ((120, 5000, 6000), (130, 5000, 6000), (110, 5000, 6000))
"""All are admitted to 13,000 tokens, since 4,096 of an answer are reserved. After 4,213 steps they hold 12,999."""


def test_of_equal_answers_the_longest_prompt_is_retracted() -> None:
    told = events(run(at_once(config(tokens=13_000, cap=9, radix=False), *LONG)))
    first = next(each for each in told if each.kind == "retracted")
    assert (first.request_id, first.tokens) == (1, 4214)


def test_a_retracted_request_waits_behind_the_others_and_is_prefilled_with_its_answer() -> None:
    told = run(at_once(config(tokens=13_000, cap=3, radix=False), *LONG, (400, 30, 40)))
    assert [(each.kind, each.request_id) for each in events(told)] == [
        ("first_token", 0), ("first_token", 1), ("first_token", 2), ("retracted", 1), ("first_token", 3),
        ("finished", 3), ("finished", 0), ("finished", 2), ("finished", 1),
    ]  # fmt: skip
    assert [line.new_tokens for line in lines(told) if line.new_seqs] == [360, 400, 130 + 4214]


@pytest.mark.parametrize(
    ("held", "strategy", "radix"), [(2.0, "no_buffer", True), (3.5, "extra_buffer", True), (1, "no_buffer", False)]
)
def test_state_slots_per_running_request(held: float, strategy: str, radix: bool) -> None:
    settings = config(tokens=100_000, cap=9, slots=50, radix=radix)
    resolved = replace(settings.memory.resolved, strategy=strategy)  # type: ignore[arg-type]
    told = run(at_once(replace(settings, memory=replace(settings.memory, resolved=resolved)), *[(10, 100, 200)] * 8))
    decode = next(line for line in lines(told) if not line.new_seqs)
    assert decode.gauges["mamba_used_tokens"] == 8 * held
    assert decode.gauges["mamba_usage"] == 8 * held / 50


def test_the_radix_cache_keeps_what_has_ended_until_the_room_is_needed() -> None:
    simulator = Simulator(config(tokens=1000, cap=4, slots=20))
    for number in range(3):
        simulator.submit(100.0 * number, number, 200, 101, 200)
    run(simulator)
    gauges = simulator.gauges(1000.0)
    assert (gauges["kv_evictable_tokens"], gauges["kv_available_tokens"]) == (900, 100)
    assert (gauges["mamba_evictable_tokens"], gauges["mamba_available_tokens"]) == (6, 14)
    simulator.submit(1000.0, "next", 300, 2, 10)
    run(simulator)
    assert simulator.gauges(2000.0)["kv_evictable_tokens"] == 901


def test_the_radix_cache_keeps_whole_pages_alone() -> None:
    simulator = at_once(config(tokens=1024, cap=4, page=16), (200, 101, 200))
    run(simulator)
    gauges = simulator.gauges(1000.0)
    assert (gauges["kv_evictable_tokens"], gauges["kv_available_tokens"]) == (18 * 16, 1024 - 18 * 16)


def test_the_radix_cache_keeps_two_state_slots_of_each_as_long_as_there_are_any() -> None:
    simulator = at_once(config(tokens=10_000, cap=1, slots=9), *[(200, 101, 200)] * 6)
    run(simulator)
    gauges = simulator.gauges(1e6)
    assert (gauges["mamba_evictable_tokens"], gauges["kv_evictable_tokens"]) == (8, 4 * 300)


def test_gen_throughput_counts_from_one_decode_line_to_the_next_with_the_pauses_between() -> None:
    simulator = at_once(config(tokens=100_000, cap=9), *[(100, 200, 300)] * 4)
    decodes = [line for line in lines(run(simulator)) if not line.new_seqs]
    assert len(decodes) == 4  # steps 40, 80, 120 and 160 of 199
    seconds = decodes[1].at_s - decodes[0].at_s
    assert decodes[1].gauges["gen_throughput"] == pytest.approx(4 * 40 / seconds)
    steps = [decode_step_s(server(AFTER), GPU.efficiency, 4, 100 + step) for step in range(41, 81)]
    assert seconds == pytest.approx(sum(steps), rel=1e-9)


def test_gauges_keep_their_values_for_half_a_minute_and_then_read_zero() -> None:
    simulator = at_once(config(tokens=100_000, cap=9), (100, 45, 300))
    end_s = run(simulator)[-1].at_s
    assert simulator.gauges(end_s + 29)["num_running_reqs"] == 1
    assert simulator.gauges(end_s + 31)["num_running_reqs"] == 0
    assert simulator.gauges(end_s + 31)["gen_throughput"] == 0.0


def test_an_abort_takes_a_queued_request_at_once_and_a_running_one_with_its_next_token() -> None:
    simulator = at_once(config(tokens=100_000, cap=1), (10, 500, 600), (10, 5, 9), (10, 5, 9))
    run(simulator, until_s=2.0)
    before = simulator.generated(0)
    simulator.abort(1)
    simulator.abort(0)
    simulator.abort("nobody")
    told = events(run(simulator))
    assert [(each.kind, each.request_id, each.tokens) for each in told] == [
        ("aborted", 1, 0), ("aborted", 0, before + 1), ("first_token", 2, 1), ("finished", 2, 5),
    ]  # fmt: skip
    assert simulator.counters["num_aborted_requests_total"] == 2


def test_slowness_is_a_factor_on_every_time_and_a_hung_server_does_nothing() -> None:
    plain, slow_one = (at_once(config(tokens=100_000, cap=1), (10, 50, 60)) for _ in range(2))
    slow_one.slow(3.0)
    assert run(slow_one)[-1].at_s == pytest.approx(3 * run(plain)[-1].at_s)
    hung = at_once(config(tokens=100_000, cap=1), (10, 50, 60))
    told = run(hung, until_s=1.0)
    hung.hung = True
    hung.submit(1.0, "late", 10, 5, 9)
    assert hung.next_event_s() is None
    assert hung.advance(1e6) == []
    hung.hung = False
    ended = kinds(events(told + (later := run(hung))), "finished")
    assert len(ended) == 2
    assert min(each.at_s for each in later) > 1e6


@pytest.mark.parametrize("looks", [1, 7, 400])
def test_slowness_begins_when_it_is_set_however_often_somebody_has_looked(looks: int) -> None:
    simulator = at_once(config(tokens=100_000, cap=4), (10, 5_000, 6_000), (10, 4_000, 6_000))
    told = [each for look in range(1, looks + 1) for each in simulator.advance(20.0 * look / looks)]
    simulator.slow(4.0)
    plain = events(run(at_once(config(tokens=100_000, cap=4), (10, 5_000, 6_000), (10, 4_000, 6_000))))[-1].at_s
    assert events(told + run(simulator))[-1].at_s == pytest.approx(20.0 + 4 * (plain - 20.0), rel=1e-3)


def test_batches_pad_up_to_the_next_graph() -> None:
    assert [padded_batch(running, 256) for running in (1, 2, 3, 5, 13, 17, 157, 256, 257)] == [
        1, 2, 4, 8, 16, 24, 160, 256, 257,
    ]  # fmt: skip
    assert padded_batch(157, 158) == 158


def test_padding_costs_flops() -> None:
    settings = config(tokens=100_000, cap=999)
    by_bytes, by_flops = settings.step_lines(157)
    assert by_bytes[0] < decode_step_s(server(AFTER), GPU.efficiency, 160, 0.0)
    assert by_flops[0] == settings.step_lines(160)[1][0]


def test_a_closed_loop_keeps_every_server_at_its_concurrency_and_ends_every_request() -> None:
    servers = [
        Simulator(Config(server=server(BEFORE), memory=plan(BEFORE), efficiency=GPU.efficiency)) for _ in range(3)
    ]
    told = list(run_closed_loop(servers, [(100, 40 + number, 500) for number in range(60)], 4))
    ended = [(index, each) for index, each in told if isinstance(each, Event) and each.kind == "finished"]
    assert sorted(int(each.request_id) for _, each in ended) == list(range(60))
    assert {index for index, _ in ended} == {0, 1, 2}
    half = [
        line.gauges["num_running_reqs"] for index, line in told if not isinstance(line, Event) and not line.new_seqs
    ]
    assert half[0] == 4
    assert servers[0].counters["num_requests_total"] == sum(index == 0 for index, _ in ended)
