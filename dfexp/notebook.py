"""Run a notebook strictly: its parameters as a checked `RunSpec`, its unattended execution, its HTML."""

import ast
import atexit
import difflib
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

from dfexp import errors, fleet, params
from dfexp.errors import NotebookError, NotebookInputError, ParamsError, RunStopped
from dfexp.jsonl import disk
from dfexp.layout import FleetFolder, RunFolder, project_root
from dfexp.params_errors import shown

NAMES = ("params", *params.PARAMETERS)  # what the parameters cell of every notebook may assign
_STYLE = """
<style>
body.jp-Notebook { max-width: 1040px; margin: 0 auto; padding: 16px 20px 60px; }
.jp-Cell { padding: 2px 0; }
.jp-OutputPrompt, .jp-InputPrompt { display: none; }
.jp-OutputArea-output { overflow-x: auto; }
.jp-MarkdownOutput, .jp-RenderedMarkdown, .jp-RenderedHTML { padding-left: 0 !important; }
.jp-RenderedHTMLCommon table { margin-left: 0; }
</style>
"""


def spec(namespace: Mapping[str, Any]) -> params.RunSpec:
    """The run that a notebook's parameters describe; call it as `notebook.spec(globals())`.

    The file that `params` names, with what the parameters cell and papermill set laid over it. Where papermill handed
    over a whole run (`-f params/x.yaml`: fleet and prompts, and no `params`), that stands alone. Names are read from
    the cells: papermill only warns about those that the notebook does not have. Raises ParamsError with all mistakes.
    From here on the terminal of the kernel hears of a stop too, and how to go on where papermill is killed.
    """
    found = _described(namespace)
    if "get_ipython" in namespace:
        with suppress(OSError):  # a stderr that is no file; a kernel's has the one that it began with
            stderr = os.dup(sys.stderr.fileno())
            namespace["get_ipython"]().set_custom_exc((RunStopped,), partial(_tell_the_terminal, stderr))
            _mind_the_parent(stderr, found)
    return found


def _described(namespace: Mapping[str, Any]) -> params.RunSpec:
    """The spec. What is given as None wins over the file too, and means the defaults."""
    written, injected = _assigned_names(namespace.get("In", ()))
    wrong = [_unknown(name, namespace.get(name)) for name in dict.fromkeys(written + injected) if name not in NAMES]
    if wrong:
        raise ParamsError("\n  ".join(("the parameters of this notebook: nothing was started.", *wrong)))
    given = {name: namespace[name] for name in params.PARAMETERS if namespace.get(name, {}) not in ({}, "")}
    given = {name: value for name, value in given.items() if value is not None or name not in ("run", "outputs")}
    if {"fleet", "prompts"} <= set(injected) and "params" not in injected:
        handed = {name: value for name, value in given.items() if name in injected}
        return params.validate(handed, "the run handed to this notebook (fleet and prompts without params)")
    file = namespace.get("params") or ""
    if not isinstance(file, str):
        raise ParamsError(f"params = {file!r} is not the path of a parameter file, such as 'params/demo.yaml'.")
    if not file:
        return params.validate(given, "the parameters of this notebook")
    source = f"{file} with {', '.join(given)} set in the notebook" if given else file
    return params.validate(params.merge(params.read_yaml(project_root() / file), given), source)


def _mind_the_parent(stderr: int, run: params.RunSpec) -> None:
    """Say how to go on when what started this kernel is killed: papermill says nothing then, and its kernels die."""
    does = "goes on" if run.generation.on_orphan == "continue" else "drains and stops"
    words = f"what started this notebook has ended; a run that it started {does}. What is done is on disk: dfexp"
    words += f" status {run.run}. To go on: `dfexp resume {run.run}`, or the same command. The servers stay:"
    words += f" dfexp fleet down {run.fleet_name}"
    if hasattr(os, "pidfd_open") and all(thread.name != words for thread in threading.enumerate()):
        parent = os.pidfd_open(os.getppid())
        threading.Thread(name=words, target=_tell_at_the_end, args=(parent, stderr, words), daemon=True).start()


