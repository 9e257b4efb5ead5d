"""Limits out of the pages that servers give about themselves. Pure: pages in, `ServerLimits` out.

Pages are somebody else's: every field may be missing or of another type, and is then "not said".
"""

from __future__ import annotations

from typing import Any

from dfexp.records import ServerLimits


def from_server_info(info: Any, models: Any) -> ServerLimits:
    """SGLang: /server_info and /v1/models. Nothing else of the page is kept: it repeats the API key in clear.

    The effective request cap of each data-parallel rank is what counts, never the flag at the top level, which is only
    what was asked for; ranks add up.
    """
    states = _items(_at(info, "internal_states"))
    caps = [_count(_at(state, "effective_max_running_requests_per_dp")) for state in states]
    tokens = [_count(_at(state, "memory_usage", "token_capacity")) for state in states]
    listed = from_models(models)
    return ServerLimits(
        max_running_requests=_total(caps),
        context_length=listed.context_length or _count(_at(info, "context_length")),
        max_total_num_tokens=_total(tokens) or _count(_at(info, "max_total_num_tokens")),
        model=listed.model or _text(_at(info, "served_model_name")) or _text(_at(info, "model_path")),
        engine_version=_version("sglang", _at(info, "version")),
    )


def from_props(props: Any, models: Any) -> ServerLimits:
    """llama.cpp: /props and /v1/models. Slots decode at once; each has its own part of the context."""
    slots = _count(_at(props, "total_slots"))
    context = _count(_at(props, "default_generation_settings", "n_ctx"))
    weights = _count(_at(models, "data", 0, "meta", "size"))
    return ServerLimits(
        max_running_requests=slots,
        context_length=context,
        max_total_num_tokens=slots * context if slots and context else None,
        model=from_models(models).model or _text(_at(props, "model_alias")),
        engine_version=_version("llama.cpp", _at(props, "build_info")),
        state_bytes={"weights": weights} if weights else None,
    )


def from_models(models: Any) -> ServerLimits:
    """Any OpenAI-compatible server: /v1/models; vLLM and SGLang add `max_model_len` to it."""
    first = _at(models, "data", 0)
    return ServerLimits(context_length=_count(_at(first, "max_model_len")), model=_text(_at(first, "id")))


def _at(value: Any, *steps: str | int) -> Any:
    """The value at a path of keys and positions, None where there is none."""
    for step in steps:
        try:
            value = value[step]
        except (TypeError, KeyError, IndexError):
            return None
    return value


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int | None:
    """A positive whole number, else None: 0 and -1 are how servers say "unknown"."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _version(product: str, value: Any) -> str | None:
    return f"{product} {value}" if _text(value) else None


def _total(values: list[int | None]) -> int | None:
    """The sum, if every part is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
