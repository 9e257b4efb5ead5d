"""Sets as files: read back with `datasets`, merged, split, and never in the place of anything."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dfexp import cli, shards
from dfexp.errors import CorruptShardError, ExportError, ParamsError, StorageError
from dfexp.export import Made, Options, export
from dfexp.layout import RunFolder
from dfexp.quality import MARKS, Thresholds
from tests.finished_run import failure, row, write_run

WORDS = [f"w{number * number}" for number in range(900)]

THOUGHT = "<think>\nwhy\n</think>\n\nso"
ODD = "\u2028 \u0085 \x0c \r\n \t \0 \ufffd 漢字 🦉 \\ud800 \"quoted\" {'a': 1}"
LOADED = """
import json, sys
import datasets
datasets.disable_progress_bars()
sets = [datasets.load_dataset(*source) for source in json.loads(sys.argv[1])]
print(json.dumps([{split: list(rows) for split, rows in one.items()} for one in sets]))
"""


def load(tmp_path: Path, *sources: Sequence[str | None]) -> list[dict[str, list[dict[str, Any]]]]:
    """What `datasets.load_dataset` reads, in a process of its own: it reads its settings when it is imported."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-c", LOADED, json.dumps(sources)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, list[dict[str, Any]]]] = json.loads(done.stdout)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def made_from(folder: RunFolder, to: Path, **options: Any) -> Made:
    limits = {name: options.pop(name) for name in ("rejected", "tokens", "repeated", "sigmas") if name in options}
    return export(folder, to, Options(thresholds=Thresholds(**limits), **options))


def test_rows_come_by_index_from_sealed_shards_and_the_open_one(tmp_path: Path) -> None:
    order = [7, 3, 8, 0, 5, 1, 2]  # the last three are in the open shard while the run goes on
    folder = write_run(tmp_path, [], asked=9)
    with shards.Shards.open(folder.completions, total=9, fingerprint={"prompts": "aa", "model": "bb", "sampling": "cc"},
                            rows_per_shard=4) as writer:  # fmt: skip
        writer.commit([row(index) for index in order], [failure(4)])
        made = made_from(folder, tmp_path / "set.jsonl")
        writer.seal()
    assert [line["id"] for line in lines(tmp_path / "set.jsonl")] == [f"demo-{index}" for index in sorted(order)]
    assert (made.rows["done"], made.rows["good"], made.counts["Failed"]) == (7, 7, {"prompt_too_long": 1})
    card = (tmp_path / "README.md").read_text()
    assert "| done | 7 |\n| good | 7 |\n| rejected | 0 |\n| failed | 1 |\n| still to be done | 1 |" in card
    assert made_from(folder, tmp_path / "later" / "set.jsonl").written == {"train": 7}
    assert (tmp_path / "later" / "set.jsonl").read_bytes() == (tmp_path / "set.jsonl").read_bytes()


def test_a_shard_that_is_sealed_between_the_passes_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, [], asked=3)
    prints = {"prompts": "aa", "model": "bb", "sampling": "cc"}
    writer = shards.Shards.open(folder.completions, total=3, fingerprint=prints, rows_per_shard=500)
    writer.commit([row(2), row(0)], [])
    read_failures = shards.read_failures  # the last that the first pass does

    def then_seal(completions: Path) -> Any:
        yield from read_failures(completions)
        writer.seal()

    monkeypatch.setattr(shards, "read_failures", then_seal)
    assert made_from(folder, tmp_path / "set.jsonl").written == {"train": 2}
    assert not list(folder.completions.glob("*.partial"))


@pytest.mark.slow
def test_datasets_reads_every_format(tmp_path: Path) -> None:
    """Texts that break careless readers come back as they were; the folder of a set is a data set with splits."""
    rows = [row(i, text=THOUGHT + ODD, messages=({"role": "user", "content": f"{i} {ODD}"},)) for i in range(60)]
    rows += [row(60, text="")]
    folder = write_run(tmp_path, rows, [failure(61)], rows_per_shard=50)
    names = {"c.jsonl": "conversations", "m.messages.jsonl": "messages", "p.parquet": "messages"}
    made = [made_from(folder, tmp_path / name[0] / name, thinking="apart", validation=0.3) for name in names]
    all_found = load(tmp_path, *([str(tmp_path / name[0])] for name in names))
    for key, each, found in zip(names.values(), made, all_found, strict=True):
        assert {split: len(kept) for split, kept in found.items()} == each.written
        assert each.written["validation"] > 5
        both = sorted((line for kept in found.values() for line in kept), key=lambda line: int(line["id"][5:]))
        assert [line["id"] for line in both] == [f"demo-{i}" for i in range(60)]
        for i, line in enumerate(both):
            asked, answer = line[key]
            assert (asked["role"], asked["content"]) == ("user", f"{i} {ODD}")
            assert answer == {"role": "assistant", "content": f"so{ODD}", "reasoning_content": "why"}
    facts = {"run": "demo", "index": 59, "prompt_id": "p59", "completion_tokens": 10, "flags": ""}
    assert facts.items() <= both[59].items()


