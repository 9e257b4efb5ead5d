from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from dfexp.capacity.errors import DoesNotFit, FlagsRefused
from dfexp.capacity.flags import Flags, refuse
from dfexp.capacity.memory import Free
from dfexp.capacity.models import load_model
from dfexp.capacity.planner import LEAST_SIGMAS, Plan, Setting, make_plan
from dfexp.capacity.workload import Workload, constant, log_normal
from tests.capacity.support import AFTER, BEFORE, MODEL, NEW, OLD, setting

OUTPUTS = {"weights", "mamba_ssm_dtype", "kv_cache_dtype", "quantization"}


def after(**change: Any) -> Setting:
    return replace(setting(AFTER, concurrency=64), **change)


@pytest.fixture(scope="module")
def made() -> Plan:
    return make_plan(after())


def test_radix_off_at_about_155_requests_wins(made: Plan) -> None:
    best = made.ranked[0]
    assert best.flags.disable_radix_cache
    assert 150 <= best.prediction.running <= 160
    assert best.memory.max_running_requests == best.memory.max_mamba_cache_size
    assert "--disable-radix-cache" in best.argv
    assert best.prediction.tok_per_s == pytest.approx(2070, rel=0.05)
    assert made.current.hours / best.hours == pytest.approx(1.75, abs=0.06)


def test_the_full_plan_takes_under_two_seconds_on_one_core() -> None:
    before = time.process_time()
    found = make_plan(after())
    spent = time.process_time() - before
    print(f"{len(found.ranked)} winners for {after().prompts:,} prompts in {spent:.2f} s")
    assert spent < 2.0


def test_raising_the_client_alone_is_offered_with_its_gain() -> None:
    for flags, concurrency, cap, gain in ((BEFORE, 32, 37, 1.13), (AFTER, 64, 72, 1.09)):
        found = make_plan(setting(flags, concurrency=concurrency))
        (unchanged,) = [item for item in found.ranked if not item.changes]
        assert unchanged.prediction.running == cap
        assert found.current.hours / unchanged.hours == pytest.approx(gain, abs=0.02)
        assert "A client that keeps more requests in flight" in unchanged.why


def test_every_winner_is_explained_in_one_sentence(made: Plan) -> None:
    for item in (*made.ranked, *made.changing):
        assert item.why.endswith(".")
        assert item.why.count(". ") == 0
        assert "times the rate" in item.why
    assert "state slots per request 1 (was 3)" in made.ranked[0].why
    assert "overlap scheduling on" in made.ranked[0].why


def test_what_changes_outputs_stands_apart(made: Plan) -> None:
    assert all(not OUTPUTS & set(item.changes) for item in made.ranked)
    assert [sorted(OUTPUTS & set(item.changes)) for item in made.changing] == [
        ["weights"],
        ["kv_cache_dtype"],
        ["mamba_ssm_dtype"],
    ]


def test_what_wins_can_be_launched(made: Plan) -> None:
    for item in (*made.ranked, *made.changing):
        refuse(item.flags, MODEL.shape, OLD)
        assert item.prediction.retraction_sigmas >= LEAST_SIGMAS
        assert item.memory.max_running_requests >= item.prediction.running - 1


def test_the_memory_fraction_stays_without_a_measurement(made: Plan) -> None:
    assert {item.flags.mem_fraction_static for item in made.ranked} == {0.90}
    low = make_plan(after(available_gib=10.0))
    assert {item.flags.mem_fraction_static for item in low.ranked} == {0.90}
    room = make_plan(after(available_gib=20.0))
    assert 0.90 < (room.ranked[0].flags.mem_fraction_static or 0) <= 0.90 + (20 - 1) / 94
    assert room.ranked[0].hours < low.ranked[0].hours


def test_an_unmeasured_share_keeps_the_radix_cache(made: Plan) -> None:
    found = make_plan(setting(AFTER, concurrency=64, share=None))
    assert "was not measured" in found.radix
    assert all(not item.flags.disable_radix_cache for item in (*found.ranked, *found.changing))
    assert any(item.flags.disable_radix_cache for item in made.ranked)


def test_long_shared_prompts_make_the_radix_cache_pay() -> None:
    long = Workload(prompt=constant(3000), completion=log_normal(1000, 0.5, limit=4000), shared_prefix_share=0.95)
    found = make_plan(after(workload=long))
    assert 0.05 < found.radix_threshold < 0.95
    assert not found.ranked[0].flags.disable_radix_cache
    apart = make_plan(after(workload=replace(long, shared_prefix_share=0.0)))
    assert apart.radix_threshold == pytest.approx(found.radix_threshold)
    assert apart.ranked[0].flags.disable_radix_cache


def test_batches_beyond_the_largest_graph_are_marked() -> None:
    small = replace(AFTER, cuda_graph_max_bs_decode=128)
    found = make_plan(setting(small, concurrency=64))
    assert "exceed the largest CUDA graph (128)" in found.ranked[0].marks[0]


def test_the_newer_version_is_planned_by_its_own_rules() -> None:
    flags = replace(AFTER, mamba_strategy="auto")
    found = make_plan(replace(setting(flags, concurrency=64), rules=NEW))
    assert "--mamba-radix-cache-strategy" not in found.ranked[0].argv
    assert found.ranked[0].flags.disable_radix_cache
    strategies = {item.memory.resolved.strategy for item in found.ranked if not item.flags.disable_radix_cache}
    assert strategies >= {"no_buffer", "extra_buffer", "extra_buffer_lazy"}
    with_radix = [item for item in found.ranked if item.changes and not item.flags.disable_radix_cache]
    for item in with_radix:
        assert item.flags.disable_overlap_schedule == (item.memory.resolved.strategy == "no_buffer")


def test_a_dense_model_is_planned_too() -> None:
    model = load_model("Qwen3-8B")
    base = after()
    found = make_plan(
        replace(
            base,
            server=replace(
                base.server,
                shape=model.shape,
                flags=Flags(mem_fraction_static=0.85, max_running_requests=32, context_length=8192),
            ),
            free=Free(pre_gib=94.8, post_gib=94.8 - 15.3),
        )
    )
    assert found.ranked[0].memory.max_mamba_cache_size == 0
    assert found.ranked[0].prediction.running > 32
    assert found.ranked[0].hours < found.current.hours


def test_flags_that_cannot_run_stop_the_plan() -> None:
    with pytest.raises(FlagsRefused):
        make_plan(setting(replace(AFTER, mamba_strategy="extra_buffer", disable_radix_cache=True), concurrency=64))
    with pytest.raises(DoesNotFit):
        make_plan(setting(replace(AFTER, mem_fraction_static=0.4), concurrency=64))


def test_two_gpus_per_server_double_the_gpu_hours() -> None:
    flags = replace(AFTER, tp_size=2)
    pre = 94.8
    found = make_plan(replace(setting(flags, concurrency=64), servers=4, free=Free(pre_gib=pre, post_gib=pre - 25.9)))
    best = found.ranked[0]
    assert best.gpu_hours == pytest.approx(best.hours * 8)
    assert best.prediction.running > 300
