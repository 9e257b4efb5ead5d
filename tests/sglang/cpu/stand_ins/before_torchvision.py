"""Lets torchvision be imported beside a torch without CUDA. A .pth file has every process of the server run this first.

The wheel of torchvision holds its operators in a library built against CUDA. Beside a CPU torch the library is skipped,
but a later line describes two of its operators to torch, which fails unless they have been declared. So they are
declared, without any code behind them, at the moment torchvision is asked for, and torch is not imported sooner.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType

SIGNATURE = "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing itself; the usual search for torchvision goes on after it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "torchvision" and "torch" in sys.modules:
            sys.meta_path.remove(self)
            torch = sys.modules["torch"]
            if torch.version.cuda is None:
                for name in ("nms", "qnms"):
                    torch.library.define(f"torchvision::{name}", SIGNATURE)


sys.meta_path.insert(0, BeforeTorchvision())
