"""The `dfexp` command: thin. Every subcommand parses, calls one part of the package and prints.

A command's module is imported when it is called: `--help`, `status` and `stop` should not wait for pandas or openai.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dfexp
from dfexp.cli.common import EXIT_CTRL_C, EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXIT_WRONG, amount, told
from dfexp.errors import DfexpError, ParamsError, RunStopped


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0 done, 1 failed, 2 wrong input (nothing started), 3 stopped early, 130 Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        module, _, name = args.call.partition(".")
        return int(getattr(importlib.import_module(f"dfexp.cli.{module}"), name)(args))
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        return EXIT_OK
    except (DfexpError, OSError, KeyboardInterrupt) as error:
        codes: dict[type, int] = {RunStopped: EXIT_STOPPED, ParamsError: EXIT_WRONG, KeyboardInterrupt: EXIT_CTRL_C}
        return told(str(error) or "interrupted", codes.get(type(error), EXIT_FAILED))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dfexp", description=dfexp.__doc__)
    parser.add_argument("--version", action="version", version=f"dfexp {dfexp.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    action: dict[str, Any] = {"metavar": "ACTION", "required": True}
    of_fleets = commands.add_parser("fleet", help="servers: up, status, reconfigure, down").add_subparsers(**action)
    capacities = commands.add_parser("capacity", help="the capacity model: check").add_subparsers(**action)
    as_json = ("--json", {"action": "store_true", "help": "for machines"})
    reports = ("file", {"type": Path, "metavar": "FILE", "help": "startup reports, one JSON object a line"})
    setting = ("--set", {"action": "append", "default": [], "metavar": "GROUP.KEY=VALUE", "help": "wins over the file"})
    params_file = ("params", {"type": Path, "metavar": "PARAMS", "help": "parameter file, such as params/demo.yaml"})
    one_run = ("run", {"metavar": "RUN", "help": "name or folder of a run"})
    one_fleet = ("name", {"metavar": "NAME", "help": "name of a fleet"})
    outputs = ("--outputs", {"default": "outputs", "help": "folder of all runs and fleets"})
    kinds = {"nargs": "*", "metavar": "KIND", "help": "send failed rows again: all, or these kinds"}
    now = ("--now", {"action": "store_true", "help": "cut off requests in flight"})
    drain = ("--drain-s", {"type": amount, "default": 10.0, "help": "seconds that requests in flight get"})
    canary = (
        ("--canary-s", {"type": amount, "default": 120.0, "help": "seconds of each measured window"}),
        ("--least-speed", {"type": amount, "default": 0.95, "help": "least share of the rate that is expected"}),
        ("--no-canary", {"action": "store_true", "help": "check the answers only, not the speed"}),
        ("--drain-s", {"type": amount, "help": "then requests in flight are sent again; default: they may finish"}),
    )
    rehearsed = (
        (
            "--only",
            {"action": "append", "default": [], "metavar": "VARIANT", "help": "this one alone; may be repeated"},
        ),
        ("--hours", {"type": amount, "help": "virtual hours of each rehearsal, instead of the file's"}),
        ("--speed", {"help": "virtual seconds per second; default: max, as fast as the client can go"}),
        ("--no-whole", {"action": "store_true", "help": "leave out the simulation of the whole run"}),
    )
    for group, name, call, summary, arguments in (
        (commands, "run", "runs.run", "all four notebooks, unattended", (params_file, setting)),
        (commands, "resume", "runs.resume", "go on with a run that was begun, with its frozen prompts",
         (one_run, setting, ("--retry-failed", kinds))),
        (commands, "check", "ahead.check", "parameters and prompts, starting nothing", (params_file, setting)),
        (commands, "preflight", "ahead.preflight_run", "what servers need, what this machine lacks, what would start",
         (params_file, setting)),
        (commands, "plan", "ahead.plan", "which SGLang flags finish the run soonest, and what it will cost",
         (params_file, setting, as_json)),
        (commands, "rehearse", "rehearsals.rehearsal",
         "a run of SGLang servers, or variants of it, on simulated ones; takes no GPU",
         (params_file, setting, *rehearsed, as_json)),
        (capacities, "check", "ahead.capacity_check", "startup reports beside what the capacity model says",
         (reports, as_json)),
        (commands, "status", "runs.status", "one line per run, and per server of the run that is asked for",
         ((one_run[0], {**one_run[1], "nargs": "?"}), outputs)),
        (commands, "stop", "runs.stop", "drain, seal, end; --now cuts off what is in flight", (one_run, now)),
        (commands, "report", "runs.report", "04_report alone, also for a run that is going on", (one_run,)),
        (of_fleets, "up", "fleets.up", "launch a fleet, or attach to it, and wait for its first tokens",
         (params_file, setting)),
        (of_fleets, "status", "fleets.status", "each server, its process and its room",
         ((one_fleet[0], {**one_fleet[1], "nargs": "?"}), outputs)),
        (of_fleets, "reconfigure", "fleets.reconfigure",
         "give servers the settings in the file one by one, also under a run", (params_file, setting, *canary)),
        (of_fleets, "down", "fleets.down", "stop the servers of a fleet, also under a run with --force",
         (one_fleet, outputs, drain, ("--force", {"action": "store_true"}))),
    ):  # fmt: skip
        made = group.add_parser(name, help=summary, description=summary)
        made.set_defaults(call=call)
        for flag, options in arguments:
            made.add_argument(flag, **options)
    return parser
