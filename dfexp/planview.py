"""What 02_capacity shows of a run's plan: memory, usages and rates as figures, the ranked flags as tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import plotly.graph_objects as go

from dfexp.capacity.plan_command import Prepared, prepared_for, row
from dfexp.capacity.planner import Plan, Setting, candidate, make_plan
from dfexp.capacity.shape import GIB
from dfexp.capacity.throughput import Prediction
from dfexp.figures import PALETTE, Chart, finish
from dfexp.fleet import ServerStatus
from dfexp.params import RunSpec
from dfexp.tables import Table

_POINTS = 48
_CONCURRENCY = "requests that the client keeps in flight at one server"
_OUTPUTS = ("weights", "kv_cache_dtype", "mamba_ssm_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A plan and what it was made of."""

    prepared: Prepared
    plan: Plan

    @property
    def source(self) -> str:
        """The line below every figure: nothing in it was measured here."""
        setting = self.prepared.setting
        return (
            f"Source: capacity model; {setting.server.shape.name} on {setting.server.gpu.name}, "
            f"sglang {setting.rules.version}; workload: {setting.workload.completion.label}"
        )

    def settings(self) -> dict[str, Setting]:
        """The settings to draw: the file's variants, else the present one, and the best of the plan."""
        now = self.plan.current.hours
        best = next((item.flags for item in self.plan.ranked if item.changes and item.hours < now), None)
        there = self.prepared.variants or {"now": self.prepared.setting}
        return there | ({"best": replace(self.prepared.setting.with_flags(best), concurrency=None)} if best else {})


def view(spec: RunSpec, root: Path) -> View | None:
    """The run's plan; None without a `plan` group. Raises CapacityError when the group is impossible."""
    if spec.planned is None:
        return None
    prepared = prepared_for(spec, root)
    return View(prepared=prepared, plan=make_plan(prepared.setting))


def memory(shown: View) -> Chart:
    """The memory of one GPU, part by part, for every setting."""
    figure = go.Figure()
    for (name, setting), color in zip(shown.settings().items(), PALETTE, strict=False):
        plan = setting.memory()
        sizes = plan.weights_bytes, plan.state_bytes, plan.kv_bytes, plan.reserved_bytes
        names = "weights", "state pool", "KV pool", "kept free"
        parts = {part: size / GIB for part, size in zip(names, sizes, strict=True)}
        parts["unassigned"] = max(0.0, setting.free.pre_gib - sum(parts.values()))
        figure.add_waterfall(
            x=[*parts, "free before loading"], y=[*parts.values(), 0], name=name, textangle=0,
            measure=["relative"] * len(parts) + ["total"], connector={"line": {"color": "#BBB"}},
            text=[f"{size:.1f}" for size in (*parts.values(), setting.free.pre_gib)],
            increasing={"marker": {"color": color}}, totals={"marker": {"color": PALETTE[6]}},
        )  # fmt: skip
    figure.update_layout(waterfallgroupgap=0.15, waterfallgap=0.25)
    subtitle = "GiB; kept free: what mem_fraction_static leaves for activations and graphs"
    return finish(figure, shown.source, "Memory of one GPU", subtitle, "", "GiB")


def usages(shown: View) -> Chart:
    """Both pools against the requests that the client keeps in flight, with each cap marked."""
    figure = go.Figure()
    for (name, setting), color in zip(shown.settings().items(), PALETTE, strict=False):
        series, cap = _series(setting), setting.memory().max_running_requests
        for pool, dash in (("KV pool", "solid"), ("state pool", "dot")):
            values = [got.full_token_usage if pool == "KV pool" else got.mamba_usage for got in series.values()]
            if None not in values:
                figure.add_scatter(
                    x=list(series), y=values, mode="lines", name=f"{pool}, {name}", line={"color": color, "dash": dash}
                )
        note = {"text": f"cap {cap} ({name})", "font": {"color": color}}
        figure.add_vline(x=cap, line={"dash": "dash", "color": color}, annotation=note)
    subtitle = "Share of each pool in use at steady state; with the radix cache off a full state pool is normal"
    return finish(figure, shown.source, "Use of both pools", subtitle, _CONCURRENCY, "share in use")


