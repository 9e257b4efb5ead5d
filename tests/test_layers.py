"""The package's shape: who may import whom, and how large anything may grow."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dfexp"

# Low to high. A module or subpackage imports only from names above its own in this list; inside a subpackage
# imports are free.
ORDER = (
    "errors",
    "records",
    "jsonl",
    "virtual_time",
    "layout",
    "params_errors",
    "params_plan",
    "params_prompts",
    "params_simulated",
    "quality",
    "params_quality",
    "params",
    "sources",
    "prompts",
    "shards",
    "store",
    "metrics",
    "processes",
    "control",
    "hardware",
    "capacity",
    "export",
    "estimate",
    "engines",
    "preflight",
    "fleet",
    "client",
    "sampler",
    "diagnose",
    "rollout",
    "equivalence",
    "generate",
    "tables",
    "report",
    "pilot",
    "sidebyside",
    "rehearse",
    "figures",
    "planview",
    "livepage",
    "display",
    "notebook",
    "cli",
)
MODULE_LINES, FUNCTION_LINES, PACKAGE_LINES = 400, 60, 15_200

# Programs of their own, whose standard output is what they are for.
PRINTING = ("cli", "display", "notebook", "engines")


def modules(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py") if "shipped" not in path.parts)


def layer_of(path: Path, package: Path) -> str:
    """The name in ORDER: the subpackage, or the module at the top. Empty for the package's own __init__."""
    parts = path.relative_to(package).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported_layers(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and layer of every import of the package from within itself, also those inside functions."""
    name = package.name
    inside = path.relative_to(package.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = ".".join(inside[: len(inside) - node.level + 1]) if node.level else ""
            start = ".".join(part for part in (up, node.module or "") if part)
            found = [f"{start}.{alias.name}" for alias in node.names] if start == name else [start]
        else:
            continue
        for dotted in found:
            head, _, rest = dotted.partition(".")
            if head == name and rest and not rest.startswith("__"):
                yield node.lineno, rest.split(".")[0]


def layer_faults(package: Path, order: tuple[str, ...]) -> list[str]:
    faults = []
    for path in modules(package):
        own = layer_of(path, package)
        if own and own not in order:
            faults.append(f"{path.name}: {own} has no place in ORDER")
            continue
        for line, other in imported_layers(path, package):
            if other not in order:
                faults.append(f"{path.name}:{line}: imports {other}, which has no place in ORDER")
            elif not own or (other != own and order.index(other) > order.index(own)):
                faults.append(f"{path.name}:{line}: {own or package.name} imports {other}, which is above it")
    return faults


def test_modules_import_only_from_lower_layers() -> None:
    assert layer_faults(PACKAGE, ORDER) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from pkg.high import x", "low imports high"),
        ("from pkg import high", "low imports high"),
        ("import pkg.high.deep", "low imports high"),
        ("from . import high", "low imports high"),
        ("from .high import x", "low imports high"),
        ("def f():\n    import pkg.high", "low imports high"),
        ("from pkg.unknown import x", "imports unknown"),
    ],
)
def test_an_import_from_a_higher_layer_is_found(tmp_path: Path, text: str, fault: str) -> None:
    package = tmp_path / "pkg"
    (package / "high").mkdir(parents=True)
    (package / "low.py").write_text(text)
    (package / "high" / "deep.py").write_text("from pkg import __version__, low\nfrom pkg.high import other\n")
    assert [fault in found for found in layer_faults(package, ("low", "high"))] == [True]


def test_a_module_without_a_place_is_found(tmp_path: Path) -> None:
    (tmp_path / "stray.py").write_text("")
    assert layer_faults(tmp_path, ("low",)) == ["stray.py: stray has no place in ORDER"]


def test_every_name_of_the_order_exists() -> None:
    missing = [name for name in ORDER if not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").is_file()]
    assert missing == []


def test_modules_stay_readable() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules(PACKAGE)}
    assert {name: count for name, count in lines.items() if count > MODULE_LINES} == {}


def code_lines(path: Path) -> int:
    """Lines that hold code: without blank lines, comments and docstrings."""
    text = path.read_text()
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_the_package_stays_small() -> None:
    assert sum(map(code_lines, modules(PACKAGE))) < PACKAGE_LINES


def test_functions_stay_readable() -> None:
    long = []
    for path in [*modules(PACKAGE), *modules(ROOT / "tools")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length >= FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert long == []


def test_only_programs_print() -> None:
    prints = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules(PACKAGE)
        if layer_of(path, PACKAGE) not in PRINTING
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert prints == []


def test_every_ignored_type_error_is_named() -> None:
    bare = re.compile(r"#\s*type:\s*ignore(?!\[[a-z-]+)")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in modules(PACKAGE)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bare.search(line)
    ]
    assert found == []
