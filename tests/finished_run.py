"""Writes the folder of a run as generation leaves it, with numbers that a test can compute itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dfexp.jsonl import AppendLog, write_json
from dfexp.layout import RunFolder
from dfexp.records import Completion, Failure
from dfexp.shards import Shards

PRINTS = {"prompts": "aa", "model": "bb", "sampling": "cc"}
START = 1_800_000_000.0
# What a server that has no page of metrics says of itself.
_SAID: dict[str, Any] = dict.fromkeys(
    ("num_running_reqs", "num_queue_reqs", "full_token_usage", "mamba_usage", "gen_throughput", "server_tok_per_s")
)


def row(index: int, **changes: Any) -> Completion:
    """A completion of 10 tokens that took 2 s; row i was sent at START + i."""
    values: dict[str, Any] = {
        "index": index, "id": f"p{index}", "messages": ({"role": "user", "content": f"question {index}"},),
        "text": f"answer {index}", "finish_reason": "stop", "prompt_tokens": 5, "completion_tokens": 10,
        "max_tokens": 64, "server": f"127.0.0.1:{8080 + index % 2}", "config_id": "c0", "attempt": 1,
        "submitted_at": START + index, "latency_s": 2.0, "flags": (),
    }  # fmt: skip
    return Completion(**{**values, **changes})


def failure(index: int, kind: str = "prompt_too_long", message: str = "HTTP 400: too long") -> Failure:
    """A row that will not succeed."""
    return Failure(
        index=index, id=f"p{index}", kind=kind, message=message, attempts=1, server="127.0.0.1:8080", config_id="c0",
        at=START,
    )  # fmt: skip


def write_run(
    root: Path,
    rows: Sequence[Completion],
    failures: Sequence[Failure] = (),
    *,
    asked: int | None = None,
    name: str = "demo",
    events: Sequence[dict[str, Any]] = (),
    generation: dict[str, Any] | None = None,
    rows_per_shard: int = 4,
    samples: Sequence[dict[str, Any]] = (),
    **spec: Any,
) -> RunFolder:
    """A run's folder with these rows; `asked` defaults to all of them being accounted for. Args: spec, its groups."""
    folder = RunFolder(root / "outputs" / name)
    folder.control.mkdir(parents=True)
    asked = len(rows) + len(failures) if asked is None else asked
    write_json(
        folder.run_json,
        {
            "run": name,
            "spec": {"run": name, "generation": {"max_tokens": "fit", **(generation or {})}, **spec},
            "versions": {"dfexp": "0.1.0"},
            "hardware": {},
            "prompts": {
                "asked": asked,
                "sha256": "aa",
                "sources": [],
                "dropped": [{"source": "a.jsonl", "line": 3, "reason": "empty", "detail": "no text"}],
            },
            "fingerprint": PRINTS,
            "configs": {"c0": {"engine": "llamacpp", "engine_version": "b1", "model": "m", "sampling": {"seed": 1}}},
            "created_at": START,
        },
    )
    with Shards.open(folder.completions, total=asked, fingerprint=PRINTS, rows_per_shard=rows_per_shard) as shards:
        shards.commit(rows, failures)
    for path, lines in ((folder.events, events), (folder.metrics, samples)):
        with AppendLog(path) as log:
            log.append(lines)
    return folder


def status(state: str = "running", **changes: Any) -> dict[str, Any]:
    """control/status.json of a run of 100 rows."""
    values: dict[str, Any] = {
        "state": state, "reason": None, "pid": 4242, "process_started": "x-1", "at": START + 30, "started_at": START,
        "asked": 100, "done": 40, "failed": 2, "pending": 50, "in_flight": 8, "done_before": 10, "rows_per_s": 1.5,
        "client_tok_per_s": 1234.5, "server_tok_per_s": None, "window_s": 20.0, "elapsed_s": 30.0,
        "mean_completion_tokens": {"value": 55.5, "low": 50.0, "high": 61.0},
        "eta_s": 125.0, "eta_low_s": 100.0, "eta_high_s": 150.0,
        "history": {"step_s": 1.0, "tok_per_s": [900.0, 1300.0]},
        "failures_by_kind": {"refused": 2}, "flags": {}, "disk_refuses": None, "findings": [],
        "servers": [
            {"name": "127.0.0.1:8080", "state": "ready", "in_flight": 4, "limit": 5, "cap": 4, "done": 20, "errors": 0,
             "restarts": 0, **_SAID, "client_tok_per_s": 600.0},
            {"name": "127.0.0.1:8081", "state": "quarantined", "in_flight": 4, "limit": 5, "cap": 4, "done": 20,
             "errors": 3, "restarts": 1, **_SAID, "client_tok_per_s": 634.5},
        ],
    }  # fmt: skip
    return {**values, **changes}
