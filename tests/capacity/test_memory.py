from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.capacity_reference import explain_cap
from dfexp.capacity.errors import CapacityError, DoesNotFit, FlagsRefused
from dfexp.capacity.flags import Flags, refuse, rules
from dfexp.capacity.memory import UNLOGGED_GIB, Free, plan_memory
from dfexp.capacity.models import load_model
from dfexp.capacity.shape import GIB, Attention, ModelShape, StateLayers
from tests.capacity.support import AFTER, BEFORE, MODEL, NEW, OLD, PROMPTS, free_memory, plan, setting

DENSE = load_model("Qwen3-8B").shape


def test_the_reference_run_is_reproduced() -> None:
    before, after = plan(BEFORE), plan(AFTER)
    assert (before.max_mamba_cache_size, before.resolved.slots_per_request, before.max_running_requests) == (186, 5, 37)
    assert (after.max_mamba_cache_size, after.resolved.slots_per_request, after.max_running_requests) == (216, 3, 72)
    assert before.cap_from == after.cap_from == "state pool"
    assert round(128 / after.max_mamba_cache_size, 2) == 0.59
    assert before.max_total_num_tokens == pytest.approx(248_000, rel=0.005)
    assert after.max_total_num_tokens == pytest.approx(289_000, rel=0.005)


def test_radix_off_takes_one_slot_per_request() -> None:
    off = plan(replace(AFTER, disable_radix_cache=True, max_running_requests=155))
    assert (off.max_mamba_cache_size, off.resolved.slots_per_request, off.max_running_requests) == (155, 1, 155)
    assert off.max_total_num_tokens == pytest.approx(363_700, rel=0.005)
    assert off.resolved.overlap


def test_only_the_reported_fraction_and_dtype_explain_the_cap() -> None:
    found = explain_cap(setting(BEFORE, concurrency=32), cap=37, slots_in_use=113, mamba_usage=0.61)
    assert found == [(0.85, "bfloat16")]
    after = explain_cap(setting(AFTER, concurrency=64), cap=72, slots_in_use=128, mamba_usage=0.59)
    assert after == [(0.90, "bfloat16")]


