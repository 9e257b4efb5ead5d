"""SGLang's HTTP surface of one simulated server.

Not imitated: several answers to a request, tools, images, and sampling; temperature and its like change nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

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
PROBE_TOKENS = 48
"""A request for no more tokens than that may only ask whether the server serves."""
NEWER_PAGES = 14
"""The patch of 0.5 that brought /ready, and a /v1/loads that answers."""
JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"
_writer = cache(Writer)
_CONTENT = TypeAdapter[Any](str | list[dict[str, Any]] | None)
_Page = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _has_content(message: dict[str, Any]) -> dict[str, Any]:
    _CONTENT.validate_python(message.get("content"))
    return message


class ChatBody(BaseModel):
    """What counts of a chat request; other fields are ignored."""

    messages: list[Annotated[dict[str, Any], AfterValidator(_has_content)]] = Field(min_length=1)
    model: str = "default"
    rid: str = ""
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    seed: int | None = None
    temperature: float | None = None
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
        self._told: dict[str, Callable[[], Any]] = {
            "/v1/models": lambda: pages.models_page(spec, int(server.host.clock.zero_at)),
            "/model_info": lambda: pages.model_info(spec),
            "/server_info": lambda: pages.server_info(spec, self._gauges()),
        }
        self._pages: dict[str, tuple[tuple[str, ...], _Page]] = {
            "/v1/chat/completions": (("POST",), self._chat), "/ping": (both, self._ping),
            "/health": (get, self._health), "/health_generate": (get, self._health),
            "/flush_cache": (both, self._flush_cache), "/abort_request": (both, self._abort_request),
        }  # fmt: skip
        if spec.has_metrics:
            self._pages["/metrics"] = get, self._metrics
        if rules(spec.version).since(NEWER_PAGES):
            self._pages["/ready"], self._told["/v1/loads"] = (get, self._ready), self._loads
        self._told |= {f"/get_{name}": self._told[f"/{name}"] for name in ("model_info", "server_info")}
        self._pages |= dict.fromkeys(self._told, (get, self._tell))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        path, key = request.rel_url.path.rstrip("/"), self._spec.key
        is_open = not key or path.startswith(("/health", "/metrics"))
        if not is_open and request.headers.get("Authorization") != f"Bearer {key}":
            return answer(*pages.unauthorized())
        methods, page = self._pages.get(path, ((), self._ping))
        if request.method not in methods:
            return answer(*((405, b'{"detail":"Method Not Allowed"}') if methods else (404, b'{"detail":"Not Found"}')))
        try:
            return await page(request)
        except ValidationError as error:
            return answer(*pages.bad_request(str(error.errors(include_url=False, include_input=False))))

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        data = await request.read()
        job = self._server.take()
        try:
            return await self._complete(request, ChatBody.model_validate_json(data), job)
        except PromptTooLong:
            status, page = pages.too_long(self._spec, job.prompt, streaming=job.is_stream)
            return answer(status, page, EVENTS if status == 200 else JSON)
        finally:
            self._server.leave(job)

    async def _complete(self, request: web.BaseRequest, body: ChatBody, job: Job) -> web.StreamResponse:
        """Answer a request, or do what a fault does to it. Raises PromptTooLong."""
        spec, server = self._spec, self._server
        key, job.prompt = request_key(body.messages, spec.seed, body.seed), prompt_tokens(body.messages)
        asked, since_s = body.max_completion_tokens or body.max_tokens, server.host.since_s
        if asked is None or asked > PROBE_TOKENS:
            server.pace.feeds()
        fault = None if since_s is None else server.faults.of_request(key, said(body.messages), since_s)
        kind = fault.kind if fault else ""
        if fault and kind in ("status", "html"):
            if fault.retry_after_s is not None:
                server.host.reached(job.arrived_s + fault.retry_after_s)
            instead = reply(fault, server.host.clock.speed)
            return answer(instead.status, instead.body, instead.content_type, instead.headers)
        if kind == "crash":
            server.crash()
        if kind in ("crash", "never"):
            await job.changed.wait()  # until the connection breaks
        room = spec.config.server.context_length - job.prompt
        most = asked or room
        if body.n > 1:
            return answer(*pages.bad_request(f"n = {body.n}: simulated servers give one answer. Ask n times."))
        if most > room > 0:
            return answer(*pages.over_context(spec, job.prompt, most))
        job.rid, job.is_stream = body.rid or f"{key:016x}{job.number:016x}", body.stream
        if job.prompt >= pages.longest_input(spec):
            raise PromptTooLong(f"{job.prompt} prompt tokens.")
        # One that is to ignore its end would never end by itself.
        job.whole = most + 1 if body.ignore_eos else max(drawn(spec.completion, key), body.min_tokens)
        server.submit(job, most)
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
        response = web.StreamResponse(headers={"Content-Type": EVENTS})
        await response.prepare(request)
        sent, shown, is_over = 0, made.first(), False
        while not is_over:
            await job.changed.wait()
            job.changed.clear()
            is_over = job.ended is not None
            end = min(self._server.generated(job) * BYTES_PER_TOKEN, len(text))
            if is_cut and 2 * end >= len(text):
                return _broken(request, response)
            if end > sent:
                await response.write(shown + made.piece(text, sent, end))
                sent, shown = end, b""
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

    async def _tell(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(200, pages.packed(self._told[request.rel_url.path.rstrip("/")]()))

    async def _ready(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(200 if self._server.is_ready else 503)

    async def _ping(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(200)

    async def _flush_cache(self, request: web.BaseRequest) -> web.StreamResponse:
        status, words = (400, b"Flush cache failed.\n") if self._server.jobs else (200, b"Cache flushed.\n")
        return answer(status, words, "text/plain")

    async def _abort_request(self, request: web.BaseRequest) -> web.StreamResponse:
        wanted = AbortBody.model_validate_json(await request.read())
        self._server.abort(wanted.rid, everything=wanted.abort_all)
        return answer(200)


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
