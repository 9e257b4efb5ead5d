from __future__ import annotations

import json
from typing import Any

import pytest

from dfexp.capacity.flags import Flags, own_name, rules, to_argv
from dfexp.engines.sglang_flags import SHIPPED, argv_for, gpus_per_server, shipped_table
from dfexp.errors import FleetError
from tools.sglang_flags import TARGET, reduced

OLD, NEW = SHIPPED
LEGAL: dict[str, Any] = {"int": 4, "float": 0.5, "human_readable_int": 8192, "loads": "{}", "json_list_type": "[]"}
OURS = {
    "admin_api_key", "api_key", "base_gpu_id", "config", "device", "dist_init_addr", "enable_metrics",
    "enable_ssl_refresh", "gpu_id_step", "grpc_mode", "help", "host", "model", "model_path", "nccl_init_addr",
    "nccl_port", "nnodes", "node_rank", "port", "served_model_name", "smg_grpc_mode", "ssl_ca_certs", "ssl_certfile",
    "ssl_keyfile", "ssl_keyfile_password", "watermark_config",
}  # fmt: skip
REFERENCE = {
    "mamba_strategy": "no_buffer", "mem_fraction_static": 0.9, "max_running_requests": 128,
    "chunked_prefill_size": 8192, "context_length": 8192, "attention_backend": "flashinfer",
}  # fmt: skip


def argv(flags: dict[str, Any], version: str) -> list[str]:
    return argv_for(flags, version, shipped_table(version))


def legal_values(row: Any) -> list[Any]:
    """Values that SGLang's parser takes for a flag."""
    if "StoreTrue" in row["action"] or row["action"] in ("BooleanOptionalAction", "DeprecatedAction"):
        return [True, False]
    if row["choices"]:
        return [int(each) for each in row["choices"]] if row["type"] == "int" else list(row["choices"])
    one = LEGAL.get(row["type"], "text")
    return [one, [one, one]] if row["nargs"] in ("+", "*") else [one]


@pytest.mark.parametrize("version", SHIPPED)
def test_every_flag_of_a_version_is_taken_by_name_with_every_legal_value_or_is_ours(version: str) -> None:
    refused = set()
    for flag, row in shipped_table(version).items():
        for value in legal_values(row):
            try:
                words = argv({flag: value}, version)
            except FleetError:
                refused.add(flag[2:].replace("-", "_"))
                continue
            assert argv({flag[2:].replace("-", "_"): value}, version) == words
            options = [word.partition("=")[0] for word in words if word.startswith("--")]
            found = {shipped_table(version)[option]["dest"] for option in options}
            companions = {"disable_overlap_schedule", "page_size"} if value == "no_buffer" else set()
            assert found - companions == ({row["dest"]} if options else set())
            assert options or value is False
    assert refused == OURS & {flag[2:].replace("-", "_") for flag in shipped_table(version)}


@pytest.mark.parametrize("version", SHIPPED)
@pytest.mark.parametrize("value", [{"a": 1}, None, [], True, "many"])
def test_no_flag_that_takes_a_number_takes_anything_else(version: str, value: Any) -> None:
    for flag, row in shipped_table(version).items():
        if row["type"] in ("int", "float") and own_name(flag) not in OURS:
            with pytest.raises(FleetError, match=own_name(flag)):
                argv({flag: value}, version)


def test_the_reference_run_in_both_versions() -> None:
    same = [
        "--mem-fraction-static", "0.9", "--max-running-requests", "128", "--chunked-prefill-size", "8192",
        "--context-length", "8192", "--attention-backend", "flashinfer",
    ]  # fmt: skip
    assert argv(REFERENCE, OLD) == ["--mamba-scheduler-strategy", "no_buffer", *same]
    assert argv(REFERENCE, NEW) == [
        "--mamba-radix-cache-strategy", "no_buffer", *same, "--disable-overlap-schedule", "--page-size", "1",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["mamba_strategy", "mamba-scheduler-strategy", "--mamba-radix-cache-strategy"])
def test_every_name_of_a_renamed_flag_is_understood(name: str) -> None:
    assert argv({name: "extra_buffer"}, OLD) == ["--mamba-scheduler-strategy", "extra_buffer"]
    assert argv({name: "extra_buffer"}, NEW) == ["--mamba-radix-cache-strategy", "extra_buffer"]


@pytest.mark.parametrize("name", ["cuda_graph_max_bs", "cuda_graph_max_bs_decode"])
def test_the_largest_graph_is_renamed_both_ways(name: str) -> None:
    assert argv({name: 160}, OLD) == ["--cuda-graph-max-bs", "160"]
    assert argv({name: 160}, NEW) == ["--cuda-graph-max-bs-decode", "160"]


