"""The display of a run in a real kernel: however long it is updated, the notebook keeps one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

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


def executed(updates: int) -> Any:
    """The notebook after so many updates."""
    source = CELL.replace("UPDATES", str(updates))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook


@pytest.mark.slow
def test_sixty_hours_of_updates_leave_a_notebook_as_small_as_a_minute_does() -> None:
    """An update a second makes 216,000 of them; the size does not depend on how many there were."""
    minute, hours = executed(60), executed(20_000)
    (output,) = hours.cells[0].outputs
    assert "19,999 of 1,000,000 done" in output.data["text/plain"]
    sizes = [len(nbformat.writes(notebook)) for notebook in (minute, hours)]
    assert sizes[1] - sizes[0] < 1000
    assert sizes[1] < 200_000
