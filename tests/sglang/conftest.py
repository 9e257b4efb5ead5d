"""Everything here runs once for each version of SGLang that `make test-sglang` has built an environment for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from .support import OnCpu

FOLDERS = os.environ.get("DFEXP_SGLANG", "").split(":")


@pytest.fixture(scope="session", params=FOLDERS, ids=[Path(folder).name[:13] for folder in FOLDERS])
def sglang(request: pytest.FixtureRequest) -> OnCpu:
    """The environment of one version. Fails where there is none: real servers are not to be skipped."""
    if not request.param:
        pytest.fail("DFEXP_SGLANG names no environment with SGLang: run these tests by `make test-sglang`")
    return OnCpu.of(Path(request.param))


@pytest.fixture(scope="session")
def version(sglang: OnCpu) -> str:
    return sglang.version


@pytest.fixture(scope="session")
def python(sglang: OnCpu) -> str:
    """The interpreter that has SGLang."""
    return str(sglang.python)


@pytest.fixture(scope="session")
def hybrid(sglang: OnCpu) -> str:
    """The folder of a model with a state pool and a KV pool."""
    return str(sglang.hybrid)


@pytest.fixture(scope="session")
def dense(sglang: OnCpu) -> str:
    """The folder of a model with attention alone."""
    return str(sglang.dense)


@pytest.fixture(scope="session")
def env(sglang: OnCpu) -> Mapping[str, str]:
    """The variables that a server on the CPU needs."""
    return sglang.env
