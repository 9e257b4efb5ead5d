"""What the interpreter of a fleet has: SGLang, its flags, torch, and a CUDA toolkit to compile kernels with."""

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from dfexp.errors import FleetError

_PROBE = Path(__file__).with_name("sglang_probe.py")
FIX = (
    "Make an environment with SGLang (python -m venv sglang-env; sglang-env/bin/pip install sglang==0.5.23) and name"
    " its interpreter: fleet.python: sglang-env/bin/python."
)


@checked_dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="ignore"))
class Installation:
    """What an interpreter has; None: it is not there, or could not be found out.

    Attributes:
        python: the interpreter itself, as its own `sys.executable` says.
        flags: the flag table of this SGLang's own parser; empty when SGLang cannot be imported.
        torch_cuda: CUDA that torch was built for; None for a CPU build.
        cuda_home: folder in which torch and FlashInfer look for the toolkit; `nvcc`: the compiler in it.
        nvcc_error: what it said of a source that includes headers of CUDA and CCCL.
        home_has_headers: whether `cuda_home` has them where torch looks.
        error: words of a failed import; `refused`: the parser's words about the argv it was given.

    """

    python: str
    python_version: str
    sglang_version: str | None = None
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    torch_version: str | None = None
    torch_cuda: str | None = None
    flashinfer_version: str | None = None
    cuda_home: str | None = None
    nvcc: str | None = None
    nvcc_version: str | None = None
    nvcc_error: str | None = None
    home_has_headers: bool = False
    error: str | None = None
    refused: str | None = None


def look(
    python: str, env: Mapping[str, str], cwd: Path | None = None, argv: Sequence[str] = (), *, timeout_s: float = 120.0
) -> Installation:
    """Ask an interpreter what it has, once per process for the same arguments.

    Args: python, its path or a name on the PATH; env, variables beside this process's; cwd, as servers will have it;
    argv, for SGLang's own parser. Raises FleetError: no interpreter, or no answer within `timeout_s`.
    """
    found = _look(python, tuple(sorted(env.items())), cwd, tuple(argv), timeout_s)
    if isinstance(found, str):
        raise FleetError(found)
    return found


@functools.cache
def _look(
    python: str, env: tuple[tuple[str, str], ...], cwd: Path | None, argv: tuple[str, ...], timeout_s: float
) -> Installation | str:
    """What the interpreter has, or that it stays silent: nobody waits for that twice. Raises FleetError."""
    command, everything = [shutil.which(python) or python, str(_PROBE), "--", *argv], {**os.environ, **dict(env)}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=everything, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s
        )
        return TypeAdapter(Installation).validate_json(done.stdout)
    except subprocess.TimeoutExpired:
        return f"fleet.python: {python} did not say within {timeout_s:g} s what it has. {FIX}"
    except ValidationError:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-300:]
        why = f"is no Python that works (exit status {done.returncode}): {said!r}"
    except (OSError, ValueError) as error:  # ValueError: a NUL character in an argument or a variable
        why = f"cannot be run: {getattr(error, 'strerror', None) or error}"
    raise FleetError(f"fleet.python: {python} {why}. {FIX}")