@pytest.mark.slow
def test_datasets_infers_one_type_however_late_the_first_thought_comes(tmp_path: Path) -> None:
    """It infers types from the first ten megabytes; what differs in kind after them is an error or spoils the text."""
    part = [{"type": "text", "text": "q"}]
    rows = [row(i, text="x y z " * 10_000 + str(i)) for i in range(200)]
    rows += [row(200, text=THOUGHT, messages=({"role": "user", "content": part, "name": "late"},))]
    folder = write_run(tmp_path, rows, rows_per_shard=500)
    to = tmp_path / "set.jsonl"
    made_from(folder, to, thinking="apart", rejected=frozenset({*MARKS} - {"garbage"}))
    (found,) = load(tmp_path, ["json", None, None, str(to)])
    assert found["train"][200]["conversations"] == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "so", "reasoning_content": "why"},
    ]


def test_defaults_keep_what_a_drafter_can_learn_from(tmp_path: Path) -> None:
    cut: dict[str, Any] = {"finish_reason": "length"}
    rows = [row(0), row(1, text="<think>\nso", **cut), row(2, text="an answer,", **cut), row(3, text=""),
            row(4, flags=("simulated",)), row(5, finish_reason="abort")]  # fmt: skip
    folder = write_run(tmp_path, rows)
    made = made_from(folder, tmp_path / "a" / "set.jsonl")
    assert [line["id"] for line in lines(tmp_path / "a" / "set.jsonl")] == ["demo-0", "demo-2"]
    assert made.rows == {"done": 6, "good": 2, "rejected": 4}
    found = ("unclosed_thought", "empty", "garbage", "simulated", "unknown_end")
    assert made.counts["Rejected"] == dict.fromkeys(found, 1)  # no text for ten tokens is garbage too
    stricter = made_from(
        folder, tmp_path / "b" / "set.jsonl", rejected=frozenset({*MARKS, "truncated"} - {"simulated"})
    )
    assert [line["id"] for line in lines(stricter.files["train"])] == ["demo-0", "demo-4"]
    with pytest.raises(ExportError, match=r"no row .* too_short"):
        made_from(folder, tmp_path / "c" / "set.jsonl", tokens=(11, None))
    assert not (tmp_path / "c").exists()


def test_a_row_never_changes_its_side_when_the_run_grows_and_equal_prompts_share_one(tmp_path: Path) -> None:
    rows = [row(i, messages=({"role": "user", "content": f"question {i % 50}"},)) for i in range(100)]
    early = made_from(write_run(tmp_path / "1", rows[:40], asked=100), tmp_path / "1" / "set.jsonl", validation=0.3)
    late = made_from(write_run(tmp_path / "2", rows), tmp_path / "2" / "set.jsonl", validation=0.3)
    for split in ("train", "validation"):
        ids = {line["id"] for line in lines(late.files[split])}
        assert {line["id"] for line in lines(early.files[split])} <= ids
        assert all(f"demo-{(int(name[5:]) + 50) % 100}" in ids for name in ids)
    assert late.written["validation"] > 5


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_merging_adds_what_is_not_there_and_leaves_the_earlier_set_alone(tmp_path: Path, suffix: str) -> None:
    folder = write_run(tmp_path, [row(i, text=THOUGHT) for i in range(30)], asked=40)
    options: dict[str, Any] = {"validation": 0.3, "thinking": "apart"}
    first = made_from(folder, tmp_path / "a" / f"set{suffix}", **options, licenses={"": "mit"})
    before = {path: path.read_bytes() for path in first.files.values()}
    more = write_run(tmp_path / "grown", [row(i, text=THOUGHT) for i in reversed(range(40))], asked=40)
    merged = made_from(more, tmp_path / "b" / f"set{suffix}", **options, merge=first.files["train"])
    assert {path: path.read_bytes() for path in before} == before
    assert (merged.rows["merged"], merged.rows["already there"]) == (30, 30)
    straight = made_from(more, tmp_path / "c" / f"set{suffix}", **options)
    for split in ("train", "validation"):
        assert merged.files[split].read_bytes() == straight.files[split].read_bytes()
    assert "license: mit" in (tmp_path / "a" / "README.md").read_text()
    assert "Their card:\n\n# demo" in (tmp_path / "b" / "README.md").read_text()


