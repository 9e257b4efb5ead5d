"""Whole rows to read, as escaped HTML: prompt, thought, answer, and how the answer ended."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from IPython.display import HTML

from dfexp.report.data import RunData
from dfexp.tables import FONT, text


def examples(data: RunData) -> HTML:
    """The drawn rows to read: prompt, thought, answer, and how the answer ended. Everything is escaped."""
    page = "".join(map(_example, data.examples)) or "none yet"
    return HTML(f'<div style="{FONT};max-width:960px">{page}</div>')


def _example(row: Mapping[str, Any]) -> str:
    thought, answer = split_thought(row["text"])
    said = [(message["role"], message.get("content")) for message in row["messages"]]
    said += [("thought", thought), ("answer", answer)] if thought else [("answer", answer)]
    tokens = f"{text(row['prompt_tokens'])} + {text(row['completion_tokens'])} tokens"
    ended = {"stop": "ended by itself", "length": "cut for length"}.get(row["finish_reason"], str(row["finish_reason"]))
    facts = " · ".join((tokens, ended, f"{row['latency_s']:.1f} s", row["server"], *row["flags"]))
    return (
        "<div style='border:1px solid rgba(128,128,128,.35);border-radius:6px;margin:0 0 12px;padding:8px 12px'>"
        "<div style='display:flex;flex-wrap:wrap;justify-content:space-between;gap:12px;margin-bottom:4px'>"
        f"<span><b>{html.escape(str(row['id']))}</b> <span style='opacity:.7'>index {row['index']}</span></span>"
        f"<span style='opacity:.7'>{html.escape(facts)}</span></div>"
        f"{''.join(_said(role, words) for role, words in said)}</div>"
    )


def _said(role: str, words: Any) -> str:
    tint = {"answer": "rgba(0,114,178,.10)", "thought": "rgba(204,121,167,.12)"}.get(role, "rgba(128,128,128,.09)")
    if isinstance(words, list):  # content in parts
        words = "\n".join(str(part.get("text", part)) for part in words)
    return (
        f"<div style='background:{tint};border-radius:4px;padding:5px 9px;margin-top:5px'>"
        f"<div style='font-size:11px;opacity:.7'>{html.escape(role)}</div>"
        "<div style='white-space:pre-wrap;overflow-wrap:anywhere;max-height:16em;overflow-y:auto'>"
        f"{html.escape(words or '') or '<i>empty</i>'}</div></div>"
    )


def split_thought(raw: str) -> tuple[str, str]:
    """The thought and the answer of a raw generation. A thought that never ends is all thought."""
    head, ended, rest = raw.partition("</think>")
    if ended or raw.lstrip().startswith("<think>"):
        return head.strip().removeprefix("<think>").strip(), rest.strip()
    return "", raw.strip()
