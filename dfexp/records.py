"""What crosses modules: frozen records without behaviour beyond their own arithmetic.

Times are seconds since the Unix epoch (`*_at`) or seconds (`*_s`); token counts come from the engine, never from text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

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
        """The row as it is written, keys in the order of the fields."""
        return asdict(self)


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
class Answer:
    """What one good request gave. `latency_s` runs from sending to the last byte; `flags` as in `Completion`."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    max_tokens: int | None
    submitted_at: float
    latency_s: float
    flags: tuple[str, ...] = ()
