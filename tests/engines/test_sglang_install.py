"""What an interpreter has, asked of real ones: this one, which has no SGLang, and some that are no Python at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dfexp.engines import sglang_install
from dfexp.engines.sglang_install import look
from dfexp.errors import FleetError

PROBE = Path(sglang_install.__file__).with_name("sglang_probe.py")
# An nvcc that answers as NVIDIA's does: the preprocessed source on standard output, or its words and a bad status.
NVCC = '#!/bin/sh\ncat >"$0.asked"\necho "dfexp 12. 8"\n'
LOST = '#!/bin/sh\necho "x.cu:2:10: fatal error: nv/target: No such file" >&2\nexit 1\n'


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def package(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """An installed distribution, as far as one can be without an installer."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def test_this_interpreter_has_no_sglang() -> None:
    found = look(sys.executable, {})
    assert Path(found.python).samefile(sys.executable)
    assert found.python_version == ".".join(map(str, sys.version_info[:3]))
    assert (found.sglang_version, found.flags, found.torch_cuda, found.error, found.refused) == (
        None,
        {},
        None,
        None,
        None,
    )


def test_the_answer_is_one_line_whatever_the_folder_of_the_script_holds() -> None:
    """Beside the script lies http.py, which must not stand in for the standard library's."""
    done = subprocess.run([sys.executable, str(PROBE)], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["sglang_version"] is None


PARSER = """
import argparse, http.client
print("words of an import")
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--page-size", type=int, default=1)
        parser.add_argument("--kinds", nargs="+", choices=["a", "b"])
        parser.add_argument("--trace", action="store_true")
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Environment in which packages by the names of SGLang and torch are found."""
    server_args = {"sglang/__init__.py": "", "sglang/srt/__init__.py": "", "sglang/srt/server_args.py": PARSER}
    package(tmp_path / "site", "sglang", "0.5.12", server_args)
    version = {"torch/__init__.py": "raise ImportError('libcudart.so.12')", "torch/version.py": "cuda = '12.8'\n"}
    package(tmp_path / "site", "torch", "2.11.0", version)
    return {"PYTHONPATH": str(tmp_path / "site")}


def test_flags_are_those_of_the_parser_that_is_installed(installed: dict[str, str]) -> None:
    found = look(sys.executable, installed)
    assert (found.sglang_version, found.torch_version, found.torch_cuda, found.error) == (
        "0.5.12",
        "2.11.0",
        "12.8",
        None,
    )
    assert found.flags.keys() == {"--help", "--model-path", "--model", "--page-size", "--kinds", "--trace"}
    assert found.flags["--model"]["dest"] == found.flags["--model-path"]["dest"] == "model_path"
    page = {
        "action": "_StoreAction",
        "choices": None,
        "default": "1",
        "dest": "page_size",
        "type": "int",
        "nargs": None,
    }
    assert found.flags["--page-size"] == page
    assert (found.flags["--kinds"]["choices"], found.flags["--kinds"]["nargs"]) == (["a", "b"], "+")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], None),
        (["--model-path", "m", "--page-size", "16"], None),
        (["--model-path", "m", "--page-size", "many"], "argument --page-size: invalid int value: 'many'"),
        (["--model-path", "m", "--pages", "1"], "unrecognized arguments: --pages 1"),
        (["--page-size", "1"], "the following arguments are required: --model-path/--model"),
    ],
)
def test_the_parser_itself_judges_arguments(installed: dict[str, str], argv: list[str], words: str | None) -> None:
    assert look(sys.executable, installed, argv=argv).refused == words


@pytest.mark.parametrize(
    "fault", ["raise ImportError('no libfoo')", "raise SystemExit('this machine is not supported')"]
)
def test_an_import_that_fails_is_told_in_its_own_words(installed: dict[str, str], tmp_path: Path, fault: str) -> None:
    (tmp_path / "site" / "sglang" / "__init__.py").write_text(fault)
    found = look(sys.executable, installed)
    assert (found.sglang_version, found.flags) == ("0.5.12", {})
    assert fault.split("'")[1] in str(found.error)


