"""One request done well: the room an answer gets, timing, token counts, and the class of every failure.

`ServerClient` wraps one ready `openai.AsyncOpenAI` per server. It never retries on its own, except once when a server
names the sizes of prompt and context: then the same request goes out again with the room that is left. Works with
openai 2.6 to 3.x. What failed is told by openai's errors and by aiohttp's, which they carry as causes: only those tell
a request that was never sent from one whose answer was lost.
"""

import asyncio
import contextlib
import json
import math
import re
import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import openai

from dfexp.errors import (
    BadAnswer,
    ConnectionLost,
    PromptTooLong,
    RateLimited,
    Refused,
    RequestError,
    TimedOut,
    Unreachable,
    of_status,
)
from dfexp.jsonl import repair_text
from dfexp.records import Answer, Message, Prompt

CONNECT_TIMEOUT_S = 10.0

_KEEP_ALIVE_S = 4.0  # uvicorn closes after 5 s, and a request that crosses with its closing is lost
_LOST_ENDS = ("abort", "error")  # by which servers say that the answer is not whole, through no fault of its row
_FULL = re.compile(r"queue is full", re.I)  # SGLang's words for a refusal that comes as 500 or 503
_PLAIN = {"extra_json", "security"}  # options of openai that ask for nothing beyond the body
_NONE: Mapping[str, Any] = MappingProxyType({})

# Ways in which servers state the two sizes; each has groups `context` and `prompt` (tokens).
_SIZES = (
    re.compile(
        r"context length (?:of|is) (?P<context>\d+).*?(?P<prompt>\d+) (?:tokens )?(?:from|in) the (?:input )?messages",
        re.S,
    ),
    re.compile(r"context length is (?P<context>\d+) tokens and your request has (?P<prompt>\d+) input tokens", re.S),
    re.compile(r"input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<context>\d+)", re.S),
    re.compile(r"request \((?P<prompt>\d+) tokens\) exceeds the available context size \((?P<context>\d+)", re.S),
)
_TOO_LONG = re.compile(
    r"(longer than|exceeds?|maximum) .{0,60}context|context.{0,20}(length|size|window).{0,40}exceed"
    r"|input length .{0,20}exceeds",
    re.I | re.S,
)


def first_max_tokens(messages: Sequence[Message], context_length: int | None, cap: int | None) -> int | None:
    """The `max_tokens` to try first, in tokens; None leaves it to the engine.

    Without the model's tokenizer a prompt's size is a guess. Two bytes and a half a token is more than nearly all text
    needs, so short prompts (most of them) are accepted at once and lose a few tokens of room. Where that guess leaves
    less than half of the context, the guess is optimistic instead, and the server's refusal names the true sizes.
    """
    if context_length is None:
        return cap
    size = sum(len(str(message.get("content") or "").encode("utf-8", "surrogatepass")) + 40 for message in messages)
    room = context_length - int(size / 2.5)
    if room < context_length // 2:
        room = context_length - size // 8
    room = max(1, room)
    return room if cap is None else min(cap, room)


class LeanOpenAI(openai.AsyncOpenAI):
    """An `AsyncOpenAI` that hands a plain POST of JSON straight to aiohttp; all else goes openai's own way.

    The same types come back and the same errors are raised. openai's own way from a body to an answer takes several
    times the CPU of sending it (docs/decisions.md), which a few hundred requests in flight cannot afford.
    """

    session: aiohttp.ClientSession | None = None  # none in copies, such as `with_options` makes
    root = ""  # the base URL as text

    async def post(
        self, path: str, *, cast_to: Any, body: Any = None, options: Any = _NONE, stream: bool = False, **more: Any
    ) -> Any:
        """As `AsyncOpenAI.post`; `cast_to` object gives the JSON value as it came. Raises what openai raises."""
        is_model = isinstance(cast_to, type) and issubclass(cast_to, openai.BaseModel)
        is_plain = not (stream or more.get("files") or more.get("content")) and options.keys() <= _PLAIN
        if self.session is None or not is_plain or not (is_model or cast_to is object):
            return await super().post(path, cast_to=cast_to, body=body, options=options, stream=stream, **more)
        url, fields = self.root + path, {**(body or {}), **(options.get("extra_json") or {})}
        headers = {**self.auth_headers, "Content-Type": "application/json", "User-Agent": self.user_agent}
        try:
            sent = json.dumps(fields).encode()
            async with self.session.post(url, data=sent, headers=headers, allow_redirects=False) as reply:
                body = await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            kind = openai.APITimeoutError if isinstance(error, TimeoutError) else openai.APIConnectionError
            raise kind(request=self._client.build_request("POST", url)) from error
        if not 200 <= reply.status < 300:
            raise self._status_error(url, reply, body)
        try:
            value = json.loads(body)
        except ValueError:
            if reply.content_type.endswith("json"):
                raise
            return body.decode("utf-8", "replace")
        return cast_to.construct(**value) if is_model and isinstance(value, dict) else value

    def _status_error(self, url: str, reply: aiohttp.ClientResponse, body: bytes) -> openai.APIStatusError:
        """The error that openai makes of such a response."""
        request = self._client.build_request("POST", url)
        http = sys.modules[type(request).__module__.partition(".")[0]]  # httpx; httpx2 from openai 3 on
        headers = [(name, value) for name, value in reply.headers.items() if name.lower() != "content-encoding"]
        response = http.Response(reply.status, headers=headers, content=body, request=request)
        return self._make_status_error_from_response(response)


