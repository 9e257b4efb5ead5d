"""Bare HTTP against real sockets: what each kind of answer and failure becomes."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from dfexp.engines import get_json, get_text, probe
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
from tests.http_stub import Quiet, serving

GOOD = {"choices": [{"message": {"role": "assistant", "content": "x"}}], "usage": {"completion_tokens": 1}}


class Page(Quiet):
    """Answers every request with the status, headers and body that its server was given, and notes what it saw."""

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.server.seen.append((self.path, dict(self.headers), self.rfile.read(length)))
        status, headers, body = self.server.answer
        if status == "hang":
            self.server.released.wait(30)
        elif status == "trickle":
            self.send_response(200)
            self.end_headers()
            while not self.server.released.wait(0.1):
                self.wfile.write(b".")
        else:
            self.reply(status, body, headers)

    do_POST = do_GET


@pytest.fixture
def page() -> Iterator[ThreadingHTTPServer]:
    with serving(Page) as server:
        server.seen, server.answer = [], (200, {}, b"{}")
        yield server


def closed_url() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(
    ("status", "error"),
    [
        *((400, Refused), (422, Refused), (401, AccessDenied), (403, AccessDenied), (404, AccessDenied)),
        *((429, RateLimited), (500, ServerFault), (503, ServerFault), (302, BadAnswer)),
    ],
)
def test_each_status_is_its_error_with_the_servers_words(page, status, error):
    page.answer = (status, {"Location": "http://192.0.2.1/"}, b'{"error": {"message": "words of the server"}}')
    with pytest.raises(error, match="words of the server") as caught:
        get_json(page.url, key="secret", timeout_s=5)
    assert type(caught.value) is error
    assert "secret" not in str(caught.value)


def test_the_key_is_sent_as_bearer_and_only_when_there_is_one(page):
    get_text(page.url, key="secret")
    get_text(page.url)
    assert [headers.get("Authorization") for _, headers, _ in page.seen] == ["Bearer secret", None]


def test_loopback_never_goes_through_a_proxy(page, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, closed_url())
    monkeypatch.delenv("no_proxy", raising=False)
    assert get_json(page.url) == {}


def test_a_redirect_does_not_carry_the_key_away(page):
    page.answer = (307, {"Location": f"{page.url}/elsewhere"}, b"")
    with pytest.raises(BadAnswer, match="HTTP 307"):
        get_json(f"{page.url}/here", key="secret")
    assert [path for path, _, _ in page.seen] == ["/here"]


def test_silence_is_a_timeout(page):
    page.answer = ("hang", {}, b"")
    with pytest.raises(TimedOut):
        get_json(page.url, timeout_s=0.2)


def test_nobody_there_is_unreachable():
    with pytest.raises(Unreachable):
        get_json(closed_url())
    with pytest.raises(Unreachable):
        get_json("http://name-that-does-not-exist.invalid/")


def test_only_http_is_spoken(tmp_path):
    (tmp_path / "secret").write_text("{}")
    with pytest.raises(Refused, match="not an http"):
        get_json(f"file://{tmp_path}/secret")


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", ConnectionLost),
        (b"SSH-2.0-x\r\n\r\n", ConnectionLost),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", ConnectionLost),
    ],
)
def test_a_broken_answer_is_never_taken_for_a_good_one(sent, error):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(sent)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(error):
            get_json(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5)
        thread.join()


def test_html_is_no_json(page):
    page.answer = (200, {}, b"<html>login</html>")
    with pytest.raises(BadAnswer, match="not JSON"):
        get_json(page.url)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((200, {}, json.dumps(GOOD).encode()), type(None)),
        ((200, {}, b'{"choices": [{"message": {}}], "usage": {"completion_tokens": 0}}'), BadAnswer),
        ((200, {}, b'{"status": "ok"}'), BadAnswer),
        ((200, {}, b"[1]"), BadAnswer),
        ((200, {}, b"<html>"), BadAnswer),
        ((401, {}, b"{}"), AccessDenied),
        ((400, {}, b"{}"), Refused),
        ((503, {}, b'{"error": {"message": "Loading model"}}'), ServerFault),
        (("hang", {}, b""), TimedOut),
    ],
)
def test_only_a_generated_token_is_ready(page, answer, error):
    page.answer = answer
    found = probe(page.url, "k", "m", timeout_s=0.5)
    assert (type(found.error), found.ready) == (error, error is type(None))
    path, _, body = page.seen[0]
    assert path == "/v1/chat/completions"
    assert json.loads(body)["max_tokens"] == 1
    assert json.loads(body)["model"] == "m"


def test_a_probe_of_a_closed_port_is_unreachable():
    assert isinstance(probe(closed_url(), "", "m", timeout_s=2).error, Unreachable)


def test_every_failure_is_of_the_tree(page):
    page.answer = (418, {}, b"\xff\xfe")
    with pytest.raises(RequestError):
        get_json(page.url)


def test_a_page_that_trickles_is_a_timeout(page: ThreadingHTTPServer) -> None:
    page.answer = ("trickle", {}, b"")
    began = time.monotonic()
    with pytest.raises(TimedOut, match="trickles"):
        get_text(f"{page.url}/health", timeout_s=1.0)
    assert time.monotonic() - began < 10.0
