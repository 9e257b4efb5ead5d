"""The parameters of a run: one YAML file, validated before anything starts.

`RunSpec` and its groups define every key, its type, range and default. `load` reads a file, lays overrides over it and
reports every mistake at once with file, key, value and the nearest right key.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from dfexp.errors import ParamsError
from dfexp.params_errors import Says, explain, hide_secrets, shown
from dfexp.params_plan import PlanGroup

Name = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"),
    Says("a name of letters, digits, '.', '_' and '-' that begins with a letter or digit"),
]
EnvName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"),
    Says("the name of an environment variable, never the key itself"),
]
_YAML_FIXES = (
    (
        "cannot start any token",
        "Indent with spaces, never with tabs, and put text that begins with @, ` or % in quotes.",
    ),
    ("mapping values are not allowed", "Put a text that holds a colon in quotes, and line up the keys of a group."),
    ("expected <block end>", "Line up the keys of a group with spaces."),
    ("could not find expected ':'", "Write each parameter as `key: value`, with a space behind the colon."),
    ("is given twice", "Keep one of the two."),
)
_OWN_BODY_KEYS = ("model", "messages", "stream", "stream_options", "n")


class Group(BaseModel):
    """A part of a parameter file: unknown keys and wrong types are errors, values never change after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


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
    api_key_env: EnvName | None = Field(None, description="NAME of the environment variable that holds the API key")
    max_running_requests: int | None = Field(None, ge=1, description="requests a server decodes at once, if unsaid")
    context_length: int | None = Field(None, ge=1, description="tokens of prompt and answer together, if unsaid")
    start_timeout_s: float = Field(60.0, gt=0, description="time in which each URL must answer a request")

    @field_validator("urls")
    @classmethod
    def _urls_are_distinct_http(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if "@" in url:
                raise ValueError(
                    f"{url!r}: a URL must not hold a user or password. Name the variable of the API key with "
                    "fleet.api_key_env."
                )
            if not re.match(r"^https?://[^/\s]+(/\S*)?$", url):
                raise ValueError(f"{url!r} must be an http or https URL, such as http://127.0.0.1:30000.")
        bare = [url.rstrip("/").removesuffix("/v1").lower() for url in urls]
        twice = [url for url in urls if bare.count(url.rstrip("/").removesuffix("/v1").lower()) > 1]
        if twice:
            raise ValueError(f"{' and '.join(map(repr, twice))} are the same server. Name each once.")
        return urls


class PromptsGroup(Group):
    """Where the prompts come from."""

    path: str | Annotated[list[str], Field(min_length=1)] = Field(description="JSONL or Parquet files, by suffix")
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
    top_p: float | None = Field(None, gt=0, le=1, description="default: the engine's")
    top_k: int | None = Field(None, ge=-1, description="default: the engine's; what turns it off is the engine's too")
    min_p: float | None = Field(None, ge=0, le=1, description="default: the engine's")
    seed: int | None = Field(None, ge=0, lt=2**31, description="row i is sampled with seed + i; default: none")
    stop: list[str] | None = Field(None, description="texts at which an answer ends")
    enable_thinking: bool | None = Field(None, description="passed to the chat template; default: the template's own")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="more fields for every request's body")
    concurrency: Literal["auto"] | Annotated[int, Field(ge=1, le=100_000)] = Field(
        "auto", description="requests in flight per server; auto: the server's own cap and a small queue"
    )
    rows_per_shard: int = Field(500, ge=1, le=100_000, description="completions in one file")
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

    @field_validator("extra_body")
    @classmethod
    def _extra_body_is_json_and_new(cls, body: dict[str, Any]) -> dict[str, Any]:
        for key in body:
            if key in cls.model_fields:
                raise ValueError(f"{key} has a parameter of its own: write generation.{key}.")
            if key in _OWN_BODY_KEYS:
                raise ValueError(f"{key} is set by the run itself: remove it.")
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"it must be fit for JSON: {error}. Dates and odd numbers need quotes.") from None
        return body


class StoreGroup(Group):
    """Where shards are uploaded. It has no keys: the run's folder is the only copy."""


class ReportGroup(Group):
    """What 04_report shows."""

    title: str | None = Field(None, description="default: the run's name")
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
    plan: PlanGroup | None = Field(None, description="what `dfexp plan` needs to know; nothing else reads it")

    @model_validator(mode="before")
    @classmethod
    def _empty_group_is_all_defaults(cls, tree: Any) -> Any:
        """A group whose every line is commented out is nothing to YAML; its writer means the defaults."""
        optional = {name for name, field in cls.model_fields.items() if isinstance(field.default, Group)}
        if not isinstance(tree, Mapping):
            return tree
        return {key: value for key, value in tree.items() if not (value is None and key in optional)}

    @field_validator("run")
    @classmethod
    def _run_is_no_other_folder(cls, run: str) -> str:
        if run == "fleets":
            raise ValueError("the folder outputs/fleets is where fleets live. Take another name.")
        return run

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
        tree = merge(tree, parse_override(override))
    changed = ", ".join(text.partition("=")[0].strip() for text in overrides)
    return validate(tree, f"{path} with --set {changed}" if changed else str(path))


def validate(tree: Mapping[str, Any], source: str) -> RunSpec:
    """Check a tree of parameters; `source` names it in messages. Raises ParamsError that lists every mistake."""
    try:
        return RunSpec.model_validate(dict(tree))
    except ValidationError as error:
        lines = explain(error, tree, RunSpec)
        count = "1 wrong parameter" if len(lines) == 1 else f"{len(lines)} wrong parameters"
        raise ParamsError(f"{source}: {count}; nothing was started.\n  " + "\n  ".join(lines)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, read safely. Raises ParamsError: no file, bad YAML, a key given twice, not a mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        beside = [item.name for item in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.4)
        hint = f"Did you mean {path.with_name(near[0])}?" if near else "Check the path."
        raise ParamsError(f"there is no parameter file {path}. {hint}") from None
    except OSError as error:
        raise ParamsError(f"cannot read the parameter file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ParamsError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else shown(tree)
        raise ParamsError(f"{path} must hold `key: value` lines ({', '.join(PARAMETERS)}); found {found}.")
    return tree


def _parse(text: str, source: str) -> Any:
    """The value of a YAML text. Errors say line and column, and never quote the text, which may hold a secret."""
    try:
        return yaml.load(text, _UniqueKeyLoader)  # noqa: S506 (a SafeLoader subclass)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = str(error.problem)
        hint = next((f" {fix}" for sign, fix in _YAML_FIXES if sign in problem), "")
        raise ParamsError(f"{source}{where}: not valid YAML: {problem}.{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ParamsError(f"{source}: not valid YAML: {reason}. Text with unusual characters needs quotes.") from None


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
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_override(text: str) -> dict[str, Any]:
    """`generation.max_tokens=64` as a nested mapping; the value is YAML. Raises ParamsError."""
    path, equals, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ParamsError(
            f"--set {hide_secrets(text)!r} is not of the form group.key=value, such as generation.max_tokens=4096."
        )
    tree: Any = _parse(value, f"--set {path}")
    for key in reversed(keys):
        tree = {key: tree}
    return dict(tree)
