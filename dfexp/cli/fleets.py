"""Commands on fleets: up, status, reconfigure, down."""

import argparse

from dfexp import fleet, params
from dfexp.capacity.plan_command import require_room
from dfexp.cli.common import EXIT_FAILED, EXIT_OK, say, told
from dfexp.errors import FleetError
from dfexp.layout import FleetFolder, project_root
from dfexp.records import ServerLimits


def up(args: argparse.Namespace) -> int:
    """`dfexp fleet up PARAMS`: launch, or attach to, the fleet of a parameter file, and wait for its first tokens."""
    spec, root = params.load(args.params, args.set), project_root()
    the_fleet, started = fleet.up(spec, root)
    the_fleet.wait_ready(spec.fleet.start_timeout_s, say)
    print(f"{'launched' if started else 'running already'}; stop it with: dfexp fleet down {the_fleet.name}")
    outcome = print_fleet(the_fleet)
    require_room(spec, root, {each.name: each.limits for each in the_fleet.status()})
    return outcome


def status(args: argparse.Namespace) -> int:
    """`dfexp fleet status [NAME]`: each server, its process and its room."""
    root = project_root()
    folders = [FleetFolder.named(root, args.outputs, args.name)] if args.name else fleet.list_fleets(root, args.outputs)
    outcome = EXIT_OK
    for folder in folders:
        try:
            print_fleet(fleet.attach(folder))
        except FleetError as error:  # the others are there all the same
            outcome = told(error, EXIT_FAILED)
    if not folders:
        print(f"no fleets under {root / args.outputs / 'fleets'}")
    return outcome


def reconfigure(args: argparse.Namespace) -> int:
    """`dfexp fleet reconfigure PARAMS`: give servers the settings in the file one by one, also under a run."""
    from dfexp.generate.reconfigure import reconfigure as change  # here, since it takes openai, which is slow to import

    terms = {name: getattr(args, name) for name in ("canary_s", "least_speed", "answers", "drain_s")}
    terms |= {"canary_s": 0.0, "answers": 0} if args.no_canary else {}
    return EXIT_OK if change(params.load(args.params, args.set), project_root(), say, **terms) else EXIT_FAILED


def down(args: argparse.Namespace) -> None:
    """`dfexp fleet down NAME`: stop the servers that this fleet started, also under a run with --force."""
    the_fleet = fleet.attach(FleetFolder.named(project_root(), args.outputs, args.name))
    print("\n".join(the_fleet.down(args.drain_s, force=args.force)))


def print_fleet(the_fleet: fleet.Fleet) -> int:
    """A table of servers. Exit status 0 when all are ready."""
    states = the_fleet.status()
    print(f"fleet {the_fleet.name} ({the_fleet.engine.name}), {the_fleet.folder.path}")
    for each in states:
        limits = each.limits or ServerLimits()
        room = f"requests {limits.max_running_requests or '?':<5}context {limits.context_length or '?':<8}"
        print(f"  {each.url:<28}{each.state:<12}pid {each.pid or '-':<9}{room}{each.detail}")
    return EXIT_OK if all(each.state == "ready" for each in states) else EXIT_FAILED