@pytest.mark.parametrize(
    ("flags", "version", "expected"),
    [
        ({"enable_mixed_chunk": True, "disable_radix_cache": False}, NEW, ["--enable-mixed-chunk"]),
        ({"dllm_fdfo": False}, NEW, ["--no-dllm-fdfo"]),
        ({"no_dllm_fdfo": False}, NEW, ["--dllm-fdfo"]),
        ({"dllm_fdfo": True}, NEW, ["--dllm-fdfo"]),
        ({"cuda_graph_bs": [1, 2, 4]}, NEW, ["--cuda-graph-bs-decode", "1", "2", "4"]),
        ({"chunked_prefill_size": -1}, OLD, ["--chunked-prefill-size=-1"]),
        ({"schedule_conservativeness": 1}, OLD, ["--schedule-conservativeness", "1"]),
        ({"mem_fraction_static": 0.1 + 0.2}, OLD, ["--mem-fraction-static", "0.3"]),
        ({"context_length": "8k"}, OLD, ["--context-length", "8k"]),
        ({"max_lora_chunk_size": 64}, OLD, ["--max-lora-chunk-size", "64"]),
        ({"tensor_parallel_size": 2, "pp-size": 2}, OLD, ["--tp-size", "2", "--pp-size", "2"]),
        ({"reasoning_parser": "qwen3"}, OLD, ["--reasoning-parser", "qwen3"]),
        ({"bucket_time_to_first_token": [0.1, 1.0]}, OLD, ["--bucket-time-to-first-token", "0.1", "1"]),
        ({"mamba_strategy": "no_buffer", "disable_radix_cache": True}, NEW,
         ["--mamba-radix-cache-strategy", "no_buffer", "--disable-radix-cache"]),
        ({"mamba_strategy": "extra_buffer_lazy"}, NEW, ["--mamba-radix-cache-strategy", "extra_buffer_lazy"]),
        ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}, OLD,
         ["--speculative-algorithm", "EAGLE", "--speculative-num-draft-tokens", "4"]),
        ({}, NEW, []),
    ],
)  # fmt: skip
def test_a_flag_is_written_as_the_version_wants(flags: dict[str, Any], version: str, expected: list[str]) -> None:
    assert argv(flags, version) == expected
    assert argv_for(flags, version, {}) == expected, "without an installation the shipped flags count"


@pytest.mark.parametrize(
    ("flags", "version", "says"),
    [
        ({"mem_fraction": 0.9}, OLD, r"mem_fraction = 0\.9: sglang 0\.5\.12 has no .*mean mem_fraction_static\?"),
        ({"max_runing_requests": 64}, NEW, "max_running_requests"),
        ({"tp": 2}, OLD, r"Did you mean tp_size\?"),
        ({"retraction_policy": "length"}, OLD, r"no --retraction-policy, but 0\.5\.23 has"),
        ({"nsa_decode_backend": "fa3"}, NEW, r"but 0\.5\.12 has.*dsa_decode_backend"),
        ({"dp_rank_of_nobody": 1}, NEW, "Leave it out"),
        ({"attention_backend": "fa9"}, NEW, r"attention_backend = 'fa9' must be one of .*flashinfer"),
        ({"mamba_strategy": "best"}, OLD, "best.*no_buffer"),
        ({"max_running_requests": "64"}, OLD, "max_running_requests = '64' must be a whole number"),
        ({"max_running_requests": 64.0}, OLD, "whole number"),
        ({"mem_fraction_static": 1.7}, NEW, "mem_fraction_static = '1.7': Input should be less than 1"),
        ({"max_running_requests": 0}, OLD, "max_running_requests = '0'"),
        ({"mem_fraction_static": "0.9"}, OLD, "must be a number"),
        ({"disable_radix_cache": "yes"}, OLD, "disable_radix_cache = 'yes' must be true or false"),
        ({"disable_radix_cache": 1}, NEW, "true or false"),
        ({"dtype": True}, NEW, "must be text"),
        ({"tp_size": [1, 2]}, NEW, "one value"),
        ({"cuda_graph_bs": []}, NEW, "at least one"),
        ({"cuda_graph_bs": [1, "two"]}, NEW, "whole number"),
        ({"lora_paths": ["a", "--host", "0.0.0.0"]}, OLD, "a list without '--host', which .* an option"),
        ({"lora_paths": ["-x"]}, NEW, "a list without '-x'"),
        ({"tp_size": 2, "tensor-parallel-size": 2}, OLD, "tp_size is given twice"),
        ({"mamba_strategy": "auto", "mamba_scheduler_strategy": "auto"}, OLD, "mamba_strategy is given twice"),
        ({"ep": 2, "ep_size": 2}, NEW, "ep and ep_size are two spellings"),
        ({"model_path": "/models/m"}, OLD, r"use fleet\.model"),
        ({"host": "0.0.0.0"}, OLD, r"use fleet\.host"),
        ({"port": 30000}, OLD, r"use fleet\.first_port"),
        ({"base-gpu-id": 1}, OLD, r"use fleet\.gpus"),
        ({"--device": "cpu"}, OLD, r"use fleet\.device"),
        ({"nnodes": 2}, OLD, r"one machine.*fleet\.servers"),
        ({"nccl_port": 5000}, OLD, "finds its own ports"),
        ({"ssl_certfile": "c.pem"}, OLD, "plain HTTP"),
        ({"enable_metrics": False}, OLD, "dfexp sets it"),
        ({"config": "x.yaml"}, OLD, "one by one"),
        ({"mamba_strategy": "extra_buffer_lazy"}, OLD, r"came with 0\.5\.13"),
        ({"mamba_strategy": "extra_buffer", "disable_radix_cache": True}, OLD, "refuses mamba_strategy"),
        ({"mamba_strategy": "no_buffer", "disable_overlap_schedule": False}, NEW, "overlap"),
        ({"mamba_strategy": "no_buffer", "page_size": 64}, NEW, "page_size 1"),
        ({"mamba_strategy": "no_buffer", "speculative_num_draft_tokens": 4}, NEW, "Use extra_buffer"),
    ],
)  # fmt: skip
def test_a_wrong_flag_names_value_and_fix(flags: dict[str, Any], version: str, says: str) -> None:
    with pytest.raises(FleetError, match=says):
        argv(flags, version)


