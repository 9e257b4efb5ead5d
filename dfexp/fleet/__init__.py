"""The fleet: launch, attach, watch, restart, stop. It outlives whoever launched it; `fleet.json` says where it is."""

from dfexp.engines.base import Server, scrub
from dfexp.fleet.fleet import Fleet, ServerStatus
from dfexp.fleet.launch import attach, is_running, list_fleets, up

__all__ = ["Fleet", "Server", "ServerStatus", "attach", "is_running", "list_fleets", "scrub", "up"]
