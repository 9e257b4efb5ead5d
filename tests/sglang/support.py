"""An environment that runs one version of SGLang on the CPU, as `make test-sglang` builds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# What makes a server quick to start and small, under SGLang's own names. Without a bound on its tokens the KV pool
# would take a third of the machine's memory.
LIGHT: Mapping[str, bool | int | float | str] = {
    "attention_backend": "torch_native",  # the only one without kernels
    "chunked_prefill_size": 2048,
    "grammar_backend": "none",
    "max_total_tokens": 20_000,
    "mem_fraction_static": 0.3,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # an idle scheduler would keep half a core busy
}
VARIABLES: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",  # or it looks for a GPU
    "HF_HUB_OFFLINE": "1",  # the models are folders: nothing is asked of a hub
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the model is too small to share out, and servers share the cores
}
NO_BUFFER: Mapping[str, Mapping[str, bool | int | float | str]] = {
    "0.5.12": {"mamba_scheduler_strategy": "no_buffer"},
    "0.5.23": {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCpu:
    """SGLang in an environment of its own: the interpreter, two models, and the variables that its servers need."""

    version: str
    python: Path
    hybrid: Path
    dense: Path
    env: Mapping[str, str]

    @classmethod
    def of(cls, venv: Path) -> Self:
        """Raises ValueError when the folder holds no such environment."""
        installed = sorted(venv.glob("lib/python*/site-packages/sglang-*.dist-info"))
        models = venv / "models"
        if len(installed) != 1 or not (models / "hybrid" / "config.json").exists():
            raise ValueError(f"no SGLang with its models in {str(venv)!r}: run `make test-sglang`, which builds it")
        return cls(
            version=installed[0].name.removeprefix("sglang-").removesuffix(".dist-info"),
            python=venv / "bin" / "python",
            hybrid=models / "hybrid",
            dense=models / "dense",
            env=VARIABLES,
        )
