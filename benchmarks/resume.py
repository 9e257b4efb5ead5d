"""What safety costs, and how soon a run goes on: commits, seals, opening, and the first new request after a resume.

    python benchmarks/resume.py [--rows 50000 654676] [--row-bytes 2048] [--folder FOLDER]

Needs about rows x row-bytes of disk. Rows are written in the order in which 512 requests in flight would end. Times
are of one run on one machine, with all files in the page cache; the ratios mean more than the times.

The first request: from the start of a cold interpreter until a chat request arrives at a local server, with so many
rows done and 1,000 left, the best of four. The plain way, beside it, is a script with the same client that parses all
shards to learn what is done, and knows nothing of torn lines, other parameters or a second writer. "Imports" is an
interpreter that imports what the process imports, and ends; the plain way's are those of openai.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

from dfexp import fleet, generate, params
from dfexp.generate import identity
from dfexp.jsonl import read_json
from dfexp.layout import RunFolder
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


LEFT = 1000
"""Rows that are left to do when a run is resumed."""
CACHING = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Compiled imports are kept, as they are where that is not turned off: without them a start takes twice as long."""

IMPORTS = "import gc, os; gc.disable(); import {}; os._exit(0)"
PLAIN = """
import asyncio, json, sys
from pathlib import Path
import openai

folder, url = Path(sys.argv[1]), sys.argv[2]
done = set()
for path in sorted((folder / "completions").glob("completions_*.jsonl*")):
    with path.open() as file:
        done.update(json.loads(line)["index"] for line in file)
left = []
with (folder / "prompts.jsonl").open() as file:
    for line in file:
        prompt = json.loads(line)
        if prompt["index"] not in done:
            left.append(prompt)

async def main():
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="-") as client:
        await client.chat.completions.create(model="m", messages=left[0]["messages"])

asyncio.run(main())
"""


