"""The way of rows to the disk when everything else is stuck."""

import asyncio
import errno
import sys
import threading
from pathlib import Path

import pytest

from dfexp.generate.events import EventLog
from dfexp.generate.recorder import Recorder
from dfexp.jsonl import read_log
from tests.shards.support import open_run, row


async def test_threads_that_wait_for_hung_servers_do_not_hold_up_the_disk(tmp_path: Path) -> None:
    over, started = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        started.release()
        over.wait()

    with open_run(tmp_path / "completions") as shards, EventLog(tmp_path / "events.jsonl") as events:
        hung = [asyncio.create_task(asyncio.to_thread(hang)) for _ in range(64)]  # asyncio has 32 threads at most
        try:
            recorder = Recorder(shards, events)
            recorder.add(row(0))
            recorder.finish(within_s=5.0)
            await asyncio.wait_for(recorder.run(), 10.0)
            assert shards.is_done(0)
        finally:
            over.set()
            await asyncio.gather(*hung)


def test_a_process_log_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with EventLog(tmp_path / "events.jsonl") as events:
        monkeypatch.setattr(sys, "stderr", Full())
        events.record("disk_refused", detail="x")
        monkeypatch.undo()
    assert [entry["event"] for entry in read_log(tmp_path / "events.jsonl")] == ["disk_refused"]
