"""The command as a user types it: wrong files cost nothing, and a whole run survives what may happen to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dfexp import cli, control, fleet, generate, params
from dfexp.cli.attendant import NOTEBOOKS
from dfexp.generate import identity
from dfexp.layout import RunFolder
from dfexp.processes import ProcessId
from dfexp.shards import Shards, list_shards, read_failures, read_rows
from tests.finished_run import failure, row, status

WRONG = sorted((Path(__file__).parent / "data" / "params").glob("*.yaml"))
ROWS = 40
EXTERNAL = ["--set", "fleet.engine=external", "--set", "fleet.urls=[http://127.0.0.1:1]"]
EXTERNAL += ["--set", "fleet.api_key_env=DFEXP_NO_SUCH_KEY"]
DFEXP = [sys.executable, "-m", "dfexp.cli"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project folder with a small run on the embedded engine."""
    (tmp_path / "params").mkdir()
    prompts = [
        {"prompt": f"Name {n} things that are {word}."} for n in range(2, 2 + ROWS // 2) for word in ("red", "new")
    ]
    prompts += [{"prompt": ""}, {"prompt": "long " * 3000}]
    (tmp_path / "params" / "p.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (tmp_path / "params" / "small.yaml").write_text(
        "run: small\n"
        "fleet: {engine: llamacpp, servers: 2, max_running_requests: 2, context_length: 512}\n"
        "prompts: {path: params/p.jsonl}\n"
        "generation: {max_tokens: 24, rows_per_shard: 8, drain_s: 20, progress_interval_s: 1, seed: 3}\n"
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    if (tmp_path / "outputs" / "fleets").exists():
        subprocess.run([*DFEXP, "fleet", "down", "small", "--force"], capture_output=True, check=False)
    assert not processes_of(tmp_path), "a test left processes behind"


def processes_of(project: Path) -> list[psutil.Process]:
    """Living processes that name the project's folder in their command line or work in it."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
            if not mine and (str(project) in " ".join(process.cmdline()) or process.cwd() == str(project)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DFEXP, *argv], capture_output=True, text=True, check=False, timeout=300)


def counts(folder: RunFolder) -> Counter[int]:
    return Counter(row["index"] for row in read_rows(folder.completions))


def wait_for(condition: Any, timeout_s: float = 120.0) -> None:
    assert control.wait_until(condition, timeout_s)


def done(folder: RunFolder) -> int:
    return int((control.read_status(folder) or {}).get("done", 0))


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_a_wrong_file_is_a_clear_error_and_nothing_is_started(
    path: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = project / "params" / path.name
    shutil.copy(path, copy)
    assert cli.main(["run", str(copy)]) == cli.EXIT_WRONG
    said = capsys.readouterr().err
    assert said.startswith("dfexp: ")
    assert path.name in said
    assert "Traceback" not in said
    assert not (project / "outputs").exists()
    assert not processes_of(project)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "params/none.yaml"], "params/none.yaml"),
        (["run", "params/small.yaml", "--set", "generation.max_tokns=4"], "Did you mean generation.max_tokens?"),
        (["run", "params/small.yaml", "--set", "nonsense"], "group.key=value"),
        (["run", "params/small.yaml", "--set", "prompts.path=none.jsonl"], "none.jsonl"),
        (["run", "params/small.yaml", "--set", "prompts.on_bad=fail"], "params/p.jsonl"),
        (["check", "params/small.yaml", "--set", "fleet.servers=0"], "fleet.servers"),
        (["check", "params/small.yaml", *EXTERNAL], "DFEXP_NO_SUCH_KEY"),
        (["run", "params/small.yaml", *EXTERNAL], "DFEXP_NO_SUCH_KEY"),
        (["pilot", "params/small.yaml", "--rows", "0"], "--rows 0"),
        (["resume", "nobody"], "'nobody'"),
        (["stop", "nobody"], "'nobody'"),
        (["fleet", "down", "nobody"], "nobody"),
    ],
)
def test_wrong_input_names_the_value(
    argv: list[str], words: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == (cli.EXIT_WRONG if argv[0] != "fleet" else cli.EXIT_FAILED)
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not list(project.glob("outputs/*/run.json"))


def test_check_says_what_would_be_run_and_starts_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "params/small.yaml"]) == cli.EXIT_OK
    said = capsys.readouterr().out
    assert f"{ROWS + 1} prompts" in said
    assert "1 empty" in said
    assert not (project / "outputs").exists()


@pytest.mark.usefixtures("project")
def test_what_looks_wrong_ahead_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    doubtful = ["--set", "report.compare=nosuch", "--set", "generation.max_tokens=512"]
    assert cli.main(["check", "params/small.yaml", *doubtful]) == cli.EXIT_OK
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "warning: report.compare: nosuch is not there (yet)",
        "warning: generation.max_tokens = 512: a context of 512 has no room for that and a prompt",
    ]
    cli.main(["preflight", "params/small.yaml", "--set", "prompts.path=none.jsonl"])
    assert capsys.readouterr().err == "warning: prompts.path: none.jsonl is not there (yet)\n"


def test_a_run_of_other_prompts_or_sampling_is_wrong_input(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = generate.prepare(params.load(project / "params" / "small.yaml"), project)
    recorded = json.loads(folder.run_json.read_text())
    sampling = identity.sampling_text(params.load(project / "params" / "small.yaml").generation)
    folder.run_json.write_text(json.dumps({**recorded, "fingerprint": {"sampling": sampling}}))
    for other, words in (("prompts.limit=7", "begun with other prompts"), ("generation.seed=9", "another sampling")):
        assert cli.main(["run", "params/small.yaml", "--set", other]) == cli.EXIT_WRONG
        assert words in capsys.readouterr().err


def test_status_of_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == cli.EXIT_OK
    assert cli.main(["fleet", "status"]) == cli.EXIT_OK
    assert "no runs" in capsys.readouterr().out


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("option", ["--canary-s", "--least-speed", "--drain-s"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "fast"])
def test_an_amount_is_a_finite_number(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["fleet", "reconfigure", "params/small.yaml", f"{option}={value}"])
    assert caught.value.code == cli.EXIT_WRONG
    assert f"argument {option}: " in capsys.readouterr().err


def test_one_damaged_fleet_hides_no_other(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fleet of somebody else's server, which does not answer, is listed between two that are damaged."""
    fleets = project / "outputs" / "fleets"
    group = {"engine": "external", "urls": ["http://127.0.0.1:1"]}
    fleet.up(params.validate({"run": "b", "fleet": group, "prompts": {"path": "p"}}, "test"), project)
    for name, text in (("a", "{"), ("c", "null")):
        (fleets / name).mkdir()
        (fleets / name / "fleet.json").write_text(text)
    assert cli.main(["fleet", "status"]) == cli.EXIT_FAILED
    said = capsys.readouterr()
    assert "fleet b (external)" in said.out
    assert [f"{fleets / name / 'fleet.json'} is damaged" in said.err for name in ("a", "c")] == [True, True]
    assert "Traceback" not in said.err
    shutil.rmtree(fleets / "a")
    shutil.rmtree(fleets / "c")
    assert cli.main(["fleet", "status"]) == cli.EXIT_OK
    shutil.rmtree(fleets)


@pytest.mark.slow
def test_a_second_command_is_refused_while_the_first_one_still_brings_its_servers_up(project: Path) -> None:
    """It would take them for its own, and stop them and the run when it is interrupted."""
    folder = RunFolder(project / "outputs" / "small")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        urls = f"fleet.urls=[http://127.0.0.1:{server.getsockname()[1]}]"
        external = ["run", "params/small.yaml", "--set", "fleet={engine: external, model: m}", "--set", urls]
        with subprocess.Popen([*DFEXP, *external], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
            try:
                server.accept()  # and never answers
                second = run(*external)
                assert control.living_process(folder) is None
                assert second.returncode == cli.EXIT_FAILED
                assert f"notebooks is being written by process {first.pid} on " in second.stderr
                assert "Stop it, or wait until it ends" in second.stderr
                server.close()
                first.send_signal(signal.SIGINT)
                assert first.wait(120) != 0
            finally:
                first.kill()


def test_ctrl_c_while_a_fleet_comes_up_ends_with_one_line(project: Path) -> None:
    """The server takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        (project / "params" / "silent.yaml").write_text(
            f"{{run: small, fleet: {{engine: external, model: m, urls: ['{url}']}}, prompts: {{path: p}}}}"
        )
        command = [*DFEXP, "fleet", "up", "params/silent.yaml"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            server.accept()
            process.send_signal(signal.SIGINT)
            server.close()
            _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "dfexp: interrupted\n")
    assert not (project / "outputs" / "fleets" / "small" / "fleet.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_ctrl_c_in_a_change_of_an_idle_fleet_ends_with_one_line() -> None:
    assert run("fleet", "up", "params/small.yaml").returncode == 0
    command = [*DFEXP, "fleet", "reconfigure", "params/small.yaml", "--set", "fleet.context_length=1024"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert next((line for line in process.stdout if line.startswith("1 of 2: ")), "")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "dfexp: interrupted\n")


@pytest.mark.slow
def test_one_command_makes_rows_notebooks_and_a_report_and_leaves_no_process(project: Path) -> None:
    folder = RunFolder(project / "outputs" / "small")
    first = run("run", "params/small.yaml")
    assert first.returncode == 0, first.stderr
    assert f"{ROWS} succeeded + 1 failed = {ROWS + 1} of {ROWS + 1} asked" in first.stdout
    assert counts(folder) == Counter(range(ROWS))
    (failure,) = read_failures(folder.completions)
    assert failure["kind"] == "prompt_too_long"
    assert {row["server"] for row in read_rows(folder.completions)} == {
        server["name"] for server in (control.read_status(folder) or {})["servers"]
    }
    for name in NOTEBOOKS:
        assert (folder.notebooks / f"{name}.ipynb").exists()
        assert (folder.notebooks / f"{name}.html").exists()
    assert list(folder.report.glob("*.csv"))
    assert not processes_of(project)
    again = run("resume", "small", "--retry-failed")
    assert again.returncode == 0, again.stderr
    assert folder.events.read_text().count('"run_started"') == 2
    assert counts(folder) == Counter(range(ROWS))


def finished(project: Path, *, rows: int = ROWS, failed: Iterable[int] = (ROWS,)) -> RunFolder:
    """The small run, `rows` of it done and some failed, as a process leaves it that was killed after its last row."""
    spec = params.load(project / "params" / "small.yaml")
    folder = generate.prepare(spec, project)
    prints = {"prompts": "aa", "model": "bb", "sampling": identity.sampling_text(spec.generation)}
    recorded = {**json.loads(folder.run_json.read_text()), "fingerprint": prints, "fleet": {"engine": "llamacpp"}}
    folder.run_json.write_text(json.dumps(recorded))
    with Shards.open(folder.completions, total=ROWS + 1, fingerprint=prints, rows_per_shard=7) as shards:
        shards.commit([row(index) for index in range(rows)], [failure(index) for index in failed])
    return folder


def test_status_of_one_run_tells_its_findings_whole(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, me = finished(project), ProcessId.current()
    finding = {
        "kind": "KV pool",
        "severity": "limit",
        "evidence": "tokens wait, " * 30 + "by pages.",
        "change": "Do this.",
    }
    control.write_status(folder, status(pid=me.pid, process_started=me.started, findings=[finding]))
    assert cli.main(["status", "small"]) == cli.EXIT_OK
    said = capsys.readouterr().out
    assert f"KV pool: {finding['evidence']} Do this." in " ".join(said.split())
    assert max(map(len, said.split("  KV pool")[1].splitlines())) <= 120


def test_status_of_a_run_that_was_restored(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate.prepare(params.load(project / "params" / "small.yaml"), project)
    assert cli.main(["status"]) == cli.EXIT_OK
    assert "small: not started yet" in capsys.readouterr().out
    finished(project, rows=35)
    assert cli.main(["status"]) == cli.EXIT_OK
    assert "restored: 35 of 41 done, 1 failed  (dfexp resume small goes on)" in capsys.readouterr().out


@pytest.mark.slow
def test_where_nothing_is_left_to_do_there_is_a_report_and_no_server(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished(project)
    for command in (
        ["resume", "small"],
        ["run", "params/small.yaml"],
        ["resume", "small", "--retry-failed", "timeout"],
    ):
        assert cli.main(command) == cli.EXIT_OK
        said = capsys.readouterr().out
        assert f"nothing is left to do: {ROWS} succeeded + 1 failed = {ROWS + 1}" in said
    assert [path.stem for path in folder.notebooks.glob("*.html")] == ["04_report"]
    assert [shard.path.name for shard in list_shards(folder.completions) if not shard.sealed] == []
    assert not (project / "outputs" / "fleets").exists()
    assert cli.main(["status"]) == cli.EXIT_OK
    assert f"{ROWS} of {ROWS + 1} done, 1 failed  (nothing is left to do)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_in_which_no_row_succeeded_is_a_failure(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(project, rows=0, failed=range(ROWS + 1))
    assert cli.main(["run", "params/small.yaml"]) == cli.EXIT_FAILED
    said = capsys.readouterr().out
    assert f"0 succeeded + {ROWS + 1} failed = {ROWS + 1}" in said
    assert "NOT ONE row succeeded" in said
    assert (folder.notebooks / "04_report.html").exists()


@pytest.mark.slow
def test_a_sample_goes_first_and_its_rows_count_for_the_run_that_uses_and_stops_its_servers(project: Path) -> None:
    folder = RunFolder(project / "outputs" / "small")
    first = run("pilot", "params/small.yaml", "--rows", "10", "--seed", "4", "--keep-fleet")
    assert first.returncode == 0, first.stderr
    sample = generate.drawn(ROWS + 1, 10, 4)
    failed = {failure["index"] for failure in read_failures(folder.completions)}
    assert counts(folder) == Counter(set(sample) - failed)
    assert (folder.report / "pilot.md").read_text() in first.stdout
    assert first.stdout.count("ended by ") == 10 - len(failed)
    assert json.loads((folder.report / "pilot.json").read_text())["rows_left"] == ROWS + 1 - 10
    assert processes_of(project), "its servers were to stay"
    made = {row["index"]: row["text"] for row in read_rows(folder.completions)}
    limited = run(
        "run", "params/small.yaml", "--set", "limits.rows=6", "--set", "notify=echo told $DFEXP_EVENT >> told"
    )
    assert (limited.returncode, not processes_of(project)) == (3, True)
    assert "limits.rows = 6 is reached" in limited.stderr
    assert "dfexp resume small" in limited.stderr
    assert sum(counts(folder).values()) == 16 - len(failed)
    assert (project / "told").read_text() == "told stopped\n"
    rest = run("resume", "small", "--set", "limits.rows=null")
    assert rest.returncode == 0, rest.stderr
    assert counts(folder) == Counter(range(ROWS))
    assert made.items() <= {row["index"]: row["text"] for row in read_rows(folder.completions)}.items()


@pytest.mark.slow
def test_without_a_network_the_whole_run_works(project: Path) -> None:
    """In a network namespace of its own, with nothing but loopback."""
    command = f"ip link set lo up && exec {sys.executable} -m dfexp.cli run params/small.yaml"
    made = subprocess.run(
        ["unshare", "--net", "--map-root-user", "sh", "-c", command],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr + made.stdout
    assert counts(RunFolder(project / "outputs" / "small")) == Counter(range(ROWS))


@pytest.mark.slow
def test_interrupted_killed_and_robbed_of_a_server_it_still_ends_with_every_row_once(project: Path) -> None:
    folder = RunFolder(project / "outputs" / "small")
    with subprocess.Popen([*DFEXP, "run", "params/small.yaml"], stdout=subprocess.PIPE, text=True) as command:
        wait_for(lambda: done(folder) >= 3)
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=120)
    assert command.returncode == cli.EXIT_STOPPED, out
    assert (control.read_status(folder) or {})["state"] == "stopped"
    kept = counts(folder)
    assert sum(kept.values()) == done(folder)
    assert not list(folder.completions.glob("*.partial"))
    assert not processes_of(project)

    with subprocess.Popen([*DFEXP, "resume", "small"], stderr=subprocess.PIPE, text=True) as command:
        wait_for(lambda: done(folder) >= len(kept) + 2)
        process = control.living_process(folder)
        assert process is not None
        reported = done(folder)
        os.kill(process.pid, signal.SIGKILL)
        _, err = command.communicate(timeout=120)
    assert command.returncode == cli.EXIT_FAILED
    assert "resume" in err
    after_kill = counts(folder)
    assert len(after_kill) >= reported
    assert kept.keys() <= after_kill.keys()

    with subprocess.Popen([*DFEXP, "resume", "small"], stdout=subprocess.DEVNULL) as command:
        wait_for(lambda: control.living_process(folder) is not None)
        command.kill()
    wait_for(lambda: control.living_process(folder) is None)  # nobody watches it any more, so it stops by itself

    with subprocess.Popen([*DFEXP, "resume", "small"], stdout=subprocess.PIPE, text=True) as command:
        wait_for(lambda: control.living_process(folder) is not None)
        servers = json.loads((project / "outputs/fleets/small/fleet.json").read_text())["servers"]
        os.kill(servers[0]["pid"], signal.SIGKILL)
        out, _ = command.communicate(timeout=240)
    assert command.returncode == 0, out
    assert counts(folder) == Counter(range(ROWS))
    assert not processes_of(project), "the fleet that a killed command left behind is stopped by the next"
    assert "server_down" in folder.events.read_text()


@pytest.mark.slow
def test_stop_from_another_terminal(project: Path) -> None:
    folder = RunFolder(project / "outputs" / "small")
    with subprocess.Popen([*DFEXP, "run", "params/small.yaml"], stdout=subprocess.DEVNULL) as command:
        wait_for(lambda: done(folder) >= 2)
        second = run("resume", "small")
        assert second.returncode == cli.EXIT_FAILED
        assert "is running already" in second.stderr
        stopped = run("stop", "small")
        assert stopped.returncode == 0, stopped.stderr
        assert "stopped" in stopped.stdout
        assert command.wait(60) == cli.EXIT_STOPPED
    shown = run("status", "small")
    assert "stopped" in shown.stdout
    start = time.monotonic()
    assert run("stop", "small").returncode == 0, "stopping what has stopped is no error"
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_an_output_that_is_gone_ends_no_run_and_a_killed_kernel_leaves_no_server(project: Path) -> None:
    folder = RunFolder(project / "outputs" / "small")
    with subprocess.Popen([*DFEXP, "run", "params/small.yaml"], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        command.stdout.readline()
        command.stdout.close()  # as `dfexp run ... | head -1` does
        wait_for(lambda: done(folder) >= 3)
        children = psutil.Process(command.pid).children(recursive=True)
        (kernel,) = [child for child in children if "ipykernel" in " ".join(child.cmdline())]
        kernel.kill()
        assert command.wait(120) == cli.EXIT_FAILED
    assert control.living_process(folder) is None
    assert not processes_of(project), "the fleet is stopped once the run has let go of it"
    assert sum(counts(folder).values()) == done(folder)


@pytest.mark.slow
def test_a_kernel_that_cannot_start_ends_the_command_with_one_line_and_no_server_and_the_run_goes_on(
    project: Path,
) -> None:
    folder, killed = RunFolder(project / "outputs" / "small"), set[int]()
    argv = [*DFEXP, "run", "params/small.yaml"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert any(line.startswith("03_generate: ") for line in command.stdout)

        def kill_new() -> bool:
            for child in psutil.Process(command.pid).children(recursive=True):
                if child.pid not in killed and "ipykernel" in " ".join(child.cmdline()):
                    child.kill()
                    killed.add(child.pid)
            return len(killed) == 2

        wait_for(kill_new)
        _, said = command.communicate(timeout=120)
    assert command.returncode == cli.EXIT_FAILED
    assert said.count("\n") == 1
    assert said.startswith("dfexp: 03_generate.ipynb, before its first cell: ")
    assert "started twice" in said
    assert not processes_of(project)
    assert run("resume", "small").returncode == 0
    assert sorted(counts(folder)) == list(range(ROWS))
