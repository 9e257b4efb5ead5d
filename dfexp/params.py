"""The parameters of a run: one YAML file, validated before anything starts.

`RunSpec` and its groups define every key, its type, range and default. `load` reads a file, lays overrides over it and
reports every mistake at once with file, key, value and the nearest right key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from dfexp.errors import ParamsError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
_SECRET = re.compile(r"(?<!max_)(key|token|secret|password|credential)s?$", re.IGNORECASE)


class Group(BaseModel):
    """A part of a parameter file: unknown keys and wrong types are errors, values never change after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FleetGroup(Group):
    """Keys that every engine has."""

    name: Name | None = Field(None, description="folder under outputs/fleets; default: the run's name")


class LlamacppFleet(FleetGroup):
    """Servers of the embedded engine: llama.cpp as child processes of this machine."""

    engine: Literal["llamacpp"]
    servers: int = Field(1, ge=1, le=64, description="number of server processes")
    model: str | None = Field(None, description="path of a GGUF file; default: the bundled SmolLM2-135M-Instruct")
    max_running_requests: int = Field(4, ge=1, le=256, description="requests that one server decodes at once")
    context_length: int = Field(2048, ge=128, description="tokens of prompt and answer together, per request")
    threads: int = Field(1, ge=1, description="CPU threads per server; more than the idle cores make it collapse")
    host: str = Field("127.0.0.1", description="address to listen on")
    start_timeout_s: float = Field(120.0, gt=0, description="time to the first generated token")


class ExternalFleet(FleetGroup):
    """Servers that somebody else runs: any OpenAI-compatible URLs, an SGLang fleet included."""

    engine: Literal["external"]
    urls: list[str] = Field(min_length=1, description="base URLs, such as http://127.0.0.1:30000 (with or without /v1)")
    model: str | None = Field(None, description="model name to send; default: the first that the server lists")
    api_key_env: str | None = Field(None, description="NAME of the environment variable that holds the API key")
    max_running_requests: int | None = Field(None, ge=1, description="requests a server decodes at once, if unsaid")
    context_length: int | None = Field(None, ge=1, description="tokens of prompt and answer together, if unsaid")
    start_timeout_s: float = Field(60.0, gt=0, description="time in which each URL must answer a request")

    @model_validator(mode="after")
    def _urls_are_distinct_http(self) -> Self:
        for url in self.urls:
            if not re.match(r"^https?://[^/@\s]+(/[^@\s]*)?$", url):
                raise ValueError(f"{url!r} is not an http(s) URL without user and password")
        if len({url.rstrip("/").removesuffix("/v1") for url in self.urls}) < len(self.urls):
            raise ValueError("the same server is listed twice")
        return self


class PromptsGroup(Group):
    """Where the prompts come from."""

    path: str | list[str] = Field(description="JSONL or Parquet files, by suffix")
    column: str | None = Field(None, description="field with the text or the messages; default: found by its name")
    id_column: str | None = Field(None, description="field with an id; default: `id` where there is one")
    system: str | None = Field(None, description="system message put before prompts that have none")
    limit: int | None = Field(None, ge=1, description="take only the first so many")


class GenerationGroup(Group):
    """How completions are made and written."""

    max_tokens: Literal["fit"] | Annotated[int, Field(ge=1)] = Field(
        "fit", description="tokens an answer may have; fit: all the room that the prompt leaves"
    )
    temperature: float | None = Field(None, ge=0, le=2, description="default: the engine's")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**31, description="row i is sampled with seed + i; default: none")
    stop: list[str] | None = None
    enable_thinking: bool | None = Field(None, description="passed to the chat template; default: the template's own")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="more fields for every request's body")
    concurrency: Literal["auto"] | Annotated[int, Field(ge=1, le=100_000)] = Field(
        "auto", description="requests in flight per server; auto: the server's own cap and a small queue"
    )
    rows_per_shard: int = Field(500, ge=1, le=100_000)
    max_attempts: int = Field(4, ge=1, le=100, description="times a row is sent before it counts as failed")
    slowest_tok_per_s: float = Field(
        2.0, gt=0, description="slowest healthy decode rate of one request; sets the time limit of a request"
    )
    drain_s: float = Field(60.0, ge=0, description="time that requests in flight get when the run is stopped")
    give_up_s: float = Field(1800.0, gt=0, description="time without any reachable server after which the run stops")
    on_orphan: Literal["stop", "continue"] = Field(
        "stop", description="what the run does when the notebook or command that started it is gone"
    )
    progress_interval_s: float = Field(10.0, gt=0, description="one log line per interval when run unattended")


