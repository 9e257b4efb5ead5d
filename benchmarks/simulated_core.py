"""The simulated servers against what operators saw of a run on eight RTX PRO 6000, and the whole run in virtual time.

    python benchmarks/simulated_core.py

Settings and workload are those of params/expansion_v1.yaml. Speed was calibrated on the first setting's 670 tok/s and
the completion lengths were fitted on its early counters; everything of the second setting is predicted, and nothing of
the third was ever seen. Prompt lengths are assumed. Rates and usages are means of decode lines, over the second half
of the time at which the operators looked; `steady` is the same from one hour to two.
"""

from __future__ import annotations

import csv
import resource
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path

import capacity_throughput
import yaml

from dfexp.capacity.plan_command import prepared_for
from dfexp.capacity.planner import Setting
from dfexp.capacity.throughput import admissible
from dfexp.engines.simulated.core import Config, Event, Line, Simulator, run_closed_loop
from dfexp.params import RunSpec
from dfexp.rehearse.whole import Whole, draw, simulate

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, SERVERS = 654_676, 8
SEEN: dict[str, dict[str, tuple[float, float]]] = {
    "before": {
        "state slots": (185, 187), "request cap": (37, 37), "running": (32, 32), "queued": (0, 0),
        "KV usage": (0.20, 0.21), "state usage": (0.61, 0.61), "tok/s a GPU": (650, 680),
        "completions": (438, 438), "mean tokens": (2473, 2473),
    },
    "after": {
        "state slots": (216, 218), "request cap": (72, 72), "running": (64, 64), "queued": (0, 0),
        "KV usage": (0.36, 0.49), "state usage": (0.59, 0.59), "tok/s a GPU": (1155, 1196),
        "completions": (1397, 1397), "mean tokens": (2660, 2660),
    },
}  # fmt: skip
"""What operators reported, least and most."""
LOOKED_S = {"before": 280.0, "after": 480.0, "planned": 480.0}


@dataclass(slots=True)
class Watched:
    """A run, and the gauges of its decode lines: over the second half of the time at which the operators looked, and
    from one hour to two.
    """

    run: Whole = field(default_factory=Whole)
    first: list[dict[str, float]] = field(default_factory=list)
    steady: list[dict[str, float]] = field(default_factory=list)


def watch(setting: Setting, concurrency: int, looked_s: float) -> Watched:
    """Simulate one setting to its end."""
    watched = Watched()

    def keep(line: Line) -> None:
        if not line.new_seqs and looked_s / 2 < line.at_s <= looked_s:
            watched.first.append(line.gauges)
        elif not line.new_seqs and 3600 < line.at_s <= 7200:
            watched.steady.append(line.gauges)

    watched.run = simulate(setting, concurrency, PROMPTS, keep)
    return watched


def mean(gauges: list[dict[str, float]], name: str) -> float:
    """Mean of a gauge over lines."""
    return sum(each[name] for each in gauges) / len(gauges)


def figures(setting: Setting, watched: Watched, looked_s: float) -> dict[str, float]:
    """The rows of the table."""
    memory = setting.memory()
    completions = bisect_right(watched.run.finished_s, looked_s)
    tokens = sum(watched.run.tokens[:completions]) / completions
    gauges = watched.first
    return {
        "state slots": memory.max_mamba_cache_size,
        "request cap": memory.max_running_requests,
        "running": mean(gauges, "num_running_reqs"),
        "queued": mean(gauges, "num_queue_reqs"),
        "KV usage": mean(gauges, "full_token_usage"),
        "state usage": mean(gauges, "mamba_usage"),
        "tok/s a GPU": mean(gauges, "gen_throughput"),
        "completions": completions,
        "mean tokens": tokens,
    }


def show(name: str, setting: Setting, watched: Watched, concurrency: int) -> None:
    """One setting beside what was seen, and its whole run."""
    looked_s = LOOKED_S[name]
    print(f"\n{name}: {concurrency} in flight at each server, at {looked_s:.0f} s")
    print(f"  {'':<16}{'simulated':>12}{'seen':>14}{'error':>9}")
    for row, value in figures(setting, watched, looked_s).items():
        digits = 2 if "usage" in row else 0
        low, high = SEEN.get(name, {}).get(row, (0.0, 0.0))
        nearest = min(max(value, low), high)
        seen = "-" if name not in SEEN else f"{low:,.{digits}f}" + (f"-{high:,.{digits}f}" if high > low else "")
        error = "" if name not in SEEN or not nearest else f"{value / nearest - 1:+.1%}"
        print(f"  {row:<16}{value:>12,.{digits}f}{seen:>14}{error:>9}")
    steady = {each: mean(watched.steady, each) for each in ("num_running_reqs", "full_token_usage", "gen_throughput")}
    predicted = setting.predict(setting.memory(), concurrency)
    print(
        f"  steady: {steady['num_running_reqs']:.1f} running (capacity model {predicted.running:.1f}), KV usage "
        f"{steady['full_token_usage']:.2f} ({predicted.full_token_usage:.2f}), {steady['gen_throughput']:,.0f} tok/s "
        f"({predicted.tok_per_s:,.0f})"
    )
    run, hours = watched.run, watched.run.finished_s[-1] / 3600
    print(
        f"  the whole run: {len(run.finished_s):,} completions of {sum(run.tokens) / len(run.tokens):,.0f} "
        f"tokens in {hours:.1f} h (capacity model {predicted.hours(PROMPTS, SERVERS):.1f}), {run.retracted} "
        f"retractions, {sum(run.tokens) / run.finished_s[-1] / SERVERS:,.0f} tok/s a GPU with ramp and tail"
    )
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  simulated in {run.cpu_s:.1f} s of one core, {peak_mib:.0f} MiB at most so far")


