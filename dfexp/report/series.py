"""What a run did over time, and its rates in one window: each counts one thing, and the gaps between them are told."""

from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from dfexp.diagnose import phase
from dfexp.estimate import Array, Samples, away, client_rate, reconcile, server_rate, tokens_in_flight
from dfexp.report.data import RunData, counted, levels, once

REQUESTS = {"num_running_reqs": "running", "num_queue_reqs": "queued"}
POOLS = {"full_token_usage": "KV usage", "mamba_usage": "state usage"}
"""What tables and figures say for the gauges of servers that they show."""
GPUS = {
    "utilization": ("utilisation", "share"), "memory_used_bytes": ("memory in use", "GiB"), "power_w": ("power", "W"),
    "sm_clock_mhz": ("SM clock", "MHz"),
}  # fmt: skip
"""What is shown of a GPU's samples: words, and the unit."""
LIMITED = {
    "slowed": ("slowed by heat or hardware", {"hardware slowdown", "thermal", "hardware thermal", "power brake"}),
    "power_capped": ("at its power cap", {"power cap"}),
}  # fmt: skip
"""Why clocks are low: words, and reasons as samples have them. Of these the first is a fault; being idle is none."""
SERVERS, CLIENT = "the servers' counters", "finished rows and what was in flight"
_NICE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_BINS = 40
_FULL = 0.9  # of the most requests that were ever in flight: neither a ramp nor a tail
_LEAST_S = 15.0  # of a window
WHOLE, _LOOKS = "from the first request to the last answer", 8  # of fewer looks at a server its medians tell nothing
_RATES = ("server", "client", "in_flight", "unexplained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Rates of all servers together in one window, in completion tokens/s; NaN is not known.

    Attributes:
        start, end: in the run's time; `words` say what window that is.
        server, client, in_flight, unexplained: as `estimate.Reconciled` has them.
    """

    start: float
    end: float
    words: str
    server: float
    client: float
    in_flight: float
    unexplained: float

    @property
    def decoded(self) -> float:
        """The rate at which tokens were made: by the servers' counters, else by rows, which grow evenly."""
        return self.client + self.in_flight if np.isnan(self.server) else self.server

    @property
    def source(self) -> str:
        """Where `decoded` is from: rates from different sources are not compared."""
        return CLIENT if np.isnan(self.server) else SERVERS


@once
def flight(data: RunData) -> tuple[Array, Array, Array]:
    """`levels` of all rows."""
    return levels(data.rows)


@once
def steady(data: RunData) -> Measured:
    """The time in which most servers were in a steady state; without samples, or without one, the client's or all."""
    phases = [phase(each, may_drain=not data.is_going) for each in data.starts[0]]
    found, window = [samples for kind, samples in phases if kind == "steady"], None
    times, level, _ = flight(data)
    if found and 2 * len(found) >= len(phases):
        start, end = data.running([(part[0].at, part[-1].at) for part in found]).T
        window = float(start.max()), float(end.min())
        words = "steady state, found in the servers' samples"
    if (window is None or window[1] - window[0] < _LEAST_S) and len(times):
        window, words = _full(times, level), f"at least {_FULL:.0%} of the most requests in flight"
    if window is None or window[1] - window[0] < _LEAST_S:
        window, words = (data.began, data.ended), WHOLE
    start, end, known = *window, known_until(data)
    end = known if start + _LEAST_S <= known < end else end
    return Measured(start=start, end=end, words=words, **_rates(data, start, end))


def _full(times: Array, level: Array) -> tuple[float, float]:
    """The first and the last moment with nearly the most requests in flight."""
    full = times[level >= _FULL * level.max()]
    return float(full[0]), float(full[-1])


def known_until(data: RunData) -> float:
    """Until when all requests are known: those that are still open, or were cut off at the end, are in no file."""
    return data.ended - (0.0 if data.is_settled else float(data.rows["latency_s"].max()))


def _rates(data: RunData, start: float, end: float) -> dict[str, float]:
    """The four rates of a window; beyond what is known of the requests the servers' alone."""
    rates, counters = dict.fromkeys(_RATES, np.nan), _counters(data)
    sent, ended = (data.rows[name].to_numpy() for name in ("submitted_at", "finished_at"))
    tokens = data.rows["completion_tokens"]
    rows = sent, ended, tokens.fillna(0.0 * counted(tokens)).to_numpy()  # NaN: not known
    if not end > start:
        return rates
    if end > known_until(data):
        only = server_rate(counters, start, end)
        return rates | {"server": only.value if only else np.nan}
    if found := reconcile(counters, rows, start, end, uncounted=int(data.engine != "llamacpp")):
        return asdict(found)
    grown = tokens_in_flight(rows, end) - tokens_in_flight(rows, start)
    return rates | {"client": client_rate(rows, start, end), "in_flight": grown / (end - start)}


def server_rates(data: RunData, found: Measured) -> list[float | None]:
    """Completion tokens/s of each server in a window, by its counter; None without one."""
    rates = [server_rate([counter], found.start, found.end) for counter in _counters(data)]
    return [rate.value if rate else None for rate in rates]


def _counters(data: RunData) -> list[Samples]:
    """Each server's counter; of one that went down and never came back, or that a later start did not have, it is known
    that it made nothing more.
    """
    lasts = {one["server"]: one["event"] for one in data.events if one["event"] in ("server_down", "server_back")}
    pairs = {each.name: (data.running([one.at for one in each.samples]).tolist(),
                         [one.realtime_decode_tokens_total for one in each.samples])
             for each in data.watched}  # fmt: skip
    starts = data.samples.groupby(data.samples["server"].astype(str))["start"].max()
    gone = {*starts.index[starts < starts.max()], *(name for name, last in lasts.items() if last == "server_down")}
    return [away(pair, data.ended) if name in gone else pair for name, pair in pairs.items()]


@once
def edges(data: RunData) -> Array:
    """Edges of some 40 bins of a round width, from the first request to the last answer, each with two looks at every
    server. The last bin takes in what is left over, so that it is half to one and a half times as wide.
    """
    span_s = max(1.0, data.ended - data.began)  # NaN is no more than 1
    apart_s = data.samples.groupby("server", observed=True)["at"].diff().median() if len(data.samples) else 0.0
    least_s = 0.0 if np.isnan(apart_s) else 1.9 * apart_s  # looks are a little late
    width_s = next((width for width in _NICE_S if span_s / width <= _BINS and width >= least_s), _NICE_S[-1])
    return data.began + np.append(width_s * np.arange(max(1.0, np.round(span_s / width_s))), span_s)


def _binned(data: RunData, at: pd.Series) -> pd.Series:
    """The start of each moment's bin, to which its end belongs, in seconds since the first request."""
    places = edges(data)
    return pd.Series(places[np.searchsorted(places[1:-1], at)] - data.began, at.index, name="start_s")


def _widths(data: RunData, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with `width_s` of the bin of each line's `start_s`."""
    starts_s, widths_s = edges(data) - data.began, np.diff(edges(data))
    return frame.assign(width_s=widths_s[np.searchsorted(starts_s[1:-1], frame["start_s"] + 1e-6, "right")])


@once
def throughput(data: RunData) -> pd.DataFrame:
    """Client rates per server and bin, by when answers finished; `start_s` and `width_s` since the first request."""
    by = data.rows.groupby(["server", _binned(data, data.rows["finished_at"])], observed=True)["completion_tokens"]
    sums = pd.DataFrame({"completion_tok_per_s": by.sum(min_count=1), "rows_per_s": by.size()}).reset_index()
    sums = _widths(data, sums)
    sums[["completion_tok_per_s", "rows_per_s"]] = sums[["completion_tok_per_s", "rows_per_s"]].div(sums["width_s"], 0)
    return sums.astype({"server": str})


@once
def rates(data: RunData) -> pd.DataFrame:
    """The rates of each bin, all servers together, in completion tokens/s, under the names of `estimate.Reconciled`."""
    bins = [] if data.rows.empty else list(pairwise(edges(data)))
    lines = [(start - data.began, end - start, *_rates(data, start, end).values()) for start, end in bins]
    return pd.DataFrame(lines, columns=["start_s", "width_s", *_RATES])


@once
def in_flight(data: RunData) -> pd.DataFrame:
    """Requests in flight, as far as all are known: the mean of each bin."""
    (times, _, spent), places = flight(data), edges(data)
    if not len(times):
        return pd.DataFrame(columns=["start_s", "width_s", "requests"], dtype=float)
    places = np.append(places[places < known_until(data)], known_until(data))
    means = np.diff(np.interp(places, times, spent)) / np.diff(places)
    return pd.DataFrame({"start_s": places[:-1] - data.began, "width_s": np.diff(places), "requests": means})


@once
def gauges(data: RunData) -> pd.DataFrame:
    """What servers said, means by bin: requests of all of them together, usages of the mean server."""
    looks = data.samples[data.samples["at"].between(data.began, data.ended)]
    by = looks.groupby([_binned(data, looks["at"]), "start", "server"], observed=True)
    means = by[[*REQUESTS, *POOLS]].mean().groupby(["start_s", "start"])  # servers of two starts were not there at once
    found = means[list(REQUESTS)].sum(min_count=1).join(means[list(POOLS)].mean()).groupby("start_s").mean()
    return _widths(data, found.reset_index())


@once
def gpus(data: RunData) -> pd.DataFrame:
    """What GPUs did, by bin: the mean GPU, the lowest and the highest; of `LIMITED` they are shares of samples."""
    looks = data.gpus[data.gpus["at"].between(data.began, data.ended)].assign(**limited(data))
    looks["memory_used_bytes"] /= 2**30
    means = looks.groupby([_binned(data, looks["at"]), "gpu"])[[*GPUS, *LIMITED]].mean()
    found = means.groupby("start_s").agg(["mean", "min", "max"])
    found.columns = found.columns.map(" ".join).str.replace("_bytes", "_gib")
    return _widths(data, found.reset_index())


def limited(data: RunData) -> dict[str, pd.Series]:
    """For each look at a GPU whether its clocks were limited in either way of `LIMITED`; NaN: it did not say."""
    pairs = zip(data.gpus["throttle_reasons"], data.gpus["clock_limits"], strict=True)
    told = [None if faults is None else {*faults, *(others or ())} for faults, others in pairs]
    return {
        name: pd.Series([np.nan if words is None else float(bool(kinds & words)) for words in told], data.gpus.index)
        for name, (_, kinds) in LIMITED.items()
    }


def medians(data: RunData, found: Measured) -> pd.DataFrame:
    """What each server said in a window: a line a server, medians of its gauges, under their words. NaN where these are
    few and there was no steady state: most are of the ramp.
    """
    inside, words = data.samples[data.samples["at"].between(found.start, found.end)], REQUESTS | POOLS
    by = inside.groupby(inside["server"].astype(str))[list(words)]
    return by.median().where(by.count() >= (_LOOKS if found.words == WHOLE else 1)).rename(columns=words)


def occupied(data: RunData) -> pd.DataFrame:
    """Start, middle and end of a run: its seconds, and the share of the servers' slots that requests took up.

    The middle is from the first to the last moment with nine tenths of the most requests in flight. Where no server
    says how many it decodes at once, the most in flight are the slots. A run with missing rows has no end yet.
    """
    times, level, _ = flight(data)
    if not len(times):
        return pd.DataFrame(columns=["part", "seconds", "slots", "occupied"])
    slots = data.slots or level.max()
    cuts = np.array([times[0], *_full(times, level), times[-1]])
    cuts = cuts if data.is_settled else np.append(cuts[:2], max(cuts[1], min(cuts[2], known_until(data))))
    used, names = np.diff(np.interp(cuts, times, levels(data.rows, slots)[2])), ["start", "middle", "end"]
    parts = pd.DataFrame({"part": names[: len(used)], "seconds": np.diff(cuts), "slots": slots})
    return parts.assign(occupied=used / np.maximum(parts["seconds"] * slots, 1e-9))
