"""What every engine can do, and the one place that maps the `engine` of a parameter file to a class."""

import errno
import importlib
import os
import random
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from dfexp.engines.http import get_text
from dfexp.engines.pages import tokens_so_far
from dfexp.errors import EngineStartError
from dfexp.layout import FleetFolder
from dfexp.metrics import from_metrics
from dfexp.params import FleetGroup
from dfexp.processes import ProcessId
from dfexp.records import EngineSample, ServerLimits, TokenCounts

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Below every system's range of ephemeral ports: a client's outgoing connection can then never sit on the port of a
# server that is down, nor connect to itself while it tries to reach one.
_PORTS = range(20000, 32000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server of a fleet, as planned by its engine and recorded in fleet.json: no secrets here."""

    name: str  # host:port, the server's name everywhere
    url: str  # without /v1 and without a trailing slash
    argv: tuple[str, ...] | None = None  # its command; None when somebody else runs it
    env: Mapping[str, str] = field(default_factory=dict)  # additions to its environment
    log: str | None = None
    log_start: int = 0  # bytes of the log that are of earlier starts
    pid: int | None = None  # leads its own session; None before the start
    process_started: str | None = None  # start stamp (`ProcessId`), which tells it from a later process of that pid
    version: str | None = None  # of its engine, as it was when the server was planned
    settings: Mapping[str, Any] | None = None  # its fleet parameters, where they are not those of the fleet

    @property
    def gpus(self) -> tuple[str, ...]:
        """Its GPUs, by index or UUID; empty where it is not bound to any."""
        return tuple(filter(None, self.env.get(VISIBLE, "").split(",")))

    @property
    def process(self) -> ProcessId:
        """Its process, dead or alive; before the start one that never lived."""
        return ProcessId(self.pid or 0, self.process_started or "never")


@dataclass(frozen=True, kw_only=True)
class Engine(ABC):
    """One kind of server, bound to the parameters of one fleet. What asks a server raises RequestError subclasses.

    Attributes:
        name: the value of `engine` in a parameter file.
        liveness: the page that a living server answers, and the seconds after which silence is no answer.
        root: what relative paths in the parameters are relative to.

    """

    name: ClassVar[str]
    liveness: ClassVar[tuple[str, float]] = ("health", 30.0)  # SGLang's answers after up to 20 s on a busy server
    root: Path

    @abstractmethod
    def plan(self, folder: FleetFolder, key: str, at: Sequence[Server] = ()) -> list[Server]:
        """The servers to start; what they need to know privately is written as `server-*` in the folder, mode 0600.

        With `at`, servers as they are: these again, at the same addresses, with the settings of this engine.
        Raises EngineStartError for what can be known to fail before anything is started.
        """

    def outside_key(self) -> str | None:
        """The API key of servers that somebody else runs ("" for none), else None. Raises FleetError: not set."""
        return None

    @abstractmethod
    def model_name(self, url: str, key: str) -> str:
        """The model name to send with requests."""

    def model_fingerprint(self, url: str, key: str) -> str:
        """What tells this model from another of the same name, as far as this engine can know; the name at least."""
        return self.model_name(url, key)

    @abstractmethod
    def limits(self, server: Server, key: str, timeout_s: float = 10.0) -> ServerLimits:
        """What a server says of its room."""

    def sample(self, server: Server, key: str, timeout_s: float = 10.0) -> EngineSample | None:
        """What a server says of its work on its page of metrics, as of the middle of the time that it took.

        None where it says nothing that is known here.
        """
        began_at = time.time()
        page = get_text(f"{server.url}/metrics", key=key, timeout_s=timeout_s)
        return from_metrics(page, at=(began_at + time.time()) / 2, server=server.name)

    def progress(self, server: Server, key: str, timeout_s: float = 10.0) -> TokenCounts | None:
        """Counters of tokens that grow while the server works at any request; None where the engine has none."""
        return tokens_so_far(self.sample(server, key, timeout_s))

    def has_loaded(self, log_text: str) -> bool:
        """Whether the weights are in memory, so that another server may read them now; False where no log tells."""
        return False

    def has_failed(self, log_text: str) -> bool:
        """Whether the log says that a server which still lives will never serve."""
        return False

    @abstractmethod
    def diagnose_start(self, log_text: str) -> str:
        """Cause and fix of a failed start, as far as its log tells."""


def engine_for(group: FleetGroup, root: Path | None = None) -> Engine:
    """The engine of a fleet's parameters: for x it is XEngine in dfexp.engines.x.

    Relative paths in them are relative to `root` (default: working folder).
    """
    name = cast(Any, group).engine
    module = importlib.import_module(f"dfexp.engines.{name}")
    return cast(Engine, getattr(module, f"{name.capitalize()}Engine")(group=group, root=root or Path.cwd()))


def start_log(server: Server, most: int = 2**22) -> str:
    """What a server printed since it was last started: the first and the last `most` bytes of it."""
    if server.log is None or not Path(server.log).exists():
        return ""
    with Path(server.log).open("rb") as file:
        file.seek(server.log_start)
        head = file.read(most)
        file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - most))
        return (head + file.read()).decode("utf-8", "replace")


def address(host: str, port: int) -> str:
    """host:port as a client on this machine reaches it."""
    return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104 (compared)


def port_of(server: Server) -> int:
    """The port in a server's URL."""
    return int(server.url.rpartition(":")[2])


def scrub(text: str, key: str) -> str:
    """`text` without the API key: what servers print may repeat it."""
    return text.replace(key, "(key hidden)") if key else text


def free_ports(host: str, count: int) -> list[int]:
    """So many TCP ports that nobody listens on at `host` now; nothing keeps them free. Raises EngineStartError."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        try:
            socket.create_server((host, port)).close()
            found.append(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise EngineStartError(f"fleet.host = {host!r}: {error}. Give this machine's IPv4 address.") from None
        if len(found) == count:
            break
    return found
