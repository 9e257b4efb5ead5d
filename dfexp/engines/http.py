"""Bare HTTP for probes and limits: standard library only, failures as RequestError subclasses.

Loopback never goes through a proxy of the environment, and redirects are not followed: they would carry the key away.
"""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dfexp.errors import BadAnswer, ConnectionLost, Refused, RequestError, TimedOut, Unreachable, of_status


@dataclass(frozen=True, slots=True)
class Readiness:
    """What one probe found: a generated token, or the `error` that came instead of it."""

    error: RequestError | None = None

    @property
    def ready(self) -> bool:
        """Whether a generated token came back."""
        return self.error is None


def get_text(url: str, *, key: str = "", timeout_s: float = 10.0) -> str:
    """GET a page as text."""
    return _send(url, key, timeout_s).decode("utf-8", "replace")


def get_json(url: str, *, key: str = "", timeout_s: float = 10.0, body: Mapping[str, Any] | None = None) -> Any:
    """GET a JSON value, or POST `body` for one."""
    page = _send(url, key, timeout_s, None if body is None else json.dumps(body).encode())
    try:
        return json.loads(page)
    except ValueError:
        raise BadAnswer(f"{url}: the answer is not JSON; it begins {page[:80]!r}.") from None


def probe(url: str, key: str, model: str, timeout_s: float = 10.0) -> Readiness:
    """Ask for one generated token: the only proof that a server serves. Never raises for what a server does."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
    try:
        answer = get_json(f"{url}/v1/chat/completions", key=key, timeout_s=timeout_s, body=body)
    except RequestError as error:
        return Readiness(error)
    try:
        usage = answer.get("usage") or {}
        generated = "message" in answer["choices"][0] and usage.get("completion_tokens", 1) >= 1
    except (TypeError, KeyError, IndexError, AttributeError):
        generated = False
    return Readiness() if generated else Readiness(BadAnswer(f"{url}: HTTP 200 without a generated token."))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an error: following it would send the key to another address."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _send(url: str, key: str, timeout_s: float, body: bytes | None = None) -> bytes:
    """GET, or POST a JSON body; the body of the answer."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise Refused(f"{url!r} is not an http(s) URL.")  # a file: URL would read this machine's disk
    headers = {"Connection": "close", "User-Agent": "dfexp", "Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    loopback = parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127.")
    opener = urllib.request.build_opener(_NoRedirect, *([urllib.request.ProxyHandler({})] if loopback else []))
    request = urllib.request.Request(url, data=body, headers=headers)  # noqa: S310 (the scheme was checked)
    end = time.monotonic() + timeout_s
    try:
        with opener.open(request, timeout=timeout_s) as reply:
            return _read(reply, end)
    except urllib.error.HTTPError as error:
        with error:
            words = " ".join(error.read(2000).decode("utf-8", "replace").split())[:300]
        raise of_status(error.code, f"{url}: HTTP {error.code} {error.reason}. {words}") from None
    except urllib.error.URLError as error:
        kind: type[RequestError] = TimedOut if isinstance(error.reason, TimeoutError) else Unreachable
        raise kind(f"{url}: cannot connect ({error.reason}).") from None
    except (OSError, http.client.HTTPException) as error:
        kind = TimedOut if isinstance(error, TimeoutError) else ConnectionLost
        raise kind(f"{url}: no whole answer ({type(error).__name__}: {error}).") from None


def _read(reply: Any, end: float) -> bytes:
    """The whole body, if it is there by the time `end`: each byte of a page that trickles comes in time."""
    parts = []
    while part := reply.read1(65536):
        parts.append(part)
        if time.monotonic() > end:
            raise TimeoutError("the page trickles")
    if reply.length:
        raise http.client.IncompleteRead(b"", reply.length)
    return b"".join(parts)
