from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfexp.capacity.check import check_lines, check_row, render, status, to_json
from tests.capacity.support import DATA, lines

ALL = lines("checks.jsonl")
NAMES = sorted({name for row in ALL for part in (row, row["inputs"], row["shape"], row["expected"]) for name in part})
ROWS = {row["id"]: row for row in lines("checks.jsonl")}


def changed(row_id: str, **parts: Any) -> dict[str, Any]:
    """A row with fields of `inputs`, `expected`, `shape` or of itself replaced."""
    row = copy.deepcopy(ROWS[row_id])
    for name, value in parts.items():
        row[name] = {**row[name], **value} if isinstance(value, dict) and name in row else value
    return row


def result(row: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    checked = check_row(row)
    return {item.name: (item.predicted, item.ok) for item in checked.compared}


def test_every_row_keeps_the_promise() -> None:
    report = check_lines((DATA / "checks.jsonl").read_text().split("\n"))
    print(render(report))
    assert len(report) == 15
    assert {row.id for row in report if not row.ok} == set()
    assert status(report) == 0


def test_more_public_reports_keep_it_too() -> None:
    report = check_lines((DATA / "more_checks.jsonl").read_text().split("\n"))
    print(render(report))
    assert len(report) == 12
    assert status(report) == 0


def test_slots_are_exact_on_every_recorded_boot() -> None:
    compared = [
        item for row in ROWS.values() for item in check_row(row).compared if item.name == "max_mamba_cache_size"
    ]
    assert len(compared) == 8
    assert all(item.error == 0 for item in compared)


@pytest.mark.parametrize(
    ("row_id", "name", "wrong"),
    [
        ("qwen3.5-9b_tp2_4090", "max_mamba_cache_size", 188),
        ("qwen3.5-9b_tp2_4090", "max_total_num_tokens", 330_000),
        ("qwen3.5-9b_tp2_4090", "max_running_requests", 61),
        ("qwen3.5-9b_tp2_4090", "ssm_state_gib", 4.40),
        ("qwen3.5-9b_tp2_4090", "k_gib", 2.51),
        ("rtx6000ada_cap9", "max_running_requests", 10),
        ("nemotron-nano_radix_off", "max_running_requests", 7),
    ],
)
def test_a_number_outside_the_promise_is_found(row_id: str, name: str, wrong: float) -> None:
    report = check_lines([json.dumps(changed(row_id, expected={name: wrong}))])
    assert {item.name for item in report[0].compared if not item.ok} >= {name}
    assert status(report) == 1
    assert "OUTSIDE" in render(report)


def test_a_cap_may_be_one_off_only_where_the_slots_are() -> None:
    near = changed("qwen3.5-9b_tp2_4090", expected={"max_mamba_cache_size": 185, "max_running_requests": 61})
    assert result(near)["max_running_requests"] == (62, True)
    equal = changed("qwen3.5-9b_tp2_4090", expected={"max_running_requests": 61})
    assert result(equal)["max_running_requests"] == (62, False)


def test_tensor_parallel_divides_heads_and_replicates_the_rest() -> None:
    row = changed("qwen3.5-9b_tp2_4090", tp=8, expected={"max_mamba_cache_size": 100, "max_total_num_tokens": 1000})
    row["expected"] = {"max_mamba_cache_size": 100, "max_total_num_tokens": 1000, "ssm_state_gib": 0.59, "k_gib": 0.0}
    got = result(row)
    # 24 layers x 4 heads x 128 x 128 x 4 bytes x 101 slots; one of the 4 kv heads on each of 8 ranks
    assert got["ssm_state_gib"][0] == pytest.approx(24 * 4 * 128 * 128 * 4 * 101 / 2**30)
    assert got["k_gib"][0] == pytest.approx(1001 * 8 * 1 * 256 * 2 / 2**30)


def test_groups_grow_to_tp_when_it_does_not_divide_them() -> None:
    row = changed("granite-h-micro_16gb", tp=4, expected={"conv_state_gib": 0.01})
    # 36 layers x (64 x 64 + 2 x 4 x 128) / 4 channels x 3 x 2 bytes x 39 slots
    assert result(row)["conv_state_gib"][0] == pytest.approx(36 * (4096 + 1024) / 4 * 3 * 2 * 39 / 2**30)


def test_dtypes_halve_the_pools() -> None:
    full = result(changed("qwen3.6-27b-fp8_pro6000"))
    half = result(changed("qwen3.6-27b-fp8_pro6000", ssm_dtype="bfloat16", kv_dtype="float8"))
    assert half["ssm_state_gib"][0] == pytest.approx(full["ssm_state_gib"][0] / 2)
    assert half["k_gib"][0] == pytest.approx(full["k_gib"][0] / 2)


@pytest.mark.parametrize(
    ("inputs", "cap"),
    [
        ({"strategy": "extra_buffer"}, 9),
        ({"strategy": "extra_buffer", "disable_overlap_schedule": True}, 11),
        ({"strategy": "extra_buffer_lazy"}, 11),
        ({"strategy": None}, 15),
        ({"strategy": None, "max_running_requests": 4}, 4),
        ({"disable_radix_cache": True, "max_running_requests": None}, 47),
        ({"disable_radix_cache": True, "max_running_requests": 12}, 12),
    ],
)
def test_the_cap_follows_strategy_overlap_and_request(inputs: dict[str, Any], cap: int) -> None:
    row = changed("rtx6000ada_cap9", inputs=inputs)
    assert result(row)["max_running_requests"][0] == cap


def test_a_small_kv_pool_caps_too() -> None:
    row = changed("gb10_lazy_40slots", expected={"max_total_num_tokens": 9})
    assert result(row)["max_running_requests"][0] == 4


def test_speculative_buffers_have_a_row_per_request_and_one_more() -> None:
    shape = ROWS["qwen3.5-9b_16slots"]["shape"]
    row = {
        "id": "speculative", "kind": "bytes", "date": "2026-10-02", "charges_padding_slot": True, "tp": 1,
        "ssm_dtype": "float32", "kv_dtype": "bfloat16", "shape": shape,
        "inputs": {"disable_radix_cache": True, "max_running_requests": 64, "speculative_num_draft_tokens": 16},
        "expected": {
            "max_mamba_cache_size": 64, "max_running_requests": 64, "conv_state_gib": 0.07, "ssm_state_gib": 3.05,
            "intermediate_ssm_gib": 48.75, "intermediate_conv_gib": 0.43,
            "max_total_num_tokens": 295950, "k_gib": 4.52, "v_gib": 4.52,
        },
    }  # fmt: skip
    checked = check_row(row)
    assert checked.ok
    assert {item.name for item in checked.compared} >= set(row["expected"]) - {"max_total_num_tokens"}


def test_a_model_without_state_has_tokens_and_a_cap() -> None:
    row = {
        "id": "dense", "kind": "boot", "date": "2026-06-10", "charges_padding_slot": False, "tp": 2,
        "kv_dtype": "float8",
        "shape": {"state_kind": None, "attention_layers": 40, "kv_heads": 8, "head_dim": 128},
        "inputs": {"pre_gib": 22.91, "post_gib": 10.0, "mem_fraction_static": 0.9, "max_running_requests": 1},
        "expected": {"max_total_num_tokens": 202093, "max_running_requests": 1, "k_gib": 3.85, "v_gib": 3.85},
    }  # fmt: skip
    checked = check_row(row)
    assert {item.name: item.ok for item in checked.compared} == dict.fromkeys(row["expected"], True)


def test_a_failed_boot_fails_with_the_same_count() -> None:
    row = changed("qwen3.6-27b-fp8_pro6000", date="2026-08-20", charges_padding_slot=True, inputs={"rest_gib": -7.96})
    row["expected"] = {"max_mamba_cache_size": -28}
    assert result(row)["max_mamba_cache_size"] == (-28, True)


def test_latent_attention_is_not_divided() -> None:
    row = {
        "id": "mla", "kind": "bytes", "tp": 4, "kv_dtype": "bfloat16",
        "shape": {"state_kind": "none", "attention_layers": 7, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        "inputs": {}, "expected": {"max_total_num_tokens": 1_000_000, "kv_gib": 7.51},
    }  # fmt: skip
    assert result(row)["kv_gib"] == (pytest.approx(1_000_001 * 8064 / 2**30), True)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (changed("qwen3.5-9b_tp2_4090", shape={"state_kind": "kda"}), "kda"),
        (changed("qwen3.5-9b_tp2_4090", shape={"v_heads": None}), "v_heads"),
        (changed("qwen3.5-9b_tp2_4090", tp=3), "divide"),
        (changed("qwen3.5-9b_tp2_4090", inputs={"pp": 2}), "pipeline"),
        (changed("qwen3.5-9b_tp2_4090", inputs={"post_gib": 99.0}), "swapped"),
        (changed("qwen3.5-9b_tp2_4090", kv_dtype="fp4_e2m1"), "fp4_e2m1"),
        (changed("qwen3.5-9b_tp2_4090", shape={"attention_layers": 0}), "attention_layers must be a count"),
        ({"id": "bare", "model": "unheard-of", "expected": {"k_gib": 1.0}}, "unheard-of"),
    ],
)
def test_what_cannot_be_modelled_is_said(row: dict[str, Any], says: str) -> None:
    report = check_lines([json.dumps(row)])
    assert says in render(report)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1, 2]",
        '"text"',
        '{"inputs": 3}',
        '{"inputs": {"pre_gib": "many"}}',
        '{"inputs": {"max_running_requests": 1.5}}',
        '{"inputs": {"disable_radix_cache": 1}}',
        '{"inputs": {"strategy": "best"}}',
        '{"inputs": {"mem_fraction_static": 1.5}}',
        '{"inputs": {"pre_gib": 1e400}}',
        '{"inputs": {"page_size": 0}}',
        '{"expected": {"k_gib": true}}',
        '{"expected": {"k_gib": NaN}}',
        "[" * 100_000,
    ],
)
def test_a_bad_line_is_reported_by_number_and_the_rest_is_checked(line: str) -> None:
    good = json.dumps(ROWS["rtx6000ada_cap9"])
    report = check_lines(["", line, good])
    assert [(row.id, row.kind) for row in report] == [("line 2", "unreadable"), ("rtx6000ada_cap9", "cap")]
    assert report[0].notes
    assert status(report) == 2


