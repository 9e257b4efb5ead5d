"""The waiting rules, on a clock that the tests move."""

from __future__ import annotations

from dfexp.engines.simulated.server.pace import AWAY_S, GRACE_FALL, GRACE_S, LEAST_GRACE_S, QUIET_S, Grace, Pace


def started(requests: int, common: Grace | None = None) -> Pace:
    """A client that keeps so many requests in flight; its last one came at 0."""
    pace = Pace(common or Grace())
    for _ in range(requests):
        pace.arrived(0.0)
    assert pace.waits_until_s(QUIET_S, has_queue=False) is None
    assert pace.is_settled
    return pace


def test_a_client_that_starts_is_waited_for_until_nothing_more_comes() -> None:
    pace = Pace(Grace())
    pace.arrived(1.0)
    assert pace.waits_until_s(1.01, has_queue=False) == 1.0 + QUIET_S
    pace.arrived(1.04)
    assert pace.waits_until_s(1.06, has_queue=True) == 1.04 + QUIET_S
    assert pace.waits_until_s(1.04 + QUIET_S, has_queue=False) is None
    assert (pace.target, pace.is_settled) == (2, True)


def test_a_full_server_waits_for_nothing() -> None:
    assert started(3).waits_until_s(0.0, has_queue=False) is None


def test_an_answered_request_is_waited_for_until_another_comes_in_its_place() -> None:
    pace = started(3)
    pace.left(5.0)
    assert pace.waits_until_s(5.0, has_queue=False) == 5.0 + GRACE_S
    pace.arrived(5.1)
    assert pace.waits_until_s(5.1, has_queue=False) is None
    assert pace.target == 3


def test_nothing_waits_while_requests_are_queued() -> None:
    pace = started(3)
    pace.left(5.0)
    assert pace.waits_until_s(5.0, has_queue=True) is None
    assert pace.target == 3
    assert pace.waits_until_s(5.0, has_queue=False) == 5.0 + GRACE_S


def test_every_answer_and_every_arrival_gives_the_client_its_time_anew() -> None:
    pace = started(4)
    pace.left(5.0)
    pace.left(5.1)
    assert pace.waits_until_s(5.15, has_queue=False) == 5.1 + GRACE_S
    pace.arrived(5.2)
    assert pace.waits_until_s(5.25, has_queue=False) == 5.2 + GRACE_S


def test_waits_in_vain_get_shorter_and_a_client_that_goes_on_is_trusted_again() -> None:
    pace, now_s, waits = started(64), 10.0, []
    for _ in range(40):
        pace.left(now_s)
        until_s = pace.waits_until_s(now_s, has_queue=False)
        assert until_s is not None
        waits.append(until_s - now_s)
        now_s = until_s
        assert pace.waits_until_s(now_s, has_queue=False) is None
        assert pace.is_settled
    assert waits[1] < waits[0]
    assert sum(waits) < 1.1, "the end of a run costs about a second"
    assert abs(waits[-1] - LEAST_GRACE_S) < 1e-6
    pace.arrived(now_s)
    assert pace.waits_until_s(now_s + QUIET_S, has_queue=False) is None
    pace.left(now_s + 1)
    assert pace.waits_until_s(now_s + 1, has_queue=False) == now_s + 1 + GRACE_S


def test_the_end_of_a_run_costs_no_more_on_many_servers() -> None:
    common = Grace()
    paces, now_s = [started(16, common) for _ in range(64)], 10.0
    for _ in range(16):
        for pace in paces:
            pace.left(now_s)
            until_s = pace.waits_until_s(now_s, has_queue=False)
            assert until_s is not None
            now_s = until_s
            assert pace.waits_until_s(now_s, has_queue=False) is None
    assert now_s - 10.0 < 2.5


def test_a_server_that_is_left_alone_is_given_up_while_others_are_not() -> None:
    common = Grace()
    alone, other = started(8, common), started(8, common)
    waits = []
    for now_s in range(10, 18):
        alone.left(now_s)
        until_s = alone.waits_until_s(now_s, has_queue=False)
        assert until_s is not None
        waits.append(until_s - now_s)
        assert alone.waits_until_s(until_s, has_queue=False) is None
        other.left(until_s)
        other.arrived(until_s + 0.1)
    assert abs(waits[-1] - GRACE_S * GRACE_FALL**7) < 1e-6


def test_a_client_that_worked_at_a_server_is_waited_for_when_that_is_back() -> None:
    pace = Pace(Grace())
    pace.returns(64, 1.0)
    assert pace.waits_until_s(3.0, has_queue=False) == 1.0 + AWAY_S
    pace.arrived(3.0)  # a probe: time passes for it, and only for it
    assert pace.waits_until_s(3.0, has_queue=False) == 3.0 + QUIET_S
    assert pace.waits_until_s(3.0 + QUIET_S, has_queue=False) is None
    pace.left(3.1)
    assert pace.waits_until_s(4.0, has_queue=False) == 1.0 + AWAY_S
    for _ in range(64):
        assert not pace.is_settled
        pace.arrived(5.0)
        pace.feeds()
        if pace.in_flight < 64:
            assert pace.waits_until_s(5.0, has_queue=False) == 5.0 + GRACE_S
    assert pace.is_settled
    assert pace.waits_until_s(5.0, has_queue=False) is None
    assert pace.most == 64


def test_a_client_that_does_not_come_back_is_waited_for_once() -> None:
    pace = Pace(Grace())
    pace.returns(64, 1.0)
    assert pace.waits_until_s(1.0 + AWAY_S, has_queue=False) is None
    assert pace.is_settled


def test_where_no_client_worked_none_is_waited_for() -> None:
    pace = started(6)  # probes
    assert pace.most == 0
    pace = Pace(Grace())
    pace.returns(0, 1.0)
    assert pace.waits_until_s(1.0, has_queue=False) is None


def test_a_client_that_works_before_its_server_is_ready_is_back_already() -> None:
    pace = Pace(Grace())
    pace.arrived(1.0)
    pace.feeds()
    pace.returns(64, 1.01)
    assert pace.waits_until_s(1.0 + QUIET_S, has_queue=False) is None
    assert (pace.target, pace.is_settled) == (1, True)
