"""The fleet: launch, attach, watch, restart, stop. It outlives whoever launched it, and `fleet.json` says where it is.

`up` attaches to a running fleet or launches it, `Fleet.wait_ready` waits for its first tokens, `Fleet.lease` holds it
for one user, `Fleet.down` stops it and proves it.
"""

from dfexp.engines.base import scrub
from dfexp.fleet.fleet import Fleet, ServerStatus, attach
from dfexp.fleet.launch import list_fleets, up
from dfexp.fleet.record import Server

__all__ = ["Fleet", "Server", "ServerStatus", "attach", "list_fleets", "scrub", "up"]
