"""What is wrong with a tree of parameters, in the words of the person who wrote it.

pydantic says that a value is wrong and where; what would be right is read off the model itself, so that a message says
"must be 'fit' or a whole number of at least 1" once, and not one line for each branch of a union. Secrets never appear.
"""

from __future__ import annotations

import datetime
import difflib
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_SECRET_KEY = re.compile(
    r"(keys?|token|secrets?|passw(or)?d|passphrase|credentials?|authorization|_env)$", re.IGNORECASE
)
_SECRET_TEXTS = (
    (re.compile(r"(?<=://)[^/\s@]*@"), "***@"),
    (re.compile(r"(?i)([?&][a-z_-]*(?:key|token|secret|password|signature)=)[^&\s'\"]+"), r"\1***"),
    (re.compile(r"\b((?:sk|hf|ghp|pk)[-_])[A-Za-z0-9_-]{8,}"), r"\1***"),
    (re.compile(r"(?i)\b(bearer )\S+"), r"\1***"),
)


@dataclass(frozen=True, slots=True)
class Says:
    """Metadata of an annotated type: what a value of it must be, where its pattern would say nothing to a reader."""

    text: str


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in the tree: the model that has its last key, and the field and annotation of what belongs there."""

    path: tuple[str | int, ...]
    value: Any
    annotation: Any
    holder: type[BaseModel] | None = None
    field: FieldInfo | None = None


def explain(error: ValidationError, tree: Mapping[str, Any], spec: type[BaseModel]) -> list[str]:
    """One line for each wrong key: the key, its value, what it must be or the nearest right key, what it means."""
    found: dict[tuple[str | int, ...], tuple[Mapping[str, Any], _Place]] = {}
    for item in error.errors(include_url=False):
        place = _walk(item["loc"], tree, spec)
        found.setdefault(place.path, (item, place))
    # The text branch of `text or list` fails as well when one item of the list is wrong: only the item is news.
    return [
        _line(item, place, tree, spec)
        for path, (item, place) in found.items()
        if not any(other[: len(path)] == path and other != path for other in found)
    ]


def shown(value: Any, depth: int = 0) -> str:
    """A value for a message: short, in the spelling of YAML, secrets hidden."""
    if isinstance(value, Mapping):
        items = (f"{key}: {_shown_at(key, item, depth + 1)}" for key, item in value.items())
        text = "{" + ("..." if depth > 3 else ", ".join(items)) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ("..." if depth > 3 else ", ".join(shown(item, depth + 1) for item in value)) + "]"
    elif value is None or isinstance(value, bool):
        text = {None: "nothing", True: "true", False: "false"}[value]
    else:
        text = str(value) if isinstance(value, (int, float, datetime.date)) else repr(value)
    text = hide_secrets(text)
    return text if len(text) <= 80 else text[:77] + "..."


def hide_secrets(text: str) -> str:
    """The text without passwords in URLs and without what looks like an access token."""
    for pattern, instead in _SECRET_TEXTS:
        text = pattern.sub(instead, text)
    return text


def _shown_at(key: object, value: Any, depth: int = 0) -> str:
    """The value of a key, hidden if the key's name says that it is a secret."""
    named = _SECRET_KEY.search(str(key))
    harmless = value is None or isinstance(value, bool)
    counts = isinstance(value, (int, float)) and str(key).lower().endswith("token")  # max_token: 64, misspelt
    return "(hidden)" if named and not harmless and not counts else shown(value, depth)


def _walk(loc: Sequence[str | int], tree: Any, spec: type[BaseModel]) -> _Place:
    """The user's place for a pydantic location, which also names branches of unions that the user never wrote."""
    place, is_tag = _Place(path=(), value=tree, annotation=spec), False
    for step in loc:
        if not is_tag:
            before, place = place, _step(place, step)
            is_tag = place is not before and place.field is not None and place.field.discriminator is not None
        else:
            is_tag = False
    return place


def _step(place: _Place, step: str | int) -> _Place:
    path, model = (*place.path, step), _model_at(place)
    value = place.value.get(step) if isinstance(place.value, Mapping) else None
    if model is not None:
        field = model.model_fields.get(str(step))
        return _Place(path, value, _annotation(field) if field else Any, model, field)
    if isinstance(place.value, list) and isinstance(step, int):
        items = [get_args(part)[0] for part in _parts(place.annotation) if get_origin(part) is list]
        return _Place(path, place.value[step], items[0] if items else Any)
    if isinstance(place.value, Mapping) and step in place.value:
        return _Place(path, value, Any)
    return place  # a branch of a union, or pydantic's mark that a key is wrong


