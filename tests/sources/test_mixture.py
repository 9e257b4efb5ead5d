"""Mixtures: how many of each source, in which order, and the same for the same seed."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfexp.layout import RunFolder
from dfexp.params_prompts import PromptsGroup, SourcePart
from dfexp.prompts import freeze
from dfexp.sources.mixture import mixed, taken_of, wanted_of
from tests.sources.support import reading, report, said, write

Sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=5)


def weighted(*weights: float) -> list[SourcePart]:
    return [SourcePart(path=f"{n}.jsonl", weight=float(weight)) for n, weight in enumerate(weights)]


@given(Sizes, st.integers(1, 500))
def test_with_a_limit_shares_are_exact_and_what_one_lacks_is_nobody_elses(pairs: list[Any], limit: int) -> None:
    weights, there = zip(*pairs, strict=True)
    sources = weighted(*weights)
    wanted = wanted_of(sources, limit)
    assert sum(found or 0 for found in wanted) == limit
    assert all(
        abs(Fraction(limit * weight, sum(weights)) - (found or 0)) < 1
        for weight, found in zip(weights, wanted, strict=True)
    )
    assert taken_of(sources, wanted, there) == [min(pair) for pair in zip(wanted, there, strict=True)]


@given(Sizes)
def test_without_a_limit_the_first_that_runs_out_ends_all(pairs: list[Any]) -> None:
    weights, there = zip(*pairs, strict=True)
    sources = weighted(*weights)
    taken = taken_of(sources, wanted_of(sources, None), there)
    scale = min((Fraction(size, weight) for weight, size in pairs if size), default=Fraction(0))
    assert taken == [int(scale * weight) if size else 0 for weight, size in pairs]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.data())
def test_any_beginning_of_a_mixture_has_the_shares_of_the_whole(taken: list[int], data: st.DataObject) -> None:
    keys = [data.draw(st.lists(st.floats(0, 1), min_size=take, max_size=take + 5)) for take in taken]
    random = [data.draw(st.booleans()) for _ in taken]
    order = mixed(keys, taken, random).tolist()
    assert len(set(order)) == len(order) == sum(taken)
    owners = [number for number, own in enumerate(keys) for _ in own]
    found: Counter[int] = Counter()
    for length, position in enumerate(order, 1):
        found[owners[position]] += 1
        assert all(abs(found[n] - take * length / sum(taken)) <= len(taken) for n, take in enumerate(taken))
    for number, own in enumerate(keys):
        base = owners.index(number) if own else 0
        of_one = [position - base for position in order if owners[position] == number]
        by_key = sorted(range(len(own)), key=own.__getitem__) if random[number] else list(range(len(own)))
        assert of_one == by_key[: taken[number]]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 30), min_size=2, max_size=3), st.integers(0, 5), st.integers(1, 60))
def test_a_mixture_is_reproducible_and_its_counts_are_those_of_its_report(
    tmp_path: Path, sizes: list[int], seed: int, limit: int
) -> None:
    for n, size in enumerate(sizes):
        write(tmp_path / f"{n}.jsonl", *(f"{n} {row}" for row in range(size)))
    keys = {
        "sources": [{"path": f"{n}.jsonl", "weight": n + 1.0} for n in range(len(sizes))],
        "limit": limit,
        "seed": seed,
    }
    found = said(tmp_path, **keys)
    assert found == said(tmp_path, **keys)
    assert len(set(found)) == len(found)
    taken = Counter(text.split()[0] for text in found)
    assert [taken[str(n)] for n in range(len(sizes))] == [each["taken"] for each in report(tmp_path, **keys)["mixture"]]


def test_counts_and_weights_and_all_of_a_source(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", *(f"{name}{row}" for row in range(20)))
    sources = [{"path": "a.jsonl", "count": 5}, {"path": "b.jsonl", "count": 50, "draw": "first"}, {"path": "c.jsonl"}]
    found = reading(tmp_path, sources=sources)
    texts = [prompt.messages[-1]["content"] for prompt in found]
    assert Counter(text[0] for text in texts) == {"a": 5, "b": 20, "c": 20}
    assert [text for text in texts if text[0] == "b"] == [f"b{row}" for row in range(20)]
    assert [text for text in texts if text[0] == "c"] != [f"c{row}" for row in range(20)]
    assert [(each["wanted"], each["kept"], each["taken"]) for each in found.report()["mixture"]] == [
        (5, 20, 5),
        (50, 20, 20),
        (None, 20, 20),
    ]


def test_what_a_limit_cuts_off_was_not_taken(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", *(f"{name}{row}" for row in range(20)))
    found = reading(tmp_path, sources=[{"path": "a.jsonl", "count": 15}, {"path": "b.jsonl"}], limit=14)
    texts = Counter(prompt.messages[-1]["content"][0] for prompt in found)
    assert [texts["a"], texts["b"]] == [each["taken"] for each in found.report()["mixture"]] == [6, 8]


def test_a_source_that_is_drawn_from_its_beginning_is_read_no_further(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *map(str, range(100)))
    found = report(tmp_path, sources=[{"path": "a.jsonl", "count": 3, "draw": "first"}])
    assert found["sources"][0]["rows"] == 3


def test_a_random_part_of_one_file_depends_on_the_seed_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *map(str, range(100)))
    drawn = [said(tmp_path, path="a.jsonl", draw="random", limit=10, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) < set(map(str, range(100)))


def test_lines_of_a_mixture_are_those_of_prompts_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"id": "\\ud83d \\u0000", "prompt": "half \\ud83d \\"messages\\":["}\n{"prompt": "none"}'
    )
    folder = RunFolder(tmp_path / "outputs" / "r")
    frozen = freeze(PromptsGroup(sources=[SourcePart(path="a.jsonl")]), tmp_path, folder)
    records = [json.loads(line) for line in folder.prompts.read_bytes().splitlines()]
    assert [record["index"] for record in records] == [0, 1]
    assert sorted(record["messages"][0]["content"] for record in records) == ['half \ufffd "messages":[', "none"]
    assert {record["id"] for record in records} & {"\ufffd \u0000"}
    assert frozen.odd_by_reason == {"half of a character, replaced": 1}


@pytest.mark.parametrize("limit", [None, 1])
def test_sources_without_anything_are_left_out_of_the_weights(tmp_path: Path, limit: int | None) -> None:
    write(tmp_path / "a.jsonl", "a")
    write(tmp_path / "b.jsonl", " ")
    sources = [{"path": "a.jsonl", "weight": 5.0}, {"path": "b.jsonl", "weight": 1.0}]
    assert said(tmp_path, sources=sources, limit=limit) == ["a"]
