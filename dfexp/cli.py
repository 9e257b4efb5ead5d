"""The `dfexp` command: thin. Every subcommand parses, calls one part of the package and prints."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import dfexp
from dfexp import control, display, fleet, generate, notebook, params, prompts
from dfexp.capacity import plan_command
from dfexp.engines.base import engine_for
from dfexp.errors import ControlError, DfexpError, FleetError, ParamsError, RequestError, RunError, RunStopped
from dfexp.jsonl import read_json
from dfexp.layout import FleetFolder, RunFolder, project_root
from dfexp.params import RunSpec
from dfexp.records import ServerLimits

NOTEBOOKS = ("01_launch_fleet", "02_capacity", "03_generate", "04_report")
EXIT_OK, EXIT_FAILED, EXIT_WRONG, EXIT_STOPPED = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0 done, 1 failed, 2 wrong input (nothing started), 3 stopped before the end."""
    args = _parser().parse_args(argv)
    try:
        return int(args.call(args))
    except RunStopped as error:
        return _told(error, EXIT_STOPPED)
    except ParamsError as error:
        return _told(error, EXIT_WRONG)
    except DfexpError as error:
        return _told(error, EXIT_FAILED)
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        return EXIT_OK
    except OSError as error:
        return _told(error, EXIT_FAILED)


def run(args: argparse.Namespace) -> int:
    """`dfexp run PARAMS`: all four notebooks, unattended."""
    spec, root = params.load(args.params, args.set), project_root()
    engine_for(spec.fleet, root).outside_key()  # a key that is missing is told before anything is written
    return _run_notebooks(spec, generate.prepare(spec, root), root)


def resume(args: argparse.Namespace) -> int:
    """`dfexp resume RUN`: the same for a run that was begun, with its frozen prompts."""
    folder, root = _run_folder(args.run), project_root()
    tree = params.overlay(generate.read_spec(folder).model_dump(), args.set)
    spec = params.validate(tree, str(folder.run_json))
    if generate.run_folder(spec, root).path.resolve() != folder.path.resolve():
        raise RunError(
            f"{folder.path} was begun as {spec.outputs}/{spec.run}; resume it from the folder that holds that."
        )
    generate.keep_frozen(folder, root)
    generate.prepare(spec, root)
    retry = None if args.retry_failed is None else args.retry_failed or [generate.ALL_KINDS]
    kinds = {generate.ALL_KINDS, *(kind.kind for kind in RequestError.__subclasses__())}
    if unknown := [kind for kind in retry or () if kind not in kinds]:
        raise ParamsError(f"--retry-failed {unknown[0]}: no kind of failure. Kinds: {', '.join(sorted(kinds))}.")
    return _run_notebooks(spec, folder, root, retry_failed=retry)


def report(args: argparse.Namespace) -> int:
    """`dfexp report RUN`: 04_report alone, also for a run that is going on."""
    folder = _run_folder(args.run)
    print(notebook.execute("04_report", generate.read_spec(folder), folder, project_root()))
    return EXIT_OK


def check(args: argparse.Namespace) -> int:
    """`dfexp check PARAMS`: parameters and prompts, starting nothing."""
    spec = params.load(args.params, args.set)
    engine_for(spec.fleet, project_root()).outside_key()
    reading = prompts.read(spec.prompts, project_root())
    kept = sum(1 for _ in reading)
    dropped = ", ".join(f"{count} {reason}" for reason, count in reading.dropped_by_reason.items()) or "none"
    print(f"{args.params} is right: run {spec.run!r}, engine {spec.fleet.engine}, {kept} prompts, dropped: {dropped}")
    return EXIT_OK


def plan(args: argparse.Namespace) -> int:
    """`dfexp plan PARAMS`: which SGLang flags finish the run soonest, and what it will cost."""
    print(plan_command.plan_text(params.load(args.params, args.set), project_root(), as_json=args.json))
    return EXIT_OK


def capacity_check(args: argparse.Namespace) -> int:
    """`dfexp capacity check FILE`: startup reports of servers beside what the capacity model says."""
    text, outcome = plan_command.check_text(args.file, as_json=args.json)
    print(text)
    return outcome


