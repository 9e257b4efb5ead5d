"""Simulated SGLang servers, and the engine that starts them as any other servers of a fleet.

`core` is the pure model in virtual time, without a clock, sockets or randomness; `server` puts SGLang's HTTP before it.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from dfexp.capacity.plan_command import completed
from dfexp.engines.base import Server
from dfexp.engines.sglang_flags import argv_for
from dfexp.engines.sglang_servers import SglangServersEngine
from dfexp.errors import EngineStartError
from dfexp.jsonl import read_json, write_atomic
from dfexp.layout import FleetFolder
from dfexp.params import SimulatedFleet
from dfexp.params_plan import PlanGroup
from dfexp.records import ServerLimits

# Run as a file, without the package: one small process stands for each server.
_ATTACH = Path(__file__).with_name("server") / "attach.py"
_TOLD = ("servers", "seed", "speed", "load_s", "thinking", "faults")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine(SglangServersEngine):
    """The engine of `engine: simulated`: the version, the GPUs and the load that the fleet's plan describes."""

    name: ClassVar[str] = "simulated"
    group: SimulatedFleet

    def planned(self) -> PlanGroup:
        """The plan with these servers' model, flags and number. Raises EngineStartError: there is none."""
        if self.group.plan is None:
            raise EngineStartError("simulated servers need fleet.plan: at least its keys gpu, prompt and completion.")
        plan = completed(self.group.plan, self.group, self.root)
        there = self.root / Path(plan.model or "").expanduser()  # the simulating process works in another folder
        known = {"model": str(there)} if there.exists() else {}
        return plan.model_copy(update={**known, "prompts": plan.prompts or 1, "variants": {}})

    def command(self, port: int) -> tuple[str, ...]:
        """The process that stands for the server at `port`, without its flags and its private files."""
        return (sys.executable, "-S", "-P", str(_ATTACH), *self.named(port))

    def spelled(self) -> tuple[str, list[str]]:
        """As the simulated version wants them."""
        version = self.planned().sglang_version
        return version, argv_for(self.group.flags, version, {})

    def private(self, folder: FleetFolder, port: int, place: int | Server) -> tuple[str, ...]:
        """What is simulated, as JSON."""
        path, plan = folder.path / f"server-{port}.json", self.planned()
        if isinstance(place, Server):
            argv = place.argv or ()
            place = read_json(Path(argv[argv.index("--simulation") + 1]))["index"]
        told = self.group.model_dump(include=set(_TOLD)) | {"index": place}
        told |= {"version": plan.sglang_version, "plan": plan.model_dump()}
        write_atomic(path, json.dumps(told, indent=1).encode(), mode=0o600)
        return ("--simulation", str(path))

    def model_fingerprint(self, url: str, key: str) -> str:
        """That of the model, and what decides the simulated answers."""
        named, said = SglangServersEngine.model_fingerprint(self, url, key), self.planned().completion
        lengths = said.model_dump_json(exclude_none=True)
        return f"simulated {named} seed={self.group.seed} thinking={self.group.thinking} completion={lengths}"

    def limits(self, server: Server, key: str, timeout_s: float = 10.0) -> ServerLimits:
        """As of SGLang; the version says that it is simulated."""
        said = SglangServersEngine.limits(self, server, key, timeout_s)
        return replace(said, engine_version=f"simulated sglang {server.version}")

    def diagnose_start(self, log_text: str) -> str:
        """As of SGLang; the process that simulates all servers has a log of its own."""
        said = SglangServersEngine.diagnose_start(self, log_text)
        return f"{said} What simulates the servers writes to logs/simulator.log in the fleet's folder."
