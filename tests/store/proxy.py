"""Stands between a client and a real S3 server, and does to requests what networks and gateways do to them."""

from __future__ import annotations

import http.client
import socket
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.store.server import KEY, SECRET

Rule = Callable[[str, str, int], str | None]
"""From method, path and how often the two came before to a fault, or None."""
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'


class Proxy:
    """Forwards to `url`, with the faults of `rule`; a context manager. `seen` counts requests by method and path."""

    def __init__(
        self, url: str, rule: Rule = lambda method, path, before: None, *, is_old: bool = False, page: int = 0
    ) -> None:
        """Args: is_old, drop the conditions of puts, as old gateways do; page, the most objects of a listing."""
        self.upstream, self.rule, self.is_old, self.page = urlsplit(url).netloc, rule, is_old, page
        self.seen: Counter[tuple[str, str]] = Counter()
        self.closing, self.lock = threading.Event(), threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Proxy

    def _any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.owner.lock:
            before = self.owner.seen[self.command, path]
            self.owner.seen[self.command, path] += 1
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.owner.rule(self.command, path, before) or ""
        getattr(self, f"_{fault or 'forward'}")(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _any

    def log_message(self, *_: Any) -> None:
        pass

    def _slow_down(self, _: bytes) -> None:
        self._answer(503, _ERROR.format("SlowDown", "Please reduce your request rate."))

    def _internal(self, _: bytes) -> None:
        self._answer(500, _ERROR.format("InternalError", "We encountered an internal error."))

    def _timeout(self, _: bytes) -> None:
        self._answer(400, _ERROR.format("RequestTimeout", "Your socket connection was not read from in time."))

    def _busy(self, _: bytes) -> None:
        self._answer(409, _ERROR.format("ConditionalRequestConflict", "A conflicting operation occurred."))

    def _false_success(self, _: bytes) -> None:
        self._answer(200, _ERROR.format("InternalError", "We encountered an internal error."))

    def _html(self, _: bytes) -> None:
        self._answer(200, "<html><body>Please log in to the network</body></html>", "text/html")

    def _bad_gateway(self, _: bytes) -> None:
        self._answer(502, "<html><body>Bad Gateway</body></html>", "text/html")

    def _denied(self, _: bytes) -> None:
        """A refusal that repeats all that it was sent, secrets included."""
        said = f"{self.headers.get('Authorization')} {KEY} {SECRET} {self.headers.get('X-Amz-Security-Token')}"
        self._answer(403, _ERROR.format("AccessDenied", said))

    def _forbidden(self, _: bytes) -> None:
        self._answer(403, _ERROR.format("AccessDenied", "explicit deny"))

    def _no_conditions(self, body: bytes) -> None:
        """A store that refuses what it does not know."""
        if "If-None-Match" in self.headers or "If-Match" in self.headers:
            self._answer(501, _ERROR.format("NotImplemented", "A header you provided implies functionality ..."))
        else:
            self._forward(body)

    def _unknown(self, _: bytes) -> None:
        self._answer(501, _ERROR.format("NotImplemented", "A header you provided implies functionality ..."))

    def _gone(self, _: bytes) -> None:
        self._answer(404, _ERROR.format("NoSuchKey", "The specified key does not exist."))

    def _failed(self, _: bytes) -> None:
        self._answer(412, _ERROR.format("PreconditionFailed", "At least one of the pre-conditions did not hold."))

    def _empty(self, _: bytes) -> None:
        self._reply(200, [], b"", 0)

    def _nothing(self, _: bytes) -> None:
        self._reply(204, [], b"", 0)

    def _redirect(self, _: bytes) -> None:
        """To itself, for ever."""
        text = _ERROR.format("TemporaryRedirect", "Please re-send this request.").encode()
        self._reply(307, [("Location", self.owner.url + self.path), ("Content-Type", "text/xml")], text, len(text))

    def _dribble(self, body: bytes) -> None:
        """The answer comes in time, byte by byte, and never to its end."""
        status, headers, data = self._forwarded(body)
        self._reply(status, headers, data[:1], len(data) + 10_000)
        while not self.owner.closing.wait(0.2):
            self.wfile.write(b" ")
            self.wfile.flush()

    def _stall(self, _: bytes) -> None:
        self.owner.closing.wait()
        self.close_connection = True

    def _cut(self, _: bytes) -> None:
        """The connection breaks before the store has seen anything."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _lost_answer(self, body: bytes) -> None:
        """The store has done it, and nobody hears of it."""
        self._forwarded(body)
        self._cut(body)

    def _cut_answer(self, body: bytes) -> None:
        status, headers, data = self._forwarded(body)
        self._reply(status, headers, data[: len(data) // 2], len(data))
        self._cut(body)

    def _corrupt(self, body: bytes) -> None:
        """A byte flips on the way to the store."""
        self._forward(body[:-2] + bytes([body[-2] ^ 1]) + body[-1:])

    def _wrong_checksum(self, body: bytes) -> None:
        """The store says another checksum than that of what it has."""
        status, headers, data = self._forwarded(body)
        wrong = [
            (name, "A" * 43 + "=" if name.lower() == "x-amz-checksum-sha256" else value) for name, value in headers
        ]
        self._reply(status, wrong, data, len(data))

    def _forward(self, body: bytes) -> None:
        status, headers, data = self._forwarded(body)
        self._reply(status, headers, data, len(data))

    def _forwarded(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")}
        if self.owner.is_old and self.command == "PUT":
            headers = {
                name: value for name, value in headers.items() if name.lower() not in ("if-none-match", "if-match")
            }
            headers = self._signed_again(headers, body)
        if self.owner.page and "list-type=2" in self.path:
            self.path += f"&max-keys={self.owner.page}"
            headers = self._signed_again(headers, body)
        connection = http.client.HTTPConnection(self.owner.upstream, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _signed_again(self, headers: dict[str, str], body: bytes) -> dict[str, str]:
        kept = {name: value for name, value in headers.items() if name.lower() not in ("authorization", "host")}
        request = AWSRequest(self.command, f"http://{self.owner.upstream}{self.path}", kept, body)
        S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1").add_auth(request)
        return dict(request.headers.items())

    def _reply(self, status: int, headers: list[tuple[str, str]], data: bytes, length: int) -> None:
        self.send_response_only(status)
        is_head = self.command == "HEAD"
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection") or is_head:
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if not is_head:
            self.wfile.write(data)
            self.wfile.flush()

    def _answer(self, status: int, text: str, kind: str = "application/xml") -> None:
        data = text.encode()
        self._reply(status, [("Content-Type", kind)], data, len(data))