@pytest.mark.parametrize("version", ["0.5.12", "0.5.16", "0.5.17", "0.5.23"])
def test_the_two_formulas_by_hand(version: str) -> None:
    shape, slot, token = replace(MODEL.shape, multimodal=False), 153_944_064, 65_536
    free = Free(pre_gib=100.0, post_gib=60.0 + UNLOGGED_GIB)
    got = plan_memory(shape, Flags(mem_fraction_static=0.9, mamba_strategy="extra_buffer"), rules(version), free)
    rest = got.rest_bytes
    assert rest == pytest.approx(50 * GIB)
    padding = version in ("0.5.17", "0.5.23")
    slots = int((rest * 0.9 / 1.9 - padding * slot) // slot)
    assert got.max_mamba_cache_size == slots
    assert got.max_total_num_tokens == int(rest - (slots + padding) * slot) // token
    assert got.max_running_requests == slots // 5
    assert got.state_bytes == (slots + 1) * slot


def test_newer_versions_keep_memory_back_for_multimodal_models() -> None:
    flags = Flags(mem_fraction_static=0.9, max_mamba_cache_size=100, mamba_strategy="extra_buffer")
    text = plan_memory(replace(MODEL.shape, multimodal=False), flags, NEW, free_memory())
    vision = plan_memory(replace(MODEL.shape, multimodal=True), flags, NEW, free_memory())
    assert text.max_total_num_tokens - vision.max_total_num_tokens == pytest.approx(100 * 2**20 / 65_536, abs=1)


@pytest.mark.parametrize(
    ("version", "flags", "cap", "cap_from"),
    [
        ("0.5.12", {"context_length": 262144}, 2048, "SGLang's own limit"),
        ("0.5.12", {"context_length": 8192}, 4096, "SGLang's own limit"),
        ("0.5.23", {"max_running_requests": 64, "max_total_tokens": 100}, 50, "KV pool"),
        ("0.5.12", {"max_running_requests": 64, "max_total_tokens": 100}, 64, "requested"),
        ("0.5.12", {"max_total_tokens": 100}, 50, "KV pool"),
        ("0.5.12", {"max_running_requests": 5000, "context_length": 8192}, 4096, "SGLang's own limit"),
    ],
)
def test_the_cap_of_a_dense_model(version: str, flags: dict[str, Any], cap: int, cap_from: str) -> None:
    free = Free(pre_gib=78.0, post_gib=62.0)
    got = plan_memory(DENSE, Flags(mem_fraction_static=0.88, **flags), rules(version), free)
    assert (got.max_running_requests, got.cap_from) == (cap, cap_from)
    assert got.max_mamba_cache_size == got.state_bytes == 0


def test_pages_round_down() -> None:
    free = Free(pre_gib=78.0, post_gib=62.0)
    one = plan_memory(DENSE, Flags(mem_fraction_static=0.88), NEW, free).max_total_num_tokens
    paged = plan_memory(DENSE, Flags(mem_fraction_static=0.88, page_size=64), NEW, free).max_total_num_tokens
    assert paged == one // 64 * 64


@pytest.mark.parametrize("version", ["0.5.12", "0.5.13", "0.5.23"])
def test_speculation_takes_room_from_the_pools(version: str) -> None:
    flags = replace(AFTER, mamba_strategy="extra_buffer", max_running_requests=16)
    plain = plan_memory(MODEL.shape, flags, rules(version), free_memory())
    draft = plan_memory(MODEL.shape, replace(flags, speculative_num_draft_tokens=4), rules(version), free_memory())
    if version == "0.5.12":  # comes off first
        kept = plain.rest_bytes - draft.max_mamba_cache_size * draft.slot_bytes - draft.max_total_num_tokens * 65_536
        assert 0 <= kept - 16 * 4 * 78_446_592 < 65_536
    else:  # shares the state budget, so there are fewer slots
        assert draft.max_mamba_cache_size == pytest.approx(plain.max_mamba_cache_size / (1 + 4 / 5), abs=5)
    assert draft.pools["intermediate_ssm"] == 17 * 4 * 48 * 48 * 128 * 128 * 2
    assert draft.max_running_requests == 16


@pytest.mark.parametrize(
    ("free", "flags", "error", "says"),
    [
        ((-1.0, -2.0), {}, CapacityError, "-1.0"),
        ((94.8, 96.0), {}, CapacityError, "swapped"),
        ((20.0, -31.0), {}, DoesNotFit, "51.0 GiB do not fit"),
        ((97_887.0, 1.0), {}, CapacityError, "not MiB"),
        ((94.8, 42.9), {"mem_fraction_static": 0.5}, DoesNotFit, "0.548"),
        ((94.8, 42.9), {"mem_fraction_static": None}, CapacityError, "mem_fraction_static is not given"),
        ((94.8, 42.9), {"pp_size": 2}, CapacityError, "pp_size = 2"),
        ((94.8, 42.9), {"dp_size": 2}, CapacityError, "dp_size = 2"),
        ((94.8, 42.9), {"tp_size": 5}, CapacityError, "divide"),
        ((94.8, 42.9), {"max_mamba_cache_size": 600}, DoesNotFit, "no room is left for the KV pool"),
        ((94.8, 42.9), {"max_mamba_cache_size": 2}, DoesNotFit, "a request needs 3"),
        (
            (94.8, 42.9),
            {"mamba_strategy": "extra_buffer", "disable_radix_cache": True},
            FlagsRefused,
            "no_buffer",
        ),
    ],
)
def test_nonsense_names_the_value_and_the_fix(
    free: tuple[float, float], flags: dict[str, Any], error: type[CapacityError], says: str
) -> None:
    with pytest.raises(error, match=says):
        plan_memory(MODEL.shape, replace(AFTER, **flags), OLD, Free(pre_gib=free[0], post_gib=free[1]))


shapes = st.builds(
    lambda kv, dim, layers, state: replace(
        DENSE, attention=Attention(layers=layers, query_heads=8, kv_heads=kv, k_dim=dim, v_dim=dim), state=state
    ),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([64, 128, 256]),
    st.integers(1, 64),
    st.none()
    | st.builds(
        lambda layers, heads, groups: StateLayers(
            kind="mamba2", layers=layers, heads=heads, head_dim=64, state_size=128, groups=groups, conv_kernel=4
        ),
        st.integers(1, 60),
        st.sampled_from([8, 32, 128]),
        st.sampled_from([1, 2, 8]),
    ),
)
flag_sets = st.builds(
    lambda fraction, ratio, radix, running, slots, tp, page, draft: Flags(
        mem_fraction_static=fraction, mamba_full_memory_ratio=ratio, disable_radix_cache=radix,
        max_running_requests=running, max_mamba_cache_size=slots, tp_size=tp, page_size=page,
        speculative_num_draft_tokens=draft, mamba_ssm_dtype="float32",
    ),
    st.floats(0.3, 0.97),
    st.floats(0.05, 4.0),
    st.booleans(),
    st.none() | st.integers(1, 3000),
    st.none() | st.integers(1, 500),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 16, 64]),
    st.none() | st.integers(1, 16),
)  # fmt: skip