def test_a_compiler_is_tried_and_its_headers_are_looked_for_where_torch_does(tmp_path: Path) -> None:
    nvcc = program(tmp_path / "bin" / "nvcc", NVCC)
    found = look(sys.executable, {"CUDA_HOME": str(tmp_path)})
    assert (found.nvcc, found.nvcc_version, found.nvcc_error, found.home_has_headers) == (
        str(nvcc),
        "12.8",
        None,
        False,
    )
    asked = Path(f"{nvcc}.asked").read_text()
    assert [name for name in ("cuda_runtime.h", "nv/target", "cuda/std/") if name not in asked] == []
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    assert look(sys.executable, {"CUDA_HOME": str(tmp_path), "AGAIN": "1"}).home_has_headers


def test_a_compiler_without_headers_says_which(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvcc", LOST)
    found = look(sys.executable, {"CUDA_HOME": str(tmp_path)})
    assert found.nvcc_version is None
    assert str(found.nvcc_error).endswith("fatal error: nv/target: No such file")


def test_a_folder_without_a_toolkit_is_no_toolkit(tmp_path: Path) -> None:
    found = look(sys.executable, {"CUDA_HOME": str(tmp_path / "gone")})
    assert (found.cuda_home, found.nvcc) == (None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho not a Python\n", "is no Python that works (exit status 0): 'not a Python'"),
        ("#!/bin/sh\necho broken >&2\nexit 3\n", "is no Python that works (exit status 3): 'broken'"),
        ("#!/no/such/interpreter\n", "cannot be run: No such file or directory"),
        ("#!/bin/sh\nexec tail -f /dev/null\n", "did not say within 0.5 s what it has"),
    ],
)
def test_what_is_no_python_is_told_with_the_fix(tmp_path: Path, text: str, words: str) -> None:
    python = program(tmp_path / "python", text)
    with pytest.raises(FleetError) as caught:
        look(str(python), {}, timeout_s=0.5)
    assert str(caught.value).startswith(f"fleet.python: {python} {words}. Make an environment with SGLang")


def test_nobody_waits_twice_for_an_interpreter_that_hangs(tmp_path: Path) -> None:
    python = program(tmp_path / "python", f"#!/bin/sh\necho asked >>{tmp_path}/count\nexec tail -f /dev/null\n")
    for _ in range(2):
        with pytest.raises(FleetError, match="did not say within 2 s what it has"):
            look(str(python), {}, timeout_s=2)
    assert (tmp_path / "count").read_text() == "asked\n"


@pytest.mark.parametrize(("python", "env", "argv"), [("a\0b", {}, ()), ("sh", {"A": "\0"}, ()), ("sh", {}, ("\0",))])
def test_a_character_that_no_program_can_be_given(python: str, env: dict[str, str], argv: tuple[str, ...]) -> None:
    with pytest.raises(FleetError, match="cannot be run: embedded null byte"):
        look(python, env, argv=argv)


def test_a_file_that_may_not_be_run_or_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(FleetError, match=r"plain cannot be run: Permission denied. Make an environment"):
        look(str(tmp_path / "plain"), {})
    with pytest.raises(FleetError, match=r"no-such-python-here cannot be run: No such file"):
        look("no-such-python-here", {})


def test_an_interpreter_is_asked_once(tmp_path: Path) -> None:
    counted = f'#!/bin/sh\necho asked >>{tmp_path}/count\nexec {sys.executable} "$@"\n'
    python = str(program(tmp_path / "python", counted))
    assert look(python, {}) is look(python, {})
    assert (tmp_path / "count").read_text().count("asked") == 1
    look(python, {"OTHER": "environment"})
    assert (tmp_path / "count").read_text().count("asked") == 2


def test_a_name_is_looked_for_on_the_path() -> None:
    name = next(name for name in ("python3", "python") if shutil.which(name))
    assert os.path.isfile(look(name, {}).python)
