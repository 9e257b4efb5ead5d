"""A run's files as frames, in the time that its servers had: rows without texts, samples, events.

Of simulated servers all times are virtual seconds, which the fleet's clock.jsonl maps real ones to; of all others they
are seconds since the Unix epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from heapq import nsmallest
from itertools import islice
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dfexp import control, jsonl, shards
from dfexp.capacity.flags import own_name
from dfexp.diagnose import Watched
from dfexp.errors import RunError
from dfexp.estimate import Array
from dfexp.jsonl import parse_line
from dfexp.layout import FleetFolder, RunFolder
from dfexp.records import SIMULATED, EngineSample, ServerLimits
from dfexp.virtual_time import CLOCK, VirtualTime

ROW = {
    "index": "int64", "server": "object", "config_id": "object", "finish_reason": "object",
    "prompt_tokens": "float64", "completion_tokens": "float64", "attempt": "int64", "submitted_at": "float64",
    "latency_s": "float64", "flags": "object",
}  # fmt: skip
SAMPLE = {"server": "object"} | {each.name: "float64" for each in fields(EngineSample) if each.name != "server"}
GPU = dict.fromkeys(("utilization", "memory_used_bytes", "power_w", "sm_clock_mhz"), "float64")
GPU |= {"gpu": "object", "at": "float64", "throttle_reasons": "object"}
_PICK = itemgetter(*list(ROW)[:-1])
_CHUNK = 100  # rows that are in memory together with their texts: more fit into no cache
_PIECE = 20_000  # lines that become a piece of a frame
_WATCHED = 2_000  # samples of a server that are judged: of 62 h one every two minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a report is made of.

    Attributes:
        run: run.json.
        asked, missing: rows that the run is to make; those neither done nor failed yet.
        status: what the generating process said last; None if it never said anything.
        is_going: whether that process runs, so that more rows are in flight than anybody can see here.
        is_virtual: whether times are those of simulated servers.
        rows: one line per completion, without texts; counts that a server did not give are NaN, never zero.
        busy_s: time in which at least one request of `rows` was in flight; NaN without rows.
        samples: one line per look at a server, `EngineSample` by column; NaN is what it did not say.
        watched: for each server its samples, evenly thinned to `_WATCHED`, and what is known of it.
        gpus: one line per look at a GPU, as metrics.jsonl has it.
        examples: whole rows, drawn at random, by index.
    """

    folder: RunFolder
    run: Mapping[str, Any]
    asked: int
    missing: int
    status: Mapping[str, Any] | None
    is_going: bool
    is_virtual: bool
    rows: pd.DataFrame
    busy_s: float
    samples: pd.DataFrame
    watched: Sequence[Watched]
    gpus: pd.DataFrame
    failures: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    examples: Sequence[Mapping[str, Any]]

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
        flags, servers = flags_of(self.fleet), int(self.fleet.get("servers") or len(self.watched) or 1)
        if self.engine not in ("sglang", "simulated") or self.fleet.get("device") == "cpu":
            return servers, "server"
        return servers * int(flags.get("tp_size", 1)) * int(flags.get("pp_size", 1)), "GPU"

    @property
    def slots(self) -> int | None:
        """Requests that its servers decode at once, all together; None if one does not say."""
        caps = [each.limits.max_running_requests for each in self.watched]
        return sum(filter(None, caps)) if caps and None not in caps else None

    @property
    def is_settled(self) -> bool:
        """Whether every request that was sent is over: rows are no sample of the short ones."""
        marks = [one for one in self.events if one["event"] in ("run_started", "stop_asked")]
        if self.missing == 0 or self.is_going or not marks or marks[-1]["event"] == "run_started":
            return self.missing == 0
        ends = np.array([*self.rows["finished_at"], *(row["at"] for row in self.failures)])
        return bool(np.sum(ends > marks[-1]["at"]) >= int(marks[-1]["in_flight"]))

    @property
    def began(self) -> float:
        """When the first request of its rows was sent; NaN without rows."""
        return float(self.rows["submitted_at"].min())

    @property
    def ended(self) -> float:
        """When the last answer of its rows arrived; NaN without rows."""
        return float(self.rows["finished_at"].max())


