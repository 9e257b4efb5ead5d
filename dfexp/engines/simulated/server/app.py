"""SGLang's HTTP surface of one simulated server.

Not imitated: several answers to a request, tools, images, and sampling; temperature and its like change nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from dfexp.capacity.flags import rules
from dfexp.engines.simulated.core import DECODED, PREFILLED
from dfexp.engines.simulated.server import pages
from dfexp.engines.simulated.server.faults import GARBAGE, reply
from dfexp.engines.simulated.server.text import BYTES_PER_TOKEN, Writer, drawn, prompt_tokens, request_key, said
from dfexp.errors import PromptTooLong

if TYPE_CHECKING:
    from dfexp.engines.simulated.server.server import Job, Server

HEALTH_POLLS = 20
"""/health looks for an output so often, once in a virtual second."""
NEWER_PAGES = 14
"""The patch of 0.5 that brought /ready, and a /v1/loads that answers."""
JSON = "application/json"
_writer = cache(Writer)
_Page = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ChatBody(BaseModel):
    """What counts of a chat request; other fields are ignored."""

    messages: list[dict[str, str | list[Any] | dict[str, Any] | None]] = Field(min_length=1)
    model: str = "default"
    rid: str = ""
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AbortBody(BaseModel):
    """Which requests to abort: those whose id begins so, or all."""

    rid: str = ""
    abort_all: bool = False


class App:
    """The pages of one server."""

    def __init__(self, server: Server) -> None:
        self._server, self._spec, self._probes = server, server.spec, count()
        get, both, spec = ("GET",), ("GET", "POST"), server.spec
        self._pages: dict[str, tuple[tuple[str, ...], _Page]] = {
            "/v1/chat/completions": (("POST",), self._chat),
            "/health": (get, self._health),
            "/health_generate": (get, self._health),
            "/v1/models": (get, self._json(lambda: pages.models_page(spec, int(server.host.clock.zero_at)))),
            "/model_info": (get, self._json(lambda: pages.model_info(spec))),
            "/server_info": (get, self._json(lambda: pages.server_info(spec, self._gauges()))),
            "/ping": (both, self._empty),
            "/flush_cache": (both, self._flush_cache),
            "/abort_request": (both, self._abort_request),
        }
        self._pages |= {f"/get_{name}": self._pages[f"/{name}"] for name in ("model_info", "server_info")}
        if spec.has_metrics:
            self._pages["/metrics"] = get, self._metrics
        if rules(spec.version).since(NEWER_PAGES):
            self._pages |= {"/ready": (get, self._ready), "/v1/loads": (get, self._json(self._loads))}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        path, key = request.rel_url.path.rstrip("/"), self._spec.key
        is_open = not key or path.startswith(("/health", "/metrics"))
        if not is_open and request.headers.get("Authorization") != f"Bearer {key}":
            return answer(*pages.unauthorized())
        methods, page = self._pages.get(path, ((), self._empty))
        if request.method in methods:
            return await page(request)
        return answer(405, b'{"detail":"Method Not Allowed"}') if methods else answer(404, b'{"detail":"Not Found"}')

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        data = await request.read()
        job = self._server.take()
        try:
            return await self._complete(request, data, job)
        finally:
            self._server.leave(job)

    async def _complete(self, request: web.BaseRequest, data: bytes, job: Job) -> web.StreamResponse:
        spec, server = self._spec, self._server
        try:
            body = ChatBody.model_validate_json(data)
        except ValidationError as error:
            return answer(*pages.bad_request(str(error.errors(include_url=False, include_input=False))))
        key, job.prompt = request_key(body.messages, spec.seed, body.seed), prompt_tokens(body.messages)
        fault = server.faults.of_request(key, said(body.messages), job.arrived_s)
        kind = fault.kind if fault else ""
        if fault and kind in ("status", "html"):
            if fault.retry_after_s is not None:
                server.host.reached(job.arrived_s + fault.retry_after_s)
            instead = reply(fault)
            return answer(instead.status, instead.body, instead.content_type, instead.headers)
        if kind == "crash":
            server.crash()
        if kind in ("crash", "never"):
            await job.changed.wait()  # until the connection breaks
        room = spec.config.server.context_length - job.prompt
        most = body.max_completion_tokens or body.max_tokens or room
        if body.n > 1:
            return answer(*pages.bad_request(f"n = {body.n}: simulated servers give one answer. Ask n times."))
        if room < 1:
            return answer(*pages.too_long(spec, job.prompt))
        if most > room:
            return answer(*pages.over_context(spec, job.prompt, most))
        # One that is to ignore its end would never end by itself.
        job.whole = most + 1 if body.ignore_eos else max(drawn(spec.completion, key), body.min_tokens)
        job.rid, job.is_stream = body.rid or f"{key:016x}{job.number:016x}", body.stream
        try:
            server.submit(job, most)
        except PromptTooLong:
            return answer(*pages.too_long(spec, job.prompt))
        thinking = spec.thinking and (body.chat_template_kwargs or {}).get("enable_thinking") is not False
        text = _writer(spec.seed).answer(key, min(job.whole, most), thinking=thinking, whole=job.whole)
        text = GARBAGE * len(text) if kind == "garbage" else text
        created = int(server.host.clock.zero_at + job.arrived_s)
        made = pages.Completion(spec=spec, id=job.rid, created=created, model=body.model, prompt=job.prompt)
        if body.stream:
            has_usage = bool((body.stream_options or {}).get("include_usage"))
            return await self._stream(request, job, text, made, has_usage=has_usage, is_cut=kind == "cut")
        await job.changed.wait()
        tokens, finish = job.end()
        page = made.body(text[: tokens * BYTES_PER_TOKEN], tokens, finish)
        return await _cut(request, page) if kind == "cut" else answer(200, page)

    async def _stream(
        self, request: web.BaseRequest, job: Job, text: str, made: pages.Completion, *, has_usage: bool, is_cut: bool
    ) -> web.StreamResponse:
        """Send what there is of a text whenever time has passed."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        sent = 0
        while job.ended is None or sent < len(text[: job.ended.tokens * BYTES_PER_TOKEN]):
            await job.changed.wait()
            job.changed.clear()
            end = min(self._server.generated(job) * BYTES_PER_TOKEN, len(text))
            if is_cut and 2 * end >= len(text):
                return _broken(request, response)
            if end > sent:
                await response.write((made.first() if not sent else b"") + made.piece(text, sent, end))
                sent = end
        tokens, finish = job.end()
        await response.write(made.last(finish) + (made.usage(tokens) if has_usage else b"") + pages.DONE)
        return response

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        """An idle server runs one token, a busy one is asked for its next."""
        server, host = self._server, self._server.host
        if server.health_status != 200 or not server.is_ready:
            return answer(server.health_status if server.is_ready else 503)
        outputs = self._outputs()
        if not any(job.whole for job in server.jobs.values()):
            server.simulator.submit(host.clock.now_s, f"health-{next(self._probes)}", 1, 1, 1)
            host.changed(server)
        for _ in range(HEALTH_POLLS):
            await host.reached(host.clock.now_s + 1.0)
            if self._outputs() > outputs:
                return answer(200)
        return answer(503)

    def _outputs(self) -> float:
        self._server.host.look(self._server)
        return sum(self._server.simulator.counters[name] for name in (DECODED, PREFILLED))

    def _gauges(self) -> Mapping[str, float]:
        host = self._server.host
        host.look(self._server)
        return self._server.simulator.gauges(host.clock.now_s)

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        gauges, server = self._gauges(), self._server
        page = pages.metrics_page(self._spec, gauges, server.simulator.counters, server.requests)
        return answer(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _loads(self) -> dict[str, Any]:
        clock, simulator = self._server.host.clock, self._server.simulator
        at = datetime.fromtimestamp(clock.zero_at + clock.now_s)
        return pages.loads_page(self._spec, self._gauges(), pending=simulator.pending_tokens(), at=at)

    async def _ready(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(200 if self._server.is_ready else 503)

    async def _empty(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(200)

    async def _flush_cache(self, request: web.BaseRequest) -> web.StreamResponse:
        words = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
        words += "the operation will not be performed.)\n"
        return answer(400 if self._server.jobs else 200, words.encode(), "text/plain")

    async def _abort_request(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            wanted = AbortBody.model_validate_json(await request.read())
        except ValidationError as error:
            return answer(*pages.bad_request(str(error.errors(include_url=False, include_input=False))))
        self._server.abort(wanted.rid, everything=wanted.abort_all)
        return answer(200)

    def _json(self, made: Callable[[], Any]) -> _Page:
        """The handler of a page that is the same for every request."""

        async def page(request: web.BaseRequest) -> web.StreamResponse:
            return answer(200, pages.packed(made()))

        return page


def answer(status: int, body: bytes = b"", kind: str = JSON, headers: Mapping[str, str] | None = None) -> web.Response:
    """A whole answer."""
    return web.Response(status=status, body=body, headers={"Content-Type": kind, **(headers or {})})


async def _cut(request: web.BaseRequest, page: bytes) -> web.StreamResponse:
    """Half of a page, and then the connection breaks."""
    response = web.StreamResponse(headers={"Content-Type": JSON, "Content-Length": str(len(page))})
    await response.prepare(request)
    await response.write(page[: len(page) // 2])
    return _broken(request, response)


def _broken(request: web.BaseRequest, response: web.StreamResponse) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.close()
    return response
