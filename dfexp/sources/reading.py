"""The prompts of a run, from its sources to their final order; all of it streams."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from dfexp.errors import PromptsError
from dfexp.jsonl import encode_line, repair_text, sha256_of
from dfexp.params_prompts import PromptsGroup, PromptsPart
from dfexp.records import Message, Prompt
from dfexp.sources.checks import LONG_CHARS, Repeats, filters
from dfexp.sources.files import UNREADABLE, existing_file, hub_rows, rows_of
from dfexp.sources.mapping import FIELDS, Meaning, NoPrompt, Unusable, record_of, said_by, text_of
from dfexp.sources.mixture import mixed, taken_of, wanted_of
from dfexp.sources.report import Measures, Notes

_MEANING = ("column", "system_column", "role_key", "content_key", "roles", "turns")
Line = tuple[bytes, bytes]
"""A prompt as JSON: its id, empty where it has none, and the rest of a line from its messages on."""


@dataclass(slots=True, kw_only=True)
class Part:
    """A source understood. `most`: how many prompts are read of it; `keys`: a random number for each that was kept."""

    given: PromptsPart
    meaning: Meaning
    files: list[tuple[str, Path]]
    most: int
    is_random: bool
    kept: int = 0
    id_seen: bool = False
    keys: array[float] = field(default_factory=lambda: array("d"))


class Reading:
    """The prompts of a group, one by one. What it says of them is complete when the iteration ends.

    Attributes: asked, prompts so far; sources, of each file or data set its path, sha256 (None of a data set), rows
    (records read, left out ones included), prompts (in them; a record without any is one) and kept: all prompts are
    those kept and those dropped; mixture, of each source that was drawn from its name, kept, wanted
    (None: as it comes) and taken; dropped, what was left out; odd, what was kept and is worth a look.
    """

    def __init__(self, group: PromptsGroup, root: Path) -> None:
        """Check that every file and package is there. Raises PromptsError: missing, a folder, unknown suffix."""
        self._group, self._root, others = group, root, group.duplicates.not_in
        self._is_drawn = bool(group.sources) or group.draw == "random"
        self._wanted = wanted_of(group.sources, group.limit) if group.sources else [group.limit]
        self._parts = [self._part(*pair) for pair in zip(group.parts, self._wanted, strict=True)]
        self._filters, self._repeats = filters(group.filters, root), Repeats(group.duplicates)
        self._others = [self._other(each) for each in ([others] if isinstance(others, str) else others)]
        self._ids = set[int]()
        self.asked, self.dropped, self.odd, self._measures = 0, Notes(), Notes(), Measures()
        self.sources: list[dict[str, Any]] = []
        self.mixture: list[dict[str, Any]] = []

    def _part(self, part: PromptsPart, wanted: int | None) -> Part:
        files = [(given, existing_file(given, self._root)) for given in part.files]
        is_random = (part.draw or self._group.draw or ("random" if self._group.sources else "first")) == "random"
        most = sys.maxsize if wanted is None or is_random else wanted
        return Part(given=part, meaning=Meaning(part, self._group), files=files, most=most, is_random=is_random)

    def _other(self, given: str) -> Reading:
        """A set whose prompts must not come again: a file, or a run's folder or name."""
        places = (self._root / Path(given).expanduser(), self._root / "outputs" / given)
        run = next((str(path) for place in places if (path := place / "prompts.jsonl").is_file()), None)
        if run is None and not places[0].exists():
            raise PromptsError(f"prompts.duplicates.not_in: {given!r} is no file, and no run with prompts. Check it.")
        keys: dict[str, Any] = {} if run else {key: getattr(self._group, key) for key in _MEANING}
        other = Reading(PromptsGroup(path=run or given, system=self._group.system, **keys), self._root)
        for part in other._parts:
            part.meaning.fields = (*part.meaning.fields, *FIELDS)  # of the same shape as ours, or of a usual one
            part.meaning.takes_usual = True
        return other

    def __iter__(self) -> Iterator[Prompt]:
        """Read all sources, once. Raises what `lines` raises."""
        for line in self.lines():
            record = json.loads(line)
            yield Prompt(index=record["index"], id=record["id"], messages=tuple(record["messages"]))

    def lines(self, folder: Path | None = None) -> Iterator[bytes]:
        """The same as lines of prompts.jsonl.

        Args: folder, where prompts are put that are then drawn from; default: the system's for temporary files.
        Raises PromptsError: unreadable, no usable prompt, no row with the id, a record that must not be skipped.
        """
        self._read_others()
        for name, body in self._drawn(folder) if self._is_drawn else self._kept(self._parts[0]):
            self._measures.add(json.loads(b"{" + body)["messages"])
            yield b'{"index":%d,"id":%b,%b' % (self.asked, name or b'"%d"' % self.asked, body)
            self.asked += 1
        names = ", ".join(source["path"] for source in self.sources)
        if self.asked == 0:
            counts = ", ".join(f"{count} x {why}" for why, count in self.dropped.by_reason.items()) or "no rows"
            first = "".join(
                "\n  {source}:{line}: {reason}: {detail}".format(**drop) for drop in self.dropped.examples[:3]
            )
            is_unnamed = "no prompt field" in self.dropped.by_reason
            fix = "Name its field with prompts.column" if is_unnamed else "Check the source"
            raise PromptsError(f"no usable prompt in {names} ({counts}). {fix}.{first}")
        for part in self._parts:
            if part.meaning.names_id and part.kept and not part.id_seen:
                raise PromptsError(f"prompts.id_column = {part.meaning.id_field!r}: no row of {names} has that field.")

    def report(self) -> dict[str, Any]:
        """What prompts_report.json holds."""
        return {
            "asked": self.asked,
            "characters": self._measures.lengths(),
            "shared_prefix_share": self._measures.shared_prefix_share(),
            "sources": self.sources,
            "mixture": self.mixture,
            "dropped_by_reason": dict(self.dropped.by_reason),
            "odd_by_reason": dict(self.odd.by_reason),
            "dropped": self.dropped.examples,
            "odd": self.odd.examples,
        }

    def _drawn(self, folder: Path | None) -> Iterator[Line]:
        """Prompts in the order of the mixture: all are put into a file first, since the last one may come first."""
        with tempfile.TemporaryFile(dir=folder) as spool:
            starts = array("Q", [0])
            for number, part in enumerate(self._parts):
                random = Random(f"{self._group.seed}/{number}")  # noqa: S311
                for name, body in self._kept(part):
                    starts.append(starts[-1] + spool.write(name + b"\0" + body))
                    part.keys.append(random.random())
            spool.flush()
            kept, sources = [part.kept for part in self._parts], self._group.sources
            taken = taken_of(sources, self._wanted, kept) if sources else [min(kept[0], self._wanted[0] or kept[0])]
            order = mixed([part.keys for part in self._parts], taken, [part.is_random for part in self._parts])
            order = order[: self._group.limit]
            ends = [0, *accumulate(kept)]
            for number, part in enumerate(self._parts):
                there = int(((ends[number] <= order) & (order < ends[number + 1])).sum())
                numbers = {"kept": kept[number], "wanted": self._wanted[number], "taken": there}
                self.mixture.append({"name": _label(part.given), **numbers})
            for position in order.tolist():
                start, end = starts[position], starts[position + 1]
                name, _, body = os.pread(spool.fileno(), end - start, start).partition(b"\0")
                yield name, body

    def _kept(self, part: Part) -> Iterator[Line]:
        for given, path in part.files:
            if part.kept < part.most:
                yield from self._file(part, given, path)
        if part.given.hf is not None:
            source = {"path": _label(part.given), "sha256": None, "rows": 0, "prompts": 0, "kept": 0}
            rows = hub_rows(part.given.hf, self._root, part.meaning.fields, part.meaning.columns)
            yield from self._rows(part, source, rows)
            self.sources.append(source)

    def _file(self, part: Part, given: str, path: Path) -> Iterator[Line]:
        source = {"path": given, "sha256": "", "rows": 0, "prompts": 0, "kept": 0}
        try:
            before = path.stat()
            yield from self._rows(part, source, rows_of(path, part.meaning.fields, part.meaning.columns))
            source["sha256"] = sha256_of(path)
            after = path.stat()
        except UNREADABLE as error:
            raise PromptsError(
                f"cannot read {given} after row {source['rows']}: {error}. Repair or replace the file."
            ) from error
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise PromptsError(f"{given} changed while it was read. Start again when nothing writes to it.")
        self.sources.append(source)

    def _rows(self, part: Part, source: dict[str, Any], rows: Iterator[tuple[int, Any]]) -> Iterator[Line]:
        for line, row in rows:
            if part.kept >= part.most:
                break
            source["rows"] += 1
            try:
                record = record_of(row)
                part.id_seen |= part.meaning.id_field in record
                for name, messages in part.meaning.prompts_of(record):
                    if part.kept >= part.most:
                        break
                    found = self._examined(name, messages, source["path"], line)
                    source["prompts"] += 1
                    if found:
                        part.kept, source["kept"] = part.kept + 1, source["kept"] + 1
                        yield found
            except NoPrompt as problem:
                source["prompts"] += 1
                reason, detail = problem.args
                if self._group.on_bad == "fail":
                    fix = "Repair or remove it, or count such records: prompts.on_bad: skip"
                    raise PromptsError(f"{source['path']}:{line}: {reason}: {detail}. {fix}.") from None
                self.dropped.add(source["path"], line, reason, detail)

    def _examined(self, name: str | None, messages: tuple[Message, ...], source: str, line: int) -> Line | None:
        """A prompt that is kept, and what is odd about it noted; None where it is left out. Raises NoPrompt."""
        try:
            body = encode_line({"messages": messages})[1:]
        except (TypeError, ValueError, RecursionError) as error:  # a NaN or a date among the tool calls
            raise NoPrompt("cannot be written as JSON", str(error)) from None
        (text, is_half), (last, _), (talk, _) = map(
            repair_text,  # as they are frozen: packages take no half of a character
            (said_by(messages, systems=True), text_of(messages[-1]), said_by(messages, systems=False)),
        )
        try:
            for check in self._filters:
                check(text, last)
            repeated = self._repeats.check(body, talk, f"{source}:{line}")
        except Unusable as problem:
            self.dropped.add(source, line, *problem.args)
            return None
        again = name is not None and hash(name) in self._ids
        for is_odd, reason, detail in (
            (repeated, "repeats an earlier prompt", text),
            (again, "repeats an earlier id", name or ""),
            (len(text) >= LONG_CHARS, f"{LONG_CHARS:,} characters or more", f"{len(text):,}: {text[:80]}"),
            (is_half, "half of a character, replaced", text),
        ):
            if is_odd:
                self.odd.add(source, line, reason, repair_text(detail[:80])[0])
        if name is None:
            return b"", body
        self._ids.add(hash(name))
        return encode_line({"": name})[4:-2], body

    def _read_others(self) -> None:
        for other in self._others:
            for line in other.lines():
                body = line[line.index(b'"messages":[') :]
                text = said_by(json.loads(b"{" + body)["messages"], systems=False)
                self._repeats.add_other(body, text, f"{_label(other._group)}:{other.asked + 1}")


def _label(part: PromptsPart) -> str:
    """The name of a source in messages and in run.json."""
    return f"hf:{part.hf.name}/{part.hf.split}" if part.hf else ", ".join(part.files)
