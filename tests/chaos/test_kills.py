"""`kill -9` of the generating process, again and again, while simulated servers misbehave and are killed too."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dfexp import control, fleet, generate
from dfexp.fleet import Fleet
from dfexp.generate.start import fleet_folder
from dfexp.layout import RunFolder
from dfexp.params import RunSpec
from tests.chaos.simulated import Ledger, spec_of, start

PROMPTS, LONGEST_S = 600, 20.0
HOW = ("start", "work", "name", "name")
"""A time since the process started, or since it works; or the instant at which a name comes or goes in its folder."""


@contextmanager
def serving(spec: RunSpec, root: Path) -> Iterator[Fleet]:
    """The run's servers, which live through everything that happens to its generating process."""
    the_fleet, _ = fleet.up(spec, root)
    try:
        the_fleet.wait_ready(60.0)
        yield the_fleet
    finally:
        fleet.attach(fleet_folder(spec, root)).down()


def names(folder: RunFolder) -> set[str]:
    """Names in the completions folder now."""
    try:
        return set(os.listdir(folder.completions))
    except FileNotFoundError:
        return set()


def kill_at(process: subprocess.Popen[bytes], folder: RunFolder, draw: random.Random) -> str:
    """Kill at an instant that is drawn, in time or by the names that come and go, unless it ends before that.

    Returns how the instant was drawn; nothing if the process had ended.
    """
    how, after_s, changes = draw.choice(HOW), draw.uniform(0.0, 2.0), draw.randint(1, 8)
    since, delay_s, seen = time.monotonic(), draw.choice([0.0, draw.uniform(0, 0.004)]), names(folder)
    while process.poll() is None and time.monotonic() - since < LONGEST_S:
        if how == "name":
            if (now := names(folder)) != seen:
                seen, changes = now, changes - 1
            if changes == 0:
                time.sleep(delay_s)
                break
        elif how == "work" and (control.read_status(folder) or {}).get("pid") != process.pid:
            since = time.monotonic()  # it has not said yet that it works
        elif time.monotonic() - since >= after_s:
            break
        time.sleep(0.0002 if how == "name" else 0.005)
    process.kill()
    return how if process.wait(30) == -signal.SIGKILL else ""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.full)])
def test_a_run_killed_at_any_instant_loses_doubles_and_tears_nothing(
    tmp_path: Path, kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, hit, number, ended = random.Random(kills), Counter[str](), 0, 0
    while hit.total() < kills:
        number += 1
        spec = spec_of(tmp_path, f"run{number}", PROMPTS, rows_per_shard=draw.choice([3, 7, 50]))
        folder = generate.prepare(spec, tmp_path)
        ledger, is_over = Ledger(folder), False
        with serving(spec, tmp_path) as the_fleet:
            while not is_over:
                process = start(folder, tmp_path)
                how = "" if hit.total() >= kills else kill_at(process, folder, draw)
                is_over = not how
                assert process.wait(120) == (0 if is_over else -signal.SIGKILL), folder.log.read_text()[-2000:]
                hit += Counter([how] * bool(how))
                ledger.check()
                if draw.random() < 0.1:
                    ended += kill_a_server(fleet.attach(the_fleet.folder), draw)
        ledger.check_end(PROMPTS)
        assert ledger.garbage > 0, "the faults were not at work"
    with capsys.disabled():
        print(f"\n{hit.total()} kills in {number} runs of {PROMPTS} rows: {dict(hit)}, and {ended} of servers")


def kill_a_server(the_fleet: Fleet, draw: random.Random) -> bool:
    """`kill -9` of one server's process, if it has one now."""
    server = draw.choice(the_fleet.servers)
    if is_alive := server.process.is_alive():
        os.kill(server.process.pid, signal.SIGKILL)
    return is_alive
