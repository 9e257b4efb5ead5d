"""The client against a real HTTP server that answers in every way that servers were seen to answer."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from dfexp import errors
from dfexp.client import ServerClient, context_sizes, first_max_tokens
from dfexp.records import Answer
from tests.scripted_server import Cut, Hang, Raw, Script, ScriptedServer, chat, error

MESSAGES = ({"role": "user", "content": "hi"},)


async def ask(
    script: Script, *, max_tokens: int | None = 16, context: int | None = None, timeout_s: float = 5.0
) -> Answer:
    async with (
        ScriptedServer(script) as server,
        aclosing(ServerClient(url=server.url, key="sk-test", model="m", connections=4)) as client,
    ):
        return await client.complete(MESSAGES, max_tokens=max_tokens, context_length=context, timeout_s=timeout_s)


def ended(reason: object) -> dict:
    """A good answer but for how it ended."""
    body = chat()
    body["choices"][0]["finish_reason"] = reason
    return body


async def test_a_good_answer_has_text_counts_and_timing() -> None:
    answer = await ask(lambda body, n: chat("hello", prompt_tokens=7, completion_tokens=2))
    assert (answer.text, answer.finish_reason) == ("hello", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.max_tokens) == (7, 2, 16)
    assert answer.latency_s > 0
    assert answer.flags == ()


async def test_the_request_carries_key_model_sampling_and_max_tokens() -> None:
    async with ScriptedServer(lambda body, n: chat()) as server:
        async with aclosing(ServerClient(url=server.url, key="sk-test", model="m", connections=4)) as client:
            await client.complete(MESSAGES, max_tokens=9, timeout_s=5, sampling={"top_k": 3, "seed": 4})
        (body,) = server.bodies
        assert body == {"model": "m", "messages": [dict(MESSAGES[0])], "max_tokens": 9, "top_k": 3, "seed": 4}
        assert server.headers[0]["Authorization"] == "Bearer sk-test"


@pytest.mark.parametrize(
    ("reply", "expected", "words"),
    [
        (error(500, "boom"), errors.ServerFault, "boom"),
        (error(502, "bad gateway"), errors.ServerFault, "bad gateway"),
        (Raw(502, "<html>nginx</html>", "text/html"), errors.ServerFault, "nginx"),
        (error(429, "slow down", **{"Retry-After": "3"}), errors.RateLimited, "slow down"),
        (error(503, "overloaded", **{"Retry-After": "3"}), errors.RateLimited, "overloaded"),
        (error(503, "loading"), errors.ServerFault, "loading"),
        (error(400, "temperature must be >= 0"), errors.Refused, "temperature"),
        (error(422, "bad field"), errors.Refused, "bad field"),
        (error(401, "wrong key"), errors.AccessDenied, "wrong key"),
        (error(404, "no such model"), errors.AccessDenied, "no such model"),
        (error(400, "The input (9012 tokens) is longer than the model's context length (8192 tokens)."),
         errors.PromptTooLong, "9012"),
        (error(500, "The input (8192 tokens) is longer than the model's context length (8192 tokens)."),
         errors.PromptTooLong, "8192"),
        (error(400, "Input length (8186 tokens) exceeds the maximum allowed length (8186 tokens). Use less."),
         errors.PromptTooLong, "8186"),
        (Raw(400, json.dumps({"error": {"code": 400, "message": "request exceeds", "type": "exceed_context_size_error",
                                        "n_prompt_tokens": 5000, "n_ctx": 2048}})), errors.PromptTooLong, "exceeds"),
        (Raw(200, "<html>proxy</html>", "text/html"), errors.BadAnswer, "proxy"),
        (Raw(200, '{"id": "x", "choi'), errors.BadAnswer, ""),
        (Raw(200, '"text"'), errors.BadAnswer, ""),
        (Raw(200, "null"), errors.BadAnswer, ""),
        ({"id": "x", "object": "chat.completion", "choices": []}, errors.BadAnswer, "choice"),
        ({"id": "x", "object": "chat.completion", "choices": None}, errors.BadAnswer, "choice"),
        ({"id": "x", "choices": [{"index": 0}]}, errors.BadAnswer, "choice"),
        (chat(["not", "text"]), errors.BadAnswer, "list"),
        (chat(17), errors.BadAnswer, "int"),
        (error(500, "The request queue is full."), errors.RateLimited, "queue is full"),
        (error(503, "The request queue is full."), errors.RateLimited, "queue is full"),
        (error(500, "The request is aborted."), errors.ServerFault, "aborted"),
        (error(200, "boom"), errors.BadAnswer, "boom"),
        (Raw(200, json.dumps({"object": "error", "message": "top_p must be in (0, 1]", "code": 400})), errors.Refused,
         "top_p"),
        (Raw(200, json.dumps({"error": {"message": "out of memory", "code": 500}})), errors.ServerFault, "out of mem"),
        (Raw(200, json.dumps({"error": {"message": "odd", "code": "429"}})), errors.BadAnswer, "odd"),
        (Raw(200, json.dumps({"object": "error", "code": 400, "message": "The input (9012 tokens) is longer than the "
                              "model's context length (8192 tokens)."})), errors.PromptTooLong, "9012"),
        (error(302, "moved", Location="http://127.0.0.1:9/login"), errors.BadAnswer, "redirect, to http://127.0.0.1:9/"),
        (error(307, "moved"), errors.BadAnswer, "redirect, to nowhere"),
        (ended("abort"), errors.BadAnswer, "finish_reason abort"),
        (Cut(), errors.ConnectionLost, ""),
        (Cut(b'{"id": "x", '), errors.ConnectionLost, ""),
    ],
)  # fmt: skip
async def test_every_bad_answer_has_its_class_and_the_servers_words(reply: object, expected: type, words: str) -> None:
    with pytest.raises(expected) as caught:
        await ask(lambda body, n: reply)
    assert type(caught.value) is expected
    assert words in str(caught.value)
    assert "sk-test" not in str(caught.value)


async def test_retry_after_is_passed_on() -> None:
    with pytest.raises(errors.RateLimited) as caught:
        await ask(lambda body, n: error(429, "slow", **{"Retry-After": "2.5"}))
    assert caught.value.retry_after_s == 2.5


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("0", 0, 0),
        ("-3", 0, 0),
        ("in an hour", 3500, 3600),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
    ],
)
async def test_retry_after_is_a_number_or_a_date(value: str, low: float, high: float) -> None:
    if value == "in an hour":  # from now, not from when the tests were collected
        value = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    with pytest.raises(errors.RateLimited) as caught:
        await ask(lambda body, n: error(429, "slow", **{"Retry-After": value}))
    assert caught.value.retry_after_s is not None
    assert low <= caught.value.retry_after_s <= high


@pytest.mark.parametrize("value", ["soon", "inf", "1e9999", "nan"])
async def test_a_retry_after_that_is_neither_counts_as_not_given(value: str) -> None:
    with pytest.raises(errors.RateLimited) as caught:
        await ask(lambda body, n: error(429, "slow", **{"Retry-After": value}))
    assert caught.value.retry_after_s is None


@pytest.mark.parametrize("reason", [None, 7, ["stop"]])
async def test_an_end_of_a_wrong_type_is_none(reason: object) -> None:
    assert (await ask(lambda body, n: ended(reason))).finish_reason is None


async def test_a_thought_that_was_cut_has_no_end() -> None:
    body = ended("length")
    body["choices"][0]["message"] |= {"content": None, "reasoning_content": "so far"}
    assert (await ask(lambda _, n: body)).text == "<think>\nso far"


async def test_an_answer_of_ten_megabytes_comes_whole() -> None:
    text = "0123456789" * 1_000_000
    assert (await ask(lambda body, n: chat(text), timeout_s=30.0)).text == text


async def test_a_silent_server_is_a_timeout() -> None:
    with pytest.raises(errors.TimedOut):
        await ask(lambda body, n: Hang(), timeout_s=0.3)


async def test_an_answer_nested_too_deep_to_read_is_a_bad_answer() -> None:
    with pytest.raises(errors.BadAnswer):
        await ask(lambda body, n: Raw(200, "[" * 100_000))


async def test_an_error_that_came_compressed_is_read() -> None:
    page = gzip.compress(b'{"error": {"message": "no quota"}}')
    with pytest.raises(errors.RateLimited, match="HTTP 429: no quota"):
        await ask(lambda body, n: Raw(429, page, **{"Content-Encoding": "gzip"}))


async def test_underneath_is_an_ordinary_openai_client_with_its_types_and_errors() -> None:
    replies = [chat("hello"), chat("own way"), error(429, "slow down", **{"Retry-After": "3"}), Cut()]
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with (
        ScriptedServer(lambda body, n: replies[n]) as server,
        aclosing(ServerClient(url=server.url, key="sk-test", model="m", connections=4)) as client,
    ):
        create = client.openai.chat.completions.create
        reply = await create(**asked, extra_body={"top_k": 3})
        assert isinstance(reply, ChatCompletion)
        assert reply.choices[0].message.content == "hello"
        assert server.bodies[0] == {**asked, "top_k": 3}
        raw = await client.openai.chat.completions.with_raw_response.create(**asked)
        assert raw.parse().choices[0].message.content == "own way"
        with pytest.raises(openai.RateLimitError, match="slow down") as caught:
            await create(**asked)
        assert caught.value.response.headers["Retry-After"] == "3"
        assert caught.value.request.url == f"{server.url}/v1/chat/completions"
        with pytest.raises(openai.APIConnectionError):
            await create(**asked)
        assert [model.id async for model in client.openai.models.list()] == ["m"]
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-test"}


async def test_bytes_that_are_no_http_are_a_bad_answer_or_a_lost_connection() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, aclosing(ServerClient(url=url, key=None, model="m", connections=1)) as client:
        with pytest.raises((errors.BadAnswer, errors.ConnectionLost)) as caught:
            await client.complete(MESSAGES, max_tokens=1, timeout_s=5)
    assert caught.value.retryable


async def test_a_closed_port_is_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with aclosing(ServerClient(url=url, key=None, model="m", connections=1)) as client:
        with pytest.raises(errors.Unreachable):
            await client.complete(MESSAGES, max_tokens=1, timeout_s=5)


OVER = (
    "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of 8300 "
    "tokens: 300 tokens from the input messages and 8000 tokens for the completion. Please reduce the number of tokens "
    "in the input messages or the completion to fit within the limit."
)


async def test_a_refusal_that_names_the_sizes_is_answered_once_with_the_room_that_is_left() -> None:
    seen: list[int] = []

    def script(body: dict, n: int) -> object:
        seen.append(body["max_tokens"])
        return error(400, OVER) if n == 0 else chat()

    answer = await ask(script, max_tokens=None, context=8192)
    assert seen[1:] == [8192 - 300]
    assert answer.max_tokens == 8192 - 300


async def test_the_cap_still_holds_when_the_room_is_larger() -> None:
    replies = [error(400, OVER), chat()]
    answer = await ask(lambda body, n: replies[n], max_tokens=8000)
    assert answer.max_tokens == 7892


async def test_two_refusals_are_final() -> None:
    with pytest.raises(errors.Refused):
        await ask(lambda body, n: error(400, OVER), max_tokens=8000)


@pytest.mark.parametrize(
    ("message", "text", "flag"),
    [
        ({"content": "4", "reasoning_content": "two twos"}, "<think>\ntwo twos\n</think>\n\n4", "reasoning_rejoined"),
        ({"content": "4", "reasoning": "two twos"}, "<think>\ntwo twos\n</think>\n\n4", "reasoning_rejoined"),
        ({"content": None, "reasoning_content": "cut"}, "<think>\ncut\n</think>\n\n", "reasoning_rejoined"),
        ({"content": "a\ud83d\ude00b\ud83d"}, "a\U0001f600b\ufffd", "surrogates_repaired"),
    ],
)  # fmt: skip
async def test_texts_that_need_a_remark_get_a_flag(message: dict, text: str, flag: str) -> None:
    body = chat()
    body["choices"][0]["message"] |= message
    answer = await ask(lambda _, n: Raw(200, json.dumps(body)))
    assert answer.text == text
    assert flag in answer.flags


async def test_missing_usage_is_none_and_flagged() -> None:
    answer = await ask(lambda body, n: chat(completion_tokens=None))
    assert answer.completion_tokens is None
    assert answer.flags == ("no_usage",)


async def test_separators_and_nul_survive() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x00h"
    assert (await ask(lambda body, n: chat(text))).text == text


async def test_more_requests_than_the_default_pool_run_at_once() -> None:
    all_there = asyncio.Event()

    async def answer() -> dict[str, Any]:
        """No answer before all requests are there."""
        if server.in_flight == 1200:
            all_there.set()
        await all_there.wait()
        return chat()

    async with (
        ScriptedServer(lambda body, n: answer()) as server,
        aclosing(ServerClient(url=server.url, key=None, model="m", connections=1200)) as client,
    ):
        await asyncio.gather(*(client.complete(MESSAGES, max_tokens=1, timeout_s=120) for _ in range(1200)))
    assert server.most_in_flight == 1200


@given(st.integers(1, 100_000), st.one_of(st.none(), st.integers(1, 10_000)), st.text(max_size=3000))
def test_first_max_tokens_is_positive_and_never_over_cap_or_context(context: int, cap: int | None, text: str) -> None:
    got = first_max_tokens([{"role": "user", "content": text}], context, cap)
    assert got is not None
    assert 1 <= got <= context
    assert cap is None or got <= cap


def test_unknown_context_leaves_the_cap() -> None:
    assert first_max_tokens(MESSAGES, None, None) is None
    assert first_max_tokens(MESSAGES, None, 7) == 7


def test_short_prompts_lose_little_room_and_long_ones_are_tried_with_hope() -> None:
    assert first_max_tokens([{"role": "user", "content": "x" * 600}], 8192, None) == 8192 - 256
    assert first_max_tokens([{"role": "user", "content": "x" * 15_000}], 8192, None) == 8192 - 15_040 // 8


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (OVER, (300, 8192)),
        ("The input (9012 tokens) is longer than the model's context length (8192 tokens).", (9012, 8192)),
        ("This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (1000 in the "
         "messages, 4000 in the completion).", (1000, 4096)),
        ("'max_tokens' or 'max_completion_tokens' is too large: 8000. This model's maximum context length is 8192 "
         "tokens and your request has 500 input tokens (8000 > 8192 - 500).", (500, 8192)),
        ("request (5000 tokens) exceeds the available context size (2048 tokens)", (5000, 2048)),
        ("temperature must be at most 2", None),
    ],
)  # fmt: skip
def test_sizes_are_read_from_the_words_of_several_servers(words: str, sizes: tuple[int, int] | None) -> None:
    assert context_sizes(words) == sizes