def flags_of(fleet: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of a fleet's parameters under dfexp's names."""
    return {own_name(name): value for name, value in (fleet.get("flags") or {}).items()}


def load(folder: RunFolder, *, examples: int = 10, seed: int = 0) -> RunData:
    """Read a run in one pass over its shards, in about 100 bytes a row. Raises RunError when there is no run.

    The draw of `examples` depends on `seed` and the rows' indices alone, not on their order.
    """
    try:
        run = jsonl.read_json(folder.run_json)
    except FileNotFoundError:
        raise RunError(f"{folder.path} holds no run yet: run 03_generate first, or correct `run`.") from None
    clock, draw, events = _clock(folder, run), _Draw(examples, seed), list(jsonl.read_log(folder.events))
    failed, asked = list(shards.read_failures(folder.completions)), int(run["prompts"]["asked"])
    rows, (samples, gpus) = _framed(draw.passed(shards.read_rows(folder.completions, _facts)), ROW), _samples(folder)
    rows = rows.astype(dict.fromkeys(("server", "config_id", "flags"), "category"))
    rows["finished_at"] = rows["submitted_at"] + rows["latency_s"]
    if clock:
        for frame in (rows, samples, gpus):
            for column in frame.columns.intersection(["submitted_at", "finished_at", "at"]):
                frame[column] = clock.of(frame[column].to_numpy())
        rows["latency_s"] = rows["finished_at"] - rows["submitted_at"]
        events, failed = ([{**line, "at": float(clock.of(line["at"]))} for line in lines] for lines in (events, failed))
    data = RunData(
        folder=folder, run=run, asked=asked, missing=asked - len(rows) - len(failed), rows=rows,
        busy_s=max(1e-9, levels(rows, 1)[2][-1]) if len(rows) else nan,  # a simulated clock may stand still

        status=control.read_status(folder), is_going=control.living_process(folder) is not None, samples=samples,
        gpus=gpus, is_virtual=clock is not None, failures=failed, watched=(),
        events=events, examples=sorted((jsonl.decode_line(row["line"]) for row in draw.kept), key=itemgetter("index")),
    )  # fmt: skip
    return replace(data, watched=_watched(data))


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


def _facts(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """A row without messages and text, which are most of it, and the line itself.

    What is sought can stand in no text: there every quotation mark comes after a backslash.
    """
    start, is_ours = line.rfind(b',"finish_reason":') + 1, line.startswith(b'{"index":')
    if not (start and is_ours):
        return {**parse_line(path, number, line), "line": line}
    index = int(line[9 : line.index(b",")])
    return {**parse_line(path, number, b"{" + line[start:]), "index": index, "line": line}


class _Draw:
    """Passes rows on without their texts, and keeps some whole ones."""

    def __init__(self, number: int, seed: int) -> None:
        self._number, self._seed, self.kept = number, seed, list[dict[str, Any]]()

    def passed(self, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
        """The values of `ROW` for each row."""
        while chunk := list(islice(rows, _CHUNK)):
            self.kept = nsmallest(self._number, [*self.kept, *chunk], key=self._place)
            yield from ((*_PICK(row), ",".join(row["flags"])) for row in chunk)

    def _place(self, row: Mapping[str, Any]) -> bytes:
        return blake2b(f"{self._seed}:{row['index']}".encode()).digest()


def levels(rows: pd.DataFrame, most: float = np.inf) -> tuple[Array, Array, Array]:
    """Requests of finished rows in flight: when they change, how many from then on, and request-seconds until then.

    Args: most, requests that count at once.
    """
    times = np.concatenate([rows["submitted_at"], rows["finished_at"]])
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(np.repeat([1.0, -1.0], len(rows))[order])
    return times, level, np.append(0.0, np.cumsum(np.minimum(level, most)[:-1] * np.diff(times)))[: len(times)]


def _samples(folder: RunFolder) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Looks at servers, in order, and looks at GPUs."""
    types = SAMPLE | GPU
    looks = _framed(([line.get(name) for name in types] for line in jsonl.read_log(folder.metrics)), types)
    of_gpus, servers = looks["gpu"].notna(), list(SAMPLE)
    samples = looks.loc[~of_gpus, servers].astype({"server": "category"}).sort_values(["server", "at"], kind="stable")
    return samples, looks.loc[of_gpus, list(GPU)]


def _watched(data: RunData) -> list[Watched]:
    """Each server that gave a row or a sample, or that the run's process looked after."""
    rows, samples = ({str(name): part for name, part in frame.groupby("server", observed=True)}
                     for frame in (data.rows, data.samples))  # fmt: skip
    told: dict[str, dict[str, Any]] = {each["name"]: each for each in (data.status or {}).get("servers", ())}
    kept, watched = data.run["spec"]["generation"].get("concurrency"), list[Watched]()
    for name in sorted(rows.keys() | samples.keys() | told.keys()):
        part, looks, server = rows.get(name, data.rows[:0]), samples.get(name, data.samples[:0]), told.get(name, {})
        watched.append(Watched(
            name=name, samples=_thinned(looks), flags=flags_of(data.fleet), limits=_limits(looks, server),
            limit=server.get("limit") or (None if kept == "auto" else kept), answers=len(part),
            state=server.get("state", "ready") if data.is_going else "ready",
            request_s=float(part["latency_s"].mean()) if len(part) else None,
            garbage=int(part["flags"].astype(str).str.contains("garbage").sum()),
        ))  # fmt: skip
    return watched


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