def _tell_at_the_end(process: int, fd: int, words: str) -> None:
    select.select([process], [], [])
    with suppress(OSError):
        os.write(fd, f"\ndfexp: {words}\n".encode())


def _tell_the_terminal(
    fd: int, shell: Any, kind: type, error: Exception, trace: Any, tb_offset: int | None = None
) -> None:
    """Say of a stop, where papermill was started, what it does not: it says that it was aborted. Then as any error."""
    with suppress(OSError):
        os.write(fd, f"\ndfexp: {error}\n".encode())
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def _assigned_names(cells: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names that the last parameters cell assigned, and those of the cell that papermill put after it."""
    written, injected = list[str](), list[str]()
    for source in cells:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:  # a cell with magics
            continue
        names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        if source.startswith("# Parameters\n"):
            injected = names
        elif len(set(names) & set(NAMES)) >= 3:
            written, injected = names, []
    return written, injected


def _unknown(name: str, value: Any) -> str:
    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
    fix = f"Did you mean {close[0]}?" if close else f"Known parameters: {', '.join(NAMES)}."
    return f"{name} = {shown(value, name)}: unknown parameter. {fix}"


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
    name: str, spec: params.RunSpec, folder: RunFolder, root: Path, *, tick: Callable[[], object] = lambda: None
) -> Path:
    """Run a notebook unattended with `spec` as its parameters, in `root`; returns its HTML, beside the executed copy.

    Both are written to the run's notebooks/ also when a cell fails or the kernel dies. No signal handler of this
    process is touched; `tick` is called about once a second in the calling thread, and when it raises, the kernel is
    killed. Raises NotebookError, and RunStopped where a cell raised it.
    """
    from papermill.iorw import load_notebook_node  # takes seconds, and a kernel that asks for its spec does not need it
    from papermill.parameterize import parameterize_notebook

    source = load_notebook_node(str(find(name, root)))
    notebook = parameterize_notebook(source, spec.model_dump(mode="json"))
    page = folder.notebooks / f"{name}.html"
    folder.notebooks.mkdir(parents=True, exist_ok=True)
    with page.with_suffix(".log").open("wb") as log:
        servers = FleetFolder.named(root, spec.outputs, spec.fleet_name)
        execution = _Execution(notebook, root, log, save=lambda: _write(lambda: _save(notebook, page, servers), page))
        try:
            execution.wait(tick)
        finally:
            execution.kill()
            refusal = _write(lambda: page.write_text(_html(_save(notebook, page, servers)), encoding="utf-8"), page)
    if execution.error == "RunStopped":
        raise RunStopped(execution.message)
    if execution.error:
        status = getattr(getattr(errors, execution.error, None), "exit_status", 1)
        kind = NotebookInputError if status == NotebookInputError.exit_status else NotebookError
        raise kind(f"{name}.ipynb, {execution.message} {refusal or f'More is in {page}'}")
    if refusal is not None:
        raise refusal
    return page


def _write(write: Callable[[], object], page: Path) -> errors.StorageError | None:
    """What a disk that refuses a page says: it ends no cell, and hides nothing that a cell said."""
    try:
        with disk(f"write {page}"):
            write()
    except errors.StorageError as error:
        return error
    return None


class _Execution:
    """A notebook that runs in a kernel, attended by a thread of its own; `error` and `message` say what ended it.

    The thread keeps nbclient away from the signal handlers of this process. A kernel ends by itself within seconds
    when its parent, this process, is gone.
    """

    def __init__(self, notebook: Any, root: Path, log: BinaryIO, save: Callable[[], object]) -> None:
        import nbformat
        from nbclient import NotebookClient  # takes seconds, and a kernel that asks for its spec does not need it

        self.error, self.message, self._number, self._is_killed = "", "", 0, False
        self._cell = nbformat.v4.new_code_cell("the start")  # until the first one begins
        self._client = NotebookClient(
            notebook,
            resources={"metadata": {"path": str(root)}},
            on_cell_execute=self._begins,
            on_cell_executed=lambda **_: save(),  # whoever is killed later leaves the cells that ran
            startup_timeout=120,
            iopub_timeout=600,  # a flood of output may lag minutes behind the cell that wrote it
            coalesce_streams=True,
        )
        self._thread = threading.Thread(target=self._run, args=(log,), daemon=True)

    def wait(self, tick: Callable[[], object]) -> None:
        """Run it to its end."""
        self._thread.start()
        while self._thread.is_alive():
            self._thread.join(1.0)
            tick()

    def kill(self) -> None:
        """End it if it still runs; a kernel that is only starting is killed once it is there."""
        self._is_killed = True
        for _ in range(60):  # half a minute, then it is left to its daemon thread
            process = getattr(getattr(self._client.km, "provisioner", None), "process", None)
            if self._thread.is_alive() and process is not None:
                process.kill()
            self._thread.join(0.5)

    def _begins(self, cell: Any, cell_index: int) -> None:
        self._cell, self._number = cell, self._number + 1

    def _run(self, log: BinaryIO, *, is_again: bool = False) -> None:
        """Run it. Where the kernel dies before the first cell, nothing has happened yet, and it is started again."""
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        try:
            self._client.execute(stdout=log, stderr=log)
        except CellExecutionError as error:
            own = isinstance(getattr(errors, error.ename, None), type)  # says what happened and what to do
            self._fails(error.ename, error.evalue if own else f"{error.ename}: {error.evalue}.")
        except Exception as error:  # whatever breaks in nbclient, the caller hears of it and the page shows it
            has_begun = self._number > 0
            if isinstance(error, RuntimeError) and not (has_begun or is_again or self._is_killed):
                self._run(log, is_again=True)
                return
            words = f"{type(error).__name__}: {str(error).rstrip('.')}."
            if isinstance(error, DeadKernelError):
                words = "the kernel died: it was killed, or out of memory. Rows reported done are on disk; run the"
                words += " notebook again to go on."
            twice = " It was started twice, and no cell ran: run the notebook again to go on."
            self._fails(type(error).__name__, words + twice * (is_again and not has_begun))
        finally:  # nbclient leaves it behind where no kernel started, to fail when this process ends
            atexit.unregister(self._client._cleanup_kernel)

    def _fails(self, name: str, message: str) -> None:
        """Keep why it ended, and show it in the cell that ran if that does not say so itself."""
        self.error, self.message = name, message
        if all(output.output_type != "error" for output in self._cell.outputs):
            import nbformat

            told = nbformat.v4.new_output("error", ename=name, evalue=message, traceback=[f"{name}: {message}"])
            self._cell.outputs.append(told)
        if name != "RunStopped":
            lines = [line for line in self._cell.source.splitlines() if line.strip()]
            where = f"cell [{self._number}] `{lines[-1].strip()[:80]}`" if self._number else "before its first cell"
            self.message = f"{where}: {message}"


def _save(notebook: Any, page: Path, folder: FleetFolder) -> str:
    """Write the executed copy, and return it: without the fleet's key, wherever a traceback or a reply has put it."""
    import nbformat

    text: str = nbformat.writes(notebook)
    with suppress(errors.FleetError):  # no fleet, or none whose key can be known here
        key = fleet.attach(folder).key
        text = text.replace(key, "(hidden)") if len(key) >= 8 else text
    with disk(f"write {(copy := page.with_suffix('.ipynb'))}"):
        copy.write_text(text, encoding="utf-8")
    return text


def _html(text: str) -> str:
    """An executed notebook as one page that opens without a network: code hidden, nothing loaded from anywhere."""
    import nbformat
    from nbconvert import HTMLExporter

    urls = ("mathjax", "require_js", "jquery", "widget_renderer", "mermaid_js", "mermaid_layout_elk_js")
    hidden = dict.fromkeys(("exclude_input", "exclude_input_prompt", "exclude_output_prompt"), True)
    page, _ = HTMLExporter(**hidden, **{f"{name}_url": "" for name in urls}).from_notebook_node(
        nbformat.reads(text, as_version=4)
    )
    page = re.sub(r'<script src="">\s*</script>', "", page)  # what an empty URL leaves of nbconvert's tags
    return str(page.replace("</head>", _STYLE + "</head>", 1))
