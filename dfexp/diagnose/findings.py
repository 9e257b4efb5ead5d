"""What is diagnosed, and what is found: a server over some time, what the plan says of it, a finding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dfexp.capacity.planner import Plan, Setting
from dfexp.records import EngineSample, ServerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One server over the time that is judged: the last minutes, or a whole run.

    Attributes:
        samples: in order of time, of pages of /metrics or of lines of a log.
        flags: what it was started with, under any spelling; servers with the same ones are siblings.
        state: of its lane, at the end; what one that is not ready does is not judged: it is away, or being changed.
        limit: requests that the client keeps there at the most.
        long_in_flight: requests that are there at the end and were sent `STALLED_S` before it, or earlier.
        request_s: mean seconds of a request: a ramp's where counters and `kv_used_tokens` are not told (logs begin it).
        finished: answers so far; where it tells no rate either a ramp ends when they are more than run, or at the cap.
        answers, garbage: answers of that time, and how many of them were flagged as garbage.
        rejected, rejection: rows in a row that it did not take while another server served or was waited for, and its
            words for the last.
        tok_per_s: of these answers, by the client; tells where the server tells no rate.
    """

    name: str
    samples: Sequence[EngineSample] = ()
    limits: ServerLimits = field(default_factory=ServerLimits)
    flags: Mapping[str, Any] = field(default_factory=dict)
    state: str = "ready"
    limit: int | None = None
    long_in_flight: int = 0
    request_s: float | None = None
    finished: int = 0
    answers: int = 0
    garbage: int = 0
    rejected: int = 0
    rejection: str = ""
    tok_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the capacity model says of such a server: its setting, and `make_plan(setting)`, which takes a second."""

    setting: Setting
    plan: Plan

    def tok_per_s(self, requests: float) -> float:
        """The rate of a server with its present flags at which the client keeps so many requests."""
        return self.setting.predict(self.plan.current.memory, max(1, round(requests))).tok_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is so, and what to do about it.

    Attributes:
        kind: unhealthy, rejects rows, stalled, garbage output, slow server, small pool; ramping, draining;
            client-limited, request-cap, state pool, KV pool, retraction, prefill, and bandwidth: as good as it gets.
        server: None: the fleet.
        severity: fault: something is broken; limit: there is something to gain; note: as it has to be.
        evidence: a sentence with numbers, units and window.
        numbers: what it rests on, under SGLang's names: medians over the window, or the time in which requests waited
            where that was much of it; how much counters grew. What nobody told is not in it.
        window: first and last second that it is about, by the samples' clock; (0, 0): it is about no time.
        gain: the factor on tokens/s; the evidence says whether it was predicted or is a bound. None: not known.
        change: what to set or do, "" for nothing.
        is_binding: it is what limits the server or the fleet now; others come next, or stand beside it.
    """

    kind: str
    server: str | None
    severity: Literal["fault", "limit", "note"]
    evidence: str
    numbers: dict[str, float] = field(default_factory=dict)
    window: tuple[float, float] = (0.0, 0.0)
    gain: float | None = None
    change: str = ""
    is_binding: bool = True
