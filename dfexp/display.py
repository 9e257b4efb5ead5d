"""What a person watches: the servers of a fleet, and a run in one display whose interrupts become stops."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from IPython.display import DisplayHandle

from dfexp import control, livepage, prompts
from dfexp.errors import ControlError, RunError, RunStopped
from dfexp.fleet import Fleet, ServerStatus
from dfexp.fleet.record import flat
from dfexp.jsonl import read_json
from dfexp.layout import RunFolder
from dfexp.preflight import Check
from dfexp.records import SIMULATED, Answer, ServerLimits
from dfexp.tables import Table, duration, labelled, text


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect interrupts for `watch` instead of raising KeyboardInterrupt at whatever line is running.

    Enter it before the run is started: an interrupt that comes while it starts is then passed on as well. The third
    raises after all, so that nobody is locked in.
    """
    seen: list[int] = []

    def count(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) > 2:
            raise KeyboardInterrupt("the run goes on stopping. Run the cell again to watch.")

    before = signal.signal(signal.SIGINT, count)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def watch(folder: RunFolder, seen: Sequence[int], *, interval_s: float = 1.0) -> dict[str, Any]:
    """Show a run until its process ends, and return its final status.

    One display, updated in place every `interval_s` seconds. Of the interrupts in `seen` the first asks the run to
    stop, and the display goes on until everything in flight is written; the second tells it not to wait for answers.
    Raises RunStopped when the run was stopped, by whomever, and RunError when it failed or its process was killed.
    """
    handle, passed_on = DisplayHandle(), 0
    handle.display(livepage.bundle(None), raw=True)
    while True:
        running = control.living_process(folder) is not None  # asked first: a process writes its end, then goes
        status = control.read_status(folder)
        handle.update(livepage.bundle(status), raw=True)
        if not running or (status is not None and status["state"] in control.FINAL_STATES):
            return _conclude(folder, status)
        for verb in (control.STOP, control.STOP_NOW)[passed_on : len(seen)]:
            with suppress(ControlError):  # it has just ended, which the next look shows
                control.send(folder, verb, reason="the notebook was interrupted")
                _tell_the_terminal(folder)
            passed_on += 1
        control.wait_until(lambda known=passed_on: len(seen) > known, interval_s, step_s=0.1)  # type: ignore[misc]


def _tell_the_terminal(folder: RunFolder) -> None:
    """How to go on, at once: papermill gives a kernel that was interrupted a few seconds, and a drain takes minutes."""
    words = f"run {folder.name!r} drains and stops; what is done is on disk. Look in: dfexp status {folder.name}."
    words += f" To go on: `dfexp resume {folder.name}`, once it has stopped."
    with suppress(OSError):  # a stderr that is no file; a kernel's has the one that it began with
        os.write(sys.stderr.fileno(), f"\ndfexp: {words}\n".encode())


def _conclude(folder: RunFolder, status: dict[str, Any] | None) -> dict[str, Any]:
    """The status of a run that ended, or the error of one that ended otherwise; its process is gone."""
    resume = f"To go on: `dfexp resume {folder.name}`, or in a notebook the cell again. For a report of what is there:"
    resume += f" `dfexp report {folder.name}`. Its log is {folder.log}."
    if status is None or status["state"] not in control.FINAL_STATES:
        where = livepage.counts(status) if status else "nothing reported yet"
        raise RunError(
            f"the process of run {folder.name!r} is gone without having stopped, killed from outside or on a full disk"
            f" ({where} when it last reported). Everything reported done is on disk. {resume}"
        )
    left = status["asked"] - status["done"] - status["failed"]
    counts = f"{livepage.counts(status)}; {left:,} left; what is done is on disk"
    if status["state"] == "stopped":
        raise RunStopped(f"run {folder.name!r} was stopped ({status['reason'] or 'unsaid'}): {counts}. {resume}")
    if status["state"] == "failed":
        raise RunError(f"run {folder.name!r} failed: {status['reason']} ({counts}). {resume}")
    return status


def prompts_read(folder: RunFolder) -> str:
    """What a run's prompts are and what was left out of them, once they are frozen."""
    known = folder.prompts_report.exists()  # not of a run that an older version began, or that was restored
    return prompts.render(read_json(folder.prompts_report)) if known else "of the prompts there is no report"