def test_a_prompt_of_the_earlier_set_keeps_its_side_whatever_the_share(tmp_path: Path) -> None:
    first = made_from(
        write_run(tmp_path / "1", [row(i) for i in range(40)]), tmp_path / "a" / "set.jsonl", validation=0.3
    )
    other = write_run(tmp_path / "2", [row(i, text="other") for i in range(60)], name="other")
    both = made_from(other, tmp_path / "b" / "set.jsonl", merge=first.files["train"], validation=0.6)
    sides = [{line["conversations"][0]["content"] for line in lines(both.files[split])} for split in both.written]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 60
    with pytest.raises(
        ParamsError, match=r"set\.validation\.jsonl is for validation.*Name the whole set: .*a/set\.jsonl"
    ):
        made_from(other, tmp_path / "c" / "set.jsonl", merge=first.files["validation"])


def test_a_licence_of_no_source_is_told(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"a licence for 'a\.jsonl', no source of the run: "):
        made_from(write_run(tmp_path, [row(0)]), tmp_path / "set.jsonl", licenses={"a.jsonl": "mit"})


def test_another_run_of_the_same_name_cannot_clash(tmp_path: Path) -> None:
    first = made_from(write_run(tmp_path / "1", [row(0), row(1)]), tmp_path / "1" / "set.jsonl")
    other = write_run(tmp_path / "2", [row(0, text="another"), row(1)])
    to = tmp_path / "2" / "set.jsonl"
    with pytest.raises(ExportError, match=r"another chat under the id 'demo-0'.*--name"):
        made_from(other, to, merge=first.files["train"])
    assert sorted(path.name for path in to.parent.iterdir()) == ["outputs"]
    made_from(other, to, merge=first.files["train"], name="second")
    assert [line["id"] for line in lines(to)] == ["demo-0", "demo-1", "second-0", "second-1"]


def test_a_set_with_its_thoughts_elsewhere_is_not_merged_though_its_rows_look_alike(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [row(0, text=THOUGHT)])
    old = made_from(folder, tmp_path / "a" / "set.jsonl").files["train"]
    with pytest.raises(ParamsError, match="has thoughts inline, as its card says: use --thinking inline"):
        made_from(folder, tmp_path / "b" / "set.jsonl", merge=old, name="more", thinking="dropped")
    (tmp_path / "a" / "README.md").unlink()
    made_from(folder, tmp_path / "b" / "set.jsonl", merge=old, name="more", thinking="dropped")


def test_a_parquet_set_is_called_so_where_lines_are_wanted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [row(0)])
    old = made_from(folder, tmp_path / "a" / "set.parquet").files["train"]
    with pytest.raises(
        ExportError, match=r"set\.parquet: it is Parquet\. Name a set that dfexp exported in this format"
    ):
        made_from(folder, tmp_path / "b" / "set.jsonl", merge=old)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id":"a","messages":[{"role":"user","content":"q"}]}\n', "has id, messages"),
        ('{"id":"a","conversations":[{"role":"assistant","content":"q","reasoning_content":""}]}\n', "--thinking"),
        ('{"id":"a","conversations":[]}\n', "--thinking"),
        ('{"id":"a","conversations":"q"}\n', "in an answer nothing"),
        ('{"id":"a","conversations":["q"]}\n', "in an answer nothing"),
        ('{"id":["a"],"conversations":[{"role":"user","content":"q"}]}\n', "has id, conversations"),
        (2 * '{"id":"a","conversations":[{"role":"user","content":"q"}]}\n', "two rows with the id 'a'"),
        ('{"id":\n', "is not a record"),
        (None, "cannot read"),
    ],
)
def test_an_earlier_set_of_another_kind_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    old = tmp_path / "old.jsonl"
    if text is not None:
        old.write_text(text)
    with pytest.raises((ExportError, CorruptShardError), match=words):
        made_from(write_run(tmp_path, [row(0)]), tmp_path / "new" / "set.jsonl", merge=old)
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("name", ["set.jsonl", "set.validation.jsonl", "README.md"])
def test_nothing_is_ever_replaced(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path, [row(0)])
    to = tmp_path / "sets" / "set.jsonl"
    to.parent.mkdir()
    (to.parent / name).symlink_to("nowhere")
    with pytest.raises(ExportError, match="ever replaced"):
        made_from(folder, to)
    assert [path.name for path in to.parent.iterdir()] == [name]


