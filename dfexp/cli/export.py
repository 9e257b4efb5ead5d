"""The command that makes a training set of a run."""

import argparse

from dfexp import export, params
from dfexp.cli.common import find_run, say
from dfexp.jsonl import read_json
from dfexp.layout import RunFolder
from dfexp.quality import Thresholds


def of_run(args: argparse.Namespace) -> None:
    """`dfexp export RUN --to PATH`: the good rows as a training set, with a card beside it."""
    folder = find_run(args.run)
    options = export.Options(
        format=args.format, thinking=args.thinking, thresholds=_thresholds(args, folder),
        validation=args.validation, merge=args.merge, name=args.name,
        licenses={source: licence for source, _, licence in (text.rpartition("=") for text in args.license)},
    )  # fmt: skip
    made = export.export(folder, args.to, options)
    rejected = ", ".join(f"{count:,} {mark}" for mark, count in made.counts["Rejected"].most_common())
    say("rows: " + ", ".join(f"{count:,} {what}" for what, count in made.rows.items()))
    say(f"rejected for (a row can have several reasons): {rejected or 'nothing'}")
    for split, path in made.files.items():
        say(f"{path}: {split}" + (f", {made.written[split]:,} rows" if split != "card" else ""))


def _thresholds(args: argparse.Namespace, folder: RunFolder) -> Thresholds:
    """Those of the run's parameter file, with what was asked for now over them."""
    tree = dict(read_json(folder.run_json)["spec"].get("quality") or {})
    lists = {"accept": args.accept, "reject": args.reject}
    numbers = {name: getattr(args, name) for name in ("min_tokens", "max_tokens", "max_repeated", "outlier_sigmas")}
    tree |= lists if args.accept or args.reject else {}
    tree |= {name: given for name, given in numbers.items() if given is not None}
    return params.checked("quality", params.QualityGroup, tree).thresholds
