"""Writes a training set: one pass over a run says which rows go in, a second one writes them by index.

The second pass reads each row from where the first one found it, so that memory holds a few numbers a row. Everything
is written under temporary names and gets its own by hard links, which replace nothing; the set itself comes last.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from dfexp import shards
from dfexp.errors import ExportError, ParamsError
from dfexp.export import files, rows
from dfexp.export.card import card, thinking_of
from dfexp.export.rows import Thinking
from dfexp.jsonl import disk, encode_line, fsync_dir, parse_line, read_json, temporary_name, write_atomic
from dfexp.layout import RunFolder
from dfexp.quality import Thresholds, marks, usual_lengths

Format = Literal["conversations", "messages", "parquet"]
_SUFFIXES: dict[str, Format] = {".messages.jsonl": "messages", ".jsonl": "conversations", ".parquet": "parquet"}
_FACTS = ("index", "finish_reason", "prompt_tokens", "completion_tokens", "config_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a set is made.

    Attributes:
        format: None is what the suffix says.
        thinking: where thoughts go: inline as the model wrote them, apart as `reasoning_content`, or dropped.
        thresholds: which rows stay out.
        validation: share of the prompts that go to a file of their own, from 0 to below 1.
        merge: an earlier set whose rows come first.
        name: of the set, with which the ids of its rows begin; None: the run's.
        licenses: as given, by source; that of "" is the whole set's.
    """

    format: Format | None = None
    thinking: Thinking = "inline"
    thresholds: Thresholds = field(default_factory=Thresholds)
    validation: float = 0.0
    merge: Path | None = None
    name: str | None = None
    licenses: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What was found and made.

    Attributes:
        files, written: by split, train or validation, and how many rows; those of an earlier set included.
        thinks: whether thoughts were asked for, whose beginning may be in the prompt.
        rows: how many were `done`, of them `good`, `rejected`; `merged` and `already there` are of an earlier set.
        counts: rows by what they have in common, under a heading each. A row can be rejected for several reasons.
        places: index, shard, first byte and length of each good row, one after the other.
        lengths: tokens of prompts and of answers of good rows; NaN where the engine did not say.
    """

    run: dict[str, Any]
    options: Options
    files: dict[str, Path]
    thinks: bool
    written: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=lambda: Counter(done=0, good=0, rejected=0))
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    places: array[int] = field(default_factory=lambda: array("q"))
    lengths: dict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))

    @property
    def name(self) -> str:
        """The name of the set."""
        return self.options.name or str(self.run["run"])


def export(folder: RunFolder, to: Path, options: Options) -> Made:
    """Write the rows of a run that is finished, or goes on, to `to`, and README.md beside it.

    Rows of sealed shards and of the open one, in the order of their indices. Raises ParamsError; ExportError, with
    nothing left behind: a file is in the way, no row is good, an earlier set does not fit; StorageError.
    """
    form = options.format or next((form for suffix, form in _SUFFIXES.items() if to.name.endswith(suffix)), None)
    if form is None:
        raise ParamsError(f"{to.name}: no format has this suffix. Use {', '.join(_SUFFIXES)}, or name the format.")
    if not 0 <= options.validation < 1:
        raise ParamsError(f"a share of {options.validation} for validation: give one from 0 to below 1.")
    whole = options.merge and options.merge.with_name(options.merge.name.replace(".validation", "", 1))
    if whole and whole != options.merge and whole.exists():
        raise ParamsError(f"{options.merge} is for validation, and would be trained on. Name the whole set: {whole}.")
    if (told := options.merge and thinking_of(options.merge)) not in (None, options.thinking):
        raise ParamsError(f"{options.merge} has thoughts {told}, as its card says: use --thinking {told}.")
    run = read_json(folder.run_json)
    thinks = (run["spec"].get("generation") or {}).get("enable_thinking") is True
    made = Made(run=run, options=options, files=_names(to), thinks=thinks)
    sources = {str(source.get("path")) for source in made.run["prompts"]["sources"]}
    if unknown := options.licenses.keys() - {"", *sources}:
        raise ParamsError(f"a licence for {min(unknown)!r}, no source of the run: {', '.join(sorted(sources))}.")
    for path in made.files.values():
        if os.path.lexists(path):
            raise ExportError(f"{path} exists, and no file is ever replaced. Give another folder or name.")
    if away := shards.only_stored(folder.completions):
        raise ExportError(
            f"{len(away):,} shards of {folder.path} are in its store alone: dfexp store restore {folder.name} --rows."
        )
    if lost := sum(entry.rows for entry in shards.only_stored(folder.completions, lost=True)):
        made.rows["more are lost, here and in the store"] = lost
    with disk(f"write {to}"), contextlib.ExitStack() as undo, contextlib.ExitStack() as halves:
        _scan(folder, made)
        if not made.rows["good"]:
            why = ", ".join(f"{count:,} {name}" for name, count in made.counts["Rejected"].items()) or "none is done"
            raise ExportError(f"no row of {folder.path} can go into a set: {why}.")
        to.parent.mkdir(parents=True, exist_ok=True)
        parts = {split: temporary_name(path) for split, path in made.files.items()}
        for part in parts.values():
            undo.callback(part.unlink, missing_ok=True)
        _write(folder, made, form, parts)
        if not made.written["validation"]:
            del made.files["validation"]
        write_atomic(parts["card"], card(made).encode())
        for split, path in made.files.items():
            os.link(parts[split], path)
            halves.callback(path.unlink)
        fsync_dir(to.parent)
        halves.pop_all()
    return made


def _names(path: Path) -> dict[str, Path]:
    """The files of a set by split, in the order in which they appear."""
    suffix = next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), path.suffix)
    beside = path.with_name(f"{path.name.removesuffix(suffix)}.validation{suffix}")
    return {"card": path.with_name("README.md"), "validation": beside, "train": path}


class _Spot:
    """Parses lines of shards, and adds where each is: number of the shard, first byte, length."""

    def __init__(self) -> None:
        self._end = 0

    def __call__(self, path: Path, number: int, line: bytes) -> dict[str, Any]:
        start = self._end if number > 1 else 0
        self._end = start + len(line)
        return parse_line(path, number, line) | {"_at": (int(path.name[12:].split(".")[0]), start, len(line))}


def _scan(folder: RunFolder, made: Made) -> None:
    """Judge every row, and note where the good ones are."""
    options, counts, limits = made.options, made.counts, made.options.thresholds
    usual = _usual(folder, limits.sigmas) if "length_outlier" in limits.rejected else (0.0, inf)
    for row in shards.read_rows(folder.completions, _Spot()):
        made.rows["done"] += 1
        if bad := marks(row, limits, thinking=made.thinks, usual=usual) & limits.rejected:
            made.rows["rejected"] += 1
            counts["Rejected"].update(sorted(bad))
            continue
        made.rows["good"] += 1
        made.places.extend((row["index"], *row["_at"]))
        counts["Finish reasons"][str(row["finish_reason"])] += 1
        counts["Configurations"][row["config_id"]] += 1
        for name in ("prompt_tokens", "completion_tokens"):
            made.lengths[name].append(np.nan if row[name] is None else row[name])
        if options.thinking == "apart" and not rows.is_as_templates_write(row["text"], made.thinks):
            made.rows["with other white space around the thought"] += 1
    counts["Failed"].update(row["kind"] for row in shards.read_failures(folder.completions))


def _usual(folder: RunFolder, sigmas: float) -> tuple[float, float]:
    """The bounds of usual lengths, which take a pass of their own."""
    counts = (row["completion_tokens"] for row in shards.read_rows(folder.completions))
    return usual_lengths(np.fromiter((np.nan if count is None else count for count in counts), float), sigmas)


def _write(folder: RunFolder, made: Made, form: Format, parts: dict[str, Path]) -> None:
    options, key = made.options, "conversations" if form == "conversations" else "messages"
    fields = ("role", "content", *(["reasoning_content"] if options.thinking == "apart" else []))
    schema = files.columns(fields) if form == "parquet" else None
    known, sides = dict[str, bytes](), dict[bytes, str]()  # chats by id, and the side of each prompt
    like = dict.fromkeys(schema.names if schema else ("id", key)) | {key: [dict.fromkeys(fields)]}
    with contextlib.ExitStack() as stack:
        out = {split: stack.enter_context(files.Writer(parts[split], schema)) for split in ("validation", "train")}

        def add(split: str, record: dict[str, Any]) -> None:
            out[split].add(record)
            made.written[split] += 1

        for split, path in _names(options.merge).items() if options.merge else ():
            if split == "train" or (split == "validation" and path.exists()):
                for record in files.read(path, like, key, is_parquet=schema is not None):
                    if record["id"] in known:
                        raise ExportError(f"the set of {path} has two rows with the id {record['id']!r}. Remove one.")
                    known[record["id"]] = _digest(record[key])
                    sides[_digest(record[key][:-1])] = split
                    made.rows["merged"] += 1
                    add(split, record)
        for row in _good(folder, made):
            record = _record(row, made, key, like)
            if (there := known.get(record["id"])) is None:
                is_aside = rows.is_for_validation(row["messages"], options.validation)
                add(sides.get(_digest(record[key][:-1]), "validation" if is_aside else "train"), record)
            elif there == _digest(record[key]):
                made.rows["already there"] += 1
            else:
                raise ExportError(
                    f"{options.merge} has another chat under the id {record['id']!r}: of another run of that name, or "
                    "made with other options. Give this set a name of its own (--name), or the same options."
                )


def _record(row: dict[str, Any], made: Made, key: str, like: dict[str, Any]) -> dict[str, Any]:
    facts = {"run": made.run["run"], "prompt_id": row["id"], "flags": ",".join(row["flags"])}
    facts |= {name: row[name] for name in _FACTS}
    record = facts | {"id": f"{made.name}-{row['index']}", key: rows.chat(row, made.options.thinking, made.thinks)}
    return {name: record[name] for name in like}


def _digest(chat: list[dict[str, Any]]) -> bytes:
    said = [[value for value in turn.values() if value] for turn in chat]  # a null in Parquet is absent elsewhere
    return blake2b(encode_line({"": said}), digest_size=16).digest()


def _good(folder: RunFolder, made: Made) -> Iterator[dict[str, Any]]:
    """The good rows by index, each read from its place."""
    places = np.frombuffer(made.places, dtype=np.int64).reshape(-1, 4)
    for index, number, start, length in places[np.argsort(places[:, 0], kind="stable")].tolist():
        name = folder.completions / f"completions_{number:06d}.jsonl"
        with _opened(name) as file:
            row = parse_line(name, 0, os.pread(file.fileno(), length, start))
        if row.get("index") != index:
            raise ExportError(f"{name} has changed meanwhile. Export again.")
        yield row


def _opened(name: Path) -> IO[bytes]:
    for path in (name.with_name(f"{name.name}.partial"), name):  # the open name goes only after the other came
        with contextlib.suppress(FileNotFoundError):
            return path.open("rb", buffering=0)
    raise ExportError(f"{name} has gone meanwhile. Restore it and export again.")
