"""Stand between the product and the kernel: count, refuse or record each system call that changes a file."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CHANGING = ("open", "write", "pwrite", "fsync", "ftruncate", "link", "unlink", "rename", "replace", "mkdir")
REAL = {name: getattr(os, name) for name in (*CHANGING, "close", "_exit")}

Handler = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def tapped(handler: Handler, names: tuple[str, ...] = CHANGING) -> Iterator[None]:
    """Route the calls of `os` through `handler(name, args, kwargs)`, which makes the real one with `REAL`."""

    def wrap(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: handler(name, args, kwargs)

    for name in names:
        setattr(os, name, wrap(name))
    try:
        yield
    finally:
        for name in names:
            setattr(os, name, REAL[name])


class DieAt:
    """End the process, as kill -9 would, right after call number `nth`, or halfway through write number `nth`."""

    def __init__(self, nth: int, *, halfway: bool) -> None:
        self.left, self.halfway = nth, halfway
        self.names = ("write",) if halfway else CHANGING

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.left -= 1
        if self.left == 0 and self.halfway:
            REAL["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
            REAL["_exit"](9)
        try:
            return REAL[name](*args, **kwargs)
        finally:
            if self.left == 0:
                REAL["_exit"](9)


class RefuseAt:
    """Let the disk refuse `times` calls from number `nth` on; a refused write first takes half of its bytes."""

    def __init__(self, nth: int, *, times: int = 1, code: int = errno.EIO) -> None:
        self.left, self.times, self.code = nth, times, code
        self.refused: list[str] = []

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.left -= 1
        if self.left <= 0 and len(self.refused) < self.times:
            self.refused.append(name)
            if name == "write":
                REAL["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
            raise OSError(self.code, os.strerror(self.code))
        return REAL[name](*args, **kwargs)
