"""Every verdict of preflight from facts, good and bad; then the command on this machine, which has no GPU."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dfexp import cli, params, preflight
from dfexp.engines.sglang_install import Installation
from dfexp.errors import FleetError
from dfexp.hardware import GpuNow, GpusNow, gpus_now, held_bytes
from dfexp.layout import FleetFolder
from dfexp.preflight import (
    Check,
    accepted,
    judged,
    of_attention,
    of_driver,
    of_flags,
    of_gpu_memory,
    of_gpus,
    of_model,
    of_ports,
    of_sglang,
    of_toolkit,
)
from dfexp.processes import ProcessId

GIB = 2**30
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
FLAGS = {"--page-size": {"type": "int"}}
INSTALLED = Installation(
    python="/env/bin/python", python_version="3.12.3", sglang_version="0.5.12", flags=FLAGS, torch_version="2.11.0",
    torch_cuda="12.8", flashinfer_version="0.6.8", cuda_home="/usr/local/cuda", nvcc="/usr/local/cuda/bin/nvcc",
    nvcc_version="12.8", home_has_headers=True,
)  # fmt: skip


def gpu(index: int = 0, capability: tuple[int, int] = (12, 0), **others: Any) -> GpuNow:
    facts: dict[str, Any] = {"uuid": f"GPU-{index}", "name": RTX, "is_mig": False, "processes": ()}
    memory = {"total_bytes": 96 * GIB, "free_bytes": 95 * GIB, "used_bytes": GIB}
    return GpuNow(index=index, capability=capability, **{**facts, **memory, **others})


def changed(**facts: Any) -> Installation:
    return replace(INSTALLED, **facts)


def outcome(check: Check) -> tuple[str, str]:
    """State and words; a failed check always says what to do, another never does."""
    assert bool(check.fix) == (check.state == "fail")
    return check.state, check.found


@pytest.mark.parametrize(
    ("installed", "problem", "state", "words"),
    [
        (INSTALLED, "", "pass", "0.5.12, torch 2.11.0, FlashInfer 0.6.8, in /env/bin/python (Python 3.12.3)"),
        (changed(sglang_version="0.5.9"), "", "pass", "0.5.9, "),
        (None, "fleet.python: /x cannot be run", "fail", "fleet.python: /x cannot be run"),
        (changed(sglang_version=None, flags={}), "", "fail", "there is no package sglang, in /env/bin/python"),
        (changed(sglang_version="0.5.8"), "", "fail", "at least 0.5.9"),
        (
            changed(flags={}, error="ImportError: no libcudart"),
            "",
            "fail",
            "cannot be imported: ImportError: no libcudart",
        ),
    ],
)
def test_sglang(installed: Installation | None, problem: str, state: str, words: str) -> None:
    found = outcome(of_sglang(installed, problem))
    assert found[0] == state
    assert words in found[1]


@pytest.mark.parametrize(
    ("installed", "refused", "state", "words"),
    [
        (INSTALLED, {"0.5.12": ""}, "pass", "taken by the parser of SGLang 0.5.12"),
        (INSTALLED, {"0.5.12": "argument --page-size: invalid"}, "fail", "0.5.12: argument --page-size: invalid"),
        (None, {"0.5.12": "", "0.5.23": "is gone"}, "note", "0.5.12: spelled right; 0.5.23: is gone"),
        (None, {"0.5.12": "no such flag", "0.5.23": "no such flag"}, "fail", "no such flag"),
        (changed(flags={}), {"0.5.12": ""}, "note", "not checked by SGLang's own parser"),
    ],
)
def test_flags(installed: Installation | None, refused: dict[str, str], state: str, words: str) -> None:
    found = outcome(of_flags(installed, refused))
    assert found[0] == state
    assert words in found[1]


@pytest.mark.parametrize(
    ("names", "chosen", "problem", "state", "words"),
    [
        (["0", "1"], [gpu(0), gpu(1)], "", "pass", f"0, 1: {RTX}, {RTX}"),
        (["GPU-1"], [gpu(1)], "", "pass", f"GPU-1: {RTX}"),
        (["0", "8", "9"], [gpu(0)], "", "fail", "3 needed: there is no GPU 8, 9"),
        (["0"], [], "the NVIDIA driver does not answer", "fail", "1 needed: the NVIDIA driver does not answer"),
        (["0"], [gpu(0, is_mig=True)], "", "fail", "GPU 0 is divided by MIG"),
    ],
)
def test_gpus(names: list[str], chosen: list[GpuNow], problem: str, state: str, words: str) -> None:
    assert outcome(of_gpus(names, chosen, problem)) == (
        state,
        words if "needed" in words or state == "pass" else f"1 needed: {words}",
    )


@pytest.mark.parametrize(
    ("chosen", "flags", "state", "words"),
    [
        ([gpu()], {"mem_fraction_static": 0.9}, "pass", "each has at least 90% free"),
        ([gpu()], {}, "pass", "each has at least 97% free"),
        ([gpu(), gpu(1, processes=("vllm (pid 7), 80.0 GiB",), free_bytes=15 * GIB)], {}, "fail",
         "GPU 1: 15.0 of 96.0 GiB free; there: vllm (pid 7), 80.0 GiB"),
        ([gpu(free_bytes=80 * GIB)], {"mem_fraction_static": 0.8}, "pass", "each has at least 80% free"),
        ([gpu(free_bytes=80 * GIB)], {"mem_fraction_static": 0.9}, "fail",
         "GPU 0: 80.0 of 96.0 GiB free; there: nothing that can be seen"),
        ([], {}, "note", "not checked: needs the GPUs"),
    ],
)  # fmt: skip
def test_gpu_memory(chosen: list[GpuNow], flags: dict[str, Any], state: str, words: str) -> None:
    found = outcome(of_gpu_memory(chosen, flags))
    assert found[0] == state
    assert words in found[1]


@pytest.mark.parametrize(
    ("backend", "capability", "version", "is_hybrid", "state"),
    [
        ("flashinfer", (12, 0), "0.5.12", True, "pass"),
        ("triton", (12, 0), "0.5.23", True, "pass"),
        ("fa3", (12, 0), "0.5.12", False, "fail"),
        ("fa3", (9, 0), "0.5.23", True, "pass"),
        ("fa3", (8, 6), "0.5.23", False, "pass"),
        ("fa4", (10, 0), "0.5.12", True, "pass"),
        ("fa4", (12, 0), "0.5.23", False, "fail"),
        ("flashmla", (9, 0), "0.5.12", False, "pass"),
        ("flashmla", (10, 0), "0.5.12", False, "fail"),
        ("cutlass_mla", (10, 0), "0.5.12", False, "pass"),
        ("cutlass_mla", (12, 0), "0.5.12", False, "fail"),
        ("trtllm_mla", (10, 3), "0.5.12", False, "pass"),
        ("trtllm_mla", (12, 0), "0.5.12", False, "fail"),
        ("trtllm_mha", (12, 0), "0.5.12", True, "fail"),
        ("trtllm_mha", (12, 0), "0.5.23", True, "pass"),
        ("torch_native", (12, 0), "0.5.12", False, "pass"),
        ("torch_native", (12, 0), "0.5.12", True, "fail"),
        ("torch_native", (9, 0), "0.5.12", True, "pass"),
        ("intel_amx", (9, 0), "0.5.12", False, "fail"),
        ("brand_new", (12, 0), "0.5.12", False, "note"),
    ],
)
def test_attention_backend(
    backend: str, capability: tuple[int, int], version: str, is_hybrid: bool, state: str
) -> None:
    chosen = [gpu(capability=(9, 0)), gpu(1, capability)] if backend == "fa3" else [gpu(capability=capability)]
    found = outcome(of_attention({"attention_backend": backend}, chosen, version, is_hybrid=is_hybrid))
    assert found[0] == state
    if state == "fail":
        assert (
            f"{backend} does not run on GPU {chosen[-1].index}, {RTX}, compute capability {capability[0]}." in found[1]
        )


def test_attention_backends_of_one_phase_count_and_none_is_sglangs_choice() -> None:
    for flag in ("decode_attention_backend", "prefill_attention_backend"):
        assert outcome(of_attention({flag: "fa3"}, [gpu()], "0.5.12", is_hybrid=False))[0] == "fail"
    assert outcome(of_attention({}, [gpu()], "0.5.12", is_hybrid=False)) == ("note", "SGLang chooses one")
    assert outcome(of_attention({"attention_backend": "fa3"}, [], "0.5.12", is_hybrid=False))[0] == "note"
    assert outcome(of_attention({"attention_backend": "fa3"}, [gpu()], "0.4.0", is_hybrid=False))[0] == "fail"


@pytest.mark.parametrize(
    ("driver", "installed", "state"),
    [
        ("12.8", INSTALLED, "pass"),
        ("13.0", INSTALLED, "pass"),
        ("12.4", INSTALLED, "note"),
        ("12.9", changed(torch_cuda="13.0"), "fail"),
        ("13.0", changed(torch_cuda=None), "fail"),
        (None, changed(torch_cuda=None), "fail"),
        (None, INSTALLED, "note"),
        ("12.8", None, "note"),
        ("12.10", changed(torch_cuda="12.9"), "pass"),
    ],
)
def test_driver(driver: str | None, installed: Installation | None, state: str) -> None:
    assert outcome(of_driver(installed, driver))[0] == state


@pytest.mark.parametrize(
    ("installed", "capability", "state", "words"),
    [
        (INSTALLED, (12, 0), "pass", "/usr/local/cuda/bin/nvcc: CUDA 12.8, with headers; torch's is 12.8"),
        (changed(nvcc_version="12.9"), (12, 1), "pass", "CUDA 12.9"),
        (INSTALLED, (12, 1), "fail", "needs CUDA 12.9 or newer"),
        (changed(nvcc_version="12.4", torch_cuda="12.4"), (12, 0), "fail", "needs CUDA 12.8 or newer"),
        (changed(nvcc_version="12.4", torch_cuda="12.4"), (9, 0), "pass", "CUDA 12.4"),
        (changed(nvcc_version="13.0"), (12, 0), "fail", "CUDA 13.0, with headers; torch's is 12.8"),
        (changed(nvcc=None, nvcc_version=None), (12, 0), "fail", "there is no nvcc in /usr/local/cuda"),
        (changed(nvcc_version=None, nvcc_error="fatal error: nv/target: No such file"), (12, 0), "fail", "nv/target"),
        (changed(home_has_headers=False), (12, 0), "note", "no headers in /usr/local/cuda/include"),
        (changed(torch_cuda=None), (12, 0), "pass", "torch's is not known"),
        (None, (12, 0), "note", "needs the interpreter"),
    ],
)
def test_cuda_toolkit(installed: Installation | None, capability: tuple[int, int], state: str, words: str) -> None:
    found = outcome(of_toolkit(installed, [gpu(capability=capability)]))
    assert found[0] == state
    assert words in found[1]


def test_ports() -> None:
    assert outcome(of_ports(range(30000, 30008), {29999, 30008})) == ("pass", "30000 to 30007 are free")
    assert outcome(of_ports(range(30000, 30008), {30001, 30007})) == ("fail", "in use: 30001, 30007")


@pytest.mark.parametrize(("have", "state"), [(9.9, "fail"), (10.0, "pass"), (float("inf"), "pass")])
def test_enough(have: float, state: str) -> None:
    assert outcome(preflight.enough("disk", have, 10, "GiB"))[0] == state


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with all that a model needs; the weights are zeros."""
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 4}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "..."}')
    names = [f"model-{part}-of-2.safetensors" for part in (1, 2)]
    for name in names:
        (folder / name).write_bytes(weights(1000))
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def weights(size: int) -> bytes:
    """A safetensors file with one tensor of zeros."""
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": {"dtype": "U8", "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.mark.parametrize("damaged", [weights(1000)[:-1], weights(1000) + b"0", bytes(1000), b"\xff" * 1000])
def test_weights_that_are_not_as_long_as_their_header_says(model: Path, damaged: bytes) -> None:
    (model / "model-2-of-2.safetensors").write_bytes(damaged)
    found = "1 of 2 weight files cut short or damaged: ['model-2-of-2.safetensors']"
    assert preflight.model_faults(model, {})[0] == [found]


