"""The durable heart of a run: completions in shards, each index exactly once, whatever dies on the way.

All functions take the run's completions folder (`RunFolder.completions`). One process writes, through `Shards`; any
number read, at any time, through the functions.

The protocol, and why a crash between any two steps loses nothing:

1. `commit` appends rows to the open shard, flushes it, then does the same for failures, and only then returns. What it
   did not return for may be there or not, whole or torn; opening cuts what is torn.
2. A full shard is flushed before the next one is created. It is published by a hard link under its final name, which
   cannot replace a file, a flush of the folder, and the removal of the open name. If both names are left, opening
   removes the open one.
3. Then manifest.json and .done_indices are replaced. Both only say what the shards say: opening adopts a shard that
   they do not list, and rebuilds either if it is lost.
4. If the disk refuses step 1, everything is taken back and the caller is told. If it refuses 2 or 3, the rows are safe
   in the shard under its open name, so the run goes on and the step is made up for later (`Shards.seal_error`).
"""

from dfexp.shards.files import Manifest, ShardEntry, ShardFile, list_shards, read_manifest
from dfexp.shards.reader import not_uploaded, only_stored, read_failures, read_rows
from dfexp.shards.writer import Shards

__all__ = [
    "Manifest",
    "ShardEntry",
    "ShardFile",
    "Shards",
    "list_shards",
    "not_uploaded",
    "only_stored",
    "read_failures",
    "read_manifest",
    "read_rows",
]
