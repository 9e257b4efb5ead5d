"""The command that rehearses a run."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import Any

import pandas as pd

from dfexp import generate, notebook, rehearse
from dfexp.cli.attendant import stop_signals
from dfexp.cli.common import EXIT_FAILED, EXIT_OK, say, told
from dfexp.errors import DfexpError
from dfexp.jsonl import write_atomic
from dfexp.layout import project_root


def rehearsal(args: argparse.Namespace) -> int:
    """`dfexp rehearse PARAMS`: a run of SGLang servers, or variants of it, on simulated ones; takes no GPU."""
    root, speed = project_root(), [f"fleet.speed={args.speed}"] if args.speed else []
    lines, done, outcome = list[dict[str, Any]](), list[str](), EXIT_OK
    variants = rehearse.read(args.params, root, [*args.set, *speed], args.only, args.hours)
    for number in (signal.SIGTERM, signal.SIGHUP):  # they interrupt as Ctrl-C does, so that servers are stopped
        signal.signal(number, signal.default_int_handler)
    for variant in variants:

        def tell(step: str, name: str = variant.name) -> None:
            print(f"  {time.strftime('%H:%M:%S')} {name}: {step}", file=sys.stderr, flush=True)

        try:
            try:
                limits = rehearse.play(variant, root, tell)
            finally:
                with stop_signals():  # a second Ctrl-C leaves no servers behind
                    rehearse.end(variant.spec, root)
            lines += rehearse.rows(variant, root, limits, whole=not args.no_whole)
            group = variant.spec.report.model_copy(update={"compare": done[:]})  # beside those before it
            spec, folder = variant.spec.model_copy(update={"report": group}), generate.run_folder(variant.spec, root)
            tell(f"report: {notebook.execute('04_report', spec, folder, root)}")
            done.append(spec.run)
        except DfexpError as error:  # the other variants tell all the same
            outcome = told(f"{variant.name}: {error}", EXIT_FAILED)
    if lines:
        table, path = pd.DataFrame(lines), root / variants[0].spec.outputs / f"{args.params.stem}-simulated"
        as_json = table.to_json(orient="records", indent=1)
        write_atomic(path.with_suffix(".json"), as_json.encode())
        write_atomic(path.with_suffix(".csv"), table.to_csv(index=False).encode())
        shown = rehearse.frame(lines).to_string(), rehearse.about(variants[0]), f"Tables: {path}.csv, {path.name}.json"
        say(as_json if args.json else "\n\n".join((f"SIMULATED: {args.params}", *shown)))
    return outcome
