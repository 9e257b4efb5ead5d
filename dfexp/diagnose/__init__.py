"""What limits servers and a fleet, with evidence, what lifting it gains, and how: samples and a plan -> findings. Pure.

    for finding in diagnose([Watched(name=..., samples=..., limits=..., limit=64), ...], rows_left=9000, planned=None):
        finding.kind, finding.server, finding.evidence, finding.change, finding.gain

A server has at most one binding finding, and so has the fleet, whose `server` is None and which comes first. Limits are
judged at a steady state that was found in samples; of a ramp or a drain nothing else is said. Running requests are held
against the cap and the queue, never `mamba_usage` alone: at the cap it reads 2/3, or 1.00 without the radix cache.
"""

from dfexp.diagnose.findings import Finding, Planned, Watched
from dfexp.diagnose.limits import STALLED_S, diagnose, phase

__all__ = ["STALLED_S", "Finding", "Planned", "Watched", "diagnose", "phase"]
