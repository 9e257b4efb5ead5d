"""What is found in simulated servers, in what real ones said, and in the reports of others; and where nothing is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from dfexp.capacity.flags import Flags
from dfexp.capacity.planner import make_plan
from dfexp.diagnose import Finding, Planned, Watched, diagnose
from dfexp.engines.simulated.core import DECODED, PREFILLED, Config, Simulator, Sizes
from dfexp.metrics import from_log, from_metrics
from dfexp.records import EngineSample, ServerLimits
from dfexp.rehearse.whole import draw
from tests.capacity.support import AFTER, BEFORE, setting
from tests.engines.simulated.support import config

DATA = Path(__file__).parent / "data" / "metrics"
PLANNED = replace(AFTER, disable_radix_cache=True, max_running_requests=157)
EVERY_S = 5.0


def play(
    server: Config,
    requests: Iterable[Sizes],
    concurrency: int,
    until_s: float,
    *,
    change: Callable[[Simulator, float], None] = lambda simulator, at_s: None,
    name: str = "a:1",
) -> list[EngineSample]:
    """Looks at a server, every five seconds, whose client keeps so many requests there; each calls `change`."""
    simulator, source = Simulator(server), enumerate(requests)
    for _ in range(concurrency):
        number, sizes = next(source)
        simulator.submit(0.0, number, *sizes)
    samples, at_s = [], 0.0
    while at_s < until_s:
        at_s += EVERY_S
        while (next_s := simulator.next_event_s()) is not None and next_s <= at_s:
            for told in simulator.advance(next_s):
                if getattr(told, "kind", "") == "finished" and (new := next(source, None)):
                    simulator.submit(told.at_s, new[0], *new[1])
        simulator.advance(at_s)
        counters = {
            "realtime_decode_tokens_total": simulator.counters[DECODED],
            "realtime_prefill_tokens_total": simulator.counters[PREFILLED],
            **{key: value for key, value in simulator.counters.items() if "realtime" not in key},
        }
        said = {key: value for key, value in (simulator.gauges(at_s) | counters).items() if value or "total" not in key}
        samples.append(EngineSample.from_json({**said, "at": at_s, "server": name}))
        change(simulator, at_s)
    return samples


def limits_of(server: Config) -> ServerLimits:
    memory = server.memory
    return ServerLimits(
        max_running_requests=memory.max_running_requests,
        max_total_num_tokens=memory.max_total_num_tokens,
        max_mamba_cache_size=memory.max_mamba_cache_size or None,
    )


RUNS = {"before": (BEFORE, 32), "after": (AFTER, 64), "planned": (PLANNED, 157)}


@cache
def reference(run: str, until_s: float = 1800.0, prompts: int = 100_000) -> Watched:
    """One server of the reference run."""
    flags, concurrency = RUNS[run]
    server = Config.of(setting(flags, concurrency=concurrency))
    requests = draw(setting(flags, concurrency=concurrency).workload, prompts, 8192)
    samples = play(server, requests, concurrency, until_s)
    given = {key: getattr(flags, key) for key in Flags.__dataclass_fields__ if getattr(flags, key) is not None}
    return Watched(name="a:1", samples=samples, limits=limits_of(server), flags=given, limit=concurrency)


@cache
def planned(run: str) -> Planned:
    flags, concurrency = RUNS[run]
    there = setting(flags, concurrency=concurrency)
    return Planned(setting=there, plan=make_plan(there))


def window(server: Watched, from_s: float, to_s: float) -> Watched:
    return replace(server, samples=[each for each in server.samples if from_s <= each.at <= to_s])


def binding(found: list[Finding], server: str | None = "a:1") -> Finding:
    """The one binding finding of a server, or of the fleet."""
    (only,) = [each for each in found if each.is_binding and each.server == server]
    return only


def kinds(found: list[Finding], server: str | None = "a:1") -> list[str]:
    return [each.kind for each in found if each.server == server]


def steadily(number: int = 24, every_s: float = 5.0, name: str = "a:1", **said: Any) -> list[EngineSample]:
    """Looks at a server that has long been at work; what is a list gives one value after the other, over and over."""
    samples = []
    for nth in range(number):
        now = {key: value[nth % len(value)] if isinstance(value, list) else value for key, value in said.items()}
        moving = {
            "gen_throughput": 1000.0 + nth % 3,
            "realtime_decode_tokens_total": 1e6 + 5000.0 * nth,
            "num_requests_total": 4000.0 + 2 * nth,
        }
        samples.append(EngineSample.from_json({**moving, **now, "at": every_s * nth, "server": name}))
    return samples


# The reference run


@pytest.mark.parametrize("run", RUNS)
def test_the_beginning_is_a_ramp(run: str) -> None:
    found = diagnose([window(reference(run), 0, 100)], rows_left=600_000, planned=planned(run))
    assert kinds(found) == ["ramping"]
    assert (found[0].server, found[0].kind, found[0].severity) == (None, "ramping", "note")


@pytest.mark.parametrize("span", [(0, 280), (0, 480), (0, 1800), (1500, 1800), (1740, 1800)])
@pytest.mark.parametrize(
    ("run", "running", "cap", "bound", "predicted", "origin", "flags"),
    [
        (
            "before", 32, 37, 1.16, 1.13, "186 slots // 5 a request = 37",
            "fleet.flags: {mamba_strategy: no_buffer, disable_radix_cache: true, max_running_requests: 134}",
        ),
        (
            "after", 64, 72, 1.12, 1.09, "216 slots // 3 a request = 72",
            "fleet.flags: {disable_radix_cache: true, max_running_requests: 157}",
        ),
    ],
)  # fmt: skip
def test_both_states_of_the_reference_run_are_limited_by_the_client(
    run: str, running: int, cap: int, bound: float, predicted: float, origin: str, flags: str, span: tuple[int, int]
) -> None:
    server = window(reference(run), *span)
    without, with_plan = diagnose([server], rows_left=600_000), diagnose([server], planned=planned(run))
    assert kinds(without) == kinds(with_plan) == ["client-limited", "request-cap"]
    for found, gain in ((without, bound), (with_plan, predicted)):
        first = binding(found)
        assert first.gain == pytest.approx(gain, abs=0.006)
        assert first.change == f"generation.concurrency: {cap}"
        assert first.numbers["num_running_reqs"] == running
        assert f"{gain - 1:.0%}" in first.evidence
        assert f"{running} requests run" in first.evidence
        assert origin in found[2].evidence
        assert server.samples[0].at <= first.window[0] < first.window[1] == server.samples[-1].at
        assert first.window[0] >= 195
    assert "predicted" in binding(with_plan).evidence
    assert "at the most" in binding(without).evidence
    assert with_plan[2].change == f"{flags} and generation.concurrency: auto"
    assert with_plan[2].gain == pytest.approx({"before": 2.79, "after": 1.76}[run], abs=0.01)
    assert "disable_radix_cache: true" in without[2].change
    assert without[2].gain is None


def test_the_planned_setting_is_as_good_as_it_gets() -> None:
    for span in ((0, 480), (0, 1800), (1500, 1800)):
        found = diagnose([window(reference("planned"), *span)], rows_left=600_000, planned=planned("planned"))
        assert kinds(found) == ["bandwidth"]
        assert (found[1].severity, found[1].change) == ("note", "")
        assert found[1].gain == pytest.approx(1.0, abs=0.03)


def test_a_queue_at_the_cap_is_the_caps() -> None:
    server = Config.of(setting(AFTER, concurrency=None))
    samples = play(server, draw(setting(AFTER, concurrency=None).workload, 100_000, 8192), 90, 900)
    there = Watched(
        name="a:1", samples=samples, limits=limits_of(server), flags={"max_running_requests": 128}, limit=90
    )
    found = diagnose([there], rows_left=600_000)
    assert kinds(found) == ["request-cap"]
    assert "216 slots // 3 a request = 72" in found[1].evidence
    flags = "fleet.flags: {disable_radix_cache: true, mamba_strategy: no_buffer, max_running_requests: 128}"
    assert found[1].change.startswith(f"{flags} and generation.concurrency: auto")
    found = diagnose([there], planned=planned("after"))
    assert kinds(found) == ["request-cap"]
    flags = "fleet.flags: {disable_radix_cache: true, max_running_requests: 157}"
    assert found[1].change == f"{flags} and generation.concurrency: auto"
    assert found[1].gain == pytest.approx(2018 / 1249, abs=0.01)


@pytest.mark.parametrize("rows_left", [0, None])
def test_the_end_is_a_drain_and_the_time_before_it_stays_steady(rows_left: int | None) -> None:
    server = reference("after", 1800.0, 600)
    ended = max(each.at for each in server.samples if each.num_running_reqs)
    late = window(server, ended - 160, ended)
    assert (late.samples[0].num_running_reqs or 0) < 64
    assert kinds(diagnose([late], rows_left=rows_left)) == ["draining"]
    starving = diagnose([late], rows_left=5000)  # then it is the client that does not keep up
    assert binding(starving).kind == "client-limited"
    assert "see its CPU" in binding(starving).change
    whole = diagnose([window(server, 0, ended)])
    assert binding(whole).kind == "client-limited"
    falls = min(each.at for each in server.samples if each.at > 300 and (each.num_running_reqs or 0) < 0.9 * 64)
    assert 195 < binding(whole).window[0] < binding(whole).window[1] < falls


def test_the_last_few_requests_of_a_run_are_no_sign_of_a_lazy_client() -> None:
    limits = ServerLimits(max_running_requests=72)
    server = Watched(name="a:1", samples=steadily(num_running_reqs=3, num_queue_reqs=0), limits=limits, limit=64)
    assert kinds(diagnose([server], rows_left=0)) == ["draining"]
    assert kinds(diagnose([server], rows_left=5000))[0] == "client-limited"


@pytest.mark.parametrize(
    ("name", "said", "cap", "slots", "words"),
    [
        ("before", {"num_running_reqs": 32, "num_queue_reqs": 0, "full_token_usage": 0.205, "mamba_usage": 0.61,
                    "gen_throughput": 670.0}, 37, 186, "186 slots // 5 a request = 37"),
        ("after", {"num_running_reqs": 64, "num_queue_reqs": 0, "full_token_usage": 0.43, "mamba_usage": 0.59,
                   "gen_throughput": 1175.0}, 72, 217, "217 slots // 3 a request = 72"),
    ],
)  # fmt: skip
def test_what_operators_reported_is_limited_by_the_client(
    name: str, said: dict[str, Any], cap: int, slots: int, words: str
) -> None:
    samples = [
        EngineSample.from_json(
            {**said, "gen_throughput": said["gen_throughput"] + nth % 3 - 1, "at": 5.0 * nth, "server": "a:1"}
        )
        for nth in range(24)
    ]
    limits = ServerLimits(max_running_requests=cap, max_mamba_cache_size=slots)
    flags = {"max_running_requests": 64 if name == "before" else 128}
    found = diagnose([Watched(name="a:1", samples=samples, limits=limits, flags=flags, limit=RUNS[name][1])])
    assert kinds(found) == ["client-limited", "request-cap"]
    assert (found[1].change, found[1].window) == (f"generation.concurrency: {cap}", (0.0, 115.0))
    assert found[1].gain == pytest.approx(cap / said["num_running_reqs"])
    assert f"state pool, {words}" in found[2].evidence
    assert "disable_radix_cache: true" in found[2].change
    assert found[1].numbers == pytest.approx({**said, "queued_share": 0.0, "max_running_requests": cap})


# Servers that were in use before, and settings that were changed


def in_use(server: Watched) -> Watched:
    """The same server, whose counters stood high when its client began."""
    base = {"num_requests_total": 5e3, "realtime_decode_tokens_total": 1e7, "realtime_prefill_tokens_total": 1e6}
    return replace(
        server,
        samples=[
            replace(each, **{name: (getattr(each, name) or 0.0) + more for name, more in base.items()})
            for each in server.samples
        ],
    )


@pytest.mark.parametrize("run", RUNS)
def test_a_ramp_on_a_server_in_use_is_a_ramp(run: str) -> None:
    server = in_use(reference(run))
    for until_s in (20, 40, 60, 90, 120, 150, 180):
        assert kinds(diagnose([window(server, 0, until_s)], rows_left=600_000)) == ["ramping"], until_s
    for span in ((0, 480), (0, 1800), (1500, 1800), (900, 1800)):
        assert "ramping" not in kinds(diagnose([window(server, *span)], rows_left=600_000)), span
    paused = [replace(each, at=each.at + 3000) for each in in_use(reference(run)).samples[:24]]
    again = replace(server, samples=[*server.samples[-12:], *paused])
    assert kinds(diagnose([again], rows_left=600_000)) == ["ramping"]


def test_seconds_of_a_request_count_where_the_kv_pool_says_nothing() -> None:
    samples = steadily(num_running_reqs=6, num_queue_reqs=0)
    server = Watched(name="a:1", samples=samples, limits=ServerLimits(max_running_requests=8), request_s=150.0)
    assert kinds(diagnose([server])) == ["ramping"]
    assert kinds(diagnose([replace(server, request_s=30.0)]))[0] == "client-limited"


def changed(late_s: float) -> Watched:
    """A server that was restarted with the faster flags, and is looked at for so long after."""
    old, new = reference("after"), reference("planned")
    pools = {"max_total_num_tokens": 293_000.0, "mamba_used_tokens": 128.0, "mamba_available_tokens": 88.0,
             "mamba_evictable_tokens": 0.0}  # fmt: skip
    before = [replace(each, max_running_requests=72, **pools) for each in old.samples]
    after = [replace(each, at=each.at + 1810, max_running_requests=157) for each in new.samples if each.at <= late_s]
    return replace(new, samples=[*before, *after])


def test_settings_that_were_changed_under_a_run_are_judged_each_by_itself() -> None:
    live = window(changed(60.0), 1570, 1870)
    assert kinds(diagnose([live], rows_left=600_000)) == ["ramping"], "not slots of now that were never to be had"
    assert kinds(diagnose([window(changed(900.0), 2400, 2700)], rows_left=600_000, planned=planned("planned"))) == [
        "bandwidth"
    ]
    whole = diagnose([changed(60.0)], planned=planned("planned"))
    assert kinds(whole) == ["client-limited", "request-cap"]
    assert (whole[1].numbers["max_running_requests"], whole[1].change) == (72, "generation.concurrency: 72")
    assert whole[1].gain == pytest.approx(72 / 64)
    assert "216 slots // 3 a request = 72" in whole[2].evidence
    assert whole[1].window[1] <= 1800


# Servers that count no tokens


def uncounted(name: str, tok_per_s: float | None, **said: Any) -> Watched:
    waits = {"server": name, "num_running_reqs": 4}
    samples = [
        EngineSample.from_json({**waits, "num_queue_reqs": 2 + nth % 2, **said, "at": 5.0 * nth}) for nth in range(24)
    ]
    samples = [
        each if each.gen_throughput is None else replace(each, gen_throughput=each.gen_throughput + nth % 2 - 0.5)
        for nth, each in enumerate(samples)
    ]
    limits = ServerLimits(max_running_requests=4)
    return Watched(name=name, samples=samples, limits=limits, tok_per_s=tok_per_s)


def test_what_nobody_counts_is_in_no_number() -> None:
    found = diagnose([uncounted("a:1", None), uncounted("a:2", None)])
    assert {"tok_per_s", "gen_throughput", "num_requests_total", "prefill_share"}.isdisjoint(found[1].numbers)
    assert {each.kind for each in found} == {"request-cap"}


@pytest.mark.parametrize(
    ("slow", "others", "words"),
    [
        ({"tok_per_s": 20.0}, {"tok_per_s": 90.0}, "20 tok/s of answers, as the client counts"),
        ({"tok_per_s": None, "gen_throughput": 20.0}, {"tok_per_s": None, "gen_throughput": 90.0}, "gen_throughput 20"),
        ({"tok_per_s": 20.0}, {"tok_per_s": None, "gen_throughput": 90.0}, None),  # of two sources
        ({"tok_per_s": 80.0}, {"tok_per_s": 90.0}, None),  # noise
        ({"tok_per_s": None}, {"tok_per_s": 90.0}, None),
    ],
)
def test_siblings_without_counters(slow: dict[str, Any], others: dict[str, Any], words: str | None) -> None:
    servers = [uncounted("a:1", **slow), *(uncounted(f"a:{nth}", **others) for nth in (2, 3, 4))]
    told = [each for each in diagnose(servers) if each.kind == "slow server"]
    assert [each.server for each in told] == ["a:1"] * (words is not None)
    assert all(words in each.evidence and each.gain == pytest.approx(4.5) for each in told if words)


# Other limits


def of_small_pool(**flags: Any) -> list[Finding]:
    """What is found in a server whose KV pool holds a third of what its request cap would need."""
    server = config(tokens=60_000, cap=64, **flags)
    samples = play(server, draw(setting(AFTER, concurrency=None).workload, 9000, 8192), 64, 1200)
    return diagnose([Watched(name="a:1", samples=samples, limits=limits_of(server), limit=64)], rows_left=9000)


def test_retractions() -> None:
    found = of_small_pool()
    assert kinds(found) == ["retraction"]
    assert found[1].severity == "limit"
    assert "schedule_conservativeness" in found[1].change
    assert "9 were put back for want of KV room, 184 finished" in found[1].evidence


def test_admission_that_keeps_kv_room() -> None:
    found = of_small_pool(schedule_conservativeness=2.0)
    assert kinds(found) == ["KV pool"]
    assert found[1].numbers["full_token_usage"] > 0.7
    assert found[1].numbers["num_running_reqs"] < 40
    assert "num_retracted_requests_total" not in found[1].numbers, "nobody has told of any"


def test_prefills_that_take_most_of_the_time() -> None:
    server = config(tokens=600_000, cap=48)
    requests = ((8000, 60 + 20 * (number % 7), 200) for number in range(10_000))
    samples = play(server, requests, 60, 1200)
    found = diagnose([Watched(name="a:1", samples=samples, limits=limits_of(server), limit=60)], rows_left=9000)
    assert kinds(found) == ["prefill"]
    assert found[1].gain == pytest.approx(1 / (1 - found[1].numbers["prefill_share"]))
    assert 0.8 < found[1].numbers["prefill_share"] < 0.98


def fleet(slow: float = 1.0, hung: bool = False, until_s: float = 900.0) -> list[Watched]:
    """Four servers like the reference run's; something befalls the first one after ten minutes."""

    def change(simulator: Simulator, at_s: float) -> None:
        if at_s == 600:
            simulator.slow(slow)
            simulator.hung = hung

    servers = []
    for nth in range(4):
        server = Config.of(setting(AFTER, concurrency=64))
        requests = draw(setting(AFTER, concurrency=64).workload, 9000, 8192, seed=nth)
        befalls = {} if nth else {"change": change}
        samples = play(server, requests, 64, until_s, name=f"a:{nth + 1}", **befalls)
        servers.append(Watched(name=f"a:{nth + 1}", samples=samples, limits=limits_of(server), limit=64))
    return servers


