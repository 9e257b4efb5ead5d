"""Notebooks run unattended with real kernels: results, failures, deaths and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dfexp import fleet, notebook
from dfexp.control import wait_until
from dfexp.errors import NotebookError, NotebookInputError, RunStopped, StorageError
from dfexp.layout import RunFolder
from tests.finished_run import failure, row, write_run
from tests.notebooks.support import (
    NOTEBOOKS,
    demo_spec,
    loaded_from_elsewhere,
    make_project,
    parameters_cell,
    printed,
    write_notebook,
)

SPEC = "from dfexp import notebook\nspec = notebook.spec(globals())\nprint(spec.model_dump_json())"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_project(tmp_path)


@pytest.fixture
def folder(root: Path) -> RunFolder:
    return RunFolder(root / "outputs" / "demo")


def run(root: Path, folder: RunFolder, name: str, tick: Callable[[], object] = lambda: None) -> Path:
    return notebook.execute(name, demo_spec(root), folder, root, tick=tick)


def test_the_whole_run_reaches_the_notebook_in_the_project_root(root: Path, folder: RunFolder) -> None:
    write_notebook(root, "n", SPEC, "import os\nprint(os.getcwd())")
    made = run(root, folder, "n")
    spec, cwd = printed(made.with_suffix(".ipynb")).splitlines()
    assert json.loads(spec) == demo_spec(root).model_dump(mode="json")
    assert cwd == str(root)
    assert json.loads((root / "notebooks" / "n.ipynb").read_text())["cells"][1]["outputs"] == []
    assert loaded_from_elsewhere(made.read_text()) == []


def test_an_error_of_ours_is_told_in_its_own_words_and_kept_without_the_key(
    root: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-0123456789abcdef")
    path = root / "params" / "demo.yaml"
    external = "{engine: external, urls: ['http://127.0.0.1:9'], api_key_env: SOME_KEY}"
    path.write_text(path.read_text().replace("{engine: llamacpp, servers: 2}", external))
    fleet.up(demo_spec(root), root)
    failing = "from dfexp.errors import FleetError\nraise FleetError('no sk-0123456789abcdef here.')"
    write_notebook(root, "n", "print('before')", failing, "print('after')")
    with pytest.raises(NotebookError, match=r"n.ipynb, cell \[4\] `raise FleetError.*: no .* here\. .*n.html") as told:
        run(root, folder, "n")
    assert "Traceback" not in str(told.value)
    assert printed(folder.notebooks / "n.ipynb") == "before\n"
    page = (folder.notebooks / "n.html").read_text()
    assert "FleetError: no (hidden) here." in page
    assert "sk-0123456789abcdef" not in page + (folder.notebooks / "n.ipynb").read_text()


@pytest.mark.slow
def test_other_failures_name_cell_and_cause(root: Path, folder: RunFolder) -> None:
    write_notebook(root, "n", "1 / 0")
    with pytest.raises(NotebookError, match=r"n.ipynb, cell \[3\] `1 / 0`: ZeroDivisionError: division by zero"):
        run(root, folder, "n")
    write_notebook(root, "n", "from dfexp.errors import RunStopped\nraise RunStopped('7 of 9 done')")
    with pytest.raises(RunStopped, match=r"^7 of 9 done$"):
        run(root, folder, "n")
    write_notebook(root, "n", "from dfexp.errors import FingerprintError\nraise FingerprintError('of other prompts.')")
    with pytest.raises(NotebookInputError, match=r"n.ipynb, cell \[3\] .*: of other prompts\."):
        run(root, folder, "n")


@pytest.mark.slow
def test_a_full_disk_ends_no_cell_and_hides_nothing_that_one_said(root: Path, folder: RunFolder) -> None:
    """The copy is saved after each cell; it goes on all the same, and the refusal is told at the end."""
    folder.notebooks.mkdir(parents=True)
    (folder.notebooks / "n.ipynb").symlink_to("/dev/full")
    write_notebook(root, "n", "1", "open('went_on', 'w').close()")
    with pytest.raises(StorageError, match=r"cannot write .*n\.ipynb: No space left on device\. Free space"):
        run(root, folder, "n")
    assert (root / "went_on").exists()
    write_notebook(root, "n", "from dfexp.errors import RunStopped\nraise RunStopped('7 of 9 done')")
    with pytest.raises(RunStopped, match=r"^7 of 9 done$"):
        run(root, folder, "n")
    write_notebook(root, "n", "1 / 0")
    with pytest.raises(NotebookError, match=r"division by zero.* cannot write .*No space left on device"):
        run(root, folder, "n")


def test_a_notebook_that_is_not_there(root: Path, folder: RunFolder) -> None:
    with pytest.raises(NotebookError, match="there is no notebook '05_more'"):
        run(root, folder, "05_more")


def test_the_shipped_notebooks_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert notebook.find("04_report", tmp_path) == NOTEBOOKS / "04_report.ipynb"
    own = tmp_path / "notebooks" / "04_report.ipynb"
    own.parent.mkdir()
    own.touch()
    assert notebook.find("04_report", tmp_path) == own


@pytest.mark.slow
def test_a_killed_kernel_is_reported_within_seconds(root: Path, folder: RunFolder) -> None:
    write_notebook(
        root, "n", "print('kept', flush=True)", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "1"
    )
    began = time.monotonic()
    with pytest.raises(NotebookError, match=r"n.ipynb, cell \[4\] `os.kill\(.*the kernel died"):
        run(root, folder, "n")
    assert time.monotonic() - began < 30
    assert printed(folder.notebooks / "n.ipynb") == "kept\n"
    assert "DeadKernelError" in (folder.notebooks / "n.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_kernel_that_dies_at_its_start_is_started_once_more(root: Path, folder: RunFolder, deaths: int) -> None:
    write_notebook(root, "n", "print('ran')")
    script = (
        "import sys; from pathlib import Path; from dfexp import errors, notebook, params\n"
        "from dfexp.layout import RunFolder; root = Path(sys.argv[1])\n"
        "try: notebook.execute('n', params.load(root / 'params/demo.yaml'), RunFolder(root / 'outputs/demo'), root)\n"
        "except errors.NotebookError as error: sys.exit(f'told: {error}')\n"
    )
    killed = set[int]()
    with subprocess.Popen([sys.executable, "-c", script, str(root)], stderr=subprocess.PIPE, text=True) as caller:

        def kill_new() -> bool:
            for child in psutil.Process(caller.pid).children(recursive=True):
                if len(killed) < deaths and child.pid not in killed and "ipykernel" in " ".join(child.cmdline()):
                    child.kill()
                    killed.add(child.pid)
            return len(killed) == deaths

        assert wait_until(kill_new, 100, step_s=0.01)
        assert caller.stderr is not None
        said = caller.stderr.read()
    assert "Traceback" not in said
    if deaths == 1:
        assert (caller.returncode, printed(folder.notebooks / "n.ipynb")) == (0, "ran\n")
    else:
        assert caller.returncode == 1
        assert "told: n.ipynb, before its first cell: " in said
        assert "started twice, and no cell ran: run the notebook again to go on." in said


@pytest.mark.slow
def test_a_flood_of_output_is_kept_and_does_not_fail(root: Path, folder: RunFolder) -> None:
    write_notebook(root, "n", "print('\\n'.join('x' * 99 for _ in range(200_000)))\nfor i in range(20_000): print(i)")
    lines = printed(run(root, folder, "n").with_suffix(".ipynb")).splitlines()
    assert len(lines) == 220_000
    assert lines[-1] == "19999"


@pytest.mark.slow
def test_the_callers_signal_handlers_stay_in_charge(root: Path, folder: RunFolder) -> None:
    write_notebook(
        root, "n", "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\nprint('done')"
    )
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        if seen:
            (root / "go").touch()

    try:
        made = run(root, folder, "n", tick)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
    assert printed(made.with_suffix(".ipynb")) == "done\n"


@pytest.mark.slow
def test_a_tick_that_raises_ends_the_notebook_and_its_kernel(root: Path, folder: RunFolder) -> None:
    write_notebook(
        root, "n", "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
    )

    def tick() -> None:
        if (root / "pid").exists() and (root / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(root, folder, "n", tick)
    assert not psutil.pid_exists(int((root / "pid").read_text()))


@pytest.mark.slow
def test_no_kernel_outlives_a_killed_caller(root: Path, folder: RunFolder) -> None:
    says_pids = "import os, pathlib, time\npathlib.Path('pids').write_text(f'{os.getpid()} {os.getppid()} .')"
    write_notebook(root, "n", "print('ran before')", says_pids + "\ntime.sleep(600)")
    script = (
        "import sys; from pathlib import Path; from dfexp import notebook, params; from dfexp.layout import RunFolder\n"
        "root = Path(sys.argv[1])\n"
        "notebook.execute('n', params.load(root / 'params/demo.yaml'), RunFolder(root / 'outputs/demo'), root)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script, str(root)])
    pids = root / "pids"
    assert wait_until(lambda: pids.exists() and pids.read_text().endswith("."), 60)
    kernel, parent = (int(pid) for pid in pids.read_text().split()[:2])
    assert parent == caller.pid
    process = psutil.Process(kernel)
    caller.kill()
    caller.wait()
    assert wait_until(lambda: not _lives(process), 10)
    assert "ran before" in (folder.notebooks / "n.ipynb").read_text(), "the cells that ran are kept"


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "run_name", "max_tokens"),
    [
        ([], "demo", 64),
        (["-f", "params/other.yaml"], "other", 32),
        (["-p", "params", "params/other.yaml"], "other", 32),
        (["-p", "run", "mine", "-y", "generation: {max_tokens: 5}"], "mine", 5),
    ],
)
def test_plain_papermill_takes_the_same_parameters(
    root: Path, arguments: list[str], run_name: str, max_tokens: int
) -> None:
    write_notebook(root, "n", SPEC)
    done = papermill(root, *arguments)
    assert done.returncode == 0, done.stderr
    spec = json.loads(printed(root / "out.ipynb"))
    assert (spec["run"], spec["generation"]["max_tokens"]) == (run_name, max_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "generaton", "5"], "generaton = 5: unknown parameter. Did you mean generation?"),
        (["-f", "params/typo.yaml"], "generaton = {max_tokens: 5}: unknown parameter. Did you mean generation?"),
        (["-f", "params/type.yaml"], "generation.max_tokens"),
    ],
)
def test_plain_papermill_is_as_strict(root: Path, arguments: list[str], message: str) -> None:
    write_notebook(root, "n", SPEC + "\nopen('started', 'w')")
    whole = "run: x\nfleet: {engine: llamacpp}\nprompts: {path: p.jsonl}\n"
    (root / "params" / "typo.yaml").write_text(whole + "generaton: {max_tokens: 5}\n")
    (root / "params" / "type.yaml").write_text(whole + "generation: {max_tokens: many}\n")
    done = papermill(root, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (root / "started").exists()


def papermill(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "papermill", "notebooks/n.ipynb", "out.ipynb", "--no-progress-bar", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_report_opens_offline_with_each_figure_once(root: Path) -> None:
    rows = [row(i, finish_reason="length" if i % 3 else "stop", completion_tokens=1 + i) for i in range(60)]
    folder = write_run(root, rows, [failure(60)])
    (root / "notebooks" / "04_report.ipynb").write_text((NOTEBOOKS / "04_report.ipynb").read_text())
    made = notebook.execute("04_report", demo_spec(root), folder, root)
    page = made.read_text()
    assert loaded_from_elsewhere(page) == []
    assert page.count('class="plotly-graph-div"') == 5  # nothing was sampled, and nothing happened
    assert page.count("* plotly.js v") == 1
    assert parameters_cell() not in page
    assert "spec = " not in page  # code is hidden
    assert (folder.report / "summary.csv").exists()
