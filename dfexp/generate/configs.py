"""The configurations in run.json that rows point to: with what each row was made."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dfexp.fleet import Fleet
from dfexp.fleet.record import NOT_OF_SERVERS
from dfexp.generate.identity import config_id
from dfexp.jsonl import read_json, write_json
from dfexp.layout import RunFolder
from dfexp.params import AnyFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Configs:
    """Writes run.json while the run's lock is held. `common` is what all rows share: model and sampling."""

    folder: RunFolder
    fleet: Fleet
    common: Mapping[str, Any]

    def id_of(self, name: str, engine_version: str | None) -> str:
        """The id of the configuration that server `name` works with now; it is added to run.json if it is new."""
        settings = self.fleet.settings(name).model_dump(mode="json")
        config = {"engine": self.fleet.engine.name, "engine_version": engine_version, "fleet": settings, **self.common}
        ident, recorded, server = config_id(config), read_json(self.folder.run_json), self.fleet.server(name)
        entry = recorded["configs"].setdefault(ident, {**config, "argv": {}, "first_used_at": time.time()})
        if server.argv is not None:
            entry["argv"][name] = server.argv
        write_json(self.folder.run_json, recorded)
        return ident

    def settle(self, group: AnyFleet) -> None:
        """The run's parameters have these servers from now on, so that it can be resumed with them."""
        recorded = read_json(self.folder.run_json)
        settings = group.model_dump(mode="json").items()
        recorded["spec"]["fleet"] |= {key: value for key, value in settings if key not in NOT_OF_SERVERS}
        write_json(self.folder.run_json, recorded)
