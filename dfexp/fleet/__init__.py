"""The fleet: launch, attach, watch, restart, stop. It outlives whoever launched it, and `fleet.json` says where it is.

    fleet, started = up(spec, root)         # attaches to a running fleet of that name and parameters, or launches it
    fleet.wait_ready(spec.fleet.start_timeout_s)
    with fleet.lease("run demo"):           # one user at a time
        fleet.status(); fleet.restart("127.0.0.1:8080"); fleet.is_process_alive("127.0.0.1:8080")
    fleet.down(drain_s=60)
"""

from dfexp.engines.base import scrub
from dfexp.fleet.fleet import Fleet, ServerStatus, attach
from dfexp.fleet.launch import list_fleets, up
from dfexp.fleet.record import Server

__all__ = ["Fleet", "Server", "ServerStatus", "attach", "list_fleets", "scrub", "up"]
