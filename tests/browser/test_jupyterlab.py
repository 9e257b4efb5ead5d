"""03_generate and 04_report as a person uses them: watched, interrupted, resumed, run again, with the kernel killed."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect

from dfexp import control, shards
from dfexp.fleet import attach
from tests.browser import pages
from tests.browser.conftest import ROWS, Lab, Project

pytestmark = pytest.mark.slow

IDLE = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
EXECUTE = "name => { window.jupyterapp.commands.execute(name); }"  # without waiting for its end
SAVE = "() => window.jupyterapp.commands.execute('docmanager:save')"
# After each change of the page: how many displays of the run there are, and how many rows the first one says are done.
WATCH = """() => {
    window.looks = [];
    const look = () => {
        const said = [...document.querySelectorAll('.jp-OutputArea-output.jp-RenderedHTMLCommon')].map(
            one => /([0-9,]+) of [0-9,]+ done/.exec(one.textContent)).filter(found => found);
        if (said.length) window.looks.push([said.length, Number(said[0][1].replaceAll(',', ''))]);
    };
    new MutationObserver(look).observe(document.querySelector('.jp-Notebook'), {childList: true, subtree: true});
}"""
COUNTS = "prompts => prompts.map(one => Number(/[0-9]+/.exec(one.textContent)?.[0] ?? 0))"
ENDED = """before => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].every(
    one => Number(/[0-9]+/.exec(one.textContent)?.[0] ?? 0) > before)"""
ERRORS = "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr']"


def open_notebook(browser: Browser, lab: Lab, name: str) -> Page:
    page = browser.new_context(viewport={"width": 1300, "height": 1150}).new_page()
    workspace = name.split("_")[0]  # one of its own, which opens no other notebook again
    page.goto(f"{lab.url}/lab/workspaces/{workspace}/tree/notebooks/{name}?token=t")
    page.wait_for_function(IDLE, timeout=90_000)
    return page


def run_all(page: Page) -> None:
    """Start the command without waiting for its cells."""
    page.evaluate(EXECUTE, "notebook:run-all-cells")


def run_to_the_end(page: Page) -> None:
    """Run all cells, and wait until each was run once more; none may have written an error."""
    before = max(page.eval_on_selector_all(".jp-CodeCell .jp-InputPrompt", COUNTS))
    run_all(page)
    page.wait_for_function(ENDED, arg=before, timeout=240_000)
    assert page.locator(ERRORS).all_text_contents() == []


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


def assert_updated_in_place(page: Page) -> None:
    """There never was more than one display of the run, and its rows only grew."""
    looks: list[list[int]] = page.evaluate("window.looks")
    assert {number for number, _ in looks} == {1}
    rows = [count for _, count in looks]
    assert all(later >= earlier for earlier, later in pairwise(rows)), rows
    assert len(set(rows)) > 5, rows


def made(project: Project) -> dict[str, str]:
    """The hash of each file of completions."""
    files = sorted(project.run.completions.glob("completions_*"))
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in files}


def test_watch_interrupt_resume_and_report(browser: Browser, lab: Lab, project: Project, tmp_path: Path) -> None:
    page = open_notebook(browser, lab, "03_generate.ipynb")
    page.evaluate(WATCH)
    run_all(page)
    progress(page, "running")
    assert control.wait_until(lambda: done(project) >= 8, 120)
    page.screenshot(path=tmp_path / "running.png")

    page.evaluate(EXECUTE, "notebook:interrupt-kernel")
    message = page.locator(".jp-OutputArea-output").filter(has_text="in a notebook the cell again")
    expect(message).to_be_visible(timeout=120_000)
    expect(message).to_contain_text("RunStopped")
    progress(page, "stopped")
    page.screenshot(path=tmp_path / "stopped.png")
    before = done(project)
    assert 8 <= before < ROWS
    assert control.living_process(project.run) is None

    page.wait_for_function(IDLE, timeout=60_000)
    run_to_the_end(page)
    assert page.locator(".jp-OutputArea-output").filter(has_text="rows are done").count() == 1
    progress(page, "ended")
    assert_updated_in_place(page)
    page.screenshot(path=tmp_path / "ended.png")
    final = control.read_status(project.run)
    assert final is not None
    assert final["done_before"] == before
    assert_each_index_once(project)

    finished = made(project)
    run_to_the_end(page)
    progress(page, "ended")
    assert made(project) == finished, "a run that is finished has nothing left to do"
    assert page.evaluate("window.looks.at(-1)") == [1, ROWS]
    page.evaluate(EXECUTE, "application:toggle-left-area")
    narrow(page)
    page.close()
    report_twice(browser, lab, project, tmp_path)


def narrow(page: Page) -> None:
    """Tables and displays fit into a JupyterLab of 1,000 pixels."""
    page.set_viewport_size({"width": 1000, "height": 1150})
    page.wait_for_function("([room, output]) => Math.abs(document.querySelector(output).clientWidth - room) < 20",
                           arg=[pages.LAB_ROOM, ".jp-OutputArea-output"])  # fmt: skip
    pages.assert_nothing_is_cut(page, ".jp-OutputArea-output:not(.js-plotly-plot)")  # figures follow a while later


def report_twice(browser: Browser, lab: Lab, project: Project, tmp_path: Path) -> None:
    """04_report in JupyterLab: each figure that its cells made is drawn, and once, also when they are run again.

    Nothing of it is cut in a window of 1,000 pixels; figures are looked at with the room of the exported page.
    """
    page = open_notebook(browser, lab, "04_report.ipynb")
    errors = pages.errors_of(page)
    page.evaluate(EXECUTE, "application:toggle-left-area")
    page.set_viewport_size({"width": 1120, "height": 1150})
    run_to_the_end(page)
    page.evaluate(SAVE)
    titles = pages.declared(project.root / "notebooks" / "04_report.ipynb")
    pages.assert_drawn(page, titles, "run small")
    page.screenshot(path=tmp_path / "report.png")
    pages.assert_nothing_is_cut(page)
    narrow(page)
    page.wait_for_function(pages.DRAWN, arg=len(titles))  # figures keep their height
    page.set_viewport_size({"width": 1120, "height": 1150})

    run_to_the_end(page)
    page.wait_for_function(pages.DRAWN, arg=len(titles))
    assert [figure.title for figure in pages.figures(page)] == titles
    assert f"{ROWS} of {ROWS} rows are done" in page.locator(".jp-Notebook").inner_text()
    assert errors == []


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
