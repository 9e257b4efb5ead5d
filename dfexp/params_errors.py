"""What is wrong with a tree of parameters, in the words of the person who wrote it; secrets never appear."""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

SECRET_KEY = re.compile(
    r"(?i)(keys?|(?<!per_|rst_)token|secrets?|pass(w(or)?d|phrase)?|_p(at|wd)|credentials?|authorization)[_\d]*$"
)
_SECRET_TEXT = re.compile(
    r"(?i)(?<=://)\S+(?=@)"
    r"|(?<=bearer )\S+|(?:(?<=key=)|(?<=token=)|(?<=secret=)|(?<=password=))[^&\s'\"]+"
    r"|(?:(?<=key\":)|(?<=token\":)|(?<=secret\":)|(?<=password\":))\s*\"[^\"]+\"|\b(?:sk|hf|ghp|pk)[-_][\w-]{8,}"
)


class _Key(NamedTuple):
    """A key that exists. `loc` is pydantic's place of it, which has the engine behind `fleet`."""

    loc: tuple[str, ...]
    dotted: str
    engine: str | None
    description: str | None


def explain(error: ValidationError, tree: Mapping[str, Any], spec: type[BaseModel]) -> list[str]:
    """One line for each wrong key: the key, its value, what would be right or the nearest right key, its meaning."""
    known = list(_keys(spec, tree))
    found: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_path(item, tree), []).append(item)
    # The text branch of `text or list` fails as well when one item of the list is wrong: only the item is news.
    deepest = [path for path in found if not any(path == other[: len(path)] != other for other in found)]
    return [_line(".".join(map(str, path)), found[path], known) for path in deepest]


def shown(value: Any, key: str = "", depth: int = 0) -> str:
    """The value of a key for a message: short, and hidden if it may be a secret."""
    is_count = isinstance(value, int | float) and "token" in key.lower()  # max_token: 64, misspelt
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    if SECRET_KEY.search(key.removesuffix("_env")) and not is_count:
        return "(hidden)"
    if isinstance(value, Mapping | list) and depth > 3:
        return "..."
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{name}: {shown(item, str(name), depth + 1)}" for name, item in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(shown(item, "", depth + 1) for item in value) + "]"
    else:
        text = hide_secrets(repr(value) if isinstance(value, str) else str(value))
    return text if len(text) <= 80 else text[:77] + "..."


def hide_secrets(text: str) -> str:
    """The text without passwords in URLs and without what looks like an access token."""
    return _SECRET_TEXT.sub("***", text)


def looks_secret(name: str, value: Any) -> bool:
    """Whether a variable or a flag of this name and value would give a secret away."""
    is_path = str(value).startswith(("/", "~", "./"))  # whose folders may be called as tokens begin
    return bool(SECRET_KEY.search(name)) or (not is_path and hide_secrets(str(value)) != str(value))


def _keys(model: type[BaseModel], tree: Any, loc: tuple[str, ...] = (), dotted: str = "") -> Iterator[_Key]:
    """Every key of the model and of the groups in it, those of all engines, and of groups that the tree names."""
    engine = loc[1] if len(loc) == 2 and "engine" in model.model_fields else None
    for name, field in model.model_fields.items():
        yield _Key((*loc, name), dotted + name, engine, field.description)
        given: Any = tree.get(name) if isinstance(tree, Mapping) else None
        for group in (field.annotation, *get_args(field.annotation)):
            if isinstance(group, type) and issubclass(group, BaseModel):
                tag = get_args(group.model_fields["engine"].annotation) if field.discriminator else ()
                is_named = get_origin(field.annotation) is dict and isinstance(given, Mapping)
                parts = {(str(own),): part for own, part in given.items()} if is_named else {(): given}
                for own, part in parts.items():
                    yield from _keys(group, part, (*loc, name, *tag, *own), ".".join((dotted + name, *own, "")))


def _path(item: ErrorDetails, tree: Any) -> tuple[str | int, ...]:
    """The user's path to the mistake: pydantic's also names branches of unions, which the user never wrote."""
    path: tuple[str | int, ...] = ()
    for step in item["loc"]:
        is_written = step in tree if isinstance(tree, Mapping) else isinstance(tree, list) and isinstance(step, int)
        if is_written:
            path, tree = (*path, step), tree[step]
    if item["type"] == "missing":
        return (*path, item["loc"][-1])
    return (*path, "engine") if item["type"].startswith("union_tag") else path


def _named(item: ErrorDetails) -> tuple[str, ...]:
    """Pydantic's place of a mistake without the places in lists."""
    return tuple(step for step in item["loc"] if isinstance(step, str))


def _line(key: str, items: list[ErrorDetails], known: list[_Key]) -> str:
    item, kind, value = items[0], items[0]["type"], items[0]["input"]
    loc = _named(item)
    meant = [one.description for one in known if one.loc == loc[: len(one.loc)]]
    meaning = f" ({meant[-1]})" if meant and meant[-1] else ""
    if kind == "missing":
        return f"{key}: missing, and it has no default.{meaning}"
    if kind.startswith("union_tag"):
        engines = " or ".join(repr(one.engine) for one in known if one.dotted == key)
        return f"{key} = {shown(value.get('engine'))}: must be {engines}."
    head = f"{key} = {shown(value, key)}"
    if kind in ("extra_forbidden", "invalid_key"):
        return f"{head}: unknown key. {_nearest(key, item, known)}"
    if kind == "value_error":
        words = hide_secrets(str(item["ctx"]["error"]))
        return f"{head}: {words}" if key else words
    said = {re.sub("a valid dictionary.*", "a group of keys", one["msg"]): None for one in items}
    right = " or ".join(said).replace("Input should be", "must be").replace("or must be", "or")
    return f"{head}: {right}.{_hint(items)}{meaning}"


def _nearest(key: str, item: ErrorDetails, known: list[_Key]) -> str:
    """The right key that the user most likely meant: in the same group first, then anywhere."""
    name = key.split(".")[-1]
    here = {one.loc[-1]: one for one in known if one.loc[:-1] == _named(item)[:-1]}
    # Of several, the first of the least nested: a simulated fleet may have a plan of its own.
    by_depth = sorted(known, key=lambda one: one.dotted.count("."))
    everywhere = {one.loc[-1]: one for one in reversed(by_depth)}
    for keys, cutoff in ((here, 0.6), (everywhere, 0.75)):
        for close in difflib.get_close_matches(name, keys, n=1, cutoff=cutoff):
            meant = keys[close]
            guess = f"Did you mean {meant.dotted}?" if meant.dotted != key else ""
            elsewhere = meant.engine if key.startswith("fleet.") and close not in here else None
            engine = f"It belongs to engine {elsewhere}." if elsewhere else ""
            return f"{guess} {engine}".strip()
    return f"Known keys: {', '.join(here) or 'none'}."


def _hint(items: list[ErrorDetails]) -> str:
    """Why a value that looks right to its writer is not, where the reason is in how YAML reads it."""
    value, kinds = items[0]["input"], {item["type"] for item in items}
    if value is None:
        return " A key without a value is nothing: write a value, or remove the line."
    if isinstance(value, str) and kinds & {"int_type", "float_type"} and re.match(r"[-+.]*\d", value):
        return " YAML reads it as text: remove the quotes; 1e-3 is written 1.0e-3."
    if kinds <= {"string_type", "literal_error"} and not isinstance(value, str | list | Mapping):
        return " Put it in quotes: YAML does not read it as text."
    return ""
