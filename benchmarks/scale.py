"""A whole run through HTTP: simulated servers, the real fleet, client and journal, beside the pure simulation.

    python benchmarks/scale.py [--prompts 20000] [--servers 8] [--folder DIR] [--keep] [--all]

The servers are those of params/expansion_v1_planned.yaml, as fast as the client can go; the prompts are drawn from that
file's workload. --all is the whole thing, 15 minutes on two cores: all 654,676 prompts on 8 servers, then 50,000 on 64.
Everything is written into a folder of its own, 15 kB a prompt, and removed at the end unless --keep is given.

CPU is of whole processes, imports and the start included. Memory of the generating process is its peak as the kernel
counts it, read once a second. Hours and rates are of simulated time. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import psutil

from dfexp import control, generate, rehearse
from dfexp.capacity.planner import Setting
from dfexp.layout import RunFolder
from dfexp.rehearse.whole import simulate

PARAMS = Path(__file__).resolve().parent.parent / "params/expansion_v1_planned.yaml"
WHOLE, WIDE = (654_676, 8), (50_000, 64)
"""Prompts and servers of --all."""
ROW_BYTES = 15_000
"""Of a prompt: its source, the frozen copy, its row, and the servers' log lines."""
ENDLESS_H, TELL_S = 1000.0, 60.0


@dataclass(frozen=True, slots=True)
class Used:
    """What a process has used so far: CPU in seconds, memory at most in MiB."""

    cpu_s: float = 0.0
    peak_mib: float = 0.0

    @classmethod
    def of(cls, pid: int) -> Used | None:
        """None: there is no such process any more. Peaks of rusage would begin with that of the parent."""
        try:
            times, status = psutil.Process(pid).cpu_times(), Path(f"/proc/{pid}/status").read_text()
            return cls(times.user + times.system, int(status.split("VmHWM:")[1].split()[0]) / 1024)
        except (psutil.Error, OSError, IndexError):
            return None


class Watch:
    """Looks at the generating process whenever the rehearsal says how far it is, and passes that on once a minute."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._next_s, self.client = folder, 0.0, Used()

    def __call__(self, line: str) -> None:
        """One line of the rehearsal."""
        if process := control.living_process(self._folder):
            self.client = Used.of(process.pid) or self.client
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + TELL_S
            print(f"  {time.strftime('%H:%M:%S')} {line}, client {self.client.peak_mib:,.0f} MiB", flush=True)


def host_of(fleet_folder: Path) -> Used:
    """The process that simulates the servers."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = process.info["cmdline"] or []
        if "dfexp.engines.simulated.server" in command and process.info["cwd"] == str(fleet_folder):
            return Used.of(process.pid) or Used()
    raise SystemExit(f"no host of simulated servers works in {fleet_folder}: see logs/simulator.log there.")


def counted(completions: Path, asked: int) -> tuple[int, int, int, str]:
    """Rows, tokens and bytes of all shards, read without dfexp, and what is wrong with their indices and failures'."""
    seen, rows, tokens, size = bytearray(asked), 0, 0, 0
    failures = completions / "failures.jsonl"
    for path in [*completions.glob("completions_*.jsonl*"), *([failures] if failures.exists() else [])]:
        with path.open("rb") as file:
            for line in file:
                row = json.loads(line)
                seen[row["index"]] = min(seen[row["index"]] + 1, 2)
                rows, tokens = rows + ("text" in row), tokens + row.get("completion_tokens", 0)
        size += path.stat().st_size
    wrong = ", ".join(
        f"{seen.count(times):,} {name}" for times, name in ((0, "missing"), (2, "twice")) if times in seen
    )
    return rows, tokens, size, wrong or "each exactly once"


def pure(setting: Setting, limit: int, number: int) -> tuple[float, float, float, float]:
    """The same run without HTTP: hours, tokens/s of a server, CPU seconds, MiB of this process at most."""
    run = simulate(setting, limit, number)
    seconds, used = run.finished_s[-1], Used.of(os.getpid()) or Used()
    return seconds / 3600, sum(run.tokens) / seconds / setting.servers, run.cpu_s, used.peak_mib


