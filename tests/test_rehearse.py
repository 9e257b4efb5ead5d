"""Rehearsals: what a file describes, what the table says, and two small ones through the real thing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dfexp import control, generate, params, rehearse
from dfexp.engines.simulated.server.text import prompt_tokens
from dfexp.errors import LockedError, ParamsError, RunError
from dfexp.jsonl import read_json, write_json
from dfexp.layout import RunFolder
from dfexp.params import SimulatedFleet
from dfexp.records import ServerLimits
from dfexp.rehearse import drive
from dfexp.rehearse.whole import simulate
from dfexp.shards import read_rows
from tests.finished_run import START, row, status, write_run

ROOT = Path(__file__).resolve().parent.parent
RUN: dict[str, Any] = {
    "run": "small",
    "fleet": {
        "engine": "sglang", "model": "/models/Qwen3.6-27B", "servers": 2, "first_port": 30000, "name": "shared",
        "python": "/opt/sglang/bin/python", "flags": {"context_length": 8192, "mem_fraction_static": 0.9},
    },
    "prompts": {"path": "prompts/mine.jsonl"},
    "generation": {"concurrency": 16, "rows_per_shard": 50, "progress_interval_s": 0.5},
    "plan": {
        "gpu": "rtx-pro-6000", "prompts": 2000, "shared_prefix_share": 0.0, "flags": {"mem_fraction_static": 0.5},
        "prompt": {"median": 40, "p95": 90}, "completion": {"median": 150, "p95": 400},
    },
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "small.yaml").write_text(yaml.safe_dump(RUN))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rehearsal(project: Path, **tree: Any) -> Path:
    path = project / "params" / "rehearsal.yaml"
    path.write_text(yaml.safe_dump({"over": "small.yaml", **tree}))
    return path


def read(path: Path, *overrides: str, only: tuple[str, ...] = (), hours: float | None = None) -> list[rehearse.Variant]:
    return rehearse.read(path, path.parent.parent, overrides, only, hours)


def test_the_shipped_file_has_the_reference_run_three_times() -> None:
    before, after, planned = read(ROOT / "params" / "rehearsal.yaml")
    assert [each.setting.memory().max_running_requests for each in (before, after, planned)] == [37, 72, 157]
    assert [each.spec.generation.concurrency for each in (before, after, planned)] == [32, 64, "auto"]
    real, faster = (params.load(ROOT / "params" / f"{name}.yaml") for name in ("expansion_v1", "expansion_v1_planned"))
    assert after.spec.fleet.model_dump()["flags"] == real.fleet.model_dump()["flags"]
    assert planned.spec.fleet.model_dump()["flags"] == faster.fleet.model_dump()["flags"]
    assert before.seen is not None
    assert (before.seen.at_s, before.seen.completions, before.seen.tok_per_s_per_gpu) == (280.0, 438, [650, 680])


def test_the_shipped_simulated_run_is_valid_and_may_be_rehearsed_too() -> None:
    path = ROOT / "params" / "simulated.yaml"
    spec = params.load(path)
    assert isinstance(spec.fleet, SimulatedFleet)
    assert (spec.fleet.speed, spec.fleet.faults, spec.planned) == (50, [], spec.plan)
    (variant,) = read(path)
    assert (variant.spec.run, variant.missing) == ("simulated-run", [])


def test_a_run_file_is_rehearsed_as_it_is_but_apart_from_the_real_run(project: Path) -> None:
    path = project / "params" / "small.yaml"
    real = {"store": {"bucket": "of-the-real-run"}, "notify": "page-me", "limits": {"rows": 3}}
    path.write_text(yaml.safe_dump({**RUN, **real}))
    (variant,) = read(path)
    spec = variant.spec
    assert isinstance(spec.fleet, SimulatedFleet)
    assert spec.store.bucket is None, "rows that are made up are uploaded nowhere"
    assert (spec.notify, spec.limits.rows) == (None, None), "nobody is called for them, and all are made"
    assert (spec.fleet.servers, spec.fleet.first_port, spec.fleet.flags) == (2, None, RUN["fleet"]["flags"])
    assert (spec.outputs, spec.run, spec.fleet_name) == ("outputs/rehearsals", "small-run", "small-run")
    assert variant.setting.server.flags.mem_fraction_static == 0.9, "the fleet's flags are launched, not the plan's"
    assert not any(project.joinpath("outputs").glob("**/*")), "nothing is written"


def test_a_variant_replaces_all_flags_and_adds_to_the_rest(project: Path) -> None:
    flags = {"context_length": 8192, "mem_fraction_static": 0.8}
    crash = {"kind": "crash", "server": 1, "at_s": 60.0}
    part = {"fleet": {"flags": flags, "faults": [crash]}, "generation": {"temperature": 0.5}}
    path = rehearsal(project, variants={"a": {}, "b": part})
    a, b = read(path, "fleet.servers=3", "fleet.flags.page_size=1")
    assert isinstance(b.spec.fleet, SimulatedFleet)
    assert b.spec.fleet.flags == {**flags, "page_size": 1}
    assert [fault.kind for fault in b.spec.fleet.faults] == ["crash"]
    assert (b.spec.generation.temperature, b.spec.generation.concurrency) == (0.5, 16)
    assert (a.setting.servers, b.setting.servers) == (3, 3)
    assert [each.name for each in read(path, only=("b",))] == ["b"]


def test_every_mistake_is_told_before_anything_starts(project: Path) -> None:
    with pytest.raises(ParamsError) as caught:
        read(rehearsal(project, hour=2, variants={"a": {"seen": {"at_s": 0, "running": 3}}, "b": {"feet": {}}}))
    for words in ("hour = 2", "at_s = 0", "Did you mean variants.a.seen.num_running_reqs?", "variants.b.feet"):
        assert words in str(caught.value)
    with pytest.raises(ParamsError, match=r"--hours 0: 1 wrong parameter.*\n.*hours = 0.* greater than 0"):
        read(project / "params" / "small.yaml", hours=0.0)
    variants = {
        "typo": {"fleet": {"server": 3}},
        "full": {"fleet": {"flags": {"mem_fraction_static": 0.3}}},
        "late": {"seen": {"at_s": 7200}},
        "other": {"fleet": {"engine": "llamacpp"}},
        "good": {},
    }
    with pytest.raises(ParamsError) as caught:
        read(rehearsal(project, variants=variants))
    for words in ("typo: ", "fleet.server = 3", "full: ", "late: seen.at_s = 7200", "other: fleet.engine = 'llamacpp'"):
        assert words in str(caught.value)
    assert "good" not in str(caught.value)
    with pytest.raises(ParamsError, match=r"fleet\.engine = 'sglang'"):
        read(rehearsal(project, variants={"a": {}}), "fleet.engine=sglang")
    other = project / "params" / "other.yaml"
    other.write_text(yaml.safe_dump({"over": "rehearsal.yaml", "variants": {"a": {}}}))
    with pytest.raises(ParamsError, match=r"rehearsal\.yaml: this is a file of variants itself"):
        read(other)
    other.write_text(yaml.safe_dump({"over": "small.yaml", "variant": {"a": {}}}))
    with pytest.raises(ParamsError, match="Did you mean variants"):
        read(other)


def test_what_should_be_known_first_is_said(project: Path) -> None:
    crash, slow = {"kind": "crash", "server": 0, "at_s": 4000}, {"kind": "slow", "at_s": 600}
    variants = {
        "a": {"fleet": {"speed": 20}},
        "b": {"fleet": {"speed": 20}, "seen": {"at_s": 60}},
        "c": {"fleet": {"faults": [crash, slow]}, "prompts": {"path": "prompts/none.jsonl"}},
    }
    path = rehearsal(project, variants=variants)
    (project / "prompts").mkdir()
    (project / "prompts" / "mine.jsonl").write_text('{"prompt": "one"}\n')
    same, missing, late, pauses = rehearse.remarks(read(path))
    assert same == "b: its parameters are those of a"
    assert missing.startswith("c: no file prompts/none.jsonl, so prompts are drawn")
    assert late.startswith("c: crash at 4000 s comes after the end, 1 h")
    assert "--speed 20" in pauses
    (project / "prompts" / "mine.jsonl").unlink()
    drawn = list(rehearse.remarks(read(path, only=("a", "b"))))
    assert [line[:8] for line in drawn] == ["a: no fi", "b: no fi", "b: its p"]
    (variant,) = read(path, only=("c", "c"), hours=2.0)
    assert len(list(rehearse.remarks([variant]))) == 2


@pytest.mark.parametrize(
    ("fleet", "words"),
    [({"engine": "external", "urls": ["http://127.0.0.1:1"]}, "'external' cannot be rehearsed"), ({}, "fleet.engine")],
)
def test_a_run_that_cannot_be_rehearsed_says_so(project: Path, fleet: dict[str, Any], words: str) -> None:
    (project / "params" / "small.yaml").write_text(yaml.safe_dump({**RUN, "fleet": fleet}))
    with pytest.raises(ParamsError, match=words):
        read(project / "params" / "small.yaml")


def test_a_run_without_a_plan_and_a_variant_that_is_not_there_say_so(project: Path) -> None:
    with pytest.raises(ParamsError, match=r"no such variant.*has: a"):
        read(rehearsal(project, variants={"a": {}}), only=("b",))
    (project / "params" / "small.yaml").write_text(yaml.safe_dump({k: v for k, v in RUN.items() if k != "plan"}))
    with pytest.raises(ParamsError, match=r"no plan group.*docs/capacity\.md"):
        read(project / "params" / "small.yaml")
    assert read(rehearsal(project, variants={"a": {"plan": RUN["plan"]}})), "a variant may bring it"


def test_enough_prompts_for_the_hours_and_no_more_than_the_run_has(project: Path) -> None:
    path = project / "params" / "small.yaml"
    (short,), (long,) = read(path, hours=0.02), read(path, hours=5.0)
    rate = short.setting.predict(short.setting.memory(), 16).completions_per_s
    assert short.spec.prompts.limit == pytest.approx(2 * (rate * 72 * 1.3 + 16), abs=1)
    assert long.spec.prompts.limit == 2000


def test_own_prompts_are_used_where_they_are(project: Path) -> None:
    (project / "prompts").mkdir()
    (project / "prompts" / "mine.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (variant,) = read(project / "params" / "small.yaml", "prompts.limit=1", "plan.prompts=null")
    assert variant.missing == []
    assert (variant.spec.prompts.path, variant.spec.prompts.limit) == ("prompts/mine.jsonl", 1)


def test_drawn_prompts_have_the_planned_lengths_and_are_always_the_same(project: Path) -> None:
    (variant,) = read(project / "params" / "small.yaml")
    paths = [project / "one" / "a.jsonl", project / "two" / "a.jsonl"]
    for path in paths:
        drive.write_prompts(variant, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    texts = [json.loads(line) for line in paths[0].read_text().splitlines()]
    assert len(texts) == variant.spec.prompts.limit == 2000
    tokens = sorted(prompt_tokens([{"role": "user", "content": text["prompt"]}]) for text in texts)
    assert tokens[1000] == pytest.approx(40, rel=0.05)
    assert tokens[1900] == pytest.approx(90, rel=0.1)
    assert len({text["prompt"] for text in texts}) > 1990


@pytest.mark.parametrize(("speed", "stall_s"), [("max", 30.0), ("1.0", 300.0), ("4.0", 75.0), ("0.5", 300.0)])
def test_a_stuck_server_is_noticed_by_its_own_clock(project: Path, speed: str, stall_s: float) -> None:
    (variant,) = read(project / "params" / "small.yaml", f"fleet.speed={speed}")
    assert variant.spec.generation.stall_s == stall_s


def test_what_is_no_rehearsal_is_left_as_it_is(project: Path) -> None:
    (variant,) = read(project / "params" / "small.yaml")
    folder = generate.run_folder(variant.spec, project)
    folder.path.mkdir(parents=True)
    write_json(folder.run_json, {"spec": {"fleet": {"engine": "sglang"}}})
    with pytest.raises(RunError, match="is no rehearsal"), rehearse.held([variant], project):
        pytest.fail("it would be removed")
    assert read_json(folder.run_json) == {"spec": {"fleet": {"engine": "sglang"}}}


def test_a_name_is_held_by_one_process_and_freed_by_its_death(project: Path) -> None:
    a, b = read(rehearsal(project, variants={"a": {}, "b": {}}))
    holds = "import sys\nfrom pathlib import Path\nfrom dfexp import rehearse\nroot = Path.cwd()\n"
    holds += "with rehearse.held(rehearse.read(root / 'params/rehearsal.yaml', root, [], ['b'], None), root):\n"
    holds += "    print('held', flush=True)\n    sys.stdin.read()\n"
    argv, pipe = [sys.executable, "-c", holds], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=rf"small-b is being written by process {other.pid} "):
            rehearse.held([a, b], project).__enter__()
        with rehearse.held([a], project):
            other.kill()
            other.wait()
    with rehearse.held([a, b], project), pytest.raises(LockedError), rehearse.held([a], project):
        pytest.fail("two have it")


def decode_line(at_s: float, running: int, rate: float) -> str:
    stamp = datetime.fromtimestamp(START + at_s).strftime("%Y-%m-%d %H:%M:%S")
    return (
        f"[{stamp}] Decode batch, #running-req: {running}, #full token: 1101, full token usage: 0.20, mamba num: 32, "
        f"mamba usage: 0.60, cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: 1\n"
    )


def test_figures_are_of_the_windows_that_they_name(project: Path) -> None:
    """Ten virtual seconds a second; the run begins at virtual second 100. The second server dies half way."""
    seen = {"at_s": 200, "num_running_reqs": [9, 9.5], "max_running_requests": 72, "completions": 25, "mamba_usage": 0}
    (variant,) = read(rehearsal(project, hours=0.1, variants={"a": {"seen": seen}}))
    # Row i is sent at START + 10 + i and done two seconds later: at virtual second 20 + 10 i of the run.
    made = [row(i, submitted_at=START + 10 + i, completion_tokens=100 + i, attempt=1 + (i > 32)) for i in range(35)]
    folder = write_run(
        project, made,
        name="rehearsals/small-a", asked=40, fleet={"engine": "simulated"}, events=[
            {"event": "server_down", "server": "127.0.0.1:8081", "at": START + 20},
            {"event": "server_back", "server": "127.0.0.1:8081", "at": START + 25.5},
            {"event": "server_down", "server": "127.0.0.1:8081", "at": START + 30},
            {"event": "run_stopped", "at": START + 31},
        ],
    )  # fmt: skip
    control.write_status(folder, status("stopped"))
    fleet = generate.fleet_folder(variant.spec, project)
    fleet.logs.mkdir(parents=True)
    (fleet.path / "clock.jsonl").write_text(
        "".join(json.dumps({"real_at": START + s, "virtual_s": 10.0 * s}) + "\n" for s in (0, 100))
    )
    for port, until_s in ((30000, 460), (30001, 280)):
        said = (decode_line(at_s, 10 if at_s > 200 else 4, at_s) for at_s in range(0, until_s, 4))
        (fleet.logs / f"server-{port}.log").write_text("".join(said))
    limits = ServerLimits(max_running_requests=72, max_mamba_cache_size=217, max_total_num_tokens=289_000)
    lines = rehearse.rows(variant, project, limits, whole=False)
    found = {line["figure"]: line["simulated"] for line in lines}
    assert (found["max_mamba_cache_size"], found["max_total_num_tokens"]) == (217, 289_000)
    assert (found["num_running_reqs"], found["num_queue_reqs"]) == (10, 1)
    assert (found["full_token_usage"], found["mamba_usage"]) == (pytest.approx(0.2), pytest.approx(0.6))
    assert found["completions"] == 19
    assert found["mean_completion_tokens"] == 109
    assert found["completions_per_s"] == pytest.approx(19 / 200)
    # From second 100 to 200 of the run the logs say 204, 208 ... 300, those of the server that dies until 276.
    assert found["tok_per_s_per_gpu"] == pytest.approx((sum(range(204, 301, 4)) + sum(range(204, 280, 4))) / 44)
    assert 400 < found["fleet_tok_per_s"] < 480
    # The last row is done at second 360: steady is from 180 on, with one server.
    assert found["steady_tok_per_s_per_gpu"] == pytest.approx(sum(range(284, 460, 4)) / 44)
    assert found["steady_fleet_tok_per_s"] == pytest.approx(found["steady_tok_per_s_per_gpu"], rel=0.03)
    assert (found["restarts"], found["rows_failed"], found["rows_sent_again"]) == (1, 0, 2)
    assert found["server_1_away_s"] == pytest.approx(55 + 10), "the second time until the end"
    assert "server_0_away_s" not in found
    errors = {line["figure"]: line["error"] for line in lines}
    assert errors["num_running_reqs"] == pytest.approx(10 / 9.5 - 1)
    assert (errors["max_running_requests"], errors["completions"]) == (0.0, pytest.approx(19 / 25 - 1))
    assert errors["mamba_usage"] is None, "nothing is a share of nothing"
    table = rehearse.frame([*lines, *({**line, "variant": "b"} for line in lines if "steady" not in line["figure"])])
    assert table.loc["running", ("a", "seen")] == "9-9.5"
    assert table.loc["running", ("a", "error")] == "+5.3%"
    assert table.loc["tok/s a GPU (last half)", ("b", "simulated")] == ""
    unseen = [{**line, "seen_low": None, "seen_high": None, "error": None} for line in lines]
    assert [str(each) for each in rehearse.frame(unseen).columns] == ["('a', 'simulated')"]
    near = {**lines[0], "simulated": 99.96, "seen_low": 100, "seen_high": 100, "error": -0.0004}
    assert "+0.0%" in rehearse.frame([near]).to_string()


def test_the_whole_run_agrees_with_the_capacity_model(project: Path) -> None:
    (variant,) = read(project / "params" / "small.yaml")
    setting = variant.setting
    run = simulate(setting, 16, 20_000)
    assert len(run.finished_s) == 20_000
    assert run.finished_s[-1] / 3600 == pytest.approx(setting.predict(setting.memory(), 16).hours(20_000, 2), rel=0.03)
    assert sum(run.tokens) / 20_000 == pytest.approx(setting.workload.completion.mean, rel=0.02)
    assert simulate(setting, 16, 20_000).finished_s == run.finished_s


def leftovers(project: Path) -> list[psutil.Process]:
    """Living processes that name the project's folder in their command line or work in it."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
            if not mine and (str(project) in " ".join(process.cmdline()) or process.cwd().startswith(str(project))):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def real(project: Path) -> Iterator[Path]:
    """A project whose rehearsals run, and leave no process behind."""
    yield project
    assert control.wait_until(lambda: not leftovers(project), 15.0), leftovers(project)


