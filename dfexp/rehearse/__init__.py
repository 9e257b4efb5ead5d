"""Rehearsals: a run, or variants of it, on simulated servers through the real fleet, generating process and journal.

`variants` reads what to rehearse, `drive` does it, `figures` says what came out; `whole` simulates a run to its end.
"""

from dfexp.rehearse.drive import end, held, play
from dfexp.rehearse.figures import about, frame, rows
from dfexp.rehearse.variants import Variant, read, remarks

__all__ = ["Variant", "about", "end", "frame", "held", "play", "read", "remarks", "rows"]
