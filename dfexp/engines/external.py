"""Servers that somebody else runs: any OpenAI-compatible URLs. They are never started, restarted or stopped."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from dfexp.engines.base import ServerPlan
from dfexp.engines.http import base_url, first_model, get_json
from dfexp.engines.pages import from_models, from_props, from_server_info
from dfexp.errors import AccessDenied, BadAnswer, FleetError, Refused, ServerFault
from dfexp.layout import FleetFolder
from dfexp.params import ExternalFleet
from dfexp.records import ServerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEngine:
    """The engine of `engine: external`."""

    name: ClassVar[str] = "external"
    group: ExternalFleet
    root: Path

    def plans(self, folder: FleetFolder, key: str) -> list[ServerPlan]:
        """The URLs as they were given, none of them to be started."""
        return [ServerPlan(url=base_url(url), argv=None) for url in self.group.urls]

    def outside_key(self) -> str:
        """The key out of the environment variable that the parameters name; "" when they name none."""
        variable = self.group.api_key_env
        if variable is None:
            return ""
        key = os.environ.get(variable, "").strip()
        if not key:
            raise FleetError(
                f"fleet.api_key_env names the environment variable {variable}, which is not set or empty. "
                f"Set it to the servers' API key before you start, or remove fleet.api_key_env if they need none."
            )
        if not key.isascii() or not key.isprintable():
            raise FleetError(f"the API key in {variable} holds characters that no HTTP header can carry. Set it anew.")
        return key

    def model_name(self, url: str, key: str) -> str:
        """The name in the parameters, else the first that the server lists."""
        return self.group.model or first_model(url, key)

    def model_fingerprint(self, url: str, key: str) -> str:
        """The name: nothing more can be known from outside."""
        return self.model_name(url, key)

    def limits(self, url: str, key: str, timeout_s: float = 10.0) -> ServerLimits:
        """What the server says in whichever way it knows, completed by what the parameters give."""
        said = self._ask(url, key, timeout_s)
        return replace(
            said,
            max_running_requests=said.max_running_requests or self.group.max_running_requests,
            context_length=said.context_length or self.group.context_length,
            model=self.group.model or said.model,
        )

    def diagnose_start(self, log_text: str, exit_code: int | None) -> tuple[str, str]:
        """There is no log: all that is known is that nothing answered."""
        return (
            "It did not answer a one-token request.",
            "Start it, and check fleet.urls, fleet.model and the API key (fleet.api_key_env).",
        )

    def is_port_taken(self, log_text: str) -> bool:
        """Never: nothing is started here."""
        return False

    def _ask(self, url: str, key: str, timeout_s: float) -> ServerLimits:
        """SGLang's pages, else llama.cpp's, else the list of models, which nearly every compatible server has."""
        try:
            models = get_json(f"{url}/v1/models", key=key, timeout_s=timeout_s)
        except AccessDenied as error:
            if error.status != 404:
                raise
            models = None
        readers: tuple[tuple[str, Callable[[Any, Any], ServerLimits]], ...] = (
            ("/server_info", from_server_info),
            ("/get_server_info", from_server_info),
            ("/props", from_props),
        )
        for path, read in readers:
            page = _page(url + path, key, timeout_s)
            if read(page, None) != ServerLimits():
                return read(page, models)
        return from_models(models)


def _page(url: str, key: str, timeout_s: float) -> Any:
    """A page; None where this server answers with anything else. Raises RequestError when it does not answer."""
    try:
        return get_json(url, key=key, timeout_s=timeout_s)
    except (AccessDenied, BadAnswer, Refused, ServerFault):
        return None
