"""What a simulated server tells: events of requests, the numbers of its log lines, its counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RequestId = int | str
EventKind = Literal["first_token", "finished", "retracted", "aborted"]

LineKind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a request at `at_s`. `tokens`: its completion tokens so far.

    `aborted`: by a client, or because it did not fit the KV pool alone (`out_of_memory`; SGLang answers 500).
    """

    at_s: float
    kind: EventKind
    request_id: RequestId
    tokens: int
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One pool, in tokens or in state slots: `used` by requests, `evictable` what the radix cache holds beyond."""

    used: int
    evictable: int
    total: int

    @property
    def available(self) -> int:
        """Neither used nor cached."""
        return self.total - self.used - self.evictable

    @property
    def usage(self) -> float:
        """Share in use, 0-1, as SGLang shows it: what could be evicted is not in use."""
        return self.used / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The numbers of one log line of SGLang, which are those of its gauges from then on.

    Attributes:
        at_s: end of the batch.
        running: of a decode step, those that took part; of a prefill, those that ran before it, as SGLang logs it.
        tok_per_s: generated tokens since the last decode line over the time since; of a prefill line, input tokens
            over the time since the last prefill.
        gen_throughput: the former, whatever the kind of line.
        new_seqs, new_tokens: of a prefill; pending_tokens: prompt tokens in the queue after it.
        steps: decode steps so far.
        kv, mamba: the pools after the batch.

    """

    at_s: float
    kind: LineKind
    running: int
    queue: int
    tok_per_s: float
    gen_throughput: float
    kv: Pool
    mamba: Pool
    steps: int
    new_seqs: int = 0
    new_tokens: int = 0
    pending_tokens: int = 0

    def gauges(self) -> dict[str, float]:
        """SGLang's gauges, without the prefix `sglang:`."""
        return {
            "num_running_reqs": self.running,
            "num_queue_reqs": self.queue,
            "gen_throughput": self.gen_throughput,
            "token_usage": max(self.kv.usage, self.mamba.usage),
            "full_token_usage": self.kv.usage,
            "mamba_usage": self.mamba.usage,
            "kv_used_tokens": self.kv.used,
            "kv_available_tokens": self.kv.available,
            "kv_evictable_tokens": self.kv.evictable,
            "mamba_used_tokens": self.mamba.used,
            "mamba_available_tokens": self.mamba.available,
            "mamba_evictable_tokens": self.mamba.evictable,
            "cache_hit_rate": 0.0,
        }


@dataclass(slots=True, kw_only=True)
class Counters:
    """SGLang's counters by its names. The first three move when a request completes, the realtime ones with each batch
    (`realtime_tokens_total` with mode `decode` and `prefill_compute`).
    """

    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    num_requests_total: int = 0
    num_retracted_requests_total: int = 0
    num_aborted_requests_total: int = 0
    realtime_decode_tokens: int = 0
    realtime_prefill_compute_tokens: int = 0
