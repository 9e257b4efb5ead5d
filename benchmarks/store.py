"""Uploads beside a run: whether generation notices them, what a minute without S3 costs, how fast a restore is.

    python benchmarks/store.py [--shards 1310] [--away-s 60] [--rows-per-s 1200] [--least-ratio 0.99]
                               [--folder /tmp/store-benchmark]

A simulated client (no servers: each answer is a sleep) hands rows of 10 KB to the recorder of generation, which writes
shards of 500. Turns with the uploads (a real SeaweedFS on this machine, over HTTP) and without them alternate in one
process, so that both see the same machine. In the middle S3 is killed and started again. Then everything is verified,
20 foreign objects are attacked, and the whole is restored in a process of its own. Needs 2 x 10 MB of disk a shard.
Exit status 1 if a promise does not hold; that of the ratio needs minutes of turns: --least-ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dfexp.errors import StoreConflict  # noqa: E402
from dfexp.generate.events import EventLog  # noqa: E402
from dfexp.generate.recorder import Recorder  # noqa: E402
from dfexp.jsonl import encode_line, write_json  # noqa: E402
from dfexp.layout import RunFolder  # noqa: E402
from dfexp.params import StoreGroup  # noqa: E402
from dfexp.records import Completion  # noqa: E402
from dfexp.shards import Shards, read_manifest  # noqa: E402
from dfexp.store import Uploader, verify  # noqa: E402
from dfexp.store.bucket import Bucket  # noqa: E402
from tests.store.server import ENVIRONMENT, S3Server, client  # noqa: E402

ROWS, IN_FLIGHT, PRINTS = 500, 256, {"prompts": "p", "model": "m", "sampling": "{}"}
TEXT = "".join(hashlib.sha256(str(n).encode()).hexdigest() for n in range(150))  # 9,600 characters


class Side:
    """One of the two runs: its folder, its recorder, its next row."""

    def __init__(self, path: Path, rows: int, group: StoreGroup | None) -> None:
        self.folder, self.rows, self.next = RunFolder(path), rows, 0
        self.folder.completions.mkdir(parents=True)
        with self.folder.prompts.open("wb") as file:
            for index in range(rows):
                content = f"question {index} {TEXT[index % 9000 :][:120]}"
                line = {"index": index, "id": str(index), "messages": [{"role": "user", "content": content}]}
                file.write(encode_line(line))
        sha256 = hashlib.sha256(self.folder.prompts.read_bytes()).hexdigest()
        spec = {
            "run": path.name, "outputs": "outputs", "fleet": {"engine": "external", "urls": ["http://127.0.0.1:9"]},
            "prompts": {"path": "p.jsonl"}, "generation": {"rows_per_shard": ROWS},
            "store": group.model_dump() if group else {},
        }  # fmt: skip
        prompts = {"asked": rows, "sha256": sha256, "sources": [], "dropped": [], "dropped_by_reason": {}}
        about = {"run": path.name, "spec": spec, "prompts": prompts, "configs": {}, "created_at": time.time()}
        write_json(self.folder.run_json, {**about, "fingerprint": PRINTS})
        self.shards = Shards.open(self.folder.completions, total=rows, fingerprint=PRINTS, rows_per_shard=ROWS)
        self.events = EventLog(self.folder.events)
        self.events.repeats = False  # type: ignore[misc]
        self.uploads = Uploader(self.folder, group, self.shards, self.events.record) if group else None
        self.recorder = Recorder(self.shards, self.events)


class Client:
    """Keeps IN_FLIGHT answers on their way; each takes so long and then goes to the side whose turn it is."""

    def __init__(self, side: Side, rows_per_s: float) -> None:
        self.side, self.latency_s, self.answers = side, IN_FLIGHT / rows_per_s, 0

    async def one(self) -> None:
        """One slot: an answer, and the next one."""
        while True:
            await asyncio.sleep(self.latency_s)
            side = self.side
            if side.next == side.rows or side.recorder.backlog > 2000:
                continue
            index, side.next = side.next, side.next + 1
            self.answers += 1
            side.recorder.add(
                Completion(
                    index=index,
                    id=str(index),
                    messages=({"role": "user", "content": "question"},),
                    text=f"{index} {TEXT}",
                    finish_reason="stop",
                    prompt_tokens=10,
                    completion_tokens=2500,
                    max_tokens=8000,
                    server="s",
                    config_id="c",
                    attempt=1,
                    submitted_at=1.0,
                    latency_s=2.0,
                )
            )


async def drive(
    stored: Side, plain: Side, server: S3Server, rows_per_s: float, away_s: float, turn_s: float
) -> list[dict[str, Any]]:
    """All rows of `stored`, in turns with `plain`; one line for each turn."""
    client, turns, killed_at = Client(plain, rows_per_s), [], None
    tasks = [asyncio.create_task(side.recorder.run()) for side in (stored, plain)]
    tasks += [asyncio.create_task(client.one()) for _ in range(IN_FLIGHT)]
    is_back = False
    while stored.next < stored.rows:
        client.side = plain if len(turns) % 4 == 0 and plain.next < plain.rows else stored
        began, before, state = time.monotonic(), client.answers, "up"
        while time.monotonic() - began < turn_s and stored.next < stored.rows:
            await asyncio.sleep(0.25)
            if killed_at is None and stored.next > 0.4 * stored.rows and client.side is stored:
                await asyncio.to_thread(server.kill)
                killed_at = time.monotonic()
            if killed_at is not None and not is_back and time.monotonic() - killed_at > away_s:
                await asyncio.to_thread(server.start)
                is_back = True
            state = "S3 killed" if killed_at is not None and not is_back else state
        turns.append(
            {
                "side": "without" if client.side is plain else "with",
                "state": state,
                "s": time.monotonic() - began,
                "answers": client.answers - before,
                "waiting": len(stored.uploads.left) if stored.uploads else 0,
            }
        )
        one = turns[-1]
        print(f"  {one['side']:<8}{one['state']:<10}{one['answers'] / one['s']:8.1f} answers/s, {one['waiting']} wait")
    for task in tasks[2:]:
        task.cancel()
    for side in (stored, plain):
        side.recorder.finish(60.0)
    await asyncio.gather(*tasks[:2])
    return turns


def mean_rate(turns: list[dict[str, Any]]) -> float:
    """Answers per second of some turns."""
    return sum(turn["answers"] for turn in turns) / max(1e-9, sum(turn["s"] for turn in turns))


def restored(url: str, bucket: str, root: Path) -> dict[str, float]:
    """In a process of its own: seconds and peak memory of a restore and of opening what it made."""
    code = (
        "import json, resource, sys, time; from pathlib import Path; from dfexp.params import StoreGroup\n"
        "from dfexp.store import restore; from dfexp.shards import Shards; began = time.monotonic()\n"
        f"made = restore('with', StoreGroup(bucket={bucket!r}, endpoint_url={url!r}), Path({str(root)!r}))\n"
        f"mid = time.monotonic(); shards = Shards.open(made.folder.completions, total=made.asked,"
        f" fingerprint={PRINTS!r}, rows_per_shard={ROWS})\n"
        "print(json.dumps({'restore_s': mid - began, 'open_s': time.monotonic() - mid, 'done': shards.done,"
        "'peak_mb': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def attacked(group: StoreGroup, url: str) -> str:
    """Puts over 20 foreign objects: errors, objects that were replaced, and objects as they were."""
    s3, errors = client(url), 0
    for number in range(20):
        s3.put_object(Bucket=group.bucket, Key=f"foreign/completions/{number}", Body=b"foreign %d" % number)
    bucket = Bucket(group, "foreign")
    for number in range(20):
        try:
            bucket.put_once(f"completions/{number}", b"ours", hashlib.sha256(b"ours").hexdigest())
        except StoreConflict:
            errors += 1
    kept = [s3.get_object(Bucket=group.bucket, Key=f"foreign/completions/{n}")["Body"].read() for n in range(20)]
    unchanged = sum(data == b"foreign %d" % number for number, data in enumerate(kept))
    return f"{errors} errors, {20 - unchanged} replaced, {unchanged} as they were"


def arguments() -> argparse.Namespace:
    """What the command was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1310)
    parser.add_argument("--away-s", type=float, default=60.0)
    parser.add_argument("--turn-s", type=float, default=15.0)
    parser.add_argument("--rows-per-s", type=float, default=1200.0)
    parser.add_argument("--least-ratio", type=float, default=0.99)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/store-benchmark"))
    return parser.parse_args()


