"""The flags of a fleet's parameter file as arguments of one SGLang version, checked against the flags it has. Pure."""

import difflib
import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from dfexp.capacity.errors import CapacityError
from dfexp.capacity.flags import Rules, Since, as_list, option, own_name, parse_flags, refuse, rules, written
from dfexp.errors import FleetError
from dfexp.params_errors import looks_secret, shown

FlagTable = Mapping[str, Mapping[str, Any]]
"""Option to `action`, `choices`, `dest`, `type` and, where known, `nargs`, as SGLang's own argparse parser has them."""
SHIPPED = ("0.5.12", "0.5.23")
"""Versions whose flags are known without an installation."""

_ONE_MACHINE = "a server stays on one machine and finds its own ports. Leave it out; fleet.servers says how many"
_PLAIN_HTTP = "servers are reached over plain HTTP at fleet.host. Leave it out"
_INSTEAD = {
    "model_path": "use fleet.model", "model": "use fleet.model", "host": "use fleet.host",
    "port": "use fleet.first_port", "device": "use fleet.device", "base_gpu_id": "use fleet.gpus",
    "gpu_id_step": "use fleet.gpus", "config": "put its flags into fleet.flags, one by one",
    **dict.fromkeys(("served_model_name", "enable_metrics", "help"), "dfexp sets it. Leave it out"),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr", "nccl_init_addr", "nccl_port"), _ONE_MACHINE),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password"), _PLAIN_HTTP),
    **dict.fromkeys(("enable_ssl_refresh", "grpc_mode", "smg_grpc_mode"), _PLAIN_HTTP),
}  # fmt: skip
_BARE = ("_StoreTrueAction", "DeprecatedStoreTrueAction", "DeprecatedAction")
_RULED = (
    "mamba_strategy", "disable_radix_cache", "disable_overlap_schedule", "page_size", "speculative_num_draft_tokens",
)  # fmt: skip
_RANGED = ("mem_fraction_static", "max_running_requests", "max_mamba_cache_size", "max_total_tokens", "page_size")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "human_readable_int": ((int, str), "a whole number"),
}


@functools.cache
def shipped_table(version: str) -> FlagTable:
    """The flags of one of the SHIPPED versions. Raises FleetError for another."""
    if version not in SHIPPED:
        raise FleetError(f"the flags of sglang {version} are not known here, only those of {' and '.join(SHIPPED)}.")
    usual = {"action": "_StoreAction", "type": "str", "choices": None, "nargs": None}
    rows = json.loads(files("dfexp.engines").joinpath("sglang_flags.json").read_text(encoding="utf-8"))[version]
    return {name: usual | {"dest": name[2:].replace("-", "_")} | row for name, row in rows.items()}


def argv_for(flags: Mapping[str, Any], version: str, table: FlagTable) -> list[str]:
    """The arguments that a version needs for these flags, and those that it wants beside them.

    Args: flags, by dfexp's names or any of SGLang's, with `_` or `-`; version, such as 0.5.12; table, the flags of the
    installation, empty for the shipped ones. Raises FleetError naming flag, value and fix.
    """
    table = table or shipped_table(version)
    given: dict[str, Any] = {}
    for raw, value in flags.items():
        name = own_name(raw)
        _refuse_own(name, value)
        if name in given:
            raise FleetError(f"fleet.flags: {name} is given twice, under two spellings. Keep one.")
        given[name] = value
    try:
        rule = rules(version)
        given = _with_companions(given, rule)
    except CapacityError as error:
        raise FleetError(f"fleet.flags: {error}") from None
    argv: list[str] = []
    seen: dict[str, str] = {}
    for name, value in given.items():
        flag = option(name, rule)
        if flag not in table:
            raise FleetError(f"fleet.flags.{name} = {shown(value, name)}: {_unknown(name, rule, table)}")
        other = seen.setdefault(table[flag]["dest"], name)
        if other != name:
            raise FleetError(f"fleet.flags: {other} and {name} are two spellings of one flag. Keep one.")
        argv += _words(name, flag, table[flag], value)
    try:  # SGLang's parser takes any number
        parse_flags({name: value for name, value in given.items() if name in _RANGED})
    except CapacityError as error:
        raise FleetError(f"fleet.flags: {error}") from None
    return argv


