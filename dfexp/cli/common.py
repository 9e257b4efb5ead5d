"""What every command shares: exit statuses, finding runs, printing."""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from dfexp.errors import ParamsError
from dfexp.jsonl import read_json
from dfexp.layout import RunFolder, project_root
from dfexp.shards import Shards

EXIT_OK, EXIT_FAILED, EXIT_WRONG, EXIT_STOPPED, EXIT_CTRL_C = 0, 1, 2, 3, 130


def amount(text: str) -> float:
    """A number given on the command line. Raises ValueError; ArgumentTypeError: negative or not finite."""
    if not 0 <= (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number of at least 0")
    return number


def told(error: object, code: int) -> int:
    """The exit status `code`, after a line that says why."""
    with contextlib.suppress(OSError):
        print(f"dfexp: {error}", file=sys.stderr)
    return code


def find_run(text: str) -> RunFolder:
    """A run by its folder or by its name under outputs/."""
    root = project_root()
    for path in (Path(text), root / "outputs" / text):
        if (path / "run.json").is_file():
            return RunFolder(path.resolve())
    known = ", ".join(folder.name for folder in all_runs(root / "outputs")) or "none"
    raise ParamsError(
        f"no run {text!r}: neither a folder with a run.json nor a name under {root / 'outputs'}. Known: {known}."
    )


def all_runs(outputs: Path) -> list[RunFolder]:
    """Every run under an outputs folder, by name."""
    return [RunFolder(path.parent) for path in sorted(outputs.glob("*/run.json"))]


def opened(folder: RunFolder) -> Shards:
    """The shards of a run that has been started, and does not go on; a context manager."""
    run = read_json(folder.run_json)
    about = {"total": run["prompts"]["asked"], "rows_per_shard": run["spec"]["generation"]["rows_per_shard"]}
    return Shards.open(folder.completions, fingerprint=run.get("fingerprint", {}), **about)


def say(text: str) -> None:
    """Print a line. An output that is gone, such as a closed terminal or the pipe to `head`, must not end a run."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