@pytest.mark.parametrize("name", ["set.jsonl", "README.md"])
def test_a_file_that_appears_meanwhile_is_left_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, to = write_run(tmp_path, [row(0)]), tmp_path / "sets" / "set.jsonl"
    link = os.link

    def first_theirs(source: Path, target: Path) -> None:
        if target.name == name:
            target.write_text("theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", first_theirs)
    with pytest.raises(StorageError, match="File exists"):
        made_from(folder, to)
    assert [(path.name, path.read_text()) for path in to.parent.iterdir()] == [(name, "theirs")]


def test_a_run_without_rows_makes_no_set(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [])
    shutil.rmtree(folder.completions)
    with pytest.raises(ExportError, match=r"no row of .* can go into a set: none is done"):
        made_from(folder, tmp_path / "sets" / "set.jsonl")
    assert not (tmp_path / "sets").exists()


def test_rows_that_are_in_the_store_alone_are_missed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [row(i) for i in range(8)])
    manifest = json.loads((folder.completions / "manifest.json").read_text())
    manifest["shards"][0]["uploaded"] = {"key": "somewhere"}
    (folder.completions / "manifest.json").write_text(json.dumps(manifest))
    (folder.completions / "completions_000000.jsonl").unlink()
    with pytest.raises(ExportError, match=r"1 shards of .* in its store alone"):
        made_from(folder, tmp_path / "set.jsonl")


@pytest.mark.parametrize("name", ["set.jsonl", "set.parquet"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder, to = write_run(tmp_path, [row(0)]), tmp_path / "sets" / name

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        made_from(folder, to)
    assert not list(to.parent.iterdir())


def test_the_card_says_where_everything_comes_from(tmp_path: Path) -> None:
    flags = {"mamba_strategy": "no_buffer"}
    config = {"engine": "sglang", "engine_version": "sglang 0.5.12", "model": "m", "sampling": {"temperature": 0.7},
              "fleet": {"flags": flags, "python": "/secret/place"}, "argv": {"a": ["/secret/place"]}}  # fmt: skip
    folder = write_run(tmp_path, [row(0), row(1, config_id="c1", text=""), row(2, config_id="c1")], [failure(3)])
    run = json.loads(folder.run_json.read_text())
    run["configs"]["c1"] = config
    run["prompts"]["sources"] = [{"path": "a|b.jsonl", "sha256": "ff00", "rows": 5, "kept": 7}]
    folder.run_json.write_text(json.dumps(run))
    licenses = {"": "apache-2.0", "a|b.jsonl": "cc-by-4.0"}
    made_from(folder, tmp_path / "set.jsonl", licenses=licenses, name="mine")
    card = (tmp_path / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "set.jsonl"}]}],
        "license": "apache-2.0",
        "pretty_name": "mine",
        "size_categories": ["n<1K"],
        "tags": ["synthetic"],
        "task_categories": ["text-generation"],
    }
    for words in (
        "# mine", "| `set.jsonl` | 2 rows (train) |", "| rejected | 1 |", "| empty: no text", "| prompt_too_long | 1 |",
        "| a\\|b.jsonl | 5 records, 7 prompts kept; licence: cc-by-4.0; SHA-256 ff00 |",
        "| completion_tokens | mean 10, median 10", "| not drawn | 3 |",
        "## Configuration c1: 1 good rows", "| engine_version | `sglang 0.5.12` |", '`{"mamba_strategy": "no_buffer"}`',
        "| sampling | `{\"temperature\": 0.7}` |", "| dfexp, of the run | 0.1.0 |", "| run | demo |",
    ):  # fmt: skip
        assert words in body
    assert "/secret/place" not in card