def admission(planned: Setting) -> None:
    """Requests that are in when 400 wait: cold, over time, and from 20 to 60 minutes (later)."""
    print("\nRunning requests of one server with 400 in flight; formula: the capacity model's admission")
    print(f"  {'cap':>5}{'KV tokens':>11}{'cold':>7}{'60 s':>7}{'120 s':>7}{'300 s':>7}{'later':>11}{'formula':>9}")
    for cap in (150, 155, 160, 165):
        flags = replace(planned.server.flags, max_running_requests=cap)
        setting = planned.with_flags(flags)
        memory = setting.memory()
        server = Simulator(Config.of(setting))
        requests = draw(setting.workload, 5000, setting.server.context_length)
        seen: list[tuple[float, float]] = []
        for _, told in run_closed_loop([server], requests, 400):
            if isinstance(told, Event):
                continue
            if told.at_s > 3600:
                break
            if not told.new_seqs:
                seen.append((told.at_s, told.gauges["num_running_reqs"]))
        at = [next(running for at_s, running in seen if at_s >= when) for when in (0, 60, 120, 300)]
        late = [running for at_s, running in seen if at_s > 1200]
        exact = admissible(setting.server, setting.workload, memory.max_total_num_tokens)
        columns = "".join(f"{running:>7.0f}" for running in at)
        print(f"  {cap:>5}{memory.max_total_num_tokens:>11,}{columns}{sum(late) / len(late):>11.1f}{exact:>12.1f}")


def public_rows() -> None:
    """The public table of one length (8,192 + 1,024 tokens), which come in waves."""
    print("\nPublic measurements, total tok/s of one GPU; efficiencies fitted as in the capacity model")
    print(
        f"  {'gpu':<6}{'model':<18}{'weights':<9}{'client':>7}{'seen':>10}{'capacity':>10}{'simulated':>11}{'error':>8}"
    )
    text = capacity_throughput.DATA.read_text().splitlines()
    rows = csv.DictReader(line for line in text if not line.startswith("#"))
    errors = []
    for row, line in zip(rows, capacity_throughput.lines(), strict=True):
        server, memory = capacity_throughput._server(row)
        simulator = Simulator(Config(server=server, memory=memory, efficiency=line.efficiency))
        number = 6 * line.concurrency
        ends = [
            told.at_s
            for _, told in run_closed_loop([simulator], [(8192, 1024, 1024)] * number, line.concurrency)
            if isinstance(told, Event) and told.kind == "finished"
        ]
        rate = number * 9216 / ends[-1]
        errors += [] if line.fitted else [abs(rate / line.measured - 1)]
        print(
            f"  {line.gpu:<6}{line.model:<18}{line.weights:<9}{line.concurrency:>7}{line.measured:>10,.0f}"
            f"{line.predicted:>10,.0f}{rate:>11,.0f}{rate / line.measured - 1:>+8.1%}{' fitted' * line.fitted}"
        )
    mean_error = capacity_throughput.mean_absolute_error(capacity_throughput.lines())
    print(
        f"  mean absolute error of rows not fitted: {sum(errors) / len(errors):.1%} (capacity model {mean_error:.1%})"
    )


def main() -> None:
    """Print the three settings, the admission table, and what it cost."""
    prepared = prepared_for(
        RunSpec.model_validate(yaml.safe_load((ROOT / "params/expansion_v1.yaml").read_text())), ROOT
    )
    after = prepared.variants["after"]
    flags = replace(after.server.flags, disable_radix_cache=True, max_running_requests=157)
    settings = {"before": prepared.variants["before"], "after": after, "planned": after.with_flags(flags)}
    public_rows()
    admission(settings["planned"])
    for name, setting in settings.items():
        concurrency = {"before": 32, "after": 64, "planned": 157}[name]
        show(name, setting, watch(setting, concurrency, LOOKED_S[name]), concurrency)


if __name__ == "__main__":
    main()
