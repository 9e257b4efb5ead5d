"""A run's files as frames, in the time that its servers had: rows without texts, samples, events.

Of simulated servers all times are virtual seconds, which the fleet's clock.jsonl maps real ones to; of all others they
are seconds since the Unix epoch. After a pause, in which no process of the run ran, they go on as if there was none.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from itertools import compress, islice
from math import isnan, nan
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from dfexp import control, jsonl, shards
from dfexp.capacity.flags import own_name
from dfexp.diagnose import Watched
from dfexp.engines.sglang_flags import gpus_per_server
from dfexp.errors import RunError
from dfexp.estimate import Array
from dfexp.layout import FleetFolder, RunFolder
from dfexp.quality import garbage
from dfexp.records import SIMULATED, EngineSample, ServerLimits
from dfexp.report.draw import CHUNK, ROW, Draw, facts, parsed
from dfexp.report.pauses import pauses, without
from dfexp.tables import duration
from dfexp.virtual_time import CLOCK, VirtualTime

SAMPLE = {"server": "object"} | {each.name: "float64" for each in fields(EngineSample) if each.name != "server"}
GPU = dict.fromkeys(("utilization", "memory_used_bytes", "memory_total_bytes", "power_w", "sm_clock_mhz"), "float64")
GPU |= {"gpu": "object", "at": "float64", "throttle_reasons": "object", "clock_limits": "object"}
_PICK_LOOK = itemgetter(*(SAMPLE | GPU))
_PICK_NUMBERS = itemgetter(*(name for name, of in (SAMPLE | GPU).items() if of == "float64"))
_NUMBERS = {int, float, type(None)}
_NO_LOOK, _NO_EVENT = dict.fromkeys(SAMPLE | GPU), dict.fromkeys(("at", "event", "server"))
_PIECE = 20_000  # lines that become a piece of a frame
_JUDGED, _JUDGED_CHARACTERS = 2000, 2000  # rows that are looked at for garbage, and how much of each
_UNCOUNTED = 0.01  # of rows may have no count of tokens
_WATCHED = 2_000  # samples of a server that are judged: of 62 h one every two minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a report is made of.

    Attributes:
        run: run.json.
        asked, missing: rows that the run is to make; those neither done nor failed yet.
        elsewhere: rows that are done and on S3 alone, since the run went on here from another machine.
        status: what the generating process said last; None if it never said anything.
        is_going: whether that process runs, so that more rows are in flight than anybody can see here.
        is_virtual: whether times are those of simulated servers.
        rows: one line per completion, without texts; counts that a server did not give are NaN, never zero.
        busy_s: time in which at least one request of `rows` was in flight; NaN without rows.
        samples: one line per look at a server, `EngineSample` by column; NaN is what it did not say.
        watched: for each server its samples, evenly thinned to `_WATCHED`, and with pauses, and what is known of it.
        starts: for each start that made rows or looks its servers, which were there at once, unlike all of `watched`;
            first that by which the run is judged: the present one, else the longest. Never empty.
        gpus: one line per look at a GPU, as metrics.jsonl has it.
        drawn: whole rows, drawn at random, in random order; examples: the first of them, by index.
        kept: whole rows, a few for each flag, drawn too, and of the shortest and the longest answers.
        gaps: pauses, from when to when, with those before them in the time; `running` leaves them out.
        stamps: of each event its time with pauses.
        damaged: lines that could not be read and are left out, by file.
        memo: what `once` keeps.
    """

    folder: RunFolder
    run: Mapping[str, Any]
    asked: int
    missing: int
    elsewhere: int
    status: Mapping[str, Any] | None
    is_going: bool
    is_virtual: bool
    rows: pd.DataFrame
    busy_s: float
    samples: pd.DataFrame
    watched: Sequence[Watched]
    starts: Sequence[Sequence[Watched]]
    gpus: pd.DataFrame
    failures: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    drawn: Sequence[Mapping[str, Any]]
    examples: Sequence[Mapping[str, Any]]
    kept: Sequence[Mapping[str, Any]]
    gaps: Array
    stamps: Sequence[float]
    damaged: Mapping[str, int]
    memo: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def fleet(self) -> Mapping[str, Any]:
        """The group of its servers' parameters; {} if it has none."""
        return self.run["spec"].get("fleet") or {}

    @property
    def engine(self) -> str:
        """The engine of its servers, as its parameters name it; "" if they do not."""
        return str(self.fleet.get("engine", ""))

    @property
    def units(self) -> tuple[int, str]:
        """What the run costs time of, and its name: GPUs where the engine is SGLang's, else servers."""
        servers = int(self.fleet.get("servers") or len(self.starts[0]) or 1)
        if self.engine not in ("sglang", SIMULATED) or self.fleet.get("device") == "cpu":
            return servers, "server"
        return servers * gpus_per_server(flags_of(self.fleet)), "GPU"

    @property
    def slots(self) -> int | None:
        """Requests that the servers of a start decode at once, of the most; None where one always does not say."""
        caps = [[each.limits.max_running_requests or 0 for each in start] for start in self.starts]
        return max((sum(each) for each in caps if all(each)), default=0) or None

    @property
    def is_settled(self) -> bool:
        """Whether every request that was sent is over: rows are no sample of the short ones."""
        marks = [one for one in self.events if one["event"] in ("run_started", "stop_asked")]
        if self.missing == 0 or self.is_going or not marks or marks[-1]["event"] == "run_started":
            return self.missing == 0
        ends = np.array([*self.rows["finished_at"], *(row["at"] for row in self.failures)])
        return bool(np.sum(ends > marks[-1]["at"]) >= int(marks[-1]["in_flight"]))

    def running(self, at: Any) -> Array:
        """Times of `watched` (any shape) in the time of all else."""
        return without(self.gaps, at)

    @property
    def stopped(self) -> str:
        """How long it was stopped in between; "" if never."""
        return f"stopped in between: {duration(float(np.diff(self.stops).sum()))}" if len(self.stops) else ""

    @property
    def stops(self) -> Array:
        """Those of `gaps` that a row was sent after: starts that made none do not make a run longer."""
        return np.asarray(self.gaps[self.running(self.gaps[:, 1]) <= self.rows["submitted_at"].max()])

    @property
    def began(self) -> float:
        """When the first request of its rows was sent; NaN without rows."""
        return float(self.rows["submitted_at"].min())

    @property
    def ended(self) -> float:
        """When the last answer of its rows arrived; NaN without rows."""
        return float(self.rows["finished_at"].max())


