"""Servers that somebody else runs: keys from the environment, limits in whichever way the server tells them."""

import json
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from dfexp.engines.base import Server, engine_for
from dfexp.errors import AccessDenied, BadAnswer, FleetError, TimedOut, Unreachable
from dfexp.layout import FleetFolder
from dfexp.params import ExternalFleet
from tests.http_stub import Quiet, serving

DATA = Path(__file__).parents[1] / "data" / "sglang"


class Pages(Quiet):
    """Serves the pages of its server by path; 401 without the key, 404 for other paths."""

    def do_GET(self) -> None:
        body = self.server.pages.get(self.path)
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, b'{"error": "no"}')
        elif body is None:
            self.reply(404, b'{"detail": "Not Found"}')
        elif body == "hang":
            self.server.released.wait(30)
        else:
            self.reply(200, body if isinstance(body, bytes) else json.dumps(body).encode())


def at(url: str) -> Server:
    return Server(name="one", url=url)


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with serving(Pages) as made:
        made.pages, made.key = {}, ""
        yield made


def engine(urls: list[str], **keys: object):
    return engine_for(ExternalFleet(engine="external", urls=urls, **keys))


def sglang(version: str) -> dict[str, object]:
    return {
        "/server_info": json.loads((DATA / f"server_info_{version}.json").read_text()),
        "/v1/models": json.loads((DATA / f"v1_models_{version}.json").read_text()),
    }


def test_urls_lose_their_v1_and_nothing_is_started(tmp_path):
    plans = engine(["http://h:1/v1/", "https://proxy/team"]).plan(FleetFolder(tmp_path), "")
    assert [(plan.url, plan.argv) for plan in plans] == [("http://h:1", None), ("https://proxy/team", None)]


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_sglang_tells_its_effective_limits(server, version):
    server.pages = sglang(version)
    limits = engine([server.url], max_running_requests=999).limits(at(server.url), "")
    assert (limits.max_running_requests, limits.context_length, limits.max_total_num_tokens) == (16, 8192, 20000)
    assert limits.engine_version == f"sglang {version}"


def test_a_server_that_says_little_is_completed_by_the_parameters(server):
    server.pages = {"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}
    limits = engine([server.url], max_running_requests=7, context_length=100).limits(at(server.url), "")
    assert (limits.max_running_requests, limits.context_length, limits.model) == (7, 4096, "m")


def test_a_server_without_a_list_of_models_takes_everything_from_the_parameters(server):
    limits = engine([server.url], model="mine", max_running_requests=7).limits(at(server.url), "")
    assert (limits.max_running_requests, limits.context_length, limits.model) == (7, None, "mine")


def test_a_wrong_key_is_an_error_and_not_a_server_without_limits(server):
    server.key = "right"
    server.pages = sglang("0.5.23")
    assert engine([server.url]).limits(at(server.url), "right").max_running_requests == 16
    with pytest.raises(AccessDenied):
        engine([server.url]).limits(at(server.url), "wrong")


def test_a_server_in_trouble_is_an_error_and_not_a_server_without_limits(server):
    server.pages = {"/v1/models": {"data": [{"id": "m"}]}, "/server_info": "hang"}
    with pytest.raises(TimedOut):
        engine([server.url]).limits(at(server.url), "", timeout_s=0.3)
    with pytest.raises(Unreachable):
        engine([server.url]).limits(at("http://127.0.0.1:1"), "")


def test_the_key_comes_from_the_variable_that_the_parameters_name(monkeypatch):
    with_key = engine(["http://h:1"], api_key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", " sk-secret\n")
    assert with_key.outside_key() == "sk-secret"
    assert engine(["http://h:1"]).outside_key() == ""


@pytest.mark.parametrize("value", [None, "", "  ", "sk-sécret", "sk\nX-Header: 1"])
def test_a_missing_or_unusable_key_names_the_variable_and_never_the_value(monkeypatch, value):
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(FleetError, match="MY_KEY") as caught:
        engine(["http://h:1"], api_key_env="MY_KEY").outside_key()
    assert "sk" not in str(caught.value).replace("asks", "")


def test_the_model_is_the_given_one_or_the_first_listed(server):
    server.pages = {"/v1/models": {"data": [{"id": "first"}, {"id": "second"}]}}
    assert engine([server.url]).model_name(server.url, "") == "first"
    assert engine([server.url], model="second").model_name("http://127.0.0.1:1", "") == "second"


@pytest.mark.parametrize("page", [{}, {"data": []}, {"data": [{"id": ""}]}, [], {"data": 1}])
def test_a_server_without_models_says_so(server, page):
    server.pages = {"/v1/models": page}
    with pytest.raises(BadAnswer, match=r"fleet\.model"):
        engine([server.url]).model_name(server.url, "")


def test_metrics_of_sglang_are_a_sample_and_pages_of_others_are_none(server):
    page = DATA.parent / "metrics" / "0.5.12_hybrid_busy.prom"
    server.pages = {"/metrics": page.read_bytes()}
    before = time.time()
    sample = engine([server.url]).sample(at(server.url), "")
    assert before <= sample.at <= time.time()
    assert (sample.server, sample.num_running_reqs) == ("one", 16.0)
    counts = engine([server.url]).progress(at(server.url), "")
    assert counts.decoded == sample.realtime_decode_tokens_total > 0
    for pages in ({}, {"/metrics": b"<html>hello</html>"}, {"/metrics": b""}):
        server.pages = pages
        assert engine([server.url]).sample(at(server.url), "") is None
        assert engine([server.url]).progress(at(server.url), "") is None


def test_a_server_in_trouble_gives_an_error_and_no_sample(server):
    server.pages = {"/metrics": "hang"}
    with pytest.raises(TimedOut):
        engine([server.url]).sample(at(server.url), "", timeout_s=0.3)
    with pytest.raises(Unreachable):
        engine([server.url]).sample(at("http://127.0.0.1:1"), "")
