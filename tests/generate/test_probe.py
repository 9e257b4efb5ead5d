"""The number of requests in flight is found by the rate: near the best, in the end, and at little cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dfexp.generate.probe import AGAIN_S, FIRST, MOST, Probe

Curve = Callable[[float], float]
CURVES: dict[str, Curve] = {
    "64 slots": lambda n: 40.0 * min(n, 64),
    "8 slots": lambda n: 40.0 * min(n, 8),
    "200 slots, each slower the more there are": lambda n: 40.0 * min(n, 200) / (1 + min(n, 200) / 150),
    "worse when it is too much": lambda n: 40.0 * min(n, 90) * (1 - 0.3 * max(0.0, n / 90 - 1)),
    "no limit": lambda n: 40.0 * n,
}
HOURS = 3600.0


class Served:
    """A server with a curve, kept full: answers come at its rate, of random lengths."""

    def __init__(self, curve: Curve, noise: float, seed: int) -> None:
        self.curve, self.noise, self.draw = curve, noise, random.Random(seed)
        self.now, self.tokens, self.best = 1000.0, 0.0, max(map(curve, range(1, MOST + 1)))
        self.values: list[int] = []

    def run(self, probe: Probe, seconds: float) -> float:
        """Serve for so long; the tokens made over those of the best number."""
        end, made = self.now + seconds, 0.0
        while self.now < end:
            tokens = min(self.draw.expovariate(1 / 800), 4000.0) + 1
            self.now += tokens / self.curve(probe.value) * max(0.1, self.draw.gauss(1, self.noise))
            made += tokens
            value = probe.value
            probe.answered(self.now, round(tokens))
            if probe.value != value:
                self.values.append(probe.value)
        return made / (seconds * self.best)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [name for name in CURVES if name != "no limit"])
def test_it_ends_near_the_best_and_costs_little(name: str, seed: int) -> None:
    served, probe = Served(CURVES[name], 0.3, seed), Probe()
    while not probe.is_settled:
        served.run(probe, 60.0)
        assert served.now < 3 * HOURS, "it must end"
    assert CURVES[name](probe.value) >= 0.75 * served.best
    assert probe.value <= 512, "noise does not make it run away"
    assert len(served.values) <= 12
    assert served.run(probe, 0.5 * AGAIN_S) > 0.7


def test_over_a_day_little_is_lost() -> None:
    for name in ("64 slots", "200 slots, each slower the more there are", "worse when it is too much"):
        served = Served(CURVES[name], 0.3, 5)
        assert served.run(Probe(), 24 * HOURS) > 0.8, (name, served.values)


def test_a_server_without_a_limit_gets_the_most() -> None:
    served, probe = Served(CURVES["no limit"], 0.1, 1), Probe()
    served.run(probe, 1 * HOURS)
    assert probe.value == MOST or not probe.is_settled
    assert max(served.values) == MOST


@pytest.mark.parametrize("room", [1, 3, 10, 40])
def test_refusals_lead_to_the_room_that_there_is(room: int) -> None:
    """Any that arrives while `room` are being served is turned away."""
    probe, now = Probe(value=48, _least=1), 0.0
    for _ in range(200):
        for in_flight in range(probe.value, room, -1):
            probe.refused(now, in_flight)
        now += 1.0
    assert probe.value == room
    assert probe.is_settled
    assert probe.answered(now, 100), "it is told"
    assert not probe.answered(now, 100), "once"


def test_a_quota_that_refuses_everything_does_not_take_it_to_the_ground() -> None:
    probe = Probe()
    for _ in range(50):
        probe.refused(1.0, 1)
    assert probe.value == FIRST // 2


def test_it_looks_again_after_a_long_time_and_after_a_restart() -> None:
    served, probe = Served(CURVES["64 slots"], 0.1, 2), Probe()
    while not probe.is_settled:
        served.run(probe, 60.0)
    found = probe.value
    served.curve, served.best = CURVES["200 slots, each slower the more there are"], 40.0 * 200 / (1 + 200 / 150)
    served.run(probe, 2 * AGAIN_S)
    assert served.curve(probe.value) > served.curve(found)
    probe.again()
    assert not probe.is_settled
    assert probe.value < max(served.values)


def test_a_server_that_was_not_kept_full_is_not_judged() -> None:
    probe, now = Probe(), 0.0
    for _ in range(2000):
        now += 1.0
        probe.answered(now, 100)
        probe.disturbed()
    assert probe.value == FIRST
    assert not probe.is_settled
