"""`dfexp report RUN` on a run of real servers, opened from its file: while the run goes on, and after its end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from dfexp import control, generate, params
from dfexp.fleet import up
from tests.browser import pages
from tests.browser.conftest import ROWS, Project

pytestmark = pytest.mark.slow


def report(project: Project) -> Path:
    command = [sys.executable, "-m", "dfexp.cli", "report", "small"]
    done = subprocess.run(command, cwd=project.root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def opened(browser: Browser, path: Path, screenshot: Path) -> str:
    """Check the page as a reader without a network gets it; returns its words."""
    with browser.new_context(viewport={"width": 1000, "height": 900}, offline=True) as context:
        page = context.new_page()
        errors = pages.errors_of(page)
        page.goto(path.as_uri())
        pages.assert_drawn(page, pages.declared(path.with_suffix(".ipynb")), "run small")
        pages.assert_nothing_is_cut(page)
        page.screenshot(path=screenshot, full_page=True)
        assert errors == []
        words = page.locator("body").inner_text()
    assert "Traceback" not in words
    return words


def test_the_report_of_a_run_that_goes_on_and_of_the_same_run_at_its_end(
    browser: Browser, project: Project, tmp_path: Path
) -> None:
    spec = params.load(project.root / "params" / "demo.yaml")
    servers, _ = up(spec, project.root)
    servers.wait_ready(spec.fleet.start_timeout_s)
    folder = generate.start(spec, project.root)
    assert control.wait_until(lambda: (control.read_status(folder) or {"done": 0})["done"] >= 4, 120)

    words = opened(browser, report(project), tmp_path / "going.png")
    assert "The run is not finished" in words
    counted = re.search(rf"([0-9]+) of {ROWS} rows are done", words)
    assert counted
    assert 4 <= int(counted[1]) < ROWS
    assert f"run unfinished ({counted[1]} of {ROWS})" in words

    assert control.wait_until(lambda: control.living_process(folder) is None, 240)
    words = opened(browser, report(project), tmp_path / "ended.png")
    assert f"{ROWS} of {ROWS} rows are done, 0 failed, 0 are missing" in words
    assert "unfinished" not in words
    assert "not finished" not in words