class StoreGroup(Group):
    """Where shards are uploaded. It has no keys: the run's folder is the only copy."""


class ReportGroup(Group):
    """What 04_report shows."""

    title: str | None = None
    examples: int = Field(10, ge=0, le=1000, description="completions shown in full, drawn at random")
    seed: int = Field(0, ge=0, description="of the draw")


AnyFleet = Annotated[LlamacppFleet | ExternalFleet, Field(discriminator="engine")]


class RunSpec(Group):
    """All parameters of a run."""

    run: Name = Field(description="name of the run, and of its folder under outputs/")
    outputs: str = Field("outputs", description="folder of all runs and fleets")
    fleet: AnyFleet
    prompts: PromptsGroup
    generation: GenerationGroup = GenerationGroup()
    store: StoreGroup = StoreGroup()
    report: ReportGroup = ReportGroup()

    @property
    def fleet_name(self) -> str:
        """The fleet's folder name."""
        return self.fleet.name or self.run


PARAMETERS = tuple(RunSpec.model_fields)
"""Top-level names, which are also the names in the parameters cell of every notebook."""


def load(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read and validate a parameter file, `group.key=value` overrides laid over it.

    Raises ParamsError that lists every mistake.
    """
    tree = read_yaml(path)
    for override in overrides:
        tree = merge(tree, _parse_override(override))
    return validate(tree, str(path))


def validate(tree: Mapping[str, Any], source: str) -> RunSpec:
    """Check a tree of parameters; `source` names it in messages. Raises ParamsError that lists every mistake."""
    try:
        return RunSpec.model_validate(dict(tree))
    except ValidationError as error:
        lines = [_explain(item, tree) for item in error.errors(include_url=False)]
        raise ParamsError(
            f"{source}: {len(lines)} wrong parameter(s); nothing was started.\n  " + "\n  ".join(lines)
        ) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, read safely. Raises ParamsError: no file, bad YAML, a key given twice, not a mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ParamsError(f"cannot read the parameter file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ParamsError(f"{path} is not UTF-8 text: {error}.") from error
    try:
        tree = yaml.load(text, _UniqueKeyLoader)  # noqa: S506 (a SafeLoader subclass)
    except yaml.YAMLError as error:
        raise ParamsError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else type(tree).__name__
        raise ParamsError(f"{path} must hold `key: value` lines ({', '.join(PARAMETERS)}); found {found}.")
    return tree


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` laid over `base`: mappings key by key, everything else replaced. Neither argument is changed."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, which YAML would silently resolve to the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if isinstance(key, (str, int, float, bool)) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, (str, int, float, bool)):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _parse_override(text: str) -> dict[str, Any]:
    """`generation.max_tokens=64` as a nested mapping; the value is YAML."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ParamsError(f"--set {text!r} is not of the form group.key=value, such as generation.max_tokens=4096.")
    try:
        tree: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ParamsError(f"--set {text!r}: the value is not valid YAML: {error}") from None
    for key in reversed(keys):
        tree = {key: tree}
    return dict(tree)


def _explain(item: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """One mistake in one line: key, value, what is wrong, the nearest right key or what would be right."""
    path, value = _locate(item["loc"], tree)
    key = ".".join(map(str, path))
    shown = "(value hidden)" if path and _SECRET.search(str(path[-1])) else _short(value)
    kind = item["type"]
    if kind == "extra_forbidden":
        return f"{key} = {shown}: unknown key. {_nearest(path, tree)}"
    if kind == "missing":
        return f"{key}: missing, and it has no default. {_describe(path, tree)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"{key}.engine = {_short(_get(value, 'engine'))}: must be one of {', '.join(_engines())}."
    hint = _type_hint(value)
    return f"{key} = {shown}: {item['msg'].removeprefix('Value error, ')}.{hint} {_describe(path, tree)}".rstrip()


def _type_hint(value: Any) -> str:
    """Why a value that looks like a number is text to YAML."""
    if isinstance(value, str):
        if re.fullmatch(r"[-+]?\d+(\.\d+)?e[-+]?\d+", value, re.IGNORECASE):
            return " (YAML reads it as text; write it with a point and a sign, such as 1.0e-3)"
        if re.fullmatch(r"[-+]?[\d_]+(\.\d+)?", value):
            return " (it is text; remove the quotes)"
    return ""


def _locate(loc: Sequence[str | int], tree: Any) -> tuple[list[str | int], Any]:
    """The user's path and value for a pydantic location, whose union branches the user never wrote."""
    path: list[str | int] = []
    value: Any = tree
    for position, step in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(value, Mapping) and (step in value or (last and step not in _engines())):
            path.append(step)
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            path.append(step)
            value = value[step]
    return path, value


def _nearest(path: Sequence[str | int], tree: Mapping[str, Any]) -> str:
    """The right key that the user most likely meant: in this group first, then anywhere."""
    *parents, wrong = [str(step) for step in path]
    group = _group_at(parents, tree)
    here = list(group.model_fields) if group else []
    prefix = ".".join([*parents, ""])
    close = difflib.get_close_matches(str(wrong), here, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {prefix}{close[0]}?"
    elsewhere = [full for full in _all_keys(tree) if full.split(".")[-1] == wrong]
    if elsewhere:
        return f"Did you mean {elsewhere[0]}?"
    return f"Known keys: {', '.join(prefix + key for key in here)}." if here else "This group takes no keys."


def _describe(path: Sequence[str | int], tree: Mapping[str, Any]) -> str:
    """The documented meaning of a key, in parentheses."""
    *parents, key = [str(step) for step in path if not isinstance(step, int)] or [""]
    group = _group_at(parents, tree)
    field = group.model_fields.get(key) if group else None
    return f"({field.description})" if field and field.description else ""


def _group_at(parents: Iterable[str], tree: Mapping[str, Any]) -> type[Group] | None:
    """The group class at a path of keys; the fleet's class follows its engine."""
    group: type[Group] | None = RunSpec
    for key in parents:
        if key == "fleet" and group is RunSpec:
            group = _engines().get(_get(tree.get("fleet"), "engine"))
            continue
        annotation = group.model_fields[key].annotation if group and key in group.model_fields else None
        group = annotation if isinstance(annotation, type) and issubclass(annotation, Group) else None
    return group


def _all_keys(tree: Mapping[str, Any]) -> list[str]:
    """Every dotted key of the groups."""
    keys = []
    for name in RunSpec.model_fields:
        group = _group_at([name], tree)
        keys += [f"{name}.{key}" for key in group.model_fields] if group else [name]
    return keys


def _engines() -> dict[Any, type[Group]]:
    """Engine name to group class."""
    union = get_args(AnyFleet)[0]
    classes = get_args(union) if get_origin(union) is not None or get_args(union) else (union,)
    return {get_args(cls.model_fields["engine"].annotation)[0]: cls for cls in classes}


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _short(value: Any) -> str:
    """A value for a message, with nested secrets hidden and long ones cut."""
    if isinstance(value, Mapping):
        value = {key: "(hidden)" if _SECRET.search(str(key)) else item for key, item in value.items()}
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
