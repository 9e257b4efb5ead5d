"""The display of a run in a real kernel: however long it is updated, the notebook keeps one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

ROOT = Path(__file__).parents[2]
# The status of a run at its worst: 64 servers, five findings, all points of the rate over time; no two are the same.
CELL = """
from IPython.display import DisplayHandle
from dfexp import livepage
from tests.finished_run import status
from tests.test_livepage import FINDING, GAUGES
server = {**status()["servers"][0], **GAUGES}
handle = DisplayHandle()
handle.display(livepage.bundle(None), raw=True)
for number in range(UPDATES):
    rates = [float(number + place) for place in range(119)]
    handle.update(livepage.bundle(status(
        done=number, asked=1_000_000, servers=[{**server, "done": number}] * 64, findings=[FINDING] * 5,
        history={"step_s": 1.0, "tok_per_s": rates},
    )), raw=True)
"""


def executed(folder: Path, updates: int) -> tuple[Any, int]:
    """The notebook after so many updates, as papermill leaves it, and its bytes; saved now and then, as by default."""
    source, made = folder / "source.ipynb", folder / f"{updates}.ipynb"
    cell, kernel = nbformat.v4.new_code_cell(CELL.replace("UPDATES", str(updates))), {"name": "python3"}
    metadata = {"kernelspec": {**kernel, "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=metadata), source)
    papermill.execute_notebook(
        str(source), str(made), cwd=str(ROOT), progress_bar=False, autosave_cell_every=1, iopub_timeout=600
    )
    return nbformat.read(made, as_version=4), made.stat().st_size


@pytest.mark.slow
def test_sixty_hours_of_updates_leave_a_notebook_as_small_as_a_minute_does(tmp_path: Path) -> None:
    """An update a second makes 216,000 of them. One that left a byte behind would show in 3,000 of them."""
    (_, least), (hours, size) = executed(tmp_path, 60), executed(tmp_path, 3_000)
    (output,) = hours.cells[0].outputs
    assert "2,999 of 1,000,000 done" in output.data["text/plain"]
    assert size - least < 1000
    assert size < 200_000
