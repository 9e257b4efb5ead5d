"""The figures of a report: one template, colours that colour-blind readers tell apart, every one with its source."""

import html
import json
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from dfexp import report
from dfexp.report import series
from dfexp.tables import duration, labelled

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#3B3B3B")
"""After Okabe and Ito; their yellow and black are left out for contrast on white."""

_PARTS = {"client": "finished (client{})", "in_flight": "growth in flight", "unexplained": "unexplained"}
_HEIGHT = 400
_POINTS, _BESIDE = 1500, 5  # of a cloud; series, above which their names do not fit into a line
_SERVERS = 8  # more have more colours than eyes tell apart
_REASONS = {"stop": ("#0072B2", "ended by itself (stop)"), "length": ("#D55E00", "cut (length)")}
_LIMIT: dict[str, Any] = {"line": {"dash": "dash", "color": "#444"}, "showlegend": True}
"""A straight line at a limit; the legend names it, so that its words lie over nothing."""
_HOVER = "%{y}, at %{x:.2f}<br>%{customdata[0]}<br>%{customdata[1]}<extra></extra>"
_AXIS = {
    "gridcolor": "#E6E6E6", "zerolinecolor": "#BDBDBD", "linecolor": "#BDBDBD", "ticks": "outside",
    "tickcolor": "#BDBDBD", "separatethousands": True, "rangemode": "tozero", "automargin": True,
    "title": {"standoff": 10, "font": {"size": 13, "color": "#444"}},
}  # fmt: skip
_LAYOUT = {
    "font": {"family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 13, "color": "#222"},
    "title": {
        "x": 0, "xref": "paper", "xanchor": "left", "yref": "container", "yanchor": "top",
        "font": {"size": 17}, "subtitle": {"font": {"size": 12.5, "color": "#555"}},
    },
    "colorway": PALETTE, "paper_bgcolor": "white", "plot_bgcolor": "white", "bargap": 0,
    "margin": {"l": 70, "r": 24, "t": 96, "b": 92}, "xaxis": _AXIS, "yaxis": _AXIS, "hovermode": "closest",
    "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"},
}  # fmt: skip


class Chart:
    """A figure that shows itself in JupyterLab and, without a network, in an exported page."""

    def __init__(self, figure: go.Figure) -> None:
        self.figure = figure

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        config = {"displaylogo": False}  # JupyterLab fits figures into its windows itself; done twice, they collapse
        page = {**config, "responsive": True}
        return {
            "application/vnd.plotly.v1+json": {**json.loads(self.figure.to_json()), "config": config},
            "text/html": self.figure.to_html(include_plotlyjs=False, full_html=False, config=page),
            "text/plain": f"figure: {self.figure.layout.title.text}",
        }


class PlotlyScript:
    """plotly.js itself, for the exported page; show it once, before the first chart."""

    def _repr_html_(self) -> str:
        return f"<script>window.PlotlyConfig = {{MathJaxConfig: 'local'}};</script><script>{get_plotlyjs()}</script>"


def throughput(data: report.RunData) -> Chart | None:
    """Completion tokens/s over time, stacked by server; of more than eight the median one and the extremes.

    None where nobody counted tokens, or without rows.
    """
    rates, axis = series.throughput(data), "completion tokens/s"
    figure = go.Figure(layout={"barmode": "stack", "legend": {"traceorder": "normal"}})
    subtitle = f"Client rate: tokens of the answers that finished within each {_width(data)}, over its seconds"
    if (number := rates["server"].nunique()) > _SERVERS:
        table = rates.pivot(index="start_s", columns="server", values="completion_tok_per_s").fillna(0.0)
        least, *_, most = table.mean().sort_values().index
        shown = {f"most: {most}": table[most], "median": table.median(axis=1), f"least: {least}": table[least]}
        x = _bins(data, rates.drop_duplicates("start_s").sort_values("start_s"))[0]
        for name, y in shown.items():
            figure.add_scatter(x=x, y=y, name=name, line={"width": 2})
        subtitle, axis = f"{subtitle}; {number} servers", "completion tokens/s, one server"
    else:
        for server, part in rates.groupby("server"):
            x, width, _ = _bins(data, part)
            figure.add_bar(x=x, y=part["completion_tok_per_s"], width=width, name=str(server))
    told = "Throughput over time", subtitle, _time_axis(data)[1], axis
    return _over_time(figure, data, *told) if rates["completion_tok_per_s"].notna().any() else None


