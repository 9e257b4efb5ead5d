"""The two pools of one server: KV tokens in pages, state slots, and what the radix cache keeps of finished requests.

Every running request gains one token a step, so a request is known by its tokens less the step counter, a number that
never changes; sums over all requests at any later step follow from sums of those.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from dfexp.engines.simulated.core.config import Config
from dfexp.engines.simulated.core.records import Pool

KEPT_SLOTS = 2
"""State slots that the radix cache keeps of a finished request: one at the prompt's end, one at the answer's."""


class Pools:
    """Who holds what at which decode step. `prefilling_tokens`, `prefilling`: held by requests not yet decoding."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._page = config.page_size
        self._offsets = 0
        self._residues = [0] * config.page_size
        self.running = 0
        self.prefilling_tokens = 0
        self.prefilling = 0
        self._cached: deque[int] = deque()
        self._cached_tokens = 0

    def paged(self, tokens: int) -> int:
        """Tokens rounded up to whole pages."""
        return -(-tokens // self._page) * self._page

    def join(self, tokens: int, step: int) -> None:
        """A request that holds `tokens` begins to decode."""
        self._offsets += tokens - step
        self._residues[(tokens - step) % self._page] += 1
        self.running += 1

    def leave(self, tokens: int, step: int, *, cache: bool = False) -> None:
        """One ends. Args: cache, the radix cache keeps its tokens as long as there is room."""
        if cache:
            self._trim(step)
        self._offsets -= tokens - step
        self._residues[(tokens - step) % self._page] -= 1
        self.running -= 1
        if cache:
            self._cached.append(tokens // self._page * self._page)
            self._cached_tokens += self._cached[-1]

    def context(self, step: int) -> int:
        """Tokens that running requests hold, page tails not counted: what a decode step reads."""
        return self._offsets + self.running * step

    def used(self, step: int) -> int:
        """Tokens that requests hold, in whole pages."""
        tokens = self._offsets + self.running * step + self.prefilling_tokens
        if self._page > 1:
            tokens += sum(count * (-(residue + step) % self._page) for residue, count in enumerate(self._residues))
        return tokens

    def steps_that_fit(self, step: int, most: int) -> int:
        """Decode steps, at most `most`, for which the KV pool has room."""
        total = self._config.max_total_num_tokens
        if self.used(step) + self.running * (most + self._page - 1) <= total:
            return most
        return bisect_right(range(1, most + 1), total, key=lambda steps: self.used(step + steps))

    def kv(self, step: int) -> Pool:
        """The KV pool."""
        self._trim(step)
        return Pool(used=self.used(step), evictable=self._cached_tokens, total=self._config.max_total_num_tokens)

    def mamba(self) -> Pool:
        """The state pool. Ask for the KV pool first."""
        total, kept = self._config.max_mamba_cache_size, len(self._cached) * KEPT_SLOTS
        return Pool(used=self._slots(), evictable=kept if total else 0, total=total)

    def _slots(self) -> int:
        held = round((self.running + self.prefilling) * self._config.slots_held)
        return min(held, self._config.max_mamba_cache_size)

    def _trim(self, step: int) -> None:
        """Drop the oldest of what is cached until it fits beside what is used."""
        tokens = self._config.max_total_num_tokens - self.used(step)
        total = self._config.max_mamba_cache_size
        most = (total - self._slots()) // KEPT_SLOTS if total else len(self._cached)
        while self._cached and (self._cached_tokens > tokens or len(self._cached) > most):
            self._cached_tokens -= self._cached.popleft()
