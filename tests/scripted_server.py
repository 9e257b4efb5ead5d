"""A real HTTP server that answers chat requests as a test scripts it: good answers, and every way to answer badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

Script = Callable[[dict[str, Any], int], Any]
"""Called with the request's body and its number from 0; returns a reply made by the functions below."""


def chat(
    text: Any = "hello", *, prompt_tokens: int = 7, completion_tokens: int | None = 2, **more: Any
) -> dict[str, Any]:
    """The body of a good chat completion; further keywords go into the message."""
    return {
        "id": "c1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text, **more}}],
        "usage": None if completion_tokens is None else {
            "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }  # fmt: skip


class Raw:
    """A reply by its bytes."""

    def __init__(self, status: int, body: bytes | str, content_type: str = "application/json", **headers: str) -> None:
        self.status, self.content_type, self.headers = status, content_type, headers
        self.body = body.encode() if isinstance(body, str) else body


def error(status: int, message: str, **headers: str) -> Raw:
    """An error as OpenAI-compatible servers send it."""
    return Raw(status, json.dumps({"object": "error", "message": message, "code": status}), **headers)


class Cut:
    """The connection is closed, after `sent` bytes of a body that promised more."""

    def __init__(self, sent: bytes = b"") -> None:
        self.sent = sent


class Hang:
    """No answer before the client gives up or the server stops."""


class ScriptedServer:
    """Serves `script` on a loopback port. An async context manager."""

    def __init__(self, script: Script, *, delay_s: float = 0.0, port: int = 0) -> None:
        self.script, self.delay_s, self.port = script, delay_s, port
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self._released = asyncio.Event()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=2048)  # for a burst
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._released.set()
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            reply = self.script(body, number)
            return await self._send(request, await reply if isinstance(reply, Awaitable) else reply)
        finally:
            self.in_flight -= 1

    async def _send(self, request: web.Request, reply: Any) -> web.StreamResponse:
        if isinstance(reply, Raw):
            return web.Response(
                status=reply.status, body=reply.body, headers={"Content-Type": reply.content_type, **reply.headers}
            )
        if isinstance(reply, Hang):
            await self._released.wait()
        if isinstance(reply, (Cut, Hang)):
            assert request.transport is not None
            if isinstance(reply, Cut) and reply.sent:
                response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "9999"})
                await response.prepare(request)
                await response.write(reply.sent)
                request.transport.close()
                return response
            request.transport.close()
            return web.Response()
        return web.json_response(reply)
