"""The exported report in a browser without a network."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from dfexp import notebook
from tests.browser.conftest import NOTEBOOKS
from tests.finished_run import START, failure, row, write_run
from tests.notebooks.support import demo_spec, make_project

pytestmark = pytest.mark.slow


def test_the_report_is_whole_without_a_network(browser: Browser, tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    draw = random.Random(1)
    tokens = [min(64, 1 + int(draw.lognormvariate(3.3, 0.6))) for _ in range(120)]
    reasons = ["length" if n == 64 else "stop" for n in tokens]
    rows = [
        row(i, completion_tokens=n, latency_s=0.3 + n / 15, submitted_at=START + i / 2, finish_reason=reasons[i])
        for i, n in enumerate(tokens)
    ]
    folder = write_run(root, rows, [failure(120)], generation={"max_tokens": 64})
    (root / "notebooks" / "04_report.ipynb").write_text((NOTEBOOKS / "04_report.ipynb").read_text())
    made = notebook.execute("04_report", demo_spec(root), folder, root)

    context = browser.new_context(viewport={"width": 1000, "height": 900}, offline=True)
    page = context.new_page()
    asked_for: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked_for.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(made.as_uri())
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length > 0")
    assert [url for url in asked_for if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []
    assert page.locator(".js-plotly-plot").count() == 3
    for figure in page.locator(".js-plotly-plot").all():
        box = figure.bounding_box()
        assert box is not None
        assert box["width"] > 700
        assert box["height"] > 200
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000
    page.screenshot(path=tmp_path / "report.png", full_page=True)