def throughput(shown: View) -> Chart:
    """Predicted rate against concurrency, with what was measured."""
    figure = go.Figure()
    for (name, setting), color in zip(shown.settings().items(), PALETTE, strict=False):
        series, bars = _series(setting), {"type": "percent", "value": 100 * setting.efficiency.uncertainty}
        figure.add_scatter(
            x=list(series), y=[got.tok_per_s for got in series.values()], mode="lines", name=f"predicted, {name}",
            line={"color": color}, error_y={**bars, "thickness": 0.6},
        )  # fmt: skip
    seen = {name: part for name, part in shown.prepared.variants.items() if part.measured_tok_per_s}
    if seen:
        figure.add_scatter(
            x=[part.concurrency for part in seen.values()], y=[part.measured_tok_per_s for part in seen.values()],
            name="measured", mode="markers+text", text=list(seen), textposition="top center",
            marker={"size": 10, "color": PALETTE[5], "symbol": "x"},
        )  # fmt: skip
    subtitle = "Completion tokens/s of one server, prefill pauses included; bars are one standard error"
    return finish(figure, shown.source, "Rate against concurrency", subtitle, _CONCURRENCY, "completion tokens/s")


def _series(setting: Setting) -> dict[int, Prediction]:
    """Steady states from one request in flight to a tenth above the cap."""
    plan = setting.memory()
    most = max(8, int(plan.max_running_requests * 1.1))
    points = {1, *range(max(1, most // _POINTS), most + 1, max(1, most // _POINTS)), plan.max_running_requests}
    return {point: setting.predict(plan, point) for point in sorted(points)}


def ranked(shown: View) -> Table:
    """The present flags and the winners, with the exact flags to paste."""
    places = [("now", shown.plan.current), *((str(place), item) for place, item in enumerate(shown.plan.ranked, 1))]
    rows = [row(name, item) for name, item in places]
    return Table(name="plan", title="Flags, by predicted time", rows=rows, note=f"Radix cache: {shown.plan.radix}")


def changing(shown: View) -> Table:
    """What would be faster but changes the outputs."""
    rows = [row(", ".join(name for name in _OUTPUTS if name in item.changes), item) for item in shown.plan.changing]
    return Table(name="changing", title="Changes of the outputs, not ranked", rows=rows, note="Compare answers first.")


def variants(shown: View) -> Table:
    """The file's flag sets beside each other, predicted and, where it says so, measured."""
    rows = []
    for name, setting in shown.prepared.variants.items():
        item = candidate(setting, concurrency=setting.concurrency)
        seen = {"cap set by": item.memory.cap_from, "tok/s measured": setting.measured_tok_per_s}
        values = row(name, item) | seen
        rows.append({key: value for key, value in values.items() if key != "why"})
    return Table(name="variants", title="Settings of the file", rows=rows, note="Rates are of one server.")


def beside(shown: View, statuses: Sequence[ServerStatus]) -> Table | None:
    """What the running servers say of their room, beside what the model says; None where none says it."""
    plan = shown.plan.current.memory
    rows = [
        {
            "server": status.name,
            "engine": status.limits.engine_version or "-",
            "cap, predicted": plan.max_running_requests,
            "cap, actual": status.limits.max_running_requests,
            "KV tokens, predicted": plan.max_total_num_tokens,
            "KV tokens, actual": status.limits.max_total_num_tokens,
        }
        for status in statuses
        if status.limits is not None
    ]
    note = "More than one request or 0.5 % of tokens apart: other flags, another version, or less free memory."
    return Table(name="beside", title="Predicted and actual limits", rows=rows, note=note) if rows else None


def conclusion(shown: View | None) -> str:
    """The plan in a sentence or two, as Markdown."""
    if shown is None:
        return (
            "The parameter file has no `plan` group, so nothing was predicted. For a run on SGLang, "
            "`params/expansion_v1.yaml` shows one."
        )
    setting, now = shown.prepared.setting, shown.plan.current
    text = (
        f"**Now: {now.prediction.running:,.0f} requests a server ({now.prediction.limited_by}), "
        f"{now.prediction.tok_per_s * setting.servers:,.0f} tokens/s in all, {now.hours:,.1f} h** for "
        f"{setting.prompts:,} completions of {setting.workload.completion.mean:,.0f} tokens."
    )
    best = shown.plan.ranked[0] if shown.plan.ranked else now
    if best.hours >= now.hours:
        return f"{text} No better flags were found."
    return f"{text}\n\n**Best: {best.hours:,.1f} h.** {best.why} Flags: `{' '.join(best.argv)}`"
