"""Takes the place of SGLang's compiled kernels, whose wheel needs CUDA, or a processor with AMX for its CPU build.

SGLang imports many kernels by name that a text model on a CPU never runs, so every name can be imported; one that is
called after all says which one was missing. The few that are run, those of gated delta nets, are in `mamba`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__version__ = "0"


def absent(name: str) -> Callable[..., Any]:
    """A kernel in name only."""

    def call(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{name} has no stand-in for the CPU yet: write one in tests/sglang/cpu/stand_ins")

    return call


class Absent(ModuleType):
    """A module that has every name; Python's own questions, such as `__path__`, get the usual answer."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__}.{name}")


# This package too, and those of its modules that SGLang imports on its way to a CPU model.
sys.modules[__name__].__class__ = Absent
for part in ("kvcacheio",):
    sys.modules[f"{__name__}.{part}"] = Absent(f"{__name__}.{part}")
