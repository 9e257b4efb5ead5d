"""How much of the prompts an earlier one begins with, against a count of every character."""

from __future__ import annotations

import json
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfexp import display
from dfexp.cli import main
from dfexp.layout import RunFolder
from dfexp.params_prompts import DuplicatesPart, PromptsGroup
from dfexp.prompts import freeze
from dfexp.sources.report import EXAMPLES, Measures, Notes, render
from tests.sources.support import write


def share(*texts: str) -> float:
    measures = Measures()
    for text in texts:
        measures.add([{"role": "user", "content": text}])
    return measures.shared_prefix_share()


def exact(*texts: str) -> float:
    ordered = sorted(f"user\n{text}" for text in texts)
    shared = sum(len(commonprefix(pair)) for pair in pairwise(ordered))  # noqa: RUF071 (of texts, not of paths)
    return shared / max(1, sum(map(len, ordered)))


def test_prompts_that_share_nothing_share_nothing() -> None:
    assert share() == share("abc", "xyz") == share("a" * 50, "b" * 50) == 0.0


@pytest.mark.parametrize("shared", [20, 100, 1000, 30_000])
def test_a_common_beginning_is_found_to_an_eighth(shared: int) -> None:
    texts = ["s" * shared + str(n) * 30 for n in range(10)]
    assert exact(*texts) * 0.8 < share(*texts) <= exact(*texts)


def test_repeated_prompts_count_but_for_the_first() -> None:
    assert share(*["x" * 500] * 4) == pytest.approx(0.75, abs=0.1)


@given(st.integers(0, 1000))
def test_it_is_never_more_than_what_a_cache_would_find(seed: int) -> None:
    rng = Random(seed)
    texts = ["".join(rng.choices("ab", k=rng.randint(0, 80))) for _ in range(6)]
    texts += [rng.choice(texts)[: rng.randint(0, 80)] + rng.choice(texts) for _ in range(6)]
    assert share(*texts) <= exact(*texts) + 1e-9


def test_examples_are_bounded_for_each_reason_and_counts_are_not() -> None:
    notes = Notes()
    for line in range(3 * EXAMPLES):
        notes.add("p.jsonl", line, "common", "x" * 500)
    notes.add("p.jsonl", 7, "rare", "y")
    assert notes.by_reason == {"common": 3 * EXAMPLES, "rare": 1}
    assert len(notes.examples) == EXAMPLES + 1
    assert len(notes.examples[0]["detail"]) == 200


def test_a_dry_run_says_what_a_run_would_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params").mkdir()
    write(tmp_path / "p.jsonl", "a", "", "b", "a")
    params = "run: r\nfleet: {engine: llamacpp}\nprompts: {path: p.jsonl, duplicates: {exact: true}}\n"
    (tmp_path / "params" / "r.yaml").write_text(params)
    monkeypatch.chdir(tmp_path)
    assert main(["prompts", "params/r.yaml"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 prompts\n")
    assert "left out: 2\n            1 empty prompt\n              p.jsonl:2: 'prompt is blank'" in said
    assert main(["prompts", "params/r.yaml", "--json", "--set", "prompts.limit=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    folder = RunFolder(tmp_path / "outputs" / "r")
    freeze(PromptsGroup(path="p.jsonl", limit=1, duplicates=DuplicatesPart(exact=True)), tmp_path, folder)
    assert found == json.loads(folder.prompts_report.read_text())
    assert display.prompts_read(folder) == render(found)
    assert display.prompts_read(RunFolder(tmp_path)) == "of the prompts there is no report"
    assert main(["prompts", "params/r.yaml", "--set", "prompts.path=none.jsonl"]) == 2
    assert "there is no file" in capsys.readouterr().err
