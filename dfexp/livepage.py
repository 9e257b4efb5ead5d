"""A run as it goes, as a line and as a page: plain HTML and SVG, everything escaped, nothing that grows with time."""

import html as escaping
import math
from collections.abc import Mapping
from typing import Any

from dfexp.records import SIMULATED
from dfexp.rollout import FINAL
from dfexp.tables import FONT, duration, labelled, rows_html, text

_COLORS = {"ended": "#009E73", "failed": "#D55E00", "stopped": "#E69F00"}
_BLUE = "#0072B2"
_SEVERITIES = {"fault": ("#D55E00", "&#9650;"), "limit": (_BLUE, "&#9679;"), "note": ("#7F7F7F", "&#9675;")}
_WIDTH, _HEIGHT = 240, 38
_MOST_WORDS, _MOST_SILENT_S = 110, 15.0
_MOST_TO_UPLOAD = 8  # that are on their way where all is well; more wait for S3
_GAUGES = ("num_running_reqs", "num_queue_reqs", "full_token_usage", "mamba_usage")


def counts(status: Mapping[str, Any]) -> str:
    """Done and failed rows, in words."""
    return f"{status['done']:,} of {status['asked']:,} done, {status['failed']:,} failed"


def line(status: Mapping[str, Any] | None) -> str:
    """The progress of a run in one short line."""
    if status is None:
        return "waiting for the run's first report"
    parts, is_running = [f"{_state(status)}: {counts(status)}"], status["state"] == "running"
    if is_running or status["state"] == "draining":
        parts.append(f"{status['in_flight']:,} in flight")
        decoded = status["server_tok_per_s"]
        rate, source = (status["client_tok_per_s"], "client") if decoded is None else (decoded, "servers")
        parts.append(f"{text(rate)} tok/s ({source}, last {duration(status['window_s'])})")
    if (status.get("not_uploaded") or 0) > {"running": _MOST_TO_UPLOAD, "draining": 0}.get(status["state"], math.inf):
        parts.append(f"{status['not_uploaded']:,} object(s) to upload")
    away = [server for server in status["servers"] if server["state"] in ("down", "suspect", "quarantined")]
    if away and is_running:
        parts.append(f"{len(away)} of {len(status['servers'])} servers away ({away[0]['name']}: {away[0]['state']})")
    parts += filter(None, (_disk(status),))
    if is_running and status["eta_s"] is not None:
        low, high = duration(status["eta_low_s"]), duration(status["eta_high_s"])
        parts.append(f"about {duration(status['eta_s'])}{_time(status)} left{_of_start(status)} ({low} to {high})")
        if status.get("rows_of_later_starts") and status["whole_eta_s"] is not None:
            parts.append(f"of all rows {duration(status['whole_eta_s'])}")
    if (rollout := status.get("rollout")) and rollout["state"] not in FINAL:
        parts.append(str(rollout["text"]))
    if is_running and status["findings"]:
        first = status["findings"][0]
        words = ": ".join(filter(None, (first["kind"], first["change"], first["evidence"])))
        parts.append(words if len(words) <= _MOST_WORDS else words[: _MOST_WORDS - 3] + "...")
    if status["state"] in ("stopped", "failed") and status["reason"]:
        parts.append(str(status["reason"]))
    return ", ".join(parts)


def bundle(status: Mapping[str, Any] | None) -> dict[str, str]:
    """Both, as a display takes them."""
    return {"text/plain": line(status), "text/html": html(status)}


