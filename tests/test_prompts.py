from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfexp.errors import CorruptShardError, FingerprintError, PromptsError, StorageError
from dfexp.jsonl import decode_line
from dfexp.layout import RunFolder
from dfexp.params import PromptsGroup
from dfexp.prompts import Frozen, FrozenPrompts, freeze, read
from dfexp.records import Prompt
from tests.shards.os_tap import RefuseAt, tapped

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data" / "prompts"


def group(path: str | list[str] = "p.jsonl", **keys: Any) -> PromptsGroup:
    return PromptsGroup.model_validate({"path": path, **keys})


def write(root: Path, *records: object, name: str = "p.jsonl") -> None:
    (root / name).write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))


def prompts(root: Path, *records: object, **keys: Any) -> list[Prompt]:
    write(root, *records)
    return list(read(group(**keys), root))


def texts(found: Iterable[Prompt]) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in found]


def frozen(root: Path, what: PromptsGroup, run: str = "run") -> tuple[Frozen, RunFolder]:
    folder = RunFolder(root / "outputs" / run)
    return freeze(what, root, folder), folder


# ------------------------------------------------------------------------------------------- what a record means


@pytest.mark.parametrize("field", ["messages", "conversations", "prompt", "instruction", "question", "query", "text"])
def test_prompt_is_found_by_the_name_of_its_field(tmp_path: Path, field: str) -> None:
    value = "hello" if field not in ("messages", "conversations") else [{"role": "user", "content": "hello"}]
    (prompt,) = prompts(tmp_path, {"other": 1, field: value})
    assert prompt == Prompt(index=0, id="0", messages=({"role": "user", "content": "hello"},))


def test_sharegpt_roles_become_openai_roles_and_the_last_answer_is_left_out() -> None:
    first, second = read(group("sharegpt.jsonl"), DATA)
    assert first.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "What is a pier?"},
    )
    assert second.messages == ({"role": "user", "content": "Name a colour."},)


def test_instruction_takes_its_input_along_and_beats_text_which_repeats_the_answer() -> None:
    assert texts(read(group("alpaca.jsonl"), DATA)) == ["Translate into French.\n\nbread", "Name a river."]


def test_named_column_beats_the_usual_names(tmp_path: Path) -> None:
    assert texts(prompts(tmp_path, {"prompt": "no", "task": "yes"}, column="task")) == ["yes"]


def test_system_is_put_only_before_prompts_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    first, second = prompts(tmp_path, {"prompt": "a"}, {"messages": own}, system="given")
    assert first.messages == ({"role": "system", "content": "given"}, {"role": "user", "content": "a"})
    assert list(second.messages) == own


def test_only_known_fields_of_a_message_are_kept_and_null_ones_are_not(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": "{}"}}
    (prompt,) = prompts(
        tmp_path,
        {
            "messages": [
                {"role": "user", "content": "tide?", "name": "sea", "timestamp": 5, "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": [{"type": "text", "text": "high"}], "tool_call_id": "c1"},
            ]
        },
    )
    assert prompt.messages == (
        {"role": "user", "content": "tide?", "name": "sea"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "high"}], "tool_call_id": "c1"},
    )


def test_id_is_the_named_field_else_id_else_the_index(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "id": "x", "key": 7},
        {"prompt": "b", "id": None},
        {"prompt": "c", "id": ["odd"], "key": ""},
    ]
    assert [prompt.id for prompt in prompts(tmp_path, *rows)] == ["x", "1", "2"]
    assert [prompt.id for prompt in prompts(tmp_path, *rows, id_column="key")] == ["7", "1", "2"]


# ------------------------------------------------------------------------------------------- files as they come


def test_bom_crlf_blank_lines_and_line_separators_inside_a_text() -> None:
    reading = read(group("bom_crlf.jsonl"), DATA)
    assert texts(reading) == ["Größe?", "zwei\u2028Zeilen"]
    assert not reading.dropped.by_reason
    assert reading.sources[0]["rows"] == 2


def test_every_kind_of_damage_is_dropped_with_its_line_and_never_fatal() -> None:
    reading = read(group("damaged.jsonl"), DATA)
    assert [prompt.id for prompt in reading] == ["good-1", "good-2"]
    assert [(drop["line"], drop["reason"]) for drop in reading.dropped.examples] == [
        (2, "not valid JSON"),
        (3, "not a JSON object"),
        (4, "not UTF-8"),
        (6, "empty prompt"),
        (7, "no prompt field"),
        (8, "wrong type"),
        (9, "unknown role"),
        (10, "wrong type"),
        (11, "no turn to answer"),
        (12, "no turn to answer"),
        (13, "wrong type"),
        (14, "wrong type"),
        (15, "not valid JSON"),
        (16, "not UTF-8"),
    ]
    assert reading.dropped.by_reason == Counter(drop["reason"] for drop in reading.dropped.examples)
    assert {drop["source"] for drop in reading.dropped.examples} == {"damaged.jsonl"}
    assert "role 'robot'" in reading.dropped.examples[6]["detail"]
    assert reading.sources[0]["rows"] == 16


