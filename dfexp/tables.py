"""Small tables for people: plain values under a title, as escaped HTML, and numbers as people read them."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dfexp.records import SIMULATED

FONT = "font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:13px;line-height:1.45"
_CELL = (
    "padding:4px 9px 4px 0;vertical-align:top;white-space:normal;max-width:34em;"
    "border-bottom:1px solid rgba(128,128,128,.25)"
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Table:
    """Rows under a title; `note` says what they measure and over which window; `name` is that of its files.

    Each row maps columns, which name their units, to plain values; the first row has all columns.
    """

    name: str
    title: str
    rows: Sequence[Mapping[str, Any]]
    note: str = ""

    def _repr_html_(self) -> str:
        head = f"<div style='font-weight:600;font-size:15px'>{html.escape(self.title)}</div>"
        note = f"<div style='opacity:.7;margin:2px 0 6px;max-width:60em'>{html.escape(self.note)}</div>"
        body = rows_html(self.rows) if self.rows else "<div style='opacity:.7'>none</div>"
        return f'<div style="{FONT};margin:6px 0 14px">{head}{note if self.note else ""}{body}</div>'


def labelled(words: str, engine: str | None) -> str:
    """The words for a run or a fleet of this engine, which say so where its servers are simulated."""
    return f"{words} ({SIMULATED})" if engine == SIMULATED else words


def rows_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """An HTML table of plain values, escaped; numbers are aligned to the right."""
    words = {column: sum(isinstance(row.get(column), str) for row in rows) for column in rows[0]}
    align = {column: "left" if words[column] > len(rows) / 4 else "right" for column in rows[0]}
    head = "".join(_cell("th", column, side, "font-weight:600") for column, side in align.items())
    lines = [head, *("".join(_cell("td", row.get(column), side) for column, side in align.items()) for row in rows)]
    body = "".join(f"<tr style='background:none'>{line}</tr>" for line in lines)
    return f"<table style='border-collapse:collapse;margin:0;font-variant-numeric:tabular-nums'>{body}</table>"


def _cell(tag: str, value: Any, align: str, style: str = "") -> str:
    shown = text(value)
    wrap = "overflow-wrap:anywhere;min-width:14em" if len(shown) > 40 else ""
    return f"<{tag} style='{_CELL};text-align:{align};{style}{wrap}'>{html.escape(shown)}</{tag}>"


def text(value: Any) -> str:
    """A value as people read it: thousands grouped, floats to what matters, `-` for what is not known."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return str(value)


def duration(seconds: float | None) -> str:
    """Seconds as `45 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`; `-` when not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s:02d} {part}"
    return f"{whole} s"
