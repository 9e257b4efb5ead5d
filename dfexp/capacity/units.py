"""Memory in two units that cannot be mixed: `GiB` (2**30 bytes, what SGLang's log calls "GB") and `Bytes`.

Decimal gigabytes appear nowhere in this package; rates are bytes per second.
"""

from __future__ import annotations

from math import floor
from typing import NewType

GiB = NewType("GiB", float)
Bytes = NewType("Bytes", int)

_BYTES_PER_GIB = 1 << 30
LOG_ROUNDING_GIB = 0.005
"""Half of the last digit that SGLang's startup log prints."""


def to_bytes(size: GiB) -> Bytes:
    """GiB as whole bytes, rounded down as SGLang does."""
    return Bytes(floor(size * _BYTES_PER_GIB))


def to_gib(size: int) -> GiB:
    """Bytes as GiB."""
    return GiB(size / _BYTES_PER_GIB)


def from_mib(size: float) -> GiB:
    """MiB, as drivers state memory, as GiB."""
    return GiB(size / 1024)
