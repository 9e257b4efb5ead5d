"""What one simulated server answers, compared with what SGLang was recorded to answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from dfexp.engines.pages import limits_from
from dfexp.engines.simulated.core import DECODED, Simulator
from dfexp.engines.simulated.server.host import Host
from dfexp.engines.simulated.server.text import CLOSE, OPEN
from tests.engines.simulated.servers import ask, chat, get, sized, spec
from tests.engines.simulated.support import config

# Recorded from SGLang 0.5.12 and 0.5.23.
TOO_LONG = "The input (9012 tokens) is longer than the model's context length (8192 tokens)."
ALMOST = (  # as the source of both words it
    "Input length ({} tokens) exceeds the maximum allowed length (8186 tokens). Use a shorter input or enable"
    " --allow-auto-truncate."
)
OVER = (
    "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of 100012"
    " tokens: 12 tokens from the input messages and 100000 tokens for the completion. Please reduce the number of"
    " tokens in the input messages or the completion to fit within the limit."
)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with Host() as made:
        yield made


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as made:
        yield made


def text_of(page: Any) -> str:
    text = page["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


async def streamed(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream; the last line says that it is done."""
    async with session.post(f"{url}/v1/chat/completions", json={**body, "stream": True}) as reply:
        assert reply.content_type == "text/event-stream"
        *chunks, last = [part.removeprefix("data: ") for part in (await reply.text()).split("\n\n") if part]
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


async def test_the_answer_is_the_same_whichever_server_gives_it(host: Host, session: aiohttp.ClientSession) -> None:
    one, other = await asyncio.gather(host.add(spec()), host.add(spec(index=1)))
    (status, page), (_, again), (_, different) = [
        await ask(session, url, chat(seed=seed)) for url, seed in ((one.url, 1), (other.url, 1), (one.url, 2))
    ]
    assert status == 200
    assert text_of(page) == text_of(again) != text_of(different)
    assert text_of(page).startswith(OPEN)
    assert CLOSE in text_of(page)
    assert page["usage"] == {
        "prompt_tokens": 10, "total_tokens": 110, "completion_tokens": 100, "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }  # fmt: skip
    assert 0 <= 400 - len(text_of(page).encode()) < 40


@pytest.mark.parametrize(
    ("asked", "tokens", "finish"),
    [
        ({"max_tokens": 30}, 30, "length"),
        ({"max_completion_tokens": 30, "max_tokens": 99}, 30, "length"),
        ({"max_tokens": 100}, 100, "stop"),
        ({"max_tokens": 500}, 100, "stop"),
        ({"max_tokens": 500, "min_tokens": 300}, 300, "stop"),
        ({"max_tokens": 500, "ignore_eos": True}, 500, "length"),
        ({"max_tokens": 1, "model": "another", "temperature": 0, "top_k": 20}, 1, "length"),
    ],
)
async def test_how_long_an_answer_gets(
    host: Host, session: aiohttp.ClientSession, asked: dict[str, Any], tokens: int, finish: str
) -> None:
    server = await host.add(spec())
    status, page = await ask(session, server.url, chat(**asked))
    assert (status, page["usage"]["completion_tokens"], page["choices"][0]["finish_reason"]) == (200, tokens, finish)
    assert page["model"] == asked.get("model", "tiny")


async def test_without_max_tokens_an_answer_may_fill_the_context(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec(tokens=50_000))
    _, page = await ask(session, server.url, chat())
    assert page["choices"][0]["finish_reason"] == "length"
    assert 8192 - 3 <= page["usage"]["total_tokens"] <= 8192


@pytest.mark.parametrize("parser", [None, "qwen3"])
async def test_a_stream_says_what_a_whole_answer_says(
    host: Host, session: aiohttp.ClientSession, parser: str | None
) -> None:
    server = await host.add(spec(tokens=400, reasoning_parser=parser))
    _, page = await ask(session, server.url, chat())
    chunks = await streamed(session, server.url, chat(stream_options={"include_usage": True}))
    *pieces, last, usage = chunks
    assert usage["usage"] == page["usage"]
    assert (usage["choices"], last["choices"][0]["finish_reason"]) == ([], "stop")
    for name in ("content", "reasoning_content"):
        parts = [piece["choices"][0]["delta"].get(name) or "" for piece in pieces]
        assert "".join(parts) == (page["choices"][0]["message"][name] or "")
    assert len(pieces) > 8, "chunks come as the tokens do"
    assert (page["choices"][0]["message"]["reasoning_content"] is None) == (parser is None)
    without = await streamed(session, server.url, chat())
    assert without[-1]["choices"][0]["finish_reason"] == "stop"


async def test_thinking_can_be_turned_off(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec())
    _, page = await ask(session, server.url, chat(chat_template_kwargs={"enable_thinking": False}))
    assert OPEN not in text_of(page)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (chat("x" * 4 * 9004), TOO_LONG),
        (chat("x" * 4 * 4, max_tokens=100_000), OVER),
        (b"{", "Invalid JSON"),
        (b"[]", "object"),
        ({"model": "tiny"}, "Field required"),
        (chat() | {"messages": []}, "at least 1 item"),
        (chat() | {"messages": [{"role": "user", "content": 5}]}, "valid string"),
        *(
            (chat() | {"messages": [{"role": "user", "content": wrong}]}, "valid")
            for wrong in (["a"], [5], {"text": "a"})
        ),
        (chat(max_tokens="many"), "valid integer"),
        (chat(max_tokens=0), "greater than or equal to 1"),
        (chat(n=2), "n = 2"),
    ],
)
async def test_what_sglang_refuses_is_refused(
    host: Host, session: aiohttp.ClientSession, body: Any, words: str
) -> None:
    server = await host.add(spec())
    status, page = await ask(session, server.url, body)
    assert (status, page["object"], page["code"]) == (400, "error", 400)
    assert words in page["message"]
    assert server.pace.in_flight == 0


