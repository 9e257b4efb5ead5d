"""The parameters of a run: one YAML file, validated before anything starts; all mistakes are reported at once."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, JsonValue, StringConstraints, ValidationError, ValidationInfo
from pydantic.functional_validators import field_validator, model_validator

from dfexp.errors import ParamsError
from dfexp.params_errors import explain, hide_secrets, looks_secret, shown
from dfexp.params_plan import Count, FlagValues, Group, PlanGroup
from dfexp.params_prompts import PromptsGroup as PromptsGroup
from dfexp.params_quality import QualityGroup as QualityGroup
from dfexp.params_simulated import FaultPart, Speed

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^/\s@]+(/[^\s@]*)?$")]
NamedPath = Annotated[str, StringConstraints(pattern=r"^[^\x00]*[^\x00/. ][^\x00/]*/*$")]
Command = Annotated[str, StringConstraints(pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
StoreName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{1,62}$")]
StorePrefix = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./=-]*$", max_length=500)]
_Group = TypeVar("_Group", bound=Group)
Policy = Literal["keep", "retry", "fail"]
_OWN_BODY_KEYS = ("model", "messages", "stream", "stream_options", "n")


class FleetGroup(Group):
    """Keys that every engine has."""

    name: Name | None = Field(None, description="folder under outputs/fleets; default: the run's name")


class OwnFleet(FleetGroup):
    """Keys of every engine whose servers are processes of this machine."""

    servers: int = Field(1, ge=1, le=64, description="number of servers")
    host: str = Field("127.0.0.1", description="address to listen on")
    stagger_s: float = Field(0.0, ge=0, description="longest wait for one server's weights before the next one starts")
    canary_first: bool = Field(False, description="start one server alone; the others once its answers are no garbage")
    check_content: bool = Field(False, description="a new server must also answer six requests at once with text")


class LlamacppFleet(OwnFleet):
    """Servers of the embedded engine: llama.cpp as child processes of this machine."""

    engine: Literal["llamacpp"]
    model: str | None = Field(None, description="path of a GGUF file; default: the bundled SmolLM2-135M-Instruct")
    max_running_requests: int = Field(4, ge=1, le=256, description="requests that one server decodes at once")
    context_length: int = Field(2048, ge=128, description="tokens of prompt and answer together, per request")
    threads: int = Field(1, ge=1, description="CPU threads per server; more than the idle cores make it collapse")
    start_timeout_s: float = Field(120.0, gt=0, description="time to the first generated token")


class SglangServers(OwnFleet):
    """Servers with SGLang's flags and rules, real or simulated."""

    model: NamedPath = Field(description="folder of the model, or its name on the model hub")
    flags: FlagValues = Field(default_factory=dict, description="SGLang flags by name, _ for -")
    first_port: int | None = Field(None, ge=1024, le=55000, description="first port in a row; default: free ones")
    stagger_s: float = Field(60.0, ge=0, description="longest wait for one server's weights before the next one starts")
    check_content: bool = Field(True, description="a new server must also answer six requests at once with text")
    least_share_of_plan: float = Field(0.9, ge=0, le=1, description="least part of the room that `plan` predicts")
    accepted_checks: list[str] = Field(default_factory=list, description="checks of preflight that may fail, by name")

    @field_validator("env", "flags", check_fields=False)
    @classmethod
    def _can_be_handed_over(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
                raise ValueError(f"{name} is set by dfexp for each server. Leave it out; use fleet.gpus.")
            if looks_secret(name, value):
                raise ValueError(f"{name} looks like a secret, which no parameter file holds. Export it instead.")
            if any("\0" in str(item) for item in (value if isinstance(value, list) else [value])):
                raise ValueError(f"{name} holds a NUL character, which no program can be given. Remove it.")
        return given


class SglangFleet(SglangServers):
    """SGLang servers, one per GPU or per tensor-parallel group of GPUs."""

    engine: Literal["sglang"]
    python: NamedPath | None = Field(None, description="interpreter of an environment with SGLang; default: this one")
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu is for trying things out")
    gpus: list[Annotated[int, Field(ge=0)]] | None = Field(None, description="GPUs to use; default: the first ones")
    env: dict[EnvName, str] = Field(default_factory=dict, description="more environment variables for the servers")
    start_timeout_s: float = Field(1800.0, gt=0, description="time to the first generated token of all")

    @field_validator("gpus")
    @classmethod
    def _gpus_are_distinct(cls, gpus: list[int] | None) -> list[int] | None:
        if gpus and len(set(gpus)) < len(gpus):
            raise ValueError("it names a GPU twice. Name each once.")
        return gpus


class SimulatedFleet(SglangServers):
    """SGLang servers that are simulated on this machine, without SGLang and without a GPU, in a time of their own."""

    engine: Literal["simulated"]
    speed: Speed = Field("max", description="simulated seconds per second; max: as fast as the client can go")
    seed: int = Field(0, ge=0, description="of texts, lengths and shares of requests")
    load_s: float = Field(60.0, ge=0, description="simulated seconds in which a server loads its model")
    thinking: bool = Field(True, description="answers begin with a thought")
    faults: list[FaultPart] = Field(default_factory=list, description="what goes wrong, and when")
    plan: PlanGroup | None = Field(None, description="the GPUs and the load that are simulated; default: `plan`")
    start_timeout_s: float = Field(120.0, gt=0, description="time to the first generated token of all")

    @field_validator("faults")
    @classmethod
    def _faults_are_of_servers(cls, faults: list[FaultPart], info: ValidationInfo) -> list[FaultPart]:
        servers = info.data.get("servers", 64)
        for index in [fault.server for fault in faults if fault.server is not None and fault.server >= servers]:
            raise ValueError(f"there is no server {index}: fleet.servers is {servers}, counted from 0.")
        return faults


class ExternalFleet(FleetGroup):
    """Servers that somebody else runs: any OpenAI-compatible URLs, an SGLang fleet included."""

    engine: Literal["external"]
    urls: list[Url] = Field(min_length=1, description="base URLs such as http://127.0.0.1:30000, without user or key")
    model: str | None = Field(None, description="model name to send; default: the first that the server lists")
    api_key_env: EnvName | None = Field(None, description="NAME of the environment variable that holds the API key")
    max_running_requests: int | None = Field(None, ge=1, description="requests a server decodes at once, if unsaid")
    context_length: int | None = Field(None, ge=1, description="tokens of prompt and answer together, if unsaid")
    start_timeout_s: float = Field(60.0, gt=0, description="time in which each URL must answer a request")

    @field_validator("urls")
    @classmethod
    def _urls_are_distinct(cls, urls: list[str]) -> list[str]:
        if len({url.rstrip("/").removesuffix("/v1").lower() for url in urls}) < len(urls):
            raise ValueError("it names a server twice. Name each once.")
        return urls


class SpoiledGroup(Group):
    """What becomes of an answer that has a flag: keep it; retry at another server, and keep the last one; or fail."""

    empty: Policy = Field("retry", description="no text, or none after the thought")
    garbage: Policy = Field("keep", description="one piece over and over, or nothing for its tokens: a broken server")
    looping: Policy = Field("keep", description="cut for its length while it said one thing over and over")
    repetitive: Policy = Field("keep", description="most of it is said five times or more")
    unclosed_thought: Policy = Field("keep", description="a thought without </think>")
    truncated: Policy = Field("keep", description="cut for its length (finish_reason length)")
    unknown_end: Policy = Field("keep", description="no finish_reason, or one that is not usual")
    nul: Policy = Field("keep", description="it holds a NUL character")
    surrogates_repaired: Policy = Field("keep", description="it held half of a character")


class GenerationGroup(Group):
    """How completions are made and written."""

    max_tokens: Literal["fit"] | Count = Field("fit", description="per answer; fit: all the room the prompt leaves")
    temperature: float | None = Field(None, ge=0, le=2, description="default: the engine's")
    top_p: float | None = Field(None, gt=0, le=1, description="default: the engine's")
    top_k: int | None = Field(None, ge=-1, description="default: the engine's; what turns it off is the engine's too")
    min_p: float | None = Field(None, ge=0, le=1, description="default: the engine's")
    seed: int | None = Field(None, ge=0, lt=2**31, description="row i is sampled with seed + i; default: none")
    stop: list[str] | None = Field(None, description="texts at which an answer ends")
    enable_thinking: bool | None = Field(None, description="passed to the chat template; default: the template's own")
    extra_body: dict[str, JsonValue] = Field(default_factory=dict, description="more fields for every request's body")
    concurrency: Literal["auto"] | Count = Field("auto", description="requests in flight per server; auto: its own cap")
    rows_per_shard: int = Field(500, ge=1, le=100_000, description="completions in one file")
    max_attempts: int = Field(4, ge=1, le=100, description="times a row is sent before it counts as failed")
    spoiled: SpoiledGroup = Field(SpoiledGroup(), description="answers with flags: each is keep, retry or fail")
    slowest_tok_per_s: float | None = Field(None, gt=0, description="sets a request's time limit; default: as measured")
    drain_s: float = Field(60.0, ge=0, description="time that requests in flight get when the run is stopped")
    stall_s: float = Field(300.0, gt=0, description="time without a new token after which a busy server is restarted")
    give_up_s: float = Field(1800.0, gt=0, description="time without any reachable server after which the run stops")
    on_orphan: Literal["stop", "continue"] = Field("stop", description="what to do when the starter of the run is gone")
    sample_interval_s: float = Field(5.0, gt=0, description="servers and GPUs are looked at once in so long")
    progress_interval_s: float = Field(10.0, gt=0, description="one log line per interval when run unattended")

    @field_validator("extra_body")
    @classmethod
    def _extra_body_adds_fields(cls, body: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for key in body:
            if key in cls.model_fields or key in _OWN_BODY_KEYS:
                raise ValueError(f"{key} is set by dfexp. Use the parameter of that name, or remove it.")
        return body


class StoreGroup(Group):
    """Where shards are uploaded; without a bucket the run's folder is the only copy. Credentials are found by boto3."""

    bucket: StoreName | None = Field(None, description="bucket on S3; default: none, nothing is uploaded")
    prefix: StorePrefix = Field("", description="keys are <prefix>/<run>/...; no two runs share such a folder")
    endpoint_url: Url | None = Field(None, description="of a store that is not AWS; default: boto3's")
    region: StoreName | None = Field(None, description="default: boto3's")
    path_style: bool = Field(False, description="the bucket is in the path of URLs, never in the host's name")
    storage_class: EnvName | None = Field(None, description="of shards and prompts; default: the bucket's")
    allow_unconditional: bool = Field(False, description="use a store that ignores If-None-Match: look, then put")
    concurrency: int = Field(4, ge=1, le=64, description="uploads at once")
    timeout_s: float = Field(30.0, ge=1, description="time without a byte after which a request is sent again")
    drain_s: float = Field(600.0, ge=0, description="time that uploads get when the run has ended or was stopped")

    @model_validator(mode="after")
    def _keys_need_a_bucket(self) -> Self:
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.bucket is None and given:
            raise ValueError(f"{given[0]} is given, but no bucket. Add store.bucket, or remove it.")
        return self


class LimitsGroup(Group):
    """Where one start of the run stops before all rows are done; the next start goes on, with the same limits."""

    rows: Count | None = Field(None, description="rows that one start sends at the most")
    hours: float | None = Field(None, gt=0, description="hours of real time after which one start drains and stops")


class BaselinePart(Group):
    """What a run is measured against: a rate that is known, or an earlier run."""

    name: str | None = Field(None, description="what it is called; default: the earlier run's name")
    tok_per_s: float | None = Field(None, gt=0, description="completion tokens/s that all its servers decode together")
    run: str | None = Field(None, min_length=1, description="or an earlier run: its name, or its folder")
    hardware: str | None = Field(None, description="what it ran on")
    expected_fraction: float | None = Field(None, gt=0, le=2, description="part of its rate to reach: 0.25 for 25 %")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.tok_per_s is None) == (self.run is None) or (self.name or self.run) is None:
            raise ValueError("give name and tok_per_s, or run: exactly one of the two")
        return self


class ReportGroup(Group):
    """What 04_report shows."""

    title: str | None = Field(None, description="default: the run's name")
    examples: int = Field(10, ge=0, le=1000, description="completions shown in full, drawn at random")
    seed: int = Field(0, ge=0, description="of the draw")
    baselines: list[BaselinePart] = Field(default_factory=list, description="rates to measure this run against")
    compare: str | list[str] = Field(default_factory=list, description="runs shown beside this one, earlier ones first")


AnyFleet = Annotated[LlamacppFleet | SglangFleet | SimulatedFleet | ExternalFleet, Field(discriminator="engine")]


class RunSpec(Group):
    """All parameters of a run."""

    run: Name = Field(description="name of the run and of its folder under outputs/: letters, digits and . _ -")
    outputs: str = Field("outputs", description="folder of all runs and fleets")
    fleet: AnyFleet = Field(description="the servers: at least the key engine")
    prompts: PromptsGroup = Field(description="where the prompts come from: at least the key path")
    generation: GenerationGroup = GenerationGroup()
    store: StoreGroup = StoreGroup()
    report: ReportGroup = ReportGroup()
    quality: QualityGroup = QualityGroup()
    plan: PlanGroup | None = Field(None, description="what `dfexp plan` needs to know; simulated servers follow it")
    limits: LimitsGroup = LimitsGroup()
    notify: Command | None = Field(None, description="shell command to run at a stall, and when the run ends or fails")

    @field_validator("notify")
    @classmethod
    def _notify_holds_no_secret(cls, line: str | None) -> str | None:
        plain = re.sub(r"\$\{?\w+\}?", " ", line or "")
        if hide_secrets(plain) != plain:
            raise ValueError("it seems to hold a secret, which no parameter file does. Export it and write $NAME.")
        return line

    @model_validator(mode="after")
    def _plan_is_simulated(self) -> Self:
        if not isinstance(self.fleet, SimulatedFleet) or self.fleet.plan is not None:
            return self
        if self.plan is None:
            raise ValueError(
                "fleet.engine = 'simulated': it simulates what a `plan` group says, and there is none. Add one with at"
                " least plan.gpu, plan.prompt and plan.completion."
            )
        return self.model_copy(update={"fleet": self.fleet.model_copy(update={"plan": self.plan})})

    @property
    def fleet_name(self) -> str:
        """The fleet's folder name."""
        return self.fleet.name or self.run

    @property
    def planned(self) -> PlanGroup | None:
        """The plan that counts: of simulated servers the one that they follow."""
        return self.fleet.plan if isinstance(self.fleet, SimulatedFleet) else self.plan


PARAMETERS = tuple(RunSpec.model_fields)
"""Top-level names, which are also the names in the parameters cell of every notebook."""


def load(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read and validate a parameter file, `group.key=value` overrides on top. Raises ParamsError with every mistake."""
    tree = overlay(read_yaml(path), overrides)
    changed = ", ".join(text.partition("=")[0].strip() for text in overrides)
    return validate(tree, f"{path} with --set {changed}" if changed else str(path))


def checked(name: str, model: type[_Group], tree: Mapping[str, Any], but: str = "") -> _Group:
    """A group of this name on its own. Raises ParamsError with every mistake; `but`: the end of its first line."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        lines = explain(error, tree, model)
        raise ParamsError("\n  ".join((f"{name}: {len(lines)} wrong parameter(s){but}.", *lines))) from None


def validate(tree: Mapping[str, Any], source: str) -> RunSpec:
    """Check a tree of parameters; `source` names it in messages. Raises ParamsError that lists every mistake."""
    # A group whose every line is commented out is nothing to YAML; its writer means the defaults.
    given = {key: value for key, value in tree.items() if value is not None}
    return checked(source, RunSpec, given, "; nothing was started")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, read safely. Raises ParamsError: no file, bad YAML, a key given twice, not a mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ParamsError(f"cannot read the parameter file {path}: {error}. Give a file of UTF-8 text.") from error
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        raise ParamsError(f"{path} must hold `key: value` lines ({', '.join(PARAMETERS)}); found {shown(tree)}.")
    return tree


def _parse(text: str, source: str) -> Any:
    """The value of a YAML text. Errors say line and column, and never quote the text, which may hold a secret."""
    try:
        return yaml.load(text, _UniqueKeyLoader)  # noqa: S506 (a SafeLoader subclass)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also: no such date, nested too deeply
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ParamsError(f"{source}{where}: not valid YAML: {problem}.") from None


def overlay(base: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`group.key=value` overrides laid over `base`, in whatever order they come. Raises ParamsError."""
    top: dict[str, Any] = {}
    for override in overrides:
        top = merge(top, parse_override(override))
    return merge(base, top)


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` laid over `base`: mappings key by key, everything else replaced. Neither argument is changed.

    A fleet of another engine replaces the whole group: the keys of one engine mean nothing to another.
    """
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = value
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            is_another = {"engine"} <= old.keys() & value.keys() and old["engine"] != value["engine"]
            merged[key] = dict(value) if is_another else merge(old, value)
    return merged


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, which YAML would silently resolve to the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_override(text: str) -> dict[str, Any]:
    """`generation.max_tokens=64` as a nested mapping; the value is YAML. Raises ParamsError."""
    path, equals, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ParamsError(f"--set {hide_secrets(text)!r} is not group.key=value, such as generation.max_tokens=4096.")
    tree: Any = _parse(value, f"--set {path}")
    for key in reversed(keys):
        tree = {key: tree}
    return dict(tree)
