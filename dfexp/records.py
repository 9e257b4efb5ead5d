"""What crosses modules: frozen records without behaviour beyond their own arithmetic.

Times are seconds since the Unix epoch (`*_at`) or seconds (`*_s`); token counts come from the engine, never from text.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

SIMULATED = "simulated"
"""The engine, and the flag of its rows, by which a training set can refuse them."""
GARBAGE = "garbage"
"""The flag of rows whose text is none, as `dfexp.quality.garbage` has it."""
Message = Mapping[str, Any]
"""One chat message as the OpenAI schema has it: `role`, `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One frozen prompt. `index` is its identity: equal prompts and equal ids are legal."""

    index: int
    id: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One row of a shard.

    `text` is the raw generation, thinking inline, byte-exact but for repaired lone surrogates. `max_tokens` is as sent.
    `config_id` points into run.json. `attempt` counts from 1. `flags` names what a reader should know about it.
    """

    index: int
    id: str
    messages: tuple[Message, ...]
    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    max_tokens: int | None
    server: str
    config_id: str
    attempt: int
    submitted_at: float
    latency_s: float
    flags: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The row as it is written, keys in the order of the fields; what they hold is shared, not copied."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One row of failures.jsonl: a prompt that will not succeed, with the server's words."""

    index: int
    id: str
    kind: str
    message: str
    attempts: int
    server: str | None
    config_id: str
    at: float

    def to_json(self) -> dict[str, Any]:
        """The row as it is written."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one server says of its own room; None is "the engine does not say", never zero.

    Attributes:
        max_running_requests: requests decoded at once; the effective cap, not the flag that was asked for.
        context_length: tokens of prompt and answer together that one request may use.
        max_total_num_tokens: tokens of all running requests together (the KV pool).
        max_mamba_cache_size: recurrent-state slots of a hybrid model.
        model: the name that the server gives its model.
        engine_version: as the server states it.
        state_bytes: memory that the limits imply, in bytes, by part (weights, kv, state), where the engine says so.
    """

    max_running_requests: int | None = None
    context_length: int | None = None
    max_total_num_tokens: int | None = None
    max_mamba_cache_size: int | None = None
    model: str | None = None
    engine_version: str | None = None
    state_bytes: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What a server has made since it started, by its own counters, which move while it works."""

    decoded: float  # tokens of answers
    computed: float  # these and the tokens of prompts that were not cached: moves whenever the server works at all


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """What one server said of itself at one moment, under SGLang's own names; one line of metrics.jsonl.

    None is "the engine does not have it" or "it has not happened yet", never zero. Data-parallel ranks are added up;
    of fractions the fullest rank's is kept.

    Attributes:
        at: when it was said, in seconds since the Unix epoch; of a line of a log to the second.
        server: the server's name.
        num_running_reqs: requests being decoded. After a prefill without those that were just admitted.
        num_queue_reqs: requests that wait.
        gen_throughput: tokens of answers a second since the log line before, pauses for prefills included.
        token_usage: the fullest pool's usage, 0-1.
        full_token_usage: usage of the KV pool, 0-1.
        mamba_usage: usage of the recurrent-state pool, 0-1; ~2/3 or 1.00 may be all that can be used.
        mamba_used_tokens, mamba_available_tokens, mamba_evictable_tokens: slots, not tokens, of that pool.
        kv_used_tokens, kv_available_tokens, kv_evictable_tokens: tokens of the KV pool.
        max_total_num_tokens: size of the KV pool in tokens.
        cache_hit_rate: part of the last prefill's tokens that were cached, 0-1.
        num_retracted_reqs: requests just put back for want of room; mostly 0, so count the counter below.
        prompt_tokens_total, generation_tokens_total, num_requests_total: of requests that are finished.
        num_retracted_requests_total, num_aborted_requests_total: since the server started.
        realtime_decode_tokens_total: tokens of answers, counted while they are made: for rates.
        realtime_prefill_tokens_total: tokens of prompts that were computed and not cached, counted likewise.
        max_running_requests: requests decoded at once, at the most: the effective cap. On no page of metrics.
    """

    at: float
    server: str
    num_running_reqs: float | None = None
    num_queue_reqs: float | None = None
    gen_throughput: float | None = None
    token_usage: float | None = None
    full_token_usage: float | None = None
    mamba_usage: float | None = None
    mamba_used_tokens: float | None = None
    mamba_available_tokens: float | None = None
    mamba_evictable_tokens: float | None = None
    kv_used_tokens: float | None = None
    kv_available_tokens: float | None = None
    kv_evictable_tokens: float | None = None
    max_total_num_tokens: float | None = None
    cache_hit_rate: float | None = None
    num_retracted_reqs: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    num_requests_total: float | None = None
    num_retracted_requests_total: float | None = None
    num_aborted_requests_total: float | None = None
    realtime_decode_tokens_total: float | None = None
    realtime_prefill_tokens_total: float | None = None
    max_running_requests: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The line as it is written: what is None is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """A line as it was read; what only newer versions know is passed over. Raises TypeError without at, server."""
        return cls(**{known.name: line[known.name] for known in fields(cls) if known.name in line})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one good request gave. `latency_s` runs from sending to the last byte; `flags` as in `Completion`.

    `model` is the name that came with it.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    max_tokens: int | None
    submitted_at: float
    latency_s: float
    flags: tuple[str, ...] = ()
    model: str | None = None