def html(status: Mapping[str, Any] | None) -> str:
    """The progress of a run: bar, rates, time left, what limits it, servers, failures."""
    if status is None:
        return f'<div style="{FONT}">Waiting for the run\'s first report.</div>'
    parts = [_bar(status), _facts(status)]
    parts += [_finding(each) for each in status["findings"] if status["state"] == "running"]
    rollout = status.get("rollout") or {}
    for said in filter(None, (status.get("reason"), _disk(status), rollout.get("text"))):
        parts.append(f"<div style='margin-top:6px'>{escaping.escape(str(said))}</div>")
    if status["servers"]:
        window = f"tok/s: last {duration(status['window_s'])}{_time(status)}"
        note = f"{window}, decoded as the server counts, or of whole answers as the client does; answers, errors,"
        note += " restarts: since the start"
        is_new = status["window_s"] >= status["elapsed_s"]
        servers = rows_html([_server(server, is_new) for server in status["servers"]])
        parts.append(f"<div style='margin-top:10px'>{servers}<div style='opacity:.7;font-size:12px'>{note}</div></div>")
    for title, kinds in (("Failed", status["failures_by_kind"]), ("Flags", status["flags"])):
        if kinds:
            shown = ", ".join(f"{escaping.escape(str(kind))} {count:,}" for kind, count in kinds.items())
            parts.append(f"<div style='margin-top:6px'><b>{title}:</b> {shown}</div>")
    return f'<div style="{FONT};max-width:960px">{"".join(parts)}</div>'


def _disk(status: Mapping[str, Any]) -> str | None:
    """What is wrong with the run's disk. A full one takes no status either: the last one gets old."""
    is_silent = status["state"] in ("running", "draining") and status.get("silent_s", 0.0) > _MOST_SILENT_S
    silence = f"nothing told for {duration(status['silent_s'])}: is its disk full?" if is_silent else None
    return silence or status.get("disk_refuses")


def _state(status: Mapping[str, Any]) -> str:
    return labelled(status["state"], status.get("engine"))


def _time(status: Mapping[str, Any]) -> str:
    """What to add to seconds that are not real ones."""
    return " of simulated time" if status.get("engine") == SIMULATED else ""


def _of_start(status: Mapping[str, Any]) -> str:
    """Which rows a time left is of, where others are left for later."""
    return f" of this start's {status['rows_of_start']:,} rows" if status.get("rows_of_later_starts") else ""


def _bar(status: Mapping[str, Any]) -> str:
    asked = max(1, int(status["asked"]))
    done, failed = 100 * status["done"] / asked, 100 * status["failed"] / asked
    color = _COLORS.get(status["state"], _BLUE)
    return (
        "<div style='display:flex;justify-content:space-between;margin-bottom:3px'>"
        f"<span><b style='color:{color}'>{escaping.escape(_state(status))}</b> &nbsp; {counts(status)}</span>"
        f"<span>{done:.1f} %</span></div>"
        "<div style='display:flex;height:12px;border-radius:6px;overflow:hidden;background:rgba(128,128,128,.22)'>"
        f"<div style='width:{done:.3f}%;background:{color}'></div>"
        f"<div style='width:{failed:.3f}%;background:#D55E00'></div></div>"
    )


def _facts(status: Mapping[str, Any]) -> str:
    """Rates while there are any, and the time: each with its window and what it counts."""
    window, is_going = f"last {duration(status['window_s'])}", status["state"] in ("running", "draining")
    is_running, mean, clock = status["state"] == "running", status["mean_completion_tokens"], _time(status)
    decoded, low, high = (status["server_tok_per_s"], *map(duration, (status["eta_low_s"], status["eta_high_s"])))
    bounds = mean and f"{text(round(mean['low']))} to {text(round(mean['high']))}, in flight included"
    whole = [duration(status.get(f"whole_eta_{name}s")) for name in ("", "low_", "high_")]
    facts = (
        (is_running, duration(status["eta_s"]), f"left{clock}{_of_start(status)}<br>{low} to {high}"),
        (is_running and status.get("rows_of_later_starts"), whole[0], f"left of all rows<br>{whole[1]} to {whole[2]}"),
        (is_going and decoded is not None, text(decoded), f"tok/s decoded<br>servers, {window}"),
        (is_going, text(float(status["client_tok_per_s"])), f"tok/s of whole answers<br>client, {window}"),
        (is_going, text(float(status["rows_per_s"])), f"completions/s<br>client, {window}"),
        (is_going, text(status["in_flight"]), "requests<br>in flight"),
        (is_going and bool(status.get("not_uploaded")), text(status.get("not_uploaded")), "objects<br>to upload"),
        (mean is not None, text(mean and round(mean["value"])), f"tokens an answer<br>{bounds}"),
        (True, duration(status["elapsed_s"]), f"since the last start<br>{clock}"),
    )
    cells = "".join(
        "<div style='min-width:7em'>"
        f"<div style='font-size:18px;font-weight:600;font-variant-numeric:tabular-nums'>{value}</div>"
        f"<div style='opacity:.7;font-size:12px;line-height:1.3'>{what}</div></div>"
        for is_known, value, what in facts
        if is_known
    )
    return f"<div style='display:flex;flex-wrap:wrap;gap:8px 22px;margin-top:10px'>{cells}{_sparkline(status)}</div>"


