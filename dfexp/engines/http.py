"""Bare HTTP for probes and limits: standard library only, bounded in time and size, errors of the designed tree.

Loopback never goes through a proxy of the environment, and redirects are not followed: they would carry the key away.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dfexp.errors import (
    AccessDenied,
    BadAnswer,
    ConnectionLost,
    RateLimited,
    Refused,
    RequestError,
    ServerFault,
    TimedOut,
    Unreachable,
)

_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What one probe found.

    Attributes:
        state: ready: a generated token came back. closed: nothing listens. loading: it listens and says "not yet".
            busy: no answer in time. refused: it answers, but not to this key, route or request. foreign: what it
            answers is no chat completion.
        detail: the server's words, or what happened.
        latency_s: seconds the probe took.
    """

    state: Literal["ready", "closed", "loading", "busy", "refused", "foreign"]
    detail: str
    latency_s: float

    @property
    def ready(self) -> bool:
        """Whether a generated token came back."""
        return self.state == "ready"


def base_url(url: str) -> str:
    """The URL without trailing slashes and without /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def get_text(url: str, *, key: str = "", timeout_s: float = 10.0) -> str:
    """GET a page as text. Raises RequestError subclasses."""
    return _send(_request(url, key), timeout_s).decode("utf-8", "replace")


def get_json(url: str, *, key: str = "", timeout_s: float = 10.0) -> Any:
    """GET a JSON value. Raises RequestError subclasses, BadAnswer when it is not JSON."""
    return _parse(_send(_request(url, key), timeout_s), url)


def post_json(url: str, body: Mapping[str, Any], *, key: str = "", timeout_s: float = 10.0) -> Any:
    """POST a JSON object and get a JSON value. Raises RequestError subclasses."""
    return _parse(_send(_request(url, key, json.dumps(body).encode()), timeout_s), url)


def first_model(url: str, key: str = "", timeout_s: float = 10.0) -> str:
    """Name of the first model that the server lists. Raises RequestError, BadAnswer when it lists none."""
    listing = get_json(f"{base_url(url)}/v1/models", key=key, timeout_s=timeout_s)
    try:
        name = listing["data"][0]["id"]
    except (TypeError, KeyError, IndexError):
        name = None
    if not isinstance(name, str) or not name:
        raise BadAnswer(f"{url}/v1/models lists no model. Give the model's name in fleet.model.")
    return name


def probe(url: str, key: str, model: str, timeout_s: float = 10.0) -> Readiness:
    """Ask for one generated token: the only proof that a server serves. Never raises for what a server does."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
    start = time.monotonic()
    state: Literal["ready", "closed", "loading", "busy", "refused", "foreign"]
    try:
        answer = post_json(f"{base_url(url)}/v1/chat/completions", body, key=key, timeout_s=timeout_s)
        state, detail = _judge(answer)
    except (Unreachable, ConnectionLost) as error:
        state, detail = "closed", str(error)
    except (ServerFault, RateLimited) as error:
        state, detail = "loading", str(error)
    except TimedOut as error:
        state, detail = "busy", str(error)
    except (AccessDenied, Refused) as error:
        state, detail = "refused", str(error)
    except RequestError as error:
        state, detail = "foreign", str(error)
    return Readiness(state=state, detail=detail, latency_s=time.monotonic() - start)


def _judge(answer: Any) -> tuple[Literal["ready", "foreign"], str]:
    """Whether an answer is a chat completion with a token in it."""
    try:
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        tokens = usage.get("completion_tokens", 1)
        if isinstance(choice["message"], dict) and isinstance(tokens, int) and tokens >= 1:
            return "ready", "answered one token"
    except (TypeError, KeyError, IndexError, AttributeError):
        pass
    return "foreign", "HTTP 200, but the body is not a chat completion"


def _request(url: str, key: str, body: bytes | None = None) -> urllib.request.Request:
    """A GET, or a POST of JSON. Raises Refused for anything but http(s): a file: URL would read this machine's disk."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise Refused(f"{url!r} is not an http(s) URL.")
    headers = {"Accept": "*/*", "Connection": "close", "User-Agent": "dfexp"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    if body is not None:
        headers["Content-Type"] = "application/json"
    return urllib.request.Request(url, data=body, headers=headers)  # noqa: S310 (the scheme was checked)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an error: following it would send the key to another address."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _send(request: urllib.request.Request, timeout_s: float) -> bytes:
    """Send one request and return the body; each failure as its class of the error tree."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if _is_loopback(request.host):
        handlers.append(urllib.request.ProxyHandler({}))
    where = request.full_url
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as reply:
            body: bytes = reply.read(_MAX_BYTES + 1)
            missing = reply.length
    except urllib.error.HTTPError as error:
        with error:
            raise _http_error(where, error) from None
    except TimeoutError:
        raise TimedOut(f"{where}: no answer within {timeout_s:g} s.") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimedOut(f"{where}: no answer within {timeout_s:g} s.") from None
        if isinstance(error.reason, (ConnectionResetError, BrokenPipeError)):
            raise ConnectionLost(f"{where}: the connection broke ({error.reason}).") from None
        raise Unreachable(f"{where}: cannot connect ({error.reason}).") from None
    except (OSError, http.client.HTTPException) as error:
        raise _broken(where, error) from None
    if missing and len(body) <= _MAX_BYTES:
        raise ConnectionLost(f"{where}: the connection broke {missing} bytes before the end of the answer.")
    if len(body) > _MAX_BYTES:
        raise BadAnswer(f"{where}: the answer is larger than {_MAX_BYTES} bytes.")
    return body


def _broken(where: str, error: Exception) -> RequestError:
    """A connection that broke after it was made, or an answer that is not HTTP."""
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return BadAnswer(f"{where}: what answers there does not speak HTTP.")
    return ConnectionLost(f"{where}: the connection broke ({type(error).__name__}: {error}).")


def _http_error(where: str, error: urllib.error.HTTPError) -> RequestError:
    """The error class of an HTTP status, with the server's own words."""
    try:
        words = _words(error.read(65536))
    except (OSError, http.client.HTTPException):
        words = ""
    status = error.code
    message = f"{where}: HTTP {status}" + (f": {words}" if words else "")
    if status in (401, 403, 404):
        return AccessDenied(message, status=status)
    if status == 429:
        return RateLimited(message, status=status)
    if status >= 500:
        return ServerFault(message, status=status)
    if status < 400:
        return BadAnswer(f"{message} (a redirect to {error.headers.get('Location')}; redirects are not followed)")
    return Refused(message, status=status)


def _words(body: bytes) -> str:
    """The message inside an error body: OpenAI's and FastAPI's shapes, else its first 200 characters."""
    text = body.decode("utf-8", "replace").strip()
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text
    for step in ("error", "message", "detail"):
        if isinstance(value, dict) and step in value:
            value = value[step]
    return " ".join(str(value).split())[:200]


def _parse(body: bytes, url: str) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        raise BadAnswer(f"{url}: the answer is not JSON; it begins {body[:80]!r}.") from None


def _is_loopback(host: str | None) -> bool:
    """Whether `host[:port]` names this machine's loopback."""
    name = urllib.parse.urlsplit(f"//{host or ''}").hostname or ""
    return name in ("localhost", "::1") or name.startswith("127.")
