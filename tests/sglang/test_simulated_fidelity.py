"""The simulated scheduler against real SGLang servers: the same requests, compared log line by log line.

All requests but the first wait before the first, a long prompt, has been prefilled, so that nothing depends on when
they arrive. Only times differ: a step's time changes nothing, since the lines are compared by number.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from dfexp.capacity.flags import rules
from dfexp.engines.simulated.core import Config, Simulator, Sizes
from dfexp.engines.simulated.core.machine import SETTLED_AT_ONCE
from tests.engines.simulated import support as simulated

from .support import NO_BUFFER, OnCpu
from .test_real_server import argv, free_port, running, wait_until_healthy

TRIES = 3
USAGE = 0.0051
"""Usages are logged with two digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Requests for one server. The first is long, and the others come while it is prefilled.

    Attributes:
        early: answers end by a stop token, before their max_new_tokens; else all have the full length, which they keep
            when they are retracted.
        versions: those that can do it on a CPU.

    """

    model: str
    flags: Mapping[str, Any]
    requests: tuple[Sizes, ...]
    early: bool = True
    versions: tuple[str, ...] = ("0.5.12", "0.5.23")


def requests(
    number: int, *, first: int, prompt: tuple[int, int], answer: tuple[int, int], spare: float
) -> tuple[Sizes, ...]:
    """Lengths, always the same: the long prompt, and so many with lengths in these ranges."""
    chance = random.Random(7)
    found = [(first, 30, 30)]
    for _ in range(number):
        output = chance.randint(*answer)
        found.append((chance.randint(*prompt), output, round(output * chance.uniform(1, spare))))
    return tuple(found)


SMALL = requests(30, first=8000, prompt=(20, 400), answer=(1, 60), spare=3.0)
POOLS = {"max_running_requests": 6, "max_total_tokens": 10_000, "chunked_prefill_size": 512}
TIGHT = {"max_running_requests": 12, "max_total_tokens": 2400, "chunked_prefill_size": 128}
SHORT = requests(24, first=2000, prompt=(20, 300), answer=(20, 200), spare=1.0)
SCENARIOS = {
    "no_buffer": Scenario(model="hybrid", flags={**POOLS, "max_mamba_cache_size": 20}, requests=SMALL),
    "radix cache off": Scenario(model="hybrid", flags={**POOLS, "disable_radix_cache": True}, requests=SMALL),
    "retraction": Scenario(
        model="dense",
        flags={**TIGHT, "schedule_conservativeness": 0.1, "disable_overlap_schedule": True},
        requests=SHORT,
        early=False,
    ),
}
LONG = {
    # A large cap, as in production: who runs is decided by what is reserved in the KV pool.
    "cold start": Scenario(
        model="hybrid",
        flags={
            "max_running_requests": 40, "max_total_tokens": 9000, "chunked_prefill_size": 1024,
            "disable_radix_cache": True,
        },
        requests=requests(90, first=8000, prompt=(20, 150), answer=(20, 200), spare=4.0),
    ),
    "one batch at a time": Scenario(
        model="hybrid",
        flags={**POOLS, "disable_radix_cache": True, "disable_overlap_schedule": True},
        requests=SMALL,
    ),
    "pages of 16": Scenario(
        model="dense",
        flags={
            **TIGHT, "page_size": 16, "schedule_conservativeness": 0.1, "disable_overlap_schedule": True,
            "disable_radix_cache": True,
        },
        requests=SHORT,
        early=False,
        versions=("0.5.23",),  # before, whole pages need a kernel of Triton's
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One log line. `slots` is 0 without a state pool; a prefill line has usages instead of counts."""

    new_seqs: int
    tokens: int
    running: int
    queue: int
    kv: float
    slots: float


PREFILL = re.compile(
    r"Prefill batch, #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), .*?token usage: ([\d.]+), "
    r"(?:mamba usage: ([\d.]+), )?#running-req: (\d+), #queue-req: (\d+)"
)
DECODE = re.compile(
    r"Decode batch, #running-req: (\d+), #(?:full )?token: (\d+), .*?(?:mamba num: (\d+), .*?)?#queue-req: (\d+)"
)


