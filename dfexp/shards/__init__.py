"""The durable heart of a run: completions in shards, each index exactly once, whatever dies on the way.

All functions take the run's completions folder (`RunFolder.completions`). One process writes, through `Shards`; any
number read, at any time, through the functions.
"""

from dfexp.shards.files import ShardFile, list_shards
from dfexp.shards.manifest import Manifest, ShardEntry, pack_indices, read_manifest, unpack_indices
from dfexp.shards.reader import read_failures, read_rows
from dfexp.shards.recovery import Repairs
from dfexp.shards.writer import Shards

__all__ = [
    "Manifest",
    "Repairs",
    "ShardEntry",
    "ShardFile",
    "Shards",
    "list_shards",
    "pack_indices",
    "read_failures",
    "read_manifest",
    "read_rows",
    "unpack_indices",
]