def gap(data: report.RunData) -> Chart | None:
    """What the rate at which servers decode is made of: finished answers, growth in flight, and what is unexplained.

    None in a run's first seconds, of which nothing is known from end to end.
    """
    rates, figure = series.rates(data), go.Figure(layout={"barmode": "relative"})
    x, width, title = _bins(data, rates)
    for (name, words), color in zip(_PARTS.items(), PALETTE, strict=False):
        if rates[name].notna().any():
            figure.add_bar(x=x, y=rates[name], width=width, name=words.format(_cut(data)), marker_color=color)
    if rates["server"].notna().any():
        figure.add_scatter(x=x, y=rates["server"], name="decoded (servers)", line={"color": PALETTE[7], "width": 2})
    subtitle = f"Within each {_width(data)}; in flight: tokens that are made and not yet answered, of finished rows"
    told = "Servers' rate and client's rate", subtitle, title, "completion tokens/s"
    return _over_time(figure, data, *told) if figure.data else None


def in_flight(data: report.RunData) -> Chart | None:
    """Requests in flight, running and queued over time, against what servers decode at once. None without rows."""
    sent, said, figure = series.in_flight(data), series.gauges(data), go.Figure()
    x, width, title = _bins(data, sent)
    figure.add_bar(x=x, y=sent["requests"], width=width, name=f"in flight (client{_cut(data)})", opacity=0.4)
    _lines(figure, data, said, {name: f"{words} (servers)" for name, words in series.REQUESTS.items()})
    if data.slots:
        figure.add_hline(y=data.slots, name=f"{data.slots:,} at once (cap)", **_LIMIT)
    subtitle = "In flight: sent and not yet answered, finished rows only; servers: their gauges added up, means of bins"
    return _over_time(figure, data, "Requests in flight", subtitle, title, "requests") if len(sent) else None


def _cut(data: report.RunData) -> str:
    """Why bars end before lines do, "" where they do not: the run goes on, or was cut off."""
    return "; ends where requests have no row" * (series.known_until(data) < data.ended)


def usages(data: report.RunData) -> Chart | None:
    """Both pools' usages over time. None without samples."""
    said, figure = series.gauges(data), go.Figure()
    _lines(figure, data, said, series.POOLS)
    subtitle = f"Share in use, mean of servers and of each {_width(data)}; at its cap the state pool may show 2/3 or 1"
    words = "Usage of both pools", subtitle, _time_axis(data)[1], "share in use"
    return _over_time(figure, data, *words) if figure.data else None


def gpus(data: report.RunData) -> Chart | None:
    """What GPUs did over time, a panel for each number. None without samples of them."""
    said, panels = series.gpus(data), [(name.replace("_bytes", "_gib"), *words) for name, words in series.GPUS.items()]
    panels = [panel for panel in panels if said.get(f"{panel[0]} mean", pd.Series()).notna().any()]
    if not panels:
        return None
    rows = len(panels) + 1
    figure, (x, _, title) = make_subplots(rows, 1, shared_xaxes=True, vertical_spacing=0.035), _bins(data, said)
    for row, (name, words, unit) in enumerate(panels, 1):
        for how, style in (("min", {"width": 0}), ("max", {"width": 0}), ("mean", {"width": 2})):
            fill = {"fill": "tonexty", "fillcolor": "rgba(0,114,178,.2)"} if how == "max" else {}
            line = {**style, "color": PALETTE[0]}
            figure.add_scatter(x=x, y=said[f"{name} {how}"], name=f"{words}, {how}", line=line, showlegend=False,
                               row=row, col=1, mode="lines", **fill)  # fmt: skip
        figure.update_yaxes(title_text=f"{words}<br>({unit})", row=row, col=1)
    for (name, (words, _)), color in zip(series.LIMITED.items(), (PALETTE[5], PALETTE[1]), strict=True):
        figure.add_scatter(x=x, y=said[f"{name} mean"], name=words, line={"width": 2, "color": color}, row=rows, col=1)
    figure.update_yaxes(title_text="samples<br>(share)", range=[0, 1.05], row=rows, col=1)
    figure.update_layout(height=150 + 130 * rows)
    subtitle = f"Mean GPU, and from the lowest to the highest of {data.gpus['gpu'].nunique()}, of each {_width(data)}"
    chart = _over_time(figure, data, "What the GPUs did", subtitle, "", figure.layout.yaxis.title.text)
    figure.update_xaxes(title_text=title, row=rows, col=1)
    figure.update_shapes(selector=lambda mark: mark.xref != "x", showlegend=False)  # named once for all panels
    return chart


