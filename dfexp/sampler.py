"""Samples of a run's servers and GPUs on an interval: the last minutes in memory, all of them in metrics.jsonl."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from dfexp.errors import DfexpError, ShardError
from dfexp.fleet import Fleet
from dfexp.hardware import GpuMeter
from dfexp.jsonl import AppendLog
from dfexp.records import EngineSample, ServerLimits

KEPT_S = 300.0
"""Samples of so many seconds of the run's clock are kept in memory, and `_LEAST` where that clock is fast."""
_LEAST, _MOST = 24, 1500
_TIMEOUT_S = 2.0
_UNREADABLE = (DfexpError, OSError, ValueError, TypeError, KeyError)  # pages are somebody else's


class Sampler:
    """Asks all servers at the same time. Those that are away and a disk that refuses cost samples and nothing else.

    `recent` has the samples of each server, oldest first, their `at` by the run's clock; in the file it is real time.
    """

    def __init__(
        self,
        fleet: Fleet,
        path: Path,
        *,
        interval_s: float,
        now: Callable[[], float],
        limits: Callable[[str], ServerLimits],
        taken: Callable[[EngineSample], object],
    ) -> None:
        """Args: now, the run's clock; limits, of a server, whose cap no page tells; taken, called with each sample."""
        self._fleet, self._path, self._interval_s = fleet, path, interval_s
        self._now, self._limits, self._taken = now, limits, taken
        self._log: AppendLog | None = None
        self.recent: dict[str, deque[EngineSample]] = {each.name: deque(maxlen=_MOST) for each in fleet.servers}

    async def run(self) -> None:
        """Sample until cancelled."""
        loop, gpus = asyncio.get_running_loop(), {gpu for server in self._fleet.servers for gpu in server.gpus}
        # Threads of its own: health checks of servers that hang would keep all shared ones busy.
        threads = ThreadPoolExecutor(len(self.recent) + 1, thread_name_prefix="dfexp-sampler")
        try:
            meter = await loop.run_in_executor(threads, GpuMeter, gpus)
            while True:
                began = loop.time()
                asked = [self._take(name, loop.run_in_executor(threads, self._ask, name)) for name in self.recent]
                devices = loop.run_in_executor(threads, meter.lines)
                lines = [each.to_json() for each in await asyncio.gather(*asked) if each is not None]
                await loop.run_in_executor(threads, self._write, lines + await devices)
                await asyncio.sleep(max(0.0, began + self._interval_s - loop.time()))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            if self._log is not None:
                self._log.close()

    def _ask(self, name: str) -> EngineSample | None:
        with contextlib.suppress(*_UNREADABLE):
            return self._fleet.sample(name, _TIMEOUT_S)
        return None

    async def _take(self, name: str, asked: asyncio.Future[EngineSample | None]) -> EngineSample | None:
        """Keep one server's sample as soon as it is there; returns it as it is to be written."""
        sample, limits, kept = await asked, self._limits(name), self.recent[name]
        if sample is None:
            return None
        cap = limits.max_running_requests if sample.max_running_requests is None else sample.max_running_requests
        sample = replace(sample, max_running_requests=cap)
        kept.append(replace(sample, at=self._now()))
        while len(kept) > _LEAST and kept[0].at < kept[-1].at - KEPT_S:
            kept.popleft()
        self._taken(kept[-1])
        return sample

    def _write(self, lines: list[dict[str, Any]]) -> None:
        with contextlib.suppress(ShardError, OSError):
            self._log = self._log or AppendLog(self._path, durable=False)
            self._log.append(lines)
