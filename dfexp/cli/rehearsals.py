"""The command that rehearses a run."""

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd

from dfexp import generate, notebook, rehearse
from dfexp.cli.attendant import stop_signals
from dfexp.cli.common import EXIT_CTRL_C, EXIT_FAILED, EXIT_OK, say, told
from dfexp.errors import DfexpError
from dfexp.jsonl import write_atomic
from dfexp.layout import project_root


def rehearsal(args: argparse.Namespace) -> int:
    """`dfexp rehearse PARAMS`: a run of SGLang servers, or variants of it, on simulated ones; takes no GPU."""
    root, speed = project_root(), [f"fleet.speed={args.speed}"] if args.speed else []
    lines, finished, outcome = list[dict[str, Any]](), list[rehearse.Variant](), EXIT_OK
    variants = rehearse.read(args.params, root, [*args.set, *speed], args.only, args.hours)
    for number in (signal.SIGTERM, signal.SIGHUP):  # they interrupt as Ctrl-C does, so that servers are stopped
        signal.signal(number, signal.default_int_handler)
    with rehearse.held(variants, root):
        for remark in rehearse.remarks(variants):
            print(f"  {remark}", file=sys.stderr, flush=True)
        for variant in variants:

            def tell(step: str, name: str = variant.name) -> None:
                print(f"  {time.strftime('%H:%M:%S')} {name}: {step}", file=sys.stderr, flush=True)

            spec, folder = variant.spec, generate.run_folder(variant.spec, root)
            try:
                try:
                    limits = rehearse.play(variant, root, tell)
                finally:
                    with stop_signals():  # a second Ctrl-C leaves no servers behind
                        rehearse.end(spec, root)
                if not args.no_whole:
                    minutes = round((every := variant.setting.prompts) / 7e5)
                    takes = f": {minutes} min, on a busy machine more" * bool(minutes)
                    tell(f"simulating all {every:,} prompts without servers{takes}")
                lines += rehearse.rows(variant, root, limits, whole=not args.no_whole)
                group = spec.report.model_copy(update={"compare": [each.spec.run for each in finished]})
                finished.append(variant)
                shown = spec.model_copy(update={"report": group})
                tell(f"report: {notebook.execute('04_report', shown, folder, root)}")
            except DfexpError as error:  # the other variants tell all the same
                outcome = told(f"{variant.name}: {error}", EXIT_FAILED)
            except KeyboardInterrupt:  # those before it tell all the same
                outcome = told(f"{variant.name}: interrupted", EXIT_CTRL_C)
                break
        if finished:
            _conclude(args, finished, lines, is_part=bool(args.only) or outcome == EXIT_CTRL_C)
    return outcome


def _conclude(args: argparse.Namespace, finished: list[rehearse.Variant], lines: list[Any], *, is_part: bool) -> None:
    """Write the tables, a part of them under a name of its own, and show them."""
    root, names = project_root(), [each.name for each in finished] if is_part else []
    path = root / finished[0].spec.outputs / "-".join((args.params.stem, *names, "simulated"))
    table = pd.DataFrame(lines)
    as_json = table.to_json(orient="records", indent=1)
    write_atomic(Path(f"{path}.json"), as_json.encode())
    write_atomic(Path(f"{path}.csv"), table.to_csv(index=False).encode())
    folders = "".join(f"\n  {generate.run_folder(each.spec, root).path}" for each in finished)
    runs = f"Runs, for dfexp status FOLDER and dfexp report FOLDER:{folders}\nTables: {path}.csv, {path.name}.json"
    shown = rehearse.frame(lines).to_string(), rehearse.about(finished[0]), runs
    say(as_json if args.json else "\n\n".join((f"SIMULATED: {args.params}", *shown)))