def gpus_per_server(flags: Mapping[str, Any]) -> int:
    """GPUs that one server takes: every copy of the model has tp_size x pp_size, and dp_size copies are that many times
    as many unless they share their GPUs (enable_dp_attention). Raises FleetError: a size that is none.
    """
    given, count = {own_name(raw): value for raw, value in flags.items()}, 1
    for name in ("tp_size", "pp_size") if given.get("enable_dp_attention") else ("tp_size", "pp_size", "dp_size"):
        size = given.get(name, 1)
        if type(size) is not int or size < 1:
            raise FleetError(f"fleet.flags.{name} = {shown(size)} must be a whole number of at least 1.")
        count *= size
    return count


def _refuse_own(name: str, value: Any) -> None:
    """Raise FleetError for a flag that dfexp sets itself, or that would show a secret to everyone on the machine."""
    if name in _INSTEAD:
        raise FleetError(f"fleet.flags.{name} = {shown(value, name)}: {_INSTEAD[name]}.")
    if looks_secret(name, value) or name == "watermark_config":
        raise FleetError(
            f"fleet.flags.{name}: flags are seen by everyone on the machine, so no secret may be among them. Leave it"
            " out; dfexp makes an API key for each fleet and hands it over in a private file."
        )


def _with_companions(given: Mapping[str, Any], version: Rules) -> dict[str, Any]:
    """The flags, and what this version wants given beside them. Raises CapacityError for what it would stop at."""
    if "mamba_strategy" not in given:
        return dict(given)
    beside: dict[str, Any] = {}
    no_buffer = given["mamba_strategy"] == "no_buffer" and given.get("disable_radix_cache") is not True
    if no_buffer and version.since(Since.STRICT_NO_BUFFER):
        beside = {"disable_overlap_schedule": True, "page_size": 1}
    completed = {**given, **{name: value for name, value in beside.items() if name not in given}}
    refuse(parse_flags({name: value for name, value in completed.items() if name in _RULED}), None, version)
    return completed


def _unknown(name: str, version: Rules, table: FlagTable) -> str:
    """What to say of a flag that the version does not have."""
    names = sorted({own_name(flag) for flag in table}.difference(_INSTEAD))
    near = [each for each in names if each.startswith(f"{name}_")] or difflib.get_close_matches(name, names, n=3)
    others = [each for each in SHIPPED if each != version.version and option(name, rules(each)) in shipped_table(each)]
    words = f"sglang {version.version} has no {option(name, version)}"
    words += f", but {others[0]} has." if others else "."
    return f"{words} Did you mean {' or '.join(near[:3])}?" if near else f"{words} Leave it out."


def _words(name: str, flag: str, row: Mapping[str, Any], value: Any) -> list[str]:
    """One flag as arguments. Raises FleetError for a value that SGLang would not take."""
    wrong = f"fleet.flags.{name} = {shown(value, name)} must be"
    if row["action"] in (*_BARE, "BooleanOptionalAction"):
        if not isinstance(value, bool):
            raise FleetError(f"{wrong} true or false.")
        opposite = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        return [opposite] if not value and row["action"] not in _BARE else written(flag, value)
    if isinstance(value, list) and not (value and row.get("nargs", "+")):
        raise FleetError(f"{wrong} one value, not a list." if value else f"{wrong} at least one value.")
    types, words = _TYPES.get(row["type"], ((str, int, float), "text"))
    for item in as_list(value):
        if isinstance(item, bool) or not isinstance(item, types):
            raise FleetError(f"{wrong} {words}.")
        if isinstance(value, list) and isinstance(item, str) and item.startswith("-"):
            raise FleetError(f"{wrong} a list without {shown(item)}, which SGLang would take for an option.")
        if row["choices"] is not None and str(item) not in map(str, row["choices"]):
            raise FleetError(f"{wrong} one of {', '.join(map(str, row['choices']))}.")
    return written(flag, value)
