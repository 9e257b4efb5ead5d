"""What all servers with SGLang's flags, pages and log lines have in common, real or simulated."""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from dfexp.capacity.flags import own_name
from dfexp.capacity.shape import GIB
from dfexp.capacity.startup_log import Startup, read_startup
from dfexp.engines.base import Engine, Server, address, free_ports, port_of, start_log
from dfexp.engines.http import get_json
from dfexp.engines.pages import limits_from
from dfexp.engines.sglang_flags import gpus_per_server
from dfexp.engines.sglang_log import diagnose
from dfexp.errors import EngineStartError
from dfexp.jsonl import write_atomic
from dfexp.layout import FleetFolder
from dfexp.params import SglangServers
from dfexp.records import ServerLimits

_HEAD_BYTES = 65536
# Flags after which the same model says other things.
_CHANGE_OUTPUTS = (
    *("dtype", "quantization", "quantization_param_path", "torchao_config", "modelopt_quant", "kv_cache_dtype"),
    *("mamba_ssm_dtype", "json_model_override_args", "revision", "load_format", "model_impl", "tokenizer_path"),
    *("chat_template", "completion_template", "reasoning_parser", "tool_call_parser", "lora_paths"),
    *("sampling_defaults", "preferred_sampling_params", "enable_fp32_lm_head", "allow_auto_truncate"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServersEngine(Engine):
    """One server for each group of GPUs, with a random key in a private file."""

    # It answers at once, also when busy; /health waits for a token, for up to 20 s.
    liveness: ClassVar[tuple[str, float]] = ("ping", 10.0)
    group: SglangServers

    @abstractmethod
    def command(self, port: int) -> tuple[str, ...]:
        """What starts the server at `port`, without its flags and its private files."""

    @abstractmethod
    def spelled(self) -> tuple[str, list[str]]:
        """The version of SGLang, and the flags as its arguments. Raises FleetError: it would not take them."""

    def gpus(self) -> list[tuple[str, ...]]:
        """The GPUs of each server; empty tuples where they are not bound to any."""
        return [()] * self.group.servers

    def env(self, gpus: tuple[str, ...]) -> dict[str, str]:
        """Additions to the environment of a server with these GPUs."""
        return {}

    def private(self, folder: FleetFolder, port: int, place: int | Server) -> tuple[str, ...]:
        """Write what else the server at `port` is told in private; the arguments that say where it is.

        Args: place, which server of the fleet it is, counted from 0; or the server that is planned again.
        """
        return ()

    def plan(self, folder: FleetFolder, key: str, at: Sequence[Server] = ()) -> list[Server]:
        """One server per GPU group. The key is in a private file: what is in argv is in everybody's `ps`."""
        version, flags = self.spelled()
        group, servers, gpus = self.group, [], [server.gpus for server in at] or self.gpus()
        if any(len(names) not in (0, gpus_per_server(group.flags)) for names in gpus):
            raise EngineStartError("another number of GPUs per server (tp_size, pp_size, dp_size) needs a new launch.")
        first, ports = group.first_port, [port_of(server) for server in at]
        if not at:
            ports = list(range(first, first + group.servers)) if first else free_ports(group.host, group.servers)
        for index, (port, names) in enumerate(zip(ports, gpus, strict=True)):
            config = folder.path / f"server-{port}.yaml"
            write_atomic(config, f'api-key: "{key}"\n'.encode(), mode=0o600)
            name, log = address(group.host, port), str(folder.logs / f"server-{port}.log")
            more = self.private(folder, port, at[index] if at else index)
            argv = (*self.command(port), "--config", str(config), *more, *flags)
            env, url = self.env(names), f"http://{name}"
            servers.append(Server(name=name, url=url, argv=argv, env=env, log=log, version=version))
        return servers

    def named(self, port: int) -> tuple[str, ...]:
        """The arguments that every server has: what it serves, and where."""
        model = ("--model-path", self.model_path, "--served-model-name", self.served_name)
        return (*model, "--host", self.group.host, "--port", str(port), "--enable-metrics")

    @property
    def model_path(self) -> str:
        """The model's folder, or its name on the hub where there is no such folder."""
        path = self.root / Path(self.group.model).expanduser()
        return str(path) if os.path.exists(path) else self.group.model  # False also where it may not be looked for

    @property
    def served_name(self) -> str:
        """The name that requests use: the last part of the model's path."""
        return Path(self.group.model).name or "model"

    def model_name(self, url: str, key: str) -> str:
        """The name that the servers are started with."""
        return self.served_name

    def model_fingerprint(self, url: str, key: str) -> str:
        """Name, the flags that change what the model says, and a hash over its files: names, sizes and beginnings.

        Without the hash for a model of the hub.
        """
        given = {own_name(flag): value for flag, value in self.group.flags.items()}
        told = ["", *(f"{flag}={given[flag]}" for flag in _CHANGE_OUTPUTS if given.get(flag) is not None)]
        folder, name = Path(self.model_path), self.served_name + " ".join(told)
        if not folder.is_dir():
            return name
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".safetensors", ".jinja", ".bin", ".txt"):
                with path.open("rb") as file:
                    digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(_HEAD_BYTES))
        return f"{name} {digest.hexdigest()}"

    def limits(self, server: Server, key: str, timeout_s: float = 10.0) -> ServerLimits:
        """From the startup log, which stands still; /server_info, slow on a busy server, where the log does not tell.

        That the server answers is seen on /v1/models.
        """
        models = get_json(f"{server.url}/v1/models", key=key, timeout_s=timeout_s)
        startup, _, _ = start_log(server, 2**20).partition("fired up and ready to roll")
        logged = from_log(read_startup(startup.split("\n")))
        if logged.max_running_requests is None:
            return limits_from(models, get_json(f"{server.url}/server_info", key=key, timeout_s=timeout_s))
        said = limits_from(models)
        context = said.context_length or logged.context_length
        return replace(logged, context_length=context, model=said.model, engine_version=f"sglang {server.version}")

    def has_loaded(self, log_text: str) -> bool:
        """Whether the log says that the weights are loaded."""
        return "Load weight end" in log_text

    def has_failed(self, log_text: str) -> bool:
        """Whether its port was taken: it may wait for ever for the answer of whoever has that."""
        return "error while attempting to bind on address" in log_text

    def diagnose_start(self, log_text: str) -> str:
        """Cause and fix out of SGLang's own words."""
        return diagnose(log_text)


def from_log(startup: Startup) -> ServerLimits:
    """The room that a startup log tells; nothing where several data-parallel ranks share it, since they add up."""
    if any("DP" in rank for rank in startup.values.get("max_running_requests", {})):
        return ServerLimits()
    states = ("conv", "ssm", "intermediate_ssm", "intermediate_conv")
    names = {"weights": ("weights",), "kv": ("k", "v", "kv"), "state": states}
    gib = {part: sum(startup.get(f"{name}_gib") or 0.0 for name in of) for part, of in names.items()}
    fields = {name: name for name in ("max_running_requests", "max_total_num_tokens", "max_mamba_cache_size")}
    fields["context_length"] = "context_len"
    counts: dict[str, Any] = {
        field: int(value) for field, name in fields.items() if (value := startup.get(name)) is not None
    }
    return ServerLimits(**counts, state_bytes={part: round(size * GIB) for part, size in gib.items() if size} or None)
