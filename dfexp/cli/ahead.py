"""Commands that look ahead and start nothing: check, prompts, preflight, plan, capacity check."""

import argparse
import json
import sys
import time
from pathlib import Path

from dfexp import fleet, params, preflight, prompts
from dfexp.capacity import plan_command
from dfexp.cli.common import EXIT_FAILED, EXIT_OK
from dfexp.engines.base import engine_for
from dfexp.errors import FleetError
from dfexp.layout import project_root


def check(args: argparse.Namespace) -> None:
    """`dfexp check PARAMS`: parameters and prompts, starting nothing."""
    spec = params.load(args.params, args.set)
    engine_for(spec.fleet, project_root()).outside_key()
    _warn(spec, project_root())
    found = prompts.measured(spec.prompts, project_root())
    dropped = ", ".join(f"{count} {reason}" for reason, count in found["dropped_by_reason"].items()) or "none"
    is_right = f"{args.params} is right: run {spec.run!r}, engine {spec.fleet.engine}"
    print(f"{is_right}, {found['asked']} prompts, dropped: {dropped}")


def prompts_dry(args: argparse.Namespace) -> None:
    """`dfexp prompts PARAMS`: read the prompts as a run would, and say what is left out and why."""
    spec, root = params.load(args.params, args.set), project_root()
    began = time.monotonic()
    report, took_s = prompts.measured(spec.prompts, root), time.monotonic() - began
    print(json.dumps(report) if args.json else f"{prompts.render(report)}\nread in {took_s:,.1f} s")


def preflight_run(args: argparse.Namespace) -> int:
    """`dfexp preflight PARAMS`: what the servers of a run need and this machine has or lacks, and what would start."""
    spec, root = params.load(args.params, args.set), project_root()
    _warn(spec, root)
    try:
        if fleet.is_running(spec, root):
            print(f"fleet {spec.fleet_name!r} runs already; its own ports and memory count as taken")
    except FleetError as error:  # a damaged record, which no other check needs
        print(error)
    checks = preflight.checks_for(spec, root)
    print(preflight.render(checks))
    for version, commands in preflight.launches_for(spec, root).items():
        print(f"\nwith SGLang {version}, each server with a private file for its API key; server 0:\n  {commands[0]}")
        known = set(commands[0].split())
        for number, command in enumerate(commands[1:], 1):  # from 0, as faults and rehearsals count
            others = [w for w in command.split() if w not in known] + ["another free port"] * ("--port 0" in command)
            print(f"  server {number}: the same with {', '.join(others)}")
    return EXIT_FAILED if any(check.state == "fail" for check in checks) else EXIT_OK


def plan(args: argparse.Namespace) -> None:
    """`dfexp plan PARAMS`: which SGLang flags finish the run soonest, and what it will cost."""
    spec, root = params.load(args.params, args.set), project_root()
    _warn(spec, root)
    print(plan_command.plan_text(spec, root, as_json=args.json))


def _warn(spec: params.RunSpec, root: Path) -> None:
    """Say on stderr what is not there, or does not fit; it may change until the run starts."""
    runs = [spec.report.compare] if isinstance(spec.report.compare, str) else spec.report.compare
    named = [("prompts.path", name) for part in (spec.prompts, *spec.prompts.sources) for name in part.files]
    for key, name in (*named, *(("report.compare", name) for name in runs)):
        if not any((folder / Path(name).expanduser()).exists() for folder in (root, root / spec.outputs)):
            print(f"warning: {key}: {name} is not there (yet)", file=sys.stderr)
    room = getattr(spec.fleet, "context_length", None) or getattr(spec.fleet, "flags", {}).get("context_length")
    if isinstance(asked := spec.generation.max_tokens, int) and room and asked >= room:
        words = f"a context of {room} has no room for that and a prompt"
        print(f"warning: generation.max_tokens = {asked}: {words}", file=sys.stderr)


def capacity_check(args: argparse.Namespace) -> int:
    """`dfexp capacity check FILE`: startup reports of servers beside what the capacity model says."""
    text, outcome = plan_command.check_text(args.file, as_json=args.json)
    print(text)
    return outcome