def test_a_complete_model(model: Path) -> None:
    faults, config = preflight.model_faults(model, {})
    assert faults == []
    state, words = outcome(of_model(str(model), faults, config))
    assert (state, "Qwen3NextForCausalLM" in words) == ("pass", True)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5000000000\n"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", None, "no config.json that names architectures"),
        ("config.json", "{}", "no config.json that names architectures"),
        ("config.json", "<html>", "config.json is not a JSON object"),
        ("config.json", LFS, "config.json is not a JSON object"),
        ("model.safetensors.index.json", "[", "index.json is not a JSON object"),
        ("model-1-of-2.safetensors", None, "1 of 2 weight files missing, empty or pointers of Git LFS: ['model-1-of-2"),
        ("model-2-of-2.safetensors", "", "1 of 2 weight files missing"),
        ("model-2-of-2.safetensors", LFS, "1 of 2 weight files missing"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1, "b": [2]}}', "2 of 2 weight files missing"),
        ("tokenizer.json", None, "no tokenizer"),
        ("tokenizer_config.json", "{}", "no chat template"),
    ],
)
def test_an_incomplete_model(model: Path, file: str, text: str | None, words: str) -> None:
    (model / file).unlink()
    if text is not None:
        (model / file).write_text(text)
    faults, config = preflight.model_faults(model, {})
    assert len(faults) == 1
    assert words in faults[0]
    assert outcome(of_model(str(model), faults, config))[0] == "fail"