@cache
def three_fleets() -> dict[str, list[Watched]]:
    return {"healthy": fleet(), "slow": fleet(slow=5.0), "hung": fleet(hung=True)}


def test_a_server_that_is_slower_than_its_siblings() -> None:
    servers = [window(each, 660, 900) for each in three_fleets()["slow"]]
    found = diagnose(servers, rows_left=9000)
    (slow,) = [each for each in found if each.kind == "slow server"]
    assert (slow.server, slow.severity, slow.is_binding) == ("a:1", "fault", False)
    assert slow.gain == pytest.approx(5.0, rel=0.1)
    assert found[0].kind == "client-limited"
    assert found[0].evidence.startswith("4 of 4 servers")


def test_a_hung_server_behind_a_green_health_check() -> None:
    servers = three_fleets()["hung"]
    assert not [each for each in diagnose([window(each, 300, 640) for each in servers]) if each.severity == "fault"]
    found = diagnose([window(each, 300, 900) for each in servers], rows_left=9000)
    assert binding(found).kind == "stalled"
    assert "no token for 300 s" in binding(found).evidence
    assert binding(found, "a:2").kind == "client-limited"
    assert binding(found, None).evidence.startswith("3 of 4 servers")


@pytest.mark.parametrize("span", [(300, 360), (300, 600), (500, 560), (0, 900)])
def test_healthy_servers_are_not_slow(span: tuple[int, int]) -> None:
    found = diagnose([window(each, *span) for each in three_fleets()["healthy"]], rows_left=9000)
    assert {each.kind for each in found} == {"client-limited", "request-cap"}
    assert found[0].gain == pytest.approx(72 / 64)


