"""The figures of a report: one template, colours that colour-blind readers tell apart, every one with its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
from plotly.offline import get_plotlyjs

from dfexp import report
from dfexp.report import RunData

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#3B3B3B")
"""After Okabe and Ito; their yellow and black are left out for contrast on white."""

_REASONS = {"stop": ("#0072B2", "ended by itself (stop)"), "length": ("#D55E00", "cut (length)")}
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_SCATTER_MOST = 3000


class Chart:
    """A figure that shows itself in JupyterLab and, without a network, in an exported page."""

    def __init__(self, figure: go.Figure) -> None:
        self.figure = figure

    def __repr__(self) -> str:
        return f"figure: {self.figure.layout.title.text}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        config = {"displaylogo": False, "responsive": True}
        page = pio.to_html(self.figure, include_plotlyjs=False, full_html=False, config=config)
        picture = {**self.figure.to_plotly_json(), "config": config}
        return {
            "application/vnd.plotly.v1+json": pio.json.from_json_plotly(pio.json.to_json_plotly(picture)),
            "text/html": page,
            "text/plain": repr(self),
        }


class PlotlyScript:
    """plotly.js itself, for the exported page; show it once, before the first chart."""

    def __repr__(self) -> str:
        return "plotly.js, for the exported page"

    def _repr_html_(self) -> str:
        return f"<script>window.PlotlyConfig = {{MathJaxConfig: 'local'}};</script><script>{get_plotlyjs()}</script>"


def throughput(data: RunData) -> Chart:
    """Completion tokens/s over time, stacked by server."""
    series = pd.DataFrame(report.throughput(data).rows)
    figure = go.Figure()
    width_s = 1.0
    if not series.empty:
        width_s = float(series["width_s"].iloc[0])
        unit_s, unit = _time_unit(float(series["start_s"].max()) + width_s)
        for server, part in series.groupby("server"):
            figure.add_bar(
                x=(part["start_s"] + width_s / 2) / unit_s,
                y=part["completion_tok_per_s"],
                width=width_s / unit_s,
                name=str(server),
                hovertemplate="%{y:,.1f} tokens/s<extra>%{fullData.name}</extra>",
            )
    else:
        unit = "s"
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    subtitle = f"Client rate: tokens of the answers that finished within each {width_s:g} s, divided by {width_s:g} s"
    x = f"time since the first request ({unit})"
    return _finish(figure, data, "Throughput over time", subtitle, x, "completion tokens/s")


def in_flight(data: RunData) -> Chart:
    """Requests in flight over time, against what the servers decode at once."""
    series = pd.DataFrame(report.in_flight(data).rows, columns=["at_s", "requests"])
    unit_s, unit = _time_unit(float(series["at_s"].max()) if len(series) else 1.0)
    figure = go.Figure(
        go.Scatter(
            x=series["at_s"] / unit_s,
            y=series["requests"],
            line={"shape": "hv", "width": 1.8},
            fill="tozeroy",
            fillcolor="rgba(0,114,178,0.12)",
            hovertemplate="%{y:.1f} requests<extra></extra>",
        )
    )
    slots = _slots(data)
    if slots:
        figure.add_hline(
            y=slots, line={"dash": "dash", "color": "#444"},
            annotation={"text": f"the servers decode {slots:,} at once"}, annotation_position="top left",
        )  # fmt: skip
    subtitle = "Sent and not yet answered, finished rows only, mean per step; above the line they wait in a server"
    return _finish(figure, data, "Requests in flight", subtitle, f"time since the first request ({unit})", "requests")


def lengths(data: RunData) -> Chart:
    """How long answers are, and which were cut."""
    rows = data.rows.dropna(subset=["completion_tokens"])
    figure = go.Figure()
    top = float(rows["completion_tokens"].max()) if len(rows) else 1.0
    width = _bin_size(top)
    cut = data.run["spec"]["generation"].get("max_tokens")
    anchor = cut if isinstance(cut, int) else 0
    first = anchor + 0.5 - width * np.ceil((anchor + 1) / width)
    edges = np.arange(
        first, top + 0.5 + width, width
    )  # max_tokens ends a bin, so that cut answers stand before its mark
    for reason, part in rows.groupby("finish_reason", observed=True):
        color, name = _REASONS.get(str(reason), ("#7F7F7F", str(reason)))
        counts, _ = np.histogram(part["completion_tokens"], edges)
        figure.add_bar(
            x=(edges[:-1] + edges[1:]) / 2,
            y=counts,
            width=width,
            name=f"{name}: {len(part):,}",
            marker={"color": color, "line": {"color": "white", "width": 1}},
            customdata=np.stack([edges[:-1] + 0.5, edges[1:] - 0.5], axis=1),
            hovertemplate="%{customdata[0]:,.0f} to %{customdata[1]:,.0f} tokens: %{y:,} rows<extra></extra>",
        )
    if isinstance(cut, int):
        figure.add_vline(
            x=cut + 0.5, line={"dash": "dash", "color": "#444"},
            annotation={"text": f"max_tokens {cut:,}", "xanchor": "right", "yanchor": "bottom"},
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_xaxes(range=[0, float(edges[-1]) + width / 2])
    limit = "" if isinstance(cut, int) else "; each answer had all the room that its prompt left"
    return _finish(
        figure, data, "Answer lengths", f"Finished rows by completion tokens, as the servers count them{limit}",
        "completion tokens", "rows",
    )  # fmt: skip


def latency(data: RunData) -> Chart:
    """How long a request takes, against how much it says."""
    rows = data.rows.dropna(subset=["completion_tokens"])
    shown = rows.sample(min(len(rows), _SCATTER_MOST), random_state=0)
    figure = go.Figure()
    for server, part in shown.groupby("server", observed=True):
        figure.add_scatter(
            x=part["completion_tokens"],
            y=part["latency_s"],
            mode="markers",
            marker={"size": 6, "opacity": 0.65},
            name=str(server),
            hovertemplate="%{x:,} tokens in %{y:.1f} s<extra>%{fullData.name}</extra>",
        )
    part_shown = f"; {len(shown):,} of {len(rows):,} rows, drawn at random" if len(shown) < len(rows) else ""
    subtitle = f"From sending to the last byte, queueing in the server included{part_shown}"
    return _finish(figure, data, "Latency by answer length", subtitle, "completion tokens", "latency (s)")


def servers(data: RunData) -> Chart:
    """Rows per server, by how their answers ended."""
    counts = data.rows.groupby(["server", "finish_reason"], observed=True).size().reset_index(name="rows")
    figure = go.Figure()
    for reason, part in counts.groupby("finish_reason", observed=True):
        color, name = _REASONS.get(str(reason), ("#7F7F7F", str(reason)))
        figure.add_bar(
            y=part["server"].astype(str), x=part["rows"], orientation="h", name=name, marker={"color": color},
            text=part["rows"], texttemplate="%{text:,}", hovertemplate="%{x:,} rows<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    chart = _finish(figure, data, "Rows per server", "Finished rows, by how the answer ended", "rows", "")
    chart.figure.update_layout(height=190 + 34 * max(1, counts["server"].nunique()))
    return chart


def _finish(figure: go.Figure, data: RunData, title: str, subtitle: str, x: str, y: str) -> Chart:
    still = "" if data.is_finished else f", run unfinished ({len(data.rows) + len(data.failures):,} of {data.asked:,})"
    source = f"Source: outputs of run {data.folder.name}, {len(data.rows):,} completions{still}"
    return finish(figure, source, title, subtitle, x, y)


def finish(figure: go.Figure, source: str, title: str, subtitle: str, x: str, y: str) -> Chart:
    """Title, axes, legend and source line, in the one style of all figures."""
    figure.update_layout(
        template=_template(),
        title={"text": title, "subtitle": {"text": subtitle}},
        xaxis={"title": {"text": x}},
        yaxis={"title": {"text": y}},
        showlegend=len(figure.data) > 1,
    )
    figure.add_annotation(
        text=source, xref="paper", yref="paper", x=0, y=0, yshift=-62, xanchor="left", yanchor="top", showarrow=False,
        font={"size": 11, "color": "#777"},
    )  # fmt: skip
    return Chart(figure)


def _template() -> go.layout.Template:
    axis: Mapping[str, Any] = {
        "gridcolor": "#E6E6E6", "zerolinecolor": "#BDBDBD", "linecolor": "#BDBDBD", "ticks": "outside",
        "tickcolor": "#BDBDBD", "separatethousands": True, "rangemode": "tozero", "automargin": True,
        "title": {"standoff": 10, "font": {"size": 13, "color": "#444"}},
    }  # fmt: skip
    return go.layout.Template(
        layout={
            "font": {"family": _FONT, "size": 13, "color": "#222"},
            "title": {"x": 0, "xref": "paper", "xanchor": "left", "yref": "container", "y": 0.965, "yanchor": "top",
                      "font": {"size": 17}, "subtitle": {"font": {"size": 12.5, "color": "#555"}}},
            "colorway": list(PALETTE),
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "margin": {"l": 70, "r": 24, "t": 96, "b": 92},
            "height": 400,
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"},
            "hovermode": "closest",
            "bargap": 0,
        }
    )  # fmt: skip


def _time_unit(span_s: float) -> tuple[float, str]:
    """Seconds up to ten minutes, minutes up to ten hours, then hours."""
    return (1.0, "s") if span_s <= 600 else (60.0, "min") if span_s <= 36_000 else (3600.0, "h")


def _bin_size(top: float) -> float:
    """A round number of tokens that makes some 30 bins."""
    raw = max(1.0, top / 30)
    power = 10 ** np.floor(np.log10(raw))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= raw))


def _slots(data: RunData) -> int | None:
    """Requests that all servers together decode at once, where every server says."""
    caps = [server.get("cap") for server in (data.status or {}).get("servers", ())]
    return sum(caps) if caps and all(isinstance(cap, int) for cap in caps) else None