def measured(variant: rehearse.Variant, root: Path, prompts: int) -> None:
    """Play one run to its end, and print its table."""
    folder = generate.run_folder(variant.spec, root)
    watch, began_s = Watch(folder), time.monotonic()
    try:
        limits = rehearse.play(variant, root, watch)
        whole_s = time.monotonic() - began_s
        host = host_of(generate.fleet_folder(variant.spec, root).path)
    finally:
        rehearse.end(variant.spec, root)
    status = control.read_status(folder) or {}
    wall_s, limit = status["at"] - status["started_at"], status["servers"][0]["limit"]
    done, failed = status["done"], status["failed"]
    print(f"  {done:,} succeeded + {failed:,} failed = {done + failed:,}, {prompts:,} asked; {status['state']}")
    rows, tokens, size, indices = counted(folder.completions, prompts)
    print(f"  on the disk: {rows:,} rows, {tokens:,} tokens, {size / 1e9:.2f} GB; indices {indices}", flush=True)
    client = watch.client
    print(
        f"  wall time: {wall_s / 60:.1f} min ({wall_s / done * 1000:.2f} ms a completion), {whole_s / 60:.1f} with all"
    )
    print(f"  client: {client.peak_mib:,.0f} MiB at most, {client.cpu_s / done * 1000:.2f} ms CPU a completion")
    print(f"  host of the servers: {host.peak_mib:,.0f} MiB, {host.cpu_s / done * 1000:.2f} ms", flush=True)
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        hours, rate, cpu_s, peak_mib = apart.submit(pure, variant.setting, limit, prompts).result()
    lines = rehearse.rows(variant, root, limits, whole=False)
    found = {line["figure"]: line["simulated"] for line in lines}
    here, servers = found["rehearsed_hours"], variant.setting.servers
    here_rate = tokens / here / 3600 / servers
    print(f"  simulated time: {here:.3f} h, {here_rate:,.1f} tok/s a GPU, {limit} in flight at each server")
    print(f"  pure simulation: {hours:.3f} h, {rate:,.1f} tok/s a GPU, in {cpu_s:.1f} s CPU and {peak_mib:,.0f} MiB")
    print(f"  ratio: hours {here / hours:.4f}, tok/s {here_rate / rate:.4f}; restarts {found['restarts']}")
    memory = variant.setting.memory()
    model = variant.setting.predict(memory, limit)
    print(
        f"  capacity model, without ramp and tail: {model.hours(prompts, servers):.3f} h, {model.tok_per_s:,.1f} tok/s"
    )


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20_000, help="so many, at most 654,676")
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to make the folder")
    parser.add_argument("--keep", action="store_true", help="leave the folder there")
    parser.add_argument("--all", action="store_true", help="the whole run, then 64 servers")
    asked = parser.parse_args()
    for prompts, servers in (WHOLE, WIDE) if asked.all else ((asked.prompts, asked.servers),):
        needed, free = prompts * ROW_BYTES + 10**9, shutil.disk_usage(asked.folder).free
        if free < needed:
            raise SystemExit(
                f"{asked.folder} has {free / 1e9:.1f} GB free, {prompts:,} prompts need {needed / 1e9:.1f}. "
                "Name a folder with more (--folder), or ask for less (--prompts)."
            )
        root = Path(tempfile.mkdtemp(prefix="dfexp-scale-", dir=asked.folder)).resolve()
        print(f"\n{prompts:,} prompts, {servers} servers, in {root}", flush=True)
        over = [f"fleet.servers={servers}", f"prompts.limit={prompts}", "generation.progress_interval_s=1"]
        try:
            (variant,) = rehearse.read(PARAMS, root, over, (), ENDLESS_H)
            measured(variant, root, min(prompts, variant.setting.prompts))
        finally:
            if asked.keep:
                print(f"  kept: {root}")
            else:
                shutil.rmtree(root)


if __name__ == "__main__":
    main()
