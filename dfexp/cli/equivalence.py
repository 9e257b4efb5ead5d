"""`dfexp equivalence`: whether a setting changes what the model says."""

import argparse

from dfexp import params, sidebyside
from dfexp.cli.common import EXIT_FAILED, EXIT_OK, say
from dfexp.equivalence import DIFFERS, TOO_FEW
from dfexp.layout import project_root


def equivalence(args: argparse.Namespace) -> int:
    """`dfexp equivalence PARAMS --with fleet.KEY=VALUE`: exit status 1 where the answers differ or are too few."""
    spec, changed = params.load(args.params, args.set), params.load(args.params, [*args.set, *args.other])
    given = {"prompts": args.prompts, "max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    verdict = sidebyside.both_ways(spec, changed, project_root(), say, sidebyside.Terms(**given))
    print(verdict)
    for test in verdict.tests:
        shown = f"{test.p:.2f}" if test.p >= 0.01 else f"{test.p:.1g}"
        print(f"  {test.name}: {test.reference} -> {test.changed}, p = {shown} (chance alone)")
    return EXIT_FAILED if verdict.verdict in (DIFFERS, TOO_FEW) else EXIT_OK
