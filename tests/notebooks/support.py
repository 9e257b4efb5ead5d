"""A project folder in a temporary place, and notebooks made of a few lines."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from dfexp import params
from dfexp.params import RunSpec

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

PARAMETERS = """run: demo
fleet: {engine: llamacpp, servers: 2}
prompts: {path: prompts.jsonl}
generation: {max_tokens: 64, temperature: 0.5}
"""


def make_project(root: Path) -> Path:
    """params/demo.yaml, params/other.yaml and an empty notebooks/ under `root`."""
    (root / "params").mkdir(parents=True)
    (root / "notebooks").mkdir()
    (root / "params" / "demo.yaml").write_text(PARAMETERS)
    (root / "params" / "other.yaml").write_text(PARAMETERS.replace("demo", "other").replace("64", "32"))
    return root


def demo_spec(root: Path) -> RunSpec:
    return params.load(root / "params" / "demo.yaml")


def parameters_cell() -> str:
    """The parameters cell as all notebooks have it."""
    cells = json.loads((NOTEBOOKS / "03_generate.ipynb").read_text())["cells"]
    return next("".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", ()))


def write_notebook(root: Path, name: str, *cells: str, parameters: str | None = None) -> Path:
    """A notebook of a parameters cell and code cells."""
    made: list[dict[str, Any]] = []
    for number, source in enumerate((parameters if parameters is not None else parameters_cell(), *cells)):
        tags = {"tags": ["parameters"]} if number == 0 else {}
        made.append(
            {"cell_type": "code", "id": f"c{number}", "metadata": tags, "source": source, "outputs": [],
             "execution_count": None}
        )  # fmt: skip
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = root / "notebooks" / f"{name}.ipynb"
    path.write_text(json.dumps({"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    return path


def printed(notebook: Path) -> str:
    """Everything that the cells of an executed notebook printed."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            loads = key in ("src", "data", "poster", "srcset") or (tag == "link" and key == "href")
            if loads and not (value or "").startswith(("data:", "#")):
                self.found.append(f"<{tag} {key}={value!r}>")


def loaded_from_elsewhere(page: str) -> list[str]:
    """Tags of a page that make a browser load something."""
    parser = _Loads()
    parser.feed(page)
    return parser.found
