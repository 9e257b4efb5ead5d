"""What the capacity model raises: inputs that cannot be, and models or flags that it does not describe."""

from __future__ import annotations

from dfexp.errors import DfexpError


class CapacityError(DfexpError):
    """An input is impossible or not described by the model; the message names the value and the fix."""


class UnsupportedModel(CapacityError):
    """The model is recognised, but its memory layout is not modelled; the message says which part and what to do."""


class DoesNotFit(CapacityError):
    """The configuration leaves no room for the pools; the message has SGLang's own numbers and the smallest fix.

    `slots`: state slots as SGLang's own message counts them (0 or below), where it stops at those.
    """

    slots: int = 0


class FlagsRefused(CapacityError):
    """SGLang would refuse this combination of flags when it starts; the message names the flags and the fix."""
