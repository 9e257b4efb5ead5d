"""Records of files and of data sets, one by one: JSON lines, Parquet, plain text, and what `datasets` loads."""

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dfexp.errors import PromptsError
from dfexp.params_prompts import HubPart

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".txt", ".txt.gz")
UNREADABLE = (OSError, EOFError, ValueError, ArithmeticError, NotImplementedError, zlib.error)
"""What `rows_of` raises of a file that is damaged as a whole."""


class TextLine(bytes):
    """A line of a text file, which is a prompt as it stands."""


def library(name: str, extra: str, use: str) -> Any:
    """A package that is not among those that everybody needs. Raises PromptsError with the command that brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        fix = f"Run: pip install 'dfexp[{extra}]'"
        raise PromptsError(f"{use} needs the package {name}, which cannot be imported ({error}). {fix}") from None


def existing_file(given: str, root: Path) -> Path:
    """The file that `given` names, relative to `root`. Raises PromptsError: missing, a folder, unknown suffix."""
    path = root / Path(given).expanduser()
    if not path.exists():
        raise PromptsError(f"prompts: {given!r}: there is no file {path}. Check the path.")
    if path.is_dir() or not path.name.lower().endswith(SUFFIXES):
        raise PromptsError(f"prompts: {given!r}: files must end in {', '.join(SUFFIXES)}.")
    return path


def rows_of(path: Path, fields: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Line or row number from 1 and what `record_of` takes. Raises any of UNREADABLE."""
    if path.suffix.lower() != ".parquet":
        kind = TextLine if ".txt" in path.name.lower()[-7:] else bytes
        yield from ((number, kind(line)) for number, line in enumerate(_lines(path), 1) if line.strip())
        return
    import pyarrow.parquet as pq  # here, since it takes a third of a second that readers of JSONL need not wait

    with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        columns = _needed(table.schema_arrow.names, fields, others)
        batches = table.iter_batches(batch_size=256, columns=columns)
        yield from enumerate((row for batch in batches for row in _values(batch)), 1)


def _values(batch: Any) -> Iterator[Any]:
    """The rows of a batch of Parquet; of a row with a text that is not UTF-8 this text, which `record_of` refuses."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(len(batch)):
            try:
                yield from batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield TextLine(error.object)


def _needed(names: Sequence[str], fields: Sequence[str], others: Sequence[str]) -> list[str] | None:
    """The columns to read: all of them (None) where there is no prompt, so that messages can say what there is."""
    return [name for name in names if name in (*fields, *others)] if set(names) & set(fields) else None


def _lines(path: Path) -> Iterator[bytes]:
    """Lines in UTF-8; a file of another Unicode encoding, known by how it begins, is translated."""
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
        encoding = json.detect_encoding(file.peek(4)[:4])
        if not encoding.startswith("utf-8"):
            with io.TextIOWrapper(file, encoding, errors="replace", newline="\n") as text:
                yield from (line.encode() for line in text)
            return
        first = file.readline()
        yield first.removeprefix(b"\xef\xbb\xbf")
        yield from file


def hub_rows(hub: HubPart, root: Path, fields: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """The same of a data set, streamed: nothing is stored. Raises PromptsError, with the words of `datasets`."""
    datasets, local = library("datasets", "hf", "prompts.hf"), root / Path(hub.name).expanduser()
    name = str(local) if local.is_dir() else hub.name
    number = 0
    try:
        found = datasets.load_dataset(name, hub.config, split=hub.split, revision=hub.revision, streaming=True)
        if columns := _needed(found.column_names or (), fields, others):
            found = found.select_columns(columns)
        for number, row in enumerate(found, 1):
            yield number, row
    except Exception as error:  # of the hub, the network and of each format's own reader
        where = f"after row {number}" if number else "at all"
        raise PromptsError(
            f"cannot read the data set {hub.name} (config {hub.config}, split {hub.split}, revision {hub.revision}) "
            f"{where}: {type(error).__name__}: {error}. Check these names, the network, and HF_TOKEN where it is gated."
        ) from error