class ServerClient:
    """A ready client of one server; close it with `aclose`. Safe for any number of requests at once.

    Made inside a running event loop. `openai` is the `AsyncOpenAI` underneath, for whatever else the server offers.
    """

    def __init__(self, *, url: str, key: str | None, model: str, connections: int) -> None:
        """Args: url without /v1; key or None; model name to send; connections, the most requests in flight."""
        self.url, self.model = url, model
        loopback = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        # Reading the certificates takes a server more time and memory than all else here; without TLS none is needed.
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if urlsplit(url).scheme == "http" else True
        limits = openai.DEFAULT_CONNECTION_LIMITS.__class__(
            max_connections=connections, max_keepalive_connections=connections
        )
        self.openai = LeanOpenAI(
            base_url=f"{url}/v1", api_key=key or "none", max_retries=0,
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT_S),  # the whole answer has a limit of its own
            http_client=openai.DefaultAioHttpClient(limits=limits, trust_env=not loopback, verify=verify),
        )  # fmt: skip
        self.openai.root = f"{url}/v1"
        self.openai.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
            trust_env=not loopback,
        )

    async def complete(
        self, messages: Sequence[Message], *, max_tokens: int | None, context_length: int | None = None,
        timeout_s: float | None, sampling: Mapping[str, Any] | None = None,
    ) -> Answer:  # fmt: skip
        """One completion.

        Args:
            messages: the chat.
            max_tokens: the most tokens an answer may have; None means all the room there is.
            context_length: tokens of prompt and answer together, if known.
            timeout_s: time for the whole answer; None: the caller has a limit of its own.
            sampling: more fields of the request's body.

        Raises a RequestError subclass.
        """
        first = first_max_tokens(messages, context_length, max_tokens)
        try:
            return await self._once(messages, first, timeout_s, sampling or {})
        except _SizesNamed as refusal:
            if refusal.room < 1:
                raise PromptTooLong(str(refusal), status=refusal.status) from None
            fitted = refusal.room if max_tokens is None else min(max_tokens, refusal.room)
            if fitted == first:
                raise Refused(str(refusal), status=refusal.status) from None
        try:
            return await self._once(messages, fitted, timeout_s, sampling or {})
        except _SizesNamed as refusal:
            raise Refused(str(refusal), status=refusal.status) from None

    async def _once(
        self, messages: Sequence[Message], max_tokens: int | None, timeout_s: float | None, sampling: Mapping[str, Any]
    ) -> Answer:
        submitted_at, start = time.time(), time.monotonic()
        body: dict[str, Any] = {"model": self.model, "messages": messages, **sampling}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.openai.post("/chat/completions", cast_to=object, body=body)
        except TimeoutError:
            raise TimedOut(f"no whole answer in {timeout_s:.0f} s, the most that an answer may take") from None
        except openai.OpenAIError as error:
            _raise_classified(error)
        except (ValueError, RecursionError) as error:  # a body that says it is JSON and is not
            raise BadAnswer(f"the answer is not JSON: {error}") from error
        return _read(reply, max_tokens, submitted_at, time.monotonic() - start)

    async def aclose(self) -> None:
        """Close all connections."""
        if self.openai.session is not None:
            await self.openai.session.close()
        await self.openai.close()


class _SizesNamed(RequestError):
    """A refusal that names the sizes of prompt and context; never leaves this module.

    `room`: tokens left for an answer; zero or less when the prompt fills the context.
    """

    def __init__(self, message: str, *, status: int, room: int) -> None:
        super().__init__(message, status=status)
        self.room = room


async def answers(client: ServerClient, prompts: Sequence[Prompt], at_once: int, **asked: Any) -> dict[int, Answer]:
    """Answers by their prompts' indices; `asked` is for `ServerClient.complete`. Failed requests have none."""
    room, said = asyncio.Semaphore(at_once), dict[int, Answer]()

    async def one(prompt: Prompt) -> None:
        async with room:
            with contextlib.suppress(RequestError):
                said[prompt.index] = await client.complete(prompt.messages, **asked)

    await asyncio.gather(*map(one, prompts))
    return said


