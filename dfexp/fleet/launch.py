"""Bring a fleet up: attach to it, or launch it; and find the fleets there are."""

from __future__ import annotations

from pathlib import Path

from dfexp.fleet.fleet import Fleet
from dfexp.layout import FleetFolder
from dfexp.params import RunSpec


def up(spec: RunSpec, root: Path) -> tuple[Fleet, bool]:
    """The fleet of `spec`, and whether this call launched it. Does not wait: `Fleet.wait_ready` does.

    A fleet of that name that runs with the same parameters is attached to; its dead servers are started again unless a
    run holds it. Records of a fleet that is gone are replaced. Raises FleetError if it runs with other parameters
    (naming them), EngineStartError if it cannot be launched; then nothing is left running.
    """
    raise NotImplementedError


def list_fleets(root: Path, outputs: str = "outputs") -> list[FleetFolder]:
    """The folders under `root/outputs/fleets` in which a fleet is recorded, by name."""
    raise NotImplementedError
