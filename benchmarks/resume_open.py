"""What safety costs: a commit, a seal, and opening a finished run against merely reading its files.

    python benchmarks/resume_open.py [--rows 654676] [--row-bytes 2048] [--folder FOLDER]

Needs about rows x row-bytes of disk. Rows are written in the order in which 512 requests in flight would end. Times
are of one run on one machine, with all files in the page cache; the ratios mean more than the times.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dfexp.records import Completion
from dfexp.shards import Shards, list_shards

FINGERPRINT = {"prompts": "p", "model": "m", "sampling": "s"}
ROWS_PER_SHARD = 500
SHARD_S = 500 * 2660 / 9400
"""Seconds in which the reference run fills a shard: 500 rows of 2,660 tokens at 9,400 tok/s."""


def completion(index: int, text: str) -> Completion:
    """A row with `text`; everything else is short."""
    return Completion(
        index=index,
        id=str(index),
        messages=({"role": "user", "content": "question"},),
        text=text,
        finish_reason="stop",
        prompt_tokens=10,
        completion_tokens=100,
        max_tokens=4096,
        server="127.0.0.1:8080",
        config_id="c0",
        attempt=1,
        submitted_at=0.0,
        latency_s=1.0,
    )


def finishing_order(total: int, in_flight: int = 512) -> Iterator[int]:
    """Indices as they end when `in_flight` run at once and any of them may end next."""
    choose = random.Random(1)
    running = list(range(min(in_flight, total)))
    for index in range(len(running), total):
        position = choose.randrange(in_flight)
        yield running[position]
        running[position] = index
    choose.shuffle(running)
    yield from running


def opened(folder: Path, total: int) -> Shards:
    """The run of this benchmark."""
    return Shards.open(folder, total=total, fingerprint=FINGERPRINT, rows_per_shard=ROWS_PER_SHARD)


def build(folder: Path, total: int, row_bytes: int) -> None:
    """Write the run. Its first and last shards are written in commits of 10 rows, which are timed; prints the times."""
    text = "x" * max(0, row_bytes - 300)
    order = list(finishing_order(total))
    shards = [order[start : start + ROWS_PER_SHARD] for start in range(0, total, ROWS_PER_SHARD)]
    timed = {number for number in (*range(5), *range(len(shards) - 6, len(shards) - 1)) if number >= 0}
    commits: list[float] = []
    seals: dict[int, float] = {}
    with opened(folder, total) as run:
        for number, indices in enumerate(shards):
            step = 10 if number in timed else ROWS_PER_SHARD
            for start in range(0, len(indices), step):
                rows = [completion(index, text) for index in indices[start : start + step]]
                begun = time.perf_counter()
                sealed = run.commit(rows)
                took = time.perf_counter() - begun
                if number in timed:
                    commits.append(took)
                    if sealed:
                        seals[number] = took
                        commits.pop()
        run.seal()
    deciles = statistics.quantiles(commits, n=100)
    print(f"commit of 10 rows of {row_bytes} bytes: median {ms(deciles[49])}, 99th percentile {ms(deciles[98])}")
    for what, numbers in (("first", list(seals)[:5]), ("last", list(seals)[-5:])):
        median = statistics.median(seals[number] for number in numbers)
        names = f"{numbers[0]}..{numbers[-1]}"
        print(f"commit of 10 rows that seals a shard, {what} ones ({names}): median {ms(median)}, ", end="")
        print(f"{median / SHARD_S:.4%} of the {SHARD_S:.0f} s that a shard of the reference run takes")


def ms(seconds: float) -> str:
    """For the table."""
    return f"{seconds * 1000:.1f} ms"


def read_bytes(folder: Path) -> int:
    """Read every shard, and do nothing with it."""
    size = 0
    for shard in list_shards(folder):
        with shard.path.open("rb", buffering=0) as file:
            while data := file.read(1 << 20):
                size += len(data)
    return size


def peak_kib() -> int:
    """The most memory that this process has used so far (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def measure(what: str, folder: Path, total: int) -> None:
    """In a process of its own: do one thing, and print its seconds and the memory it needed on top."""
    before = peak_kib()
    begun = time.perf_counter()
    if what == "read":
        read_bytes(folder)
    else:
        with opened(folder, total) as run:
            took = time.perf_counter() - begun
            pending = len(run.pending())
            pending_s = time.perf_counter() - begun - took
            print(took, peak_kib() - before, pending, pending_s)
            return
    print(time.perf_counter() - begun, peak_kib() - before, 0, 0)


def in_child(what: str, folder: Path, total: int) -> tuple[float, float, int, float]:
    """Seconds, MiB, pending rows and seconds of `pending()`, of the best of three processes."""
    command = [sys.executable, __file__, "--measure", what, "--rows", str(total), "--folder", str(folder)]
    outputs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(3)]
    seconds, kib, pending, pending_s = min(outputs, key=lambda words: float(words[0]))
    return float(seconds), int(kib) / 1024, int(pending), float(pending_s)


def main() -> None:
    """Build the run, open it in several states, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=654_676)
    parser.add_argument("--row-bytes", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder unless given")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.measure, asked.folder, asked.rows)
        return
    with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
        folder = Path(scratch) / "completions"
        build(folder, asked.rows, asked.row_bytes)
        size = read_bytes(folder)
        print(f"\n{asked.rows} rows, {len(list_shards(folder))} shards, {size / 2**20:.0f} MiB; ", end="")
        print(f"manifest.json {(folder / 'manifest.json').stat().st_size / 2**20:.1f} MiB")
        read_s, read_mib, _, _ = in_child("read", folder, asked.rows)
        print(f"{'':44}{'time':>10}{'of reading':>12}{'memory':>12}")
        print(f"{'reading the bytes of all shards':44}{read_s:>8.2f} s{1:>12.2f}{read_mib:>8.0f} MiB")
        for name, prepare in (
            ("opening", lambda: None),
            ("opening without .done_indices", lambda: (folder / ".done_indices").unlink(missing_ok=True)),
        ):
            prepare()
            took, mib, pending, pending_s = in_child("open", folder, asked.rows)
            print(f"{name:44}{took:>8.2f} s{took / read_s:>12.2f}{mib:>8.0f} MiB")
        print(f"pending() of {pending} rows: {ms(pending_s)}")
        for shard in list_shards(folder):
            os.utime(shard.path)
        begun = time.perf_counter()
        opened(folder, asked.rows).close()
        took = time.perf_counter() - begun
        print(f"{'opening a copy: every shard checked again':44}{took:>8.2f} s{took / read_s:>12.2f}")
        (folder / "manifest.json").unlink()
        begun = time.perf_counter()
        opened(folder, asked.rows).close()
        took = time.perf_counter() - begun
        print(f"{'opening without manifest.json: every row read':44}{took:>8.2f} s{took / read_s:>12.2f}")


if __name__ == "__main__":
    main()