def usages_by_running(data: report.RunData) -> Chart | None:
    """Both pools' usages against running requests, one point a sample. None without samples."""
    looks, figure = data.samples.iloc[:: 1 + len(data.samples) // _POINTS], go.Figure()
    for name, words in series.POOLS.items():
        if looks[name].notna().any():
            marker = {"size": 5, "opacity": 0.5}
            figure.add_scatter(x=looks["num_running_reqs"], y=looks[name], mode="markers", name=words, marker=marker)
    caps = sorted(each.limits.max_running_requests for each in data.starts[0] if each.limits.max_running_requests)
    for cap in {*caps[:1], *caps[-1:]}:
        figure.add_vline(x=cap, name=f"cap {cap}", **_LIMIT)
    subtitle = f"One point a sample of one server, evenly drawn from {len(data.samples):,}"
    told = "Usage against running requests", subtitle, "running requests", "share in use"
    return finish(figure, _source(data), *told) if figure.data else None


def _lines(figure: go.Figure, data: report.RunData, frame: pd.DataFrame, columns: Mapping[str, str]) -> None:
    """A line for each column that holds anything, under its words."""
    for name, words in columns.items():
        if frame[name].notna().any():
            figure.add_scatter(x=_bins(data, frame)[0], y=frame[name], name=words, line={"width": 2})


def lengths(data: report.RunData) -> Chart | None:
    """How long answers are, and which were cut. None where nobody counted tokens, or without rows."""
    limit = data.run["spec"]["generation"].get("max_tokens")
    cut = limit if isinstance(limit, int) else 0  # 0: all the room that the prompt left
    figure = _histogram(data, "completion_tokens", cut)
    if cut:
        figure.add_vline(x=cut + 0.5, name=f"max_tokens {cut:,}", **_LIMIT)
    subtitle = "Finished rows by completion tokens, as the servers count them"
    words = "Answer lengths", subtitle, "completion tokens", "rows"
    return finish(figure, _source(data), *words) if figure.data else None


def latencies(data: report.RunData) -> Chart | None:
    """How long answers took. None without rows."""
    figure, title = _histogram(data, "latency_s", 0), f"latency ({'simulated ' if data.is_virtual else ''}s)"
    subtitle = "Finished rows by the time from sending to the last byte, queueing in the server included"
    return finish(figure, _source(data), "Latencies", subtitle, title, "rows") if figure.data else None


def _histogram(data: report.RunData, column: str, cut: int) -> go.Figure:
    """Rows by a number of theirs, stacked by how they ended. Args: cut, a number that is to end a bin, 0 for none."""
    rows, figure = data.rows.dropna(subset=[column]).fillna({"finish_reason": "not said"}), go.Figure()
    top = float(rows[column].max()) if len(rows) else 1.0
    width = _bin_size(top)
    edges = np.arange((cut + 0.5) % width - width, top + 0.5 + width, width)  # cut answers stand before their mark
    for reason, part in rows.groupby("finish_reason"):
        color, name = _REASONS.get(str(reason), (PALETTE[6], str(reason)))
        counts, _ = np.histogram(part[column], edges)
        x, name = (edges[:-1] + edges[1:]) / 2, f"{name}: {len(part):,}"
        figure.add_bar(x=x, y=counts, width=width, name=name, marker_color=color)
    return figure.update_layout(barmode="stack", xaxis_range=[0, edges[-1] + width / 2])


def events(data: report.RunData) -> Chart | None:
    """What happened, on the axis of time. None where nothing did."""
    found = [one for one in data.events if one["event"] != "shard_sealed"]
    marks, figure = pd.DataFrame(found, columns=["event", "kind", "server", "at"]), go.Figure()
    marks["event"] = marks["event"].str.cat(marks["kind"], sep=": ", na_rep="").str.removesuffix(": ")
    marks["said"], marks["server"] = [*map(report.said, found)], marks["server"].fillna("the run")
    began, (unit_s, title) = marks["at"].min() if data.rows.empty else data.began, _time_axis(data)
    names, many = marks["server"], marks["server"].nunique() > _SERVERS
    for kin, part in marks.groupby(names.where(names == "the run", "servers") if many else names):
        marker, x = {"size": 11, "symbol": "diamond", "opacity": 0.7}, (part["at"] - began) / unit_s
        figure.add_scatter(x=x, y=part["event"], mode="markers", name=str(kin), marker=marker,
                           customdata=part[["server", "said"]].map(_wrapped), hovertemplate=_HOVER)  # fmt: skip
    ends = [each for each in (0.0, data.ended - began, *(marks["at"] - began)) if each == each]  # NaN: no rows
    room = 0.02 * max(1.0, max(ends) - min(ends))
    span = [(min(ends) - room) / unit_s, (max(ends) + room) / unit_s]
    kinds = marks.sort_values("at", kind="stable")["event"].unique()[::-1]  # the first of them stands at the top
    figure.update_layout(yaxis={"type": "category", "categoryorder": "array", "categoryarray": kinds},
                         xaxis_range=span, height=230 + 26 * len(kinds))  # fmt: skip
    words = "What happened, and when", "Sealed shards are left out; details where the pointer rests", title, "event"
    return finish(figure, _source(data), *words) if found else None


def _over_time(figure: go.Figure, data: report.RunData, *words: str) -> Chart:
    """`finish` with the time of the run as its axis, on which lines stand where it was stopped."""
    unit_s = _time_axis(data)[0]
    for place, at in enumerate(data.running(data.stops[:, 0])):
        mark = {**_LIMIT, "line": {"dash": "dot", "color": "#444"}, "showlegend": not place, "name": data.stopped}
        figure.add_vline(x=(at - data.began) / unit_s, **mark)
    end = max(1.0, data.ended - data.began) / unit_s
    figure.update_xaxes(dtick=_bin_size(3 * end), range=[0.0, end])  # marks of unequal bars stand at odd places else
    return finish(figure, _source(data), *words)


def compared(data: report.RunData, others: Mapping[str, report.RunData | str]) -> Chart | None:
    """What servers decoded over time in this run and in others. None where there are none."""
    (unit_s, title), figure = _time_axis(data), go.Figure()
    runs = [*(run for run in others.values() if isinstance(run, report.RunData)), data]
    for run in runs:
        rates, source = series.rates(run), series.SERVERS
        if rates["server"].isna().all():
            rates, source = rates.assign(server=rates["client"] + rates["in_flight"]), series.CLIENT
        x, name = (rates["start_s"] + rates["width_s"] / 2) / unit_s, labelled(run.folder.name, run.engine)
        figure.add_scatter(x=x, y=rates["server"], name=f"{name}, by {source}", line={"width": 2})
    subtitle = "Decoded by all servers of a run, from its own first request on; what differs in its source is not alike"
    words = "Runs beside each other", subtitle, title, "completion tokens/s"
    return finish(figure, _source(*runs[::-1]), *words) if figure.data[1:] else None


def finish(figure: go.Figure, source: str, title: str, subtitle: str, x: str, y: str) -> Chart:
    """Title, axes, legend and source line, in the one style of all figures."""
    top = 1 - 14 / (figure.layout.height or _HEIGHT)  # 14 pixels below the edge
    words = {"title": {"text": title, "y": top, "subtitle": {"text": subtitle}}, "xaxis_title_text": x}
    words["yaxis_title_text"] = y
    named = sum(part.showlegend is not False for part in figure.data)
    legend = {"orientation": "v", "x": 1.02, "y": 1.0, "yanchor": "top"} if named > _BESIDE else {}
    is_named = named > 1 or figure.layout.barmode == "stack"  # whose bars say by their colour what they are
    figure.update_layout(template={"layout": _LAYOUT}, showlegend=is_named, legend=legend, **words)
    figure.update_layout(height=figure.layout.height or _HEIGHT)
    figure.add_annotation(
        text=source, xref="paper", yref="paper", x=0, y=0, yshift=-62, xanchor="left", yanchor="top", showarrow=False,
        font={"size": 11, "color": "#777"},
    )  # fmt: skip
    return Chart(figure)


def _source(*runs: report.RunData) -> str:
    lefts = [f", run unfinished ({run.asked - run.missing:,} of {run.asked:,})" * bool(run.missing) for run in runs]
    parts = [f"run {labelled(run.folder.name, run.engine)}, {len(run.rows):,} completions{left}"
             for run, left in zip(runs, lefts, strict=True)]  # fmt: skip
    return "<br>".join(textwrap.wrap(f"Source: outputs of {'; '.join(parts)}", 150))


def _time_axis(data: report.RunData) -> tuple[float, str]:
    """A unit in seconds, and the axis' title: seconds up to ten minutes, minutes up to ten hours, then hours."""
    span_s = data.ended - data.began
    unit_s, unit = (3600.0, "h") if span_s > 36_000 else (60.0, "min") if span_s > 600 else (1.0, "s")
    title = f"{'simulated ' if data.is_virtual else ''}time since the first request"
    return unit_s, f"{title}{', without stops' * bool(data.stopped)} ({unit})"


def _bins(data: report.RunData, frame: pd.DataFrame) -> tuple[pd.Series, pd.Series, str]:
    """Middles and widths of a series' bins in the unit of the axis, and its title."""
    unit_s, title = _time_axis(data)
    start_s, width_s = frame["start_s"].astype(float), frame["width_s"].astype(float)
    return (start_s + width_s / 2) / unit_s, width_s / unit_s, title


def _width(data: report.RunData) -> str:
    return duration(float(np.diff(series.edges(data))[0]))


def _wrapped(words: str) -> str:
    """Words for a label of plotly's, which knows some HTML."""
    return "<br>".join(textwrap.wrap(html.escape(words), 80))


def _bin_size(top: float) -> float:
    """A round number that makes some 30 bins."""
    round_numbers = (step * 10.0**power for power in range(-2, 30) for step in (1, 2, 5))
    return next(number for number in round_numbers if top / number <= 30)
