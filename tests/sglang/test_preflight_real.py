"""Preflight asks real SGLang: its own parser judges the flags, and a fleet that could start passes every check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dfexp import params, preflight
from dfexp.engines.sglang_flags import SHIPPED, argv_for, shipped_table
from dfexp.engines.sglang_install import Installation, look

CPU = {"SGLANG_USE_CPU_ENGINE": "1"}
FLAGS = {"mamba_strategy": "no_buffer", "max_running_requests": 8, "max_mamba_cache_size": 40, "page_size": 1}
FLAGS |= {"attention_backend": "torch_native", "mem_fraction_static": 0.3, "log_level": "warning"}


@pytest.fixture
def installed(python: str, env: Mapping[str, str], hybrid: str) -> Installation:
    return look(python, CPU | dict(env), Path(hybrid).parent)


def test_the_flags_are_those_that_are_shipped_for_this_version(installed: Installation) -> None:
    version = str(installed.sglang_version)
    assert version in SHIPPED
    assert (installed.error, installed.torch_cuda) == (None, None)
    assert installed.flags.keys() == shipped_table(version).keys()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--page-size", "many"], "argument --page-size: invalid int value: 'many'"),
        (["--no-such-flag", "1"], "unrecognized arguments: --no-such-flag 1"),
    ],
)
def test_what_its_own_parser_refuses(python: str, env: Mapping[str, str], argv: list[str], words: str) -> None:
    found = look(python, CPU | dict(env), argv=["--model-path", "m", *argv])
    assert words in str(found.refused)


def test_what_dfexp_writes_is_taken(python: str, env: Mapping[str, str], installed: Installation) -> None:
    argv = argv_for(FLAGS, str(installed.sglang_version), installed.flags)
    assert look(python, CPU | dict(env), argv=["--model-path", "m", *argv]).refused is None


def spec(python: str, env: Mapping[str, str], model: str, **others: Any) -> params.RunSpec:
    fleet = {"engine": "sglang", "model": model, "python": python, "env": dict(env), "device": "cpu"}
    tree = {"run": "r", "fleet": {**fleet, "flags": FLAGS, **others}, "prompts": {"path": "p.jsonl"}}
    return params.validate(tree, "test")


def test_a_fleet_that_can_start_passes(python: str, env: Mapping[str, str], hybrid: str) -> None:
    checks = preflight.require(spec(python, env, hybrid), Path(hybrid).parent)
    assert {check.name: check.state for check in checks} == {
        "SGLang": "pass", "flags": "pass", "model": "pass", "GPUs": "note", "disk": "pass", "open files": "pass",
    }  # fmt: skip
    ((version, commands),) = preflight.launches_for(spec(python, env, hybrid), Path(hybrid).parent).items()
    assert version == look(python, CPU | dict(env), Path(hybrid).parent).sglang_version
    assert len(commands) == 1


def test_a_torch_for_cpus_is_no_torch_for_gpus(python: str, env: Mapping[str, str], hybrid: str) -> None:
    checks = preflight.checks_for(spec(python, {**env, **CPU}, hybrid, device="cuda"), Path(hybrid).parent)
    (driver,) = [check for check in checks if check.name == "driver"]
    assert (driver.state, "is built for CPUs" in driver.found) == ("fail", True)