def test_a_link_to_weights_that_are_gone_is_no_file(model: Path) -> None:
    (model / "model-1-of-2.safetensors").unlink()
    (model / "model-1-of-2.safetensors").symlink_to(model / "blobs" / "gone")
    assert len(preflight.model_faults(model, {})[0]) == 1


def test_flags_can_stand_in_for_files(model: Path) -> None:
    for path in [*model.glob("model*"), model / "tokenizer_config.json"]:
        path.unlink()
    assert preflight.model_faults(model, {})[0] == ["no *.safetensors", "no chat template"]
    assert preflight.model_faults(model, {"load_format": "dummy", "chat_template": "chatml"})[0] == []
    (model / "chat_template.jinja").write_text("...")
    assert preflight.model_faults(model, {"load_format": "dummy"})[0] == []


def test_a_name_on_the_hub_is_no_failure_and_a_wrong_path_is() -> None:
    assert outcome(of_model("Qwen/Qwen3-8B", [], {}))[0] == "note"
    assert outcome(of_model("/models/gone", [], {})) == ("fail", "/models/gone: there is no such folder")


def test_values_of_a_wrong_type_are_told_once_and_stop_no_other_check(model: Path, tmp_path: Path) -> None:
    flags = {"mem_fraction_static": "0.9", "max_running_requests": "many", "tp_size": "two"}
    found = by_name(preflight.checks_for(spec(model, {"flags": flags}, plan=PLAN), tmp_path))
    assert found["flags"].state == "fail"
    assert {"model", "GPUs", "capacity", "disk", "open files"} < found.keys()
    assert outcome(of_gpu_memory([gpu()], flags))[0] == "pass"


