"""Why an SGLang server did not start, out of its own log, and what to change in the parameter file. Pure."""

from __future__ import annotations

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
_ERROR = re.compile(r"(?:\[[^\]]*\] ?)?((?:[\w.]*(?:Error|Exception)|SystemExit)(?:: .*)?)$")
_CONSEQUENCE = re.compile(r"EOFError|BrokenPipe|died during initialization|see the error messages above|CancelledError")
_QUOTED_SECRET = re.compile(r"((?:key|token|secret|password)['\"]?\s*[=:]\s*)(['\"]).*?\2", re.IGNORECASE)


def diagnose(log_text: str) -> str:
    """Cause and fix of a failed start, in one to three sentences without secrets.

    Args: log_text, what the server printed since it was started, whole or without its middle.
    """
    lines = [line for line in log_text.split("\n") if not _NOISE.search(line)]
    text = "\n".join(lines)
    words, errors = "", [found.group(1) for line in lines if (found := _ERROR.match(line))]
    for cause in _table()["causes"]:
        if match := re.search(cause["seen"], text, re.MULTILINE):
            quoted = textwrap.shorten(next(filter(None, match.groups()), match.group()), 200).rstrip(".")
            words = cause["say"].format(quoted, **match.groupdict(), **_memory(log_text), **_table()["words"])
            break
    else:
        first_hand = [error for error in errors if not _CONSEQUENCE.search(error)]
        words = _table()["unknown" if first_hand else "silent"].format(*(error[:300] for error in first_hand[-1:]))
    return hide_secrets(_QUOTED_SECRET.sub(r"\1(hidden)", words))


@functools.cache
def _table() -> dict[str, Any]:
    return dict(yaml.safe_load(files("dfexp.engines").joinpath("sglang_causes.yaml").read_text(encoding="utf-8")))


def _memory(text: str) -> dict[str, str]:
    """What the log says of memory, and the fraction that the weights alone take."""
    startup = read_startup(text.split("\n"))
    before, after = startup.get("load_begin_gib"), startup.get("load_end_gib")
    parts = [f"{found.group(1)} {words}" for pattern, words in _MEMORY if (found := re.search(pattern, text))]
    parts += [
        f"{gib} GiB free {when} loading" for gib, when in ((before, "before"), (after, "after")) if gib is not None
    ]
    fraction = startup.server_args.get("mem_fraction_static")
    parts += [f"mem_fraction_static {fraction}"] if fraction is not None else []
    least = f" above {1 - after / before:.2f}" if before and after is not None else ""
    return {"memory": f" ({', '.join(parts)})" if parts else "", "least": least}