def _sparkline(status: Mapping[str, Any]) -> str:
    """Tokens/s since the start as a line over an area, from 0 to the highest."""
    values, step_s = status["history"]["tok_per_s"], status["history"]["step_s"]
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
    points = " ".join(
        f"{place * _WIDTH / (len(values) - 1):.1f},{_HEIGHT - 1 - (_HEIGHT - 3) * value / top:.1f}"
        for place, value in enumerate(values)
    )
    words = f"tok/s, 0 to {text(float(top))}, over {duration(step_s * len(values))}{_time(status)}"
    return (
        f"<div><svg width='{_WIDTH}' height='{_HEIGHT}' role='img' aria-label='{words}'>"
        f"<polygon points='0,{_HEIGHT} {points} {_WIDTH},{_HEIGHT}' fill='{_BLUE}' fill-opacity='.14'/>"
        f"<polyline points='{points}' fill='none' stroke='{_BLUE}' stroke-width='1.5'/></svg>"
        f"<div style='opacity:.7;font-size:12px;line-height:1.3'>{words}</div></div>"
    )


def _finding(finding: Mapping[str, Any]) -> str:
    color, mark = _SEVERITIES.get(finding["severity"], _SEVERITIES["note"])
    kind, evidence = escaping.escape(finding["kind"]), escaping.escape(finding["evidence"])
    gain = f" ({finding['gain'] - 1:+.0%})" if finding.get("gain") else ""
    change = f" <b>{escaping.escape(finding['change'])}</b>{gain}" if finding["change"] else ""
    words = f"<span style='color:{color}'>{mark}</span> <b>{kind}</b> &nbsp;{evidence}{change}"
    return f"<div style='margin-top:8px'>{words}</div>"


def _server(server: Mapping[str, Any], is_new: bool) -> dict[str, Any]:
    """A server's line of the table. Args: is_new, whether the run has just begun."""
    if is_new and server["in_flight"] and not (server["done"] or server["num_running_reqs"]):
        server = {**server, **dict.fromkeys(_GAUGES)}  # of a look at it from before its first request
    decoded, usages = server["server_tok_per_s"], (server["full_token_usage"], server["mamba_usage"])
    running, queue = (_rounded(server[name]) for name in _GAUGES[:2])
    kv, state = (usage if usage is None else round(usage, 2) for usage in usages)
    return {
        "server": server["name"],
        "state": server["state"].replace("_", " "),
        "running / cap": f"{text(running)}/{text(server['cap'])}",
        "queue": queue,
        "KV usage": kv,
        "state usage": state,
        "tok/s": _rounded(server["client_tok_per_s"] if decoded is None else decoded),
        "by": "client" if decoded is None else "server",
        "in flight": f"{server['in_flight']:,}/{server['limit']:,}",
        "answers": server["done"],
        "errors": server["errors"],
        "restarts": server["restarts"],
    }


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)