def test_the_text_is_aligned_and_a_fix_stands_below() -> None:
    checks = [
        preflight.noted("nvcc", "so"),
        preflight.judged("disk", "", "much"),
        preflight.judged("ports", "busy", ""),
    ]
    text = preflight.render(checks).split("\n")
    assert text[:3] == ["note  nvcc   so", "pass  disk   much", "FAIL  ports  busy"]
    assert text[3] == " " * 13 + checks[2].fix


PLAN = {
    "model": "Qwen3.6-27B", "gpu": "rtx-pro-6000", "prompts": 654_676,
    "prompt": {"tokens": 200.0}, "completion": {"tokens": 2600.0},
}  # fmt: skip


def spec(model: Path | str, fleet: dict[str, Any] | None = None, **others: Any) -> params.RunSpec:
    group = {"engine": "sglang", "model": str(model), "python": sys.executable, **(fleet or {})}
    tree = {"run": "r", "fleet": group, "prompts": {"path": "p.jsonl"}, **others}
    return params.validate(tree, "test")


def by_name(checks: list[Check]) -> dict[str, Check]:
    found = {check.name: check for check in checks}
    assert len(found) == len(checks)
    return found


def test_without_gpu_and_sglang_everything_else_is_checked(model: Path, tmp_path: Path) -> None:
    """One run lists all that is missing; what depends on it is not called good."""
    assert gpus_now().gpus == (), "written for a machine without a GPU"
    flags = {"attention_backend": "fa3", "tp_size": 2, "max_running_requests": 8}
    found = by_name(preflight.checks_for(spec(model, {"servers": 4, "flags": flags}), tmp_path))
    as_this_machine_has_them = {"CUDA toolkit", "shared memory"}
    assert as_this_machine_has_them < found.keys()
    states = {name: check.state for name, check in found.items() if name not in as_this_machine_has_them}
    assert states == {
        "SGLang": "fail", "flags": "note", "model": "pass", "GPUs": "fail", "GPU memory": "note",
        "attention backend": "note", "driver": "note", "disk": "pass", "open files": "pass",
    }  # fmt: skip
    assert found["GPUs"].found.startswith("8 needed: ")


