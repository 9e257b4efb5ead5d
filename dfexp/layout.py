"""Where every file of a run and of a fleet lives. Names only: nothing here reads or writes, but for `project_root`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run, `outputs/<run>/`."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def run_json(self) -> Path:
        """Resolved parameters, versions, hardware, fingerprints."""
        return self.path / "run.json"

    @property
    def prompts(self) -> Path:
        """The frozen prompts; line i is index i."""
        return self.path / "prompts.jsonl"

    @property
    def control(self) -> Path:
        """Commands to the running process, its status and its answers."""
        return self.path / "control"

    @property
    def completions(self) -> Path:
        """Shards, done-set, failures, manifest."""
        return self.path / "completions"

    @property
    def events(self) -> Path:
        """Launches, crashes, restarts, findings."""
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        """What the generating process printed."""
        return self.path / "generate.log"

    @property
    def notebooks(self) -> Path:
        """Executed notebooks and their HTML."""
        return self.path / "notebooks"

    @property
    def report(self) -> Path:
        """Tables as CSV and JSON, figures."""
        return self.path / "report"


@dataclass(frozen=True, slots=True)
class FleetFolder:
    """The files of one fleet, `outputs/fleets/<name>/`."""

    path: Path

    @property
    def name(self) -> str:
        """The fleet's name."""
        return self.path.name

    @property
    def fleet_json(self) -> Path:
        """Servers: url, argv, pid and process start time, log path."""
        return self.path / "fleet.json"

    @property
    def key(self) -> Path:
        """The API key, mode 0600."""
        return self.path / "key"

    @property
    def lock(self) -> Path:
        """Held by the run that uses the fleet."""
        return self.path / "lock"

    @property
    def logs(self) -> Path:
        """One log a server, mode 0600."""
        return self.path / "logs"
