"""Servers that answer with HTTP 200: what they say decides."""

from __future__ import annotations

import asyncio
from typing import Any

from dfexp.engines import content
from tests.scripted_server import Raw, ScriptedServer, chat, error


async def reasons(script: Any, **options: Any) -> tuple[list[str], ScriptedServer]:
    async with ScriptedServer(script, delay_s=0.2) as server:
        return await asyncio.to_thread(content.check, server.url, "k", "m", **options), server


async def test_a_server_with_sense_passes_six_requests_at_once() -> None:
    sampling = {"temperature": 0.7, "stop": ["\n"]}
    found, server = await reasons(lambda b, n: chat("A short honest answer, as it should be."), sampling=sampling)
    assert found == []
    assert server.most_in_flight == 6
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 6
    assert {(body["temperature"], body["max_tokens"], body["model"]) for body in server.bodies} == {(0.7, 48, "m")}
    assert not any("stop" in body for body in server.bodies), "an answer may not end before it has said anything"


async def test_a_batch_that_is_broken_is_seen_where_a_single_request_passes() -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return chat("!" * 48 if server.in_flight > 1 else "fine, thank you", completion_tokens=48)

    async with ScriptedServer(script, delay_s=0.2) as server:
        (found,) = await asyncio.to_thread(content.check, server.url, "k", "m")
    assert "answers at once are garbage: '!' over and over" in found


async def test_one_odd_answer_among_six_is_no_reason() -> None:
    assert (await reasons(lambda b, n: chat("!" * 48 if n == 0 else "a short honest answer")))[0] == []


async def test_a_thought_that_the_server_split_off_is_an_answer() -> None:
    found, _ = await reasons(lambda b, n: chat(None, completion_tokens=48, reasoning_content="First I look at it."))
    assert found == []
    found, _ = await reasons(lambda b, n: chat(None, completion_tokens=48))
    assert found == ["6 of 6 answers at once are garbage: no text for 48 tokens"]


async def test_errors_are_reasons_and_too_many_requests_alone_are_not() -> None:
    found, _ = await reasons(lambda b, n: error(500, "CUDA error") if n < 2 else chat("a short honest answer"))
    assert len(found) == 1
    assert found[0].startswith("2 of 6 requests at once failed")
    assert "CUDA error" in found[0]
    found, _ = await reasons(lambda b, n: error(429, "full") if n < 2 else chat("a short honest answer"))
    assert found == []
    assert "turned away" in (await reasons(lambda b, n: error(429, "full")))[0][0]
    assert "without a chat completion" in (await reasons(lambda b, n: Raw(200, '{"choices": []}')))[0][0]
