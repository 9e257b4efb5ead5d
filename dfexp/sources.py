"""Files of prompts as users have them: JSON lines and Parquet, record by record, and the messages in a record.

Nothing here knows of a run. A record that is no prompt raises, or is returned as, `Unusable`; a file that cannot be
read is a PromptsError.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dfexp.errors import PromptsError
from dfexp.jsonl import repair_text
from dfexp.records import Message

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
FIELDS = ("messages", "conversations", "prompt", "instruction", "question", "query", "text")
"""Fields that hold a prompt; the first that a record has wins. `text` is last: in some sets it repeats the answer."""

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")
_MAX_LINE_BYTES = 32 * 1024 * 1024


class Unusable(Exception):
    """A record is no prompt. `reason` is one of a few and can be counted; `detail` says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def rows_of(path: Path, wanted: Iterable[str]) -> Iterator[tuple[int, dict[str, Any] | Unusable]]:
    """Line (or row) number from 1 and record, or what is wrong with it; fields not `wanted` may be missing.

    Raises PromptsError for a damaged Parquet file or UTF-16 text, OSError, EOFError or zlib.error for damaged others.
    """
    return _parquet_rows(path, set(wanted)) if path.suffix.lower() == ".parquet" else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number and record, or what is wrong with it; blank lines are skipped."""
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise PromptsError(f"{path} is UTF-16 text. Save it as UTF-8.")
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield number, _parsed(text)


def _lines(file: Any) -> Iterator[bytes]:
    r"""Lines split at `\n` alone; of one beyond the limit only the beginning, so that it cannot fill the memory."""
    while line := file.readline(_MAX_LINE_BYTES):
        yield line
        while len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(_MAX_LINE_BYTES)


def _parsed(line: bytes) -> dict[str, Any] | Unusable:
    if len(line) >= _MAX_LINE_BYTES:
        return Unusable("line too long", f"longer than {_MAX_LINE_BYTES >> 20} MiB")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Unusable("not valid UTF-8", f"byte {error.start + 1} of the line: {error.reason}")
    except ValueError as error:
        return Unusable("not valid JSON", str(error))
    except RecursionError:
        return Unusable("not valid JSON", "nested too deeply")
    return value if isinstance(value, dict) else Unusable("not a JSON object", f"found {type(value).__name__}")


def _parquet_rows(path: Path, wanted: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Row number and record, or what is wrong with it; only the wanted columns are read, a few rows at a time."""
    import pyarrow as pa  # here, since it takes a third of a second that readers of JSONL need not wait
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            columns = [name for name in file.schema_arrow.names if name in wanted]
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise PromptsError(f"cannot read {path} after row {number} as Parquet: {error}. Replace the file.") from error


def _batch_rows(batch: Any) -> Iterable[Any]:
    try:
        return batch.to_pylist() if batch.num_columns else [{}] * batch.num_rows
    except UnicodeDecodeError:
        return (_one_row(batch.slice(row, 1)) for row in range(batch.num_rows))


def _one_row(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return Unusable("not valid UTF-8", f"byte {error.start + 1} of a text: {error.reason}")


def field_names(paths: Iterable[Path]) -> list[str]:
    """Names of the fields in the first records of each file, for messages."""
    names: dict[str, None] = {}
    for path in paths:
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            names |= dict.fromkeys(pq.read_schema(path).names)
            continue
        for _, row in itertools.islice(_jsonl_rows(path), 100):
            names |= dict.fromkeys(row) if isinstance(row, dict) else {}
    return list(names)[:30]


def existing_file(given: str, root: Path) -> Path:
    """The file that `given` names, relative to `root`. Raises PromptsError: missing, a folder, unknown suffix."""
    path = root / Path(given).expanduser()
    if path.is_dir():
        inside = sorted(item.name for item in path.iterdir() if item.name.lower().endswith(SUFFIXES))
        raise PromptsError(
            f"prompts.path = {given!r} is a folder. Name one of its files, or a list of them: "
            f"{', '.join(inside[:10]) or 'none has a known suffix'}."
        )
    if not path.exists():
        beside = sorted(item.name for item in path.parent.iterdir()) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.4)
        hint = f"Did you mean {str(Path(given).with_name(near[0]))!r}?" if near else "Check the path."
        raise PromptsError(f"prompts.path = {given!r}: there is no file {path}. {hint}")
    if not path.name.lower().endswith(SUFFIXES):
        raise PromptsError(
            f"prompts.path = {given!r}: the suffix must be one of {', '.join(SUFFIXES)}; it tells the format."
        )
    return path


