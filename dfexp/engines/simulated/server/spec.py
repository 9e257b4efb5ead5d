"""What one simulated server is: understood from the command line and the two private files that it is started with."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dfexp.capacity.flags import modelled, own_name
from dfexp.capacity.plan_command import prepare
from dfexp.capacity.planner import Setting
from dfexp.capacity.workload import Lengths
from dfexp.engines.simulated.core import Config
from dfexp.params_plan import PlanGroup
from dfexp.params_simulated import FaultPart, Speed

_OWN = frozenset(("model_path", "served_model_name", "host", "port", "enable_metrics", "config", "simulation"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server.

    Attributes:
        version: of SGLang, such as 0.5.12.
        key: its API key; empty where it has none.
        index, servers: which of how many it is in its fleet, from 0.
        completion: tokens of answers.
        load_s: virtual seconds in which it loads its model.
        flags: by dfexp's names, as they were given.

    """

    version: str
    config: Config
    model_path: str
    served_name: str
    key: str
    host: str
    port: int
    index: int
    seed: int
    completion: Lengths
    thinking: bool
    reasoning_parser: str | None
    has_metrics: bool
    load_s: float
    faults: tuple[FaultPart, ...]
    flags: Mapping[str, Any]
    servers: int = 1
    speed: Speed = "max"

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"


def read_spec(argv: Sequence[str], folder: Path) -> ServerSpec:
    """The server that is started with these arguments; files among them are relative to `folder`.

    Flags on the command line beat those of the plan. Raises OSError, ValueError (also pydantic's, of the files),
    KeyError: an argument is missing; CapacityError: SGLang would refuse the flags, or nothing fits.
    """
    given = dict(parse_argv(argv))
    private = yaml.safe_load((folder / given["config"]).read_text(encoding="utf-8")) if "config" in given else {}
    simulation = json.loads((folder / given["simulation"]).read_text(encoding="utf-8"))
    flags = {name: value for name, value in given.items() if name not in _OWN}
    plan = PlanGroup.model_validate(simulation["plan"])
    planned = {own_name(name): value for name, value in (plan.flags or {}).items()}
    known = {"model": plan.model or given["model_path"], "flags": planned | modelled(flags), "prompts": 1}
    setting = _setting(plan.model_copy(update={**known, "sglang_version": simulation["version"]}).model_dump_json())
    config = Config.of(setting)
    return ServerSpec(
        version=simulation["version"], model_path=str(given["model_path"]), served_name=str(given["served_model_name"]),
        config=replace(config, log_interval=int(flags.get("decode_log_interval", config.log_interval))),
        key=str(private.get("api-key", "")), host=str(given["host"]), port=int(given["port"]),
        completion=setting.workload.completion, reasoning_parser=flags.get("reasoning_parser"), flags=flags,
        faults=tuple(map(FaultPart.model_validate, simulation["faults"])), has_metrics="enable_metrics" in given,
        **{name: simulation[name] for name in ("index", "servers", "seed", "thinking", "load_s", "speed")},
    )  # fmt: skip


@cache  # fitting lengths takes time, and all servers of a fleet are alike
def _setting(plan: str) -> Setting:
    return prepare(PlanGroup.model_validate_json(plan)).setting


def parse_argv(argv: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(dfexp's name, value) of every flag. Of one without a value it is True, of one with several a list.

    Raises ValueError: what stands before the first flag belongs to none.
    """
    if argv and not argv[0].startswith("--"):
        raise ValueError(f"argument {argv[0]!r} belongs to no flag.")
    starts = [place for place, word in enumerate(argv) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(argv)], strict=True):
        flag, equals, joined = argv[start].partition("=")
        words = [*([joined] if equals else []), *argv[start + 1 : end]]
        name = own_name(flag)
        # Where a path or a name is expected, one that looks like a number stays text.
        values = words if name in _OWN else list(map(_value, words))
        yield name, (values if len(values) > 1 else values[0]) if values else True


def _value(word: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word