def logged(log: str) -> list[Logged]:
    """The lines from the first long prompt on; before it come probes of one token."""
    found: list[Logged] = []
    for line in log.split("\n"):
        if match := PREFILL.search(line):
            seqs, new, cached, kv, slots, running_, queue = match.groups()
            # Prompts of retracted requests may still be in the radix cache.
            if found or int(new) > 1:
                found.append(
                    Logged(
                        new_seqs=int(seqs), tokens=int(new) + int(cached), running=int(running_), queue=int(queue),
                        kv=float(kv), slots=float(slots or 0),
                    )
                )  # fmt: skip
        elif found and (match := DECODE.search(line)):
            running_, kv, slots, queue = match.groups()
            found.append(
                Logged(new_seqs=0, tokens=0, running=int(running_), queue=int(queue), kv=int(kv), slots=int(slots or 0))
            )
    return found


def simulated_lines(server: Config, sizes: tuple[Sizes, ...]) -> list[Logged]:
    """What the simulator says of them. The first arrives alone."""
    simulator = Simulator(server)
    for number, each in enumerate(sizes):
        simulator.submit(1e-9 * (number > 0), number, *each)
    found = []
    for line in simulated.lines(simulated.run(simulator)):
        gauges, is_prefill = line.gauges, bool(line.new_seqs)
        found.append(
            Logged(
                new_seqs=line.new_seqs,
                tokens=line.new_tokens if is_prefill else 0,
                running=int(gauges["num_running_reqs"]),
                queue=int(gauges["num_queue_reqs"]),
                kv=gauges["full_token_usage" if is_prefill else "kv_used_tokens"],
                slots=gauges["mamba_usage" if is_prefill else "mamba_used_tokens"],
            )
        )
    return found


def overlapped(lines: list[Logged], tokens: int, slots: int) -> list[Logged]:
    """The same lines as a server writes them that overlaps: each when the next batch has been launched already, so
    with that one's memory and queue, but with the running requests of its own batch. The last has no next batch.
    """
    found = []
    for line, following in pairwise(lines):
        grown = following.tokens or (line.slots if not line.new_seqs else line.slots * slots)
        change = grown / tokens if line.new_seqs else grown
        held, queue = line.slots, line.queue
        if following.new_seqs:
            held = following.slots if line.new_seqs else following.slots * slots
            queue = following.queue
        found.append(replace(line, kv=line.kv + change, slots=held, queue=queue))
    return found


@dataclass(slots=True)
class Compared:
    """Largest deviations over all lines. `usage` is of the prefill lines, which have no counts."""

    lines: int = 0
    prefills: int = 0
    retractions: int = 0
    most_running: int = 0
    deviations: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("lines", "batch kind", "prefilled", "running", "queue", "slots", "KV tokens", "usage"), 0.0
        )
    )

    def note(self, name: str, real: float, said: float) -> None:
        self.deviations[name] = max(self.deviations[name], abs(real - said))


def compare(real: list[Logged], said: list[Logged], slots: int) -> Compared:
    """Line by line, by number."""
    result = Compared(
        lines=len(real),
        prefills=sum(each.new_seqs > 0 for each in real),
        most_running=max((each.running for each in real), default=0),
    )
    result.note("lines", len(real), len(said))
    alone = True  # until the long prompt is prefilled, the queue is a matter of when the others arrive
    for mine, theirs in zip(real, said, strict=False):
        alone = alone and mine.new_seqs == 1 and not mine.running and theirs.new_seqs == 1
        result.note("batch kind", mine.new_seqs, theirs.new_seqs)
        result.note("prefilled", mine.tokens, theirs.tokens)
        result.note("running", mine.running, theirs.running)
        if not alone:
            result.note("queue", mine.queue, theirs.queue)
        result.note("usage" if mine.new_seqs else "KV tokens", mine.kv, theirs.kv)
        if not alone or not mine.new_seqs:
            result.note(
                "slots", mine.slots * (slots if mine.new_seqs else 1), theirs.slots * (slots if theirs.new_seqs else 1)
            )
    return result