def status(args: argparse.Namespace) -> int:
    """`dfexp status [RUN]`: one line per run, and per server of the run that is asked for."""
    root = project_root()
    folders = [_run_folder(args.run)] if args.run else _all_runs(root / args.outputs)
    for folder in folders:
        found = control.read_status(folder)
        alive = control.living_process(folder) is not None
        gone = ""
        if not alive and found and found["state"] not in control.FINAL_STATES:
            found, gone = {**found, "state": "killed", "eta_s": None}, f"  (dfexp resume {folder.name} goes on)"
        print(f"{folder.name}: {display.line(found) if found else 'not started yet'}{gone}")
        servers = found["servers"] if found and args.run else ()
        if servers and not alive:
            print("  no process runs; the servers as it last saw them:")
        for server in servers:
            print(
                f"  {server['name']:<24}{server['state']:<10}in flight {server['in_flight']}/{server['limit']}  "
                f"done {server['done']}  errors {server['errors']}  restarts {server['restarts']}"
            )
    if not folders:
        print(f"no runs under {root / args.outputs}")
    return EXIT_OK


def stop(args: argparse.Namespace) -> int:
    """`dfexp stop RUN`: drain, seal, end; `--now` cuts off what is in flight."""
    folder = _run_folder(args.run)
    found = control.read_status(folder)
    if control.living_process(folder) is None:
        print(f"{folder.name}: no process runs" + (f" ({found['state']})" if found else ""))
        return EXIT_OK
    generate.stop(folder, reason="dfexp stop", now=args.now)
    while control.living_process(folder) is not None:
        time.sleep(0.2)
    found = control.read_status(folder)
    print(f"{folder.name}: {display.line(found) if found else 'stopped'}")
    return EXIT_OK


def fleet_up(args: argparse.Namespace) -> int:
    """`dfexp fleet up PARAMS`: launch, or attach to, the fleet of a parameter file, and wait for its first tokens."""
    spec, root = params.load(args.params, args.set), project_root()
    the_fleet, started = fleet.up(spec, root)
    the_fleet.wait_ready(spec.fleet.start_timeout_s)
    print(f"{'launched' if started else 'running already'}; stop it with: dfexp fleet down {the_fleet.name}")
    return _print_fleet(the_fleet)


def fleet_status(args: argparse.Namespace) -> int:
    """`dfexp fleet status [NAME]`: each server, its process and its room."""
    root = project_root()
    folders = [_fleet_folder(args.name, root, args.outputs)] if args.name else fleet.list_fleets(root, args.outputs)
    for folder in folders:
        _print_fleet(fleet.attach(folder))
    if not folders:
        print(f"no fleets under {root / args.outputs / 'fleets'}")
    return EXIT_OK


def fleet_down(args: argparse.Namespace) -> int:
    """`dfexp fleet down NAME`: stop the servers that this fleet started, also under a run with --force."""
    the_fleet = fleet.attach(_fleet_folder(args.name, project_root(), args.outputs))
    print("\n".join(the_fleet.down(args.drain_s, force=args.force)))
    return EXIT_OK


def _run_notebooks(spec: RunSpec, folder: RunFolder, root: Path, *, retry_failed: Sequence[str] | None = None) -> int:
    """Run 01 to 04, stop the fleet if this started it, and say where everything is."""
    if (living := control.living_process(folder)) is not None:
        raise RunError(
            f"run {folder.name!r} is running already (pid {living.pid}). Look in: dfexp status {folder.name}; "
            f"stop it: dfexp stop {folder.name}."
        )
    with _stop_signals() as signals:
        attendant = _Attendant(spec, folder, root, signals)
        try:
            for name in NOTEBOOKS:
                _say(f"{name} ...")
                notebook.execute(name, spec, folder, root, tick=attendant.tick)
                if signals and name != NOTEBOOKS[-1]:
                    raise RunStopped(f"told to stop after {name}. Go on with: dfexp resume {folder.name}")
                if name == NOTEBOOKS[0] and retry_failed is not None:
                    generate.start(spec, root, retry_failed=retry_failed)
        finally:
            attendant.leave()
    return _conclude(folder)


