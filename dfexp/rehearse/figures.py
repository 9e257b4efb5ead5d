"""What a rehearsal came to, beside what operators saw.

Gauges are read out of the servers' logs. A decode line bears the virtual second at which it was printed and comes every
40 decode steps at any speed, whereas a look at /metrics is at a real time: at full speed many virtual seconds pass
between two looks, and whoever looks slows down what holds the clock.
Completions are counted in the client's rows. The run's second 0 is the first row's submission.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from dfexp import generate, report
from dfexp.capacity.planner import Setting
from dfexp.errors import RunError
from dfexp.metrics import from_log
from dfexp.records import ServerLimits
from dfexp.rehearse.drive import clock_of
from dfexp.rehearse.variants import SeenPart, Variant
from dfexp.rehearse.whole import simulate
from dfexp.tables import text
from dfexp.virtual_time import VirtualTime

_GAUGES = ("num_running_reqs", "num_queue_reqs", "full_token_usage", "mamba_usage", "gen_throughput")
_LONGEST_S = 30.0
"""In so many seconds every server that works writes a line."""
_AWAY = ("server_down", "server_back")
_ABOUT = """\
State slots, request cap, KV tokens: as a server said. From running to fleet tok/s: means of all servers' decode lines
over the second half of the time until operators looked (until the end where nobody did); in fleet tok/s servers that
were away count 0. Completions: those that the client had by then. Last half: of what was rehearsed. Rows sent again:
done at a later attempt. Away: seconds of the simulated time. Whole run: the scheduler's model alone, without servers,
faults and client. Error: against the nearest value that was seen.
Planned tokens of prompts: {prompts}; of completions: {completions}.
The rehearsals' prompts {are}."""


def about(variant: Variant) -> str:
    """What the table's lines mean, and what was assumed."""
    load, are = variant.setting.workload, "are drawn from that" if variant.missing else "are those of the run file"
    return _ABOUT.format(prompts=load.prompt.label, completions=load.completion.label, are=are)


def rows(variant: Variant, root: Path, limits: ServerLimits, *, whole: bool) -> list[dict[str, Any]]:
    """The lines of the table, one for each figure; what was not seen is None.

    Args: limits, of a server, as it said; whole, whether the whole run is simulated too.
    Raises RunError, CorruptShardError: the rehearsal's files are not there, or damaged.
    """
    seen, lines = variant.seen.model_dump(exclude={"at_s"}) if variant.seen else {}, []
    for figure, value in _figures(variant, root, limits, whole=whole).items():
        given = seen.get(figure)
        low, high = given if isinstance(given, list) else (given, given)
        nearest = None if low is None else min(max(value, low), high)
        error = 0.0 if value == nearest else value / nearest - 1 if nearest else None
        about = {"variant": variant.name, "figure": figure, "simulated": value}
        lines.append({**about, "seen_low": low, "seen_high": high, "error": error})
    return lines