def generate(url: str, vocabulary: int, scenario: Scenario, numbers: range) -> list[int]:
    """Send requests in one call; completion tokens of each. Prompts share no prefix: each begins with its number."""
    chance = random.Random(numbers.start)
    prompts, params = [], []
    for number in numbers:
        prompt, output, max_new = scenario.requests[number]
        prompts.append([3 + number, *(chance.randrange(3, vocabulary) for _ in range(prompt - 1))])
        sampling = {"temperature": 0, "max_new_tokens": max_new, "min_new_tokens": max_new}
        if scenario.early and output < max_new:
            # Every token but one, of the unlikeliest, ends the answer, and none may come before it is long enough.
            stops = [token for token in range(vocabulary) if token != 10]
            sampling |= {"min_new_tokens": output - 1, "stop_token_ids": stops}
        params.append(sampling)
    body = json.dumps({"input_ids": prompts, "sampling_params": params}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as answer:
        return [each["meta_info"]["completion_tokens"] for each in json.loads(answer.read())]


def run_real(sglang: OnCpu, scenario: Scenario, log: Path) -> None:
    """Serve a scenario. Fails where an answer is not as long as it should be."""
    port, model = free_port(), getattr(sglang, scenario.model)
    flags = {"decode_log_interval": 1, **scenario.flags}
    if "max_mamba_cache_size" in flags:
        flags |= NO_BUFFER[sglang.version]
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    url, got = f"http://127.0.0.1:{port}", dict[int, list[int]]()

    def send(numbers: range) -> None:
        got[numbers.start] = generate(url, vocabulary, scenario, numbers)

    with running(argv(sglang, model, port, flags), sglang.env, log) as process:
        wait_until_healthy(process, url, log)
        first = threading.Thread(target=send, args=(range(1),))
        first.start()
        while not logged(log.read_text()) and first.is_alive():
            time.sleep(0.005)
        send(range(1, len(scenario.requests)))
        first.join()
    assert [*got[0], *got[1]] == [output for _, output, _ in scenario.requests]


def have_waited(lines: list[Logged], number: int) -> bool:
    """Whether so many requests were in the queue before the long prompt had been prefilled."""
    alone = takewhile(lambda line: line.new_seqs == 1 and not line.running, lines)
    return any(line.queue == number for line in alone)


def compared(sglang: OnCpu, scenario: Scenario, log: Path) -> Compared:
    """One scenario on both, with the pools that the real server reports."""
    for _ in range(TRIES):
        run_real(sglang, scenario, log)
        text = log.read_text()
        if have_waited(logged(text), len(scenario.requests) - 1):
            break
    else:
        pytest.fail(f"in {TRIES} tries the machine was too slow to send all requests during one prefill")
    sizes = {
        name: int(found[-1])
        for name in ("max_total_num_tokens=", "max_running_requests=", "max_mamba_cache_size: ")
        if (found := re.findall(rf"(?<![a-z_]){name}(\d+)", text))
    }
    tokens, slots = sizes["max_total_num_tokens="], sizes.get("max_mamba_cache_size: ", 0)
    overlap = "disable_overlap_schedule" not in scenario.flags and "max_mamba_cache_size" not in scenario.flags
    server = simulated.config(
        tokens=tokens,
        cap=sizes["max_running_requests="],
        slots=slots,
        page=scenario.flags.get("page_size", 1),
        radix="disable_radix_cache" not in scenario.flags,
        overlap=overlap,
        interval=1,
        late=not rules(sglang.version).since(SETTLED_AT_ONCE),
        chunked_prefill_size=scenario.flags["chunked_prefill_size"],
        schedule_conservativeness=scenario.flags.get("schedule_conservativeness", 1.0),
    )
    real, said = logged(text), simulated_lines(server, scenario.requests)
    if overlap:
        said = overlapped(said, tokens, slots)
        if 0 <= len(real) - len(said) <= 2:  # the last line, and that of a step of none but the ended
            real = real[: len(said)]
    result = compare(real, said, slots)
    result.retractions = text.count("Retract requests")
    return result


def check(result: Compared) -> None:
    deviations = dict(result.deviations)
    assert result.lines > 100
    assert deviations.pop("usage") <= USAGE
    assert deviations.pop("slots") <= 1
    assert deviations == dict.fromkeys(deviations, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_lines_are_those_of_a_real_server(
    sglang: OnCpu, name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    result = compared(sglang, SCENARIOS[name], tmp_path / "server.log")
    record_property("compared", repr(result))
    check(result)
    assert (result.retractions > 0) == (name == "retraction")


@pytest.mark.full
def test_longer_lists_too(sglang: OnCpu, tmp_path: Path) -> None:
    names = [name for name, scenario in LONG.items() if sglang.version in scenario.versions]
    assert len(names) >= 2
    for name in names:
        check(compared(sglang, LONG[name], tmp_path / "server.log"))
