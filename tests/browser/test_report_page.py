"""The exported report in a browser without a network: a run with samples beside an earlier one."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from dfexp import notebook
from dfexp.params import BaselinePart, ReportGroup
from tests.browser import pages
from tests.browser.conftest import NOTEBOOKS
from tests.finished_run import START
from tests.notebooks.support import demo_spec, make_project
from tests.report.simulated_run import write

pytestmark = pytest.mark.slow

MUST = {"Runs beside each other", "Usage of both pools", "Usage against running requests", "What happened, and when"}
"""Those that a run without samples, events and other runs does not have."""


def test_the_report_is_whole_without_a_network(browser: Browser, tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    write(root, "before", number=600)
    happened = [{"at": START + 100, "event": "server_down", "server": "127.0.0.1:30001", "detail": "killed"}]
    folder = write(root, "after", number=600, events=happened)
    (root / "notebooks" / "04_report.ipynb").write_text((NOTEBOOKS / "04_report.ipynb").read_text())
    node = BaselinePart(name="a node", tok_per_s=9_000.0, hardware="GPUs", expected_fraction=0.2)
    group = ReportGroup(compare="before", baselines=[node])
    spec = demo_spec(root).model_copy(update={"run": "after", "report": group})
    made = notebook.execute("04_report", spec, folder, root)

    context = browser.new_context(viewport={"width": 1000, "height": 900}, offline=True)
    page = context.new_page()
    asked_for: list[str] = []
    page.on("request", lambda request: asked_for.append(request.url))
    errors = pages.errors_of(page)
    page.goto(made.as_uri())
    titles = pages.declared(made.with_suffix(".ipynb"))
    assert set(titles) >= MUST
    pages.assert_drawn(page, titles, "run after")
    pages.assert_nothing_is_cut(page)
    room: int = page.eval_on_selector(".jp-OutputArea-output", "output => output.clientWidth")
    page.set_viewport_size({"width": 1000 - (room - pages.LAB_ROOM), "height": 900})
    pages.assert_nothing_is_cut(page)
    page.set_viewport_size({"width": 1000, "height": 900})
    assert [url for url in asked_for if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []
    words = page.locator("body").inner_text()
    for said in ("client-limited", "what was expected: met", "mamba_strategy: extra_buffer, no_buffer", "Per server"):
        assert said in words
    assert "Traceback" not in words
    height = page.evaluate("document.documentElement.scrollHeight")
    (picture,) = pages.decoded(page, page.screenshot(path=tmp_path / "report.png", full_page=True))
    assert (picture.width, picture.height) == (1000, height)
    assert height > 400 * len(titles)
    assert picture.blankness < 0.97
