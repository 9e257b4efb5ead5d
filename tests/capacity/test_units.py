"""GiB and decimal gigabytes are never mixed: names carry units, and no decimal factor is in the code."""

from __future__ import annotations

import ast
from pathlib import Path

import dfexp.capacity

FOLDER = Path(dfexp.capacity.__file__).parent


def test_no_name_says_gb() -> None:
    names = {
        name
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            getattr(node, "id", None),
            getattr(node, "attr", None),
            getattr(node, "arg", None),
            getattr(node, "name", None),
        )
        if isinstance(name, str)
    }
    assert {name for name in names if name.lower().endswith(("_gb", "_mb", "_kb", "_tb"))} == set()


def test_powers_of_ten_never_stand_for_memory() -> None:
    numbers = {
        node.value
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
    }
    assert numbers & {1e9, 10**9, 1e6, 10**6, 1e12} == set()