def test_much_less_room_than_planned() -> None:
    server = window(reference("after"), 1500, 1800)
    small = replace(server, limits=replace(server.limits, max_running_requests=36, max_mamba_cache_size=108))
    found = [each for each in diagnose([small], planned=planned("after")) if each.kind == "small pool"]
    assert [each.severity for each in found] == ["fault"]
    assert "max_running_requests 36 of 72 planned, max_mamba_cache_size 108 of 216 planned" in found[0].evidence


@pytest.mark.parametrize("state", ["down", "suspect", "quarantined"])
def test_a_server_that_is_away(state: str) -> None:
    found = diagnose([replace(window(reference("after"), 1500, 1800), state=state)])
    assert kinds(found) == ["unhealthy"]
    assert state in found[1].evidence


@pytest.mark.parametrize(("state", "fault"), [("ready", []), ("suspect", ["unhealthy"])])
def test_a_server_that_rejects_rows_is_told_in_its_words_and_judged_all_the_same(state: str, fault: list[str]) -> None:
    server = replace(window(reference("after"), 1500, 1800), state=state, rejected=9, rejection="400: not here. " * 99)
    found = diagnose([server])
    assert kinds(found) == [*fault, "rejects rows", *["client-limited", "request-cap"] * (not fault)]
    told = next(each for each in found if each.kind == "rejects rows")
    assert (told.severity, told.server, told.is_binding) == ("fault", "a:1", False)
    assert "rejected 9 rows in a row while others served, or were waited for, " in told.evidence
    assert "the last with: 400: not here. " in told.evidence
    assert len(told.evidence) < 400
    assert "compare its model" in told.change


