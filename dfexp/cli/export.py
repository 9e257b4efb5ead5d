"""The command that makes a training set of a run."""

from __future__ import annotations

import argparse

from dfexp import export
from dfexp.cli.common import EXIT_OK, find_run, say


def of_run(args: argparse.Namespace) -> int:
    """`dfexp export RUN --to PATH`: the good rows as a training set, with a card beside it."""
    options = export.Options(
        format=args.format, thinking=args.thinking, tokens=(args.min_tokens, args.max_tokens),
        rejected=frozenset(export.MARKS.keys() - {*args.accept} | {*args.reject}),
        validation=args.validation, merge=args.merge, name=args.name,
        licenses={source: licence for source, _, licence in (text.rpartition("=") for text in args.license)},
    )  # fmt: skip
    made = export.export(find_run(args.run), args.to, options)
    rejected = ", ".join(f"{count:,} {mark}" for mark, count in made.counts["Rejected"].most_common())
    say("rows: " + ", ".join(f"{count:,} {what}" for what, count in made.rows.items()))
    say(f"rejected for (a row can have several reasons): {rejected or 'nothing'}")
    for split, path in made.files.items():
        say(f"{path}: {split}" + (f", {made.written[split]:,} rows" if split != "card" else ""))
    return EXIT_OK
