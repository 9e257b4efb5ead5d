"""One configuration beside another on real servers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from dfexp import control, params, sidebyside
from dfexp.cli import main
from dfexp.equivalence import DIFFERS, PARTS_EARLIER
from dfexp.errors import FleetError, ParamsError
from dfexp.fleet import list_fleets, up
from dfexp.layout import project_root

DEMO = Path("params/demo.yaml")
SMALL = ["--prompts", "20", "--max-tokens", "8"]


@pytest.mark.slow
def test_what_a_setting_changes_is_found_told_kept_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = f"outputs={tmp_path}"
    penalty = 'generation.extra_body={"repeat_penalty": 1.8}'
    store = "store={bucket: nowhere, endpoint_url: 'http://127.0.0.1:9'}"  # has no say, since nothing is uploaded
    code = main(["equivalence", str(DEMO), "--set", outputs, "--set", store, "--with", penalty, *SMALL])
    said = capsys.readouterr().out
    assert "reference, pass 2 of 2: 20 of 20 prompts answered" in said
    spec = params.load(DEMO, [outputs])
    (found,) = sidebyside.kept(spec, project_root())
    assert found["changes"] == ["generation.repeat_penalty: None -> 1.8"]
    assert found["verdict"] in (PARTS_EARLIER, DIFFERS)
    assert code == (found["verdict"] == DIFFERS)
    assert found["own_identical"] > 0.5
    assert found["identical"] < 0.5
    assert found["words"] in said
    assert not any((tmp_path / "fleets").glob("*/key")), "both fleets have been stopped"
    assert [folder.name for folder in list_fleets(project_root(), str(tmp_path))] == []
    rows, tests, examples = sidebyside.tables([found])
    assert rows.rows[0]["change"] == "generation.repeat_penalty: None -> 1.8"
    assert len(tests.rows) == 4
    assert len(examples.rows) == 3
    assert sidebyside.conclusion([found]).startswith("**generation.repeat_penalty: None -> 1.8** ")
    assert all(row["reference"] != row["changed"] for row in examples.rows)
    assert "simulated" not in rows.title


@pytest.mark.slow
def test_a_server_that_dies_ends_it_and_one_that_a_killed_comparison_left_is_used_and_stopped(tmp_path: Path) -> None:
    spec, other = (params.load(DEMO, [f"outputs={tmp_path}", *more]) for more in ([], ["generation.top_k=1"]))
    as_left = spec.fleet.model_copy(update={"name": "demo-reference", "servers": 1})
    left, launched = up(spec.model_copy(update={"fleet": as_left}), project_root())
    assert launched
    process = left.servers[0].process

    def tell(line: str) -> None:
        if "reference, pass 1 of 2: 20 of 20" in line:
            os.kill(process.pid, signal.SIGKILL)
            assert control.wait_until(lambda: not process.is_alive(), 10.0)

    with pytest.raises(FleetError, match=r"of reference died while it answered\. Its log: "):
        sidebyside.both_ways(spec, other, project_root(), tell, sidebyside.Terms(prompts=20, max_tokens=4))
    assert not process.is_alive()
    assert list_fleets(project_root(), str(tmp_path)) == []
    assert sidebyside.kept(spec, project_root()) == []


def test_two_equal_configurations_are_refused_before_anything_starts(tmp_path: Path) -> None:
    spec = params.load(DEMO, [f"outputs={tmp_path}"])
    with pytest.raises(ParamsError, match="both configurations are the same"):
        sidebyside.both_ways(spec, spec, project_root(), print, sidebyside.Terms())
    other = params.load(DEMO, [f"outputs={tmp_path}", "generation.top_k=3"])
    with pytest.raises(ParamsError, match=r"6 prompts say too little\. Give --prompts 20 or more"):
        sidebyside.both_ways(spec, other, project_root(), print, sidebyside.Terms(prompts=6))
    with pytest.raises(ParamsError, match=r"--max-tokens 0: give 1 or more"):
        sidebyside.both_ways(spec, other, project_root(), print, sidebyside.Terms(max_tokens=0))
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "one"}\n')
    spec, other = (
        params.load(DEMO, [f"outputs={tmp_path}", f"prompts.path={few}", f"generation.top_k={k}"]) for k in (3, 4)
    )
    with pytest.raises(ParamsError, match=r"1 prompts say too little\. Give --prompts 20 or more, and as many"):
        sidebyside.both_ways(spec, other, project_root(), print, sidebyside.Terms())
    few.unlink()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("same", ["fleet.servers=1", "fleet.start_timeout_s=99", "generation.temperature=1.5"])
def test_what_both_sides_are_given_is_no_change(tmp_path: Path, same: str) -> None:
    spec, other = (params.load(DEMO, [f"outputs={tmp_path}", *more]) for more in ([], [same]))
    with pytest.raises(ParamsError, match="both configurations are the same on one server and at one temperature"):
        sidebyside.both_ways(spec, other, project_root(), print, sidebyside.Terms())


def test_without_comparisons_there_is_nothing_to_show(tmp_path: Path) -> None:
    spec = params.load(DEMO, [f"outputs={tmp_path}"])
    assert sidebyside.kept(spec, project_root()) == []
    assert sidebyside.tables([]) == []
    assert sidebyside.conclusion([]) == "Nothing was compared so far."


def test_prompts_are_drawn_by_their_seed_from_all_of_the_list(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"number {number}"}) + "\n" for number in range(500)))
    group = params.load(DEMO, [f"prompts.path={file}"]).prompts
    drawn = [
        [prompt.index for prompt in sidebyside._draw(sidebyside.prompts.read(group, project_root()), terms)]
        for terms in (sidebyside.Terms(), sidebyside.Terms(), sidebyside.Terms(seed=1))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 64
    assert max(drawn[0]) > 250
