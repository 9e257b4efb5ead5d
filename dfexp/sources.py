"""Files of prompts as users have them: JSON lines and Parquet, record by record, and the messages in a record."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dfexp.errors import PromptsError
from dfexp.records import Message

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
FIELDS = ("messages", "conversations", "prompt", "instruction", "question", "query", "text")
"""Fields that hold a prompt; the first that a record has wins. `text` is last: in some sets it repeats the answer."""

_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}  # ShareGPT
_MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")


class Unusable(Exception):
    """A record is no prompt. Args: reason, one of a few that can be counted, and detail."""


def existing_file(given: str, root: Path) -> Path:
    """The file that `given` names, relative to `root`. Raises PromptsError: missing, a folder, unknown suffix."""
    path = root / Path(given).expanduser()
    if not path.exists():
        raise PromptsError(f"prompts.path = {given!r}: there is no file {path}. Check the path.")
    if path.is_dir() or not path.name.lower().endswith(SUFFIXES):
        raise PromptsError(f"prompts.path = {given!r} must name files that end in {', '.join(SUFFIXES)}.")
    return path


def rows_of(path: Path, fields: tuple[str, ...], others: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    """Line or row number from 1 and what `record_of` takes. Raises OSError, EOFError, ValueError, zlib.error."""
    if path.suffix.lower() != ".parquet":
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
        return
    import pyarrow.parquet as pq  # here, since it takes a third of a second that readers of JSONL need not wait

    with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        # Only what is needed, or everything where there is no prompt, so that messages can say what there is.
        columns = [name for name in names if name in (*fields, *others)] if set(names) & set(fields) else None
        batches = table.iter_batches(batch_size=256, columns=columns)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def record_of(row: Any) -> dict[str, Any]:
    """The record of a line's bytes or of a row's values. Raises Unusable."""
    try:
        value = json.loads(row) if isinstance(row, bytes) else row
    except (ValueError, RecursionError) as error:
        raise Unusable("not valid JSON", str(error)) from None
    if not isinstance(value, dict):
        raise Unusable("not a JSON object", f"found {type(value).__name__}")
    return value


def messages_of(record: Mapping[str, Any], fields: tuple[str, ...]) -> tuple[Message, ...]:
    """The prompt in the first of `fields` that a record has: a text as one user message, or a chat without its answer.

    Of each message `role`, `content` and the fields of tools and reasoning are kept, if not null. Raises Unusable.
    """
    name = next((name for name in fields if record.get(name) is not None), None)
    if name is None:
        raise Unusable("no prompt field", f"no {' or '.join(fields)}; found {', '.join(record) or 'nothing'}")
    value = record[name]
    if isinstance(value, list):
        return _chat(value)
    if not isinstance(value, str):
        raise Unusable("wrong type", f"{name} must be text or a list of messages, found {type(value).__name__}")
    if name == "instruction" and record.get("input"):
        value = f"{value}\n\n{record['input']}"
    if not value.strip():
        raise Unusable("empty prompt", f"{name} is blank")
    return ({"role": "user", "content": value},)


def _chat(value: list[Any]) -> tuple[Message, ...]:
    turns = [_turn(number, item) for number, item in enumerate(value, 1)]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        raise Unusable("no turn to answer", "a chat must have a user turn, and end in one before its last answer")
    if isinstance(turns[-1]["content"], str) and not turns[-1]["content"].strip():
        raise Unusable("empty prompt", "the last turn is blank")
    return tuple(turns)


def _turn(number: int, item: Any) -> dict[str, Any]:
    """One message, OpenAI's `role` and `content` or ShareGPT's `from` and `value`."""
    if not isinstance(item, Mapping):
        raise Unusable("wrong type", f"message {number} must be an object, found {type(item).__name__}")
    role, content = item.get("role") or item.get("from"), item.get("content", item.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        raise Unusable("unknown role", f"message {number} has role {role!r}; known: {', '.join(_ROLES)}")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    is_text = all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts) and parts
    if not is_text and not (content is None and role == "assistant" and item.get("tool_calls")):
        raise Unusable("wrong type", f"message {number} must have text as content, found {type(content).__name__}")
    kept = {key: item[key] for key in _MESSAGE_KEYS if item.get(key) is not None}
    return {"role": _ROLES[role], "content": content, **kept}
