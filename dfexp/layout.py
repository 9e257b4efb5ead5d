"""Where every file of a run and of a fleet lives. Names only: nothing here reads or writes, but for `project_root`."""

from pathlib import Path
from typing import Self


def project_root(start: Path | None = None) -> Path:
    """The folder that relative paths in parameters are relative to.

    The nearest folder at or above `start` (default: the working directory) that holds `params/` or `outputs/`; a
    notebook opened in notebooks/ and a command run in the checkout therefore agree. Without one: `start` itself.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "params").is_dir() or (folder / "outputs").is_dir():
            return folder
    return start


class RunFolder:
    """The files of one run, `outputs/<run>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.run_json = path / "run.json"  # resolved parameters, versions, hardware, fingerprints
        self.prompts = path / "prompts.jsonl"  # the frozen prompts; line i is index i
        self.prompts_report = path / "prompts_report.json"  # what was left out of them, and why; their lengths
        self.control = path / "control"  # commands to the running process, and its status
        self.completions = path / "completions"  # shards, done-set, failures, manifest
        self.events = path / "events.jsonl"  # launches, crashes, restarts, findings
        self.metrics = path / "metrics.jsonl"  # what servers and GPUs said, one line each per interval
        self.log = path / "generate.log"  # what the generating process printed
        self.notebooks = path / "notebooks"  # executed notebooks and their HTML
        self.report = path / "report"  # tables as CSV and JSON


class FleetFolder:
    """The files of one fleet, `outputs/fleets/<name>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.fleet_json = path / "fleet.json"  # servers: url, argv, pid and start stamp, log path
        self.key = path / "key"  # the API key, mode 0600
        self.lock = path / "lock"  # held by the run that uses the fleet
        self.logs = path / "logs"  # one log a server, mode 0600
        self.events = path / "events.jsonl"  # changes of settings that were made without a run

    @classmethod
    def named(cls, root: Path, outputs: str, name: str) -> Self:
        """The fleet `name` of a project, among the outputs that its runs name."""
        return cls(root / outputs / "fleets" / name)
