"""The figures of a report: one template, colours that colour-blind readers tell apart, every one with its source."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dfexp import report
from dfexp.tables import labelled

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#3B3B3B")
"""After Okabe and Ito; their yellow and black are left out for contrast on white."""

_REASONS = {"stop": ("#0072B2", "ended by itself (stop)"), "length": ("#D55E00", "cut (length)")}
_AXIS = {
    "gridcolor": "#E6E6E6", "zerolinecolor": "#BDBDBD", "linecolor": "#BDBDBD", "ticks": "outside",
    "tickcolor": "#BDBDBD", "separatethousands": True, "rangemode": "tozero", "automargin": True,
    "title": {"standoff": 10, "font": {"size": 13, "color": "#444"}},
}  # fmt: skip
_LAYOUT = {
    "font": {"family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 13, "color": "#222"},
    "title": {
        "x": 0, "xref": "paper", "xanchor": "left", "yref": "container", "y": 0.965, "yanchor": "top",
        "font": {"size": 17}, "subtitle": {"font": {"size": 12.5, "color": "#555"}},
    },
    "colorway": PALETTE, "paper_bgcolor": "white", "plot_bgcolor": "white", "height": 400, "bargap": 0,
    "margin": {"l": 70, "r": 24, "t": 96, "b": 92}, "xaxis": _AXIS, "yaxis": _AXIS, "hovermode": "closest",
    "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"},
}  # fmt: skip


class Chart:
    """A figure that shows itself in JupyterLab and, without a network, in an exported page."""

    def __init__(self, figure: go.Figure) -> None:
        self.figure = figure

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        config = {"displaylogo": False, "responsive": True}
        return {
            "application/vnd.plotly.v1+json": {**json.loads(self.figure.to_json()), "config": config},
            "text/html": self.figure.to_html(include_plotlyjs=False, full_html=False, config=config),
            "text/plain": f"figure: {self.figure.layout.title.text}",
        }


class PlotlyScript:
    """plotly.js itself, for the exported page; show it once, before the first chart."""

    def _repr_html_(self) -> str:
        return f"<script>window.PlotlyConfig = {{MathJaxConfig: 'local'}};</script><script>{get_plotlyjs()}</script>"


def throughput(data: report.RunData) -> Chart:
    """Completion tokens/s over time, stacked by server."""
    series = report.throughput(data)
    width_s = float(series["width_s"].max()) if len(series) else 1.0
    unit_s, x = _time_axis(series["start_s"].max())
    figure = go.Figure(layout={"barmode": "stack", "legend": {"traceorder": "normal"}})
    for server, part in series.groupby("server"):
        middle, y = part["start_s"] + width_s / 2, part["completion_tok_per_s"]
        figure.add_bar(x=middle / unit_s, y=y, width=width_s / unit_s, name=str(server))
    subtitle = f"Client rate: tokens of the answers that finished within each {width_s:g} s, divided by {width_s:g} s"
    return finish(figure, _source(data), "Throughput over time", subtitle, x, "completion tokens/s")


def in_flight(data: report.RunData) -> Chart:
    """Requests in flight over time, against what the servers decode at once."""
    series = report.in_flight(data)
    unit_s, x = _time_axis(series["at_s"].max())
    style = {"line": {"shape": "hv", "width": 1.8}, "fill": "tozeroy", "fillcolor": "rgba(0,114,178,0.12)"}
    figure = go.Figure(go.Scatter(x=series["at_s"] / unit_s, y=series["requests"], **style))
    slots = [server.get("cap") for server in (data.status or {}).get("servers", ())]
    if slots and None not in slots:
        words = {"text": f"the servers decode {sum(slots):,} at once", "x": 0, "xanchor": "left", "yanchor": "bottom"}
        figure.add_hline(y=sum(slots), line={"dash": "dash", "color": "#444"}, annotation=words)
    subtitle = "Sent and not yet answered, finished rows only, mean per step; above the line they wait in a server"
    return finish(figure, _source(data), "Requests in flight", subtitle, x, "requests")


def lengths(data: report.RunData) -> Chart:
    """How long answers are, and which were cut."""
    rows, limit = data.rows.dropna(subset=["completion_tokens"]), data.run["spec"]["generation"].get("max_tokens")
    cut = limit if isinstance(limit, int) else 0  # 0: all the room that the prompt left
    top = float(rows["completion_tokens"].max()) if len(rows) else 1.0
    width = _bin_size(top)
    first = (cut + 0.5) % width - width  # max_tokens ends a bin, so that cut answers stand before its mark
    edges = np.arange(first, top + 0.5 + width, width)
    figure = go.Figure()
    for reason, part in rows.groupby("finish_reason"):
        color, name = _REASONS.get(str(reason), (PALETTE[6], str(reason)))
        counts, _ = np.histogram(part["completion_tokens"], edges)
        figure.add_bar(
            x=(edges[:-1] + edges[1:]) / 2, y=counts, width=width, name=f"{name}: {len(part):,}", marker_color=color
        )
    if cut:
        words = {"text": f"max_tokens {cut:,}", "xanchor": "right", "yanchor": "bottom"}
        figure.add_vline(x=cut + 0.5, line={"dash": "dash", "color": "#444"}, annotation=words)
    figure.update_layout(barmode="stack", xaxis_range=[0, edges[-1] + width / 2])
    subtitle = "Finished rows by completion tokens, as the servers count them"
    return finish(figure, _source(data), "Answer lengths", subtitle, "completion tokens", "rows")


def finish(figure: go.Figure, source: str, title: str, subtitle: str, x: str, y: str) -> Chart:
    """Title, axes, legend and source line, in the one style of all figures."""
    words = {"title": {"text": title, "subtitle": {"text": subtitle}}, "xaxis_title_text": x, "yaxis_title_text": y}
    figure.update_layout(template={"layout": _LAYOUT}, showlegend=len(figure.data) > 1, **words)
    figure.add_annotation(
        text=source, xref="paper", yref="paper", x=0, y=0, yshift=-62, xanchor="left", yanchor="top", showarrow=False,
        font={"size": 11, "color": "#777"},
    )  # fmt: skip
    return Chart(figure)


def _source(data: report.RunData) -> str:
    still = f", run unfinished ({data.asked - data.missing:,} of {data.asked:,})" if data.missing else ""
    return f"Source: outputs of run {labelled(data.folder.name, data.engine)}, {len(data.rows):,} completions{still}"


def _time_axis(span_s: float) -> tuple[float, str]:
    """A unit in seconds, and the axis' title: seconds up to ten minutes, minutes up to ten hours, then hours."""
    unit_s, unit = (3600.0, "h") if span_s > 36_000 else (60.0, "min") if span_s > 600 else (1.0, "s")
    return unit_s, f"time since the first request ({unit})"


def _bin_size(top: float) -> int:
    """A round number of tokens that makes some 30 bins."""
    round_numbers = (step * 10**power for power in range(9) for step in (1, 2, 5))
    return next(int(number) for number in round_numbers if top / number <= 30)
