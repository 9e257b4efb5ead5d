"""The way of rows to the disk when everything else is stuck."""

import asyncio
import errno
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dfexp.generate.events import EventLog
from dfexp.generate.recorder import Recorder
from dfexp.jsonl import read_log
from tests.shards.os_tap import REAL, RefuseAt, tapped
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


def test_nobody_waits_for_the_flush_of_an_event(tmp_path: Path) -> None:
    """The disk takes the first one and hangs; a thousand more are told meanwhile, and in the file at the end."""
    hung, over = threading.Event(), threading.Event()

    def hang(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hung.set()
        assert over.wait(30.0)
        return REAL[name](*args, **kwargs)

    def tell() -> None:
        for number in range(1001):
            events.record("told", number=number)
            assert number or hung.wait(30.0)

    with EventLog(tmp_path / "events.jsonl") as events, tapped(hang, ("fsync",)):
        events.repeats = False
        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        telling.join(30.0)
        waits = telling.is_alive()
        over.set()
        telling.join(30.0)
        assert not waits
        events.close()
    assert [entry["number"] for entry in read_log(tmp_path / "events.jsonl")] == [*range(1001)]


@pytest.mark.parametrize("times", [1, 3, 5])
def test_events_that_the_disk_refused_come_before_the_next_one(tmp_path: Path, times: int) -> None:
    """And the last ones when the log is closed."""
    written = threading.Semaphore(0)

    def refuse(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return refusal(name, args, kwargs)
        finally:
            written.release()

    with EventLog(tmp_path / "events.jsonl") as events:
        refusal = RefuseAt(1, times=times, code=errno.ENOSPC)
        with tapped(refuse, ("write",)):
            for number in range(5):
                events.record("told", number=number)
                assert written.acquire(timeout=30.0)
        assert len(refusal.refused) == times
    assert [entry["number"] for entry in read_log(tmp_path / "events.jsonl")] == [*range(5)]


def test_a_process_log_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with EventLog(tmp_path / "events.jsonl") as events:
        monkeypatch.setattr(sys, "stderr", Full())
        events.record("disk_refused", detail="x")
        monkeypatch.undo()
    assert [entry["event"] for entry in read_log(tmp_path / "events.jsonl")] == ["disk_refused"]
