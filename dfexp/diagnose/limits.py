"""The rules: from samples to phases, from these to faults and limits, and the numbers that decide."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from statistics import fmean, median, mode, quantiles
from typing import Any, Literal

from dfexp.diagnose.findings import Finding, Planned, Watched
from dfexp.estimate import server_rate
from dfexp.metrics import COUNTERS, stretches
from dfexp.records import EngineSample, ServerLimits

Phase = Literal["idle", "unknown", "ramping", "steady", "draining"]
STALLED_S = 60.0
"""A server that has work and moves no counter for so long is stuck; an idle one's gauges keep their values for 30 s."""
# Of a steady state at least: samples, seconds; seconds without work that are idle; FLOPs per byte of GPUs, about: a
# prefilled token takes a running / 200th of the time of a decoded one. Characters of a server's words in evidence.
_LEAST_SAMPLES, _LEAST_S, _IDLE_S, _FLOPS_PER_BYTE, _WORDS = 4, 15.0, 30.0, 200, 200
# Shares: of the cap; of the level, where ramp and drain are cut; a trend; of samples with a queue, requests, answers;
# of what was computed, what is still held where requests began together.
_FULL, _NEAR, _CHANGED, _QUEUED, _RETRACTED, _GARBAGE, _KEPT = 0.97, 0.9, 0.05, 0.25, 0.02, 0.02, 0.5
# A gain; siblings' rate, and before as many have finished as run; the plan's rate and room; usages: of the KV pool that
# admission allows, and that tells even without a queue; of a state pool without a free slot.
_WORTH, _SLOWER, _MUCH_SLOWER, _LESS, _ADMITTED, _CROWDED, _NO_SLOT = 1.03, 0.9, 0.6, 0.75, 0.8, 0.85, 0.99
_POOLS = ("max_running_requests", "max_total_num_tokens", "max_mamba_cache_size")
_RATES, _PUT_BACK = ("tok_per_s", "gen_throughput", "client_tok_per_s"), "num_retracted_requests_total"
_SIGNS = (*COUNTERS, "generation_tokens_total", "gen_throughput", "kv_used_tokens")
_GAUGES = ("num_running_reqs", "num_queue_reqs", "full_token_usage", "token_usage", "mamba_usage", "mamba_used_tokens")
_SAID = {
    "num_running_reqs": "{:.0f} requests run", "max_running_requests": "{:.0f} can",
    "num_queue_reqs": "{:.0f} wait", "full_token_usage": "KV usage {:.2f}",
    "mamba_usage": "state usage {:.2f}", "tok_per_s": "{:,.0f} tok/s", "gen_throughput": "gen_throughput {:,.0f} tok/s",
    "client_tok_per_s": "{:,.0f} tok/s of answers, as the client counts",
}  # fmt: skip
_CHANGES = {
    "rejects rows": "compare its model, version and flags with the others'; until it answers a row it gets few",
    "unhealthy": "see its log", "stalled": "restart it; a run does so after generation.stall_s",
    "garbage output": "compare its answers without disable_radix_cache, speculation and attention_backend",
    "small pool": "compare flags, version and free memory with the plan's", "slow server": "see its GPU's clocks",
    "retraction": "fleet.flags: {schedule_conservativeness: 1.3}, or 1.3 times what it is, so that fewer are admitted",
    "state pool": "restart it if it holds more than requests need, else raise fleet.flags.max_mamba_cache_size",
    "KV pool": "generation.max_tokens nearer to real answers: admission reserves up to 4,096 tokens of it",
    "prefill": "fleet.flags.chunked_prefill_size, as `dfexp plan` ranks it",
}  # fmt: skip


def phase(server: Watched, *, may_drain: bool = True) -> tuple[Phase, Sequence[EngineSample]]:
    """What a server does at the end of its samples, or did steadily for half of them; and the samples that show it: of
    several steady stretches, between which it was restarted, changed or idle, the longest; only what is surely steady.

    Ramping: requests still come to run, or fewer have finished since the start than run now. Draining: they run out.
    Unknown: too few to tell. Args: may_drain, False while prompts are left: what runs falls by the client's doing then.
    """
    told = [each for each in server.samples if each.num_running_reqs is not None]
    # A line of a prefill, which has no rate, leaves out whom it has just admitted.
    told = [each for each in told if each.gen_throughput is not None] or told
    busy = [each for each in told if each.num_running_reqs or each.num_queue_reqs]
    found = [_judged(part, server, may_drain=may_drain) for part in stretches(busy, idle_s=_IDLE_S)]
    steady = [each for each in found if each[0] == "steady"]
    if steady and sum(len(samples) for _, samples in steady) >= len(told) / 2:
        return max(steady, key=lambda each: len(each[1]))
    return found[-1] if found and told[-1].at - busy[-1].at <= _IDLE_S else ("idle", told)


