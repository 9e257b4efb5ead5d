"""Simulated servers for tests: a small spec, a client, and what it sends."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from dfexp.capacity.workload import constant
from dfexp.engines.simulated.server.spec import ServerSpec
from dfexp.engines.simulated.server.text import Writer
from dfexp.params_simulated import FaultPart
from tests.engines.simulated.support import config

WRITER = Writer(7)


def spec(*, index: int = 0, faults: tuple[dict[str, Any], ...] = (), tokens: float = 100, **given: Any) -> ServerSpec:
    """A server with room for 72 requests, whose answers have `tokens` tokens; `given` beats everything."""
    usual: dict[str, Any] = {
        "version": "0.5.12", "config": config(tokens=290_000, cap=72, slots=217), "model_path": "/models/tiny",
        "served_name": "tiny", "key": "", "host": "127.0.0.1", "port": 0, "index": index, "seed": 3,
        "completion": constant(tokens), "thinking": True, "reasoning_parser": None, "has_metrics": True, "load_s": 60.0,
        "faults": tuple(FaultPart(**fault) for fault in faults), "flags": {},
    }  # fmt: skip
    return ServerSpec(**(usual | given))


def chat(text: str = "Hello", **more: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def sized(number: int, prompt: int, tokens: int) -> dict[str, Any]:
    """A request of exactly these sizes."""
    return chat(WRITER.prompt(number, prompt), max_tokens=tokens, ignore_eos=True)


async def ask(session: aiohttp.ClientSession, url: str, body: Any, key: str = "") -> tuple[int, Any]:
    """Status and JSON of a chat completion; text where it is no JSON."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(f"{url}/v1/chat/completions", data=data, headers=headers) as reply:
        page = await reply.text()
        return reply.status, json.loads(page) if reply.content_type == "application/json" else page


async def get(session: aiohttp.ClientSession, url: str, key: str = "") -> tuple[int, str]:
    """Status and text of a page."""
    async with session.get(url, headers={"Authorization": f"Bearer {key}"}) as reply:
        return reply.status, await reply.text()
