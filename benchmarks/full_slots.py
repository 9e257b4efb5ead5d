"""Whether request slots stay full, on simulated servers, and what slow, dead and changing ones cost a run.

    python benchmarks/full_slots.py [--rows 8000] [--folder DIR]

Real fleets, generating processes and HTTP; servers of 17 slots on one virtual clock, as fast as the client can go, so
that a busy machine changes little. Everything that is printed is simulated. "By turns" is what many pipelines do: row
i goes to server i modulo their number, each of which is kept as full as dfexp keeps it. "No taking back" is dfexp with
that part left out. Slots are those of `estimate.Slots`, from the first row to 98 %; the tail is the last 2 % of rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from dfexp import control, fleet, generate, params
from dfexp.fleet import Fleet
from dfexp.generate.reconfigure import reconfigure
from dfexp.params import RunSpec
from dfexp.report.data import load
from dfexp.virtual_time import CLOCK, LiveClock

SLOTS, KEPT = 17, 19
SLOW: dict[str, Any] = {"kind": "slow", "server": 0, "factor": 5.0}
CRASH: dict[str, Any] = {"kind": "crash", "server": 1, "at_s": 200.0}
MAIN = "import sys\nfrom dfexp.generate.loop import Loop\nfrom dfexp.generate.process import main\n{}\nsys.exit(main())"
TERMS: dict[str, Any] = {"canary_s": 0.0, "least_speed": 0.0}
NO_TAKING_BACK = "Loop._take_back = lambda self, slots: None"


@dataclass(frozen=True, slots=True)
class Came:
    """What came of one case: virtual seconds at which its rows ended, by which servers, and its slots."""

    ended: np.ndarray[Any, Any]
    by: Counter[str]
    slots: dict[str, float]

    @property
    def total_s(self) -> float:
        """From the first request to the last answer."""
        return float(self.ended.max())

    @property
    def tail_s(self) -> float:
        """The last 2 % of the rows."""
        return self.total_s - float(np.quantile(self.ended, 0.98))


def spec_of(root: Path, rows: int, servers: int, faults: Sequence[dict[str, Any]], chunk: int = 8192) -> RunSpec:
    """A run, whose prompts are there."""
    path = root / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(rows)))
    flags = {
        "context_length": 8192, "mem_fraction_static": 0.9, "mamba_scheduler_strategy": "no_buffer",
        "max_running_requests": SLOTS, "chunked_prefill_size": chunk,
    }  # fmt: skip
    tree = {
        "run": "slots",
        "fleet": {
            "engine": "simulated", "model": "/models/Qwen3.6-27B", "servers": servers, "load_s": 60,
            "flags": flags, "faults": list(faults),
        },
        "prompts": {"path": "prompts.jsonl"},
        "generation": {"max_tokens": 8192, "sample_interval_s": 0.1, "rows_per_shard": 500},
        "plan": {
            "gpu": "rtx-pro-6000", "shared_prefix_share": 0.0, "prompt": {"median": 40, "p95": 90},
            "completion": {"median": 300, "p95": 800},
        },
    }  # fmt: skip
    return params.validate(tree, "full_slots")


@contextmanager
def served(spec: RunSpec, root: Path) -> Iterator[Fleet]:
    """The servers, which are gone at the end."""
    the_fleet, _ = fleet.up(spec, root)
    try:
        the_fleet.wait_ready(120.0)
        yield the_fleet
    finally:
        fleet.attach(generate.fleet_folder(spec, root)).down(0.0, force=True)


def by_dfexp(folder: Path, rows: int, servers: int, *faults: Any, patch: str = "", changed: bool = False) -> Came:
    """Through the generating process, as it is or with something left out; `changed`: under a rolling change."""
    root = Path(tempfile.mkdtemp(dir=folder))
    spec = spec_of(root, rows, servers, faults)
    with served(spec, root):
        run = generate.prepare(spec, root)
        argv = [sys.executable, "-c", MAIN.format(patch), "--folder", str(run.path), "--root", str(root)]
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            if changed:
                if not control.wait_until(lambda: (control.read_status(run) or {}).get("done", 0) > rows / 10, 120.0):
                    raise SystemExit("no rows came")
                new, told = spec_of(root, rows, servers, faults, chunk=4096), list[str]()
                asked = threading.Thread(target=reconfigure, args=(new, root, told.append), kwargs=TERMS)
                asked.start()
            process.wait(timeout=240)
            if changed:
                asked.join()
                print(f"  the change: {told[-1]}", flush=True)
        finally:
            process.kill()
        status = control.read_status(run) or {}
        if process.returncode or (status["done"], status["failed"]) != (rows, 0):
            raise SystemExit(f"not all rows were done: {status}")
        data = load(run)
    ended = data.rows["finished_at"].to_numpy() - data.began
    return Came(ended, Counter(data.rows["server"].astype(str)), status["slots"])


def by_turns(folder: Path, rows: int, servers: int, *faults: Any) -> Came:
    """Row i to server i modulo their number, each kept full."""
    root = Path(tempfile.mkdtemp(dir=folder))
    spec = spec_of(root, rows, servers, faults)
    with served(spec, root) as the_fleet:
        now, by = LiveClock(generate.fleet_folder(spec, root).path / CLOCK), Counter[str]()
        began, ended = now(), list[float]()

        async def one(session: aiohttp.ClientSession, url: str, places: asyncio.Semaphore, index: int) -> None:
            body = {"model": "m", "max_tokens": 7000, "messages": [{"role": "user", "content": f"question {index}"}]}
            async with places, session.post(f"{url}/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            ended.append(now() - began)
            by[url] += 1

        async def every() -> None:
            headers = {"Authorization": f"Bearer {the_fleet.key}"}
            async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
                places = [(each.url, asyncio.Semaphore(KEPT)) for each in the_fleet.servers]
                await asyncio.gather(*(one(session, *places[n % servers], n) for n in range(rows)))

        asyncio.run(every())
    return Came(np.array(ended), by, {})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000, help="of each case with eight servers; at least 7,600")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to make the folder")
    asked, began = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(dir=asked.folder, ignore_cleanup_errors=True) as name:
        root, rows, few = Path(name), asked.rows, asked.rows // 4
        cases: list[tuple[str, str, Callable[[], Came]]] = [
            ("8 servers", "8 servers", lambda: by_dfexp(root, rows, 8)),
            ("8, one dies and loads again", "8 servers", lambda: by_dfexp(root, rows, 8, CRASH)),
            ("8, rolling change of a flag", "8 servers", lambda: by_dfexp(root, rows, 8, changed=True)),
            ("8, one 5 times slower", "8, that one: by turns", lambda: by_dfexp(root, rows, 8, SLOW)),
            ("8, that one: no taking back", "8, that one: by turns",
             lambda: by_dfexp(root, rows, 8, SLOW, patch=NO_TAKING_BACK)),
            ("8, that one: by turns", "8, that one: by turns", lambda: by_turns(root, rows, 8, SLOW)),
            ("2, one 5 times slower", "2: by turns", lambda: by_dfexp(root, few, 2, SLOW)),
            ("2: by turns", "2: by turns", lambda: by_turns(root, few, 2, SLOW)),
        ]  # fmt: skip
        found: dict[str, Came] = {}
        for name, _, play in cases:
            found[name] = play()
            print(f"  {time.monotonic() - began:.0f} s: {name}", file=sys.stderr, flush=True)
    print("Simulated servers; all times are simulated.\n")
    print(
        "| case | rows | seconds | s a row, over that of | slots occupied | running | away s | tail s | most by one |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, other, _ in cases:
        came, beside = found[name], found[other]
        number, there = len(came.ended), came.slots.get("there", 0.0)
        ratio = came.total_s / number / (beside.total_s / len(beside.ended))
        shares = [f"{came.slots[key] / there:.4f}" for key in ("occupied", "running")] if there else ["-", "-"]
        away = f"{came.slots['away_s']:,.0f}" if there else "-"
        print(f"| {name} | {number:,} | {came.total_s:,.0f} | {ratio:.3f} of {other} | {' | '.join(shares)} | {away}"
              f" | {came.tail_s:,.0f} | {max(came.by.values()) / number:.3f} |")  # fmt: skip


if __name__ == "__main__":
    main()
