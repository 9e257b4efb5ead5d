"""SGLang servers as processes of this machine: one for each GPU or tensor-parallel group, with a random key."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dfexp.engines.base import VISIBLE
from dfexp.engines.sglang_flags import argv_for, gpus_per_server
from dfexp.engines.sglang_install import Installation, look
from dfexp.engines.sglang_servers import SglangServersEngine
from dfexp.errors import EngineStartError, FleetError
from dfexp.params import SglangFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangEngine(SglangServersEngine):
    """The engine of `engine: sglang`."""

    name: ClassVar[str] = "sglang"
    group: SglangFleet

    def spelled(self) -> tuple[str, list[str]]:
        """As the installed version wants them."""
        installed = self.installation()
        if installed.sglang_version is None:
            raise EngineStartError(
                f"{installed.python} has no SGLang ({installed.error or 'no package sglang'}). Name the interpreter of"
                " an environment that has it: fleet.python."
            )
        return installed.sglang_version, argv_for(self.group.flags, installed.sglang_version, installed.flags)

    def command(self, port: int) -> tuple[str, ...]:
        """What starts the server at `port`, without its flags and its private files."""
        device = () if self.group.device == "cuda" else ("--device", self.group.device)
        return (self.python, "-m", "sglang.launch_server", *self.named(port), *device)

    def installation(self, argv: Sequence[str] = ()) -> Installation:
        """The SGLang that would run, and what its parser says of `argv`. Raises FleetError: no such interpreter."""
        return look(self.python, self._device_env | dict(self.group.env), self.root, argv)

    def gpus(self) -> list[tuple[str, ...]]:
        """The GPUs of each server, as CUDAVISIBLE_DEVICES names them; empty tuples on a CPU.

        A CUDAVISIBLE_DEVICES of this process, as batch systems set it, says which GPUs there are to take from.
        """
        if self.group.device == "cpu":
            return SglangServersEngine.gpus(self)
        each, outside = gpus_per_server(self.group.flags), os.environ.get(VISIBLE)
        seen = None if outside is None else list(dict.fromkeys(filter(None, map(str.strip, outside.split(",")))))
        wanted = self.group.gpus or list(range(each * self.group.servers if seen is None else len(seen)))
        if len(wanted) < each * self.group.servers or (seen is not None and max(wanted) >= len(seen)):
            there = f"fleet.gpus is {wanted}" if seen is None else f"{VISIBLE} is {outside!r}"
            raise FleetError(
                f"{self.group.servers} server(s) of {each} GPU(s) each need {each * self.group.servers} GPUs, but"
                f" {there}. Lower fleet.servers, or change fleet.gpus."
            )
        names = [str(index) if seen is None else seen[index] for index in wanted]
        return [tuple(names[start : start + each]) for start in range(0, each * self.group.servers, each)]

    @property
    def python(self) -> str:
        """The interpreter of the servers: a path, or a name on the PATH."""
        given = self.group.python
        if given is None:
            return sys.executable
        return str(self.root / Path(given).expanduser()) if "/" in given else shutil.which(given) or given

    @property
    def _device_env(self) -> dict[str, str]:
        return {"SGLANG_USE_CPU_ENGINE": "1"} if self.group.device == "cpu" else {}

    def env(self, gpus: tuple[str, ...]) -> dict[str, str]:
        """Its GPUs by number or UUID, and what the parameters add."""
        # Ordered as the driver lists them: by default CUDA puts the fastest first.
        chosen = {VISIBLE: ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}
        return chosen | self._device_env | dict(self.group.env)
