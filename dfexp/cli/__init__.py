"""The `dfexp` command: thin. Every subcommand parses, calls one part of the package and prints.

A command's module is imported when it is called: `--help`, `status` and `stop` should not wait for pandas or openai.
"""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dfexp
from dfexp.cli.common import EXIT_CTRL_C, EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXIT_WRONG, amount, told  # noqa: F401
from dfexp.errors import DfexpError

_AS_JSON = ("--json", {"action": "store_true", "help": "for machines"})
_REPORTS = ("file", {"type": Path, "metavar": "FILE", "help": "startup reports, one JSON object a line"})
_SETTING = ("--set", {"action": "append", "default": [], "metavar": "GROUP.KEY=VALUE", "help": "wins over the file"})
_PARAMS_FILE = ("params", {"type": Path, "metavar": "PARAMS", "help": "parameter file, such as params/demo.yaml"})
_ONE_RUN = ("run", {"metavar": "RUN", "help": "name or folder of a run"})
_ONE_FLEET = ("name", {"metavar": "NAME", "help": "name of a fleet"})
_OUTPUTS = ("--outputs", {"default": "outputs", "help": "folder of all runs and fleets"})
_KINDS = {"nargs": "*", "metavar": "KIND", "help": "send failed rows again: all, or these kinds"}
_NOW = ("--now", {"action": "store_true", "help": "cut off requests in flight"})
_DRAIN = ("--drain-s", {"type": amount, "default": 10.0, "help": "seconds that requests in flight get"})
_CANARY = (
    ("--canary-s", {"type": amount, "default": 120.0, "help": "seconds of each measured window"}),
    ("--least-speed", {"type": amount, "default": 0.95, "help": "least share of the rate that is expected"}),
    ("--answers", {"type": int, "default": 32, "help": "prompts whose answers must stay what they were; 0: none"}),
    ("--no-canary", {"action": "store_true", "help": "check that answers make sense; neither speed nor what they say"}),
    ("--drain-s", {"type": amount, "help": "then requests in flight are sent again; default: they may finish"}),
)
_SAMPLE = (
    ("--rows", {"type": int, "default": 200, "help": "size of the sample"}),
    ("--seed", {"type": int, "default": 0, "help": "of the draw"}),
    ("--keep-fleet", {"action": "store_true", "help": "leave the servers up for dfexp run, which stops them"}),
)
_REHEARSED = (
    ("--only", {"action": "append", "default": [], "metavar": "VARIANT", "help": "this one alone; may be repeated"}),
    ("--hours", {"type": amount, "help": "virtual hours of each rehearsal, instead of the file's"}),
    ("--speed", {"help": "virtual seconds per second; default: max, as fast as the client can go"}),
    ("--no-whole", {"action": "store_true", "help": "leave out the simulation of the whole run"}),
)


_TWO_WAYS = (
    ("--with", {"action": "append", "default": [], "dest": "other", "metavar": "GROUP.KEY=VALUE", "required": True,
                "help": "what differs in the second configuration; may be repeated"}),
    ("--prompts", {"type": int, "default": 64, "help": "prompts, drawn at random (%(default)s)"}),
    ("--max-tokens", {"type": int, "default": 512, "help": "of an answer (%(default)s)"}),
    ("--temperature", {"type": amount, "default": 0.0, "help": "0, the default: greedy, answers should be identical"}),
    ("--seed", {"type": int, "default": 0, "help": "of the draw of prompts"}),
)  # fmt: skip


_SET = (
    ("--to", {"type": Path, "required": True, "metavar": "PATH", "help": "new: .jsonl, .messages.jsonl, .parquet"}),
    ("--format", {"choices": ("conversations", "messages", "parquet"), "help": "default: by the suffix"}),
    ("--thinking", {"choices": ("inline", "apart", "dropped"), "default": "inline",
                    "help": "thoughts: as the model wrote them, as reasoning_content, or left out"}),
    ("--accept", {"action": "append", "default": [], "metavar": "MARK", "help": "keep rows that are rejected else"}),
    ("--reject", {"action": "append", "default": [], "metavar": "MARK", "help": "reject more, such as truncated"}),
    ("--min-tokens", {"type": int, "help": "fewest tokens of an answer"}),
    ("--max-tokens", {"type": int, "help": "most tokens of an answer"}),
    ("--max-repeated", {"type": float, "metavar": "SHARE", "help": "most of an answer that may be said five times"}),
    ("--outlier-sigmas", {"type": float, "help": "of log lengths, for --reject length_outlier; default: 4"}),
    ("--validation", {"type": amount, "default": 0.0, "help": "share of prompts for a second file, such as 0.02"}),
    ("--merge", {"type": Path, "metavar": "FILE", "help": "an earlier set: its rows come first, it stays as it is"}),
    ("--name", {"help": "name of the set, with which the ids of its rows begin; default: the run's"}),
    ("--license", {"action": "append", "default": [], "metavar": "[SOURCE=]LICENCE", "help": "for the card"}),
)  # fmt: skip