def test_a_server_that_is_being_changed_is_left_alone() -> None:
    assert diagnose([replace(window(reference("after"), 1500, 1800), state="draining")], rows_left=9000) == []


def test_the_fleets_gain_counts_the_servers_that_gain() -> None:
    server = window(reference("after"), 1500, 1800)
    servers = [replace(server, name=f"a:{nth}") for nth in range(4)]
    found = diagnose([*servers[:3], replace(servers[3], state="down")])
    assert [each.kind for each in found if each.is_binding] == ["client-limited", "unhealthy", *["client-limited"] * 3]
    assert found[0].server is None
    assert found[0].gain == pytest.approx(1 + 0.125 * 3 / 4)
    assert found[0].numbers == {"servers": 4, "limited": 3}
    json.dumps([asdict(each) for each in found], allow_nan=False)


# Reports of others: A1 to B29


def test_a1_fewer_requests_than_asked_for() -> None:
    limits = ServerLimits(max_running_requests=9, max_mamba_cache_size=47)
    samples = steadily(num_running_reqs=9, num_queue_reqs=23, full_token_usage=0.2, mamba_usage=0.7)
    flags = {"max_running_requests": 32, "mamba_strategy": "extra_buffer"}
    found = diagnose([Watched(name="a:1", samples=samples, limits=limits, flags=flags, limit=32)])
    assert kinds(found) == ["request-cap"]
    assert "state pool, 47 slots // 5 a request = 9" in found[1].evidence
    assert (
        "fleet.flags: {disable_radix_cache: true, mamba_strategy: no_buffer, max_running_requests: 32}"
        in found[1].change
    )