def main() -> int:  # noqa: D103
    args = arguments()
    shutil.rmtree(args.folder, ignore_errors=True)
    os.environ.update(ENVIRONMENT, AWS_DEFAULT_REGION="us-east-1")
    with S3Server(args.folder / "s3") as server:
        client(server.url).create_bucket(Bucket="benchmark")
        group = StoreGroup(bucket="benchmark", endpoint_url=server.url)
        stored = Side(args.folder / "outputs" / "with", args.shards * ROWS, group)
        plain = Side(args.folder / "outputs" / "without", args.shards * ROWS, None)
        began = time.monotonic()
        turns = asyncio.run(drive(stored, plain, server, args.rows_per_s, args.away_s, args.turn_s))
        waiting, mid = len(stored.uploads.left), time.monotonic()
        left = stored.uploads.finish(600.0)
        ended = time.monotonic()
        for side in (stored, plain):
            side.shards.close()
            side.events.close()
        verdict, manifest = verify(stored.folder, group), read_manifest(stored.folder.completions)
        indices = Counter(index for entry in manifest.shards for index in entry.indices)
        events = [json.loads(line)["event"] for line in stored.folder.events.read_text().splitlines()]
        again = restored(server.url, "benchmark", args.folder / "elsewhere")
        attack = attacked(group, server.url)
    middle = turns[1:-1] if len(turns) > 8 else turns  # the first one starts everything, the last is cut short
    rate = {side: mean_rate([turn for turn in middle if turn["side"] == side]) for side in ("with", "without")}
    away, ratio = [turn for turn in turns if turn["state"] != "up"], rate["with"] / rate["without"]
    rows = [
        ("shards uploaded", f"{verdict.shards:,} of {args.shards:,}, {verdict.bytes / 1e9:.2f} GB"),
        ("lost, differing, foreign, twice", f"{len(left)}, {len(verdict.problems)} {verdict.problems[:3]}, "
         f"{sum(count > 1 for count in indices.values())}, rows {len(indices):,}"),
        ("answers/s with the store", f"{rate['with']:.1f} (S3 killed for {args.away_s:g} s in them)"),
        ("answers/s without", f"{rate['without']:.1f}"),
        ("ratio", f"{ratio:.4f}"),
        ("answers/s while S3 was killed", f"{mean_rate(away):.1f}"),
        ("most shards that waited", f"{max(turn['waiting'] for turn in turns)}; {waiting} at the end, "
         f"uploaded within {ended - mid:.1f} s"),
        ("events", str({name: count for name, count in Counter(events).items() if name.startswith("store")})),
        ("restore of the done-set", f"{again['done']:,} rows in {again['restore_s']:.1f} s, opened in "
         f"{again['open_s']:.1f} s, peak {again['peak_mb']:.0f} MB"),
        ("puts over 20 foreign objects", attack),
        ("took", f"{ended - began:.0f} s; load {os.getloadavg()[0]:.1f}; "
         f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB"),
    ]  # fmt: skip
    print("\n".join(f"{name:<34}{value}" for name, value in rows))
    total, peak_mb = args.shards * ROWS, again["peak_mb"]
    promises = {
        "every shard is uploaded, and agrees": verdict.shards == args.shards and not left and not verdict.problems,
        "every row once": len(indices) == total and set(indices.values()) == {1},
        f"the ratio is at least {args.least_ratio:g}": ratio >= args.least_ratio,
        "answers go on while S3 is away": bool(away) and mean_rate(away) > 0,
        "the done-set is restored whole, in 60 s and 1 GB": again["done"] == total
        and again["restore_s"] + again["open_s"] < 60 and peak_mb < 1000,
        "foreign objects stay": attack == "20 errors, 0 replaced, 20 as they were",
    }  # fmt: skip
    print("\n".join(f"{'kept' if is_kept else 'BROKEN':<8}{what}" for what, is_kept in promises.items()))
    shutil.rmtree(args.folder, ignore_errors=True)
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