def test_a_cpu_fleet_leaves_out_gpus_and_says_so(model: Path, tmp_path: Path) -> None:
    found = by_name(preflight.checks_for(spec(model, {"device": "cpu"}), tmp_path))
    assert found.keys() == {"SGLang", "flags", "model", "GPUs", "disk", "open files"}
    assert outcome(found["GPUs"]) == ("note", "device: cpu, so GPUs, driver and CUDA toolkit are not looked at")


def test_require_raises_with_every_failed_check_and_its_fix(tmp_path: Path) -> None:
    with pytest.raises(FleetError) as caught:
        preflight.require(spec("/models/gone", {"device": "cpu"}), tmp_path)
    words = str(caught.value)
    assert words.startswith("2 check(s) failed; nothing was started.\nFAIL  SGLang")
    assert [fix in words for fix in ("fleet.python", "Point fleet.model")] == [True, True]
    assert "disk" not in words


def test_other_engines_are_checked_for_what_applies(tmp_path: Path) -> None:
    for group in ({"engine": "llamacpp"}, {"engine": "external", "urls": ["http://127.0.0.1:1"]}):
        tree = {"run": "r", "fleet": group, "prompts": {"path": "p.jsonl"}}
        checks = preflight.require(params.validate(tree, "test"), tmp_path)
        assert [check.name for check in checks] == ["disk", "open files"]
        assert preflight.launches_for(params.validate(tree, "test"), tmp_path) == {}


def simulated(flags: dict[str, Any]) -> params.RunSpec:
    fleet = {"engine": "simulated", "model": "Qwen3.6-27B", "servers": 2, "flags": flags}
    return params.validate({"run": "r", "fleet": fleet, "prompts": {"path": "p.jsonl"}, "plan": PLAN}, "test")


def test_simulated_servers_need_neither_sglang_nor_gpu_but_right_flags_and_room(tmp_path: Path) -> None:
    found = by_name(preflight.checks_for(simulated({"mem_fraction_static": 0.9}), tmp_path))
    assert {name: check.state for name, check in found.items()} == dict.fromkeys(
        ("flags", "memory", "capacity", "disk", "open files"), "pass"
    )
    assert found["flags"].found == "spelled right for SGLang 0.5.12, which is simulated"
    found = by_name(preflight.checks_for(simulated({"mem_fraction_statik": 0.5}), tmp_path))
    assert outcome(found["flags"])[0] == "fail"
    assert "Did you mean mem_fraction_static" in found["flags"].found
    with pytest.raises(FleetError, match=r"mem_fraction_static = 0\.5 leaves"):
        preflight.require(simulated({"mem_fraction_static": 0.5}), tmp_path)


def test_a_port_in_use_is_named(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = by_name(preflight.checks_for(spec(model, {"first_port": port, "device": "cpu"}), tmp_path))
    assert outcome(found["ports"]) == ("fail", f"in use: {port}")


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_open_files_follow_the_requests_in_flight(model: Path, tmp_path: Path) -> None:
    group = {"servers": 8, "device": "cpu", "flags": {"max_running_requests": 128}}
    found = by_name(preflight.checks_for(spec(model, group), tmp_path))["open files"]
    assert outcome(found) == ("fail", "1,024 for 1024 requests in flight, 1,280 needed")
    odd = {**group, "flags": {"--max-running-requests": 16}}
    assert by_name(preflight.checks_for(spec(model, odd), tmp_path))["open files"].state == "pass"
    few = spec(model, group, generation={"concurrency": 16})
    assert by_name(preflight.checks_for(few, tmp_path))["open files"].state == "pass"


def test_the_plan_is_made_for_the_flags_of_the_fleet(model: Path, tmp_path: Path) -> None:
    flags = {"mem_fraction_static": 0.9, "mamba_strategy": "no_buffer", "max_running_requests": 128, "page_size": 1}
    flags |= {"mamba_ssm_dtype": "bfloat16", "context_length": 8192, "chunked_prefill_size": 8192, "log_level": "info"}
    found = by_name(preflight.checks_for(spec(model, {"servers": 8, "flags": flags}, plan=PLAN), tmp_path))
    assert found["capacity"].state == "pass"
    assert found["capacity"].found.startswith("72 requests at once, 289,")
    assert "15 needed" in found["disk"].found  # 654,676 * 2,600 tokens beside 5 GiB to spare
    flags["mem_fraction_static"] = 0.5
    found = by_name(preflight.checks_for(spec(model, {"servers": 8, "flags": flags}, plan=PLAN), tmp_path))
    assert found["capacity"].state == "fail"
    assert "mem_fraction_static = 0.5 leaves" in found["capacity"].found
    assert "15 needed" in found["disk"].found
    del flags["mem_fraction_static"]
    found = by_name(preflight.checks_for(spec(model, {"flags": flags}, plan=PLAN), tmp_path))
    assert outcome(found["capacity"])[0] == "note"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"gpu": "rtx-pro-60000"}, "GPU 'rtx-pro-60000' is not in the table"),
        ({"model": "Qwen9.9-27B"}, "model 'Qwen9.9-27B' is neither a path nor in the shipped table"),
    ],
)
def test_a_name_that_is_wrong_in_the_plan_fails_where_servers_are_held_to_it(
    model: Path, tmp_path: Path, plan: dict[str, Any], words: str
) -> None:
    for held, state in (
        ({}, "fail"),
        ({"least_share_of_plan": 0.0}, "note"),
        ({"accepted_checks": ["capacity"]}, "note"),
    ):
        group = {"flags": {"mem_fraction_static": 0.9}, **held}
        found = by_name(preflight.checks_for(spec(model, group, plan={**PLAN, **plan}), tmp_path))
        assert outcome(found["capacity"])[0] == state
        assert words in found["capacity"].found