def test_wrong_options_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"1\.0 for validation"):
        made_from(RunFolder(tmp_path / "none"), tmp_path / "set.jsonl", validation=1.0)
    with pytest.raises(ParamsError, match=r"set\.csv: no format"):
        made_from(RunFolder(tmp_path / "none"), tmp_path / "set.csv")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--accept tools", "'tools' can be neither accepted nor rejected. What can: empty,"),
        ("--accept trunkated", "'trunkated' can be neither"),
        ("--reject trunkated", "'trunkated' can be neither"),
        ("--max-repeated 1.5", "max_repeated = 1.5: must be less than or equal to 1"),
        ("--max-repeated -0.1", "max_repeated = -0.1: must be greater than or equal to 0"),
        ("--min-tokens -1", "min_tokens = -1: must be greater than or equal to 0"),
        ("--max-tokens 0", "max_tokens = 0: must be greater than or equal to 1"),
        ("--outlier-sigmas 0", "outlier_sigmas = 0.0: must be greater than 0"),
    ],
)
def test_wrong_thresholds_are_refused_before_a_row_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path, [row(0)])
    (folder.completions / "completions_000000.jsonl").write_text("no rows\n")
    assert cli.main(["export", "demo", "--to", "a/a.jsonl", *options.split()]) == 2
    assert words in capsys.readouterr().err
    assert not Path("a").exists()


def test_the_thresholds_of_the_runs_file_hold_and_options_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is good or rejected, never both, and each reason is counted."""
    monkeypatch.chdir(tmp_path)
    wavers = "Let me look at this once more, then. " * 8 + "So the answer is 12, as was to be shown in this exercise. "
    many = [row(i, completion_tokens=100 + i % 50) for i in range(100)]
    rows = [*many, row(100, completion_tokens=5000), row(101, completion_tokens=9), row(102, finish_reason="length"),
            row(103, text=wavers * 6 + str(WORDS)), row(104, text=wavers * 30 + str(WORDS))]  # fmt: skip
    quality = {"reject": ["truncated", "length_outlier"], "max_tokens": 4000, "max_repeated": 0.1}
    write_run(tmp_path, rows, rows_per_shard=50, quality=quality)
    printed = []
    for to, options in (
        ("a", ""),
        ("b", "--reject truncated --max-tokens 9000 --max-repeated 0.4"),
        ("c", "--outlier-sigmas 90 --reject length_outlier --max-repeated 0.99"),
    ):
        assert cli.main(["export", "demo", "--to", f"{to}/{to}.jsonl", *options.split()]) == 0
        printed.append(capsys.readouterr().out.splitlines()[:2])
        assert len(lines(Path(to, f"{to}.jsonl"))) == int(printed[-1][0].split(", ")[1].split()[0])
    reasons = "rejected for (a row can have several reasons): "
    assert printed == [
        ["rows: 105 done, 100 good, 5 rejected",
         f"{reasons}5 length_outlier, 2 repetitive, 1 too_long, 1 truncated"],
        ["rows: 105 done, 103 good, 2 rejected", f"{reasons}1 truncated, 1 repetitive"],
        ["rows: 105 done, 104 good, 1 rejected", f"{reasons}1 too_long"],
    ]  # fmt: skip
    card = Path("a/README.md").read_text()
    assert "| repetitive: too much of it is said five times or more | 2 |" in card
    assert "| said five times | at most 10% |" in card


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path, [row(0), row(1, text=""), dataclasses.replace(row(2), finish_reason="length")])
    run = json.loads(folder.run_json.read_text())
    run["prompts"]["sources"] = [{"path": "x=y", "rows": 3}]
    folder.run_json.write_text(json.dumps(run))
    given = "--reject truncated --accept empty --accept garbage --license x=y=mit --thinking dropped"
    assert cli.main(["export", "demo", "--to", "sets/a.jsonl", *given.split()]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rows: 3 done, 2 good, 1 rejected",
        "rejected for (a row can have several reasons): 1 truncated",
        "sets/README.md: card",
        "sets/a.jsonl: train, 2 rows",
    ]
    assert lines(Path("sets/a.jsonl"))[1] == {
        "id": "demo-1",
        "conversations": [{"role": "user", "content": "question 1"}, {"role": "assistant", "content": ""}],
    }
    assert cli.main(["export", "demo", "--to", "sets/b.jsonl"]) == 1
    assert cli.main(["export", "demo", "--to", "b/b.jsonl", "--accept", "tools"]) == 2
    assert "'tools' can be neither" in capsys.readouterr().err
