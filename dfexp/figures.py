"""The figures of a report: one template, colours that colour-blind readers tell apart, every one with its source."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dfexp import report
from dfexp.report import RunData

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


def throughput(data: RunData) -> Chart:
    """Completion tokens/s over time, stacked by server."""
    series = report.throughput(data)
    width_s = float(series["width_s"].max()) if len(series) else 1.0
    unit_s, unit = _time_unit(series["start_s"].max())
    figure = go.Figure(layout={"barmode": "stack", "legend": {"traceorder": "normal"}})
    for server, part in series.groupby("server"):
        middle, y = part["start_s"] + width_s / 2, part["completion_tok_per_s"]
        figure.add_bar(x=middle / unit_s, y=y, width=width_s / unit_s, name=str(server))
    subtitle = f"Client rate: tokens of the answers that finished within each {width_s:g} s, divided by {width_s:g} s"
    x = f"time since the first request ({unit})"
    return finish(figure, _source(data), "Throughput over time", subtitle, x, "completion tokens/s")


def in_flight(data: RunData) -> Chart:
    """Requests in flight over time, against what the servers decode at once."""
    series = report.in_flight(data)
    unit_s, unit = _time_unit(series["at_s"].max())
    line = {"shape": "hv", "width": 1.8}
    fill = {"fill": "tozeroy", "fillcolor": "rgba(0,114,178,0.12)"}
    figure = go.Figure(go.Scatter(x=series["at_s"] / unit_s, y=series["requests"], line=line, **fill))
    slots = [server.get("cap") for server in (data.status or {}).get("servers", ())]
    if slots and None not in slots:
        words = {"text": f"the servers decode {sum(slots):,} at once", "yanchor": "bottom"}
        figure.add_hline(y=sum(slots), line={"dash": "dash", "color": "#444"}, annotation=words)
    subtitle = "Sent and not yet answered, finished rows only, mean per step; above the line they wait in a server"
    x = f"time since the first request ({unit})"
    return finish(figure, _source(data), "Requests in flight", subtitle, x, "requests")


def lengths(data: RunData) -> Chart:
    """How long answers are, and which were cut."""
    rows = data.rows.dropna(subset=["completion_tokens"])
    limit = data.run["spec"]["generation"].get("max_tokens")
    cut = limit if isinstance(limit, int) else 0
    top = max(1.0, float(rows["completion_tokens"].max() if len(rows) else 1))
    width = _bin_size(top)
    first = (cut + 0.5) % width - width  # max_tokens ends a bin, so that cut answers stand before its mark
    edges = np.arange(first, top + 0.5 + width, width)
    figure = go.Figure()
    for reason, part in rows.groupby("finish_reason"):
        color, name = _REASONS.get(str(reason), (PALETTE[6], str(reason)))
        counts, _ = np.histogram(part["completion_tokens"], edges)
        figure.add_bar(
            x=(edges[:-1] + edges[1:]) / 2, y=counts, width=width, name=f"{name}: {len(part):,}",
            marker={"color": color, "line": {"color": "white", "width": 1}},
            hovertemplate=f"%{{x}} tokens, bins of {width:g}: %{{y:,}} rows",
        )  # fmt: skip
    if cut:
        words = {"text": f"max_tokens {cut:,}", "xanchor": "right", "yanchor": "bottom"}
        figure.add_vline(x=cut + 0.5, line={"dash": "dash", "color": "#444"}, annotation=words)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(range=[0, float(edges[-1]) + width / 2])
    subtitle = "Finished rows by completion tokens, as the servers count them" + (
        "" if cut else "; each answer had all the room that its prompt left"
    )
    return finish(figure, _source(data), "Answer lengths", subtitle, "completion tokens", "rows")


def finish(figure: go.Figure, source: str, title: str, subtitle: str, x: str, y: str) -> Chart:
    """Title, axes, legend and source line, in the one style of all figures."""
    figure.update_layout(
        template={"layout": _LAYOUT},
        title={"text": title, "subtitle": {"text": subtitle}},
        xaxis={"title": {"text": x}},
        yaxis={"title": {"text": y}},
        legend={"title": {"text": ""}},
        showlegend=len(figure.data) > 1,
    )
    figure.add_annotation(
        text=source, xref="paper", yref="paper", x=0, y=0, yshift=-62, xanchor="left", yanchor="top", showarrow=False,
        font={"size": 11, "color": "#777"},
    )  # fmt: skip
    return Chart(figure)


def _source(data: RunData) -> str:
    still = f", run unfinished ({data.asked - data.missing:,} of {data.asked:,})" if data.missing else ""
    return f"Source: outputs of run {data.folder.name}, {len(data.rows):,} completions{still}"


def _time_unit(span_s: float) -> tuple[float, str]:
    """Seconds up to ten minutes, minutes up to ten hours, then hours."""
    return (3600.0, "h") if span_s > 36_000 else (60.0, "min") if span_s > 600 else (1.0, "s")


def _bin_size(top: float) -> float:
    """A round number of tokens that makes some 30 bins."""
    raw = max(1.0, top / 30)
    power = 10 ** np.floor(np.log10(raw))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= raw))
