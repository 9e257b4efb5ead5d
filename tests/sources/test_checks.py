"""Prompts that are left out: by length, language, and because they are there already."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from dfexp.errors import PromptsError
from dfexp.layout import RunFolder
from dfexp.params_prompts import PromptsGroup
from dfexp.prompts import freeze
from dfexp.sources.report import render
from tests.sources.support import DATA, read, report, said, write

LONG = (
    "The tide tables of the old harbour list for every day of the year when boats with a deep keel may leave the quay"
)


def test_lengths_in_characters(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", "ab", "abc", "abcd", "abcde")
    found = report(tmp_path, path="p.jsonl", filters={"min_chars": 3, "max_chars": 4})
    assert found["dropped_by_reason"] == {"too few characters": 1, "too many characters": 1}
    assert [(drop["line"], drop["detail"]) for drop in found["dropped"]] == [(1, "2 of 3"), (4, "5 of 4")]
    assert found["characters"]["sum"] == len("abc") + len("abcd")


def test_lengths_in_tokens_of_a_given_tokenizer(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"w": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(2)
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "p.jsonl", "w", "w x", "w x w", "w w w w")
    keys = {"tokenizer": "tokenizer.json", "min_tokens": 2, "max_tokens": 3}
    assert said(tmp_path, path="p.jsonl", filters=keys) == ["w x", "w x w"]
    with pytest.raises(
        PromptsError, match=r"prompts\.filters\.tokenizer = 'none\.json': .*No such file.*Check the path"
    ):
        read(tmp_path, path="p.jsonl", filters={**keys, "tokenizer": "none.json"})


def test_languages(tmp_path: Path) -> None:
    write(
        tmp_path / "p.jsonl",
        "Why is the sky\nred in the evening?",
        "Warum ist der Himmel abends rot?",
        "なぜ空は赤いのですか",
    )
    assert len(said(tmp_path, path="p.jsonl", filters={"languages": ["en", "ja"]})) == 2
    found = report(tmp_path, path="p.jsonl", filters={"languages": ["de"]})
    assert [drop["detail"][:3] for drop in found["dropped"]] == ["en:", "ja:"]


def test_a_missing_package_is_named_with_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "p.jsonl", "a")
    monkeypatch.setitem(__import__("sys").modules, "rensa", None)
    with pytest.raises(
        PromptsError, match=r"prompts\.duplicates\.near needs the package rensa.*pip install 'dfexp\[dedup\]'"
    ):
        read(tmp_path, path="p.jsonl", duplicates={"near": 0.8})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=40))
def test_exact_duplicates_are_counted_and_left_out_where_that_is_asked(tmp_path: Path, texts: list[str]) -> None:
    write(tmp_path / "p.jsonl", *texts)
    first = list(dict.fromkeys(texts))
    assert said(tmp_path, path="p.jsonl", duplicates={"exact": True}) == first
    assert said(tmp_path, path="p.jsonl") == texts
    counts = [report(tmp_path, path="p.jsonl", duplicates={"exact": exact}) for exact in (True, False)]
    assert counts[0]["dropped_by_reason"].get("repeated prompt", 0) == len(texts) - len(first)
    assert counts[1]["odd_by_reason"].get("repeats an earlier prompt", 0) == len(texts) - len(first)
    assert counts[1]["dropped_by_reason"] == {}


def test_prompts_that_differ_in_their_history_alone_are_no_duplicates(tmp_path: Path) -> None:
    chats = [[{"role": "system", "content": text}, {"role": "user", "content": "same"}] for text in "ab"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    assert len(said(tmp_path, path="p.jsonl", duplicates={"exact": True})) == 2


def test_similar_prompts_are_left_out_and_told_with_the_one_they_resemble(tmp_path: Path) -> None:
    japanese = "潮の満ち引きと月の動きの関係について、中学生にも分かるように三つの段落で丁寧に説明してください。"
    texts = [LONG, LONG.replace("old", "new"), LONG.upper() + "!", "short", japanese, japanese + "。", LONG[::-1]]
    write(tmp_path / "p.jsonl", *texts)
    found = report(tmp_path, path="p.jsonl", duplicates={"near": 0.6})
    assert [drop["line"] for drop in found["dropped"]] == [2, 3, 6]
    assert found["dropped"][0]["detail"].startswith("like p.jsonl:1: The tide")
    assert said(tmp_path, path="p.jsonl", duplicates={"near": 0.99})[:2] == texts[:2]


def test_what_a_run_or_a_file_has_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "old.jsonl", "a", "b", LONG)
    write(tmp_path / "more.jsonl", "c", "")
    write(tmp_path / "p.jsonl", "a", "c", "d", LONG + " again")
    system = {"system": "Be brief."}
    freeze(PromptsGroup(path="old.jsonl", **system), tmp_path, RunFolder(tmp_path / "outputs" / "old"))
    for run in ("old", "outputs/old", str(tmp_path / "outputs" / "old"), "old.jsonl"):
        keys = {"path": "p.jsonl", **system, "duplicates": {"not_in": [run, "more.jsonl"]}}
        assert said(tmp_path, **keys) == ["d", LONG + " again"]
    keys["duplicates"] = {"not_in": ["old", "more.jsonl"], "near": 0.7}
    assert said(tmp_path, **keys) == ["d"]
    with pytest.raises(PromptsError, match=r"not_in: 'none' is no file, and no run with prompts"):
        read(tmp_path, path="p.jsonl", duplicates={"not_in": "none"})


def test_signs_are_words_too(tmp_path: Path) -> None:
    texts = ["3+4", "3*4", "What is x^2 - 3x?", "What is x^2 + 3x?", "\U0001f989", "\U0001f40d", "!!!", "???"]
    write(tmp_path / "p.jsonl", *texts, "What is (x^2 - 3x)!", "???")
    found = report(tmp_path, path="p.jsonl", duplicates={"near": 1.0})
    assert [drop["line"] for drop in found["dropped"]] == [9, 10]


def test_an_other_set_may_have_our_shape_or_a_usual_one(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"log": text}) + "\n" for text in "abc"))
    (tmp_path / "old.jsonl").write_text(json.dumps({"log": "a"}))
    write(tmp_path / "usual.jsonl", "b")
    assert said(tmp_path, path="p.jsonl", column="log", duplicates={"not_in": ["old.jsonl", "usual.jsonl"]}) == ["c"]


def test_an_other_set_may_have_messages_of_our_keys_or_of_the_usual_ones(tmp_path: Path) -> None:
    def chats(name: str, role: str, content: str, *texts: str) -> None:
        rows = ({"chat": [{role: "user", content: text}]} for text in texts)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    chats("p.jsonl", "who", "what", "a", "b", "c", "d")
    chats("ours.jsonl", "who", "what", "a")
    chats("openai.jsonl", "role", "content", "b")
    chats("sharegpt.jsonl", "from", "value", "c")
    keys = {"path": "p.jsonl", "column": "chat", "role_key": "who", "content_key": "what"}
    others = ["ours.jsonl", "openai.jsonl", "sharegpt.jsonl"]
    assert said(tmp_path, **keys, duplicates={"not_in": others}) == ["d"]


def test_halves_of_characters_pass_every_check(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "p.jsonl", "Why is the sky red in the evening \ud83d", "two \ud83e\udd89")
    filters = {"tokenizer": "tokenizer.json", "max_tokens": 99, "languages": ["en"], "max_chars": 35}
    found = report(tmp_path, path="p.jsonl", filters=filters, duplicates={"near": 0.8})
    assert found["asked"] + sum(found["dropped_by_reason"].values()) == 2
    assert {drop["reason"] for drop in found["dropped"]} <= {"too many characters", "other language"}


def test_all_that_is_read_is_kept_or_told(tmp_path: Path) -> None:
    chat = [{"role": role, "content": f"{role} {turn}"} for turn in range(3) for role in ("user", "assistant")]
    records = [{"messages": chat}, {"messages": chat[:2]}, {"messages": []}, {"prompt": "abc"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    keys: dict[str, Any] = {"filters": {"max_chars": 20}, "duplicates": {"exact": True}}
    found = report(tmp_path, path="p.jsonl", turns="each", **keys)
    assert found["dropped_by_reason"] == {"too many characters": 2, "repeated prompt": 1, "no turn to answer": 1}
    assert found["sources"][0].items() >= {"rows": 4, "prompts": 6, "kept": 2}.items()


def test_what_is_odd_is_kept_counted_and_told_with_its_line(tmp_path: Path) -> None:
    records = [{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "ha" * 500_000}, {"prompt": "a"}, {"prompt": "\ud83d"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = report(tmp_path, path="p.jsonl")
    assert [(each["line"], each["reason"]) for each in found["odd"]] == [
        (2, "repeats an earlier id"),
        (2, "100,000 characters or more"),
        (3, "repeats an earlier prompt"),
        (4, "half of a character, replaced"),
    ]
    assert found["odd_by_reason"] == Counter(each["reason"] for each in found["odd"])
    assert (found["asked"], found["characters"]["most"]) == (4, 1_000_000)
    text = render(found)
    assert "kept, and worth a look: 4" in text
    assert "p.jsonl:2: '1,000,000: haha" in text


def test_a_report_for_people_has_every_number(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "a", "", "a")
    sources = [{"path": "a.jsonl", "count": 5}, {"path": "openai_messages.jsonl"}]
    (tmp_path / "openai_messages.jsonl").write_bytes((DATA / "openai_messages.jsonl").read_bytes())
    lines = render(report(tmp_path, sources=sources, duplicates={"exact": True})).splitlines()
    assert lines[0] == "2 prompts"
    assert "1 kept of 3 rows of a.jsonl" in lines[1]
    assert lines[3].strip() == "1 taken of 1 kept of a.jsonl, 4 FEWER than asked for"
    assert "left out: 2" in lines
    chat = {"messages": [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat))
    assert "2 kept of 2 prompts in 1 rows of chat.jsonl" in render(report(tmp_path, path="chat.jsonl", turns="each"))
    assert any("1 repeated prompt" in line for line in lines)
