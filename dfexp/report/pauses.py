"""When no process of a run ran: the time between two starts, or that a clock jumped over, is no time of the run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dfexp.estimate import Array

_LOOKS, _LEAST_S, _APART_S = 10, 60.0, 60.0  # missing looks are a pause; it is so long; without looks they are so far
_SOON_S = 10.0  # from a process' first event to that which says that it has started


def pauses(rows: pd.DataFrame, looks: Sequence[pd.DataFrame], events: Sequence[Mapping[str, Any]]) -> Array:
    """From when to when nothing was in flight, looked at or told: before each start, and wherever that is long, unless
    servers were down, for which a run waits. One line each, in the time of its arguments, none before the first row.

    Args: looks, of servers, then others, each with `at`.
    """
    at = np.concatenate([*(frame["at"].to_numpy() for frame in looks), [one["at"] for one in events]])
    begins, ends = (np.concatenate([rows[name].to_numpy(), at]) for name in ("submitted_at", "finished_at"))
    order = np.argsort(begins)
    gaps = np.column_stack([np.maximum.accumulate(ends[order])[:-1], begins[order][1:]])
    gaps = gaps[(gaps[:, 1] > gaps[:, 0]) & (gaps[:, 0] >= rows["submitted_at"].min())]
    apart_s = looks[0].groupby("server", observed=True)["at"].diff().median() if len(looks[0]) else np.nan
    most_s = max(_LEAST_S, _LOOKS * (_APART_S if np.isnan(apart_s) else apart_s))
    starts = np.append(sorted(one["at"] for one in events if one["event"] == "run_started"), np.inf)
    is_start = starts[np.searchsorted(starts, gaps[:, 1])] <= gaps[:, 1] + _SOON_S
    is_long = [end - start > most_s and not _waits(events, start) for start, end in gaps]
    return np.asarray(gaps[is_start | np.array(is_long, dtype=bool)])


def _waits(events: Sequence[Mapping[str, Any]], at: float) -> bool:
    """Whether a server was down then."""
    kinds = "server_down", "server_back", "run_started"
    before = [one for one in events if one["at"] <= at and one["event"] in kinds]
    starts = [place for place, one in enumerate(before, 1) if one["event"] == "run_started"]
    return "server_down" in {one["server"]: one["event"] for one in before[max(starts, default=0) :]}.values()


def without(gaps: Array, at: Any) -> Array:
    """Times (of any shape) as they were without the pauses; in one they stand still."""
    lengths = np.append(0.0, np.cumsum(np.diff(gaps)))
    left_out = np.column_stack([lengths[:-1], lengths[1:]])
    return np.asarray(at, float) - (np.interp(at, gaps.ravel(), left_out.ravel()) if len(gaps) else 0.0)
