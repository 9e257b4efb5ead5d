"""What a simulated server prints and answers, worded as SGLang 0.5.12 and 0.5.23 do. Pure: numbers in, text out.

The wording is in sglang.yaml; versions up to 0.5.13 follow the older one. Not imitated: access lines, the chatter of
tokenizers and kernels, captures of CUDA graphs (which take no memory here), and metrics that nobody here reads.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from http.client import responses
from importlib.resources import files
from typing import Any

import yaml
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dfexp.capacity.flags import FLAG_NAMES, Since, option, rules
from dfexp.capacity.memory import UNLOGGED_GIB
from dfexp.capacity.shape import GIB
from dfexp.capacity.throughput import chunk_tokens, largest_graph
from dfexp.engines.simulated.core import Line
from dfexp.engines.simulated.server.spec import ServerSpec
from dfexp.engines.simulated.server.text import CLOSE, OPEN

DONE = b"data: [DONE]\n\n"
"""Ends a stream."""
STOP_TOKEN = 151645
"""What ends an answer that was not cut, in the vocabulary of Qwen's models."""
Refusal = tuple[int, bytes]
"""HTTP status and JSON body."""
_KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "bf16": "bfloat16"}
_STREAMING_LABELLED = 18
"""The patch of 0.5 that counts streamed requests apart: no page of 0.5.17 does, one of 0.5.20 does."""
_RANKS = {"moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}


@cache
def _words(version: str) -> dict[str, Any]:
    """The wording of a version."""
    every = yaml.safe_load(files(__package__).joinpath("sglang.yaml").read_text(encoding="utf-8"))
    return dict(every["new" if rules(version).since(Since.RENAMED_FLAGS) else "old"])


def _filled(page: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(page, dict):
        return {name: _filled(value, values) for name, value in page.items()}
    if isinstance(page, list):
        return [_filled(value, values) for value in page]
    return values[page[1:]] if isinstance(page, str) and page.startswith("=") else page


def stamp(at: datetime) -> str:
    """The prefix of a log line."""
    return f"[{at:%Y-%m-%d %H:%M:%S}] "


def server_args(spec: ServerSpec) -> dict[str, Any]:
    """The arguments as SGLang echoes them, its own changes included; only those that matter here, and no keys."""
    version, server, resolved = rules(spec.version), spec.config.server, spec.config.memory.resolved
    flags = {name: getattr(server.flags, name) for name in FLAG_NAMES} | dict(spec.flags)
    flags |= {"page_size": resolved.page_size, "disable_overlap_schedule": not resolved.overlap}
    flags |= {"chunked_prefill_size": server.flags.chunked_prefill_size or chunk_tokens(server)}
    flags |= {"mamba_strategy": resolved.strategy} if resolved.strategy != "none" else {}
    names = {name: option(name, version).removeprefix("--").replace("-", "_") for name in flags}
    given = {names[name]: value for name, value in flags.items() if not name.endswith("key")}
    place = {"model_path": spec.model_path, "served_model_name": spec.served_name, "host": spec.host, "port": spec.port}
    own = {"enable_metrics": spec.has_metrics, "decode_log_interval": spec.config.log_interval}
    return {**place, "device": "cuda", "api_key": "(hidden)" if spec.key else None, **given, **own}


def _values(spec: ServerSpec, **more: Any) -> dict[str, Any]:
    """All that pages and the startup log say of a server; sizes in GiB."""
    server, memory, args = spec.config.server, spec.config.memory, server_args(spec)
    dtype = server.shape.dtype if server.flags.kv_cache_dtype == "auto" else server.flags.kv_cache_dtype
    unlogged = UNLOGGED_GIB if memory.max_mamba_cache_size else 0.0
    weights, left = memory.weights_bytes / GIB, (memory.rest_bytes + memory.reserved_bytes) / GIB + unlogged
    return {
        **{name: getattr(spec, name) for name in ("version", "model_path", "served_name", "address", "load_s")},
        "args": args, "old_args": ", ".join(f"{name}={value!r}" for name, value in args.items()),
        "dtype": _KV_DTYPES.get(dtype, dtype), "slots_per_request": memory.resolved.slots_per_request,
        "slots": memory.max_mamba_cache_size, "tokens": memory.max_total_num_tokens,
        "cap": memory.max_running_requests, "chunk": args["chunked_prefill_size"],
        "prefill": server.flags.max_prefill_tokens, "context": server.context_length,
        "longest": longest_input(spec), "architecture": server.shape.architecture,
        "free": left + weights, "left": left, "available": left - (memory.state_bytes + memory.kv_bytes) / GIB,
        "weights": round(weights, 2), "kv": round(memory.kv_bytes / GIB, 2),
        **{name: size / GIB for name, size in memory.pools.items()}, **more,
    }  # fmt: skip


def startup_lines(spec: ServerSpec) -> tuple[list[str], list[str]]:
    """What the log says, without stamps: up to the loading of the weights, and from its end on."""
    memory, values, words = spec.config.memory, _values(spec), _words(spec.version)
    facts = {"k_and_v" if memory.pools["v"] else "latent"} | ({"state"} if memory.max_mamba_cache_size else set())
    facts |= {"capped"} if memory.resolved.max_running_requests and memory.cap_from == "state pool" else set()
    before, after = (
        [say.format(**values) for say, *when in words[part] if facts.issuperset(when)] for part in ("started", "loaded")
    )
    return before, after


def batch_line(spec: ServerSpec, line: Line, *, pending: int, before_s: float) -> str:
    """A batch as the log shows it, without its stamp.

    Args: pending, tokens that the queue still has to prefill; before_s, when the prefill line before this one was.
    """
    kind = "state" if spec.config.memory.max_mamba_cache_size else "plain"
    words = _words(spec.version)[f"{'prefill' if line.new_seqs else 'decode'}_{kind}"]
    rate = line.new_tokens / max(1e-9, line.at_s - before_s)
    is_graph = line.gauges["num_running_reqs"] <= largest_graph(spec.config.server)
    own = {"new_seqs": line.new_seqs, "new_tokens": line.new_tokens, "pending": pending, "rate": rate}
    return str(words.format(**line.gauges, **own, is_graph=is_graph))


def retract_line(requests: int, tokens: int) -> str:
    """A retraction as the log shows it, without its stamp and the new ratio: requests, and the KV tokens freed."""
    return f"KV cache pool is full. Retract requests. #retracted_reqs: {requests}, #new_tokens_gained: {tokens}"


def server_info(spec: ServerSpec, gauges: Mapping[str, float]) -> dict[str, Any]:
    """/server_info."""
    return server_args(spec) | dict(_filled(_words(spec.version)["server_info"], _values(spec, **gauges)))


def models_page(spec: ServerSpec, created: int) -> dict[str, Any]:
    """/v1/models; `created` in seconds since 1970."""
    return dict(_filled(_words(spec.version)["models"], _values(spec, created=created)))


def longest_input(spec: ServerSpec) -> int:
    """The prompt tokens from which on the scheduler refuses a request; the context may have room for a few more."""
    return min(spec.config.server.context_length, spec.config.memory.max_total_num_tokens) - 6


def too_long(spec: ServerSpec, prompt: int, *, streaming: bool = False) -> Refusal:
    """A prompt that fills the context, or so much that the scheduler refuses it: in a stream, with status 200."""
    is_late = prompt < spec.config.server.context_length
    words = _words(spec.version)["input_too_long" if is_late else "too_long"].format(**_values(spec, prompt=prompt))
    status, page = refused(400, words)
    if not (is_late and streaming):
        return status, page
    return 200, b'data: {"error":%b}\n\n' % page.replace(b"BadRequestError", b"BAD_REQUEST") + DONE


def over_context(spec: ServerSpec, prompt: int, max_tokens: int) -> Refusal:
    """A prompt with more tokens to generate than the context has."""
    values = _values(spec, prompt=prompt, max_tokens=max_tokens, total=prompt + max_tokens)
    return refused(400, _words(spec.version)["over_context"].format(**values))


def refused(status: int, words: str) -> Refusal:
    """An error as SGLang words it."""
    kind = responses.get(status, "Unknown").replace(" ", "").removesuffix("Error") + "Error"
    return status, packed({"object": "error", "message": words, "type": kind, "param": None, "code": status})


def packed(value: Any) -> bytes:
    """JSON as SGLang writes it."""
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What is answered to one chat request, whole or in the chunks of a stream.

    Attributes: id, of the answer; created, in seconds since 1970; model, the name that the request gave; prompt, its
    tokens.
    """

    spec: ServerSpec
    id: str
    created: int
    model: str
    prompt: int

    def body(self, text: str, tokens: int, finish: str) -> bytes:
        """The whole answer: `tokens` of text, ended by "stop" or "length"."""
        thought, answer = self._parted(text, 0, len(text))
        return packed(self._page("chat", tokens, finish, content=answer, thought=thought))

    def first(self) -> bytes:
        """The chunk that opens a stream."""
        return self._chunk({"reasoning_content": None, "role": "assistant", "content": ""})

    def piece(self, text: str, start: int, end: int) -> bytes:
        """The chunk with `text[start:end]`; a reasoning parser tells thought and answer apart."""
        thought, answer = self._parted(text, start, end)
        return self._chunk({"reasoning_content": thought, "content": answer})

    def last(self, finish: str) -> bytes:
        """The chunk that says why the answer ended."""
        return self._chunk({"reasoning_content": None}, finish)

    def usage(self, tokens: int) -> bytes:
        """The chunk with the counts, for a request that asked for it."""
        return b"data: %b\n\n" % packed(self._page("usage", tokens, None, delta=None))

    def _parted(self, text: str, start: int, end: int) -> tuple[str | None, str | None]:
        """What of `text[start:end]` is thought, and what answer, as far as a parser is there to tell."""
        if not (self.spec.reasoning_parser and text.startswith(OPEN)):
            return None, text[start:end] or None
        closed = text.index(CLOSE) if CLOSE in text else len(text)
        thought, answer = text[max(start, len(OPEN)) : min(end, closed)], text[max(start, closed + len(CLOSE)) : end]
        return thought or None, answer or None

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        return b"data: %b\n\n" % packed(self._page("chunk", 0, finish, delta=delta))

    def _page(self, name: str, tokens: int, finish: str | None, **more: Any) -> Any:
        more |= {"id": self.id, "created": self.created, "model": self.model, "prompt": self.prompt, "tokens": tokens}
        more |= {"total": self.prompt + tokens, "finish": finish, "stop": STOP_TOKEN if finish == "stop" else None}
        return _filled(_words(self.spec.version)[name], more)


class _Metrics(Collector):
    """A page of metrics, by family."""

    def __init__(self, spec: ServerSpec) -> None:
        self._every, self._families = {"engine_type": "unified", "model_name": spec.served_name}, dict[str, Any]()

    def add(self, kind: Callable[..., Any], name: str, labels: Mapping[str, str], *value: Any) -> None:
        """One series of a family."""
        every = {**self._every, **labels}
        new = kind(f"sglang:{name}", f"Simulated {name.replace('_', ' ')}.", labels=list(every))
        self._families.setdefault(name, new).add_metric(list(every.values()), *value)

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._families.values()


def metrics_page(
    spec: ServerSpec, gauges: Mapping[str, float], counters: Mapping[str, float], finished: Counter[tuple[str, bool]]
) -> str:
    """/metrics: the simulator's gauges and counters, and what finished requests add up to, those of checks left out."""
    page, memory = _Metrics(spec), spec.config.memory
    own = {"num_used_tokens": gauges["kv_used_tokens"], "token_usage": round(gauges["token_usage"], 2)}
    own |= {"max_total_num_tokens": memory.max_total_num_tokens, "context_len": spec.config.server.context_length}
    for name, value in {**gauges, **own}.items():
        page.add(GaugeMetricFamily, name, _RANKS, value)
    page.add(GaugeMetricFamily, "num_retracted_reqs", {**_RANKS, "pid": str(spec.port)}, 0)
    for name, value in counters.items():
        family, _, mode = name.removesuffix('"}').partition('{mode="')
        if family == "realtime_tokens_total":
            page.add(CounterMetricFamily, family, {**_RANKS, "mode": mode}, value)
        elif family in ("num_retracted_requests_total", "num_aborted_requests_total"):
            page.add(CounterMetricFamily, family, {} if "aborted" in family else _RANKS, value)
    is_split = rules(spec.version).since(_STREAMING_LABELLED)
    for name, is_stream in sorted(finished if is_split else {(name, False) for name, _ in finished}):
        value = finished[name, is_stream] if is_split else finished[name, False] + finished[name, True]
        page.add(CounterMetricFamily, name, {"is_streaming": str(is_stream).lower()} if is_split else {}, value)
    return generate_latest(page).decode()