async def test_pages_need_the_key_except_health_and_metrics(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec(key="secret", version="0.5.23"))
    assert await ask(session, server.url, chat()) == (401, {"error": "Unauthorized"})
    assert (await ask(session, server.url, chat(), "secret"))[0] == 200
    statuses = {
        page: ((await get(session, server.url + page))[0], (await get(session, server.url + page, "secret"))[0])
        for page in ("/v1/models", "/server_info", "/ping", "/metrics", "/health", "/nothing")
    }
    assert statuses == {
        "/v1/models": (401, 200), "/server_info": (401, 200), "/ping": (401, 200), "/metrics": (200, 200),
        "/health": (200, 200), "/nothing": (401, 404),
    }  # fmt: skip


async def test_what_the_server_says_of_its_room_is_what_sglang_says(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec())
    models, info = [json.loads((await get(session, server.url + page))[1]) for page in ("/v1/models", "/server_info")]
    limits = limits_from(models, info)
    assert (limits.max_running_requests, limits.max_total_num_tokens, limits.context_length) == (72, 290_000, 8192)
    assert (limits.model, limits.engine_version) == ("tiny", "sglang 0.5.12")
    assert (await get(session, f"{server.url}/get_server_info"))[0] == 200


async def test_a_page_that_is_not_there_or_not_for_this_method(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec(has_metrics=False))
    assert (await get(session, f"{server.url}/metrics"))[0] == 404
    assert (await get(session, f"{server.url}/liveness"))[0] == 404
    assert (await get(session, f"{server.url}/v1/chat/completions"))[0] == 405


async def test_metrics_move_while_requests_run(session: aiohttp.ClientSession) -> None:
    async with Host(speed=100.0) as host:
        server = await host.add(spec())
        found = [(await get(session, f"{server.url}/metrics"))[1]]
        sent = sized(1, 50, 4000) | {"stream": True}
        async with session.post(f"{server.url}/v1/chat/completions", json=sent) as reply:
            for _ in range(2):
                await reply.content.readuntil(b"finish_reason")
                found.append((await get(session, f"{server.url}/metrics"))[1])
            await reply.read()
        found.append((await get(session, f"{server.url}/metrics"))[1])
    name = 'sglang:realtime_tokens_total{engine_type="unified",mode="decode"'
    decoded = [[float(line.split()[-1]) for line in page.split("\n") if line.startswith(name)] for page in found]
    assert decoded[0] == []
    assert 0 < decoded[1][0] < decoded[2][0] < decoded[3][0] == 3999
    assert ["sglang:num_requests_total{" in page for page in found] == [False, False, False, True]