_Made = TypeVar("_Made")


def once(make: Callable[[RunData], _Made]) -> Callable[[RunData], _Made]:
    """Have what is made of a run made once: tables and figures share it, and none changes it."""

    @wraps(make)
    def made(data: RunData) -> _Made:
        if make.__name__ not in data.memo:
            data.memo[make.__name__] = make(data)
        found: _Made = data.memo[make.__name__]
        return found

    return made


def flags_of(fleet: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of a fleet's parameters under dfexp's names; the request cap of llama.cpp's is one too."""
    flags = fleet.get("flags") or {name: fleet[name] for name in ("max_running_requests",) if fleet.get(name)}
    return {own_name(name): value for name, value in flags.items()}


def load(folder: RunFolder, *, examples: int = 10, seed: int = 0) -> RunData:
    """Read a run in one pass over its shards, in about 100 bytes a row. Raises RunError when there is no run.

    The draw of `examples` depends on `seed` and the rows' indices alone, not on their order.
    """
    try:
        run = jsonl.read_json(folder.run_json)
    except FileNotFoundError:
        raise RunError(f"{folder.path} holds no run yet: run 03_generate first, or correct `run`.") from None
    clock, draw, damaged = _clock(folder, run), Draw(max(examples, _JUDGED), seed), Counter[str]()
    events = list(_records(folder.events, damaged, _NO_EVENT, _is_event))
    failed, asked = list(shards.read_failures(folder.completions)), int(run["prompts"]["asked"])
    rows = _framed(draw.passed(shards.read_rows(folder.completions, facts)), ROW)
    (samples, gpus), drawn = _samples(folder, damaged), draw.rows("")
    rows = rows.astype(dict.fromkeys(("server", "config_id", "flags"), "category"))
    rows["finished_at"] = rows["submitted_at"] + rows["latency_s"]
    if clock:
        rows, samples, gpus, events, failed = (_timed(clock.of, x) for x in (rows, samples, gpus, events, failed))
        rows["latency_s"] = rows["finished_at"] - rows["submitted_at"]
    elsewhere = sum(entry.rows for entry in shards.only_stored(folder.completions))
    begun = sorted(one["at"] for one in events if one["event"] == "run_started")
    for frame, sent in ((rows, "submitted_at"), (samples, "at")):
        frame["start"] = np.searchsorted(begun, frame[sent], "right").astype("int16")
    data = RunData(
        folder=folder, run=run, asked=asked, missing=asked - len(rows) - elsewhere - len(failed), elsewhere=elsewhere,
        rows=rows,
        busy_s=max(1e-9, levels(rows, 1)[2][-1]) if len(rows) else nan,  # a simulated clock may stand still

        status=control.read_status(folder), is_going=control.living_process(folder) is not None, samples=samples,
        gpus=gpus, is_virtual=clock is not None, failures=failed, watched=(), starts=((),),
        events=events, drawn=drawn, examples=sorted(drawn[:examples], key=itemgetter("index")), kept=draw.kept,
        gaps=pauses(rows, (samples, gpus), events), stamps=[one["at"] for one in events], damaged=damaged,
    )  # fmt: skip
    names = "rows", "samples", "gpus", "events", "failures"  # `watched` with pauses: what was steady ends there
    timed = {name: _timed(data.running, getattr(data, name)) for name in names}
    watched = _watched(data)
    return replace(data, watched=watched, starts=_starts(data, watched, len(begun)), **timed)


def _timed(of: Callable[[Any], Array], part: Any) -> Any:
    """A frame, or a list of records, with `of` its times."""
    if isinstance(part, list):
        return [{**line, "at": float(of(line["at"]))} for line in part]
    names = part.columns.intersection(["submitted_at", "finished_at", "at"])
    return part.assign(**{name: of(part[name].to_numpy()) for name in names})


def _clock(folder: RunFolder, run: Mapping[str, Any]) -> VirtualTime | None:
    """How time passed on simulated servers; None: the time is real, or nobody kept it."""
    fleet = run["spec"].get("fleet") or {}
    path = FleetFolder(folder.path.parent / "fleets" / (fleet.get("name") or folder.name)).path / CLOCK
    clock = VirtualTime.read(path) if fleet.get("engine") == SIMULATED else None
    return clock if clock is not None and len(clock.real_at) else None


def _framed(lines: Iterator[Sequence[Any]], types: Mapping[str, str]) -> pd.DataFrame:
    """Lines as a frame, in pieces, so that few of them are in memory as Python objects."""
    pieces = [pd.DataFrame([], columns=list(types)).astype(types)]
    while chunk := list(islice(lines, _PIECE)):
        columns = zip(types.items(), zip(*chunk, strict=True), strict=True)  # of known types: inference takes longer
        pieces.append(pd.DataFrame({name: pd.Series(column, dtype=of) for (name, of), column in columns}))
    return pd.concat(pieces, ignore_index=True)


def levels(rows: pd.DataFrame, most: float = np.inf) -> tuple[Array, Array, Array]:
    """Requests of finished rows in flight: when they change, how many from then on, and request-seconds until then.

    Args: most, requests that count at once.
    """
    times = np.concatenate([rows["submitted_at"], rows["finished_at"]])
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(np.repeat([1.0, -1.0], len(rows))[order])
    return times, level, np.append(0.0, np.cumsum(np.minimum(level, most)[:-1] * np.diff(times)))[: len(times)]


def _samples(folder: RunFolder, damaged: Counter[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Looks at servers, in order, and looks at GPUs."""
    looks = _framed(map(_PICK_LOOK, _records(folder.metrics, damaged, _NO_LOOK, _is_look)), SAMPLE | GPU)
    of_gpus, servers = looks["gpu"].notna(), list(SAMPLE)
    samples = looks.loc[~of_gpus, servers].astype({"server": "category"}).sort_values(["server", "at"], kind="stable")
    return samples, looks.loc[of_gpus, list(GPU)]


def _records(
    path: Path, damaged: Counter[str], empty: Mapping[str, Any], is_right: Callable[[Mapping[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that may be missing, laid over `empty`; those that are not right are counted."""
    if path.exists():
        with path.open("rb") as file:
            lines = ((path, number, line) for number, line in enumerate(jsonl.whole_lines(file), 1))
            while chunk := list(islice(lines, CHUNK)):
                found = [one for each in parsed(chunk, may_skip=True) if is_right(one := {**empty, **each})]
                damaged[path.name] += len(chunk) - len(found)
                yield from found


def _is_look(one: Mapping[str, Any]) -> bool:
    """Whether it is one at a server or a GPU, whose numbers are numbers."""
    is_named = type(one["server"]) is str or one["gpu"] is not None
    return is_named and one["at"] is not None and _NUMBERS.issuperset(map(type, _PICK_NUMBERS(one)))


def _is_event(one: Mapping[str, Any]) -> bool:
    return type(one["at"]) in (int, float) and type(one["event"]) is str and type(one["server"]) in (str, type(None))


def counted(tokens: pd.Series) -> float:
    """The sum of rows' tokens; NaN where some have no count, but for few: of a part it is no sum."""
    return nan if tokens.isna().mean() > _UNCOUNTED else float(tokens.sum())


def _watched(data: RunData) -> list[Watched]:
    """Each server that gave a row or a sample, or that the run's process looked after."""
    rows, samples = ({str(name): part for name, part in frame.groupby("server", observed=True)}
                     for frame in (data.rows, data.samples))  # fmt: skip
    told: dict[str, dict[str, Any]] = {each["name"]: each for each in (data.status or {}).get("servers", ())}
    kept, watched = data.run["spec"]["generation"].get("concurrency"), list[Watched]()
    bad = [each for each in data.rows["flags"].cat.categories if "garbage" in each.split(",")]  # else those judged here
    why = [garbage(row["text"][:_JUDGED_CHARACTERS], row["completion_tokens"]) for row in data.drawn]
    drawn = [row["server"] for row in data.drawn]
    judged = Counter(drawn), Counter(compress(drawn, why))
    rejects = {one["server"]: one for one in data.events if one["event"] == "server_rejects" and "rows" in one}
    for name in sorted(rows.keys() | samples.keys() | told.keys()):
        part, looks, server = rows.get(name, data.rows[:0]), samples.get(name, data.samples[:0]), told.get(name, {})
        rate = counted(part["completion_tokens"]) / max(1e-9, levels(part, 1)[2][-1]) if len(part) else nan
        watched.append(Watched(
            name=name, samples=_thinned(looks), flags=flags_of(data.fleet), limits=_limits(looks, server),
            limit=server.get("limit") or (None if kept == "auto" else kept),
            state=server.get("state", "ready") if data.is_going else "ready",
            request_s=float(part["latency_s"].mean()) if len(part) else None,
            tok_per_s=None if isnan(rate) else rate,
            answers=len(part) if bad else judged[0][name],
            garbage=int(part["flags"].isin(bad).sum()) if bad else judged[1][name],
            rejected=rejects.get(name, {}).get("rows", 0), rejection=str(rejects.get(name, {}).get("detail", "")),
        ))  # fmt: skip
    return watched


def _starts(data: RunData, watched: Sequence[Watched], last: int) -> list[list[Watched]]:
    """`RunData.starts`. Args: last, the number of the last start, that of the first being 1."""
    sizes = [frame.groupby(["start", "server"], observed=True).size() for frame in (data.rows, data.samples)]
    seen = pd.concat([size.reset_index(name="lines").astype({"server": str}) for size in sizes]).groupby("start")
    lines, names = seen["lines"].sum(), {start: set(part["server"]) for start, part in seen}
    if last in names:
        names[last] |= {each["name"] for each in (data.status or {}).get("servers", ())}
    order = sorted(names, key=lambda start: (data.is_going and start == last, lines[start], start), reverse=True)
    return [[each for each in watched if each.name in names[start]] for start in order] or [[*watched]]


def _thinned(part: pd.DataFrame) -> list[EngineSample]:
    """Samples of one server, at most `_WATCHED` of them, the last one always."""
    kept = part.iloc[:: -max(1, -(-len(part) // _WATCHED))].iloc[::-1]
    lines: Any = kept[list(SAMPLE)].to_dict("records")
    return [EngineSample(**{name: value for name, value in line.items() if value == value}) for line in lines]


def _limits(part: pd.DataFrame, server: Mapping[str, Any]) -> ServerLimits:
    """The room of a server as its samples said last; its request cap also as the run's process knew it."""
    last = part[list(SAMPLE)[1:]].ffill().tail(1).sum(min_count=1)  # NaN where it never said anything
    slots = last["mamba_used_tokens"] + last["mamba_available_tokens"] + last["mamba_evictable_tokens"]
    sizes = [int(size) if size > 0 else None for size in (last["max_total_num_tokens"], slots)]
    cap = server.get("cap") if pd.isna(last["max_running_requests"]) else int(last["max_running_requests"])
    return ServerLimits(max_running_requests=cap, max_total_num_tokens=sizes[0], max_mamba_cache_size=sizes[1])