def test_a_model_that_cannot_be_sized_is_a_note(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": ["KimiLinear"], "model_type": "kimi_linear"}))
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 10**10}}))
    group = {"flags": {"mem_fraction_static": 0.9}}
    plan = {**PLAN, "model": None}
    found = by_name(preflight.checks_for(spec(model, group, plan=plan), tmp_path))
    assert outcome(found["capacity"])[0] == "note"
    assert "model_type 'kimi_linear'" in found["capacity"].found


def test_gpus_with_much_less_room_than_those_of_the_plan_fail(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's answer is replaced: a machine with one smaller GPU than the plan has."""
    flags = {"mem_fraction_static": 0.9, "mamba_ssm_dtype": "bfloat16", "context_length": 8192}
    smaller = gpu(name="NVIDIA H100 80GB HBM3", total_bytes=80 * GIB, free_bytes=79 * GIB, capability=(9, 0))
    monkeypatch.setattr(preflight, "gpus_now", lambda: GpusNow(gpus=(smaller,), driver_cuda="12.8"))
    found = by_name(preflight.checks_for(spec(model, {"flags": flags}, plan=PLAN), tmp_path))["capacity"]
    assert outcome(found)[0] == "fail"
    assert "on h100, as predicted: max_running_requests is" in found.found
    same = {**PLAN, "gpu": "h100"}
    assert by_name(preflight.checks_for(spec(model, {"flags": flags}, plan=same), tmp_path))["capacity"].state == "pass"


def test_damage_stops_no_other_check(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).unlink()
        (model / name).mkdir()
    monkeypatch.setattr(preflight, "_SHARED_MEMORY", tmp_path / "gone")  # as on macOS
    group = {"flags": {"tp_size": 2}, "first_port": 31000}
    found = by_name(preflight.checks_for(spec(model, group, plan={**PLAN, "model": str(model)}), tmp_path))
    assert {"SGLang", "GPUs", "disk", "open files", "ports"} < found.keys()
    assert [outcome(found[name])[0] for name in ("model", "shared memory", "capacity")] == ["fail", "note", "note"]
    assert "Is a directory" in found["model"].found


def test_commands_for_both_versions_where_none_is_installed(model: Path, tmp_path: Path) -> None:
    flags = {"mamba_strategy": "no_buffer", "tp_size": 2}
    found = preflight.launches_for(spec(model, {"servers": 2, "first_port": 30000, "flags": flags}), tmp_path)
    assert found.keys() == {"0.5.12", "0.5.23"}
    old, new = found["0.5.12"], found["0.5.23"]
    assert [line.split()[0] for line in old] == ["CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=2,3"]
    assert [f"--port {30000 + index}" in line for index, line in enumerate(old)] == [True, True]
    assert "--mamba-scheduler-strategy no_buffer" in old[0]
    assert "--disable-overlap-schedule" not in old[0]
    assert "--mamba-radix-cache-strategy no_buffer" in new[1]
    assert "--disable-overlap-schedule" in new[1]


def test_a_flag_that_one_version_lacks_is_told_for_that_version(model: Path, tmp_path: Path) -> None:
    group = {"flags": {"retraction_policy": "length"}}
    found = preflight.launches_for(spec(model, group), tmp_path)
    assert "retraction_policy" in found["0.5.12"][0]
    assert "--retraction-policy length" in found["0.5.23"][0]
    assert by_name(preflight.checks_for(spec(model, group), tmp_path))["flags"].state == "note"
    group = {"flags": {"retraction_polizy": "length"}}
    assert by_name(preflight.checks_for(spec(model, group), tmp_path))["flags"].state == "fail"


def test_memory_in_use_is_not_known_without_a_driver() -> None:
    assert held_bytes(["0", "GPU-1"]) is None


@pytest.fixture
def project(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a parameter file for one SGLang server."""
    (tmp_path / "params").mkdir()
    group = {"engine": "sglang", "model": str(model), "env": {"SETTING": "not-to-be-shown"}, "first_port": 31000}
    tree = {"run": "r", "fleet": group, "prompts": {"path": "p.jsonl"}}
    (tmp_path / "params" / "a.yaml").write_text(json.dumps(tree))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SGLANG_API_KEY", "not-to-be-shown")
    return tmp_path


def test_the_command_lists_what_is_missing_and_what_would_run(project: Path) -> None:
    command = [sys.executable, "-m", "dfexp.cli", "preflight", "params/a.yaml"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "warning: prompts.path: p.jsonl is not there (yet)\n")
    assert "FAIL  SGLang" in done.stdout
    assert "FAIL  GPUs" in done.stdout
    assert done.stdout.count("-m sglang.launch_server --model-path") == 2
    assert "not-to-be-shown" not in done.stdout
    assert sorted(path.name for path in project.iterdir()) == ["models", "params"]


@pytest.mark.usefixtures("project")
def test_the_command_tells_how_servers_differ(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "fleet.servers=2", "--set", "fleet.first_port=null"]
    assert cli.main(["preflight", "params/a.yaml", *changes, "--set", "fleet.device=cpu"]) == 1
    assert capsys.readouterr().out.count("  server 1: the same with another free port\n") == 2
    assert cli.main(["preflight", "params/a.yaml", *changes]) == 1
    said = capsys.readouterr().out
    assert said.count("; server 0:\n") == 2, "from 0, as fleet.faults count"
    assert "  server 1: the same with CUDA_VISIBLE_DEVICES=1, another free port\n" in said


def test_the_command_tells_that_the_fleet_runs_already(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    me = ProcessId.current()
    server = {"name": "h:1", "url": "http://h:1", "argv": ["x"], "pid": me.pid, "process_started": me.started}
    group = params.load(project / "params" / "a.yaml").fleet.model_dump()
    folder = FleetFolder.named(project, "outputs", "r")
    folder.path.mkdir(parents=True)
    record = {"identity": "f2", "spec": group, "root": str(project), "servers": [server], "launcher": str(me)}
    folder.fleet_json.write_text(json.dumps(record))
    cli.main(["preflight", "params/a.yaml"])
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "fleet 'r' runs already; its own ports and memory count as taken"
    assert second.startswith("FAIL  SGLang")
    folder.fleet_json.write_text("{")
    cli.main(["preflight", "params/a.yaml"])
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert "fleet.json is damaged" in first
    assert second.startswith("FAIL  SGLang")


@pytest.mark.usefixtures("project")
def test_the_command_succeeds_where_nothing_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "params/a.yaml", "--set", "fleet={engine: llamacpp}"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["pass", "pass"]


def test_a_check_that_is_wrong_here_can_be_accepted() -> None:
    checks = [
        judged("CUDA toolkit", "there is none", ""),
        judged("ports", "in use: 30000", ""),
        judged("disk", "", "67 GiB"),
    ]
    found = {check.name: check for check in accepted(checks, ["CUDA toolkit", "disk"])}
    assert (found["CUDA toolkit"].state, found["CUDA toolkit"].found) == ("note", "failed, and accepted: there is none")
    assert (found["ports"].state, found["disk"].state) == ("fail", "pass")
    with pytest.raises(FleetError, match="there is no check 'nvc', but CUDA toolkit, ports, disk"):
        accepted(checks, ["nvc"])
