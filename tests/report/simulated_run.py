"""Folders of the reference run on two servers, made with the scheduler's model, as a run with samples leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dfexp import params
from dfexp.capacity.flags import Flags
from dfexp.engines.simulated.core import DECODED, PREFILLED, Config, Event, Simulator, run_closed_loop
from dfexp.layout import RunFolder
from dfexp.records import Completion
from dfexp.rehearse.whole import draw
from tests.capacity.support import AFTER, BEFORE, COMMON, setting
from tests.finished_run import START, row, write_run

ROOT = Path(__file__).resolve().parent.parent.parent
SERVERS, EVERY_S = 2, 5.0
PLANNED = Flags(
    disable_radix_cache=True, mem_fraction_static=0.90, max_running_requests=157, chunked_prefill_size=8192, **COMMON
)
RUNS = {"before": (BEFORE, 32), "after": (AFTER, 64), "planned": (PLANNED, 157)}


@cache
def played(which: str, number: int) -> tuple[list[Completion], list[dict[str, Any]]]:
    """Rows and samples of a run of so many prompts; its second 0 is START."""
    flags, concurrency = RUNS[which]
    there = setting(flags, concurrency=concurrency)
    requests = list(draw(there.workload, number, 8192))
    servers = [Simulator(Config.of(there)) for _ in range(SERVERS)]
    sent, rows, samples = dict.fromkeys(range(concurrency * SERVERS), 0.0), list[Completion](), list[dict[str, Any]]()
    next_s = [EVERY_S * (index + 1) / SERVERS for index in range(SERVERS)]
    for index, told in run_closed_loop(servers, requests, concurrency):
        name = f"127.0.0.1:{30000 + index}"
        while told.at_s >= next_s[index]:
            next_s[index] += EVERY_S
            counters = servers[index].counters
            samples.append({
                **servers[index].gauges(told.at_s), "at": START + told.at_s, "server": name,
                "max_total_num_tokens": there.memory().max_total_num_tokens,
                "max_running_requests": there.memory().max_running_requests,
                "realtime_decode_tokens_total": counters[DECODED], "realtime_prefill_tokens_total": counters[PREFILLED],
                "num_requests_total": counters["num_requests_total"],
            })  # fmt: skip
        if isinstance(told, Event) and told.kind == "finished":
            ident = told.request_id
            assert isinstance(ident, int)
            began_s, (prompt, _, limit) = sent.pop(ident), requests[ident]
            rows.append(row(
                ident, server=name, submitted_at=START + began_s, latency_s=told.at_s - began_s, prompt_tokens=prompt,
                completion_tokens=told.tokens, finish_reason="length" if told.tokens >= limit else "stop",
            ))  # fmt: skip
            if (new := len(rows) + len(sent)) < number:
                sent[new] = told.at_s
    return rows, samples


def spec_of(which: str, **plan: Any) -> dict[str, Any]:
    """The groups of its parameters. Args: plan, what is to be otherwise in its plan."""
    flags, concurrency = RUNS[which]
    given = {key: getattr(flags, key) for key in ("mem_fraction_static", "mamba_strategy", "max_running_requests",
             "chunked_prefill_size", "context_length", "mamba_ssm_dtype", "disable_radix_cache")}  # fmt: skip
    tree = params.read_yaml(ROOT / "params" / "expansion_v1.yaml")
    tree["fleet"] |= {"servers": SERVERS, "flags": given}
    tree["generation"]["concurrency"] = concurrency
    tree["plan"] = {**tree["plan"], **plan, "variants": {}}
    spec = params.validate(tree, "a test").model_dump()
    return {key: spec[key] for key in ("fleet", "prompts", "generation", "plan")}


def write(
    root: Path, which: str, *, number: int = 1500, name: str | None = None, until_s: float | None = None,
    engine: str = "sglang", events: Sequence[dict[str, Any]] = (), **plan: Any,
) -> RunFolder:  # fmt: skip
    """The folder of such a run; with `until_s` as it was then."""
    rows, samples = played(which, number)
    if until_s is not None:
        rows = [each for each in rows if each.submitted_at + each.latency_s <= START + until_s]
        samples = [each for each in samples if each["at"] <= START + until_s]
    spec = spec_of(which, **{"prompts": number, **plan})
    spec["fleet"]["engine"] = engine
    return write_run(
        root, rows, asked=number, name=name or which, samples=samples, events=events, rows_per_shard=500, **spec
    )
