"""What 02_capacity shows of a run's plan: memory, usages and rates as figures, the ranked flags as tables.

Every function takes a `View` and shows nothing when the parameter file has no `plan` group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import plotly.graph_objects as go

from dfexp.capacity.memory import plan_memory
from dfexp.capacity.plan_command import prepared_for
from dfexp.capacity.planner import Candidate, Plan, Setting, candidate, make_plan
from dfexp.capacity.spec import Prepared
from dfexp.capacity.throughput import Prediction, predict
from dfexp.capacity.units import to_gib
from dfexp.figures import PALETTE, Chart, PlotlyScript, finish
from dfexp.fleet import ServerStatus
from dfexp.params import RunSpec
from dfexp.tables import Table

_POINTS = 48


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
            f"Source: capacity model; {self.prepared.model.shape.name} on {setting.server.gpu.name}, "
            f"sglang {setting.rules.version}; workload: {setting.workload.completion.label}"
        )

    def shown(self) -> dict[str, Setting]:
        """The settings to draw: the file's variants, else the present one, and the best of the plan."""
        setting = self.prepared.setting
        best = next((item.flags for item in self.plan.ranked if item.changes), None)
        there = self.prepared.variants or {"now": setting}
        return there | ({"best": replace(setting, server=replace(setting.server, flags=best))} if best else {})


def view(spec: RunSpec, root: Path) -> View | None:
    """The run's plan; None without a `plan` group. Raises CapacityError when the group is impossible."""
    if spec.plan is None:
        return None
    prepared = prepared_for(spec, root)
    return View(prepared=prepared, plan=make_plan(prepared.setting))


def script(shown: View | None) -> PlotlyScript | None:
    """What an exported page needs once, before the first figure."""
    return PlotlyScript() if shown is not None else None


def memory(shown: View | None) -> Chart | None:
    """The memory of one GPU, part by part, now and at its best."""
    if shown is None:
        return None
    figure = go.Figure()
    for number, (name, setting) in enumerate(shown.shown().items()):
        plan = plan_memory(setting.server.shape, setting.server.flags, setting.rules, setting.free)
        weights, reserved = plan.weights_bytes or 0, plan.reserved_bytes or 0
        left = setting.free.pre - to_gib(weights + plan.state_bytes + plan.kv_bytes + reserved)
        parts = {
            "weights": to_gib(weights),
            "state pool": to_gib(plan.state_bytes),
            "KV pool": to_gib(plan.kv_bytes),
            "kept free": to_gib(reserved),
            "unassigned": max(0.0, left),
        }
        figure.add_waterfall(
            x=[*parts, "free before loading"],
            y=[*parts.values(), 0],
            measure=["relative"] * len(parts) + ["total"],
            name=name,
            text=[f"{size:.1f}" for size in (*parts.values(), setting.free.pre)],
            increasing={"marker": {"color": PALETTE[number]}},
            totals={"marker": {"color": PALETTE[6]}},
            connector={"line": {"color": "#BBB"}},
            textangle=0,
        )
    figure.update_layout(waterfallgroupgap=0.15, waterfallgap=0.25)
    subtitle = "GiB; kept free: what mem_fraction_static leaves for activations and graphs"
    return finish(figure, shown.source, "Memory of one GPU", subtitle, "", "GiB")


def usages(shown: View | None) -> Chart | None:
    """Both pools against the requests that the client keeps in flight, with each cap marked."""
    if shown is None:
        return None
    figure = go.Figure()
    for number, (name, setting) in enumerate(shown.shown().items()):
        plan = plan_memory(setting.server.shape, setting.server.flags, setting.rules, setting.free)
        series = _series(setting)
        kv = [(at, got.full_token_usage) for at, got in series]
        state = [(at, got.mamba_usage) for at, got in series if got.mamba_usage is not None]
        for part, points, dash in (("KV pool", kv, "solid"), ("state pool", state, "dot")):
            if points:
                figure.add_scatter(
                    x=[at for at, _ in points], y=[value for _, value in points], mode="lines", name=f"{part}, {name}",
                    line={"color": PALETTE[number], "dash": dash},
                )  # fmt: skip
        figure.add_vline(
            x=plan.max_running_requests, line={"dash": "dash", "color": PALETTE[number]},
            annotation={"text": f"cap {plan.max_running_requests} ({name})", "font": {"color": PALETTE[number]}},
        )  # fmt: skip
    subtitle = "Share of each pool in use at steady state; with the radix cache off a full state pool is normal"
    x = "requests that the client keeps in flight at one server"
    return finish(figure, shown.source, "Use of both pools", subtitle, x, "share in use")


def throughput(shown: View | None) -> Chart | None:
    """Predicted rate against concurrency, with what was measured."""
    if shown is None:
        return None
    figure = go.Figure()
    for number, (name, setting) in enumerate(shown.shown().items()):
        series = _series(setting)
        error = setting.efficiency.uncertainty
        figure.add_scatter(
            x=[at for at, _ in series], y=[got.tok_per_s for _, got in series], mode="lines", name=f"predicted, {name}",
            line={"color": PALETTE[number]}, error_y={"type": "percent", "value": 100 * error, "thickness": 0.6},
        )  # fmt: skip
    points = {
        name: (part.concurrency, shown.prepared.measured.get(name)) for name, part in shown.prepared.variants.items()
    }
    seen = {name: point for name, point in points.items() if point[0] and point[1]}
    if seen:
        figure.add_scatter(
            x=[at for at, _ in seen.values()], y=[rate for _, rate in seen.values()], name="measured",
            mode="markers+text", text=list(seen), textposition="top center",
            marker={"size": 10, "color": PALETTE[5], "symbol": "x"},
        )  # fmt: skip
    subtitle = "Completion tokens/s of one server, prefill pauses included; bars are one standard error"
    x = "requests that the client keeps in flight at one server"
    return finish(figure, shown.source, "Rate against concurrency", subtitle, x, "completion tokens/s")