def test_an_unreadable_row_keeps_its_own_name() -> None:
    report = check_lines(['{"id": "mine", "inputs": {"strategy": "best"}}'])
    assert [(row.id, row.kind) for row in report] == [("mine", "unreadable")]


def test_nulls_and_unknown_fields_change_nothing() -> None:
    row = changed(
        "qwen3.5-9b_tp2_4090",
        inputs={"max_total_tokens": None, "colour": "green"},
        expected={"colour": 3, "v_gib": None},
    )
    checked = check_row({**row, "more": {"deep": [1]}})
    assert checked.ok
    assert checked.notes == ("colour not checked: not a number that this check knows",)


def test_a_known_model_needs_no_shape() -> None:
    row = {"id": "named", "model": "Qwen/Qwen3.6-27B", "expected": {"max_mamba_cache_size": 191, "ssm_state_gib": 27.0}}
    checked = check_row(row)
    assert [(item.name, item.ok) for item in checked.compared] == [("ssm_state_gib", True)]


def test_a_cap_needs_no_shape_when_slots_are_logged() -> None:
    row = {"id": "kda", "kind": "cap", "shape": {"state_kind": "kda"}, "inputs": {"strategy": "extra_buffer"}}
    for part in ({}, {"shape": {}}):
        checked = check_row({**row, **part, "expected": {"max_mamba_cache_size": 50, "max_running_requests": 10}})
        assert [(item.name, item.ok) for item in checked.compared] == [("max_running_requests", True)]


