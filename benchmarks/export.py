"""What a training set of a long run takes: the time and the memory of `dfexp export` in each format.

    python benchmarks/export.py [--rows 654676] [--token-bytes 1] [--folder FOLDER]

Makes a run of the reference's size first, as benchmarks/report_size.py does; with --folder it is kept, and used again
if it is there. Sets are removed again. Files may be in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report_size import build
from dfexp.layout import RunFolder

ROOT = Path(__file__).resolve().parent.parent
SETS = (("set.jsonl", []), ("set.parquet", ["--thinking", "apart"]), ("more.jsonl", ["--merge", "FIRST"]))
LIKE_REAL = ("--validation", "0.02", "--accept", "unclosed_thought")  # the texts of that run are letters alone


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=654_676)
    parser.add_argument("--hours", type=float, default=62.0)
    parser.add_argument("--token-bytes", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.folder or Path(temporary)).resolve()
        folder = RunFolder(root / "outputs" / "size")
        if not folder.run_json.exists():
            build(folder, args.rows, args.hours, args.token_bytes)
        size = sum(path.stat().st_size for path in folder.completions.iterdir())
        print(f"a run of {args.rows:,} rows in {size / 1e9:.2f} GB", flush=True)
        first = root / "sets" / "0" / "set.jsonl"
        for number, (name, more) in enumerate(SETS):
            to = root / "sets" / str(number) / name
            options = [str(first) if word == "FIRST" else word for word in more]
            given = ["export", str(folder.path), "--to", str(to), *LIKE_REAL, *options]
            began = time.perf_counter()
            child = subprocess.Popen(
                [sys.executable, "-m", "dfexp.cli", *given], env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
            _, status, used = os.wait4(child.pid, 0)  # of this process alone
            took, busy = time.perf_counter() - began, used.ru_utime + used.ru_stime
            made = sum(path.stat().st_size for path in to.parent.iterdir()) / 1e9
            print(
                f"{' '.join((name, *more))}: exit {status}, {took:.0f} s, {busy:.0f} s of a core, "
                f"{args.rows / took:,.0f} rows/s, at most {used.ru_maxrss / 2**20:.2f} GiB, {made:.2f} GB made",
                flush=True,
            )
        shutil.rmtree(root / "sets")


if __name__ == "__main__":
    main()
