"""SGLang's HTTP surface of one simulated server.

Not imitated: several answers to a request, tools, images, and sampling; temperature and its like change nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

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


class App:
    """The pages of one server."""

    def __init__(self, server: Server) -> None:
        self._server, self._spec, self._probes, get = server, server.spec, count(), ("GET",)
        self._pages: dict[str, tuple[tuple[str, ...], _Page]] = {
            "/v1/chat/completions": (("POST",), self._chat), "/v1/models": (get, self._models),
            "/health": (get, self._health), "/health_generate": (get, self._health),
            "/server_info": (get, self._info), "/get_server_info": (get, self._info),
            "/ping": (("GET", "POST"), self._ping),
        }  # fmt: skip
        if server.spec.has_metrics:
            self._pages["/metrics"] = get, self._metrics

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        path, key = request.rel_url.path.rstrip("/"), self._spec.key
        is_open = not key or path.startswith(("/health", "/metrics"))
        if not is_open and request.headers.get("Authorization") != f"Bearer {key}":
            return answer(401, pages.packed({"error": "Unauthorized"}))
        methods, page = self._pages.get(path, ((), self._ping))
        if request.method not in methods:
            return answer(*((405, b'{"detail":"Method Not Allowed"}') if methods else (404, b'{"detail":"Not Found"}')))
        try:
            return await page(request)
        except ValidationError as error:
            return answer(*pages.refused(400, str(error.errors(include_url=False, include_input=False))))

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
            return answer(*reply(fault, server.host.clock.speed))
        if kind == "crash":
            server.crash()
        if kind in ("crash", "never"):
            await job.changed.wait()  # until the connection breaks
        room = spec.config.server.context_length - job.prompt
        most = asked or room
        if body.n > 1:
            return answer(*pages.refused(400, f"n = {body.n}: simulated servers give one answer. Ask n times."))
        if most > room > 0:
            return answer(*pages.over_context(spec, job.prompt, most))
        job.is_stream = body.stream
        if job.prompt >= pages.longest_input(spec):
            raise PromptTooLong(f"{job.prompt} prompt tokens.")
        # One that is to ignore its end would never end by itself.
        job.whole = most + 1 if body.ignore_eos else max(drawn(spec.completion, key), body.min_tokens)
        server.submit(job, most)
        thinking = spec.thinking and (body.chat_template_kwargs or {}).get("enable_thinking") is not False
        text = _writer(spec.seed).answer(key, min(job.whole, most), thinking=thinking, whole=job.whole)
        text = GARBAGE * len(text) if kind == "garbage" else text
        rid, created = body.rid or f"{key:016x}{job.number:016x}", int(server.host.clock.zero_at + job.arrived_s)
        made = pages.Completion(spec=spec, id=rid, created=created, model=body.model, prompt=job.prompt)
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
        page = pages.metrics_page(self._spec, gauges, server.simulator.counters, server.finished)
        return answer(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(200, pages.packed(pages.models_page(self._spec, int(self._server.host.clock.zero_at))))

    async def _info(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(200, pages.packed(pages.server_info(self._spec, self._gauges())))

    async def _ping(self, request: web.BaseRequest) -> web.StreamResponse:
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
