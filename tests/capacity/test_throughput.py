from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import capacity_throughput
from dfexp.capacity.cost import decode_bytes, weight_bytes
from dfexp.capacity.errors import CapacityError
from dfexp.capacity.models import load_model
from dfexp.capacity.throughput import admissible, calibrate, largest_graph, predict
from dfexp.capacity.workload import Workload, constant
from dfexp.hardware import UNMEASURED, Efficiency, find_gpu, gpus
from dfexp.params_plan import SamplePart
from tests.capacity.support import AFTER, BEFORE, GPU, PROMPTS, plan, server, workload

SAMPLE = SamplePart(running=32, context=1585, tok_per_s=670)
"""The first setting: 0.205 of ~247,600 KV tokens used by 32 requests."""


def one_efficiency() -> Efficiency:
    return calibrate(server(BEFORE), workload(), [SAMPLE], GPU.efficiency, provenance="the first setting")


def test_one_efficiency_predicts_both_settings() -> None:
    found = one_efficiency()
    assert found.bandwidth == pytest.approx(0.718, abs=0.005)
    for flags, concurrency, measured in ((BEFORE, 32, 670), (AFTER, 64, 1180)):
        got = predict(server(flags), plan(flags), found, workload(), concurrency=concurrency)
        print(f"{concurrency} requests: {measured} measured, {got.tok_per_s:.0f} predicted")
        assert got.tok_per_s == pytest.approx(measured, rel=0.05)
        assert got.limited_by == "client concurrency"


def test_the_shipped_efficiency_is_the_fitted_one() -> None:
    assert GPU.efficiency.bandwidth == pytest.approx(one_efficiency().bandwidth, abs=0.002)
    fitted = {line.gpu: line.efficiency for line in capacity_throughput.lines() if line.fitted}
    for name, found in fitted.items():
        assert find_gpu(name).efficiency.bandwidth == pytest.approx(min(1.0, found.bandwidth), abs=0.002)
        assert find_gpu(name).efficiency.compute == pytest.approx(found.compute, abs=0.002)


def test_usages_of_the_second_setting_are_predicted_from_the_first() -> None:
    got = predict(server(AFTER), plan(AFTER), one_efficiency(), workload(), concurrency=64)
    print(f"KV usage {got.full_token_usage:.2f} (seen 0.36 to 0.49), state usage {got.mamba_usage:.2f} (seen 0.59)")
    assert 0.36 <= got.full_token_usage <= 0.49
    assert got.mamba_usage == pytest.approx(0.59, abs=0.005)


def test_a_step_moves_the_bytes_of_the_reference() -> None:
    one = server(AFTER)
    assert weight_bytes(one, 64) == pytest.approx(52.1e9, rel=0.02)  # that figure has the MTP layer, which is not run
    assert decode_bytes(one, 64, 1850) == pytest.approx(weight_bytes(one, 64) + 64 * (2 * 78_446_592 + 1850 * 65_536))


@pytest.mark.parametrize(
    ("slots", "tokens", "fits"), [(150, 369_600, 157), (155, 363_700, 154.8), (160, 357_700, 152), (165, 351_700, 150)]
)
def test_the_admission_reserve(slots: int, tokens: int, fits: float) -> None:
    """1,920 tokens a request at the lowest ratio."""
    one = Workload(prompt=constant(214), completion=constant(2 * (1920 - 214)))
    assert admissible(server(AFTER), one, tokens) == pytest.approx(fits, abs=0.6), slots


def test_a_cold_server_admits_fewer() -> None:
    one = Workload(prompt=constant(214), completion=constant(2 * (1920 - 214)))
    assert admissible(server(AFTER), one, 363_700, ratio=0.7) < 113 < admissible(server(AFTER), one, 363_700)


def test_a_smaller_max_tokens_lets_more_in() -> None:
    big, small = workload(), replace(workload(), max_tokens=3000)
    assert admissible(server(AFTER), small, 300_000) > admissible(server(AFTER), big, 300_000)


def test_public_measurements_within_the_aim() -> None:
    found = capacity_throughput.lines()
    capacity_throughput.main()
    assert len(found) == 12
    assert sum(line.fitted for line in found) == 4
    assert all(abs(line.error) < 1e-6 for line in found if line.fitted)
    assert capacity_throughput.mean_absolute_error(found) <= 0.12


def test_calibration_reproduces_its_samples_and_keeps_their_spread() -> None:
    truth = Efficiency(bandwidth=0.6, compute=0.4, provenance="truth", uncertainty=0.0)
    samples = []
    for concurrency in (8, 64):
        got = predict(server(AFTER), plan(AFTER), truth, workload(), concurrency=concurrency)
        samples.append(SamplePart(running=concurrency, context=got.context, tok_per_s=got.tok_per_s))
    found = calibrate(server(AFTER), workload(), samples, UNMEASURED, provenance="two samples")
    assert found.bandwidth == pytest.approx(0.6, abs=0.003)
    assert found.uncertainty == pytest.approx(0.03)
    off = [samples[0], samples[1].model_copy(update={"tok_per_s": samples[1].tok_per_s * 0.9})]
    assert calibrate(server(AFTER), workload(), off, UNMEASURED, provenance="two").uncertainty > 0.04


def test_impossible_samples_are_refused() -> None:
    with pytest.raises(CapacityError, match="peak bandwidth"):
        calibrate(
            server(AFTER), workload(), [SAMPLE.model_copy(update={"tok_per_s": 5000.0})], UNMEASURED, provenance="x"
        )
    with pytest.raises(CapacityError, match="at least one sample"):
        calibrate(server(AFTER), workload(), [], UNMEASURED, provenance="x")


def test_a_pool_too_small_for_one_request_is_said() -> None:
    tiny = plan(replace(AFTER, max_total_tokens=3000))
    with pytest.raises(CapacityError, match="admits no request"):
        predict(server(AFTER), tiny, UNMEASURED, workload())


def test_hours_and_shares() -> None:
    got = predict(server(AFTER), plan(AFTER), GPU.efficiency, workload(), concurrency=64)
    assert got.hours(PROMPTS, 8) == pytest.approx(PROMPTS / (8 * got.completions_per_s) / 3600)
    assert got.tok_per_s == pytest.approx(got.completions_per_s * workload().completion.mean)
    assert 0 < got.prefill_share < 0.05


def test_experts_are_read_as_far_as_a_batch_touches_them() -> None:
    shape = load_model("Qwen3.6-35B-A3B").shape
    assert shape.experts is not None
    assert shape.experts.touched(1) == pytest.approx(8 / 256)
    assert 0.9 < shape.experts.touched(90) < shape.experts.touched(8192) == pytest.approx(1.0)


def test_graphs_follow_memory_and_flags() -> None:
    assert largest_graph(server(AFTER)) == 256
    assert largest_graph(server(replace(AFTER, tp_size=4))) == 512
    assert largest_graph(server(replace(AFTER, cuda_graph_max_bs_decode=64))) == 64
    assert largest_graph(server(replace(AFTER, disable_cuda_graph=True))) == 0
    small = predict(server(replace(AFTER, cuda_graph_max_bs_decode=64)), plan(AFTER), UNMEASURED, workload())
    assert small.beyond_graph


def test_every_gpu_has_an_efficiency_with_its_origin() -> None:
    assert all(gpu.efficiency.provenance for gpu in gpus())
    assert sum(gpu.efficiency is not UNMEASURED for gpu in gpus()) == 5