async def test_health_of_an_idle_server_takes_one_token_and_a_second(
    host: Host, session: aiohttp.ClientSession
) -> None:
    server = await host.add(spec())
    for page in ("/health", "/health_generate"):
        begin_s, before = host.clock.now_s, server.simulator.counters["num_requests_total"]
        assert (await get(session, server.url + page))[0] == 200
        assert host.clock.now_s == begin_s + 1.0
        assert server.simulator.counters["num_requests_total"] == before + 1


async def test_health_of_a_busy_server_is_its_next_output(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec())
    answer = asyncio.create_task(ask(session, server.url, chat(max_tokens=4000, ignore_eos=True)))
    while not server.jobs:
        await asyncio.sleep(0)
    assert (await get(session, f"{server.url}/health"))[0] == 200
    assert (await answer)[0] == 200
    assert server.simulator.counters["num_requests_total"] == 1


async def test_a_hung_server_is_unhealthy_after_twenty_seconds(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec(faults=({"kind": "hang"},)))
    asking = asyncio.create_task(ask(session, server.url, chat(max_tokens=300, ignore_eos=True)))
    while not server.simulator.hung:
        await asyncio.sleep(0)
    assert host.clock.now_s == 61.0
    assert [(await get(session, server.url + page))[0] for page in ("/ping", "/metrics", "/health")] == [200, 200, 503]
    assert (host.clock.now_s, asking.done()) == (81.0, False)
    asking.cancel()


async def test_a_hung_server_goes_on_when_that_is_over(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec(faults=({"kind": "hang", "for_s": 100.0},)))
    status, page = await ask(session, server.url, chat(max_tokens=300, ignore_eos=True))
    assert (status, page["usage"]["completion_tokens"]) == (200, 300)
    assert host.clock.now_s > 161.0


async def test_a_server_that_loads_does_not_listen_and_one_that_warms_up_is_unhealthy(
    session: aiohttp.ClientSession,
) -> None:
    async with Host(speed=200.0) as host:
        adding = asyncio.create_task(host.add(spec()))
        while not host.servers:
            await asyncio.sleep(0)
        (server,) = host.servers
        seen = set()
        while not server.is_ready:
            try:
                seen.add((await get(session, f"{server.url}/health"))[0])
            except aiohttp.ClientConnectorError:
                seen.add("closed")
        assert await adding is server
        assert "closed" in seen
        assert seen <= {"closed", 503, 200}


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ({"kind": "status", "status": 429, "retry_after_s": 3.0}, 429, "TooManyRequests"),
        ({"kind": "status"}, 500, "InternalServerError"),
        ({"kind": "html"}, 502, "<html>"),
    ],
)
async def test_answers_that_are_none(
    host: Host, session: aiohttp.ClientSession, fault: dict[str, Any], status: int, words: str
) -> None:
    server = await host.add(spec(faults=({**fault, "times": 1},)))
    begin_s = host.clock.now_s
    found, page = await ask(session, server.url, chat())
    assert found == status
    assert words in json.dumps(page)
    assert (await ask(session, server.url, chat()))[0] == 200
    if "retry_after_s" in fault:
        while host.clock.now_s < begin_s + fault["retry_after_s"]:
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_ends_in_the_middle(host: Host, session: aiohttp.ClientSession, stream: bool) -> None:
    server = await host.add(spec(faults=({"kind": "cut", "contains": "cut"},)))
    with pytest.raises(aiohttp.ClientPayloadError):
        await ask(session, server.url, chat("cut me", stream=stream))
    assert (await ask(session, server.url, chat("whole")))[0] == 200


async def test_garbage_is_one_token_over_and_over(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec(faults=({"kind": "garbage", "share": 1.0},)))
    status, page = await ask(session, server.url, chat())
    assert (status, set(text_of(page))) == (200, {"!"})
    assert page["usage"]["completion_tokens"] == 100