@pytest.mark.parametrize("name", ["api_key", "--admin-api-key", "hf_token", "db-password", "client_secret"])
def test_a_secret_is_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(FleetError, match="no secret") as caught:
        argv({name: "hunter2"}, NEW)
    assert "hunter2" not in str(caught.value)


def test_a_secret_in_a_value_is_refused_and_not_repeated() -> None:
    with pytest.raises(FleetError, match="no secret") as caught:
        argv({"model_loader_extra_config": '{"token":"hunter2"}'}, NEW)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("version", ["latest", "0.4.10", ""])
def test_a_version_that_is_none_is_said(version: str) -> None:
    with pytest.raises(FleetError, match="version"):
        argv_for({"tp_size": 2}, version, shipped_table(OLD))


def test_a_version_between_has_the_flags_of_its_installation() -> None:
    table = {"--mamba-radix-cache-strategy": shipped_table(NEW)["--mamba-radix-cache-strategy"]}
    assert argv_for({"mamba_strategy": "auto"}, "0.5.18.post1", table) == ["--mamba-radix-cache-strategy", "auto"]
    with pytest.raises(FleetError, match=r"0\.5\.12 and 0\.5\.23"):
        argv_for({"mamba_strategy": "auto"}, "0.5.18", {})


@pytest.mark.parametrize("version", SHIPPED)
def test_the_planner_spells_flags_as_a_fleet_does(version: str) -> None:
    flags = Flags(
        mem_fraction_static=0.9, mamba_strategy="extra_buffer", cuda_graph_max_bs_decode=160, chunked_prefill_size=-1
    )
    given = {"mem_fraction_static": 0.9, "mamba_strategy": "extra_buffer", "chunked_prefill_size": -1,
             "cuda_graph_max_bs_decode": 160}  # fmt: skip
    assert to_argv(flags, rules(version)) == argv(given, version)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ({}, 1), ({"tp_size": 4}, 4), ({"--tensor-parallel-size": 2, "pp_size": 2}, 4),
        ({"tp-size": 2, "dp_size": 4}, 8),
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
    ],
)  # fmt: skip
def test_gpus_of_a_server(flags: dict[str, Any], count: int) -> None:
    assert gpus_per_server(flags) == count


@pytest.mark.parametrize("size", [0, "2", True, 1.5])
def test_a_size_that_is_none_is_said(size: Any) -> None:
    with pytest.raises(FleetError, match="tp_size"):
        gpus_per_server({"tp_size": size})


@pytest.mark.parametrize("version", SHIPPED)
def test_the_shipped_flags_are_what_the_tool_writes(version: str) -> None:
    table = {name: dict(row) for name, row in shipped_table(version).items()}
    assert len(table) > 400
    assert json.loads(TARGET.read_text())[version] == reduced(table)
