"""What an environment with SGLang has: `PYTHON sglang_probe.py [-- ARGV...]` prints one line, a JSON object.

It runs there and is never imported, so it needs nothing but Python 3.10. What is missing there is null. ARGV is given
to SGLang's own parser: no model is read and no GPU is used.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

# One header of the CUDA toolkit and four of CCCL, which CUDA 13 keeps in a folder of its own.
_HEADERS = ("cuda_runtime.h", "nv/target", "cuda/std/type_traits", "cub/version.cuh", "thrust/version.h")
_SOURCE = "".join(f"#include <{name}>\n" for name in _HEADERS) + "dfexp __CUDACC_VER_MAJOR__.__CUDACC_VER_MINOR__\n"
_PACKAGES = {"sglang": ("sglang",), "torch": ("torch",), "flashinfer": ("flashinfer-python", "flashinfer")}


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _packages() -> dict[str, Any]:
    """Versions by distribution. torch is not imported for its CUDA: that fails where a library is missing."""
    found: dict[str, Any] = {}
    for key, names in _PACKAGES.items():
        versions = (one.version for name in names for one in importlib.metadata.distributions(name=name))
        found[f"{key}_version"] = next(versions, None)
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        found["torch_cuda"] = runpy.run_path(str(Path(torch.origin).with_name("version.py"))).get("cuda")
    return found


def _toolkit() -> dict[str, Any]:
    """The CUDA toolkit, in torch's and FlashInfer's order, and what its compiler finds when it is tried."""
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (nvcc and str(Path(nvcc).parents[1]))
    home = home or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin"))
    found: dict[str, Any] = {"cuda_home": home if os.path.isdir(home) else None, "nvcc": nvcc}
    if nvcc is None:
        return found
    done = subprocess.run([nvcc, "-x", "cu", "-E", "-"], input=_SOURCE, capture_output=True, text=True, timeout=20)
    if done.returncode:
        words = next((line for line in done.stderr.split("\n") if "rror" in line), done.stderr)
        return {**found, "nvcc_error": words[:300]}
    version = re.sub(r"\s", "", done.stdout.rpartition("dfexp ")[2])
    has_headers = os.path.isfile(os.path.join(home, "include", _HEADERS[0]))
    return {**found, "nvcc_version": version, "home_has_headers": has_headers}


def _flags(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Every spelling of every flag and what it takes. Spellings of one `dest` are aliases."""
    return {
        name: {
            "action": type(action).__name__,
            "choices": action.choices and [str(choice) for choice in action.choices],
            "default": repr(action.default),
            "dest": action.dest,
            "type": str(getattr(action.type, "__name__", action.type)),
            "nargs": action.nargs and str(action.nargs),
        }
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }


def _parsed(argv: list[str]) -> dict[str, Any]:
    """The flags of SGLang's own parser, and its words about `argv`; `server_args` is the least that has the parser."""
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found, unused-ignore]

    parser = _Parser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    found: dict[str, Any] = {"flags": _flags(parser)}
    try:
        parser.parse_args(argv or ["--model-path", "any"])
    except (Exception, SystemExit) as error:
        found["refused"] = str(error)
    return found


def report(argv: list[str]) -> dict[str, Any]:
    """All of it. `error`: the words of an import or a command that failed."""
    found: dict[str, Any] = {"python": sys.executable, "python_version": platform.python_version()}
    for part in (_packages, _toolkit, lambda: _parsed(argv) if found.get("sglang_version") else {}):
        try:
            found.update(part())
        except (Exception, SystemExit) as error:  # whatever is damaged there is a finding, not a fault of this program
            found["error"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print must not get into the answer
    sys.path.pop(0)  # the folder of this file, where modules have names of the standard library
    print(json.dumps(report(sys.argv[2:])), file=answer, flush=True)
    os._exit(0)  # imports leave threads behind, which nothing needs to wait for