def frame(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The table for a reader: for each figure what was simulated in each variant; what was seen, and the error."""
    columns: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        ends = dict.fromkeys(f"{line[end]:,g}" for end in ("seen_low", "seen_high") if line[end] is not None)
        error = "" if line["error"] is None else f"{line['error']:+z.1%}"
        cells = [text(line["simulated"]), "-".join(ends), error]
        columns.setdefault(line["variant"], {})[_label(line["figure"])] = cells
    heads = ["simulated", "seen", "error"]
    parts = [pd.DataFrame.from_dict(cells, orient="index", columns=heads) for cells in columns.values()]
    table = pd.concat(parts, axis=1, keys=columns).fillna("")
    return table.loc[:, (table != "").any()]


def _label(figure: str) -> str:
    for start, words in (("steady_", "{} (last half)"), ("whole_run_", "whole run: {}")):
        if figure.startswith(start):
            return words.format(_label(figure.removeprefix(start)))
    field = SeenPart.model_fields.get(figure)
    return str(field.description) if field else figure.replace("_", " ").replace("cpu", "CPU")


def _figures(variant: Variant, root: Path, limits: ServerLimits, *, whole: bool) -> dict[str, float]:
    setting, clock, said = variant.setting, VirtualTime.read(clock_of(variant.spec, root)), asdict(limits)
    data = report.load(generate.run_folder(variant.spec, root), examples=0)
    if data.rows.empty:
        raise RunError(f"the rehearsal {data.folder.name!r} completed no row. See {data.folder.log}; rehearse longer.")
    began_s, finished_s = data.began, data.rows["finished_at"] - data.began
    end_s = min(variant.hours * 3600, float(finished_s.max()))
    at_s = variant.seen.at_s if variant.seen else end_s
    tokens, servers = data.rows["completion_tokens"][finished_s <= at_s], (data.status or {})["servers"]
    away = [_away(data.events, server["name"]) for server in servers]
    lines = _lines(generate.fleet_folder(variant.spec, root).logs, clock, began_s)
    steady = _means(lines, setting, end_s / 2, end_s)
    found = {
        **{name: said[name] for name in SeenPart.model_fields if said.get(name)},
        "at_s": at_s,
        **_means(lines, setting, at_s / 2, at_s),
        "completions": len(tokens),
        "mean_completion_tokens": float(tokens.mean()),
        "completions_per_s": len(tokens) / at_s,
        **{f"steady_{name}": value for name, value in steady.items()},
        "rehearsed_hours": end_s / 3600,
        "restarts": sum(server["restarts"] for server in servers),
        "rows_failed": len(data.failures),
        "rows_sent_again": int((data.rows["attempt"] > 1).sum()),
        **{f"server_{place}_away_s": away_s for place, away_s in enumerate(away) if away_s},
    }
    if whole:
        run = simulate(setting, servers[0]["limit"], setting.prompts)
        seconds, gpus = run.finished_s[-1], setting.servers * setting.server.flags.tp_size
        found |= {"whole_run_hours": seconds / 3600, "whole_run_tok_per_s_per_gpu": sum(run.tokens) / seconds / gpus}
        found |= {"whole_run_retractions": run.retracted, "whole_run_cpu_s_to_simulate": run.cpu_s}
    return found


def _away(events: Sequence[Mapping[str, Any]], server: str) -> float:
    """Virtual seconds that a server was away for; one that did not come back, until the last event."""
    down, back = (
        [line["at"] for line in events if line["event"] == what and line["server"] == server] for what in _AWAY
    )
    return float(sum([*back, *(line["at"] for line in events[-1:])][: len(down)]) - sum(down))


def _lines(logs: Path, clock: VirtualTime, began_s: float) -> pd.DataFrame:
    """The decode lines of all servers; `at_s` since the run's second 0."""
    found = [
        {**sample.to_json(), "at_s": clock.of_stamp(sample.at) - began_s}
        for path in logs.glob("server-*.log")
        for sample in from_log(path.read_text(encoding="utf-8", errors="replace"), server=path.name)
        if sample.gen_throughput is not None
    ]
    return pd.DataFrame(found, columns=["server", "at_s", *_GAUGES])


def _means(lines: pd.DataFrame, setting: Setting, after_s: float, until_s: float) -> dict[str, float]:
    inside = lines[lines["at_s"].between(after_s, until_s, inclusive="right")]
    means: dict[Any, float] = inside.drop(columns=["server", "at_s"]).mean().dropna().to_dict()
    rate = means.pop("gen_throughput", 0.0) / setting.server.flags.tp_size
    # A line's rate is that since the line before; a server that was away has none for as long.
    since_s = lines.groupby("server")["at_s"].diff().clip(upper=_LONGEST_S).reindex(inside.index)
    fleet_rate = float((inside["gen_throughput"] * since_s).sum()) / (until_s - after_s)
    return {**means, "tok_per_s_per_gpu": rate, "fleet_tok_per_s": fleet_rate}
