"""03_generate as a person uses it: watched, interrupted, resumed, and with its kernel killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect

from dfexp import control, shards
from dfexp.fleet import attach
from tests.browser.conftest import ROWS, Lab, Project

pytestmark = pytest.mark.slow

IDLE = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
RUN_ALL = "window.jupyterapp.commands.execute('notebook:run-all-cells')"


def open_notebook(browser: Browser, lab: Lab, name: str) -> Page:
    page = browser.new_page(viewport={"width": 1300, "height": 1150})
    page.goto(f"{lab.url}/lab/workspaces/t1/tree/notebooks/{name}?token=t")
    page.wait_for_function(IDLE, timeout=90_000)
    return page


def run_all(page: Page) -> None:
    """Start the command without waiting for its cells."""
    page.evaluate(f"() => {{ {RUN_ALL}; }}")


def progress(page: Page, state: str) -> None:
    """Wait until the display of the run says `state` and counts rows."""
    expect(page.locator(".jp-OutputArea-output").filter(has_text=f"of {ROWS} done").first).to_contain_text(
        state, timeout=120_000
    )


def done(project: Project) -> int:
    return int((control.read_status(project.run) or {"done": 0})["done"])


def assert_each_index_once(project: Project) -> None:
    rows = list(shards.read_rows(project.run.completions))
    failed = list(shards.read_failures(project.run.completions))
    assert Counter(row["index"] for row in [*rows, *failed]) == dict.fromkeys(range(ROWS), 1)


def test_watch_interrupt_and_resume(browser: Browser, lab: Lab, project: Project, tmp_path: Path) -> None:
    page = open_notebook(browser, lab, "03_generate.ipynb")
    run_all(page)
    progress(page, "running")
    assert control.wait_until(lambda: done(project) >= 8, 120)
    page.screenshot(path=tmp_path / "running.png")

    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:interrupt-kernel'); }")
    message = page.locator(".jp-OutputArea-output").filter(has_text="Run this cell again to resume")
    expect(message).to_be_visible(timeout=120_000)
    expect(message).to_contain_text("RunStopped")
    progress(page, "stopped")
    page.screenshot(path=tmp_path / "stopped.png")
    before = done(project)
    assert 8 <= before < ROWS
    assert control.living_process(project.run) is None

    page.wait_for_function(IDLE, timeout=60_000)
    run_all(page)
    expect(page.locator(".jp-OutputArea-output").filter(has_text="rows are done")).to_be_visible(timeout=240_000)
    progress(page, "ended")
    assert page.locator(".jp-OutputArea-output").filter(has_text=f"of {ROWS} done").count() == 1
    page.screenshot(path=tmp_path / "ended.png")
    final = control.read_status(project.run)
    assert final is not None
    assert final["done_before"] == before
    assert_each_index_once(project)


def test_a_killed_kernel_loses_no_row_and_leaves_no_unknown_process(
    browser: Browser, lab: Lab, project: Project, tmp_path: Path
) -> None:
    page = open_notebook(browser, lab, "03_generate.ipynb")
    run_all(page)
    assert control.wait_until(lambda: done(project) >= 4, 180)
    kernel = next(child for child in psutil.Process(lab.pid).children() if "ipykernel_launcher" in child.cmdline())
    kernel.kill()
    assert control.wait_until(lambda: control.living_process(project.run) is None, 90)
    stopped = control.read_status(project.run)
    assert stopped is not None
    assert stopped["state"] == "stopped"
    assert "is gone" in stopped["reason"]
    assert unknown_processes(project, lab) == []

    page.get_by_role("button", name="Ok").click()  # JupyterLab says that it restarts the kernel
    run_all(page)
    expect(page.locator(".jp-OutputArea-output").filter(has_text="rows are done")).to_be_visible(timeout=240_000)
    page.screenshot(path=tmp_path / "after-a-killed-kernel.png")
    assert_each_index_once(project)
    assert control.living_process(project.run) is None
    assert unknown_processes(project, lab) == []


def unknown_processes(project: Project, lab: Lab) -> list[str]:
    """Processes that belong to the project by command line or folder, and that neither fleet.json nor the lab owns."""
    known = {lab.pid, *(child.pid for child in psutil.Process(lab.pid).children(recursive=True))}
    for server in attach(project.fleet).servers:
        if server.pid is not None and psutil.pid_exists(server.pid):
            known |= {server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))}
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        belongs = str(project.root) in " ".join([*(process.info["cmdline"] or ()), process.info["cwd"] or ""])
        if belongs and process.info["pid"] not in known:
            found.append(f"{process.info['pid']} {process.info['cmdline']}")
    return found