def test_details_of_drops_are_bounded_and_their_counts_complete(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "a"}, *[{"prompt": ""}] * 2500)
    result, _ = frozen(tmp_path, group())
    assert result.dropped_by_reason == {"empty prompt": 2500}
    assert len(result.dropped) == 100
    assert json.loads(json.dumps(result.to_json()))["dropped"][0] == {
        "source": "p.jsonl",
        "line": 2,
        "reason": "empty prompt",
        "detail": "prompt is blank",
    }


def test_gzip_parquet_and_plain_files_are_read_in_the_order_given(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "plain"})
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "zipped"}\n'))
    pq.write_table(pa.table({"question": ["columns", None], "answer": ["x", "y"]}), tmp_path / "t.parquet")
    reading = read(group(["t.parquet", "p.jsonl", "z.jsonl.gz"]), tmp_path)
    assert texts(reading) == ["columns", "plain", "zipped"]
    assert [(source["path"], source["rows"]) for source in reading.sources] == [
        ("t.parquet", 2),
        ("p.jsonl", 1),
        ("z.jsonl.gz", 1),
    ]
    assert [(drop["line"], drop["reason"]) for drop in reading.dropped.examples] == [(2, "no prompt field")]


def test_parquet_chats_of_several_row_groups_with_struct_columns(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"q{row}", "name": None}] for row in range(1000)]
    table = pa.table({"messages": chats, "id": list(range(1000)), "label": ["x"] * 1000})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=300)
    found = list(read(group("t.parquet"), tmp_path))
    assert texts(found) == [f"q{row}" for row in range(1000)]
    assert found[999].id == "999"
    assert found[999].messages == ({"role": "user", "content": "q999"},)


def test_lone_surrogates_are_repaired(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "half \\ud83d"}\n{"prompt": "whole \\ud83d\\ude00"}\n')
    _, folder = frozen(tmp_path, group())
    with FrozenPrompts(folder.prompts) as back:
        assert texts(back[i] for i in range(2)) == ["half \ufffd", "whole \U0001f600"]


def test_a_prompt_of_a_megabyte_is_kept(tmp_path: Path) -> None:
    assert [len(text) for text in texts(prompts(tmp_path, {"prompt": "x" * 1_000_000}))] == [1_000_000]


def test_limit_counts_usable_prompts_and_reads_no_further(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": ""}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    write(tmp_path, {"prompt": "d"}, name="q.jsonl")
    reading = read(group(["p.jsonl", "q.jsonl"], limit=2), tmp_path)
    assert texts(reading) == ["a", "b"]
    assert [(source["path"], source["rows"]) for source in reading.sources] == [("p.jsonl", 3)]


def test_equal_prompts_and_equal_ids_are_kept(tmp_path: Path) -> None:
    write(tmp_path, *[{"id": "same", "prompt": "p"}] * 3, {"id": "other", "prompt": "p"})
    result, _ = frozen(tmp_path, group())
    assert result.asked == 4


def test_absolute_paths_need_no_root(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "a"})
    assert texts(read(group(str(tmp_path / "p.jsonl")), Path("/nowhere"))) == ["a"]


# ------------------------------------------------------------------------------------------- what is fatal


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("p.josnl", r"'p\.josnl': there is no file .*p\.josnl\. Check the path"),
        ("folder", r"'folder': files must end in \.jsonl, \.jsonl\.gz, \.parquet"),
        ("p.json", r"'p\.json': files must end in \.jsonl, \.jsonl\.gz, \.parquet"),
        ("cut.jsonl.gz", r"cannot read cut\.jsonl\.gz after row \d+: Compressed file ended"),
        ("bad.parquet", r"cannot read bad\.parquet after row 0: .*Parquet"),
        ("empty.jsonl", r"no usable prompt in empty\.jsonl \(no rows\)\. Check the source"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_fix(tmp_path: Path, path: str, message: str) -> None:
    write(tmp_path, {"prompt": "a"})
    (tmp_path / "folder").mkdir()
    write(tmp_path, {"prompt": "a"}, name="folder/in.jsonl")
    write(tmp_path, {"prompt": "a"}, name="p.json")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-12])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but no more")
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(PromptsError, match=message):
        frozen(tmp_path, group(path))
    assert not list((tmp_path / "outputs").rglob("*.*"))


