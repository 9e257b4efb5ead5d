"""The process in which papermill runs one notebook for `dfexp.notebook.execute`.

Reads its job as one JSON line on stdin, writes its result as one JSON line on stdout. Stdin stays open as a leash.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import papermill
import psutil
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter
from papermill.exceptions import PapermillExecutionError

from dfexp import errors, fleet
from dfexp.layout import FleetFolder

_LEASH_GRACE_S = 20.0

_STYLE = """
<style>
body.jp-Notebook { max-width: 1040px; margin: 0 auto; padding: 16px 20px 60px; }
.jp-Cell { padding: 2px 0; }
.jp-OutputPrompt, .jp-InputPrompt { display: none; }
.jp-OutputArea-output { overflow-x: auto; }
.jp-MarkdownOutput, .jp-RenderedMarkdown, .jp-RenderedHTML { padding-left: 0 !important; }
.jp-RenderedHTMLCommon table { margin-left: 0; }
span[style*="font-size:2em"] { font-size: 1.1em !important; }
</style>
"""


def main() -> None:
    """Run the job, export the HTML, report."""
    with os.fdopen(os.dup(1), "w") as result:
        os.dup2(2, 1)  # what libraries print belongs into the log
        job = json.loads(sys.stdin.readline())
        threading.Thread(target=_follow_the_caller, daemon=True).start()
        outcome = _execute(job)
        _hide_key(Path(job["notebook"]), FleetFolder(Path(job["fleet"])))
        export_html(Path(job["notebook"]), Path(job["html"]))
        result.write(json.dumps(outcome) + "\n")


def _follow_the_caller() -> None:
    """When the caller is gone or lets go, kill the kernel; the notebook is then saved as for any kernel that died.

    The kernel is the only child of this process. What it started in sessions of their own, such as a run, notices
    by itself that it is gone.
    """
    sys.stdin.read()
    for kernel in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            kernel.kill()
    time.sleep(_LEASH_GRACE_S)
    os._exit(1)  # the kernel ends by itself when its parent is gone


def _execute(job: dict[str, Any]) -> dict[str, Any]:
    """Run the notebook; papermill saves it after every cell and when one fails."""
    try:
        papermill.execute_notebook(
            job["source"],
            job["notebook"],
            parameters=job["parameters"],
            cwd=job["cwd"],
            progress_bar=False,
            start_timeout=120,
            autosave_cell_every=30,
            # A flood of output may lag minutes behind the cell that wrote it; papermill's default fails after 4 s.
            iopub_timeout=600,
            coalesce_streams=True,
        )
    except PapermillExecutionError as error:
        return {"error": error.ename, "cell": _cell_name(error.exec_count, error.source), "message": _cause(error)}
    except DeadKernelError:
        return _ended_early(
            Path(job["notebook"]),
            "DeadKernelError",
            "the kernel died: it was killed from outside, or there was no memory left. Rows reported done are on disk;"
            " run the notebook again to go on.",
        )
    except Exception as error:  # whatever breaks in papermill, the caller hears of it and the page shows it
        return _ended_early(Path(job["notebook"]), type(error).__name__, f"{type(error).__name__}: {error}")
    return {"error": None, "cell": None, "message": None}


def _cause(error: PapermillExecutionError) -> str:
    """One or two sentences; an error of ours already says what happened and what to do."""
    if isinstance(getattr(errors, error.ename, None), type):
        return str(error.evalue)
    return f"{error.ename}: {error.evalue}."


def _cell_name(number: int | None, source: str) -> str:
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith("#")]
    return f"cell [{number}] `{lines[-1].strip()[:80]}`" if lines else f"cell [{number}]"


def _ended_early(path: Path, name: str, message: str) -> dict[str, Any]:
    """Write into the running cell why it ended; papermill alone would mark it as completed."""
    result = {"error": name, "cell": "before its first cell", "message": message}
    if not path.exists():
        return result
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    started = [cell for cell in code if cell["metadata"].get("papermill", {}).get("start_time")]
    if not started:
        return result
    cell = started[-1]
    source = "".join(cell["source"])
    cell["metadata"]["papermill"].update(exception=True, status="failed")
    notebook["metadata"]["papermill"]["exception"] = True
    shown = {"output_type": "error", "ename": name, "evalue": message}
    cell["outputs"].append({**shown, "traceback": [f"{name}: {message}"]})
    path.write_text(json.dumps(notebook, indent=1), encoding="utf-8")
    return {**result, "cell": _cell_name(len(started), source)}


def _hide_key(path: Path, folder: FleetFolder) -> None:
    """Take the fleet's key out of the executed copy, wherever a traceback or a reply may have put it."""
    try:
        key = fleet.attach(folder).key
    except errors.FleetError:
        return  # no fleet, or none whose key can be known here
    if path.exists() and len(key) >= 8:
        path.write_text(path.read_text(encoding="utf-8").replace(key, "(hidden)"), encoding="utf-8")


def export_html(notebook: Path, html: Path) -> None:
    """One page that opens without a network: code hidden, nothing loaded from anywhere."""
    if not notebook.exists():
        return
    make: Callable[..., Any] = HTMLExporter
    exporter = make(
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        mathjax_url="",
        require_js_url="",
        jquery_url="",
        widget_renderer_url="",
        mermaid_js_url="",
        mermaid_layout_elk_js_url="",
    )
    page, _ = exporter.from_filename(str(notebook))
    page = re.sub(r'<script src="">\s*</script>', "", page)  # what an empty URL leaves of nbconvert's tags
    html.write_text(page.replace("</head>", _STYLE + "</head>", 1), encoding="utf-8")


if __name__ == "__main__":
    main()
