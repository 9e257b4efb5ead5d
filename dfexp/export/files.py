"""Files of training sets, record by record: Parquet, and JSON lines in ASCII, which no reader splits wrongly."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from dfexp.errors import ExportError
from dfexp.jsonl import encode_line, parse_line

_BATCH = 1000
_TEXTS, _COUNTS = ("run", "prompt_id", "config_id", "finish_reason", "flags"), ("prompt_tokens", "completion_tokens")


def columns(parts: tuple[str, ...]) -> pa.Schema:
    """The columns of a Parquet set. Args: parts, the fields of a message."""
    message = pa.list_(pa.struct([(part, pa.string()) for part in parts]))
    facts = [
        ("index", pa.int64()),
        *((name, pa.int64()) for name in _COUNTS),
        *((name, pa.string()) for name in _TEXTS),
    ]
    return pa.schema([("id", pa.string()), ("messages", message), *facts])


class Writer(ExitStack):
    """A new file of records, Parquet where it is given columns; on the disk when the context ends."""

    def __init__(self, path: Path, schema: pa.Schema | None) -> None:
        super().__init__()
        self._schema, self._waiting = schema, list[dict[str, Any]]()
        self._file = self.enter_context(path.open("xb"))
        self.callback(lambda: os.fsync(self._file.fileno()))
        self.callback(self._file.flush)
        if schema is not None:
            self._table = self.enter_context(pq.ParquetWriter(self._file, schema, compression="zstd"))
        self.callback(self._drain)

    def add(self, record: dict[str, Any]) -> None:
        """Write a record, some time."""
        self._waiting.append(record)
        if len(self._waiting) == _BATCH:
            self._drain()

    def _drain(self) -> None:
        if self._schema is None:
            self._file.writelines(map(encode_line, self._waiting))
        elif self._waiting:
            self._table.write_batch(pa.RecordBatch.from_pylist(self._waiting, self._schema))
        self._waiting.clear()

    def __enter__(self) -> Self:
        return self


def read(path: Path, like: dict[str, Any], key: str, *, is_parquet: bool) -> Iterator[dict[str, Any]]:
    """The records of an earlier set. Raises ExportError unless they have the keys of `like`, and chats those of its."""
    try:
        for number, record in enumerate(_parquet(path) if is_parquet else _lines(path), 1):
            chat = record.get(key)
            turns = chat if isinstance(chat, list) and all(isinstance(turn, dict) for turn in chat) else []
            answer = turns[-1] if turns else {}
            if record.keys() != like.keys() or answer.keys() != like[key][-1].keys() or type(record["id"]) is not str:
                found = f"{', '.join(record)} and in an answer {', '.join(answer) or 'nothing'}"
                raise ExportError(
                    f"row {number} of {path} has {found}: use the format and --thinking it was made with."
                )
            yield record
    except (OSError, ValueError) as error:  # also what pyarrow raises
        raise ExportError(f"cannot read {path}: {error}. Name a set that dfexp exported in this format.") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        if file.peek(4).startswith(b"PAR1"):
            raise ValueError("it is Parquet")
        yield from (parse_line(path, number, line) for number, line in enumerate(file, 1))


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as table:
        for batch in table.iter_batches(batch_size=_BATCH):
            yield from batch.to_pylist()
