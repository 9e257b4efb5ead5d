"""What a person watches: one display of a run that updates in place, and readable completions.

`line` and `html` are pure; `watch` is the only thing here that waits.
"""

from __future__ import annotations

import contextlib
import html as escaping
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Self

from IPython.display import display as ipython_display

from dfexp import control
from dfexp.errors import ControlError, RunError, RunStopped
from dfexp.layout import RunFolder
from dfexp.tables import duration, rows_html, text

_STEP_S = 0.1
_COLORS = {"ended": "#009E73", "failed": "#D55E00", "stopped": "#E69F00"}
_FONT = "font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:13px;line-height:1.5"


class Interrupts:
    """Counts interrupts while it is entered, instead of raising KeyboardInterrupt at whatever line is running.

    Enter it before the run is started: an interrupt that comes while it starts is then passed on by `watch`. The third
    raises after all, so that nobody is locked in. Only the main thread may set a signal handler; nothing is counted
    elsewhere, where no interrupt arrives either.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._entered = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._seen)
            self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            signal.signal(signal.SIGINT, self._before or signal.SIG_DFL)

    def _seen(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 2:
            raise KeyboardInterrupt(
                "left before the run had stopped; it goes on stopping. Run the cell again to watch."
            )

    def wait(self, seconds: float, known: int) -> None:
        """Wait so long, or until an interrupt beyond the `known` ones comes."""
        end = time.monotonic() + seconds
        while self.count <= known and time.monotonic() < end:
            time.sleep(_STEP_S)


def watch(folder: RunFolder, interrupts: Interrupts | None = None, *, interval_s: float = 1.0) -> dict[str, Any]:
    """Show a run until its process ends, and return its final status.

    One display, updated in place at most every `interval_s` seconds. An interrupt asks the run to stop and goes on
    showing until everything in flight is written; a second one tells it not to wait for answers; a third leaves.
    `interrupts`, if entered already, also passes on those that came before.
    Raises RunStopped when the run was stopped, by whomever, and RunError when it failed or its process was killed.
    """
    view = _View()
    with contextlib.nullcontext(interrupts) if interrupts is not None else Interrupts() as interrupts:
        passed_on = 0
        while True:
            running = control.living_process(folder) is not None  # asked first: a process writes its end, then goes
            status = control.read_status(folder)
            view.show(status)
            if status is not None and status["state"] in control.FINAL_STATES:
                return _conclude(folder, status)
            if not running:
                raise RunError(_lost(folder, status))
            passed_on = _pass_on(folder, interrupts.count, passed_on)
            interrupts.wait(interval_s, passed_on)


_show: Callable[..., Any] = ipython_display


class _View:
    """One display with an id, so that an executed notebook stores it once."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown: Mapping[str, str] = {}

    def show(self, status: Mapping[str, Any] | None) -> None:
        """Show a status; one that looks as before costs nothing."""
        bundle = {"text/plain": line(status), "text/html": html(status)}
        if bundle == self._shown:
            return
        if self._handle is None:
            self._handle = _show(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
        self._shown = bundle


def _pass_on(folder: RunFolder, interrupts: int, passed_on: int) -> int:
    """Tell the run of interrupts that it does not know of yet; returns how many it knows of then."""
    while passed_on < interrupts:
        try:
            control.send(folder, control.STOP_NOW if passed_on else control.STOP, reason="the notebook was interrupted")
        except ControlError:  # it has just ended, which the next look shows
            return interrupts
        passed_on += 1
    return passed_on


def _conclude(folder: RunFolder, status: dict[str, Any]) -> dict[str, Any]:
    if status["state"] == "ended":
        return status
    counts = f"{_counts(status)}; {status['asked'] - status['done'] - status['failed']:,} left"
    if status["state"] == "stopped":
        why = f" ({status['reason']})" if status.get("reason") else ""
        raise RunStopped(
            f"run {folder.name!r} was stopped{why}: {counts}. Everything done is on disk."
            " Run this cell again to resume."
        )
    raise RunError(
        f"run {folder.name!r} failed: {status.get('reason')} ({counts}; all of it on disk)."
        f" Its log is {folder.log}. Run this cell again to resume."
    )


def _lost(folder: RunFolder, status: Mapping[str, Any] | None) -> str:
    where = _counts(status) if status else "nothing reported yet"
    pid = f"process {status['pid']} of run" if status else "the process of run"
    return (
        f"{pid} {folder.name!r} is gone without having stopped, killed from outside ({where} when it last reported)."
        f" Everything reported done is on disk. Run this cell again to resume; its log is {folder.log}."
    )


def _counts(status: Mapping[str, Any]) -> str:
    return f"{status['done']:,} of {status['asked']:,} done, {status['failed']:,} failed"


def line(status: Mapping[str, Any] | None) -> str:
    """The progress of a run in one short line."""
    if status is None:
        return "waiting for the run's first report"
    parts = [f"{status['state']}: {_counts(status)}"]
    if status["state"] in ("running", "draining"):
        parts.append(f"{status['in_flight']:,} in flight")
        parts.append(f"{text(float(status['tok_per_s']))} completion tok/s (client, last {status['window_s']:.0f} s)")
    if status["state"] == "running" and status.get("eta_s") is not None:
        parts.append(f"about {duration(status['eta_s'])} left")
    if status["state"] in ("stopped", "failed") and status.get("reason"):
        parts.append(str(status["reason"]))
    return ", ".join(parts)


def html(status: Mapping[str, Any] | None) -> str:
    """The progress of a run: bar, counts, rates with their window, servers, failures. Everything is escaped."""
    if status is None:
        return f'<div style="{_FONT}">Waiting for the run\'s first report.</div>'
    parts = [_bar(status), _facts(status)]
    for said in filter(None, (status.get("reason"), status.get("disk_refuses"))):
        parts.append(f"<div style='margin-top:6px'>{escaping.escape(str(said))}</div>")
    if status.get("servers"):
        servers = rows_html([_server(server) for server in status["servers"]])
        note = f"answers, errors, restarts: this session; tokens/s: completion tokens, last {status['window_s']:.0f} s"
        parts.append(f"<div style='margin-top:10px'>{servers}<div style='opacity:.7;font-size:12px'>{note}</div></div>")
    for title, counts in (("Failed", status.get("failures_by_kind")), ("Flags", status.get("flags"))):
        if counts:
            shown = ", ".join(f"{escaping.escape(str(kind))} {count:,}" for kind, count in counts.items())
            parts.append(f"<div style='margin-top:6px'><b>{title}:</b> {shown}</div>")
    return f'<div style="{_FONT};max-width:960px">{"".join(parts)}</div>'


def _bar(status: Mapping[str, Any]) -> str:
    asked = max(1, int(status["asked"]))
    done, failed = 100 * status["done"] / asked, 100 * status["failed"] / asked
    color = _COLORS.get(status["state"], "#0072B2")
    return (
        "<div style='display:flex;justify-content:space-between;margin-bottom:3px'>"
        f"<span><b style='color:{color}'>{escaping.escape(status['state'])}</b> &nbsp; {_counts(status)}</span>"
        f"<span>{done:.1f} %</span></div>"
        "<div style='display:flex;height:12px;border-radius:6px;overflow:hidden;background:rgba(128,128,128,.22)'>"
        f"<div style='width:{done:.3f}%;background:{color}'></div>"
        f"<div style='width:{failed:.3f}%;background:#D55E00'></div></div>"
    )


def _facts(status: Mapping[str, Any]) -> str:
    """Rates while there are any, and the time: each with its window and what it counts."""
    facts = []
    if status["state"] in ("running", "draining"):
        window = f"last {status['window_s']:.0f} s"
        facts = [
            (text(float(status["tok_per_s"])), f"completion tokens/s<br>client, {window}"),
            (text(float(status["rows_per_s"])), f"completions/s<br>client, {window}"),
            (text(int(status["in_flight"])), "requests<br>in flight"),
        ]
        if status["state"] == "running":
            facts.append((duration(status.get("eta_s")), "left, at the rate<br>since the start"))
    if status.get("mean_completion_tokens") is not None:
        facts.append((text(float(status["mean_completion_tokens"])), "completion tokens<br>mean, finished rows"))
    facts.append((duration(status["at"] - status["started_at"]), "since this<br>session began"))
    cells = "".join(
        "<div style='min-width:8em'>"
        f"<div style='font-size:18px;font-weight:600;font-variant-numeric:tabular-nums'>{value}</div>"
        f"<div style='opacity:.7;font-size:12px;line-height:1.3'>{what}</div></div>"
        for value, what in facts
    )
    return f"<div style='display:flex;flex-wrap:wrap;gap:8px 22px;margin-top:10px'>{cells}</div>"


def _server(server: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "server": server["name"],
        "state": str(server["state"]).replace("_", " "),
        "in flight": server["in_flight"],
        "most in flight": server["limit"],
        "requests at once": server["cap"],
        "answers": server["done"],
        "errors": server["errors"],
        "restarts": server["restarts"],
        "tokens/s": server["tok_per_s"],
    }


def conclusion(status: Mapping[str, Any], fleet_name: str) -> str:
    """What a run that ended came to, and how to stop its fleet, as Markdown."""
    own = status["done"] - status["done_before"]
    took = duration(status["at"] - status["started_at"])
    earlier = f", {status['done_before']:,} of them in earlier sessions" if status["done_before"] else ""
    failed = f"**{status['failed']:,} failed** and 04_report says why" if status["failed"] else "none failed"
    return (
        f"**{status['done']:,} of {status['asked']:,} rows are done**{earlier}; {failed}."
        f" This session made {own:,} rows in {took}."
        f"\n\nThe servers go on running: `dfexp fleet down {fleet_name}` stops them (`dfexp run` does so by itself)."
    )
