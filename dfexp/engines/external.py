"""Servers that somebody else runs: any OpenAI-compatible URLs. They are never started, restarted or stopped."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dfexp.engines.base import Engine, Server
from dfexp.engines.http import get_json
from dfexp.engines.pages import limits_from
from dfexp.errors import AccessDenied, BadAnswer, EngineMissing, Refused, ServerFault
from dfexp.layout import FleetFolder
from dfexp.params import ExternalFleet
from dfexp.records import EngineSample, ServerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEngine(Engine):
    """The engine of `engine: external`."""

    name: ClassVar[str] = "external"
    group: ExternalFleet

    def plan(self, folder: FleetFolder, key: str, at: Sequence[Server] = ()) -> list[Server]:
        """The URLs as they were given, none of them to be started."""
        bare = [url.rstrip("/").removesuffix("/v1").rstrip("/") for url in self.group.urls]
        return [Server(name=url.partition("://")[2], url=url) for url in bare]

    def outside_key(self) -> str:
        """The key out of the environment variable that the parameters name; "" when they name none."""
        variable = self.group.api_key_env
        key = os.environ.get(variable, "").strip() if variable else ""
        if variable and not (key and key.isascii() and key.isprintable()):
            raise EngineMissing(
                f"fleet.api_key_env names the environment variable {variable}, which holds no API key (not set, empty,"
                " or with characters that no HTTP header can carry). Set it, or remove fleet.api_key_env."
            )
        return key

    def model_name(self, url: str, key: str) -> str:
        """The name in the parameters, else the first that the server lists. Raises BadAnswer when it lists none."""
        name = self.group.model or limits_from(get_json(f"{url}/v1/models", key=key)).model
        if name is None:
            raise BadAnswer(f"{url}/v1/models lists no model. Give the model's name in fleet.model.")
        return name

    def limits(self, server: Server, key: str, timeout_s: float = 10.0) -> ServerLimits:
        """What the server says on whichever pages it has, completed by what the parameters give."""
        pages = {}
        for path in ("v1/models", "server_info", "props"):
            try:
                pages[path] = get_json(f"{server.url}/{path}", key=key, timeout_s=timeout_s)
            except (AccessDenied, BadAnswer, Refused, ServerFault) as error:
                if path == "v1/models" and error.status in (401, 403):
                    raise  # a wrong key; other pages may be closed to everybody
        said = limits_from(pages.get("v1/models"), pages.get("server_info"), pages.get("props"))
        slots = said.max_running_requests or self.group.max_running_requests
        context, model = said.context_length or self.group.context_length, self.group.model or said.model
        return replace(said, max_running_requests=slots, context_length=context, model=model)

    def sample(self, server: Server, key: str, timeout_s: float = 10.0) -> EngineSample | None:
        """Its page of metrics, where it has one that is known here."""
        try:
            return Engine.sample(self, server, key, timeout_s)
        except (AccessDenied, BadAnswer, Refused, ServerFault):
            return None

    def has_loaded(self, log_text: str) -> bool:
        """True: they are started by somebody else."""
        return True

    def diagnose_start(self, log_text: str) -> str:
        """There is no log: all that is known is that nothing answered."""
        return "Start it, and check fleet.urls, fleet.model and the API key (fleet.api_key_env)."