def _read(reply: object, max_tokens: int | None, submitted_at: float, latency_s: float) -> Answer:
    """The answer in a 200 reply. Raises BadAnswer unless it is a chat completion with a text."""
    if not isinstance(reply, dict):
        raise BadAnswer(f"HTTP 200 with no chat completion: {_cut(str(reply))}", status=200)
    choices = reply.get("choices")
    if choices is None and (status := _told_status(reply)):
        raise _refusal(status, reply, "", None)
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise BadAnswer(f"HTTP 200 without exactly one choice: {_cut(repr(choices or reply))}", status=200)
    ended = choice.get("finish_reason")
    if ended in _LOST_ENDS:
        raise BadAnswer(f"HTTP 200 with finish_reason {ended}: the server gave the answer up", status=200)
    text, flags = _joined_text(message, is_cut=ended == "length")
    usage = reply.get("usage")
    prompt_tokens, completion_tokens = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if completion_tokens is None:
        flags.append("no_usage")
    text, repaired = repair_text(text)
    if repaired:
        flags.append("surrogates_repaired")
    return Answer(
        text=text, finish_reason=ended if isinstance(ended, str) else None, prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens, max_tokens=max_tokens, submitted_at=submitted_at, latency_s=latency_s,
        flags=tuple(flags), model=model if isinstance(model := reply.get("model"), str) else None,
    )  # fmt: skip


def _joined_text(message: Mapping[str, Any], *, is_cut: bool) -> tuple[str, list[str]]:
    """The raw generation: a thought that the server split off is put back inline, as the model wrote it.

    Args: is_cut, for its length: then a thought without an answer has no end either.
    """
    content = message.get("content")
    thought = message.get("reasoning_content") or message.get("reasoning")
    for part in (content, thought):
        if part is not None and not isinstance(part, str):
            kind = type(part).__name__
            raise BadAnswer(f"HTTP 200 whose text is {kind}, not a string: {_cut(repr(part))}", status=200)
    if not thought:
        return content or "", []
    if is_cut and not content:
        return f"<think>\n{thought.strip()}", ["reasoning_rejoined"]
    return f"<think>\n{thought.strip()}\n</think>\n\n{(content or '').lstrip()}", ["reasoning_rejoined"]


def _count(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53  # as JSON readers have it
    return value if is_count else None


def _raise_classified(error: openai.OpenAIError) -> NoReturn:
    """Turn an error of the openai package into ours: by its status, or by what aiohttp saw."""
    if isinstance(error, openai.APIStatusError):
        _raise_for_status(error)
    cause = error.__cause__ or error
    words = _cut(f"{type(cause).__name__}: {cause}")
    if isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        raise Unreachable(f"cannot connect: {words}") from error
    if isinstance(cause, aiohttp.ClientResponseError):
        raise BadAnswer(words) from error
    raise ConnectionLost(f"the connection broke: {words}") from error


def _raise_for_status(error: openai.APIStatusError) -> NoReturn:
    if 300 <= error.status_code < 400:  # followed, it would carry the key to another address
        where = _cut(error.response.headers.get("location", "nowhere"), 200)
        raise BadAnswer(f"HTTP {error.status_code}: a redirect, to {where}", status=error.status_code) from error
    retry_after_s = _retry_after_s(error.response.headers.get("retry-after"))
    raise _refusal(error.status_code, error.body, error.message, retry_after_s) from error


def _refusal(status: int, body: object, otherwise: str, retry_after_s: float | None) -> RequestError:
    """The error that a server's refusal stands for. Args: otherwise, its words where the body has none."""
    words, sizes = _server_words(status, body, otherwise), None
    if status in (400, 413, 422, 500):
        sizes = context_sizes(words, body)
        if sizes is None and _TOO_LONG.search(words):
            return PromptTooLong(words, status=status)
    if sizes is not None:
        return _SizesNamed(words, status=status, room=sizes[1] - sizes[0])
    if status in (500, 503) and _FULL.search(words):
        return RateLimited(words, status=status, retry_after_s=retry_after_s)
    return of_status(status, words, retry_after_s)


def _told_status(reply: Mapping[str, Any]) -> int | None:
    """The status that an error in a 200 reply names."""
    fields = reply if reply.get("object") == "error" else reply.get("error")
    code = fields.get("code") if isinstance(fields, Mapping) else None
    return code if isinstance(code, int) and 400 <= code < 600 else None


def context_sizes(words: str, body: object = None) -> tuple[int, int] | None:
    """Tokens of prompt and context that a refusal names: in fields (llama.cpp) or in words (SGLang, vLLM)."""
    fields = body.get("error", body) if isinstance(body, Mapping) else None
    if isinstance(fields, Mapping):
        prompt, context = fields.get("n_prompt_tokens"), fields.get("n_ctx")
        if isinstance(prompt, int) and isinstance(context, int):
            return prompt, context
    for pattern in _SIZES:
        match = pattern.search(words)
        if match:
            return int(match["prompt"]), int(match["context"])
    return None


def _server_words(status: int, body: object, otherwise: str) -> str:
    """What the server said, without the client's wrapping; a page of HTML is cut to its start."""
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, Mapping) else inner
        if isinstance(message, str):
            return f"HTTP {status}: {_cut(message)}"
    return f"HTTP {status}: {_cut(str(body or otherwise))}"


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date; None where it is neither."""
    for read in (float, lambda date: parsedate_to_datetime(date).timestamp() - time.time()):
        with contextlib.suppress(ValueError, OverflowError):
            if value is not None and math.isfinite(seconds := read(value)):
                return max(0.0, seconds)
    return None


def _cut(text: str, most: int = 2000) -> str:
    return text if len(text) <= most else text[:most] + f"... ({len(text)} characters)"