@pytest.mark.parametrize(
    "still", [{"num_running_reqs": 1, "num_queue_reqs": 1}, {"num_running_reqs": 0, "num_queue_reqs": 0}]
)
def test_a3_a_scheduler_that_waits_for_ever(still: dict[str, Any]) -> None:
    frozen: dict[str, Any] = {"gen_throughput": 31.0, "realtime_decode_tokens_total": 5e5, "num_requests_total": 90.0}
    samples = steadily(45, **frozen, **still, full_token_usage=0.98)
    found = diagnose(
        [Watched(name="a:1", samples=samples, limits=ServerLimits(max_running_requests=8), long_in_flight=4)]
    )
    assert binding(found).kind == "stalled"
    assert "no token for 220 s, and 4 sent long ago" in binding(found).evidence


@pytest.mark.parametrize(("answers", "garbage"), [(400, 400), (6, 6), (500, 31)])
def test_a9_a11_garbage_with_green_health(answers: int, garbage: int) -> None:
    samples = steadily(num_running_reqs=6, num_queue_reqs=0, mamba_usage=1.0)
    limits = ServerLimits(max_running_requests=6, max_mamba_cache_size=6)
    server = Watched(name="a:1", samples=samples, limits=limits, answers=answers, garbage=garbage)
    found = diagnose([server])
    assert kinds(found) == ["garbage output"]
    assert f"{garbage} of {answers} answers" in found[1].evidence
    assert "garbage output" not in kinds(diagnose([replace(server, answers=500, garbage=2)]))  # some answers loop


