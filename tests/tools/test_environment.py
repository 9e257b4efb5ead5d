"""The tool that makes the environments: what it takes from the machine's settings, and what it does with ruins."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(sys.prefix)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "tools" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of pip's settings that holds everything that could spoil an installation."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name == "SSL_CERT_FILE":
            monkeypatch.delenv(name)
    path = tmp_path / "pip.conf"
    path.write_text(
        "[global]\nindex-url = https://mirror.test/simple\ncert = /certificates.pem\n"
        "constraint = /limits.txt\nuser = true\n"
        "[install]\nno-binary = :all:\ntarget = /elsewhere\nproxy = http://proxy.test:1\n"
        "[download]\nproxy = http://other.test:2\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    return path


def test_only_the_way_to_packages_is_taken_from_pips_settings(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("UV_CONSTRAINT", "/limits.txt")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "99")
    monkeypatch.setenv("PYTHONPATH", "/stray")
    env = tool.clean_environment(HERE)
    assert {name: env[name] for name in env if name.startswith(("PIP_", "UV_", "PYTHONPATH"))} == {
        "PIP_INDEX_URL": "https://mirror.test/simple",
        "PIP_CERT": "/certificates.pem",
        "PIP_PROXY": "http://proxy.test:1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_DEFAULT_INDEX": "https://mirror.test/simple",
        "UV_HTTP_TIMEOUT": "99",
    }
    assert env["SSL_CERT_FILE"] == "/certificates.pem"


def test_a_variable_beats_a_file_and_uv_keeps_its_own_index(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://second.test/simple")
    monkeypatch.setenv("UV_INDEX_URL", "https://third.test/simple")
    env = tool.clean_environment(HERE)
    assert (env["PIP_INDEX_URL"], env["UV_INDEX_URL"]) == ("https://second.test/simple", "https://third.test/simple")
    assert "UV_DEFAULT_INDEX" not in env


def test_an_environment_is_current_only_when_it_is_finished_and_its_python_is_there(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / tool.STAMP).write_text(json.dumps({"base": "key"}))
    assert tool.read_stamp(venv) == {}
    (venv / "bin" / "python").symlink_to(sys.executable)
    assert tool.read_stamp(venv) == {"base": "key"}
    with pytest.raises(InterruptedError), tool.unfinished(venv):
        raise InterruptedError
    assert tool.read_stamp(venv) == {}
    (venv / tool.MARK).unlink()
    (venv / tool.STAMP).write_text("{torn")
    assert tool.read_stamp(venv) == {}


def test_a_key_changes_with_every_file_and_word(tmp_path: Path) -> None:
    path = tmp_path / "lock.txt"
    path.write_text("one")
    first = tool.key_of([path], "a")
    assert tool.key_of([path], "a") == first
    assert tool.key_of([path], "b") != first
    path.write_text("two")
    assert tool.key_of([path], "a") != first


@pytest.mark.slow
def test_ruins_are_made_anew_and_what_works_is_left_alone(tmp_path: Path) -> None:
    venv = tmp_path / "with a space"
    python = venv / "bin" / "python"
    tool.create(venv)
    assert (venv / tool.MARK).exists()
    (venv / "trace").touch()
    tool.create(venv)  # still marked as unfinished
    assert not (venv / "trace").exists()
    (venv / tool.MARK).unlink()
    (venv / "trace").touch()
    tool.create(venv)
    assert (venv / "trace").exists()
    python.unlink()
    python.symlink_to(tmp_path / "a Python that was removed")
    tool.create(venv)
    assert not (venv / "trace").exists()
    assert subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