def _judged(part: Sequence[EngineSample], server: Watched, *, may_drain: bool) -> tuple[Phase, Any]:
    """The phase of one stretch of work, and its samples."""
    level, first = sorted(_values(part, "num_running_reqs"))[len(part) * 3 // 4], part[0]
    request_s, cap = server.request_s, server.limits.max_running_requests
    is_past = first.gen_throughput is None and (server.finished > level or 0 < (cap or 0) * _FULL <= level)
    body = [each for each in part if is_past or each.at >= first.at + (request_s or 0.0)]
    if any(_values(part, name) for name in COUNTERS):
        kept, before = _kept(part, level), next(iter(_values(part, "num_requests_total")), 0.0)
        is_start = all((each.num_running_reqs or 0) < level / 2 for each in part[:2]) or (kept or 0.0) > _KEPT
        told = body if kept is None and request_s else part
        body = [each for each in told if (each.num_requests_total or 0) - before * is_start >= level]
    full = [place for place, each in enumerate(body) if (each.num_running_reqs or 0) >= _NEAR * level] or [0]
    end = full[-1] + 1 if may_drain and not part[-1].num_queue_reqs else len(body)
    drains, body = end < len(body), body[full[0] : end]
    while len(body) >= _LEAST_SAMPLES and body[-1].at - body[0].at >= _LEAST_S:
        half, trend = len(body) // 2, _trend(_values(body, "num_running_reqs"))
        drains = trend < 0 and may_drain and not any(each.num_queue_reqs for each in body[half:])
        if not trend or (trend < 0 and not drains):
            return "steady", body[half:] if trend else body
        body = body[:half] if drains else body[half:]
    is_told = len(part) >= _LEAST_SAMPLES and part[-1].at - first.at >= _LEAST_S
    return ("draining" if drains else "ramping") if is_told else "unknown", part


def _kept(part: Sequence[EngineSample], level: float) -> float | None:
    """Of tokens computed until half as many finished as run, the share still held: most where all began together."""
    most = next(iter(_values(part, "num_requests_total")), 0.0) + level / 2
    early = [each for each in part if (each.num_requests_total or 0.0) <= most]
    told = (_values(early, name) for name in ("kv_used_tokens", *COUNTERS[1:]))
    held, *made = (values[-1] - values[0] if values else None for values in told)
    return None if held is None or not any(made) else held / sum(filter(None, made))


def _trend(running: Sequence[float]) -> int:
    """1: the second half clearly runs more than the first, -1: fewer, 0: neither."""
    half = len(running) // 2
    (low, middle, high), (low2, middle2, high2) = (quantiles(part, n=4) for part in (running[:half], running[half:]))
    differs = abs(middle2 - middle) >= max(1.0, _CHANGED * middle)
    return int(differs and low2 >= high) - int(differs and high2 <= low)


def _values(samples: Sequence[EngineSample], name: str) -> list[float]:
    return [value for each in samples if (value := getattr(each, name)) is not None]


def diagnose(
    servers: Sequence[Watched], *, rows_left: int | None = None, planned: Planned | None = None
) -> list[Finding]:
    """What is worth knowing of these servers: the fleet's binding finding, then by severity. Empty: nothing is known.

    Args: rows_left, prompts that were not sent at the end of the samples, None where nobody counted, and for a run that
    is over and judged as a whole: by the longest steady time and the room of then, else since its request cap was last
    changed; planned, what the capacity model says of each of these servers.
    """
    few_left = rows_left is not None and rows_left < sum(each.limit or 0 for each in servers if each.state == "ready")
    found, steady = list[Finding](), list[tuple[Watched, Finding]]()
    for server in servers if rows_left is None else map(_at_present, servers):
        found += (faults := _faults(server, planned))
        kind, samples = phase(server, may_drain=few_left or rows_left is None)
        if kind in ("idle", "unknown") or server.state != "ready" or any(each.is_binding for each in faults):
            continue
        then = _as_it_was(server, samples[-1])
        model = planned if then.flags is server.flags else None
        seen = _seen(then, samples, model)
        kind = "draining" if few_left and _has_free(seen) else kind
        steady += [(then, seen)] * (kind == "steady")
        found += _limits(then, seen, model) if kind == "steady" else [_told(seen, kind, "Not a steady state.")]
    found += _slow(steady)
    found.sort(key=lambda each: (("fault", "limit", "note").index(each.severity), not each.is_binding))
    return _fleet([each for each in found if each.is_binding], len(servers)) + found


def _at_present(server: Watched) -> Watched:
    """A server without what it said while it had another request cap than at last."""
    caps = {None, *_values(server.samples, _POOLS[0])[-1:]}
    return replace(server, samples=[*takewhile(lambda it: it.max_running_requests in caps, server.samples[::-1])][::-1])


def _as_it_was(server: Watched, at: EngineSample) -> Watched:
    """A server at a time; while it had another cap than now, its flags and the client's limit are not known."""
    cap, now = at.max_running_requests, server.limits.max_running_requests
    if cap in (None, now):
        return server
    slots = at.mamba_used_tokens, at.mamba_available_tokens, at.mamba_evictable_tokens
    sizes = [int(size or 0) or None for size in (cap, at.max_total_num_tokens, sum(filter(None, slots)))]
    limits = ServerLimits(max_running_requests=sizes[0], max_total_num_tokens=sizes[1], max_mamba_cache_size=sizes[2])
    return replace(server, limits=limits, flags={} if now else server.flags, limit=None if now else server.limit)


def _faults(server: Watched, planned: Planned | None) -> list[Finding]:
    """A server that is away, or gets nowhere behind a green health check, or answers garbage, or has little room."""
    still_s, memory = _still_s(server), planned.plan.current.memory if planned else server.limits
    room = [(name, getattr(server.limits, name) or 0, getattr(memory, name) or 0) for name in _POOLS]
    short = [f"{name} {there:,} of {plan:,} planned" for name, there, plan in room if 0 < there < _LESS * plan]
    about = Finding(kind="", server=server.name, severity="fault", evidence=f"{server.name}: ")
    cases = (
        (server.state in ("down", "suspect", "quarantined"), "unhealthy", f"it is {server.state} and gets no prompts."),
        (still_s >= STALLED_S, "stalled", f"no token for {still_s:.0f} s, and {server.long_in_flight} sent long ago."),
        (server.garbage >= max(3, _GARBAGE * server.answers), "garbage output",
         f"{server.garbage} of {server.answers} answers, all with HTTP 200."),
    )  # fmt: skip
    found = [_told(about, kind, words) for is_so, kind, words in cases if is_so][:1]
    said = f"it rejected {server.rejected} rows in a row while others served, or were waited for, the last with: "
    said += server.rejection
    beside = (server.rejected, "rejects rows", said[:_WORDS]), (short, "small pool", ", ".join(short))
    return found + [_told(about, kind, f"{said.rstrip('.')}.", is_binding=False) for so, kind, said in beside if so]


def _still_s(server: Watched) -> float:
    """For how long there was work and nothing moved; 0 where samples cannot tell."""
    still = []
    for each in reversed(server.samples):
        works = each.num_running_reqs or each.num_queue_reqs or (server.long_in_flight and each.num_running_reqs == 0)
        tells = each.gen_throughput is not None or each.realtime_decode_tokens_total is not None
        if not works or not tells or any(getattr(each, sign) != getattr(server.samples[-1], sign) for sign in _SIGNS):
            break
        still.append(each.at)
    return still[0] - still[-1] if still else 0.0


def _seen(server: Watched, samples: Sequence[EngineSample], planned: Planned | None) -> Finding:
    """What a server shows over one phase: numbers, and the beginning of a sentence, for findings to be made of."""
    numbers, queue, cap = dict[str, float](), _values(samples, "num_queue_reqs"), server.limits.max_running_requests
    numbers |= {"queued_share": sum(map(bool, queue)) / len(queue)} if queue else {}
    meant = [each for each in samples if each.num_queue_reqs or numbers.get("queued_share", 0.0) < _QUEUED]
    numbers |= {name: median(values) for name in _GAUGES if (values := _values(meant, name))}
    if "mamba_usage" not in numbers and "token_usage" in numbers:
        numbers.setdefault("full_token_usage", numbers["token_usage"])  # the only pool that there is
    for name in (*COUNTERS, _PUT_BACK):  # of a server that counts, each is there from the first time on
        numbers |= {name: values[-1] - (getattr(samples[0], name) or 0.0)} if (values := _values(samples, name)) else {}
    running, times = max(1.0, numbers["num_running_reqs"]), [each.at for each in samples]
    rate = server_rate([(times, [each.realtime_decode_tokens_total for each in samples])], times[0], times[-1])
    told = _values(samples, "gen_throughput")
    rates = rate.value if rate else None, fmean(told) if told else None, server.tok_per_s
    numbers |= ([{name: value} for name, value in zip(_RATES, rates, strict=True) if value is not None][:1] or [{}])[0]
    numbers |= ({"tok_per_s_error": rate.error} if rate else {}) | ({_POOLS[0]: cap} if cap else {})
    numbers |= {"planned_tok_per_s": planned.tok_per_s(running)} if planned else {}
    if numbers.keys() >= {*COUNTERS[1:]}:
        prefilled = numbers[COUNTERS[2]] * running / _FLOPS_PER_BYTE
        numbers["prefill_share"] = prefilled / max(1.0, prefilled + numbers[COUNTERS[1]])
    said = [form.format(numbers[name]) for name, form in _SAID.items() if name in numbers]
    evidence = f"{server.name}: {', '.join(said)} ({len(samples)} samples, {times[-1] - times[0]:.0f} s). "
    window = times[0], times[-1]
    return Finding(kind="", server=server.name, severity="note", evidence=evidence, numbers=numbers, window=window)


def _told(about: Finding, kind: str, words: str, change: str | None = None, **more: Any) -> Finding:
    """A finding of what was seen."""
    change = _CHANGES.get(kind, "") if change is None else change
    severity = about.severity if about.severity == "fault" or not change else "limit"
    return replace(about, kind=kind, evidence=about.evidence + words, change=change, severity=severity, **more)


def _has_free(seen: Finding) -> bool:
    """Whether slots are free and none waits for them, as far as it says."""
    cap, queued = seen.numbers.get("max_running_requests", 0.0), seen.numbers.get("queued_share", 1.0)
    return seen.numbers["num_running_reqs"] < _FULL * cap and queued < _QUEUED


def _limits(server: Watched, seen: Finding, planned: Planned | None) -> list[Finding]:
    """What limits a server at a steady state, and what would next."""
    numbers, cap, limit = seen.numbers, server.limits.max_running_requests or 0, server.limit
    running, now = numbers["num_running_reqs"], numbers.get("planned_tok_per_s")
    change, gain = _lift(server, seen, planned)
    pays = bool(change) and (gain or _WORTH) >= _WORTH
    if _has_free(seen):
        most, how = cap / max(1.0, running), "at the most"
        if planned and now:
            most, how = planned.tok_per_s(cap) / now, "predicted"
        lags = f"the client may keep {limit} there and does not: see its CPU and its open-file limit"
        more = lags if limit and limit * _NEAR > running else f"generation.concurrency: {cap}"
        words = f"Slots are free and none waits: {most - 1:+.0%} with all in use ({how})."
        if most >= _WORTH:
            client = _told(seen, "client-limited", words, more, gain=most)
            words = f"The cap, which limits it next: {_origin(server)[0]}."
            return [client] + [_told(seen, "request-cap", words, change, gain=gain, is_binding=False)] * pays
    kind, words, bound = _inside(server, seen)
    measured = max(numbers.get(name, 0.0) for name in _RATES[:2])
    if kind in ("request-cap", "KV pool") and now and not pays and measured >= _LESS * now:
        kind, words = "bandwidth", f"As good as it gets: no flags of the plan gain more. {words}"
    new = change if pays and (now or kind == "request-cap") else None
    return [_told(seen, kind, words, new, gain=gain or bound)] if kind else []


def _inside(server: Watched, seen: Finding) -> tuple[str, str, float | None]:
    """What in the server limits it, "" where nothing tells; the words for it, and a bound of the gain."""
    numbers, cap = defaultdict(float, seen.numbers), server.limits.max_running_requests or 0
    running, kv, share = numbers["num_running_reqs"], numbers["full_token_usage"], numbers["prefill_share"]
    put_back, finished = numbers[_PUT_BACK], numbers["num_requests_total"]
    waits = cap and numbers.get("queued_share", 0.0) >= _QUEUED
    cases: tuple[tuple[Any, str, str, float | None], ...] = (
        (put_back >= max(2, _RETRACTED * (finished or running)), "retraction",
         f"{put_back:.0f} were put back for want of KV room{f', {finished:.0f} finished' * bool(finished)}.", None),
        (share >= _QUEUED and finished >= running / 2, "prefill",
         f"For about {share:.0%} of the time prefills stop decoding: a bound of the gain.", 1 / max(1 - share, 1e-3)),
        (cap and (running >= _FULL * cap or _has_free(seen)), "request-cap", f"The cap: {_origin(server)[0]}.", None),
        (waits and numbers["mamba_usage"] >= _NO_SLOT, "state pool", "No state slot is free; for each that runs "
         f"{numbers['mamba_used_tokens'] / max(1.0, running):.1f} are held.", None),
        ((waits and kv) or kv >= _CROWDED, "KV pool", "Slots are free; admission keeps KV room for what runs.", None),
        (True, "", "", None),
    )  # fmt: skip
    return next(case[1:] for case in cases if case[0])


def _origin(server: Watched) -> tuple[str, int]:
    """What set the request cap, in words, and the state slots that it counts for each request."""
    cap, tokens, slots = (getattr(server.limits, name) or 0 for name in _POOLS)
    if server.flags.get("max_running_requests") == cap:
        return f"max_running_requests {cap}, as asked for", 1
    if per := next((per for per in (1, 3, 4, 5) if slots // per == cap), 0):
        hint = ", 1 a request without the radix cache, which is of no use where prompts share no prefix" * (per > 1)
        return f"state pool, {slots} slots // {per} a request = {cap}{hint}", per
    return f"KV pool, {tokens} tokens // 2" if tokens // 2 == cap else "it is not known what set it", 1


def _lift(server: Watched, seen: Finding, planned: Planned | None) -> tuple[str, float | None]:
    """The change that lets more run, and the factor that the plan predicts; without a plan by the room that is left."""
    cap, asked = server.limits.max_running_requests or 0, server.flags.get("max_running_requests") or 0
    running, kv, gain = seen.numbers["num_running_reqs"], seen.numbers.get("full_token_usage"), None
    if planned and (now := seen.numbers.get("planned_tok_per_s")):
        best = max(planned.plan.ranked, key=lambda each: each.prediction.tok_per_s)
        most, gain = int(best.prediction.running), best.prediction.tok_per_s / now
        new: dict[str, Any] = {name: value for name, (_, value) in best.changes.items()}
    else:
        room = kv and running * _ADMITTED / kv, server.limits.max_mamba_cache_size, asked * (asked > cap)
        most = int(min(filter(None, room), default=0))
        new = {"max_running_requests": most} if most >= _WORTH * cap else {}
        if new and _origin(server)[1] > 1:  # no_buffer: 0.5.12 refuses extra_buffer then
            new = {"disable_radix_cache": True, "mamba_strategy": "no_buffer", **new}
    parts = [f"fleet.flags: {json.dumps(new)}".replace('"', "")] * bool(new)
    parts += ["generation.concurrency: auto"] * bool(new and server.limit and server.limit < most)
    return " and ".join(parts), gain


def _slow(steady: Sequence[tuple[Watched, Finding]]) -> Iterator[Finding]:
    """Servers that are slower, by more than noise, than others like them: by counters, or much by one other rate."""
    for server, seen in steady:
        numbers = defaultdict(float, seen.numbers)
        running, source = numbers["num_running_reqs"], next((name for name in _RATES if name in seen.numbers), "")
        kin = [other.numbers for each, other in steady if each is not server and each.flags == server.flags]
        rates = [one[source] for one in kin
                 if source in one and abs(one["num_running_reqs"] - running) <= (1 - _NEAR) * running]  # fmt: skip
        usual, rate, error = median(rates or [0.0]), numbers[source], numbers["tok_per_s_error"]
        is_sure = source == _RATES[0] and numbers[COUNTERS[0]] >= running
        if rate + 2 * error < (_SLOWER if is_sure else _MUCH_SLOWER) * usual:
            slow, gain = replace(seen, severity="fault", is_binding=False), usual / max(1e-9, rate)
            yield _told(slow, "slow server", f"Others like it: {usual:,.0f} tok/s.", gain=gain)


def _fleet(bound: Sequence[Finding], servers: int) -> list[Finding]:
    """What limits most servers is what limits the fleet; the others gain nothing."""
    alike = [each for each in bound if each.kind == mode(each.kind for each in bound)]
    words, share = f"{len(alike)} of {servers} servers, such as ", len(alike) / max(1, servers)
    numbers: dict[str, float] = {"servers": servers, "limited": len(alike)}
    return [replace(first, server=None, evidence=words + first.evidence, numbers=numbers,
                    gain=first.gain and 1 + (first.gain - 1) * share) for first in alike[:1]]  # fmt: skip
