"""A project folder with prompts and parameters for scripted servers, and runs in real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dfexp import control, fleet, generate, params
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from dfexp.processes import ProcessId
from dfexp.shards import read_failures, read_rows


class Project:
    """One run over servers that a test scripts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "params").mkdir()

    def spec(self, urls: list[str], prompts: int = 20, **generation: Any) -> RunSpec:
        path = self.root / "params" / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(prompts)))
        tree = {
            "run": "r",
            "fleet": {"engine": "external", "urls": urls, "max_running_requests": 4, "context_length": 4096},
            "prompts": {"path": "params/prompts.jsonl"},
            "generation": {"max_tokens": 16, "rows_per_shard": 7, "drain_s": 5.0, **generation},
        }
        return params.validate(tree, "test")

    async def start(self, spec: RunSpec, **options: Any) -> RunFolder:
        """The fleet and the generating process, both real; their calls block, so they run in threads."""
        the_fleet, _ = await asyncio.to_thread(fleet.up, spec, self.root)
        await asyncio.to_thread(the_fleet.wait_ready, 60.0)
        return await asyncio.to_thread(lambda: generate.start(spec, self.root, **options))

    async def run(self, spec: RunSpec, **options: Any) -> dict[str, Any]:
        """A whole run; its last status."""
        return await self.end(await self.start(spec, **options))

    async def end(self, folder: RunFolder, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the generating process has ended; its last status."""
        gone = await asyncio.to_thread(control.wait_until, lambda: control.living_process(folder) is None, timeout_s)
        status = control.read_status(folder)
        assert gone, status
        assert status is not None
        return status

    async def until(self, folder: RunFolder, condition: Any, timeout_s: float = 30.0) -> None:
        """Wait until the status fulfils a condition."""
        held = await asyncio.to_thread(
            control.wait_until, lambda: bool(condition(control.read_status(folder) or {})), timeout_s
        )
        assert held, control.read_status(folder)

    def kill(self, folder: RunFolder) -> None:
        """`kill -9` of the generating process."""
        process = control.living_process(folder)
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        assert control.wait_until(lambda: not process.is_alive(), 10.0)

    @staticmethod
    def rows(folder: RunFolder) -> list[dict[str, Any]]:
        return list(read_rows(folder.completions))

    @classmethod
    def counts(cls, folder: RunFolder) -> Counter[int]:
        """How often each index has a row."""
        return Counter(row["index"] for row in cls.rows(folder))

    @staticmethod
    def failures(folder: RunFolder) -> list[dict[str, Any]]:
        return list(read_failures(folder.completions))

    @staticmethod
    def events(folder: RunFolder) -> list[str]:
        return [json.loads(line)["event"] for line in folder.events.read_text().splitlines()]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    yield made
    for path in (tmp_path / "outputs").glob("*/control/status.json"):
        process = control.living_process(RunFolder(path.parents[1]))
        if process is not None and process != ProcessId.current():
            os.kill(process.pid, signal.SIGKILL)