def _series(setting: Setting) -> list[tuple[int, Prediction]]:
    """Steady states from one request in flight to a tenth above the cap."""
    plan = plan_memory(setting.server.shape, setting.server.flags, setting.rules, setting.free)
    most = max(8, int(plan.max_running_requests * 1.1))
    points = sorted({1, *range(max(1, most // _POINTS), most + 1, max(1, most // _POINTS)), plan.max_running_requests})
    return [(at, predict(setting.server, plan, setting.efficiency, setting.workload, concurrency=at)) for at in points]


def ranked(shown: View | None) -> Table | None:
    """The present flags and the winners, with the exact flags to paste."""
    if shown is None:
        return None
    items = [("now", shown.plan.current), *((str(place), item) for place, item in enumerate(shown.plan.ranked, 1))]
    note = f"Radix cache: {shown.plan.radix.why}"
    return Table(name="plan", title="Flags, by predicted time", rows=[_row(*item) for item in items], note=note)


def changing(shown: View | None) -> Table | None:
    """What would be faster but changes the outputs."""
    if shown is None:
        return None
    rows = [_row(", ".join(sorted(set(item.changes) & _OUTPUTS)), item) for item in shown.plan.changing]
    return Table(name="changing", title="Changes of the outputs, not ranked", rows=rows, note="Compare answers first.")


_OUTPUTS = {"weights", "mamba_ssm_dtype", "kv_cache_dtype"}


def _row(name: str, item: Candidate) -> dict[str, object]:
    memory, predicted = item.memory, item.prediction
    return {
        "": name, "running": round(predicted.running), "cap": memory.max_running_requests,
        "KV tokens": memory.max_total_num_tokens, "tok/s per server": round(predicted.tok_per_s),
        "hours": round(item.hours, 1), "GPU hours": round(item.gpu_hours),
        "why": " ".join((item.why or "The flags as they are.", *item.marks)), "flags": " ".join(item.argv),
    }  # fmt: skip


def variants(shown: View | None) -> Table | None:
    """The file's flag sets beside each other, predicted and, where it says so, measured."""
    if shown is None or not shown.prepared.variants:
        return None
    rows = []
    for name, setting in shown.prepared.variants.items():
        item = candidate(setting, setting.server, setting, concurrency=setting.concurrency)
        memory, predicted = item.memory, item.prediction
        rows.append(
            {
                "": name, "state slots": memory.max_mamba_cache_size, "cap": memory.max_running_requests,
                "set by": memory.cap_from, "running": round(predicted.running),
                "KV use": round(predicted.full_token_usage, 2),
                "state use": predicted.mamba_usage and round(predicted.mamba_usage, 2),
                "tok/s predicted": round(predicted.tok_per_s), "tok/s measured": shown.prepared.measured.get(name),
                "hours": round(item.hours, 1),
            }
        )  # fmt: skip
    return Table(name="variants", title="Settings of the file", rows=rows, note="Rates are of one server.")


def beside(shown: View | None, statuses: Sequence[ServerStatus]) -> Table | None:
    """What the running servers say of their room, beside what the model says."""
    limits = [(status.name, status.limits) for status in statuses if status.limits is not None]
    if shown is None or not limits:
        return None
    plan = shown.plan.current.memory
    rows = [
        {
            "server": name,
            "cap, predicted": plan.max_running_requests,
            "cap, actual": actual.max_running_requests,
            "KV tokens, predicted": plan.max_total_num_tokens,
            "KV tokens, actual": actual.max_total_num_tokens,
        }
        for name, actual in limits
    ]
    note = (
        "A difference of more than one request or 0.5 % of tokens: other flags, another version, or less free memory."
    )
    return Table(name="beside", title="Predicted and actual limits", rows=rows, note=note)


def conclusion(shown: View | None) -> str:
    """The plan in a sentence or two, as Markdown."""
    if shown is None:
        return (
            "The parameter file has no `plan` group, so nothing was predicted. For a run on SGLang, "
            "`params/expansion_v1.yaml` shows one."
        )
    plan, setting = shown.plan, shown.prepared.setting
    now = plan.current
    text = (
        f"**Now: {now.prediction.running:,.0f} requests a server ({now.prediction.limited_by}), "
        f"{now.prediction.tok_per_s * setting.servers:,.0f} tokens/s in all, {now.hours:,.0f} h** for "
        f"{setting.prompts:,} completions of {setting.workload.completion.mean:,.0f} tokens."
    )
    best = plan.ranked[0] if plan.ranked else None
    if best is None or best.hours >= now.hours:
        return f"{text} No better flags were found."
    return f"{text}\n\n**Best: {best.hours:,.0f} h.** {best.why} Flags: `{' '.join(best.argv)}`"
