"""Completions and fleets as people read them: pure, and every text that a model or a server made is escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from dfexp.fleet import Fleet, ServerStatus
from dfexp.records import Answer
from dfexp.tables import Table, size, text

_FONT = "font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:13px;line-height:1.5"


class Completions:
    """Whole rows to read: prompt, thought, answer, and how the answer ended. Everything is escaped."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __repr__(self) -> str:
        return f"{len(self._rows)} completion(s)"

    def _repr_html_(self) -> str:
        return f'<div style="{_FONT};max-width:960px">{"".join(map(_completion, self._rows)) or "none yet"}</div>'


def _completion(row: Mapping[str, Any]) -> str:
    thought, answer = split_thought(row["text"])
    said = [(str(message["role"]), _content(message.get("content"))) for message in row["messages"]]
    if thought:
        said.append(("thought", thought))
    said.append(("answer", answer))
    ended = {"stop": "ended by itself", "length": "cut for length"}.get(row["finish_reason"], str(row["finish_reason"]))
    facts = [
        f"{text(row['prompt_tokens'])} + {text(row['completion_tokens'])} tokens",
        ended,
        f"{row['latency_s']:.1f} s",
        row["server"],
        *row["flags"],
    ]
    head = f"<b>{html.escape(str(row['id']))}</b> <span style='opacity:.7'>index {row['index']}</span>"
    return (
        "<div style='border:1px solid rgba(128,128,128,.35);border-radius:6px;margin:0 0 12px;padding:8px 12px'>"
        "<div style='display:flex;flex-wrap:wrap;justify-content:space-between;gap:12px;margin-bottom:4px'>"
        f"<span>{head}</span><span style='opacity:.7'>{html.escape(' · '.join(map(str, facts)))}</span></div>"
        f"{''.join(_said(role, words) for role, words in said)}</div>"
    )


def _said(role: str, words: str) -> str:
    tint = {"answer": "rgba(0,114,178,.10)", "thought": "rgba(204,121,167,.12)"}.get(role, "rgba(128,128,128,.09)")
    return (
        f"<div style='background:{tint};border-radius:4px;padding:5px 9px;margin-top:5px'>"
        f"<div style='font-size:11px;opacity:.7'>{html.escape(role)}</div>"
        "<div style='white-space:pre-wrap;overflow-wrap:anywhere;max-height:16em;overflow-y:auto'>"
        f"{html.escape(words) or '<i>empty</i>'}</div></div>"
    )


def split_thought(raw: str) -> tuple[str, str]:
    """The thought and the answer of a raw generation. A thought that never ends is all thought."""
    start, end = "<think>", "</think>"
    head, found, rest = raw.partition(end)
    if found:
        return head.strip().removeprefix(start).strip(), rest.strip()
    return (raw.strip().removeprefix(start).strip(), "") if raw.lstrip().startswith(start) else ("", raw.strip())


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", part)) if isinstance(part, Mapping) else str(part) for part in content)
    return "" if content is None else str(content)


def servers(fleet: Fleet, statuses: Sequence[ServerStatus]) -> Table:
    """The servers of a fleet: where they are, how they are, what they have room for."""
    logs = {server.name: server.log for server in fleet.servers}
    rows = [
        {
            "server": status.name,
            "state": status.state,
            "url": status.url,
            "pid": "-" if status.pid is None else str(status.pid),
            "requests at once": status.limits.max_running_requests if status.limits else None,
            "context (tokens)": status.limits.context_length if status.limits else None,
            "memory now": size(status.rss_bytes),
            "log": logs.get(status.name) or "-",
        }
        for status in statuses
    ]
    note = "As each server says itself; memory is what its processes hold in RAM now."
    return Table(name="servers", title=f"Fleet {fleet.name}", rows=rows, note=note)


def fleet_conclusion(fleet: Fleet, statuses: Sequence[ServerStatus], launched: bool) -> str:
    """How many servers serve, and how to stop them, as Markdown."""
    ready = [status for status in statuses if status.state == "ready"]
    others = "".join(
        f"\n- {status.name} is {status.state}: {status.detail}" for status in statuses if status not in ready
    )
    how = "launched now" if launched else "already running, attached to"
    return (
        f"**{len(ready)} of {len(statuses)} servers are ready** ({how}; fleet `{fleet.name}`).{others}"
        "\n\nThe fleet outlives this notebook. Stop it with `dfexp fleet down " + fleet.name + "`; `dfexp run` stops"
        " by itself the fleet that it started."
    )


def limits(statuses: Sequence[ServerStatus]) -> Table:
    """What each server says of its room, in requests and tokens."""
    rows = [
        {
            "server": status.name,
            "model": status.limits.model,
            "engine version": status.limits.engine_version,
            "requests at once": status.limits.max_running_requests,
            "tokens per request": status.limits.context_length,
            "tokens, all requests": status.limits.max_total_num_tokens,
        }
        for status in statuses
        if status.limits is not None
    ]
    note = (
        "requests at once: decoded together, the rest waits in the server. tokens per request: prompt and answer"
        " together. tokens, all requests: the KV pool. A dash is a number that the engine does not say."
    )
    return Table(name="limits", title="Limits", rows=rows, note=note)


def memory(statuses: Sequence[ServerStatus]) -> Table:
    """The memory that the limits imply, by part, beside what the process holds now."""
    rows = []
    for status in statuses:
        parts = dict(status.limits.state_bytes or {}) if status.limits is not None else {}
        if status.limits is not None:
            named = {f"{part} (implied)": size(count) for part, count in parts.items()}
            total = size(sum(parts.values())) if parts else "-"
            rows.append({"server": status.name, **named, "sum (implied)": total, "in RAM now": size(status.rss_bytes)})
    note = "implied: computed from the model and the limits. in RAM now: measured, shared pages included."
    return Table(name="memory", title="Memory that the limits imply", rows=rows, note=note)


def room(statuses: Sequence[ServerStatus]) -> str:
    """What the fleet can hold together, as Markdown."""
    known = [status.limits for status in statuses if status.limits is not None]
    slots = [limit.max_running_requests for limit in known]
    contexts = [limit.context_length for limit in known if limit.context_length is not None]
    said = [slot for slot in slots if slot is not None]
    at_once = (
        f"**{sum(said):,} requests at once**" if len(said) == len(slots) else "an unknown number of requests at once"
    )
    each = (
        f"up to **{min(contexts):,} tokens** of prompt and answer together"
        if contexts
        else "an unknown number of tokens"
    )
    return f"{len(known)} servers decode {at_once}. Each request may use {each}; an answer gets what its prompt leaves."


def first_estimate(answer: Answer, statuses: Sequence[ServerStatus]) -> str:
    """What one measured request says about the fleet, as Markdown."""
    tokens = answer.completion_tokens
    if not tokens:
        return "The server did not count the tokens of the probe, so there is no estimate."
    alone = tokens / answer.latency_s
    slots = [status.limits.max_running_requests for status in statuses if status.limits is not None]
    bound = sum(slot for slot in slots if slot is not None)
    most = f" {bound:,} such requests at once would make {text(alone * bound)} completion tokens/s" if bound else ""
    return (
        f"**Probe:** one request alone, {tokens:,} completion tokens in {answer.latency_s:.1f} s:"
        f" **{text(alone)} completion tokens/s**, prompt and HTTP included.{most}{'.' if most else ''}"
        " That is a bound that no fleet reaches, because requests share the processor and the memory's bandwidth:"
        " 04_report has the rate that a run had."
    )
