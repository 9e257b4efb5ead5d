"""What a notebook's parameters mean, and that no wrong one passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dfexp import notebook
from dfexp.errors import ParamsError
from dfexp.params import RunSpec
from tests.notebooks.support import PARAMETERS, make_project, parameters_cell

WHOLE = (
    "# Parameters\n"
    'run = "handed"\n'
    'fleet = {"engine": "llamacpp", "servers": 1}\n'
    'prompts = {"path": "p.jsonl"}\n'
    'generation = {"max_tokens": 7}\n'
)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make_project(tmp_path)
    monkeypatch.chdir(root / "notebooks")  # where JupyterLab runs kernels
    return root


def kernel(*cells: str) -> dict[str, Any]:
    """The namespace of a kernel that ran these cells, and runs the one that asks."""
    namespace: dict[str, Any] = {"In": [""]}
    for cell in cells:
        namespace["In"].append(cell)
        exec(cell, namespace)
    namespace["In"].append("spec = notebook.spec(globals())")
    return namespace


def test_as_it_is_the_notebook_runs_the_demo() -> None:
    spec = notebook.spec(kernel(parameters_cell()))
    assert (spec.run, spec.generation.max_tokens) == ("demo", 64)


def test_what_the_cell_sets_is_laid_over_the_file() -> None:
    cell = (
        parameters_cell()
        .replace("generation = {}", 'generation = {"max_tokens": 5}')
        .replace("run = None", 'run = "x"')
    )
    spec = notebook.spec(kernel(cell))
    assert (spec.run, spec.generation.max_tokens, spec.generation.temperature) == ("x", 5, 0.5)


def test_another_file_can_be_named() -> None:
    spec = notebook.spec(kernel(parameters_cell(), '# Parameters\nparams = "params/other.yaml"\n'))
    assert (spec.run, spec.generation.max_tokens) == ("other", 32)


def test_a_group_given_in_part_is_merged_over_the_file() -> None:
    spec = notebook.spec(kernel(parameters_cell(), '# Parameters\ngeneration = {"max_tokens": 9}\n'))
    assert (spec.run, spec.generation.max_tokens, spec.generation.temperature) == ("demo", 9, 0.5)


FILE = PARAMETERS + "notify: tell me\noutputs: elsewhere\nlimits: {rows: 5}\nstore: {bucket: abc}\n"


@pytest.mark.parametrize("name", ["notify", "limits", "store"])
@pytest.mark.parametrize("is_injected", [False, True])
def test_none_given_on_top_wins_over_the_file(project: Path, name: str, is_injected: bool) -> None:
    (project / "params" / "demo.yaml").write_text(FILE)
    asis, cell = notebook.spec(kernel(parameters_cell())), parameters_cell()
    written = cell.replace(f"\n{name} = ", f"\n{name} = None  # ")
    spec = notebook.spec(kernel(cell, f"# Parameters\n{name} = None\n") if is_injected else kernel(written))
    assert (asis.notify, asis.outputs, asis.limits.rows, asis.store.bucket) == ("tell me", "elsewhere", 5, "abc")
    assert spec == asis.model_copy(update={name: RunSpec.model_fields[name].default})


def test_run_and_outputs_are_never_none(project: Path) -> None:
    (project / "params" / "demo.yaml").write_text(FILE)
    spec = notebook.spec(kernel(parameters_cell(), "# Parameters\nrun = None\noutputs = None\n"))
    assert (spec.run, spec.outputs) == ("demo", "elsewhere")


def test_a_group_that_must_be_there_cannot_be_none(project: Path) -> None:
    with pytest.raises(ParamsError, match="prompts: missing"):
        notebook.spec(kernel(parameters_cell(), "# Parameters\nprompts = None\n"))


def test_another_engine_takes_nothing_from_the_file() -> None:
    cell = parameters_cell().replace("fleet = {}", 'fleet = {"engine": "external", "urls": ["http://127.0.0.1:9"]}')
    assert notebook.spec(kernel(cell)).fleet.engine == "external"


def test_a_whole_run_stands_alone() -> None:
    spec = notebook.spec(kernel(parameters_cell(), WHOLE))
    assert (spec.run, spec.generation.max_tokens, spec.generation.temperature) == ("handed", 7, None)


def test_a_file_without_a_run_never_runs_as_the_demo() -> None:
    with pytest.raises(ParamsError, match="run: missing"):
        notebook.spec(kernel(parameters_cell(), WHOLE.replace('run = "handed"\n', "")))


def test_the_parameters_cell_run_again_wins_over_what_was_injected() -> None:
    assert notebook.spec(kernel(parameters_cell(), WHOLE, parameters_cell())).run == "demo"


def test_cells_in_between_may_do_what_they_like() -> None:
    assert notebook.spec(kernel(parameters_cell(), "import os\nanything = 1")).run == "demo"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            [parameters_cell(), "# Parameters\ngeneraton = 1\n"],
            "generaton = 1: unknown parameter. Did you mean generation?",
        ),
        ([parameters_cell(), '# Parameters\nparam = "x"\n'], "param = 'x': unknown parameter. Did you mean params?"),
        ([parameters_cell(), "# Parameters\nzzz = 1\n"], "zzz = 1: unknown parameter. Known parameters: params, run,"),
        ([parameters_cell().replace("generation = ", "generaton = ")], "Did you mean generation?"),
        ([parameters_cell(), "# Parameters\nrun = 5\n"], r"run = 5: "),
        ([parameters_cell(), '# Parameters\ngeneration = "x"\n'], r"generation = 'x'"),
        ([parameters_cell(), '# Parameters\ngeneration = {"max_token": 5}\n'], r"Did you mean generation.max_tokens\?"),
        ([parameters_cell(), '# Parameters\ngeneration = {"max_tokens": "5"}\n'], "remove the quotes"),
        (
            [parameters_cell(), '# Parameters\nparams = "params/none.yaml"\n'],
            "parameter file .*none.yaml",
        ),
        ([parameters_cell(), "# Parameters\nparams = 3\n"], "params = 3 is not the path of a parameter file"),
        ([parameters_cell().replace('params = "params/demo.yaml"', "params = None")], "run: missing"),
    ],
)
def test_a_wrong_parameter_stops_before_anything_starts(cells: list[str], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        notebook.spec(kernel(*cells))


def test_an_error_says_which_file_and_what_was_set_in_the_notebook() -> None:
    with pytest.raises(
        ParamsError, match=r"(?s)params/demo.yaml with generation set in the notebook: .*generation.max_tokens = 0"
    ):
        notebook.spec(kernel(parameters_cell(), '# Parameters\ngeneration = {"max_tokens": 0}\n'))