@given(
    shapes,
    flag_sets,
    st.sampled_from(["0.5.12", "0.5.14", "0.5.23"]),
    st.floats(10, 280),
    st.floats(1, 200),
    st.floats(0, 50),
)
def test_more_memory_never_lowers_a_cap(
    shape: ModelShape, flags: Flags, version: str, pre: float, weights: float, more: float
) -> None:
    assume(weights < pre)
    try:
        small = plan_memory(shape, flags, rules(version), Free(pre_gib=pre, post_gib=pre - weights))
    except CapacityError:
        return
    large = plan_memory(shape, flags, rules(version), Free(pre_gib=pre + more, post_gib=pre + more - weights))
    assert large.max_running_requests >= small.max_running_requests
    assert large.max_mamba_cache_size >= small.max_mamba_cache_size


@given(shapes, flag_sets, st.sampled_from(["0.5.12", "0.5.14", "0.5.23"]), st.floats(10, 280), st.floats(1, 200))
def test_pools_never_exceed_what_is_there(
    shape: ModelShape, flags: Flags, version: str, pre: float, weights: float
) -> None:
    assume(weights < pre)
    found = rules(version)
    try:
        got = plan_memory(shape, flags, found, Free(pre_gib=pre, post_gib=pre - weights))
    except CapacityError:
        return
    # Before 0.5.17 the padding slot, and until today a page and the rows of speculation's padding, are on top.
    draft = flags.speculative_num_draft_tokens or 0
    padding = got.slot_bytes * (1 + draft) + got.kv_token_bytes * (flags.page_size or 1)
    assert got.state_bytes + got.kv_bytes <= got.rest_bytes + padding + 1
    assert got.rest_bytes <= (pre - weights) * GIB


def test_every_combination_of_flags_gives_a_plan_or_says_why() -> None:
    axes = product(
        ["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"], [True, False], [True, False], [None, 64],
        [None, 40], [1, 2], ["0.5.12", "0.5.13", "0.5.14", "0.5.23"],
    )  # fmt: skip
    for strategy, radix_off, overlap_off, running, slots, tp, version in axes:
        flags = replace(
            AFTER, mamba_strategy=strategy, disable_radix_cache=radix_off, tp_size=tp,
            disable_overlap_schedule=overlap_off, max_running_requests=running, max_mamba_cache_size=slots,
        )  # fmt: skip
        try:
            refuse(flags, MODEL.shape, rules(version))
        except FlagsRefused:
            with pytest.raises(FlagsRefused, match=r"Use|Add|Leave|wants"):
                plan_memory(MODEL.shape, flags, rules(version), free_memory())
            continue
        assert 0 < plan_memory(MODEL.shape, flags, rules(version), free_memory()).max_running_requests <= PROMPTS