class FirstRequest(http.server.ThreadingHTTPServer):
    """Lists a model and answers chats; `arrived_at` is when the first question of a run came, 0 before."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.arrived_at, self.came = 0.0, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no error."""

    def __enter__(self) -> FirstRequest:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Answers(http.server.BaseHTTPRequestHandler):
    """One connection to `FirstRequest`."""

    protocol_version = "HTTP/1.1"
    server: FirstRequest

    def do_GET(self) -> None:
        """Every page lists the model."""
        self._say({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        """A chat; what only asks whether the server serves is no question of the run."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"question" in body and not self.server.came.is_set():
            self.server.arrived_at = time.perf_counter()
            self.server.came.set()
        message = {"role": "assistant", "content": "yes"}
        self._say({
            "id": "c", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        })  # fmt: skip

    def _say(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def first_request_s(server: FirstRequest, command: list[str]) -> float:
    """Seconds from the start of the command to its first question; it is killed then, so that it does no row."""
    server.came.clear()
    begun = time.perf_counter()
    with subprocess.Popen(command, env=CACHING, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        if not server.came.wait(300):
            raise SystemExit(f"no request came from {' '.join(command)[:200]}")
        process.kill()
    return server.arrived_at - begun


def resumed(scratch: Path, rows: int, row_bytes: int) -> None:
    """Build a run with so many rows done, and print how soon each way sends the next one."""
    (scratch / "params").mkdir(parents=True)
    with (scratch / "params" / "p.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(rows + LEFT))
    with FirstRequest() as server:
        group = {"engine": "external", "urls": [server.url], "max_running_requests": 4, "context_length": 4096}
        tree = {"run": "r", "fleet": group, "prompts": {"path": "params/p.jsonl"}, "generation": {"max_tokens": 16}}
        spec = params.validate(tree, "the benchmark")
        folder = generate.prepare(spec, scratch)
        servers, _ = fleet.up(spec, scratch)
        servers.wait_ready(30.0)
        fill(folder, spec, rows, row_bytes)
        process = ["--folder", str(folder.path), "--root", str(scratch)]
        ways = {
            "resume": [sys.executable, "-m", "dfexp.generate", *process],
            "resume, imports": [sys.executable, "-c", IMPORTS.format("dfexp.generate.process")],
            "plain": [sys.executable, "-c", PLAIN, str(folder.path), server.url],
            "plain, imports": [sys.executable, "-c", IMPORTS.format("openai")],
        }
        took = dict.fromkeys(ways, inf)
        for way, command in list(ways.items()) * 4:  # in turns, so that what else the machine does hits all alike
            found = duration(command) if "imports" in way else first_request_s(server, command)
            took[way] = min(took[way], found)
    for way in ("resume", "plain"):
        imports = took[f"{way}, imports"]
        rest = took[way] - imports
        print(f"{rows:>9,} rows done, {way:8}{took[way]:6.2f} s to the first new request, ", end="")
        print(f"{imports:.2f} s of them imports ({imports / took[way]:.0%}); {rest:.2f} s without")
    beyond = (took["plain"] - took["plain, imports"]) / (took["resume"] - took["resume, imports"])
    print(f"{'':9} plain / resume: {took['plain'] / took['resume']:.1f}; without imports {beyond:.1f}")


def duration(command: list[str]) -> float:
    """Seconds that a command takes."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, env=CACHING, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def fill(folder: RunFolder, spec: params.RunSpec, rows: int, row_bytes: int) -> None:
    """Write so many rows of the run, with the fingerprint that a start of it computes."""
    frozen = read_json(folder.run_json)["prompts"]
    prints = identity.fingerprint(frozen["sha256"], "m", spec.generation)
    text, order = "x" * max(0, row_bytes - 300), list(finishing_order(rows))
    with Shards.open(
        folder.completions, total=frozen["asked"], fingerprint=prints, rows_per_shard=ROWS_PER_SHARD
    ) as run:
        for start in range(0, rows, ROWS_PER_SHARD):
            run.commit([completion(index, text) for index in order[start : start + ROWS_PER_SHARD]])


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
    """Build the run, open it in several states, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 654_676])
    parser.add_argument("--row-bytes", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder unless given")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.measure, asked.folder, asked.rows[0])
        return
    for rows in asked.rows:
        with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
            resumed(Path(scratch), rows, asked.row_bytes)
    opening(asked.folder, asked.rows[-1], asked.row_bytes)


def opening(where: Path | None, rows: int, row_bytes: int) -> None:
    """Build completions and open them in several states; prints the table."""
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        folder = Path(scratch) / "completions"
        build(folder, rows, row_bytes)
        size = read_bytes(folder)
        print(f"\n{rows} rows, {len(list_shards(folder))} shards, {size / 2**20:.0f} MiB; ", end="")
        print(f"manifest.json {(folder / 'manifest.json').stat().st_size / 2**20:.1f} MiB")
        read_s, read_mib, _, _ = in_child("read", folder, rows)
        print(f"{'':44}{'time':>10}{'of reading':>12}{'memory':>12}")
        print(f"{'reading the bytes of all shards':44}{read_s:>8.2f} s{1:>12.2f}{read_mib:>8.0f} MiB")
        for name, prepare in (
            ("opening", lambda: None),
            ("opening without .done_indices", lambda: (folder / ".done_indices").unlink(missing_ok=True)),
        ):
            prepare()
            took, mib, pending, pending_s = in_child("open", folder, rows)
            print(f"{name:44}{took:>8.2f} s{took / read_s:>12.2f}{mib:>8.0f} MiB")
        print(f"pending() of {pending} rows: {ms(pending_s)}")
        for shard in list_shards(folder):
            os.utime(shard.path)
        begun = time.perf_counter()
        opened(folder, rows).close()
        took = time.perf_counter() - begun
        print(f"{'opening a copy: every shard checked again':44}{took:>8.2f} s{took / read_s:>12.2f}")
        (folder / "manifest.json").unlink()
        begun = time.perf_counter()
        opened(folder, rows).close()
        took = time.perf_counter() - begun
        print(f"{'opening without manifest.json: every row read':44}{took:>8.2f} s{took / read_s:>12.2f}")


if __name__ == "__main__":
    main()