_RESTORED = (
    ("--from", {"dest": "source", "metavar": "s3://BUCKET/PREFIX/RUN", "help": "its place; endpoint as boto3 has it"}),
    ("--params", {"type": Path, "metavar": "PARAMS", "help": "or a parameter file, whose store group says so"}),
    ("--rows", {"action": "store_true", "help": "download the shards too; alone: of a folder that is there"}),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0 done, 1 failed, 2 wrong input (nothing started), 3 stopped early, 130 Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        module, _, name = args.call.partition(".")
        return int(getattr(importlib.import_module(f"dfexp.cli.{module}"), name)(args) or EXIT_OK)
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        return EXIT_OK
    except KeyboardInterrupt as error:
        return told(str(error) or "interrupted", EXIT_CTRL_C)
    except (DfexpError, OSError) as error:
        return told(error, error.exit_status if isinstance(error, DfexpError) else EXIT_FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dfexp", description=dfexp.__doc__)
    parser.add_argument("--version", action="version", version=f"dfexp {dfexp.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    action: dict[str, Any] = {"metavar": "ACTION", "required": True}
    of_fleets = commands.add_parser("fleet", help="servers: up, status, reconfigure, down").add_subparsers(**action)
    capacities = commands.add_parser("capacity", help="the capacity model: check").add_subparsers(**action)
    stores = commands.add_parser("store", help="a run on S3: upload, verify, restore").add_subparsers(**action)
    for group, name, call, summary, arguments in (
        (stores, "upload", "stores.upload", "what is not in the bucket yet, of a run that does not go on", (_ONE_RUN,)),
        (stores, "verify", "stores.verify", "bucket and folder compared, both ways", (_ONE_RUN,)),
        (stores, "restore", "stores.restore", "a run's folder from the bucket alone, to go on from or to read",
         (_ONE_RUN, _SETTING, *_RESTORED)),
        (commands, "run", "runs.run", "all four notebooks, unattended", (_PARAMS_FILE, _SETTING)),
        (commands, "pilot", "runs.pilot", "a sample of the prompts first: lengths, rates, time left, ten answers",
         (_PARAMS_FILE, _SETTING, *_SAMPLE)),
        (commands, "resume", "runs.resume", "go on with a run that was begun, with its frozen prompts",
         (_ONE_RUN, _SETTING, ("--retry-failed", _KINDS))),
        (commands, "check", "ahead.check", "parameters and prompts, starting nothing", (_PARAMS_FILE, _SETTING)),
        (commands, "prompts", "ahead.prompts_dry", "read the prompts and say what is left out, and why",
         (_PARAMS_FILE, _SETTING, _AS_JSON)),
        (commands, "preflight", "ahead.preflight_run", "what servers need, what this machine lacks, what would start",
         (_PARAMS_FILE, _SETTING)),
        (commands, "plan", "ahead.plan", "which SGLang flags finish the run soonest, and what it will cost",
         (_PARAMS_FILE, _SETTING, _AS_JSON)),
        (commands, "rehearse", "rehearsals.rehearsal",
         "a run of SGLang servers, or variants of it, on simulated ones; takes no GPU",
         (_PARAMS_FILE, _SETTING, *_REHEARSED, _AS_JSON)),
        (commands, "equivalence", "equivalence.equivalence",
         "whether a setting changes what the model says: the same prompts both ways",
         (_PARAMS_FILE, _SETTING, *_TWO_WAYS)),
        (capacities, "check", "ahead.capacity_check", "startup reports beside what the capacity model says",
         (_REPORTS, _AS_JSON)),
        (commands, "status", "runs.status", "one line per run, and per server of the run that is asked for",
         ((_ONE_RUN[0], {**_ONE_RUN[1], "nargs": "?"}), _OUTPUTS)),
        (commands, "stop", "runs.stop", "drain, seal, end; --now cuts off what is in flight", (_ONE_RUN, _NOW)),
        (commands, "report", "runs.report", "04_report alone, also for a run that is going on", (_ONE_RUN, _SETTING)),
        (commands, "export", "export.of_run", "the good rows of a run as a training set, with a card beside it",
         (_ONE_RUN, *_SET)),
        (of_fleets, "up", "fleets.up", "launch a fleet, or attach to it, and wait for its first tokens",
         (_PARAMS_FILE, _SETTING)),
        (of_fleets, "status", "fleets.status", "each server, its process and its room",
         ((_ONE_FLEET[0], {**_ONE_FLEET[1], "nargs": "?"}), _OUTPUTS)),
        (of_fleets, "reconfigure", "fleets.reconfigure",
         "give servers the settings in the file one by one, also under a run", (_PARAMS_FILE, _SETTING, *_CANARY)),
        (of_fleets, "down", "fleets.down", "stop the servers of a fleet, also under a run with --force",
         (_ONE_FLEET, _OUTPUTS, _DRAIN, ("--force", {"action": "store_true"}))),
    ):  # fmt: skip
        made = group.add_parser(name, help=summary, description=summary)
        made.set_defaults(call=call)
        for flag, options in arguments:
            made.add_argument(flag, **options)
    return parser
