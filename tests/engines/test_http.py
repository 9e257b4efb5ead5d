"""Bare HTTP against real sockets: what each kind of answer and failure becomes."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from dfexp.engines.http import base_url, first_model, get_json, get_text, probe
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
    with pytest.raises(BadAnswer, match="redirect"):
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
        (b"SSH-2.0-x\r\n\r\n", BadAnswer),
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
    ("answer", "state"),
    [
        ((200, {}, json.dumps(GOOD).encode()), "ready"),
        ((200, {}, b'{"choices": [{"message": {}}], "usage": {"completion_tokens": 0}}'), "foreign"),
        ((200, {}, b'{"status": "ok"}'), "foreign"),
        ((200, {}, b"[1]"), "foreign"),
        ((200, {}, b"<html>"), "foreign"),
        ((401, {}, b"{}"), "refused"),
        ((400, {}, b"{}"), "refused"),
        ((503, {}, b'{"error": {"message": "Loading model"}}'), "loading"),
        (("hang", {}, b""), "busy"),
    ],
)
def test_only_a_generated_token_is_ready(page, answer, state):
    page.answer = answer
    found = probe(f"{page.url}/v1/", "k", "m", timeout_s=0.5)
    assert (found.state, found.ready) == (state, state == "ready")
    path, _, body = page.seen[0]
    assert path == "/v1/chat/completions"
    assert json.loads(body)["max_tokens"] == 1
    assert json.loads(body)["model"] == "m"


def test_a_probe_of_a_closed_port_says_closed():
    assert probe(closed_url(), "", "m", timeout_s=2).state == "closed"


@pytest.mark.parametrize("body", [b"{}", b'{"data": []}', b'{"data": [{"id": ""}]}', b"[]", b'{"data": 1}'])
def test_a_server_without_models_says_so(page, body):
    page.answer = (200, {}, body)
    with pytest.raises(BadAnswer, match=r"fleet\.model"):
        first_model(page.url)


def test_the_first_model_is_taken(page):
    page.answer = (200, {}, b'{"data": [{"id": "a"}, {"id": "b"}]}')
    assert first_model(page.url + "/v1") == "a"
    assert page.seen[0][0] == "/v1/models"


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_base_url_has_no_v1(url):
    assert base_url(url) == "http://h:1"


def test_every_failure_is_of_the_tree(page):
    page.answer = (418, {}, b"\xff\xfe")
    with pytest.raises(RequestError):
        get_json(page.url)
