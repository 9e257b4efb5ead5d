"""Commands on runs: run, resume, report, status, stop."""

import argparse
import textwrap
from math import inf

from dfexp import control, generate, livepage, notebook, params
from dfexp.cli.attendant import run_notebooks
from dfexp.cli.common import all_runs, find_run, say
from dfexp.engines.base import engine_for
from dfexp.errors import ParamsError, RequestError, RunError, RunStopped
from dfexp.layout import RunFolder, project_root


def run(args: argparse.Namespace) -> int:
    """`dfexp run PARAMS`: all four notebooks, unattended."""
    spec, root = params.load(args.params, args.set), project_root()
    engine_for(spec.fleet, root).outside_key()  # a key that is missing is told before anything is written
    return run_notebooks(spec, generate.prepare(spec, root), root)


def pilot(args: argparse.Namespace) -> None:
    """`dfexp pilot PARAMS`: a random sample of the prompts through the real fleet, as rows of the run."""
    from dfexp.pilot import write  # here, since it takes pandas, which is slow to import

    spec, root, size = params.load(args.params, args.set), project_root(), (args.rows, args.seed)
    if args.rows < 1:
        raise ParamsError(f"--rows {args.rows}: a sample has at least 1.")
    engine_for(spec.fleet, root).outside_key()
    folder = generate.prepare(spec, root)
    run_notebooks(spec, folder, root, sample=size, keeps_fleet=args.keep_fleet)
    found = control.read_status(folder) or {}
    if found.get("state") == "failed":
        raise RunError(f"the pilot of run {folder.name!r} failed: {found['reason']} See {folder.log}.")
    page, missing = write(folder, root, generate.drawn(found["asked"], *size), args.seed)
    say(f"{page}\nKept in {folder.report}, as pilot.md and pilot.json. The run goes on with: dfexp run {args.params}")
    if missing:
        raise RunStopped(f"{missing:,} rows of the sample are missing: {found['reason']}. The same command goes on.")


def resume(args: argparse.Namespace) -> int:
    """`dfexp resume RUN`: the same for a run that was begun, with its frozen prompts."""
    folder, root = find_run(args.run), project_root()
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
    return run_notebooks(spec, folder, root, retry_failed=retry)


def report(args: argparse.Namespace) -> None:
    """`dfexp report RUN`: 04_report alone, also for a run that is going on."""
    folder = find_run(args.run)
    if other := [each for each in args.set if each.split(".")[0].split("=")[0] not in ("report", "quality")]:
        raise ParamsError(f"--set {other[0]}: the run was made with what it has; set report.KEY or quality.KEY now.")
    spec = params.validate(params.overlay(generate.read_spec(folder).model_dump(), args.set), str(folder.run_json))
    print(notebook.execute("04_report", spec, folder, project_root()))


def status(args: argparse.Namespace) -> None:
    """`dfexp status [RUN]`: one line per run, and per server of the run that is asked for."""
    root = project_root()
    folders = [find_run(args.run)] if args.run else all_runs(root / args.outputs)
    for folder in folders:
        found = control.read_status(folder)
        alive = control.living_process(folder) is not None
        gone = ""
        if not alive and found and found["state"] not in control.FINAL_STATES:
            found, gone = {**found, "state": "killed", "eta_s": None}, f"  (dfexp resume {folder.name} goes on)"
        print(f"{folder.name}: {livepage.line(found) if found else _unseen(folder)}{gone}")
        for each in found["findings"] if found and args.run and alive else ():
            words = " ".join(filter(None, (f"{each['kind']}:", each["evidence"], each["change"])))
            print(textwrap.fill(words, 120, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
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


def _unseen(folder: RunFolder) -> str:
    """A run of which no process has told anything here."""
    done, failed, asked = generate.kept(folder)
    goes_on = f"dfexp resume {folder.name} goes on" if done + failed < asked else "nothing is left to do"
    return "not started yet" if not asked else f"restored: {done:,} of {asked:,} done, {failed:,} failed  ({goes_on})"


def stop(args: argparse.Namespace) -> None:
    """`dfexp stop RUN`: drain, seal, end; `--now` cuts off what is in flight."""
    folder = find_run(args.run)
    found = control.read_status(folder)
    if control.living_process(folder) is None:
        print(f"{folder.name}: no process runs" + (f" ({found['state']})" if found else ""))
        return
    generate.stop(folder, reason="dfexp stop", now=args.now)
    control.wait_until(lambda: control.living_process(folder) is None, inf)
    found = control.read_status(folder)
    print(f"{folder.name}: {livepage.line(found) if found else 'stopped'}")