def test_no_usable_prompt_says_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(PromptsError) as caught:
        prompts(tmp_path, {"completion": "x", "source": "y"}, {"completion": "z"})
    assert "no usable prompt in p.jsonl (2 x no prompt field). Name its field with prompts.column." in str(caught.value)
    assert "\n  p.jsonl:1: no prompt field: no messages or conversations or" in str(caught.value)
    assert "text; found completion, source\n" in str(caught.value)


@pytest.mark.parametrize("name", ["p.jsonl", "t.parquet"])
@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("column", r"no usable prompt in \S+ \(1 x no prompt field\)[^~]*no promt; found prompt, uuid"),
        ("id_column", r"prompts\.id_column = 'promt': no row of \S+ has that field"),
    ],
)
def test_a_named_column_that_no_row_has_is_an_error(tmp_path: Path, name: str, key: str, message: str) -> None:
    write(tmp_path, {"prompt": "a", "uuid": "1"})
    pq.write_table(pa.table({"prompt": ["a"], "uuid": ["1"]}), tmp_path / "t.parquet")
    with pytest.raises(PromptsError, match=message):
        list(read(group(name, **{key: "promt"}), tmp_path))


def test_a_column_that_some_rows_have_costs_only_the_others(tmp_path: Path) -> None:
    write(tmp_path, {"task": "a"}, {"prompt": "b"})
    reading = read(group(column="task"), tmp_path)
    assert texts(reading) == ["a"]
    assert reading.dropped.examples[0]["detail"] == "no task; found prompt"


def test_what_json_cannot_carry_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hi", "name": NaN}], "score": NaN}')
    with pytest.raises(PromptsError, match=r"p\.jsonl:1: cannot be written as JSON: Out of range float"):
        frozen(tmp_path, group())
    assert not list((tmp_path / "outputs").rglob("*.*"))


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    running = iter(read(group(), tmp_path))
    next(running)
    write(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    with pytest.raises(PromptsError, match=r"p\.jsonl changed while it was read"):
        list(running)


# ------------------------------------------------------------------------------------------- freezing


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=8), st.data())
def test_any_text_survives_freezing_unchanged(tmp_path: Path, found: list[str], data: st.DataObject) -> None:
    kept = [text for text in found if text.strip()] or ["x"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=data.draw(st.booleans())) for text in kept]
    (tmp_path / "p.jsonl").write_bytes("\n".join(lines).encode())
    folder = RunFolder(tmp_path / "outputs" / "run")
    folder.prompts.unlink(missing_ok=True)
    result = freeze(group(), tmp_path, folder)
    with FrozenPrompts(folder.prompts, asked=result.asked, sha256=result.sha256) as back:
        assert texts(back[index] for index in range(len(back))) == kept
    raw = folder.prompts.read_bytes()
    assert (raw.isascii(), raw.count(b"\n")) == (True, len(kept))


def test_line_i_of_the_frozen_file_is_index_i(tmp_path: Path) -> None:
    write(tmp_path, {"id": "a", "prompt": "1"}, {"prompt": ""}, {"id": "c", "prompt": "2"})
    result, folder = frozen(tmp_path, group())
    assert [decode_line(line) for line in folder.prompts.read_bytes().splitlines()] == [
        {"index": 0, "id": "a", "messages": [{"role": "user", "content": "1"}]},
        {"index": 1, "id": "c", "messages": [{"role": "user", "content": "2"}]},
    ]
    assert result.asked == 2
    assert not list(folder.path.glob(".*"))


def test_freezing_again_succeeds_with_the_same_prompts_and_never_replaces_others(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "a"})
    first, folder = frozen(tmp_path, group())
    assert frozen(tmp_path, group())[0] == first
    write(tmp_path, {"prompt": "b"})
    with pytest.raises(FingerprintError, match=r"holds other prompts .* left as it is"):
        frozen(tmp_path, group())
    assert texts(FrozenPrompts(folder.prompts)[i] for i in range(1)) == ["a"]
    assert {path.name for path in folder.path.iterdir()} == {"prompts.jsonl", "prompts_report.json"}