def test_a12_a_cap_that_leaves_a_fifth_of_the_slots() -> None:
    samples = steadily(
        60, num_running_reqs=[1, 2, 4, 6, 8, 8, 8, 6, 8, 8], num_queue_reqs=[0, 0, 0, 0, 3, 2, 0, 0, 2, 1],
        mamba_usage=[0.1, 0.2, 0.4, 0.59, 0.8, 0.8, 0.8, 0.59, 0.8, 0.8], full_token_usage=0.3,
    )  # fmt: skip
    found = diagnose(
        [Watched(name="a:1", samples=samples, limits=ServerLimits(max_running_requests=8, max_mamba_cache_size=40))]
    )
    assert kinds(found) == ["request-cap"]
    assert "40 slots // 5 a request = 8" in found[1].evidence
    assert "state usage 0.80" in found[1].evidence


def test_a14_slots_that_leak() -> None:
    samples = steadily(
        num_running_reqs=4, num_queue_reqs=46, mamba_usage=1.0, mamba_used_tokens=90, full_token_usage=0.4
    )
    limits = ServerLimits(max_running_requests=30, max_mamba_cache_size=90)
    found = diagnose([Watched(name="a:1", samples=samples, limits=limits)])
    assert kinds(found) == ["state pool"]
    assert "for each that runs 22.5 are held" in found[1].evidence
    assert found[1].change.startswith("restart it")


