"""The notebooks tell the story and hold no logic: everything that would need a test lives in the package."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "notebooks"
EXPECTED = ["01_launch_fleet", "02_capacity", "03_generate", "04_report"]
CELL_LINES = 15
FORBIDDEN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Try, ast.TryStar, ast.While)


def parse(source: str) -> ast.Module:
    """A cell's code; magics would need IPython and are not allowed either."""
    return compile(source, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def parameter_faults(cell: Any) -> list[str]:
    """The parameters cell assigns literals to plain names, so that papermill and a reader see the same values."""
    faults = []
    for statement in parse(cell.source).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        value = getattr(statement, "value", None)
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(target, ast.Name):
            faults.append(f"parameters, line {statement.lineno}: not an assignment to a name")
        elif value is None or not is_literal(value):
            faults.append(f"parameters, line {statement.lineno}: {target.id} is not a literal")
    return faults


def cell_faults(number: int, cell: Any) -> list[str]:
    faults = []
    if cell.outputs:
        faults.append(f"cell {number}: stored outputs")
    if cell.execution_count is not None:
        faults.append(f"cell {number}: an execution count")
    if len(cell.source.splitlines()) > CELL_LINES:
        faults.append(f"cell {number}: {len(cell.source.splitlines())} lines")
    try:
        tree = parse(cell.source)
    except SyntaxError as error:
        return [*faults, f"cell {number}: no plain Python: {error}"]
    kinds = {type(node).__name__ for node in ast.walk(tree) if isinstance(node, FORBIDDEN)}
    return faults + [f"cell {number}: {kind}" for kind in sorted(kinds)]


def faults_of(notebook: Any) -> list[str]:
    """Everything that is wrong with a notebook; empty when it conforms."""
    code = [(number, cell) for number, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    faults = [fault for number, cell in code for fault in cell_faults(number, cell)]
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.cell_type != "markdown" or not first.source.startswith("# "):
        faults.append("the first cell is not a title")
    tagged = [(number, cell) for number, cell in code if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        return [*faults, f"{len(tagged)} cells are tagged parameters"]
    if tagged[0][0] != code[0][0]:
        faults.append("the parameters cell is not the first code cell")
    return faults + parameter_faults(tagged[0][1])


def test_the_four_notebooks_exist_and_no_other() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_a_notebook_conforms(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert faults_of(notebook) == []
    assert notebook.metadata.kernelspec.name == "python3"


def sample(*code: str, tag: int = 0) -> Any:
    cells = [nbformat.v4.new_markdown_cell("# Title")]
    for number, source in enumerate(code):
        cell = nbformat.v4.new_code_cell(source)
        cell.metadata["tags"] = ["parameters"] if number == tag else []
        cells.append(cell)
    return nbformat.v4.new_notebook(cells=cells)


GOOD = "run = 'demo'\nfleet: dict[str, object] = {'servers': 2}\nlimit = -1\nprompts = None"


def test_a_good_notebook_has_no_faults() -> None:
    assert faults_of(sample(GOOD, "await f()\nwith g() as x:\n    x.show()")) == []


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (["import os\nrun = 'demo'"], "not an assignment"),
        (["run = str(1)"], "run is not a literal"),
        (["run: str"], "run is not a literal"),
        (["a, b = 1, 2"], "not an assignment"),
        (["run = 'demo'", "x = 1\n" * 16], "16 lines"),
        (["run = 'demo'", "def f():\n    pass"], "FunctionDef"),
        (["run = 'demo'", "class A:\n    pass"], "ClassDef"),
        (["run = 'demo'", "f = lambda: 1"], "Lambda"),
        (["run = 'demo'", "try:\n    f()\nexcept OSError:\n    pass"], "Try"),
        (["run = 'demo'", "if x:\n    while y:\n        f()"], "While"),
        (["run = 'demo'", "%matplotlib inline"], "no plain Python"),
    ],
)
def test_a_fault_is_found(code: list[str], fault: str) -> None:
    found = faults_of(sample(*code))
    assert len(found) == 1
    assert fault in found[0]


def test_stored_results_are_found() -> None:
    notebook = sample(GOOD, "1 + 1")
    notebook.cells[2].execution_count = 3
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="2")]
    assert faults_of(notebook) == ["cell 2: stored outputs", "cell 2: an execution count"]


def test_the_tag_and_the_title_are_needed() -> None:
    assert faults_of(sample(GOOD, "x = 1", tag=5)) == ["0 cells are tagged parameters"]
    assert "the parameters cell is not the first code cell" in faults_of(sample("x = 1", GOOD, tag=1))
    notebook = sample(GOOD)
    assert faults_of(nbformat.v4.new_notebook(cells=notebook.cells[1:])) == ["the first cell is not a title"]
