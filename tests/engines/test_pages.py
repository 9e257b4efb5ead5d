"""Limits out of real pages of SGLang servers, and out of pages that are not what they should be."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfexp.engines.pages import limits_from
from dfexp.records import ServerLimits

DATA = Path(__file__).parents[1] / "data" / "sglang"


def pages(version: str) -> tuple[dict, dict]:
    return tuple(json.loads((DATA / f"{name}_{version}.json").read_text()) for name in ("v1_models", "server_info"))


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_a_real_sglang_server(version):
    assert limits_from(*pages(version)) == ServerLimits(
        max_running_requests=16,
        context_length=8192,
        max_total_num_tokens=20000,
        model="models/tiny-qwen3next",
        engine_version=f"sglang {version}",
    )


def test_the_cap_that_counts_is_the_effective_one():
    models, info = pages("0.5.23")
    info["max_running_requests"], info["internal_states"][0]["effective_max_running_requests_per_dp"] = 8, 6
    assert limits_from(models, info).max_running_requests == 6


def test_data_parallel_ranks_add_up():
    models, info = pages("0.5.12")
    info["internal_states"] *= 4
    limits = limits_from(models, info)
    assert (limits.max_running_requests, limits.max_total_num_tokens) == (64, 80000)


def test_the_echoed_key_is_kept_nowhere():
    models, info = pages("0.5.23")
    info["api_key"] = info["internal_states"][0]["api_key"] = "sk-secret"
    info["launch_command"] += " --api-key sk-secret"
    assert "sk-secret" not in repr(limits_from(models, info))


def test_a_page_of_llama_cpp():
    props = {"total_slots": 4, "default_generation_settings": {"n_ctx": 2048}, "build_info": "b1"}
    models = {"data": [{"id": "m", "meta": {"size": 1000}}]}
    assert limits_from(models, props=props) == ServerLimits(
        max_running_requests=4,
        context_length=2048,
        max_total_num_tokens=8192,
        model="m",
        engine_version="llama.cpp b1",
        state_bytes={"weights": 1000},
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["data", "internal_states"]), inner),
)


@settings(max_examples=25, deadline=None)
@given(page=JSON, models=JSON)
def test_no_page_can_break_the_reading(page, models):
    limits = limits_from(models, page, page)
    assert limits.max_running_requests is None or limits.max_running_requests > 0


@pytest.mark.parametrize("value", [0, -1, True, "16", 1.5, None])
def test_unknown_is_none_and_never_zero(value):
    props = {"total_slots": value, "default_generation_settings": {"n_ctx": value}}
    limits = limits_from(None, props=props)
    assert (limits.max_running_requests, limits.context_length, limits.max_total_num_tokens) == (None, None, None)
