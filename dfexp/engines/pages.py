"""Limits and counts out of the pages that servers give about themselves. Pure.

Pages are somebody else's: every field may be missing or of another type, and is then "not said".
"""

from typing import Any

from dfexp.records import EngineSample, ServerLimits, TokenCounts


def limits_from(models: Any, info: Any = None, props: Any = None) -> ServerLimits:
    """What one server says of its room; a page that it does not have is None.

    Args:
        models: /v1/models of any server; vLLM and SGLang add `max_model_len`, llama.cpp the bytes of the weights.
        info: SGLang's /server_info, of which nothing else is kept: it repeats the API key in clear. What counts is the
            effective request cap of each data-parallel rank, never the flag at the top level; ranks add up.
        props: llama.cpp's /props. Slots decode at once; each has its own part of the context.
    """
    ranks = _at(info, "internal_states")
    slots, context = _count(props, "total_slots"), _count(props, "default_generation_settings", "n_ctx")
    pool = _sum(ranks, "memory_usage", "token_capacity") or _count(info, "max_total_num_tokens")
    name = _text(models, "data", 0, "id") or _text(info, "served_model_name") or _text(info, "model_path")
    weights = _count(models, "data", 0, "meta", "size")
    return ServerLimits(
        max_running_requests=_sum(ranks, "effective_max_running_requests_per_dp") or slots,
        context_length=_count(models, "data", 0, "max_model_len") or _count(info, "context_length") or context,
        max_total_num_tokens=pool or (slots * context if slots and context else None),
        model=name or _text(props, "model_alias"),
        engine_version=_text(info, "version", prefix="sglang ") or _text(props, "build_info", prefix="llama.cpp "),
        state_bytes={"weights": weights} if weights else None,
    )


def tokens_so_far(sample: EngineSample | None) -> TokenCounts | None:
    """SGLang's counts of tokens so far, all ranks together.

    They move at every log interval; the counters of finished requests do not. None without them, which also is a server
    that has computed nothing yet.
    """
    if sample is None:
        return None
    decoded, prefilled = sample.realtime_decode_tokens_total, sample.realtime_prefill_tokens_total
    if decoded is None and prefilled is None:
        return None
    return TokenCounts(decoded or 0, (decoded or 0) + (prefilled or 0))


def _at(value: Any, *steps: str | int) -> Any:
    """The value at a path of keys and positions, None where there is none."""
    for step in steps:
        try:
            value = value[step]
        except (TypeError, KeyError, IndexError):
            return None
    return value


def _count(page: Any, *steps: str | int) -> int | None:
    """A positive whole number, else None: 0 and -1 are how servers say "unknown"."""
    value = _at(page, *steps)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(page: Any, *steps: str | int, prefix: str = "") -> str | None:
    value = _at(page, *steps)
    return prefix + value if isinstance(value, str) and value else None


def _sum(ranks: Any, *steps: str | int) -> int | None:
    """The sum over ranks, if every one says its part."""
    parts = [_count(rank, *steps) or 0 for rank in ranks] if isinstance(ranks, list) else []
    return sum(parts) if parts and all(parts) else None
