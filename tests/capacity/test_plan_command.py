from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dfexp import cli, params
from dfexp.capacity.errors import CapacityError, DoesNotFit, TooLittleRoom, UnknownModel
from dfexp.capacity.flags import modelled, parse_flags, rules, to_argv
from dfexp.capacity.plan_command import check_text, plan_of, plan_text, prepared_for, require_room
from dfexp.capacity.planner import make_plan
from dfexp.errors import ParamsError
from dfexp.hardware import UnknownGpu
from dfexp.params import RunSpec, SglangServers
from dfexp.records import ServerLimits
from tests.capacity.support import DATA

ROOT = Path(__file__).resolve().parent.parent.parent
EXPANSION = ROOT / "params" / "expansion_v1.yaml"
PLANNED = ROOT / "params" / "expansion_v1_planned.yaml"


def spec_with(root: Path, **plan: Any) -> params.RunSpec:
    """The expansion run with lengths like its early figures give, and keys of its plan replaced (None: left out)."""
    tree = yaml.safe_load(EXPANSION.read_text())
    fitted = {"completion": {"median": 2542.0, "sigma": 0.41}}
    tree["plan"] = {key: value for key, value in {**tree["plan"], **fitted, **plan}.items() if value is not None}
    return params.validate(tree, str(root))


def test_the_shipped_plan_prints_a_ranked_table() -> None:
    text = plan_text(params.load(EXPANSION), ROOT, as_json=False)
    print(text)
    assert "--disable-radix-cache --max-running-requests 15" in text
    assert "These change the outputs" in text


def test_the_yaml_of_each_candidate_pasted_into_the_file_gives_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a question"}\n')
    tree = yaml.safe_load(EXPANSION.read_text()) | {"prompts": {"path": "prompts.jsonl"}}
    tree["fleet"]["flags"] |= {"log_level": "warning", "chunked_prefill_size": -1}
    file = tmp_path / "params" / "x.yaml"
    file.write_text(yaml.safe_dump(tree))
    lines = plan_text(params.load(file), tmp_path, as_json=False).splitlines()
    pasted = [(line, lines[place - 1]) for place, line in enumerate(lines) if line.startswith("     flags: ")]
    assert len(pasted) > 5
    for line, above in pasted:
        file.write_text(yaml.safe_dump({**tree, "fleet": {**tree["fleet"], **yaml.safe_load(line)}}))
        assert cli.main(["check", "params/x.yaml"]) == 0, capsys.readouterr().err
        spec = params.load(file)
        assert spec.fleet.flags["log_level"] == "warning"
        argv = to_argv(parse_flags(modelled(spec.fleet.flags)), rules("0.5.12"))
        assert argv == above.removeprefix("     FP8 weights,").split()


def test_the_planned_file_has_the_flags_that_are_ranked_first() -> None:
    proven, planned = (prepared_for(params.load(path), ROOT).setting for path in (EXPANSION, PLANNED))
    best = make_plan(proven).ranked[0]
    # Without the radix cache the strategy means nothing, so the file leaves it out.
    assert replace(best.flags, mamba_strategy="auto") == planned.server.flags
    assert f"{best.memory.max_running_requests} requests a server" in PLANNED.read_text()
    assert f"{best.prediction.tok_per_s:,.0f} tok/s" in PLANNED.read_text()