def _conclude(folder: RunFolder) -> int:
    """The last lines of a run: every row accounted for, and where things are."""
    found = control.read_status(folder) or {}
    asked, done, failed = (found.get(key, 0) for key in ("asked", "done", "failed"))
    counts = f"{done} succeeded + {failed} failed = {done + failed} of {asked} asked"
    dropped = sum(read_json(folder.run_json)["prompts"]["dropped_by_reason"].values())
    unused = f"; {dropped} row(s) of the source are no prompts, see run.json" if dropped else ""
    _say(f"run {folder.name!r} {found.get('state')}: {counts}{unused}")
    _say(f"  completions  {folder.completions}")
    _say(f"  report       {folder.notebooks / '04_report.html'}")
    _say(f"  tables       {folder.report}")
    return EXIT_OK if found.get("state") == "ended" and done + failed == asked else EXIT_FAILED


class _Attendant:
    """What `dfexp run` does about once a second while a notebook runs: obey signals, print progress.

    It also keeps the identity of the fleet that this command launched in the run's folder, so that a command that was
    killed leaves its servers to the next one, and not to nobody.
    """

    def __init__(self, spec: RunSpec, folder: RunFolder, root: Path, signals: list[int]) -> None:
        self._spec, self._folder, self._root, self._signals = spec, folder, root, signals
        self._mark = folder.path / ".launched_fleet"
        self._launched = self._mark.read_text() if self._mark.exists() else None
        self._foreign = identity if (identity := _fleet_identity(spec, root)) != self._launched else None
        self._next_line = 0.0
        self._obeyed = 0

    def tick(self) -> None:
        """Pass signals on: the first drains the run, the second cuts it off, the third leaves at once."""
        if len(self._signals) > self._obeyed:
            self._obeyed += 1
            self._obey()
        self._claim()
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._spec.generation.progress_interval_s
            found = control.read_status(self._folder)
            if found is not None and control.living_process(self._folder) is not None:
                _say(f"  {time.strftime('%H:%M:%S')} {display.line(found)}")
            else:
                self._say_who_is_awaited()

    def _say_who_is_awaited(self) -> None:
        """Servers that do not answer yet are what a command without a run waits for."""
        with contextlib.suppress(FleetError):
            for each in fleet.attach(generate.fleet_folder(self._spec, self._root)).status(timeout_s=2.0):
                if each.state != "ready":
                    _say(f"  {time.strftime('%H:%M:%S')} waiting for {each.name}: {each.state}, {each.detail}")

    def leave(self) -> None:
        """Stop the fleet if it is ours."""
        self._claim()
        if self._foreign is not None:
            _say(f"fleet {self._spec.fleet_name!r} was running before and is left running.")
        elif self._launched is not None and _fleet_identity(self._spec, self._root) == self._launched:
            self._end_the_run()
            _say("\n".join(fleet.attach(generate.fleet_folder(self._spec, self._root)).down()))
            self._mark.unlink(missing_ok=True)

    def _claim(self) -> None:
        """A fleet that was not there before this command is its own."""
        if self._foreign is None and (identity := _fleet_identity(self._spec, self._root)) not in (
            None,
            self._launched,
        ):
            self._launched = identity
            with contextlib.suppress(OSError):  # a full disk; only a kill of this command would need the mark
                self._mark.write_text(str(identity))

    def _end_the_run(self) -> None:
        """A run goes on for a while when its notebook was killed, and holds the fleet until it has drained."""
        end = time.monotonic() + self._spec.generation.drain_s + 30.0
        with contextlib.suppress(ControlError):  # raised once it has ended
            generate.stop(self._folder, reason="dfexp run has ended")
            while time.monotonic() < end and not control.wait_until(self._has_ended, 0.5):
                if len(self._signals) > self._obeyed:
                    self._obeyed = len(self._signals)
                    generate.stop(self._folder, reason="dfexp run has ended", now=True)

    def _has_ended(self) -> bool:
        return control.living_process(self._folder) is None

    def _obey(self) -> None:
        try:
            generate.stop(self._folder, reason="dfexp run was told to stop", now=self._obeyed > 1)
        except ControlError:
            raise RunStopped(f"stopped before rows were made. Go on with: dfexp resume {self._folder.name}") from None
        if self._obeyed > 2:
            raise RunStopped(f"left at once. Rows reported done are safe. Go on with: dfexp resume {self._folder.name}")
        _say("stopping: requests in flight may finish; once more cuts them off")


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them; the handlers of before come back at the end."""
    seen: list[int] = []
    before = {
        number: signal.signal(number, lambda received, _: seen.append(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fleet_identity(spec: RunSpec, root: Path) -> str | None:
    """Which launch of the run's fleet is running now; None when no server of it has a living process."""
    try:
        found = fleet.attach(generate.fleet_folder(spec, root))
    except FleetError:
        return None
    return found.identity if any(found.is_process_alive(server.name) for server in found.servers) else None