def _model_at(place: _Place) -> type[BaseModel] | None:
    """The model whose keys belong at a place; in a union the value of its discriminator chooses."""
    if place.field is not None and isinstance(place.field.discriminator, str):
        tag = place.value.get(place.field.discriminator) if isinstance(place.value, Mapping) else None
        return next((model for name, model in _tags(place.field).items() if name == tag), None)
    return _as_model(place.annotation)


def _as_model(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _annotation(field: FieldInfo) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _tags(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """Value of the discriminator to model, for a field that is a union of models."""
    models = [_as_model(part) for part in _parts(field.annotation)]
    name = str(field.discriminator)
    return {get_args(model.model_fields[name].annotation)[0]: model for model in models if model}


def _line(item: Mapping[str, Any], place: _Place, tree: Mapping[str, Any], spec: type[BaseModel]) -> str:
    key, kind = ".".join(map(str, place.path)), item["type"]
    if kind == "missing":
        return f"{key}: missing, and it has no default. {_what_to_write(place)}"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _wrong_tag(key, place)
    head = f"{key} = {_shown_at(place.path[-1], place.value)}"
    if kind in ("extra_forbidden", "invalid_key"):
        return f"{head}: unknown key. {_nearest(place, tree, spec)}"
    if item["loc"][-1] == "[key]":
        return f"{key}: the key must be text; put it in quotes."
    if kind == "value_error":
        return f"{head}: {hide_secrets(str(item['ctx']['error']))}"
    expected = _expected(place.annotation)
    if place.field is not None and place.field.discriminator:
        expected = (
            f"a group of keys with {place.field.discriminator}: {_either([repr(tag) for tag in _tags(place.field)])}"
        )
    parts = [f"{head}: must be {expected}.", _why(place), _meaning(place.field)]
    return " ".join(part for part in parts if part)


def _what_to_write(place: _Place) -> str:
    *parents, key = place.path
    under = f" under `{'.'.join(map(str, parents))}:`" if parents else ""
    model = _as_model(place.annotation)
    if model is not None or (place.field and place.field.discriminator):
        needed = [name for name, field in model.model_fields.items() if field.is_required()] if model else []
        inside = ", ".join(needed) or (str(place.field.discriminator) if place.field else "")
        return f"Write a group `{key}:`{under} with the key {inside}."
    return f"Write `{key}: ...`{under}: {_expected(place.annotation)}. {_meaning(place.field)}".rstrip()


def _wrong_tag(key: str, place: _Place) -> str:
    assert place.field is not None
    tag, known = str(place.field.discriminator), list(_tags(place.field))
    choices = _either([repr(name) for name in known])
    if tag not in place.value:
        return f"{key}.{tag}: missing, and it has no default. Write `{tag}: ...` under `{key}:`: {choices}."
    wrong = place.value[tag]
    near = difflib.get_close_matches(str(wrong).lower(), known, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]}?" if near else ""
    return f"{key}.{tag} = {shown(wrong)}: must be {choices}.{guess}"


def _nearest(place: _Place, tree: Mapping[str, Any], spec: type[BaseModel]) -> str:
    """The right key that the user most likely meant: in this group first, then anywhere."""
    *parents, wrong = map(str, place.path)
    prefix, here = ".".join([*parents, ""]), list(place.holder.model_fields) if place.holder else []
    everywhere = dict(_all_keys(spec, tree))
    for full, note in everywhere.items():
        if full.endswith(f".{wrong}_env") and _SECRET_KEY.search(wrong):
            return f"A secret never stands in a file: name its environment variable with {full}.{note}"
    if f"{prefix}{wrong}" in everywhere:
        return everywhere[f"{prefix}{wrong}"].strip()
    close = difflib.get_close_matches(wrong, here, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {prefix}{close[0]}?"
    by_name = {full.split(".")[-1]: full for full in reversed(everywhere)}
    close = difflib.get_close_matches(wrong, by_name, n=1, cutoff=0.75)
    if close:
        full = by_name[close[0]]
        return f"Did you mean {full}?{everywhere[full]}"
    return f"Known keys: {', '.join(prefix + key for key in here)}." if here else "This group takes no keys."


def _all_keys(spec: type[BaseModel], tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every dotted key, and what to add where only another choice than the user's has it; the user's come last."""
    for name, field in spec.model_fields.items():
        yield name, ""
        chosen = _model_at(_Place((name,), tree.get(name), field.annotation, spec, field))
        models = _tags(field) if field.discriminator else {"": chosen}
        for tag, model in sorted(models.items(), key=lambda pair: pair[1] is chosen):
            for key in model.model_fields if model else ():
                yield f"{name}.{key}", "" if model is chosen else f" Only {name}.{field.discriminator} {tag} has it."


def _expected(annotation: Any, limits: tuple[Any, ...] = ()) -> str:
    """What a value of this type must be, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _expected(args[0], (*limits, *_flat(args[1:])))
    said = [limit.text for limit in limits if isinstance(limit, Says)]
    if said:
        return said[0]
    if origin in (Union, types.UnionType):
        return _either(list(dict.fromkeys(_expected(part, limits) for part in args if part is not type(None))))
    if origin is Literal:
        return _either([repr(value) for value in args])
    if origin is list:
        item, least = _expected(args[0]), [limit.min_length for limit in limits if isinstance(limit, MinLen)]
        count = f"{least[0]} or more " if least else ""
        return f"a list of {count}texts" if item == "text" else f"a list of {count}items, each {item}"
    model = _as_model(annotation)
    if model is not None:
        return f"a group of keys ({', '.join(model.model_fields) or 'it has none'})"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(annotation, "a group of keys") + _range(limits)


def _range(limits: tuple[Any, ...]) -> str:
    low = [f"of at least {limit.ge}" for limit in limits if isinstance(limit, Ge)]
    low += [f"above {limit.gt}" for limit in limits if isinstance(limit, Gt)]
    high = [f"of at most {limit.le}" for limit in limits if isinstance(limit, Le)]
    high += [f"below {limit.lt}" for limit in limits if isinstance(limit, Lt)]
    words = " and ".join((low + high)[:2]).replace("and of at most", "and at most")
    closed = re.fullmatch(r"of at least (\S+) and at most (\S+)", words)
    return f" from {closed[1]} to {closed[2]}" if closed else f" {words}" if words else ""


def _why(place: _Place) -> str:
    """Why a value that looks right to its writer is not, where the reason is in how YAML reads it."""
    value, kinds = place.value, {get_origin(part) or part for part in _parts(place.annotation)}
    wants_text = bool(kinds & {str, Literal}) and not kinds & {bool}
    if value is None:
        return "A key without a value is nothing: write a value, or remove the line."
    if isinstance(value, bool):
        return "YAML reads yes, no, on and off as true or false: put the word in quotes." if wants_text else ""
    if isinstance(value, (int, float, datetime.date)) and str in kinds:
        kind = "a date" if isinstance(value, datetime.date) else "a number"
        return f"YAML reads it as {kind}: put it in quotes."
    if isinstance(value, float) and not math.isfinite(value):
        return "It must be finite."
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"Write {value:.0f}, without the point."
    if isinstance(value, str) and kinds & {int, float}:
        return _number_hint(value)
    if isinstance(value, str) and bool in kinds and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return "Write true or false, without quotes."
    if isinstance(value, str) and list in kinds and str not in kinds:
        return f"Write a list, even of one: [{hide_secrets(value)}]."
    return ""


def _number_hint(text: str) -> str:
    if re.fullmatch(r"[-+]?[\d_]+(\.\d*)?[eE][-+]?\d+", text):
        mantissa, _, exponent = f"{float(text)!r}".partition("e")
        point = mantissa if "." in mantissa or not exponent else f"{mantissa}.0"
        return (
            f"YAML reads it as text: write {point}e{exponent}."
            if exponent
            else f"YAML reads it as text: write {point}."
        )
    return "It is text: remove the quotes." if re.fullmatch(r"[-+]?[\d_]+(\.\d*)?", text) else ""


def _meaning(field: FieldInfo | None) -> str:
    return f"({field.description})" if field and field.description else ""


def _parts(annotation: Any) -> list[Any]:
    """The branches of a union, without what annotates them; any other type is its own only branch."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for part in get_args(annotation) for inner in _parts(part)]
    return [annotation]


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
