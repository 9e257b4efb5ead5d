"""Which faults are due, which requests they hit, and what those are answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dfexp.engines.simulated.server.faults import GARBAGE, Faults, reply
from dfexp.engines.simulated.server.text import request_key
from dfexp.params_simulated import FaultPart, Speed
from dfexp.quality import garbage


def faults(*parts: dict[str, Any], index: int = 0, seed: int = 1) -> Faults:
    return Faults([FaultPart.model_validate(part) for part in parts], index, seed)


def key(number: int) -> int:
    return request_key([{"role": "user", "content": str(number)}], 0)


def hit(one: Faults, numbers: range, text: str = "", at_s: float = 0.0) -> list[int]:
    return [number for number in numbers if one.of_request(key(number), text, at_s)]


def test_what_is_scheduled_is_due_and_what_hits_requests_is_not() -> None:
    one = faults(
        {"kind": "hang", "at_s": 50.0, "for_s": 10.0},
        {"kind": "slow"},
        {"kind": "crash", "at_s": 20.0},
        {"kind": "health", "at_s": 30.0},
        {"kind": "status", "share": 0.5},
        {"kind": "oom_at_start"},
    )
    found = [(number, part.kind) for number, part in one.due()]
    assert found == [("0", "hang"), ("1", "slow"), ("2", "crash"), ("3", "health")]


def test_a_server_that_starts_later_meets_what_still_goes_on_and_no_crash_that_is_past() -> None:
    one = faults(
        {"kind": "crash", "at_s": 20.0},
        {"kind": "crash", "at_s": 90.0},
        {"kind": "hang", "at_s": 10.0, "for_s": 30.0},
        {"kind": "health", "at_s": 15.0},
    )
    assert [part.at_s for _, part in one.due(21.0)] == [90.0, 10.0, 15.0]
    assert [part.at_s for _, part in one.due(40.0)] == [90.0, 15.0]
    assert [part.at_s for _, part in one.due(20.0)] == [20.0, 90.0, 10.0, 15.0]


def test_a_crash_that_was_met_is_not_due_again() -> None:
    parts = {"kind": "crash", "at_s": 20.0}, {"kind": "crash", "at_s": 20.0}, {"kind": "hang", "at_s": 20.0}
    one = faults(*parts)
    one.met[one.due()[0][0]] += 1
    assert [(number, part.kind) for number, part in one.due(20.0)] == [("1", "crash"), ("2", "hang")]
    again = Faults([FaultPart.model_validate(part) for part in parts], 0, 1, one.met)
    assert again.due(20.0) == one.due(20.0)


def test_a_fault_of_one_server_concerns_no_other() -> None:
    parts = ({"kind": "hang", "server": 2}, {"kind": "html", "server": 2}, {"kind": "oom_at_start", "server": 2})
    assert [len(faults(*parts, index=index).due()) for index in range(4)] == [0, 0, 1, 0]
    assert [bool(faults(*parts, index=index).of_request(1, "", 0.0)) for index in range(4)] == [
        False,
        False,
        True,
        False,
    ]
    assert [bool(faults(*parts, index=index).fails_to_start(1)) for index in range(4)] == [False, False, True, False]


@pytest.mark.parametrize(("given", "times"), [({}, 1), ({"times": 3}, 3)])
def test_the_first_starts_run_out_of_memory(given: dict[str, Any], times: int) -> None:
    one = faults({"kind": "oom_at_start", **given})
    assert [bool(one.fails_to_start(number)) for number in range(1, 6)] == [number <= times for number in range(1, 6)]
    assert not faults().fails_to_start(1)


def test_a_share_hits_so_many_and_always_the_same_on_every_server() -> None:
    part = {"kind": "status", "share": 0.1}
    first = hit(faults(part), range(5000))
    assert len(first) == pytest.approx(500, rel=0.15)
    assert hit(faults(part, index=3), range(5000)) == first
    assert hit(faults(part, seed=2), range(5000)) != first
    assert hit(faults(part), range(5000)) == first


def test_two_shares_are_drawn_apart() -> None:
    one, both = (
        {"kind": "status", "share": 0.5},
        faults({"kind": "status", "share": 0.5}, {"kind": "cut", "share": 0.5}),
    )
    assert len(hit(faults(one), range(2000))) == pytest.approx(1000, rel=0.1)
    assert len(hit(both, range(2000))) == pytest.approx(1500, rel=0.1)


def test_the_first_part_that_applies_counts() -> None:
    one = faults({"kind": "cut", "contains": "boom"}, {"kind": "never"})
    kinds = [found.kind for text in ("a boom", "nothing") if (found := one.of_request(1, text, 0.0))]
    assert kinds == ["cut", "never"]


def test_text_and_share_must_both_apply() -> None:
    part = {"kind": "garbage", "contains": "boom", "share": 0.2}
    assert hit(faults(part), range(500), "harmless") == []
    assert hit(faults(part), range(500), "a boom") == hit(faults({"kind": "garbage", "share": 0.2}), range(500))


def test_a_fault_happens_at_the_most_so_often() -> None:
    one = faults({"kind": "html", "times": 3}, {"kind": "cut", "contains": "x"})
    assert hit(one, range(10)) == [0, 1, 2]
    assert [found.kind for found in [one.of_request(1, "x", 0.0)] if found] == ["cut"]


def test_a_window_opens_and_closes() -> None:
    one = faults({"kind": "status", "at_s": 10.0, "for_s": 5.0})
    assert [at_s for at_s in (0.0, 9.9, 10.0, 14.9, 15.0) if one.of_request(1, "", at_s)] == [10.0, 14.9]


def test_a_request_may_crash_a_server_again_after_its_restart() -> None:
    one = faults({"kind": "crash", "contains": "boom"})
    assert one.due() == []
    assert [bool(one.of_request(1, text, at_s)) for text, at_s in (("fine", 0.0), ("boom", 1.0), ("boom", 99.0))] == [
        False,
        True,
        True,
    ]


def test_no_faults_hit_nothing() -> None:
    assert faults().due() == []
    assert hit(faults(), range(100)) == []


@pytest.mark.parametrize(
    ("given", "status", "kind"),
    [
        ({}, 500, "InternalServerError"),
        ({"status": 429}, 429, "TooManyRequestsError"),
        ({"status": 503}, 503, "ServiceUnavailableError"),
        ({"status": 400}, 400, "BadRequestError"),
        ({"status": 599}, 599, "UnknownError"),
    ],
)
def test_a_status_is_answered_as_sglang_words_errors(given: dict[str, Any], status: int, kind: str) -> None:
    answered, body, content_type, headers = reply(FaultPart.model_validate({"kind": "status", **given}), "max")
    assert (answered, content_type, headers) == (status, "application/json", {})
    error = json.loads(body)
    assert (error["object"], error["type"], error["code"], error["param"]) == ("error", kind, status, None)
    assert error["message"]


@pytest.mark.parametrize(
    ("retry_after_s", "speed", "shown"), [(7.0, 1.0, "7"), (0.0, 1.0, "0"), (5.0, 20.0, "0.25"), (5.0, "max", "0")]
)
def test_a_status_says_in_real_seconds_when_to_come_again(retry_after_s: float, speed: Speed, shown: str) -> None:
    *_, headers = reply(FaultPart(kind="status", status=429, retry_after_s=retry_after_s), speed)
    assert headers == {"Retry-After": shown}


def test_a_proxys_page_is_html() -> None:
    status, body, content_type, _ = reply(FaultPart(kind="html"), "max")
    assert (status, content_type) == (502, "text/html")
    assert body.startswith(b"<html>")
    with pytest.raises(json.JSONDecodeError):
        json.loads(body)


def test_garbage_is_seen_as_such() -> None:
    assert garbage(GARBAGE * 60, 60)