@pytest.mark.slow
def test_variants_through_the_real_thing_and_again(real: Path) -> None:
    """One has a server that dies half way, one runs out of memory at the start, which does not stop the others."""
    crash, no_memory = {"kind": "crash", "server": 1, "at_s": 150.0}, {"kind": "oom_at_start", "times": 9}
    variants = {
        "calm": {"seen": {"at_s": 100, "num_running_reqs": 16}},
        "full": {"fleet": {"faults": [no_memory]}},
        "dies": {"fleet": {"faults": [crash]}, "generation": {"concurrency": "auto"}},
    }
    path = rehearsal(real, hours=0.08, variants=variants)
    argv = [sys.executable, "-m", "dfexp.cli", "rehearse", str(path), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1
    assert "dfexp: full: server 127.0.0.1:" in done.stderr
    lines = json.loads(done.stdout)
    assert json.loads((real / "outputs/rehearsals/rehearsal-simulated.json").read_text()) == lines
    again = subprocess.run([*argv, "--only", "calm"], capture_output=True, text=True, check=False, timeout=200)
    assert again.returncode == 0, again.stderr
    assert {line["variant"] for line in json.loads(again.stdout)} == {"calm"}
    assert json.loads((real / "outputs/rehearsals/rehearsal-simulated.json").read_text()) == lines, "not by a part"
    assert json.loads((real / "outputs/rehearsals/rehearsal-calm-simulated.json").read_text())
    assert "simulating all 2,000 prompts without servers\n" in again.stderr
    found = {(line["variant"], line["figure"]): line["simulated"] for line in lines}
    assert found["calm", "num_running_reqs"] == pytest.approx(16, abs=0.5)
    assert (found["calm", "restarts"], found["dies", "restarts"]) == (0, 1)
    assert found["dies", "rows_sent_again"] > 0
    assert found["dies", "server_1_away_s"] >= 60.0, "it loads its model"
    assert found["calm", "rows_failed"] == found["dies", "rows_failed"] == 0
    for variant in read(path, only=("calm", "dies")):
        rows = list(read_rows(generate.run_folder(variant.spec, real).completions))
        assert len({row["index"] for row in rows}) == len(rows) > 100
        memory = variant.setting.memory()
        assert found[variant.name, "max_running_requests"] == memory.max_running_requests
        assert found[variant.name, "max_total_num_tokens"] == pytest.approx(memory.max_total_num_tokens, rel=0.01)
        predicted = variant.setting.predict(memory, 16).tok_per_s
        if variant.name == "calm":
            assert found["calm", "steady_tok_per_s_per_gpu"] == pytest.approx(predicted, rel=0.05)
            assert found["calm", "steady_fleet_tok_per_s"] == pytest.approx(2 * predicted, rel=0.07)
    assert [path.name for path in (real / "outputs").iterdir()] == ["rehearsals"]
    report = generate.run_folder(variant.spec, real)
    assert report.name == "small-dies"
    assert "Traceback" not in (report.notebooks / "04_report.html").read_text()
    (rate,) = [each for each in json.loads((report.report / "comparison.json").read_text()) if "fleet" in each["what"]]
    assert rate["small-calm (simulated)"] > 0
    assert rate["last / first"] == pytest.approx(rate["small-dies (simulated)"] / rate["small-calm (simulated)"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_rehearsal_and_its_servers(real: Path, number: int) -> None:
    """The second would take six minutes. What was finished is told; another command of that name changes nothing."""
    variants = {"quick": {"fleet": {"load_s": 0}}, "slow": {"fleet": {"load_s": 0, "speed": 1.0}}}
    path = rehearsal(real, hours=0.1, variants=variants)
    argv = [sys.executable, "-m", "dfexp.cli", "rehearse", str(path), "--no-whole"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = RunFolder(real / "outputs" / "rehearsals" / "small-slow")
    assert control.wait_until(lambda: (control.read_status(run) or {}).get("in_flight", 0) > 0, 120.0)
    second = subprocess.run([*argv, "--only", "slow"], capture_output=True, text=True, check=False, timeout=60)
    assert second.returncode == 1
    assert f"small-slow is being written by process {process.pid} " in second.stderr
    assert control.living_process(run)
    process.send_signal(number)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert control.living_process(run) is None
    assert not leftovers(real)
    quick = generate.run_folder(read(path, only=("quick",))[0].spec, real).path
    assert f"dfexp status FOLDER and dfexp report FOLDER:\n  {quick}\n" in shown
    assert str(run.path) not in shown
    outputs = real / "outputs" / "rehearsals"
    assert [each.name for each in outputs.glob("*.csv")] == ["rehearsal-quick-simulated.csv"]


@pytest.mark.slow
def test_the_shipped_simulated_run_runs_and_its_fault_happens(real: Path) -> None:
    shutil.copytree(ROOT / "params", real / "params", dirs_exist_ok=True)
    (fault,) = re.findall(r"# - (\{kind.*\})", (ROOT / "params" / "simulated.yaml").read_text())
    changes = ["run=small", f"fleet.faults=[{fault}]", "prompts.limit=120", "fleet.speed=max"]
    argv = [sys.executable, "-m", "dfexp.cli", "run", "params/simulated.yaml"]
    argv += [word for change in changes for word in ("--set", change)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "120 succeeded + 0 failed" in done.stdout
    status = control.read_status(RunFolder(real / "outputs" / "small")) or {}
    assert [server["restarts"] for server in status["servers"]] == [0, 1]
