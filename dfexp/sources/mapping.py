"""What a record means: the prompts in it, whatever its fields are called."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dfexp.params_prompts import PromptsGroup, PromptsPart
from dfexp.records import Message
from dfexp.sources.files import TextLine

FIELDS = ("messages", "conversations", "prompt", "instruction", "question", "query", "text")
"""Fields that hold a prompt; the first that a record has wins. `text` is last: in some sets it repeats the answer."""

_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")}  # ShareGPT
_MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")


class Unusable(Exception):
    """A record, or a prompt of it, is left out. Args: reason, one of a few that can be counted, and detail."""


class NoPrompt(Unusable):
    """It is no prompt: damaged, empty, or not understood."""


def record_of(row: Any) -> dict[str, Any]:
    """The record of a line's bytes or of a row's values. Raises NoPrompt."""
    try:
        if isinstance(row, TextLine):
            return {"text": row.rstrip(b"\r\n").decode()}
        value = json.loads(row) if isinstance(row, bytes) else row
    except UnicodeDecodeError as error:
        raise NoPrompt("not UTF-8", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise NoPrompt("not valid JSON", str(error)) from None
    if not isinstance(value, dict):
        raise NoPrompt("not a JSON object", f"found {type(value).__name__}")
    return value


class Meaning:
    """What the records of one source mean. `columns`: those that are read beside `fields`, which hold the prompt."""

    def __init__(self, part: PromptsPart, group: PromptsGroup) -> None:
        """Args: group, which says what the part leaves open."""

        def given(name: str, default: Any = None) -> Any:
            return next((value for each in (part, group) if (value := getattr(each, name)) is not None), default)

        self.fields: tuple[str, ...] = (column,) if (column := given("column")) else FIELDS
        self.id_field, self.names_id = given("id_column", "id"), given("id_column") is not None
        self._system, self._system_field, self._turns = given("system"), given("system_column"), given("turns", "last")
        self._role_key, self._content_key, self._roles = given("role_key"), given("content_key"), given("roles", {})
        self.takes_usual = False  # also messages of the usual keys, where it was given others
        self.columns = ("input", self.id_field, *([self._system_field] if self._system_field else ()))

    def prompts_of(self, record: Mapping[str, Any]) -> Iterator[tuple[str | None, tuple[Message, ...]]]:
        """Each prompt of a record: its id, None where the record has none, and its messages. Raises NoPrompt."""
        found = record.get(self.id_field)
        name = str(found) if isinstance(found, str | int | float) and found != "" else None
        chat = self._chat(record)
        system = (record.get(self._system_field) if self._system_field else None) or self._system
        if system and not isinstance(system, str):
            raise NoPrompt("wrong type", f"{self._system_field} must be text, found {type(system).__name__}")
        if system and not any(message["role"] in ("system", "developer") for message in chat):
            chat = [{"role": "system", "content": system}, *chat]
        ends = self._ends(chat)
        for number, end in enumerate(ends, 1):
            yield f"{name}:{number}" if name is not None and self._turns == "each" else name, tuple(chat[:end])

    def _chat(self, record: Mapping[str, Any]) -> list[Message]:
        """All messages in the first of the fields that the record has: a text is one of the user."""
        name = next((name for name in self.fields if record.get(name) is not None), None)
        if name is None:
            found = ", ".join(record) or "nothing"
            raise NoPrompt("no prompt field", f"no {' or '.join(self.fields)}; found {found}")
        value = record[name]
        if isinstance(value, list):
            return [self._turn(number, item) for number, item in enumerate(value, 1)]
        if not isinstance(value, str):
            raise NoPrompt("wrong type", f"{name} must be text or a list of messages, found {type(value).__name__}")
        if name == "instruction" and (more := record.get("input")):
            if not isinstance(more, str | int | float):
                raise NoPrompt("wrong type", f"input must be text, found {type(more).__name__}")
            value = f"{value}\n\n{more}"
        if not value.strip():
            raise NoPrompt("empty prompt", f"{name} is blank")
        return [{"role": "user", "content": value}]

    def _ends(self, chat: list[Message]) -> list[int]:
        """After how many messages the prompts end: in turns of the user, or of a tool, that an answer follows."""
        length = len(chat)
        while length and chat[length - 1]["role"] == "assistant":
            length -= 1
        if not length or chat[length - 1]["role"] not in ("user", "tool"):
            raise NoPrompt("no turn to answer", "a chat must have a user turn, and end in one before its last answer")
        ends = [length]
        if self._turns != "last":
            roles = [message["role"] for message in chat[:length]] + ["assistant"]
            ends = [n for n in range(1, length + 1) if roles[n - 1] in ("user", "tool") and roles[n] == "assistant"]
        ends = ends[:1] if self._turns == "first" else ends
        said = [end for end in ends if text_of(chat[end - 1]).strip()]
        if not said:
            raise NoPrompt("empty prompt", f"the {self._turns} turn is blank")
        return said

    def _turn(self, number: int, item: Any) -> dict[str, Any]:
        """One message, OpenAI's `role` and `content`, ShareGPT's `from` and `value`, or by keys that were given."""
        if not isinstance(item, Mapping):
            raise NoPrompt("wrong type", f"message {number} must be an object, found {type(item).__name__}")
        own, key = self._role_key, self._content_key
        is_usual = own not in item and key not in item and self.takes_usual
        role = item.get(own) if own and not is_usual else item.get("role") or item.get("from")
        usual = item.get("value") if (said := item.get("content")) is None else said
        content = item.get(key) if key and not is_usual else usual
        known = {**_ROLES, **self._roles} if self._roles else _ROLES
        if not isinstance(role, str) or role not in known:
            raise NoPrompt("unknown role", f"message {number} has role {role!r}; known: {', '.join(known)}")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        is_text = all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts) and parts
        if not is_text and not (content is None and known[role] == "assistant" and item.get("tool_calls")):
            raise NoPrompt("wrong type", f"message {number} must have text as content, found {type(content).__name__}")
        kept = {name: item[name] for name in _MESSAGE_KEYS if item.get(name) is not None}
        return {"role": known[role], "content": content, **kept}


def text_of(message: Message) -> str:
    """What a message says, without what its tools were called with."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def said_by(messages: Iterable[Message], *, systems: bool) -> str:
    """The text of messages, one below the other; with or without those of the system."""
    return "\n".join(text_of(one) for one in messages if systems or one["role"] not in ("system", "developer"))
