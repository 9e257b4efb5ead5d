"""Samples of a run's servers and GPUs on an interval: the last minutes in memory, all of them in metrics.jsonl."""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
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


@dataclass(slots=True, kw_only=True)
class Sampler:
    """Asks all servers at the same time. Those that are away and a disk that refuses cost samples and nothing else.

    Attributes:
        path: the file to append to; in it times are real ones.
        now: the run's clock.
        limits: tells a server's, since no page of metrics has its cap.
        taken: called with each sample.
        guard: where a part may fail alone, and be told of.
        recent: the samples of each server, oldest first, their `at` by the run's clock.

    """

    fleet: Fleet
    path: Path
    interval_s: float
    now: Callable[[], float]
    limits: Callable[[str], ServerLimits]
    taken: Callable[[EngineSample], object]
    guard: Callable[[str], AbstractContextManager[None]]
    recent: defaultdict[str, deque[EngineSample]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_MOST))
    )
    log: AppendLog | None = None

    async def run(self) -> None:
        """Sample until cancelled."""
        loop, servers = asyncio.get_running_loop(), self.fleet.servers
        names, gpus = [server.name for server in servers], {gpu for server in servers for gpu in server.gpus}
        # Threads of its own: health checks of servers that hang would keep all shared ones busy.
        threads, writer = ThreadPoolExecutor(len(servers)), ThreadPoolExecutor(1)
        try:
            meter = GpuMeter(())
            with self.guard("GPUs"):
                meter = await loop.run_in_executor(writer, GpuMeter, gpus)
            while True:
                began = loop.time()
                with self.guard("samples"):
                    devices = loop.run_in_executor(writer, meter.lines)
                    asked = [self._take(name, loop.run_in_executor(threads, self._ask, name)) for name in names]
                    lines = [each.to_json() for each in await asyncio.gather(*asked) if each is not None]
                    with self.guard("GPUs"):
                        lines += await devices
                    await loop.run_in_executor(writer, self._write, lines)
                await asyncio.sleep(max(0.0, began + self.interval_s - loop.time()))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            if self.log is not None:
                writer.submit(self.log.close)  # after a write that still goes on
            writer.shutdown(wait=False)

    def _ask(self, name: str) -> EngineSample | None:
        with contextlib.suppress(*_UNREADABLE):
            return self.fleet.sample(name, _TIMEOUT_S)
        return None

    async def _take(self, name: str, asked: asyncio.Future[EngineSample | None]) -> EngineSample | None:
        """Keep one server's sample as soon as it is there; returns it as it is to be written."""
        with self.guard(f"samples of {name}"):
            sample, limits, kept = await asked, self.limits(name), self.recent[name]
            if sample is None:
                return None
            cap = limits.max_running_requests if sample.max_running_requests is None else sample.max_running_requests
            sample = replace(sample, max_running_requests=cap)
            kept.append(replace(sample, at=self.now()))
            while len(kept) > _LEAST and kept[0].at < kept[-1].at - KEPT_S:
                kept.popleft()
            self.taken(kept[-1])
            return sample
        return None

    def _write(self, lines: list[dict[str, Any]]) -> None:
        with contextlib.suppress(ShardError, OSError):
            self.log = self.log or AppendLog(self.path, durable=False)
            self.log.append(lines)
