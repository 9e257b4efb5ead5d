from __future__ import annotations

from typing import Any

import pytest

from dfexp.capacity.errors import CapacityError, FlagsRefused
from dfexp.capacity.flags import Flags, parse_flags, refuse, resolve, rules, rules_at, to_argv
from dfexp.capacity.models import load_model
from dfexp.capacity.shape import ModelShape
from tests.capacity.support import MODEL, NEW, OLD

GRANITE = load_model("granite-4.0-h-micro").shape
STRATEGY = "mamba_strategy"
DENSE = load_model("Qwen3-8B").shape


@pytest.mark.parametrize(
    ("version", "shape", "flags", "expected"),
    [
        ("0.5.12", MODEL.shape, {}, ("no_buffer", True, False, 3)),
        ("0.5.13", MODEL.shape, {}, ("no_buffer", True, False, 3)),
        ("0.5.14", MODEL.shape, {}, ("extra_buffer", True, True, 5)),
        ("0.5.23", MODEL.shape, {}, ("extra_buffer", True, True, 5)),
        ("0.5.23", MODEL.shape, {"disable_overlap_schedule": True}, ("no_buffer", True, False, 3)),
        ("0.5.23", MODEL.shape, {"disable_overlap_schedule": True, "page_size": 64}, ("extra_buffer", True, False, 4)),
        ("0.5.12", MODEL.shape, {"mamba_scheduler_strategy": "extra_buffer"}, ("extra_buffer", True, True, 5)),
        (
            "0.5.23",
            MODEL.shape,
            {STRATEGY: "extra_buffer_lazy"},
            ("extra_buffer_lazy", True, True, 4),
        ),
        ("0.5.12", MODEL.shape, {"disable_radix_cache": True}, ("no_buffer", False, True, 1)),
        ("0.5.23", MODEL.shape, {"disable_radix_cache": True}, ("no_buffer", False, True, 1)),
        ("0.5.12", GRANITE, {}, ("no_buffer", True, False, 3)),
        ("0.5.23", GRANITE, {}, ("extra_buffer", True, True, 5)),
        ("0.5.23", DENSE, {}, ("none", True, True, 0)),
    ],
)
def test_what_a_version_makes_of_the_flags(
    version: str, shape: ModelShape, flags: dict[str, Any], expected: tuple[str, bool, bool, int]
) -> None:
    got = resolve(parse_flags(flags), rules(version), has_state=shape.state is not None)
    assert (got.strategy, got.radix_cache, got.overlap, got.slots_per_request) == expected


@pytest.mark.parametrize(
    ("version", "shape", "flags", "says"),
    [
        ("0.5.12", MODEL.shape, {STRATEGY: "extra_buffer_lazy"}, "came with 0.5.13"),
        ("0.5.12", MODEL.shape, {STRATEGY: "extra_buffer", "disable_radix_cache": True}, "Use no_buffer"),
        ("0.5.12", GRANITE, {STRATEGY: "extra_buffer"}, "GraniteMoeHybrid"),
        ("0.5.12", MODEL.shape, {STRATEGY: "no_buffer", "speculative_num_draft_tokens": 4}, "speculative"),
        ("0.5.23", MODEL.shape, {STRATEGY: "no_buffer"}, "disable_overlap_schedule"),
        ("0.5.23", MODEL.shape,
         {STRATEGY: "no_buffer", "disable_overlap_schedule": True, "page_size": 64}, "page_size"),
        ("0.5.23", MODEL.shape,
         {STRATEGY: "extra_buffer_lazy", "disable_overlap_schedule": True}, "overlap scheduling on"),
        ("0.5.23", DENSE, {STRATEGY: "extra_buffer"}, "no recurrent state"),
    ],
)  # fmt: skip
def test_what_a_version_refuses(version: str, shape: ModelShape, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(FlagsRefused, match=says):
        refuse(parse_flags(flags), shape, rules(version))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"mem_fraction": 0.9}, "Did you mean mem_fraction_static"),
        ({"mem_fraction_static": 1.2}, "1.2"),
        ({"mem_fraction_static": "0.9"}, "'0.9'.*number"),
        ({"disable_radix_cache": 1}, "disable_radix_cache = '1'"),
        ({"max_running_requests": 0}, "greater than or equal to 1"),
        ({"max_running_requests": True}, "True"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "fp4_e2m1"),
        ({STRATEGY: "best"}, "best"),
        ({"tp-size": 2, "tp_size": 2}, "twice"),
        ({"chunked_prefill_size": -2}, "-2"),
        ({"mamba_full_memory_ratio": 0.0}, "0.0"),
    ],
)
def test_a_wrong_flag_names_value_and_fix(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(CapacityError, match=says):
        parse_flags(flags)


def test_flags_are_spelled_as_the_version_wants() -> None:
    flags = Flags(
        mem_fraction_static=0.9,
        mamba_strategy="no_buffer",
        cuda_graph_max_bs_decode=160,
        disable_radix_cache=True,
    )
    assert to_argv(flags, OLD) == [
        "--mem-fraction-static", "0.9", "--mamba-scheduler-strategy", "no_buffer", "--disable-radix-cache",
        "--cuda-graph-max-bs", "160",
    ]  # fmt: skip
    assert {"--mamba-radix-cache-strategy", "--cuda-graph-max-bs-decode"} <= set(to_argv(flags, NEW))


def test_flags_survive_their_own_spelling() -> None:
    flags = parse_flags({"--mem-fraction-static": 0.9, "max-running-requests": 64})
    assert flags == Flags(mem_fraction_static=0.9, max_running_requests=64)


@pytest.mark.parametrize("version", ["", "latest", "0.4.10", "0.5.1"])
def test_an_unknown_version_is_said(version: str) -> None:
    with pytest.raises(CapacityError, match="sglang"):
        rules(version)


@pytest.mark.parametrize(
    ("date", "padding", "version"),
    [
        ("2026-05-15", False, "0.5.12"), ("2026-06-15", False, "0.5.13"), ("2026-07-01", None, "0.5.14"),
        ("2026-09-01", None, "0.5.18"), ("2026-09-01", False, "0.5.16"), ("2026-07-20", True, "0.5.18"),
        (None, None, "0.5.12"),
        ("2026", None, "0.5.12"),
    ],
)  # fmt: skip
def test_a_date_stands_for_a_version(date: str | None, padding: bool | None, version: str) -> None:
    assert rules_at(date, padding).version == version
