"""What a page in the browser shows: its figures with their words and boxes, and the pixels of its pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import ElementHandle, Page

_WORDS = {
    "title": ".gtitle", "subtitle": ".gtitle-subtitle", "x": ".xtitle", "y": ".ytitle", "legend": ".legendtext",
    "note": ".annotation-text", "x tick": ".xtick > text", "y tick": ".ytick > text",
}  # fmt: skip
_LOOK = """kinds => [...document.querySelectorAll('.js-plotly-plot')].map(plot => {
    const box = one => { const r = one.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
    const words = Object.entries(kinds).flatMap(([kind, found]) => [...plot.querySelectorAll(found)].map(
        one => ({kind, text: one.textContent, box: box(one)})));
    return {box: box(plot), words: words.filter(one => one.text)};
})"""
_DECODE = """async data => {
    const picture = await createImageBitmap(await (await fetch('data:image/png;base64,' + data)).blob());
    const canvas = new OffscreenCanvas(picture.width, picture.height).getContext('2d');
    canvas.drawImage(picture, 0, 0);
    const pixels = canvas.getImageData(0, 0, picture.width, picture.height).data, counts = {};
    for (let at = 0; at < pixels.length; at += 4) {
        const color = [pixels[at], pixels[at + 1], pixels[at + 2]].map(part => part >> 4 << 4).join(' ');
        counts[color] = (counts[color] ?? 0) + 1;
    }
    return {width: picture.width, height: picture.height, counts};
}"""
DRAWN = """number => document.querySelectorAll('.js-plotly-plot .nsewdrag').length >= number
    && [...document.querySelectorAll('.js-plotly-plot')].every(one => one.clientHeight > 100)"""
"""So many figures are there, and their places have grown to their size, as JupyterLab lets them a moment later."""
LAB_ROOM = 820  # pixels that an output has in a JupyterLab that is 1,000 wide
_TOUCH = 2.0  # pixels that boxes of words may share: they hold the room of accents and descenders
Box = Sequence[float]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as it is drawn: where it is, and each of its words by kind, text and box (left, top, right, bottom)."""

    box: Box
    words: Sequence[Mapping[str, Any]]

    def said(self, kind: str) -> list[str]:
        return [word["text"] for word in self.words if word["kind"] == kind]

    @property
    def title(self) -> str:
        return "".join(self.said("title"))

    def faults(self) -> Iterator[str]:
        """Words that lie over each other, or beyond the figure."""
        for one, other in combinations(self.words, 2):
            (left, top, right, bottom), there = one["box"], other["box"]
            wide, high = min(right, there[2]) - max(left, there[0]), min(bottom, there[3]) - max(top, there[1])
            if wide > _TOUCH and high > _TOUCH:
                yield f"{self.title}: {one['kind']} {one['text']!r} over {other['kind']} {other['text']!r}"
        for word in self.words:
            (left, top, right, bottom), (low, first, high, last) = word["box"], self.box
            if left < low - 1 or right > high + 1 or top < first - 1 or bottom > last + 1:
                yield f"{self.title}: {word['kind']} {word['text']!r} is cut: {word['box']} of {self.box}"


@dataclass(frozen=True, slots=True)
class Picture:
    """A screenshot: its size, and how many pixels have each colour, in steps of 16."""

    width: int
    height: int
    counts: Mapping[tuple[int, ...], int]

    @property
    def blankness(self) -> float:
        """The share of its commonest colour."""
        return max(self.counts.values()) / (self.width * self.height)

    @property
    def colored(self) -> int:
        """Pixels that are not grey: those of data, as axes, grids and words are."""
        return sum(count for color, count in self.counts.items() if max(color) - min(color) > 48)


def errors_of(page: Page) -> list[str]:
    """A list that errors of the page and of its console are added to from now on."""
    told = list[str]()
    page.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    return told


def declared(notebook: Path) -> list[str]:
    """The titles of the figures that an executed notebook holds, in their order."""
    cells: list[Any] = nbformat.read(notebook, as_version=4).cells
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    return [data["text/plain"].removeprefix("figure: ") for data in outputs if "application/vnd.plotly.v1+json" in data]


def figures(page: Page) -> list[Figure]:
    """All figures of a page, from top to bottom."""
    return [Figure(**found) for found in page.evaluate(_LOOK, _WORDS)]


def decoded(page: Page, *screenshots: bytes) -> list[Picture]:
    """PNGs, decoded by the browser itself in an empty page of its own."""
    made = list[Picture]()
    assert page.context.browser
    with page.context.browser.new_page() as blank:
        for png in screenshots:
            found = blank.evaluate(_DECODE, base64.b64encode(png).decode())
            counts = {tuple(map(int, color.split())): count for color, count in found["counts"].items()}
            made.append(Picture(found["width"], found["height"], counts))
    return made


def plots(page: Page) -> list[ElementHandle]:
    """Of each figure the area between its axes."""
    return page.query_selector_all(".js-plotly-plot .nsewdrag")


def assert_drawn(page: Page, titles: Sequence[str], source: str) -> None:
    """These figures and no others, each whole and readable, with units and source, and with data between its axes."""
    assert len(titles) >= 5  # those that need no samples of servers
    page.wait_for_function(DRAWN, arg=len(titles))
    found = figures(page)
    assert [figure.title for figure in found] == list(titles)
    assert [fault for figure in found for fault in figure.faults()] == []
    for figure in found:
        (x,), (y,) = figure.said("x"), figure.said("y")
        assert y
        assert x.endswith((" (s)", " (min)", " (h)", "tokens", "requests")), f"{figure.title}: no unit in {x!r}"
        assert figure.said("note")[-1].startswith(f"Source: outputs of {source}")
        assert figure.box[2] - figure.box[0] > 500
        assert figure.box[3] - figure.box[1] > 200
    pictures = decoded(page, *[plot.screenshot() for plot in plots(page)])
    for figure, picture in zip(found, pictures, strict=True):
        assert picture.width > 400, figure.title
        assert picture.colored > 40, f"{figure.title}: nothing is drawn between its axes"
        assert len(picture.counts) > 3, figure.title


def assert_nothing_is_cut(page: Page, outputs: str = ".jp-OutputArea-output") -> None:
    """Neither the page nor any output is wider than there is room for."""
    wide = """outputs => outputs.filter(one => one.scrollWidth > one.clientWidth).map(
        one => [one.className, one.scrollWidth, one.clientWidth, one.textContent.slice(0, 60)])"""
    assert page.eval_on_selector_all(f"html, {outputs}, .jp-RenderedMarkdown", wide) == []
