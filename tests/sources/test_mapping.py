"""What records of public sets mean, which turns are answered anew, and records of any other shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from dfexp.errors import PromptsError
from dfexp.layout import RunFolder
from dfexp.params_prompts import PromptsGroup
from dfexp.prompts import freeze
from tests.sources.support import DATA, read, report, said, write

PUBLIC = {
    "infinity_instruct": ["And at high water?", "Nenne drei Flüsse."],
    "web_instruct_sub": ["Why does a kite need a tail?"],
    "code_feedback": ["Sort this list of tides by height."],
    "metamath": ["A net holds 4 rows of 7 fish. How many fish?"],
    "openai_messages": ["Opposite of ebb?"],
    "sharegpt": ["What is a pier?", "Name a colour."],
}
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "u2"},
    {"role": "user", "content": "u3"},
    {"role": "assistant", "content": "a3"},
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_sets_need_no_parameters(name: str) -> None:
    assert said(DATA, path=f"{name}.jsonl") == PUBLIC[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_same_records_as_data_sets_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.jsonl").write_bytes((DATA / f"{name}.jsonl").read_bytes())
    if name == "sharegpt":  # its second record has other keys in its messages, which no typed column holds
        (tmp_path / name / "train.jsonl").write_bytes((DATA / f"{name}.jsonl").read_bytes().splitlines()[0])
    assert said(tmp_path, hf={"name": name}) == PUBLIC[name][: 1 if name == "sharegpt" else None]


def test_a_data_set_of_parquet_with_a_limit_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows = {"question": [f"q{n}" for n in range(30)], "answer": ["a"] * 30, "id": list(range(30))}
    pq.write_table(pa.table(rows), tmp_path / "set" / "train-00000-of-00001.parquet")
    found = report(tmp_path, hf={"name": "set"}, limit=7)
    assert found["sources"] == [{"path": "hf:set/train", "sha256": None, "rows": 7, "prompts": 7, "kept": 7}]
    with pytest.raises(
        PromptsError, match=r"cannot read the data set set \(config None, split test.*at all: ValueError"
    ):
        read(tmp_path, hf={"name": "set", "split": "test"})


def test_text_files_hold_one_prompt_a_line() -> None:
    assert said(DATA, path="plain.txt") == ["First line, a prompt.", "Second, after a blank one: größer?"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_unicode_encodings_are_known_by_how_a_file_begins(tmp_path: Path, encoding: str, name: str) -> None:
    texts = ["größer \U0001f600?", "zweite\u2028Zeile"]
    lines = texts if name == "p.txt" else [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    (tmp_path / name).write_bytes("\n".join(lines).replace("größer", "bigger größer").encode(encoding))
    assert said(tmp_path, path=name) == ["bigger größer \U0001f600?", "zweite\u2028Zeile"]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [(None, ["s u1 a1 u2 u3"]), ("last", ["s u1 a1 u2 u3"]), ("first", ["s u1"]), ("each", ["s u1", "s u1 a1 u2 u3"])],
)
def test_turns_that_are_answered_anew(tmp_path: Path, turns: str | None, expected: list[str]) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "x", "messages": CHAT}))
    found = read(tmp_path, path="p.jsonl", turns=turns)
    assert [" ".join(one["content"] for one in prompt.messages) for prompt in found] == expected
    assert [prompt.id for prompt in found] == (["x:1", "x:2"] if turns == "each" else ["x"])


def test_a_blank_turn_costs_itself_alone(tmp_path: Path) -> None:
    chat = [*CHAT[:3], {"role": "user", "content": " "}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": chat}))
    assert said(tmp_path, path="p.jsonl", turns="each") == ["u1"]
    with pytest.raises(PromptsError, match="1 x empty prompt"):
        read(tmp_path, path="p.jsonl")


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]}, "empty prompt"),
        ({"messages": [{"role": None, "from": "human", "content": None, "value": "v"}]}, None),
        ({"instruction": "do", "input": {"a": 1}}, "wrong type"),
        ({"instruction": "do", "input": 5}, None),
        ({"prompt": "do", "rules": ["x"]}, "wrong type"),
        ({"prompt": "do", "rules": ""}, None),
    ],
)
def test_what_is_no_text_is_never_made_one(tmp_path: Path, record: dict[str, Any], outcome: str | None) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a"}}\n{json.dumps(record)}\n')
    found = report(tmp_path, path="p.jsonl", system_column="rules")
    assert found["dropped_by_reason"] == ({outcome: 1} if outcome else {})


def test_parquet_with_a_text_that_is_not_utf8_costs_its_row_alone(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff\xfe", b"c"])
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"prompt": texts, "id": [1, 2, 3]}), tmp_path / "p.parquet")
    found = report(tmp_path, path="p.parquet")
    assert (found["asked"], [(drop["line"], drop["reason"]) for drop in found["dropped"]]) == (2, [(2, "not UTF-8")])


def test_parquet_with_values_that_python_lacks_is_an_error_in_words(tmp_path: Path) -> None:
    pq.write_table(pa.table({"at": pa.array([2**40], pa.timestamp("s"))}), tmp_path / "p.parquet")
    with pytest.raises(PromptsError, match=r"cannot read p\.parquet after row 0: date value out of range"):
        read(tmp_path, path="p.parquet")


def test_records_of_another_shape_are_mapped() -> None:
    keys: dict[str, Any] = {"column": "log", "id_column": "key", "system": "Be brief.", "system_column": "rules"}
    keys |= {"role_key": "who", "content_key": "said", "roles": {"visitor": "user", "guide": "assistant"}}
    first, second = read(DATA, path="mapped.jsonl", **keys)
    assert (first.id, [one["role"] for one in first.messages]) == ("m1", ["system", "user", "assistant", "user"])
    assert [prompt.messages[0]["content"] for prompt in (first, second)] == ["Be kind.", "Be brief."]
    with pytest.raises(PromptsError, match=r"message 1 has role 'visitor'; known: system, .*, model\n"):
        read(DATA, path="mapped.jsonl", **{**keys, "roles": None})


def test_each_source_may_have_its_own_mapping() -> None:
    sources = [{"path": "mapped.jsonl", "column": "log", "role_key": "who", "content_key": "said", "turns": "first"}]
    sources += [{"path": "openai_messages.jsonl"}]
    found = said(DATA, sources=sources, roles={"visitor": "user", "guide": "assistant"}, turns="last")
    assert sorted(found) == ["Opposite of ebb?", "When does the ferry leave?", "Where is the harbour?"]


def test_the_first_bad_record_is_fatal_where_that_is_asked() -> None:
    with pytest.raises(PromptsError, match=r"damaged\.jsonl:2: not valid JSON: .* prompts\.on_bad: skip\.$"):
        read(DATA, path="damaged.jsonl", on_bad="fail")


def test_what_is_left_out_on_purpose_is_no_bad_record(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", "a", "a", "too long")
    keys = {"duplicates": {"exact": True}, "filters": {"max_chars": 3}}
    assert said(tmp_path, path="p.jsonl", on_bad="fail", **keys) == ["a"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "give path, hf or sources: exactly one of the three"),
        ({"path": "p.jsonl", "sources": [{"path": "q.jsonl"}]}, "exactly one of the three"),
        ({"sources": [{"weight": 1.0}]}, "give path or hf: exactly one of the two"),
        ({"sources": [{"path": "p", "weight": 1.0, "count": 2}]}, "give weight or count, not both"),
        ({"path": "p.jsonl", "filters": {"max_tokens": 5}}, "each needs the other"),
        ({"path": "p.jsonl", "filters": {"tokenizer": "t"}}, "each needs the other"),
        ({"path": "p.jsonl", "filters": {"languages": ["English"]}}, "String should match pattern"),
    ],
)
def test_parameters_that_contradict_each_other(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PromptsGroup.model_validate(keys)


def test_prompts_of_earlier_versions_keep_their_bytes(tmp_path: Path) -> None:
    """The SHA-256 is part of a run's fingerprint: a run that an older version began must go on."""
    names = ["sharegpt.jsonl", "alpaca.jsonl", "damaged.jsonl", "bom_crlf.jsonl"]
    frozen = freeze(PromptsGroup(path=names, system="S"), DATA, RunFolder(tmp_path / "r"))
    assert frozen.sha256 == "d7b0a96afab5ec8b60c96597f5fe630abe1549f8d12ab0a05685e24d9e0c7937"
