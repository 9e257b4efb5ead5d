"""What watching costs: the sampler's CPU time for 8 servers at 5 s, as a share of a core. Limit: 2 %.

    python benchmarks/sampler.py [--servers 8] [--interval 5] [--rounds 12]

The pages are real ones of busy SGLang servers (tests/data/metrics), served by a process of its own. The sampler is the
one of a run, with its threads, its file and the driver's GPUs where there are any. The first two rounds, which load
modules and fill caches, do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from dfexp import params
from dfexp.fleet import up
from dfexp.generate.events import EventLog, Guard
from dfexp.records import EngineSample, ServerLimits
from dfexp.sampler import Sampler

METRICS = Path(__file__).resolve().parents[1] / "tests" / "data" / "metrics"
PAGES = ("0.5.12_hybrid_busy.prom", "0.5.23_hybrid_busy.prom", "saturated_retracting_sglang_0.5.17_real.prom")
LIMIT, WARM = 0.02, 2


def serve(page: bytes, servers: int, told: Connection) -> None:
    """Serve one page on so many ports for ever; tells them."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *args: object) -> None:
            pass

    made = [ThreadingHTTPServer(("127.0.0.1", 0), Page) for _ in range(servers)]
    threads = [Thread(target=each.serve_forever) for each in made]
    for thread in threads:
        thread.start()
    told.send([each.server_port for each in made])


async def measured(root: Path, ports: list[int], interval_s: float, rounds: int) -> tuple[float, float, int]:
    """CPU seconds of a round, seconds between rounds, and lines written."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    tree = {"run": "r", "fleet": {"engine": "external", "urls": urls}, "prompts": {"path": "p.jsonl"}}
    fleet, marks, taken = up(params.validate(tree, "benchmark"), root)[0], list[tuple[float, float]](), 0
    over, limits = asyncio.Event(), ServerLimits(max_running_requests=72)

    def take(sample: EngineSample) -> None:
        nonlocal taken
        taken += 1
        if taken % len(ports) == 0:
            marks.append((time.process_time(), time.monotonic()))
        if len(marks) > WARM + rounds:
            over.set()

    with EventLog(fleet.folder.path / "events.jsonl") as events:
        sampler = Sampler(
            fleet=fleet, path=root / "metrics.jsonl", interval_s=interval_s, now=time.time, limits=lambda _: limits,
            taken=take, guard=Guard(events),
        )  # fmt: skip
        task = asyncio.create_task(sampler.run())
        await over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    (cpu, at), (cpu_end, end) = marks[WARM], marks[WARM + rounds]
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return (cpu_end - cpu) / rounds, (end - at) / rounds, len(lines)


def main() -> int:
    """Print the table. Exit status: 1 where a page costs more than the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    worst, spawning = 0.0, multiprocessing.get_context("spawn")
    head = ("page", "kB", "ms a round", "ms a server", "interval s", "of a core")
    print(f"{args.servers} servers\n{head[0]:48}" + "".join(f"{each:>13}" for each in head[1:]))
    for name in PAGES:
        page = (METRICS / name).read_bytes()
        ours, theirs = multiprocessing.Pipe()
        process = spawning.Process(target=serve, args=(page, args.servers, theirs), daemon=True)
        process.start()
        with tempfile.TemporaryDirectory() as root:
            cpu_s, round_s, lines = asyncio.run(measured(Path(root), ours.recv(), args.interval, args.rounds))
        process.kill()
        assert lines >= args.servers * args.rounds, f"{lines} lines were written"
        worst, cells = max(worst, cpu_s / round_s), (len(page) / 1e3, 1e3 * cpu_s, 1e3 * cpu_s / args.servers, round_s)
        print(f"{name:48}" + "".join(f"{each:13.2f}" for each in cells) + f"{cpu_s / round_s:13.2%}", flush=True)
    print(f"limit {LIMIT:.0%}: {'kept' if worst <= LIMIT else 'BROKEN'}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
