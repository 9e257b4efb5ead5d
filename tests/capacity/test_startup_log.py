from __future__ import annotations

from dataclasses import fields, replace

import pytest

from benchmarks.capacity_checks import MORE, recorded, summary
from dfexp.capacity.config import from_config
from dfexp.capacity.flags import Flags, own_name, parse_flags, rules
from dfexp.capacity.memory import Free, plan_memory
from dfexp.capacity.startup_log import Startup, read_startup
from tests.capacity.support import DATA, lines

LOGS = DATA / "logs"
CASES = {case["id"]: case for case in lines("cases.jsonl")}
TINY = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4,
    "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "hidden_size": 64,
    "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 8192,
}  # fmt: skip


def text(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8").split("\n")


def log(name: str) -> Startup:
    return read_startup(text(name))


def flags_of(startup: Startup) -> Flags:
    """The flags that the log echoes."""
    known = {item.name for item in fields(Flags)}
    given = {own_name(name): value for name, value in startup.server_args.items() if value is not None}
    return parse_flags({name: value for name, value in given.items() if name in known})


def free_of(startup: Startup) -> Free:
    """Free memory before and after loading, as logged."""
    return Free(pre_gib=startup.get("load_begin_gib") or 0.0, post_gib=startup.get("load_end_gib") or 0.0)


TWO_BOOTS = {"rdna4_qwen3.6-35b-a3b-fp8_1.61M"}
"""One line each of two servers: the reader takes the last, as after a restart."""


@pytest.mark.parametrize(
    "case_id", [name for name, case in CASES.items() if case["raw_lines"] and name not in TWO_BOOTS]
)
def test_every_quoted_line_is_read_as_recorded(case_id: str) -> None:
    case = CASES[case_id]
    compared = recorded(case, read_startup(case["raw_lines"], MORE))
    said = " ".join(case["raw_lines"])
    for name, value, got in compared:
        print(f"{case_id:<44} {name:<36} recorded {value!s:>12} read {got!s:>12}")
        numbers = value.values() if isinstance(value, dict) else [value]
        quoted = any(f"{number:,}" in said or str(number) in said or f"{number:.2f}" in said for number in numbers)
        if got is None or got == {}:
            assert not quoted or case_id in PROSE, f"{name} = {value} is in the lines and was not read"
        elif isinstance(value, dict):
            assert got.items() <= value.items(), name
        else:
            assert got == value, name


PROSE = {
    "qwen3.5-9b_mig3g40_ratio0.9", "qwen3.8-27b_rtxpro6000_191slots", "nemotron-3-ultra-550b-nvfp4_tp4_4xgb10",
    "qwen3.6-27b_rdna4_60slots", "qwen3.5-35b-a3b-int4_dflash_gb10", "dual3090_qwen3.6-27b_eagle3_8slots",
    "glm-5.3-flash-mxfp4_tp4_mi355x", "qwen3.5-9b_h100pcie_16slots_bytes", "qwen2.5-0.5b_docs_server_info",
}  # fmt: skip
"""Cases whose "lines" are sentences about a log, not lines of one."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0.5.12_hybrid", (20.33, 20.32, 57254, 0.25, 2.62, 20000, 16)),
        ("0.5.23_hybrid", (20.44, 20.44, 57604, 0.25, 2.64, 20000, 16)),
        ("0.5.12_hybrid_pressure", (20.65, 20.65, 20, 0.0, 0.0, 700, 6)),
        ("0.5.23_hybrid_pressure", (19.84, 19.84, 20, 0.0, 0.0, 2000, 6)),
        ("auto_0.5.12", (21.16, 21.15, 39738, 0.17, 1.82, 9272354, 128)),
        ("auto2_0.5.23", (20.92, 20.92, 39040, 0.17, 1.79, 9109601, 128)),
    ],
)
def test_real_logs_of_hybrids(name: str, expected: tuple[float, ...]) -> None:
    got = log(name)
    fields = (
        "load_begin_gib", "load_end_gib", "max_mamba_cache_size", "conv_gib", "ssm_gib", "max_total_num_tokens",
        "max_running_requests",
    )  # fmt: skip
    assert tuple(map(got.get, fields)) == expected
    assert got.get("context_len") == 8192


def test_a_dense_log_has_no_state_pool_and_a_warning_names_cap_and_slots() -> None:
    dense = log("0.5.23_dense_retraction")
    assert [dense.get(name) for name in ("ssm_gib", "max_mamba_cache_size", "max_total_num_tokens")] == [
        None,
        None,
        700,
    ]
    capped = ("capped_requests", "capped_slots", "capped_slots_per_request")
    assert [read_startup(text("0.5.23_hybrid_pressure"), MORE).get(name) for name in capped] == [6, 20, 3]
    assert read_startup(text("0.5.12_hybrid_pressure"), MORE).get("capped_slots") is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("0.5.23_no_buffer_needs_disable_overlap", "disable_overlap_schedule=True"),
        ("0.5.23_auto_extra_buffer_on_cpu", "platform support"),
    ],
)
def test_a_failed_start_leaves_its_last_words(name: str, says: str) -> None:
    assert says in summary(text(name)).partition("  error: ")[2]
    assert log(name).get("max_running_requests") is None


def test_echoed_arguments_come_without_secrets() -> None:
    for name in ("0.5.12_hybrid", "0.5.23_hybrid"):
        args = log(name).server_args
        assert len(args) > 300
        assert args["mem_fraction_static"] == 0.3
        assert not {"api_key", "launch_command", "admin_api_key"} & set(args)
    line = "server_args=ServerArgs(model_path='m', api_key='sk-1', dtype=<object>, page_size=1)"
    assert read_startup([line]).server_args == {"model_path": "m", "page_size": 1}


@pytest.mark.parametrize(("name", "version"), [("auto_0.5.12", "0.5.12"), ("auto2_0.5.23", "0.5.23")])
def test_real_boots_are_predicted_from_their_own_logs(name: str, version: str) -> None:
    """Slots of 52 KiB: memory that the log does not show is many of them, so both counts are compared as shares."""
    got = log(name)
    flags = replace(flags_of(got), max_mamba_cache_size=None)
    plan = plan_memory(from_config(TINY, "tiny"), flags, rules(version), free_of(got))
    assert plan.max_mamba_cache_size == pytest.approx(got.get("max_mamba_cache_size"), rel=0.01)
    assert plan.max_total_num_tokens == pytest.approx(got.get("max_total_num_tokens"), rel=0.01)
    assert plan.max_running_requests == got.get("max_running_requests") == 128


@pytest.mark.parametrize("name", ["0.5.12_hybrid_pressure", "0.5.23_hybrid_pressure"])
def test_real_caps_follow_from_flags_alone(name: str) -> None:
    got = log(name)
    plan = plan_memory(from_config(TINY, "tiny"), flags_of(got), rules(name[:6]), free_of(got))
    assert plan.max_running_requests == got.get("max_running_requests") == 6
    assert plan.max_total_num_tokens == got.get("max_total_num_tokens")


def test_rubbish_is_no_log() -> None:
    empty = read_startup(["", "\x00", "avail mem=", "[TP0] Load weight begin. avail mem=GB", "#tokens: x"])
    assert empty.values == {}


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("server_args=ServerArgs(version=1.2.3, tp_size=2)", {"version": "1.2.3", "tp_size": 2}),
        ("server_args=ServerArgs(port=007, host='a\\x')", {"port": "007", "host": "a\\x"}),
        ("max_total_num_tokens=,, max_running_requests=,", {}),
        ("KV Cache is allocated. #tokens: ,", {}),
    ],
)
def test_a_damaged_line_stops_nothing(line: str, arguments: dict[str, object]) -> None:
    found = read_startup([line, "max_total_num_tokens=700, max_running_requests=6"])
    assert found.server_args == arguments
    assert (found.get("max_total_num_tokens"), found.get("max_running_requests")) == (700, 6)
