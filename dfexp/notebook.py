"""Run a notebook strictly: its parameters as a checked `RunSpec`, its unattended execution, its HTML.

Papermill runs in a child process of its own, for three reasons: it changes the working directory and the signal
handlers of its process, a hanging one can be ended, and the pipe to it is a leash: when the caller is gone the child
shuts its kernel down, so that no kernel is left that nobody knows of.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

from dfexp import params
from dfexp.errors import NotebookError, ParamsError, RunStopped
from dfexp.layout import FleetFolder, RunFolder, project_root
from dfexp.params import RunSpec

NAMES = ("params", *params.PARAMETERS)
"""What the parameters cell of every notebook may assign."""

_GRACE_S = 30.0  # for the child to save the notebook and end its kernel once it is told to
_NOTHING: tuple[object, ...] = (None, {}, [], "")


def spec(namespace: Mapping[str, Any]) -> RunSpec:
    """The run that a notebook's parameters describe; call it as `notebook.spec(globals())`.

    The file that `params` names, with what the parameters cell and papermill set laid over it. A whole run handed over
    by papermill (`-f params/x.yaml`) stands alone. Names are read from the cells themselves, because papermill only
    warns about a name that the notebook does not have. Raises ParamsError that lists every mistake.
    """
    written, injected = _assigned_names(namespace.get("In", ()))
    unknown = [name for name in dict.fromkeys((*written, *injected)) if name not in NAMES]
    if unknown:
        raise ParamsError(_unknown_names(unknown, namespace))
    given = {name: namespace[name] for name in params.PARAMETERS if namespace.get(name) not in _NOTHING}
    handed_over = {name: value for name, value in given.items() if name in injected}
    if "params" not in injected and _is_whole_run(handed_over, injected):
        return params.validate(handed_over, "the parameters handed to this notebook")
    file = namespace.get("params")
    if file in _NOTHING:
        return params.validate(given, "the parameters of this notebook")
    if not isinstance(file, str):
        raise ParamsError(f"params = {file!r} is not the path of a parameter file, such as 'params/demo.yaml'.")
    source = f"{file} with {', '.join(given)} set in the notebook" if given else file
    return params.validate(params.merge(params.read_yaml(project_root() / file), given), source)


def _is_whole_run(handed_over: Mapping[str, Any], injected: Sequence[str]) -> bool:
    """Whether papermill handed over a parameter file. One without `run` counts, so that it never runs as another."""
    if {"run", "fleet", "prompts"} <= set(injected):
        return True
    fleet, prompts = handed_over.get("fleet"), handed_over.get("prompts")
    return isinstance(fleet, dict) and "engine" in fleet and isinstance(prompts, dict) and "path" in prompts


def _assigned_names(cells: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names that the last parameters cell assigned, and those of the cell that papermill put after it."""
    written: list[str] = []
    injected: list[str] = []
    for source in cells:
        names = _top_level_names(str(source))
        if str(source).lstrip().startswith("# Parameters\n"):
            injected = names
        elif len(set(names) & set(NAMES)) >= 3:
            written, injected = names, []
    return written, injected


def _top_level_names(source: str) -> list[str]:
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a cell with magics
        return []
    targets = [
        target
        for statement in body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    ]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _unknown_names(unknown: Sequence[str], namespace: Mapping[str, Any]) -> str:
    lines = []
    for name in unknown:
        close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
        fix = f"Did you mean {close[0]}?" if close else f"Known parameters: {', '.join(NAMES)}."
        lines.append(f"{name} = {_short(namespace.get(name))}: unknown parameter. {fix}")
    return (
        f"the parameters of this notebook: {len(unknown)} wrong parameter(s); nothing was started.\n  "
        + "\n  ".join(lines)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """Where an executed notebook and its HTML are."""

    notebook: Path
    html: Path


def find(name: str, root: Path) -> Path:
    """The notebook `name` (without .ipynb): the project's own, else the one that comes with dfexp.

    That one lies inside an installed package, and beside the package in a checkout. Raises NotebookError.
    """
    package = Path(str(resources.files("dfexp")))
    places = [folder / "notebooks" / f"{name}.ipynb" for folder in (root, package / "shipped", package.parent)]
    for path in places:
        if path.is_file():
            return path
    raise NotebookError(f"there is no notebook {name!r}: none of {', '.join(map(str, places))} exists.")


def execute(
    name: str, spec: RunSpec, folder: RunFolder, root: Path, *, tick: Callable[[], None] | None = None
) -> Executed:
    """Run a notebook unattended with `spec` as its parameters, in `root`, and export its HTML.

    The executed copy and the HTML are written to the run's notebooks/ also when a cell fails or the kernel dies. No
    signal handler of this process is touched; `tick` is called about once a second in the calling thread, and when it
    raises, the notebook is ended. Raises NotebookError, and RunStopped where a cell raised it.
    """
    source = find(name, root)
    folder.notebooks.mkdir(parents=True, exist_ok=True)
    executed = Executed(notebook=folder.notebooks / f"{name}.ipynb", html=folder.notebooks / f"{name}.html")
    log = folder.notebooks / f"{name}.log"
    job = {
        "source": str(source),
        "notebook": str(executed.notebook),
        "html": str(executed.html),
        "parameters": spec.model_dump(mode="json"),
        "cwd": str(root),
        "fleet": str(FleetFolder(root / spec.outputs / "fleets" / spec.fleet_name).path),
    }
    with log.open("wb") as log_file:
        result = _run_child(job, log_file, tick)
    if result is None:
        raise NotebookError(f"{name}.ipynb: its runner ended before the notebook did. What it said is in {log}.")
    if result["error"] == "RunStopped":
        raise RunStopped(result["message"])
    if result["error"] is not None:
        raise NotebookError(f"{name}.ipynb, {result['cell']}: {result['message']} More is in {executed.html}")
    return executed


def _run_child(job: Mapping[str, Any], log: BinaryIO, tick: Callable[[], None] | None) -> dict[str, Any] | None:
    """The child's result, or None when it ended without one. Never leaves a child behind."""
    child = subprocess.Popen(
        [sys.executable, "-m", "dfexp.notebook_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd=job["cwd"],
        start_new_session=True,  # an interrupt typed at the terminal is the caller's to handle
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(job).encode() + b"\n")
            child.stdin.flush()
        while not _ended(child, 1.0):
            if tick is not None:
                tick()
        last = child.stdout.read().splitlines()[-1:]
        return dict(json.loads(last[0])) if last else None
    finally:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        if not _ended(child, _GRACE_S):
            child.kill()
            child.wait()
        child.stdout.close()


def _ended(child: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
