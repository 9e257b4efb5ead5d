"""`dfexp report` on a run that is still going, and again after its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dfexp import control, generate
from dfexp.cli.common import EXIT_STOPPED
from dfexp.layout import RunFolder

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = 2000


def summary(folder: RunFolder) -> dict[str, Any]:
    lines = json.loads((folder.report / "summary.json").read_text())
    return {line["what"]: line for line in lines}


def report(project: Path) -> str:
    command = [sys.executable, "-m", "dfexp.cli", "report", "going"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).read_text()


@pytest.mark.slow
def test_a_report_while_the_run_goes_and_after_its_end(tmp_path: Path) -> None:
    """Simulated servers, whose run would take some minutes: a report reads it in the middle, and then it is stopped."""
    tree = yaml.safe_load((ROOT / "params" / "simulated.yaml").read_text())
    tree |= {"run": "going", "prompts": {"path": "p.jsonl"}, "limits": {"rows": ROWS - 40}}
    tree["fleet"] |= {"speed": 10, "load_s": 1}
    tree["generation"] |= {"concurrency": 16, "rows_per_shard": 20, "sample_interval_s": 0.2}
    tree["plan"]["completion"] = {"median": 300, "p95": 600}
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "going.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(ROWS)))
    folder, log = RunFolder(tmp_path / "outputs" / "going"), tmp_path / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "dfexp.cli", "run", "params/going.yaml"]
        run = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out)
    try:
        assert control.wait_until(lambda: (control.read_status(folder) or {"done": 0})["done"] >= 20, 90), (
            log.read_text()
        )
        page = report(tmp_path)
        assert run.poll() is None, "it still goes"
        found = summary(folder)
        assert 20 <= found["done"]["value"] < ROWS
        assert found["done"]["value"] + found["missing"]["value"] == ROWS
        assert found["time left"]["value"] > 0
        assert "This start ends before" in found["time left"]["how it is measured"], "40 rows are beyond its limit"
        assert "run unfinished" in page
        assert "Traceback" not in page
        generate.stop(folder, reason="seen enough")
        assert run.wait(120) == EXIT_STOPPED, log.read_text()
    finally:
        run.kill()
        run.wait()
    page, found = report(tmp_path), summary(folder)
    done, missing = found["done"]["value"], found["missing"]["value"]
    assert done == (control.read_status(folder) or {})["done"]
    assert done + missing == ROWS
    assert "missing rows, of the mean length" in found["time left"]["how it is measured"]
    assert "This start" not in found["time left"]["how it is measured"]
    assert page.count('class="plotly-graph-div"') >= 7, "it was sampled, and something happened"
    assert "Traceback" not in page
