"""Why an SGLang server did not start, out of its own log, and what to change in the parameter file. Pure."""

import functools
import re
import textwrap
from importlib.resources import files
from typing import Any

import yaml

from dfexp.capacity.startup_log import read_startup
from dfexp.params_errors import hide_secrets

_MEMORY = (
    (r"Tried to allocate ([\d.]+ \w+)", "wanted"),
    (r"of which ([\d.]+ \w+) is free", "free"),
    (r"Process \d+ has ([\d.]+ \w+)", "held by another process"),
)
_NOISE = re.compile(r"server_args=|launch_command|Ignore import error|KV pool holds")
_ERROR = re.compile(r"^(?:\[[^\]]*\] ?)?((?:[\w.]*(?:Error|Exception|OutOfResources)|SystemExit)(?::.*)?)$")
_CONSEQUENCE = re.compile(r"EOFError|BrokenPipe|died during init|error messages above|Cancelled|NCCL error|by peer")
# What only a server writes that goes on, or fails right behind it; what one that ends; and where an end can begin.
_ALIVE = re.compile(r"\[[\d-]+ \d\d:[^\]]*\] (?!.*(?:rror|xception(?!: T)|xit code|SIG|sigquit|kill_|terminated|dead))")
_ENDS = re.compile(r"hit an exception: |to bind on address|Fatal Python error|SIGTERM received|sigquit from a")
_BEGINS = re.compile(
    r"Traceback \(most|Killed|Bus error|: error: |xit code:? -|terminated with -|Watchdog caught|terminate called"
    rf"|: No module|{_ENDS.pattern}|{_ERROR.pattern}"
)
_QUOTED_SECRET = re.compile(r"((?:key|token|secret|password)['\"]?\s*[=:]\s*)(['\"]).*?\2", re.IGNORECASE)


def diagnose(log_text: str) -> str:
    """Cause and fix of a failed start, in one to three sentences without secrets.

    Args: log_text, what the server printed since it was started, whole or without its middle.
    """
    # Of long lines and long failures the beginning and the end are read, so that no log takes more than seconds.
    lines = [line[:600] + line[600:][-600:] for line in log_text.split("\n") if not _NOISE.search(line)]
    end = lines[_failure(lines) :]
    end = end[:2000] + end[2000:][-2000:]
    errors = [index for index, line in enumerate(end) if _ERROR.match(line) and not _CONSEQUENCE.search(line)]
    first = errors[-1] if errors else 0
    # The error that ended the server says more than what was written on the way there.
    looks = [("causes", end[first:])] * bool(first)
    looks += [("causes", end), ("unknown" if errors else "endings", end[first:])]
    told = (_told(log_text, "\n".join(lines), "\n".join(part), kind) for kind, part in looks)
    return hide_secrets(_QUOTED_SECRET.sub(r"\1(hidden)", next(filter(None, told), _table()["silent"])))


def _failure(lines: list[str]) -> int:
    """Index of the line where the failure begins that ended the server: behind the last sign that it went on."""
    last = next((index for index, line in enumerate(lines, 1) if _ENDS.search(line)), len(lines))
    alive = next((index for index in range(last, 0, -1) if _ALIVE.match(lines[index - 1])), 0)
    return next((index for index in range(alive, len(lines)) if _BEGINS.search(lines[index])), alive)


def _told(log_text: str, whole: str, part: str, kind: str) -> str | None:
    """Words of the first cause of a kind that is seen in this part of the log; None where there is none."""
    for cause in _table()[kind]:
        seen = re.search(cause["seen"], part, re.MULTILINE)
        if seen and (clue := re.search(cause.get("clue", ""), whole, re.MULTILINE)):
            match = clue if clue.group() else seen
            quoted = textwrap.shorten(next(filter(None, match.groups()), match.group()), 300).rstrip(". ")
            return str(cause["say"].format(quoted, **match.groupdict(), **_memory(log_text, part), **_table()["words"]))
    return None


@functools.cache
def _table() -> dict[str, Any]:
    return dict(yaml.safe_load(files("dfexp.engines").joinpath("sglang_causes.yaml").read_text(encoding="utf-8")))


def _memory(log_text: str, part: str) -> dict[str, str]:
    """What the log says of memory, and the fraction that the weights alone take."""
    startup = read_startup([line for line in log_text.split("\n") if re.search("Load weight|server_args=", line)][:500])
    before, after = startup.get("load_begin_gib"), startup.get("load_end_gib")
    parts = [f"{found.group(1)} {words}" for pattern, words in _MEMORY if (found := re.search(pattern, part))]
    parts += [
        f"{gib} GiB free {when} loading" for gib, when in ((before, "before"), (after, "after")) if gib is not None
    ]
    fraction = startup.server_args.get("mem_fraction_static")
    parts += [f"mem_fraction_static {fraction}"] if fraction is not None else []
    least = f" above {1 - after / before:.2f}" if before and after is not None else ""
    return {"memory": f" ({', '.join(parts)})" if parts else "", "least": least}
