"""What every engine can do, and the one place that maps the `engine` of a parameter file to a class.

A new engine adds a module, a class in `params` and one line in `_ENGINES`; nothing else changes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from dfexp.layout import FleetFolder
from dfexp.params import FleetGroup
from dfexp.records import ServerLimits

_ENGINES = {
    "llamacpp": ("dfexp.engines.llamacpp", "LlamacppEngine"),
    "external": ("dfexp.engines.external", "ExternalEngine"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """How one server is started.

    Attributes:
        url: base URL without /v1 and without a trailing slash.
        argv: the command; None when somebody else runs the server. Everyone on the machine can read it: no secrets.
        env: additions to the environment of the child; no secrets either, they are recorded in fleet.json.
        files: private files by their name in the fleet's folder, written with mode 0600 before the start.
    """

    url: str
    argv: tuple[str, ...] | None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


class Engine(Protocol):
    """One kind of server, bound to the parameters of one fleet."""

    @property
    def name(self) -> str:
        """The value of `engine` in a parameter file."""
        ...

    def plans(self, folder: FleetFolder, key: str) -> list[ServerPlan]:
        """One plan per server, on ports that are free now; every call picks ports anew.

        Raises EngineStartError for what can be known to fail before anything is started: a missing package, no model
        file, a file that is not a model.
        """
        ...

    def outside_key(self) -> str | None:
        """The API key of servers that somebody else runs ("" for none); None: the fleet makes a random one.

        Raises FleetError naming the environment variable that is not set.
        """
        ...

    def model_name(self, url: str, key: str) -> str:
        """The model name to send with requests. Raises RequestError if the server has to be asked and does not say."""
        ...

    def model_fingerprint(self, url: str, key: str) -> str:
        """What tells this model from another of the same name, as far as this engine can know; the name at least."""
        ...

    def limits(self, url: str, key: str, timeout_s: float = 10.0) -> ServerLimits:
        """What the server at `url` says of its room. Raises RequestError if it does not answer."""
        ...

    def diagnose_start(self, log_text: str, exit_code: int | None) -> tuple[str, str]:
        """Cause and fix of a failed start, each one sentence, from its log and exit code (None: unknown)."""
        ...

    def is_port_taken(self, log_text: str) -> bool:
        """Whether the log of a failed start says that another process holds the port."""
        ...


def engine_for(group: FleetGroup, root: Path | None = None) -> Engine:
    """The engine of a fleet's parameters; relative paths in them are relative to `root` (default: working folder)."""
    module, cls = _ENGINES[cast(Any, group).engine]
    return cast(Engine, getattr(importlib.import_module(module), cls)(group=group, root=root or Path.cwd()))


def scrub(text: str, key: str) -> str:
    """`text` without the API key: what servers print may repeat it."""
    return text.replace(key, "(key hidden)") if key else text