def messages_of(record: Mapping[str, Any], column: str | None = None) -> tuple[Message, ...]:
    """The prompt in a record: a text as one user message, or a chat without the assistant turn at its end.

    Of each message `role`, `content`, `name`, tool calls and reasoning are kept; fields that are null are left out.
    Raises Unusable.
    """
    name, value = next(
        ((name, record[name]) for name in ((column,) if column else FIELDS) if record.get(name) is not None), ("", None)
    )
    if value is None:
        wanted = repr(column) if column else "one of " + ", ".join(FIELDS)
        raise Unusable("no prompt field", f"{wanted} is missing or null; found {', '.join(map(str, record)) or '{}'}")
    if isinstance(value, list):
        return _chat(value)
    if not isinstance(value, str):
        raise Unusable("wrong type", f"{name} must be text or a list of messages, found {type(value).__name__}")
    extra = record.get("input") if name == "instruction" else None
    text = f"{value}\n\n{extra}" if isinstance(extra, str) and extra.strip() else value
    if not text.strip():
        raise Unusable("empty prompt", f"{name} is blank")
    return ({"role": "user", "content": text},)


def _chat(value: list[Any]) -> tuple[Message, ...]:
    if not value:
        raise Unusable("empty prompt", "no messages")
    turns = [_turn(number, item) for number, item in enumerate(value, 1)]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        raise Unusable("no turn to answer", "a chat must have a user turn, and end in one before its last answer")
    content = turns[-1]["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    if not any(text.strip() for text in texts):
        raise Unusable("empty prompt", "the last turn is blank")
    return tuple(turns)


def _turn(number: int, item: Any) -> dict[str, Any]:
    """One message, OpenAI's `role` and `content` or ShareGPT's `from` and `value`."""
    if not isinstance(item, Mapping):
        raise Unusable("wrong type", f"message {number} must be an object, found {type(item).__name__}")
    keys = ("role", "content") if item.get("role") is not None else ("from", "value")
    role, content = item.get(keys[0]), item.get(keys[1])
    role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise Unusable("unknown role", f"message {number} has role {role!r}; known: {', '.join(_ROLES)}")
    is_text = isinstance(content, str) or (content is None and role == "assistant" and item.get("tool_calls"))
    if not is_text and not (isinstance(content, list) and content and all(map(_is_text_part, content))):
        raise Unusable("wrong type", f"message {number} must have text as content, found {type(content).__name__}")
    kept = {key: item[key] for key in _MESSAGE_KEYS if item.get(key) is not None}
    return {"role": role, "content": content, **kept}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def repaired(value: Any) -> tuple[Any, bool]:
    """The same JSON value with every text made fit for UTF-8, and whether one had to change; tuples become lists.

    Raises Unusable for what JSON cannot carry (NaN, dates, bytes).
    """
    if isinstance(value, str):
        return repair_text(value)
    if isinstance(value, (list, tuple)):
        pairs = [repaired(item) for item in value]
        return [item for item, _ in pairs], any(changed for _, changed in pairs)
    if isinstance(value, Mapping):
        keys, values = repaired(list(value.keys())), repaired(list(value.values()))
        return dict(zip(keys[0], values[0], strict=True)), keys[1] or values[1]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value, False
    raise Unusable("wrong type", f"a message holds {type(value).__name__} {value!r}, which JSON cannot carry")