def test_a16_requests_that_the_server_has_lost() -> None:
    lost = steadily(num_running_reqs=0, num_queue_reqs=0, gen_throughput=0, realtime_decode_tokens_total=1e6,
                    num_requests_total=500)  # fmt: skip
    server = Watched(name="a:1", samples=lost, limits=ServerLimits(max_running_requests=64), limit=64)
    assert diagnose([server]) == []
    found = diagnose([replace(server, long_in_flight=12)])
    assert kinds(found) == ["stalled"]
    assert "12 sent long ago" in found[1].evidence


def test_b29_a_full_pool_on_four_ranks() -> None:
    page = from_metrics((DATA / "FIXTURE_tp4_replicated_gauges.prom").read_text(), at=0.0, server="a:1")
    assert page is not None
    samples = [replace(page, at=5.0 * nth) for nth in range(24)]
    found = diagnose([Watched(name="a:1", samples=samples, limits=ServerLimits(max_running_requests=32))])
    assert kinds(found) == ["KV pool"]
    assert "KV usage 0.92" in found[1].evidence


# What real servers said


def looks(name: str) -> list[EngineSample]:
    """Pages of /metrics, each after a line with its second."""
    pages = (DATA / name).read_text().split("--- t=")[1:]
    parts = (page.partition("\n") for page in pages)
    return [sample for at, _, page in parts if (sample := from_metrics(page, at=float(at), server="a:1"))]


@pytest.mark.parametrize("source", ["log", "pages"])
def test_a_real_server_at_the_cap_of_its_state_pool(source: str) -> None:
    log = (DATA / "0.5.12_hybrid_pressure.log").read_text()
    samples = from_log(log, server="a:1") if source == "log" else looks("0.5.12_hybrid_pressure_series.txt")
    limits = ServerLimits(max_running_requests=6, max_total_num_tokens=700, max_mamba_cache_size=20)
    full = [each for each in samples if each.at < samples[0].at + (32 if source == "log" else 22)]
    found = diagnose([Watched(name="a:1", samples=full, limits=limits, flags={"max_running_requests": 8})])
    assert kinds(found) == ["request-cap"]
    assert "20 slots // 3 a request = 6" in found[1].evidence
    assert "6 requests run, 6 can, 7 wait" in found[1].evidence
    assert "state usage 0.60" in found[1].evidence
    end = [each for each in samples if each.at > samples[0].at + 36]
    assert binding(diagnose([Watched(name="a:1", samples=end, limits=limits)])).kind in ("draining", "KV pool")


def test_a_real_server_that_admission_holds_back() -> None:
    samples = from_log((DATA / "0.5.23_dense_retraction.log").read_text(), server="a:1")
    limits = ServerLimits(max_running_requests=16, max_total_num_tokens=700)
    found = diagnose([Watched(name="a:1", samples=samples, limits=limits, flags={"max_running_requests": 16})])
    assert kinds(found) == ["KV pool"]
    assert "4 requests run, 16 can" in found[1].evidence


