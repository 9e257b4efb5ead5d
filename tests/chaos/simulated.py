"""A run on simulated servers whose processes can be killed, and a ledger of what was ever safe."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dfexp import control, params
from dfexp.engines.simulated.server.faults import GARBAGE
from dfexp.engines.simulated.server.text import Writer, request_key
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from dfexp.shards import list_shards, read_failures, read_rows

SEED, REFUSED = 5, 40
OURS = {"contains": "question"}  # what asks whether a server serves is spared
FAULTS: list[dict[str, Any]] = [
    {"kind": "status", "status": 400, "contains": "impossible"},
    {"kind": "status", "status": 500, **OURS, "share": 0.03, "times": 12},
    {"kind": "status", "status": 429, **OURS, "share": 0.03, "times": 12, "retry_after_s": 2},
    {"kind": "html", **OURS, "share": 0.02, "times": 8},
    {"kind": "cut", **OURS, "share": 0.03, "times": 12},
    {"kind": "garbage", **OURS, "share": 0.03},
    {"kind": "crash", **OURS, "share": 0.002, "times": 2},
    {"kind": "slow", "server": 1, "at_s": 30, "for_s": 60, "factor": 3},
]
"""Every one of `REFUSED` prompts is refused for good; the rest passes."""


def spec_of(root: Path, run: str, prompts: int, *, faults: Sequence[Any] = FAULTS, **generation: Any) -> RunSpec:
    """A run of so many prompts on two servers of its own."""
    path = root / "params" / "prompts.jsonl"
    path.parent.mkdir(exist_ok=True)
    asked = (f"question {n}{' (impossible)' * (n % REFUSED == REFUSED - 1)}" for n in range(prompts))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    tree = {
        "run": run,
        "fleet": {
            "engine": "simulated", "model": "Qwen3.6-27B", "servers": 2,
            "speed": 30, "seed": SEED, "load_s": 5, "thinking": False, "faults": list(faults),
            "flags": {"context_length": 8192, "mem_fraction_static": 0.9, "max_running_requests": 16},
        },
        "prompts": {"path": "params/prompts.jsonl"},
        "generation": {"max_tokens": "fit", "concurrency": 8, "max_attempts": 30, "drain_s": 5.0, **generation},
        "plan": {"gpu": "rtx-pro-6000", "prompt": {"tokens": 20}, "completion": {"median": 40, "p95": 400}},
    }  # fmt: skip
    return params.validate(tree, "a test")


def start(folder: RunFolder, root: Path, *more: str) -> subprocess.Popen[bytes]:
    """The generating process alone, so that it can be killed before it has said anything."""
    folder.control.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "dfexp.generate", "--folder", str(folder.path), "--root", str(root), *more]
    with folder.log.open("ab") as log:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


@cache
def writer() -> Writer:
    """What the servers write out of."""
    return Writer(SEED)


class Ledger:
    """What was ever seen safe in a run: it may only grow, and no index may be there twice."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.reported = 0
        self.garbage = 0

    def check(self) -> None:
        """Raises AssertionError for a row that was lost, doubled, torn or mixed up, or reported done and not there."""
        rows, failures = list(read_rows(self.folder.completions)), list(read_failures(self.folder.completions))
        done, failed = {row["index"] for row in rows}, {failure["index"] for failure in failures}
        assert (len(done), len(failed)) == (len(rows), len(failures)), "doubled"
        assert self.done <= done, "a row was lost"
        assert self.failed <= failed, "a failure was lost"
        assert not done & failed
        self.reported = max(self.reported, (control.read_status(self.folder) or {}).get("done", 0))
        assert len(done) >= self.reported, "reported done, and not there"
        for row in rows:
            self._check_row(row)
        for failure in failures:
            assert failure["index"] % REFUSED == REFUSED - 1, failure
        self.garbage = sum(set(row["text"]) == {GARBAGE} for row in rows)
        self.done, self.failed = done, failed

    @staticmethod
    def _check_row(row: dict[str, Any]) -> None:
        """The prompt is that of the index, and the text is what the servers say to this prompt, whole."""
        assert row["messages"] == [{"role": "user", "content": f"question {row['index']}"}]
        tokens = row["completion_tokens"]
        whole = writer().answer(request_key(row["messages"], SEED, None), tokens, thinking=False, whole=tokens)
        assert row["text"] in (whole, GARBAGE * len(whole)), "torn or mixed up"
        assert row["finish_reason"] == "stop"

    def check_end(self, prompts: int) -> None:
        """Each index is there once, as a row or as a failure, and all is sealed."""
        self.check()
        assert self.done | self.failed == set(range(prompts))
        assert self.failed == set(range(REFUSED - 1, prompts, REFUSED))
        assert all(shard.sealed for shard in list_shards(self.folder.completions))
        status = control.read_status(self.folder)
        assert status is not None
        assert (status["state"], status["done"], status["failed"]) == ("ended", len(self.done), len(self.failed))
