"""The run: prompts to servers, answers to shards, in a process of its own that nothing else can tear.

`start` begins a run or joins it; `stop` asks it to drain. Everything else of a running process goes through its
control folder (`dfexp.control`).
"""

from dfexp.generate.limits import drawn
from dfexp.generate.start import ALL_KINDS, fleet_folder, keep_frozen, kept, prepare, read_spec, run_folder, start, stop

__all__ = [
    "ALL_KINDS", "drawn", "fleet_folder", "keep_frozen", "kept", "prepare", "read_spec", "run_folder", "start", "stop",
]  # fmt: skip