def _print_fleet(the_fleet: fleet.Fleet) -> int:
    """A table of servers. Exit status 0 when all are ready."""
    states = the_fleet.status()
    print(f"fleet {the_fleet.name} ({the_fleet.engine.name}), {the_fleet.folder.path}")
    for each in states:
        limits = each.limits or ServerLimits()
        room = f"requests {limits.max_running_requests or '?':<5}context {limits.context_length or '?':<8}"
        print(f"  {each.url:<28}{each.state:<12}pid {each.pid or '-':<9}{room}{each.detail}")
    return EXIT_OK if all(each.state == "ready" for each in states) else EXIT_FAILED


def _run_folder(text: str) -> RunFolder:
    """A run by its folder or by its name under outputs/."""
    root = project_root()
    for path in (Path(text), root / "outputs" / text):
        if (path / "run.json").is_file():
            return RunFolder(path.resolve())
    known = ", ".join(folder.name for folder in _all_runs(root / "outputs")) or "none"
    raise RunError(
        f"no run {text!r}: neither a folder with a run.json nor a name under {root / 'outputs'}. Known: {known}."
    )


def _fleet_folder(name: str, root: Path, outputs: str) -> FleetFolder:
    return FleetFolder.named(root, outputs, name)


def _all_runs(outputs: Path) -> list[RunFolder]:
    return [RunFolder(path.parent) for path in sorted(outputs.glob("*/run.json"))]


def _told(error: Exception, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"dfexp: {error}", file=sys.stderr)
    return code


def _say(text: str) -> None:
    """Print a line. An output that is gone, such as a closed terminal or the pipe to `head`, must not end a run."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dfexp", description=dfexp.__doc__)
    parser.add_argument("--version", action="version", version=f"dfexp {dfexp.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    fleets = commands.add_parser("fleet", help="servers: up, status, down").add_subparsers(
        metavar="ACTION", required=True
    )
    capacities = commands.add_parser("capacity", help="the capacity model: check").add_subparsers(
        metavar="ACTION", required=True
    )
    as_json = ("--json", {"action": "store_true", "help": "for machines"})
    reports = ("file", {"type": Path, "metavar": "FILE", "help": "startup reports, one JSON object a line"})
    setting = ("--set", {"action": "append", "default": [], "metavar": "GROUP.KEY=VALUE", "help": "wins over the file"})
    params_file = ("params", {"type": Path, "metavar": "PARAMS", "help": "parameter file, such as params/demo.yaml"})
    one_run = ("run", {"metavar": "RUN", "help": "name or folder of a run"})
    one_fleet = ("name", {"metavar": "NAME", "help": "name of a fleet"})
    outputs = ("--outputs", {"default": "outputs", "help": "folder of all runs and fleets"})
    kinds = {"nargs": "*", "metavar": "KIND", "help": "send failed rows again: all, or these kinds"}
    drain = ("--drain-s", {"type": float, "default": 10.0, "help": "seconds that requests in flight get"})
    for group, name, call, arguments in (
        (commands, "run", run, (params_file, setting)),
        (commands, "resume", resume, (one_run, setting, ("--retry-failed", kinds))),
        (commands, "check", check, (params_file, setting)),
        (commands, "plan", plan, (params_file, setting, as_json)),
        (capacities, "check", capacity_check, (reports, as_json)),
        (commands, "status", status, ((one_run[0], {**one_run[1], "nargs": "?"}), outputs)),
        (commands, "stop", stop, (one_run, ("--now", {"action": "store_true", "help": "cut off requests in flight"}))),
        (commands, "report", report, (one_run,)),
        (fleets, "up", fleet_up, (params_file, setting)),
        (fleets, "status", fleet_status, ((one_fleet[0], {**one_fleet[1], "nargs": "?"}), outputs)),
        (fleets, "down", fleet_down, (one_fleet, outputs, drain, ("--force", {"action": "store_true"}))),
    ):
        summary = str(call.__doc__).splitlines()[0]
        made = group.add_parser(name, help=summary.partition(": ")[2] or summary, description=summary)
        made.set_defaults(call=call)
        for flag, options in arguments:
            made.add_argument(flag, **options)
    return parser


if __name__ == "__main__":
    sys.exit(main())
