"""fleet.json: what is recorded of a fleet, who may change it, and which changes there are."""

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dfexp.engines.base import Server
from dfexp.errors import FleetError
from dfexp.jsonl import disk, write_atomic
from dfexp.layout import FleetFolder
from dfexp.params import AnyFleet, OwnFleet

# What says nothing about the servers themselves, only about how they are started and watched.
NOT_OF_SERVERS = {
    *("name", "start_timeout_s", "stagger_s", "canary_first", "check_content", "least_share_of_plan"),
    "accepted_checks",
}
# What all servers share, or what decides where they are.
_FIXED = ("engine", "servers", "host", "first_port", "gpus", "device", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """The content of fleet.json, without secrets."""

    identity: str  # random hex made at launch
    spec: AnyFleet  # the parameters as launched
    root: Path  # what relative paths in them are relative to
    servers: tuple[Server, ...]
    launcher: str  # the process that launched it (`ProcessId`)
    gpu_bytes_before: int | None = None  # in use on their GPUs before the launch; None where no driver tells
    ready: bool = False  # whether all have answered once; until then the fleet is being launched


_FORMAT = TypeAdapter(FleetRecord)
_GROUP: TypeAdapter[AnyFleet] = TypeAdapter(AnyFleet)


def read_group(tree: object) -> AnyFleet:
    """The parameters of servers out of their JSON. Raises ValidationError."""
    return _GROUP.validate_python(tree)


def write_record(folder: FleetFolder, record: FleetRecord) -> None:
    """Replace fleet.json. Raises StorageError if the disk refuses."""
    write_atomic(folder.fleet_json, _FORMAT.dump_json(record, indent=2) + b"\n")


def read_record(folder: FleetFolder) -> FleetRecord | None:
    """What fleet.json says; None when there is none. Raises FleetError for a file that is not whole."""
    try:
        return _FORMAT.validate_json(folder.fleet_json.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        why = f"{folder.fleet_json} is damaged or of another version of dfexp ({error.errors()[0]['msg']})."
        raise FleetError(f"{why} Stop its servers by hand (`ps` names them), then remove {folder.path}.") from None


@contextlib.contextmanager
def changing(folder: FleetFolder) -> Iterator[None]:
    """One process, and one thread in it, at a time changes a fleet; others wait. Raises StorageError."""
    # A file, not the folder: shared file systems lock only what is open for writing. It is never removed, or two
    # processes could each hold the lock of a file of that name.
    with contextlib.ExitStack() as stack:
        with disk(f"lock {folder.path}", "Fix the folder."):
            file = stack.enter_context((folder.path / "launch.lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def differences(running: AnyFleet, asked: AnyFleet) -> list[str]:
    """The keys that differ, with both values, but for those that say nothing about the servers themselves."""
    old, new = flat(running), flat(asked)
    return [
        f"{key} is {old.get(key)!r}, asked for is {new.get(key)!r}"
        for key in {**new, **old}
        if old.get(key) != new.get(key) and key.removeprefix("fleet.") not in NOT_OF_SERVERS
    ]


def flat(group: AnyFleet) -> dict[str, Any]:
    """The parameters of a fleet by their dotted names, those of inner mappings as well."""
    found: dict[str, Any] = {}
    for key, value in group.model_dump(mode="json").items():
        inner = {f"fleet.{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else None
        found |= {f"fleet.{key}": value} if inner is None else inner
    return found


def change_to(running: AnyFleet, asked: AnyFleet) -> AnyFleet:
    """The settings of servers as asked for; what says nothing about servers stays as it is."""
    kept = {key: getattr(running, key) for key in NOT_OF_SERVERS if hasattr(running, key)}
    return asked.model_copy(update=kept)


def check_change(running: AnyFleet, asked: AnyFleet) -> None:
    """Raise FleetError for a change that cannot be made one server at a time on the same addresses."""
    if not isinstance(running, OwnFleet):
        raise FleetError("the servers are run by somebody else and cannot be reconfigured from here.")
    for key in _FIXED:
        old, new = getattr(running, key, None), getattr(asked, key, None)
        if old != new:
            raise FleetError(
                f"fleet.{key} is {old!r} and would become {new!r}: servers cannot be changed to that one by one. Stop"
                " the fleet and launch it again."
            )


def waits_for_others(server: Server) -> bool:
    """Whether a server of ours has never been started."""
    return server.argv is not None and server.pid is None
