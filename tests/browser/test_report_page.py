"""The exported report in a browser without a network: a run with samples beside an earlier one."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from dfexp import notebook
from dfexp.params import BaselinePart, ReportGroup
from tests.browser.conftest import NOTEBOOKS
from tests.finished_run import START
from tests.notebooks.support import demo_spec, make_project
from tests.report.simulated_run import write

pytestmark = pytest.mark.slow

TITLES = [
    "Runs beside each other", "Throughput over time", "Servers' rate and client's rate", "Requests in flight",
    "Usage of both pools", "Usage against running requests", "What happened, and when", "Answer lengths", "Latencies",
]  # fmt: skip


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
    errors: list[str] = []
    page.on("request", lambda request: asked_for.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(made.as_uri())
    page.wait_for_function(f"document.querySelectorAll('.js-plotly-plot .main-svg .gtitle').length >= {len(TITLES)}")
    assert [url for url in asked_for if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []
    figures = page.locator(".js-plotly-plot").all()
    assert [figure.locator(".gtitle").first.text_content() for figure in figures] == TITLES
    for figure in figures:
        box = figure.bounding_box()
        assert box is not None
        assert box["width"] > 700
        assert box["height"] > 200
        assert figure.locator(".xtitle").text_content()
        assert figure.locator(".ytitle").text_content()
        assert "Source: outputs of run after" in (figure.locator(".annotation").last.text_content() or "")
    words = page.locator("body").inner_text()
    for said in ("client-limited", "what was expected: met", "mamba_strategy: extra_buffer, no_buffer", "Per server"):
        assert said in words
    assert "Traceback" not in words
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000
    page.screenshot(path=tmp_path / "report.png", full_page=True)