def test_auto_follows_the_version() -> None:
    row = {"inputs": {"strategy": "auto"}, "expected": {"max_mamba_cache_size": 60, "max_running_requests": 12}}
    assert check_row({**row, "date": "2026-09-01"}).ok
    assert not check_row({**row, "date": "2026-05-20"}).ok


def test_json_says_what_the_table_says() -> None:
    report = check_lines([json.dumps(row) for row in ROWS.values()])
    tree = json.loads(json.dumps(to_json(report)))
    assert tree["status"] == 0
    assert tree["summary"] == {"rows": 15, "numbers": 50, "outside": 0, "rows_outside": 0, "unreadable": 0}
    assert tree["rows"][0]["compared"][0]["predicted"] == 186


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["gdn", "mamba2", "auto"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=12,
)


@given(
    st.sampled_from(sorted(ROWS)),
    st.sampled_from(["inputs", "expected", "shape", None]),
    st.sampled_from(NAMES),
    json_values,
)
def test_no_value_of_any_field_stops_the_check(row_id: str, part: str | None, name: str, value: Any) -> None:
    row = copy.deepcopy(ROWS[row_id])
    (row if part is None else row[part])[name] = value
    report = check_lines([json.dumps(row), json.dumps(ROWS["rtx6000ada_cap9"])])
    assert len(report) == 2
    assert report[1].ok
    json.dumps(to_json(report))
    render(report)


def test_nothing_at_all_is_no_success() -> None:
    assert status(check_lines([])) == 2
