"""What a report of a long run takes: the time and the memory of 04_report, of what it is made of, and of a comparison
of two such runs.

    python benchmarks/report_size.py [--rows 654676] [--hours 62] [--token-bytes 4] [--folder FOLDER]

Makes a run of the reference's size first: its rows with texts as long as their tokens say, and a sample of each of 8
servers every 5 s. Needs about rows x 2,700 x token-bytes of disk. With --folder the run is kept, and used again if it
is there. Files may be in the page cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dfexp import params
from dfexp.jsonl import AppendLog, write_json
from dfexp.layout import RunFolder
from dfexp.records import Completion, EngineSample
from dfexp.shards import Shards

ROOT = Path(__file__).resolve().parent.parent
SERVERS, RUNNING, EVERY_S, BEGAN = 8, 64, 5.0, 1_800_000_000.0
PRINTS = {"prompts": "p", "model": "m", "sampling": "s"}
PARTS = """
import sys, time
from pathlib import Path
from dfexp import figures, report
from dfexp.layout import RunFolder
from dfexp.params import ReportGroup
began = time.perf_counter()
data = report.load(RunFolder(Path(sys.argv[1])))
others = report.compared(data, sys.argv[2:], Path.cwd())
loaded = time.perf_counter()
report.write(data, ReportGroup(), Path.cwd(), others)
written = time.perf_counter()
for draw in (figures.throughput, figures.gap, figures.in_flight, figures.usages, figures.usages_by_running,
             figures.lengths, figures.latencies, lambda data: figures.compared(data, others)):
    (chart := draw(data)) and chart._repr_mimebundle_()
print(f"load {loaded - began:.1f} s, tables {written - loaded:.1f} s, figures {time.perf_counter() - written:.1f} s")
"""


def rows(number: int, hours: float, token_bytes: int) -> Iterator[Completion]:
    """Rows as they end: every one of the servers' requests is followed by the next at once."""
    drawn = np.random.default_rng(1)
    tokens = np.minimum(drawn.lognormal(np.log(2542), 0.41, number), 7978).astype(int) + 1
    slots = SERVERS * RUNNING
    ends = np.zeros(number)
    for slot in range(slots):
        ends[slot::slots] = np.cumsum(tokens[slot::slots])
    token_s = hours * 3600 / ends.max()
    words = drawn.integers(97, 123, 400_000, dtype=np.uint8)
    words[::6] = 32
    text = words.tobytes().decode()
    for index in np.argsort(ends).tolist():
        length, start = int(tokens[index]), index * 37 % 300_000
        yield Completion(
            index=index, id=f"p{index}", messages=({"role": "user", "content": text[start : start + 600]},),
            text=text[start : start + token_bytes * length], finish_reason="length" if length > 7900 else "stop",
            prompt_tokens=150, completion_tokens=length, max_tokens=8042, server=f"127.0.0.1:{30000 + index % SERVERS}",
            config_id="c0", attempt=1, latency_s=length * token_s,
            submitted_at=BEGAN + (ends[index] - length) * token_s,
        )  # fmt: skip


def samples(hours: float, tok_per_s: float) -> Iterator[EngineSample]:
    """What the servers say meanwhile."""
    drawn = np.random.default_rng(2)
    for look in range(int(hours * 3600 / EVERY_S)):
        for server in range(SERVERS):
            at_s, noise = look * EVERY_S + server / SERVERS, float(drawn.normal())
            made = at_s * tok_per_s / SERVERS
            yield EngineSample(
                at=BEGAN + at_s, server=f"127.0.0.1:{30000 + server}", num_running_reqs=RUNNING, num_queue_reqs=0,
                gen_throughput=tok_per_s / SERVERS + noise, token_usage=0.59, full_token_usage=0.41 + noise / 100,
                mamba_usage=0.5925925925925926, mamba_used_tokens=128, mamba_available_tokens=0,
                mamba_evictable_tokens=88, kv_used_tokens=118_000, kv_available_tokens=20_548,
                kv_evictable_tokens=140_496, max_total_num_tokens=289_354, cache_hit_rate=0.0, num_retracted_reqs=0,
                prompt_tokens_total=made // 20, generation_tokens_total=made, num_requests_total=made // 2766,
                realtime_decode_tokens_total=made, realtime_prefill_tokens_total=made // 20, max_running_requests=72,
            )  # fmt: skip


def build(folder: RunFolder, number: int, hours: float, token_bytes: int) -> None:
    """Write the run's folder."""
    folder.path.mkdir(parents=True)
    spec = params.load(ROOT / "params" / "expansion_v1.yaml", ["run=size"]).model_dump()
    prompts = {"asked": number, "sha256": "p", "sources": [], "dropped": []}
    run = {"run": "size", "spec": spec, "versions": {}, "hardware": {}, "prompts": prompts, "configs": {}}
    write_json(folder.run_json, {**run, "fingerprint": PRINTS, "created_at": BEGAN})
    waiting, total = list[Completion](), 0
    with Shards.open(folder.completions, total=number, fingerprint=PRINTS, rows_per_shard=500) as shards:
        for row in rows(number, hours, token_bytes):
            total += row.completion_tokens or 0
            waiting.append(row)
            if len(waiting) == 500:
                shards.commit(waiting, [])
                waiting.clear()
        shards.commit(waiting, [])
    with AppendLog(folder.metrics, durable=False) as log:
        log.append(sample.to_json() for sample in samples(hours, total / hours / 3600))


def _busy_s() -> float:
    """CPU seconds of the processes that have ended: what other programs on the machine do changes them little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=654_676)
    parser.add_argument("--hours", type=float, default=62.0)
    parser.add_argument("--token-bytes", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.folder or Path(temporary)).resolve()
        folder = RunFolder(root / "outputs" / "size")
        (root / "params").mkdir(parents=True, exist_ok=True)
        if not folder.run_json.exists():
            began = time.perf_counter()
            build(folder, args.rows, args.hours, args.token_bytes)
            print(f"made in {time.perf_counter() - began:.0f} s", flush=True)
        size = sum(path.stat().st_size for path in folder.completions.iterdir())
        lines = folder.metrics.read_bytes().count(b"\n")
        print(f"{size / 1e9:.2f} GB of rows, {lines:,} samples, {folder.metrics.stat().st_size / 1e6:.0f} MB of them")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for name, command in (
            ("parts", [sys.executable, "-c", PARTS, str(folder.path)]),
            ("parts, of two runs", [sys.executable, "-c", PARTS, str(folder.path), str(folder.path)]),
            ("dfexp report", [sys.executable, "-m", "dfexp.cli", "report", "outputs/size"]),
        ):
            began, busy_s = time.perf_counter(), _busy_s()
            subprocess.run(command, cwd=root, env=environment, check=True)
            most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
            took = f"{time.perf_counter() - began:.1f} s in all, {_busy_s() - busy_s:.1f} s of them on a core"
            print(f"{name}: {took}, at most {most:.2f} GiB in one process so far", flush=True)


if __name__ == "__main__":
    main()
