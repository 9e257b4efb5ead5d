"""Real and virtual seconds, from a file that another process is writing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from dfexp.errors import CorruptShardError
from dfexp.virtual_time import CLOCK, LiveClock, VirtualTime


def write(path: Path, *pairs: tuple[float, float], torn: str = "") -> Path:
    lines = [json.dumps({"real_at": real_at, "virtual_s": virtual_s}) for real_at, virtual_s in pairs]
    path.write_text("".join(f"{line}\n" for line in lines) + torn)
    return path


def test_time_is_linear_between_two_lines_and_stands_still_outside(tmp_path: Path) -> None:
    clock = VirtualTime.read(write(tmp_path / CLOCK, (100.0, 0.0), (101.0, 50.0), (103.0, 50.0), (104.0, 60.0)))
    real_at = np.array([90.0, 100.0, 100.5, 102.0, 103.5, 200.0])
    assert clock.of(real_at).tolist() == [0.0, 0.0, 25.0, 50.0, 55.0, 60.0]


def test_a_log_counts_virtual_seconds_on_from_the_first_real_time(tmp_path: Path) -> None:
    clock = VirtualTime.read(write(tmp_path / CLOCK, (100.0, 0.0), (101.0, 5000.0)))
    assert clock.of_stamp(4100.0) == 4000.0


@pytest.mark.parametrize("torn", ["", '{"real_at": 109', "\0\0\0"])
def test_the_last_whole_line_is_now(tmp_path: Path, torn: str) -> None:
    path = write(tmp_path / CLOCK, (100.0, 7.25), (101.5, 7.25), torn=torn)
    assert LiveClock(path)() == 7.25
    assert VirtualTime.read(path).virtual_s.tolist() == [7.25, 7.25]


@pytest.mark.parametrize("text", [None, "", '{"real_at": 1'])
def test_a_clock_that_has_not_begun_is_at_zero(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / CLOCK
    if text is not None:
        path.write_text(text)
    assert LiveClock(path)() == 0.0
    assert VirtualTime.read(path).virtual_s.size == 0
    with pytest.raises(ValueError, match="empty"):
        VirtualTime.read(path).of(np.array([1.0]))


def test_a_line_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / CLOCK).write_text("what\n")
    with pytest.raises(CorruptShardError, match=CLOCK):
        VirtualTime.read(tmp_path / CLOCK)


def test_a_live_clock_goes_on_for_a_moment_as_fast_as_it_went(tmp_path: Path) -> None:
    at = time.time()
    clock = LiveClock(write(tmp_path / CLOCK, (at - 103.0, 0.0), (at - 101.0, 10.0), (at - 100.0, 60.0), torn='{"re'))
    assert clock() == pytest.approx(60.0 + 50.0 * 0.05)
    assert clock() == clock()


def test_a_live_clock_never_goes_back_and_follows_its_file(tmp_path: Path) -> None:
    at, path = time.time(), tmp_path / CLOCK
    clock = LiveClock(path)
    assert clock() == 0.0
    write(path, (at - 2.0, 0.0), (at - 1.0, 500.0))
    seen = [clock()]
    while seen[-1] < 500.0:  # it looks anew after a moment
        seen.append(clock())
    write(path, (at - 2.0, 0.0), (at - 1.0, 500.0), (at, 500.0))
    while time.time() < at + 0.2:
        seen.append(clock())
    assert seen == sorted(seen)
    assert seen[-1] == 525.0