ROOM = ServerLimits(max_running_requests=72, max_total_num_tokens=289_000, engine_version="sglang 0.5.12")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, None),
        ({"max_running_requests": 65, "max_total_num_tokens": 261_000}, None),
        ({"max_running_requests": 37}, r"a:1: max_running_requests is 37, 51% of the 72 predicted"),
        ({"max_total_num_tokens": 120_000}, r"max_total_num_tokens is 120,000, 41% of the 289,354 predicted"),
        ({"max_running_requests": None, "max_total_num_tokens": None}, None),
    ],
)
def test_servers_with_much_less_room_than_planned_are_not_used(said: dict[str, Any], words: str | None) -> None:
    spec, limits = params.load(EXPANSION), {"a:1": replace(ROOM, **said), "b:2": ROOM, "c:3": None}
    if words is None:
        require_room(spec, ROOT, limits)
        return
    with pytest.raises(TooLittleRoom, match=words) as caught:
        require_room(spec, ROOT, limits)
    assert "b:2" not in str(caught.value)
    require_room(params.load(EXPANSION, ["fleet.least_share_of_plan=0"]), ROOT, limits)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (["plan.gpu=rtx-pro-60000"], UnknownGpu, "'rtx-pro-60000'"),
        (["plan.model=Qwen9.9-27B"], UnknownModel, "'Qwen9.9-27B'"),
        (["fleet.flags.mem_fraction_static=0.5"], DoesNotFit, "mem_fraction_static = 0.5 leaves"),
    ],
)
def test_a_plan_with_a_mistake_is_no_permission(changes: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        require_room(params.load(EXPANSION, changes), ROOT, {"a:1": ROOM})
    for allowed in ("fleet.least_share_of_plan=0", "fleet.accepted_checks=[capacity]"):
        require_room(params.load(EXPANSION, [*changes, allowed]), ROOT, {"a:1": ROOM})


@pytest.mark.parametrize(
    "config",
    [{"model_type": "kimi_linear"}, {"architectures": 5}, {"model_type": "qwen3", "layer_types": 3}, {}, None],
)
def test_where_nothing_can_be_predicted_nothing_is_required(config: dict[str, Any] | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = params.load(EXPANSION, [f"plan.model={tmp_path}"])
    require_room(spec, ROOT, {"a:1": replace(ROOM, max_running_requests=1)})
    tree = params.load(EXPANSION).model_dump()
    del tree["fleet"]["flags"]["mem_fraction_static"]
    require_room(params.validate(tree, "test"), ROOT, {"a:1": replace(ROOM, max_running_requests=1)})


def simulated(*overrides: str) -> RunSpec:
    tree = params.overlay(params.read_yaml(EXPANSION), overrides)
    kept = {key: tree["fleet"][key] for key in ("model", "servers", "flags")}
    return params.validate({**tree, "fleet": {"engine": "simulated", **kept}}, "test")


def test_a_simulated_fleet_is_planned_and_held_to_its_plan_as_a_real_one() -> None:
    spec = simulated()
    assert prepared_for(spec, ROOT).setting == prepared_for(params.load(EXPANSION), ROOT).setting
    said = replace(ROOM, engine_version="simulated sglang 0.5.12")
    require_room(spec, ROOT, {"a:1": said})
    with pytest.raises(TooLittleRoom, match=r"max_running_requests is 37, 51% of the 72 predicted"):
        require_room(spec, ROOT, {"a:1": replace(said, max_running_requests=37)})


def test_flags_of_simulated_servers_beat_those_of_their_plan() -> None:
    spec = simulated("plan.flags={mamba_scheduler_strategy: extra_buffer, mem_fraction_static: 0.5}")
    assert isinstance(spec.fleet, SglangServers)
    assert plan_of(spec, ROOT).flags == spec.fleet.flags
    assert spec.fleet.flags["mamba_strategy"] == "no_buffer"
    real = params.load(EXPANSION, ["plan.flags={mem_fraction_static: 0.5}"])
    assert plan_of(real, ROOT).flags == {"mem_fraction_static": 0.5}


def test_json_is_strict_and_complete() -> None:
    tree = json.loads(plan_text(params.load(EXPANSION), ROOT, as_json=True), parse_constant=pytest.fail)
    assert tree["ranked"][0]["flags"]["disable_radix_cache"] is True
    assert 150 <= tree["ranked"][0]["prediction"]["running"] <= 160
    assert tree["current"]["memory"]["max_running_requests"] == 72
    assert tree["model"]["weights_source"]
    assert {
        item["changes"].keys() & {"weights", "mamba_ssm_dtype", "kv_cache_dtype"} == set() for item in tree["ranked"]
    } == {True}


def test_constant_lengths_give_strict_json_too(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, prompt={"tokens": 100}, completion={"tokens": 1000})
    json.loads(plan_text(spec, tmp_path, as_json=True), parse_constant=pytest.fail)


def test_variants_are_settings_of_their_own() -> None:
    prepared = prepared_for(spec_with(ROOT), ROOT)
    found = {
        name: (part.server.flags.mem_fraction_static, part.concurrency) for name, part in prepared.variants.items()
    }
    assert found == {"before": (0.85, 32), "after": (0.90, 64)}
    assert [part.measured_tok_per_s for part in prepared.variants.values()] == [670, 1180]


def test_share_and_count_are_measured_on_the_prompts(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    rows = [{"prompt": "You are a helpful assistant. Question " + str(number)} for number in range(50)]
    (tmp_path / "prompts" / "expansion_v1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepared_for(spec_with(tmp_path, prompts=None, shared_prefix_share=None), tmp_path)
    assert prepared.setting.prompts == 50
    assert prepared.setting.workload.shared_prefix_share == pytest.approx(0.87, abs=0.03)


def test_without_prompts_the_share_stays_unmeasured(tmp_path: Path) -> None:
    assert (
        prepared_for(spec_with(tmp_path, shared_prefix_share=None), tmp_path).setting.workload.shared_prefix_share
        is None
    )
    with pytest.raises(CapacityError, match=r"plan\.prompts"):
        prepared_for(spec_with(tmp_path, prompts=None), tmp_path)


def test_frozen_prompts_of_a_run_count_where_their_source_is_missing_or_has_changed(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, prompts=None, shared_prefix_share=None)
    frozen = {"asked": 77, "shared_prefix_share": 0.25}
    (folder := tmp_path / spec.outputs / spec.run).mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"spec": spec.model_dump(mode="json"), "prompts": frozen}))
    for source in (None, '{"prompt": "one"}\n'):
        if source:
            (tmp_path / "prompts").mkdir()
            (tmp_path / "prompts" / "expansion_v1.jsonl").write_text(source)
        setting = prepared_for(spec, tmp_path).setting
        assert (setting.prompts, setting.workload.shared_prefix_share) == (77, 0.25)
    others = spec.model_copy(update={"prompts": spec.prompts.model_copy(update={"limit": 1})})
    assert prepared_for(others, tmp_path).setting.prompts == 1  # a file that means other prompts than the run's


def test_a_sample_in_the_file_is_fitted(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, samples=[{"running": 64, "tok_per_s": 1180.0}])
    found = prepared_for(spec, tmp_path).setting.efficiency
    assert "1 sample" in found.provenance
    assert found.bandwidth == pytest.approx(0.74, abs=0.01)


def test_measured_memory_beats_the_table(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, free_gib=94.5, free_after_load_gib=42.0)
    free = prepared_for(spec, tmp_path).setting.free
    assert (free.pre_gib, free.post_gib) == (94.5, 42.0)


@pytest.mark.parametrize(
    ("plan", "error", "says"),
    [
        ({"model": "Qwen9"}, CapacityError, "Qwen9"),
        ({"gpu": "h2000"}, Exception, "h200"),
        ({"weights_gib": 200.0}, CapacityError, "do not fit"),
        ({"flags": {"mem_fraction_static": 2.0}}, CapacityError, "2.0"),
        ({"flags": {"memfraction": 0.9}}, CapacityError, "memfraction"),
        ({"sglang_version": "newest"}, CapacityError, "newest"),
        ({"prompt": {"median": 150.0}}, ParamsError, "p95 or sigma"),
        ({"prompt": {"tokens": -5.0}}, ParamsError, "-5"),
        ({"prompt": {"median": 600.0, "p95": 150.0}}, ParamsError, "is below the median"),
        ({"completion": {"early": {"completions": 438, "mean_tokens": 9000, "after_s": 280, "in_flight": 256,
                                   "tok_per_s": 5360}}}, CapacityError, "were generated"),
        ({"gpus": 8}, ParamsError, "gpus"),
    ],
)  # fmt: skip
def test_nonsense_in_a_file_names_value_and_fix(
    tmp_path: Path, plan: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        plan_text(spec_with(tmp_path, **plan), tmp_path, as_json=False)


def test_a_file_without_a_plan_says_so() -> None:
    with pytest.raises(CapacityError, match="no `plan` group"):
        plan_text(params.load(ROOT / "params" / "demo.yaml"), ROOT, as_json=False)


def test_the_check_reads_a_file_and_returns_its_status(tmp_path: Path) -> None:
    text, status = check_text(DATA / "checks.jsonl", as_json=False)
    assert status == 0
    assert "0 outside the promise" in text
    tree = json.loads(check_text(DATA / "checks.jsonl", as_json=True)[0], parse_constant=pytest.fail)
    assert tree["summary"]["rows"] == 15
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'\xff\xfe{\n{"id": "x", "inputs": {"strategy": "y"}}\n')
    assert check_text(bad, as_json=True)[1] == 2
    with pytest.raises(CapacityError, match=r"nowhere\.jsonl"):
        check_text(tmp_path / "nowhere.jsonl", as_json=False)


def test_the_command_line_prints_and_returns_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["capacity", "check", str(DATA / "checks.jsonl")]) == 0
    assert "0 outside the promise" in capsys.readouterr().out
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(
        (DATA / "checks.jsonl").read_text().replace('"max_running_requests": 37', '"max_running_requests": 38')
    )
    assert cli.main(["capacity", "check", str(wrong), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["summary"]["rows_outside"] == 1
    assert cli.main(["plan", str(EXPANSION), "--set", "plan.concurrency=72", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["current"]["prediction"]["running"] == 72
    assert cli.main(["plan", str(EXPANSION), "--set", "plan.gpus=8"]) == cli.EXIT_WRONG
    assert "plan.gpus" in capsys.readouterr().err
    assert cli.main(["plan", str(EXPANSION), "--set", "plan.model=Qwen9"]) == cli.EXIT_FAILED
    assert "Qwen9" in capsys.readouterr().err