def test_a_killed_freeze_leaves_no_half_file_and_the_next_one_succeeds(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")  # a source that never ends: the freeze is in the middle whenever it is killed
    code = """
import sys
from pathlib import Path
from dfexp.layout import RunFolder
from dfexp.params import PromptsGroup
from dfexp.prompts import freeze
freeze(PromptsGroup(path="p.jsonl"), Path(sys.argv[1]), RunFolder(Path(sys.argv[1]) / "outputs" / "run"))
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    with (tmp_path / "p.jsonl").open("wb") as pipe:
        for index in range(20_000):
            pipe.write(json.dumps({"prompt": f"prompt {index} " + "x" * 200}).encode() + b"\n")
        pipe.flush()
        process.kill()
        process.wait()
    folder = tmp_path / "outputs" / "run"
    assert [path.suffix for path in folder.iterdir()] == [".tmp"]
    (tmp_path / "p.jsonl").unlink()
    write(tmp_path, {"prompt": "a"})
    assert frozen(tmp_path, group())[0].asked == 1
    assert {path.name for path in folder.iterdir()} == {"prompts.jsonl", "prompts_report.json"}


def test_a_disk_that_refuses_any_call_is_a_storage_error_and_the_next_freeze_succeeds(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "a"})
    nth, refusal, seen = 0, None, set[str]()
    while refusal is None or refusal.refused:
        nth += 1
        folder, refusal = RunFolder(tmp_path / "outputs" / str(nth)), RefuseAt(nth, code=errno.ENOSPC)
        words = ""
        with tapped(refusal):
            try:
                freeze(group(), tmp_path, folder)
            except StorageError as error:
                words = str(error)
        assert not words or re.search(r"cannot write .*prompts(\.jsonl|_report\.json): No space left on device", words)
        seen |= set(refusal.refused)
        assert not list(folder.path.glob("*.tmp"))
        assert freeze(group(), tmp_path, folder).asked == 1
        assert {path.name for path in folder.path.iterdir()} == {"prompts.jsonl", "prompts_report.json"}
    assert seen >= {"open", "write", "fsync", "replace", "unlink"}


# ------------------------------------------------------------------------------------------- reading back


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path, *({"id": f"p{index}", "prompt": f"text {index}"} for index in range(100)))
    return frozen(tmp_path, group())[1].prompts


def test_random_access_from_many_threads(path: Path) -> None:
    wrong: list[int] = []
    with FrozenPrompts(path) as back:

        def look(start: int) -> None:
            wrong.extend(i for i in range(start, 100, 3) if back[i].messages[0]["content"] != f"text {i}")

        threads = [threading.Thread(target=look, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert back[99].id == "p99"
        for outside in (-1, 100):
            with pytest.raises(IndexError):
                back[outside]
    assert not wrong


@pytest.mark.parametrize("damage", ["cut", "line gone", "line twice", "byte changed"])
def test_a_frozen_file_that_is_not_what_run_json_says_is_refused(path: Path, damage: str) -> None:
    data = path.read_bytes()
    asked, sha256 = 100, hashlib.sha256(data).hexdigest()
    with FrozenPrompts(path, asked=asked, sha256=sha256) as back:
        assert len(back) == asked
    first = data[: data.index(b"\n") + 1]
    changed = {
        "cut": data[:-5],
        "line gone": data[len(first) :],
        "line twice": first + data,
        "byte changed": data.replace(b"text 50", b"text 51"),
    }[damage]
    path.write_bytes(changed)
    with pytest.raises(CorruptShardError, match="Restore it from a copy"):
        FrozenPrompts(path, asked=asked, sha256=sha256)


def test_a_line_that_was_damaged_after_opening_is_named(path: Path) -> None:
    with FrozenPrompts(path) as back:
        path.write_bytes(path.read_bytes().replace(b'{"index":7,', b'x"index":7,'))
        with pytest.raises(CorruptShardError, match=r"prompts\.jsonl:8 is not a record"):
            back[7]


def test_a_frozen_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptShardError, match="No such file"):
        FrozenPrompts(tmp_path / "prompts.jsonl")


# ------------------------------------------------------------------------------------------- the demo's prompts


def test_the_demo_prompts_are_varied_and_awkward_where_they_say_so(tmp_path: Path) -> None:
    path = ROOT / "params" / "prompts" / "varied.jsonl"
    records = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    ids = [record["id"] for record in records]
    assert len(records) >= 220
    assert len(set(ids)) == len(ids)
    assert len({name.split("-")[1] for name in ids if name.startswith("language-")}) >= 10
    result, folder = frozen(tmp_path, group(str(path)))
    assert dict(result.dropped_by_reason) == {"empty prompt": 1}
    assert result.asked == len(records) - 1
    with FrozenPrompts(folder.prompts, asked=result.asked, sha256=result.sha256) as back:
        found = [back[index] for index in range(len(back))]
    sizes = Counter({prompt.id: sum(len(message["content"]) for message in prompt.messages) for prompt in found})
    (longest, size), (_, second) = sizes.most_common(2)
    assert (longest, size > 15_000, second < 2_000) == ("too-long-001", True, True)
    repeated = Counter(json.dumps(prompt.messages) for prompt in found)
    assert sum(count == 2 for count in repeated.values()) == 2
    assert any("\u2028" in prompt.messages[-1]["content"] for prompt in found)