PAGES = sorted(DATA.glob("*.prom"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_one_look_tells_nothing(page: Path) -> None:
    sample = from_metrics(page.read_text(), at=0.0, server="a:1")
    assert sample is not None
    for cap in (None, 16):
        limits = ServerLimits(max_running_requests=cap)
        assert diagnose([Watched(name="a:1", samples=[sample], limits=limits, limit=64)], rows_left=100) == []


# Where nothing is wrong


def notes_only(found: list[Finding]) -> bool:
    return {each.severity for each in found} <= {"note"}


def test_waves_of_equal_lengths_are_healthy() -> None:
    server, requests = config(tokens=600_000, cap=64), repeat((500, 2000, 4000))
    servers = [
        Watched(name=f"a:{nth}", samples=play(server, requests, 64, 1500, name=f"a:{nth}"), limits=limits_of(server),
                flags={"max_running_requests": 64}, limit=64)
        for nth in range(2)
    ]  # fmt: skip
    for span in ((0, 1500), (900, 1500), (1000, 1060), (1050, 1110), (1100, 1160), (1200, 1500)):
        # One of them is looked at half a wave later.
        late = replace(servers[1], samples=[replace(each, at=each.at + 55) for each in servers[1].samples])
        found = diagnose([window(servers[0], *span), window(late, *span)], rows_left=9000)
        assert {each.kind for each in found} <= {"request-cap", "ramping"}, span
        assert "slow server" not in {each.kind for each in found}


def test_a_restart_in_the_window() -> None:
    before, after = (window(reference("after"), *span).samples for span in ((1000, 1800), (0, 150)))
    again = [replace(each, at=each.at + 1900) for each in after]
    found = diagnose([replace(reference("after"), samples=[*before, *again])], rows_left=9000)
    assert kinds(found) == ["client-limited", "request-cap"]
    assert found[0].window == (1000, 1800)
    ramp = diagnose([replace(reference("after"), samples=[*before[-10:], *again])], rows_left=9000)
    assert kinds(ramp) == ["ramping"]
    assert ramp[0].window[0] == 1905


def test_a_run_of_many_restarts_is_judged_by_its_steady_time() -> None:
    whole = reference("after").samples
    samples = [replace(each, at=each.at + 2000 * nth) for nth in range(5) for each in whole]
    found = diagnose([replace(reference("after"), samples=samples)])
    assert kinds(found) == ["client-limited", "request-cap"]
    assert found[0].window[1] - found[0].window[0] > 1500


def test_looks_that_are_missing() -> None:
    server = window(reference("after"), 600, 1800)
    gaps = replace(server, samples=[each for each in server.samples if not 900 < each.at < 1020 and each.at % 35])
    found = diagnose([gaps], rows_left=9000)
    assert kinds(found) == ["client-limited", "request-cap"]
    assert found[0].gain == pytest.approx(72 / 64)


def test_a_server_that_tells_nothing_or_has_nothing_to_do() -> None:
    idle = steadily(num_running_reqs=0, num_queue_reqs=0, gen_throughput=0, realtime_decode_tokens_total=5e5)
    silent = [EngineSample(at=5.0 * nth, server="a:1") for nth in range(30)]
    bare = steadily(num_running_reqs=6, num_queue_reqs=0)  # no cap is known, so none can be named
    for samples in ([], silent, idle, bare):
        assert diagnose([Watched(name="a:1", samples=samples, limit=64)], rows_left=9000) == []
    assert diagnose([]) == []


@pytest.mark.parametrize(("seconds", "expected"), [(30, False), (55, False), (60, True)])
def test_an_idle_servers_old_gauges_are_no_stall(seconds: int, expected: bool) -> None:
    kept = steadily(
        seconds // 5 + 1, num_running_reqs=6, num_queue_reqs=0, gen_throughput=900, realtime_decode_tokens_total=1e6,
        num_requests_total=70,
    )  # fmt: skip
    found = diagnose([Watched(name="a:1", samples=kept, limits=ServerLimits(max_running_requests=6))], rows_left=0)
    assert ("stalled" in kinds(found)) is expected


def test_llamacpp() -> None:
    page = from_metrics((DATA / "llamacpp_busy.prom").read_text(), at=0.0, server="a:1")
    assert page is not None
    samples = [replace(page, at=5.0 * nth) for nth in range(24)]
    found = diagnose([Watched(name="a:1", samples=samples, limits=ServerLimits(max_running_requests=2), limit=4)])
    assert kinds(found) == ["request-cap"]
    assert "tok/s" not in found[0].evidence, "it counts no tokens, which is not none"


@pytest.mark.parametrize(
    ("busy", "finished", "found"),
    [(2, 0, "request-cap"), (1, 0, "ramping"), (1, 1, "ramping"), (1, 2, "client-limited")],
)
def test_llamacpps_requests_that_take_longer_than_samples_are_kept(busy: int, finished: int, found: str) -> None:
    """Its slots are all in use, or as many answers as run at once are over: what nobody sees the end of is no ramp."""
    page = from_metrics((DATA / "llamacpp_busy.prom").read_text(), at=0.0, server="a:1")
    assert page is not None
    server = Watched(
        name="a:1", samples=[replace(page, at=5.0 * nth, num_running_reqs=busy, num_queue_reqs=0) for nth in range(60)],
        limits=ServerLimits(max_running_requests=2), limit=4, request_s=900.0, finished=finished,
    )  # fmt: skip
    assert kinds(diagnose([server], rows_left=600))[0] == found