def conclusion(status: Mapping[str, Any], fleet_name: str) -> str:
    """What a run that ended came to, and how to stop its fleet, as Markdown."""
    earlier = f", {status['done_before']:,} of them before the last start" if status["done_before"] else ""
    failed = f"**{status['failed']:,} failed** and 04_report says why" if status["failed"] else "none failed"
    short = status.get("not_uploaded") or 0
    left = f"\n\n**{short:,} object(s) are not on S3**: run this cell again, or `dfexp store upload`." * bool(short)
    real = " of real time, not of the simulation's" if status.get("engine") == SIMULATED else ""
    return (
        f"**{status['done']:,} of {status['asked']:,} rows are done**{earlier}; {failed}. Since the last start it made"
        f" {status['done'] - status['done_before']:,} rows in {duration(status['at'] - status['started_at'])}{real}."
        f"{left}\n\nThe servers go on: `dfexp fleet down {fleet_name}` stops them (`dfexp run` does so by itself)."
    )


def servers(fleet: Fleet, statuses: Sequence[ServerStatus]) -> Table:
    """The servers of a fleet: where they are and how they are."""
    logs = {server.name: server.log for server in fleet.servers}
    rows = [
        {
            "server": status.name, "state": status.state, "detail": status.detail or "-", "url": status.url,
            "pid": str(status.pid or "-"), "log": logs.get(status.name) or "-",
        }
        for status in statuses
    ]  # fmt: skip
    return Table(name="servers", title=labelled(f"Fleet {fleet.name}", fleet.engine.name), rows=rows)


def checks(found: Sequence[Check]) -> Table | None:
    """What was checked before servers start; None for a fleet that runs already."""
    rows = [{"check": one.name, "": one.state, "found": one.found, "fix": one.fix or "-"} for one in found]
    return Table(name="checks", title="Checks before the start", rows=rows) if rows else None


def settings(fleet: Fleet) -> Table:
    """What the servers were asked for; what they made of it is in `limits`."""
    rows = [{"parameter": key, "value": str(value)} for key, value in flat(fleet.group).items() if value is not None]
    return Table(name="settings", title="Asked for", rows=rows)


def fleet_conclusion(fleet: Fleet, statuses: Sequence[ServerStatus], launched: bool) -> str:
    """How many servers serve, and how to stop them, as Markdown."""
    ready = sum(status.state == "ready" for status in statuses)
    how = "launched now" if launched else "already running, attached to"
    what = labelled("servers", fleet.engine.name)
    return (
        f"**{ready} of {len(statuses)} {what} are ready** ({how}). The fleet outlives this notebook: stop it with"
        f" `dfexp fleet down {fleet.name}`; `dfexp run` stops by itself the fleet that it started."
    )


def limits(statuses: Sequence[ServerStatus]) -> Table:
    """What each server says of its room, and the memory that this implies."""
    rows = []
    for status in statuses:
        said = status.limits or ServerLimits()
        parts = [f"{part} {count / 2**20:,.0f}" for part, count in (said.state_bytes or {}).items()]
        rows.append({
            "server": status.name, "engine": said.engine_version or "-", "model": said.model or "-",
            "requests at once": said.max_running_requests, "tokens per request": said.context_length,
            "tokens, all requests": said.max_total_num_tokens, "state slots": said.max_mamba_cache_size,
            "memory implied (MiB)": " + ".join(parts) or "-",
            "RAM now (MiB)": None if status.rss_bytes is None else round(status.rss_bytes / 2**20),
        })  # fmt: skip
    note = "requests at once: decoded together, the rest waits. tokens per request: prompt and answer. tokens, all"
    note += " requests: the KV pool. state slots: of a hybrid model, several for each request. memory implied: computed"
    note += " from model and limits. RAM now: measured, with shared pages. A dash is what the engine does not say."
    return Table(name="limits", title="What each server says of its room", rows=rows, note=note)


def room_conclusion(answer: Answer, statuses: Sequence[ServerStatus]) -> str:
    """What one measured request says of the fleet, as Markdown."""
    if not answer.completion_tokens:
        return "The server did not count the tokens of the probe, so there is no estimate."
    alone = answer.completion_tokens / answer.latency_s
    measured = f"**One request alone: {text(alone)} completion tokens/s** ({answer.completion_tokens:,} tokens in"
    measured += f" {answer.latency_s:.1f} s, prompt and HTTP included)."
    slots = [status.limits.max_running_requests for status in statuses if status.limits]
    if None in slots:
        return measured
    together = sum(slot or 0 for slot in slots)
    return (
        f"**What limits the number of requests: the servers' request caps, {together:,} at once.**\n\n"
        f"{measured} **{together:,} at once** would make {text(alone * together)}"
        " tokens/s: a bound that no fleet reaches, because requests share the processor and the memory's bandwidth."
        " 04_report has the rate that a run had."
    )
