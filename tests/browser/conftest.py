"""A project, a JupyterLab that serves it, and a browser; all in temporary folders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from dfexp import control
from dfexp.control import wait_until
from dfexp.errors import FleetError
from dfexp.fleet import attach
from dfexp.layout import FleetFolder, RunFolder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
ROWS = 36
PARAMETERS = """run: small
fleet: {engine: llamacpp, servers: 2, max_running_requests: 2, context_length: 1024}
prompts: {path: prompts.jsonl}
generation: {max_tokens: 40, rows_per_shard: 10}
report: {examples: 4}
"""
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Project:
    """A project folder with the four notebooks and a small run."""

    root: Path

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.root / "outputs" / "small")

    @property
    def fleet(self) -> FleetFolder:
        return FleetFolder(self.root / "outputs" / "fleets" / "small")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    root = tmp_path / "project"
    shutil.copytree(NOTEBOOKS, root / "notebooks")
    (root / "params").mkdir()
    (root / "params" / "demo.yaml").write_text(PARAMETERS)
    lines = [json.dumps({"id": f"q{i}", "text": f"Tell a short story about the number {i}."}) for i in range(ROWS)]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    made = Project(root)
    yield made
    if control.living_process(made.run):  # of a test that failed half-way; it holds the fleet
        control.send(made.run, control.STOP_NOW, reason="the test is over")
        control.wait_until(lambda: control.living_process(made.run) is None, 60)
    with contextlib.suppress(FleetError):
        attach(made.fleet).down(drain_s=0)


@pytest.fixture
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "there is no Chromium on the PATH: `make chromium` installs Debian's, else install it yourself"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@dataclass(frozen=True, slots=True)
class Lab:
    """A running JupyterLab."""

    url: str
    pid: int


@pytest.fixture
def lab(project: Project, tmp_path: Path) -> Iterator[Lab]:
    settings = tmp_path / "settings" / "@jupyterlab"
    for extension, content in {
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }.items():
        path = settings / f"{extension}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    runtime = tmp_path / "runtime"
    environment = {
        **os.environ,
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root",
        f"--ServerApp.root_dir={project.root}", "--IdentityProvider.token=t", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    with (tmp_path / "lab.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=project.root)
    record = runtime / f"jpserver-{process.pid}.json"
    try:
        assert wait_until(record.exists, 60), (tmp_path / "lab.log").read_text()
        yield Lab(json.loads(record.read_text())["url"].rstrip("/"), process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