async def test_who_hangs_up_is_forgotten(session: aiohttp.ClientSession) -> None:
    async with Host(speed=20.0) as host:  # slow enough that the long answer is far from its end
        server = await host.add(spec(load_s=1.0, faults=({"kind": "never", "contains": "never"},)))
        for text in ("never", "long"):
            asking = asyncio.create_task(ask(session, server.url, chat(text, max_tokens=8000, ignore_eos=True)))
            while not server.jobs:
                await asyncio.sleep(0)
            asking.cancel()
            while server.jobs:
                await asyncio.sleep(0)
        assert (await ask(session, server.url, chat()))[0] == 200
        counters = server.simulator.counters
        assert (counters["num_aborted_requests_total"], counters["num_requests_total"]) == (1, 1)


async def test_what_a_request_did_before_it_was_given_up_counts(host: Host, session: aiohttp.ClientSession) -> None:
    seldom = config(tokens=290_000, cap=72, slots=217, interval=10**6)  # nothing happens on the way
    server, alone = await host.add(spec(config=seldom)), Simulator(seldom)
    asking = asyncio.create_task(ask(session, server.url, sized(1, 50, 8000)))
    while not any(job.whole for job in server.jobs.values()):
        await asyncio.sleep(0)
    (job,) = server.jobs.values()
    await host.reached(job.arrived_s + 10.0, wanted=False)
    alone.submit(job.arrived_s, 1, 50, 8001, 8000)
    alone.advance(job.arrived_s + 10.0)
    assert host.clock.now_s == job.arrived_s + 10.0
    server.leave(job)
    asking.cancel()
    assert server.simulator.counters[DECODED] >= alone.counters[DECODED] > 100


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
async def test_a_prompt_that_all_but_fills_the_context_is_refused_by_the_scheduler(
    host: Host, session: aiohttp.ClientSession, version: str
) -> None:
    server = await host.add(spec(version=version))
    bodies = {size: chat("x" * 4 * (size - 8)) for size in (8185, 8186, 8191, 8192)}
    found = {size: await ask(session, server.url, body) for size, body in bodies.items()}
    assert [status for status, _ in found.values()] == [200, 400, 400, 400]
    for size in (8186, 8191):
        assert found[size][1]["message"] == ALMOST.format(size)
    assert found[8192][1]["message"] == TOO_LONG.replace("9012", "8192")
    status, asked_more = await ask(session, server.url, bodies[8186] | {"max_tokens": 7})
    assert (status, "You requested a total of 8193 tokens" in asked_more["message"]) == (400, True)
    (chunk,) = await streamed(session, server.url, bodies[8186])
    assert (chunk["error"]["message"], chunk["error"]["type"]) == (ALMOST.format(8186), "BAD_REQUEST")
    assert server.pace.in_flight == 0


async def test_a_small_pool_limits_prompts_too(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec(config=config(tokens=1000, cap=72, slots=217)))
    info = json.loads((await get(session, f"{server.url}/server_info"))[1])
    assert info["max_req_input_len"] == 994
    assert [(await ask(session, server.url, sized(1, size, 3)))[0] for size in (993, 994)] == [200, 400]


async def test_a_request_that_crashes_its_server(host: Host, session: aiohttp.ClientSession) -> None:
    server = await host.add(spec(faults=({"kind": "crash", "contains": "crash"},)))
    with pytest.raises(aiohttp.ClientConnectionError):
        await ask(session, server.url, chat("crash"))
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(session, f"{server.url}/ping")
    assert not host.servers


async def test_a_slow_server_takes_so_many_times_as_long(host: Host, session: aiohttp.ClientSession) -> None:
    slow = {"kind": "slow", "factor": 4.0, "server": 1}
    servers = await asyncio.gather(*(host.add(spec(index=index, servers=2, faults=(slow,))) for index in range(2)))
    took = []
    for server in servers:
        begin_s = host.clock.now_s
        await ask(session, server.url, chat())
        took.append(host.clock.now_s - begin_s)
    assert took[1] == pytest.approx(4 * took[0], rel=0.01)
