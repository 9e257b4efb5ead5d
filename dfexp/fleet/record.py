"""fleet.json: what a fleet's folder says about its servers. The file is the truth; every change replaces it whole."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dfexp.engines.base import Server
from dfexp.errors import FleetError
from dfexp.jsonl import write_atomic
from dfexp.layout import FleetFolder
from dfexp.params import AnyFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """The content of fleet.json, without secrets."""

    identity: str  # random hex made at launch
    spec: AnyFleet  # the parameters as launched
    root: Path  # what relative paths in them are relative to
    servers: tuple[Server, ...]
    ready: bool = False  # whether all have answered once; until then the fleet is being launched


_FORMAT = TypeAdapter(FleetRecord)


def read_record(folder: FleetFolder) -> FleetRecord | None:
    """What fleet.json says; None when there is none. Raises FleetError for a file that is not whole."""
    try:
        return _FORMAT.validate_json(folder.fleet_json.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise FleetError(
            f"{folder.fleet_json} is damaged or of another version of dfexp ({error.errors()[0]['msg']}). Stop its"
            f" servers by hand (the file or `ps` names them), then remove {folder.path}."
        ) from None


def write_record(folder: FleetFolder, record: FleetRecord) -> None:
    """Replace fleet.json. Raises StorageError if the disk refuses; the old file then stays."""
    write_atomic(folder.fleet_json, _FORMAT.dump_json(record, indent=2) + b"\n")


@contextlib.contextmanager
def changing(folder: FleetFolder) -> Iterator[None]:
    """One process, and one thread in it, at a time changes a fleet; others wait. Ends with its process."""
    # A file, not the folder: shared file systems lock only what is open for writing. It is never removed, or two
    # processes could each hold the lock of a file of that name.
    with (folder.path / "launch.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
