"""Small tables for people and files: one HTML rendering, CSV and JSON, without pandas."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FONT = "font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:13px;line-height:1.45"
_LINE = "border-bottom:1px solid rgba(128,128,128,.25)"
_CELL = f"padding:4px 14px 4px 0;vertical-align:top;white-space:normal;max-width:34em;{_LINE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of plain values under a title; `note` says what they measure and over which window.

    Attributes:
        name: of its files.
        rows: one mapping per row; the keys of the first are the columns, units included.
    """

    name: str
    title: str
    rows: Sequence[Mapping[str, Any]]
    note: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names, in order."""
        return tuple(self.rows[0]) if self.rows else ()

    def to_csv(self) -> str:
        """The raw values, one line per row."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def to_json(self) -> str:
        """Title, note and raw values."""
        rows = [{key: _plain(value) for key, value in row.items()} for row in self.rows]
        return json.dumps({"title": self.title, "note": self.note, "rows": rows}, indent=1, allow_nan=False) + "\n"

    def _repr_html_(self) -> str:
        head = f"<div style='font-weight:600;font-size:15px'>{html.escape(self.title)}</div>"
        note = f"<div style='opacity:.7;margin:2px 0 6px;max-width:60em'>{html.escape(self.note)}</div>"
        body = rows_html(self.rows) if self.rows else "<div style='opacity:.7'>none</div>"
        return f'<div style="{_FONT};margin:6px 0 14px">{head}{note if self.note else ""}{body}</div>'

    def __repr__(self) -> str:
        return f"{self.title}: {len(self.rows)} row(s)"


def rows_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """An HTML table of plain values, escaped; numbers are aligned to the right and grouped by thousands."""
    columns = tuple(rows[0])
    numeric = {column for column in columns if all(_is_number(row.get(column)) for row in rows)}
    align = {column: "right" if column in numeric else "left" for column in columns}
    head = "".join(
        f"<th style='{_CELL};text-align:{align[column]};font-weight:600'>{html.escape(column)}</th>"
        for column in columns
    )
    lines = [[_cell(row.get(column), align[column]) for column in columns] for row in rows]
    body = "".join(f"<tr style='background:none'>{''.join(cells)}</tr>" for cells in lines)
    return (
        f"<table style='border-collapse:collapse;margin:0;font-variant-numeric:tabular-nums'>"
        f"<thead><tr style='background:none'>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cell(value: Any, align: str) -> str:
    shown = text(value)
    wrap = ";overflow-wrap:anywhere;min-width:14em" if len(shown) > 40 else ""
    return f"<td style='{_CELL};text-align:{align}{wrap}'>{html.escape(shown)}</td>"


def text(value: Any) -> str:
    """A value as people read it: thousands grouped, floats to what matters, `-` for what is not known."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return str(value)


def duration(seconds: float | None) -> str:
    """Seconds as `45 s`, `3 min 05 s`, `2 h 07 min`, `3 d 4 h`; `-` when not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: float | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return "-"
    for unit in ("bytes", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _plain(value: Any) -> Any:
    """A value that JSON knows; what is not finite is not known."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
