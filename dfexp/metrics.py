"""What servers say of themselves while they work -> `EngineSample`: pages of /metrics and lines of logs. Pure.

SGLang 0.5.12 to 0.5.23 and the pages of older versions, and llama.cpp's /metrics. Its request cap SGLang tells on no
page of metrics: it is in `ServerLimits`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, tzinfo
from itertools import pairwise
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

from dfexp.records import EngineSample

_SERIES = {f"sglang:{field.name}": field.name for field in fields(EngineSample) if field.name not in ("at", "server")}
_SERIES |= {
    "llamacpp:requests_processing": "num_running_reqs",
    "llamacpp:requests_deferred": "num_queue_reqs",
    "llamacpp:kv_cache_usage_ratio": "full_token_usage",  # older versions alone, like the next
    "llamacpp:kv_cache_tokens": "kv_used_tokens",
    "llamacpp:prompt_tokens_total": "prompt_tokens_total",  # without those that were cached
    "llamacpp:tokens_predicted_total": "generation_tokens_total",
}
COUNTERS = ("num_requests_total", "realtime_decode_tokens_total", "realtime_prefill_tokens_total")
"""Of work that was done, since the server started."""
_CAP = "max_running_requests"
_LIVE, _MODES = "sglang:realtime_tokens_total", {"decode": "decode", "prefill_compute": "prefill"}
_NAMES = _SERIES.keys() | {_LIVE}
_FRACTIONS = ("_usage", "_rate")
_LONGEST = 10_000  # characters of a line; a real one has a few hundred, and labels without end take minutes to parse

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
# Between time and words a logger may put its level and place, but no sentence: requests that are logged quote anything.
_LINE = re.compile(
    r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)([^\]]*)\] "
    r"(?:[A-Z]+:? +)?(?:[\w./]+:\d+:? +)?(?:- )?(Prefill batch|Decode batch|[^\['\"]*(?=#retracted_reqs:))(.*)"
)
_PAIR = re.compile(r"([^,:]+): (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
_LOGGED = {
    "#running-req": "num_running_reqs",
    "#queue-req": "num_queue_reqs",
    "gen throughput (token/s)": "gen_throughput",
    "#token": "kv_used_tokens",
    "#full token": "kv_used_tokens",
    "token usage": "full_token_usage",
    "full token usage": "full_token_usage",
    "mamba num": "mamba_used_tokens",
    "mamba usage": "mamba_usage",
    "#retracted_reqs": "num_retracted_reqs",
}
_POOLS = ("token usage", "full token usage", "swa token usage", "mamba usage")


def from_metrics(text: str, *, at: float, server: str) -> EngineSample | None:
    """What a page of /metrics says; None of a page without a number of ours (empty, HTML, another program's).

    Lines that do not parse say nothing. What NaN, an infinity or a negative number is a part of is left out, as is,
    on a page that was cut off, what the cut line belongs to: a sum without a part is wrong.

    Args: text, Prometheus text, whose last line ends with a line feed; at, when it was read (epoch seconds).
    """
    values = _combined(_series(text))
    slots = [values.get(f"mamba_{state}_tokens") for state in ("used", "available", "evictable")]
    if not any(slots) and None not in slots:  # a model without a state pool, of which SGLang says zeros
        values = {name: value for name, value in values.items() if not name.startswith("mamba_")}
    return EngineSample.from_json({**values, "at": at, "server": server}) if values else None


def from_log_line(line: str, *, server: str, tz: tzinfo | None = None) -> EngineSample | None:
    """What one line of a log says, of one rank; None unless it tells of a prefill, of decoding or of a retraction.

    `num_retracted_reqs` is what a retraction says; `token_usage` the fullest of the pools that the line has.
    `cache_hit_rate` is the prefill's own, while the gauge of 0.5.23 leaves out what was retracted before.

    Args: tz, the time zone of the server's clock; this machine's where none is given.
    """
    read = _Line.read(line, tz)
    return EngineSample.from_json({**read.values, "at": read.at, "server": server}) if read else None


def from_log(text: str, *, server: str, tz: tzinfo | None = None) -> list[EngineSample]:
    """All that a log says, a sample for each line that `from_log_line` reads, the last line only when it is whole.

    Of ranks that repeat each other (TP, PP) the first is read. Of data-parallel ranks each sample adds up the last
    lines of the same kind. Retractions are counted from the log's beginning: None before the first.
    """
    first: dict[str, str] = {}
    latest: dict[str, dict[str, dict[str, float]]] = {}
    retracted, samples = 0.0, []
    for line in text.split("\n")[:-1]:
        read = _Line.read(line, tz)
        if read is None or first.setdefault(read.dp, read.rank) != read.rank:
            continue
        values = read.values
        if "num_retracted_reqs" in values:
            retracted += values["num_retracted_reqs"]
        else:
            by_rank = latest.setdefault(read.kind, {})
            by_rank[read.dp] = values
            values = _combined(
                (name, {"dp_rank": dp}, value) for dp, said in by_rank.items() for name, value in said.items()
            )
        counted = {"num_retracted_requests_total": retracted or None}
        samples.append(EngineSample.from_json({**values, **counted, "at": read.at, "server": server}))
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of a log: epoch seconds, data-parallel rank, all ranks as they are written, kind, values of a sample."""

    at: float
    dp: str
    rank: str
    kind: str
    values: dict[str, float]

    @classmethod
    def read(cls, line: str, tz: tzinfo | None) -> _Line | None:
        if not (match := _LINE.search(_COLOUR.sub("", line))):
            return None
        said = {key.rpartition(". ")[2].strip(): float(value) for key, value in _PAIR.findall(match[4])}
        values = {_LOGGED[key]: value for key, value in said.items() if key in _LOGGED}
        if pools := [said[pool] for pool in _POOLS if pool in said]:
            values["token_usage"] = max(pools)
        cached, computed = said.get("#cached-token"), said.get("#new-token", 0.0)
        if cached is not None and cached + computed:
            values["cache_hit_rate"] = cached / (cached + computed)
        with contextlib.suppress(ValueError, OverflowError):  # no date that there is
            at = datetime.fromisoformat(match[1]).replace(tzinfo=tz).timestamp()
            dp = re.search(r"\bDP\d+", match[2])
            return cls(at=at, dp=dp[0] if dp else "", rank=match[2], kind=match[3], values=values) if values else None
        return None


def stretches(busy: Sequence[EngineSample], *, idle_s: float) -> list[Sequence[EngineSample]]:
    """Samples of one server at work, cut where it began again or got another request cap, had nothing to do for more
    than `idle_s`, or nobody looked.
    """
    gaps, cuts, last = [0.0, *(after.at - before.at for before, after in pairwise(busy))], [0], dict[str, float]()
    most_s = max(idle_s, 6 * median(gaps[1:] or gaps))
    for place, each in enumerate(busy):
        said = {name: value for name in (*COUNTERS, _CAP) if (value := getattr(each, name)) is not None}
        is_new = any(value < last.get(name, value) for name, value in said.items())
        is_new |= said.get(_CAP, 0.0) > last.get(_CAP, said.get(_CAP, 0.0))
        cuts += [place] * (is_new or gaps[place] > most_s)
        last = said if is_new else last | said
    return [busy[start:end] for start, end in pairwise([*cuts, len(busy)]) if busy]


def _series(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Field, labels and value of each series of ours. Picked by name first: parsing a whole page takes 13 to 33 ms."""
    *lines, cut = text.split("\n")
    torn = _name(cut)
    for line in lines:
        name = _name(line)
        if name not in _NAMES or (torn and name.startswith(torn)) or len(line) > _LONGEST:
            continue
        with contextlib.suppress(ValueError):
            for sample in (s for family in text_string_to_metric_families(line) for s in family.samples):
                mode = _MODES.get(sample.labels.get("mode", ""))
                field = _SERIES.get(name) or (f"realtime_{mode}_tokens_total" if mode else "")
                if field:
                    yield field, sample.labels, sample.value if 0 <= sample.value < math.inf else -1.0


def _name(line: str) -> str:
    return next(iter(line.partition("{")[0].split(maxsplit=1)), "")


def _combined(series: Iterable[tuple[str, Mapping[str, str], float]]) -> dict[str, float]:
    """One value for each field, out of all its series.

    Ranks that repeat each other say the same at slightly different times: the highest counts. Data-parallel ranks and
    models add up, fractions excepted. A counter adds up over all other labels. A gauge with priorities has its total at
    "", where a counter has the requests without a priority. -1 is no number: none of its ranks' may be missing.
    """
    parts: dict[str, dict[tuple[str, ...], float]] = {}
    for field, labels, value in series:
        held, part = parts.setdefault(field, {}), _part(labels, is_counter=field.endswith("_total"))
        held[part] = max(value, held.get(part, value))
    values = {}
    for field, held in parts.items():
        whole = [value for part, value in held.items() if not part[0] or ("", *part[1:]) not in held]
        if min(whole) >= 0:
            values[field] = max(whole) if field.endswith(_FRACTIONS) else sum(whole)
    return values


def _part(labels: Mapping[str, str], *, is_counter: bool) -> tuple[str, ...]:
    """Which part of a field a series is: priority of a gauge, data-parallel rank, model; of a counter all labels."""
    dp, model = labels.get("dp_rank", ""), labels.get("model_name", "")
    if not is_counter:
        return labels.get("priority", ""), dp, model
    own = sorted(f"{name}={value}" for name, value in labels.items() if name != "pid" and not name.endswith("_rank"))
    return "", dp, *own
