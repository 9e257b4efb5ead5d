"""What rows have in common: the fields of every request, the fingerprint of the run, the configuration of a row."""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

import dfexp
from dfexp.params import GenerationGroup

_PACKAGES = ("openai", "aiohttp", "pandas", "papermill", "xllamacpp")


def request_fields(generation: GenerationGroup) -> dict[str, Any]:
    """The sampling fields of a request's body, without `max_tokens` and `seed`, which each row has its own of."""
    fields: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "stop")
        if (value := getattr(generation, name)) is not None
    }
    if generation.enable_thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": generation.enable_thinking}
    return {**fields, **generation.extra_body}


def sampling(generation: GenerationGroup) -> dict[str, Any]:
    """Everything of the parameters that changes what the model says."""
    return {**request_fields(generation), "max_tokens": generation.max_tokens, "seed": generation.seed}


def sampling_text(generation: GenerationGroup) -> str:
    """The sampling as the fingerprint has it: JSON, equal for equal sampling."""
    return json.dumps(sampling(generation), sort_keys=True, ensure_ascii=True)


def fingerprint(prompts_sha256: str, model: str, generation: GenerationGroup) -> dict[str, str]:
    """What all rows of one run must share: prompts, model, sampling. A value that can be read is left readable."""
    return {"prompts": prompts_sha256, "model": model, "sampling": sampling_text(generation)}


def config_id(config: Mapping[str, Any]) -> str:
    """Short name of a configuration: the start of the SHA-256 of its JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Versions of what takes part in making rows."""
    found = {"dfexp": dfexp.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """The machine that drives the run."""
    return {
        "system": sys.platform,
        "machine": platform.machine(),
        "cpus": psutil.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
    }
