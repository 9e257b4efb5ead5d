"""Has the server fork its scheduler and detokenizer. A .pth file has every process of the server run this first.

SGLang spawns them, since CUDA does not survive a fork, and each imports torch and SGLang anew: two thirds of the 25 CPU
seconds of a start. Without CUDA, and before the main process has threads of its own, a fork is as good.
"""

from __future__ import annotations

import multiprocessing

set_start_method = multiprocessing.set_start_method


def fork_instead(method: str | None, force: bool = False) -> None:
    set_start_method("fork" if method == "spawn" else method, force)


multiprocessing.set_start_method = fork_instead
