"""The sglang engine where no server runs: rooms out of logs, GPUs of servers, and what tells one model from another."""

import json
from pathlib import Path

import pytest

from dfexp.capacity.startup_log import read_startup
from dfexp.engines.base import Server, engine_for, start_log
from dfexp.engines.pages import tokens_so_far
from dfexp.engines.sglang import SglangEngine
from dfexp.engines.sglang_servers import from_log
from dfexp.errors import EngineStartError, FleetError
from dfexp.layout import FleetFolder
from dfexp.metrics import from_metrics
from dfexp.params import SglangFleet
from dfexp.records import ServerLimits, TokenCounts

LOGS = Path(__file__).parents[1] / "data" / "capacity" / "logs"
LOG = "[2026-11-29 16:43:58 DP{rank} TP0] max_total_num_tokens=20000, max_running_requests=16, context_len=8192\n"


def engine(root: Path = Path("/nowhere"), **group: object) -> SglangEngine:
    found = engine_for(SglangFleet.model_validate({"engine": "sglang", "model": "models/m", **group}), root)
    assert isinstance(found, SglangEngine)
    return found


@pytest.mark.parametrize(
    ("log", "room"),
    [
        ("0.5.12_hybrid", (16, 8192, 20_000, 57_254)),
        ("0.5.23_hybrid", (16, 8192, 20_000, 57_604)),
        ("0.5.12_hybrid_pressure", (6, 8192, 700, 20)),  # 8 were asked for
        ("0.5.23_dense_retraction", (16, 8192, 700, None)),
        ("auto_0.5.12", (128, 8192, 9_272_354, 39_738)),
    ],
)
def test_the_room_out_of_a_real_log(log: str, room: tuple[int | None, ...]) -> None:
    said = from_log(read_startup((LOGS / f"{log}.log").read_text().split("\n")))
    assert (
        said.max_running_requests,
        said.context_length,
        said.max_total_num_tokens,
        said.max_mamba_cache_size,
    ) == room


def test_the_log_alone_does_not_tell_what_data_parallel_ranks_have_together() -> None:
    assert from_log(read_startup(LOG.format(rank=rank) for rank in (0, 1))) == ServerLimits()
    assert from_log(read_startup([LOG.replace("DP{rank} ", "")])).max_running_requests == 16


def test_the_first_and_the_last_part_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"of yesterday\n" + b"begin" + b"." * 10_000 + b"end")
    server = Server(name="a", url="http://a:1", log=str(log), log_start=13)
    assert start_log(server, 5) == "begin..end"
    assert start_log(server) == "begin" + "." * 10_000 + "end"


@pytest.mark.parametrize(
    ("visible", "group", "expected"),
    [
        (None, {"servers": 2}, [("0",), ("1",)]),
        (None, {"servers": 2, "flags": {"tp_size": 2}}, [("0", "1"), ("2", "3")]),
        (None, {"servers": 2, "gpus": [3, 1]}, [("3",), ("1",)]),
        ("4,5,6", {"servers": 2}, [("4",), ("5",)]),  # as a batch system says what there is to take from
        ("GPU-a,GPU-b", {"servers": 1, "gpus": [1]}, [("GPU-b",)]),
        (" 2, 2,3", {"servers": 2}, [("2",), ("3",)]),
        (None, {"servers": 2, "device": "cpu"}, [(), ()]),
    ],
)
def test_the_gpus_of_each_server(monkeypatch, visible, group, expected) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert engine(**group).gpus() == expected


@pytest.mark.parametrize(
    ("visible", "group", "words"),
    [
        (None, {"servers": 3, "gpus": [0, 1]}, "need 3 GPUs, but fleet.gpus is [0, 1]"),
        ("4,5", {"servers": 3}, "need 3 GPUs, but CUDA_VISIBLE_DEVICES is '4,5'"),
        ("4,5", {"servers": 1, "gpus": [2]}, "CUDA_VISIBLE_DEVICES is '4,5'"),
        ("", {"servers": 1}, "need 1 GPUs, but CUDA_VISIBLE_DEVICES is ''"),
    ],
)
def test_too_few_gpus_are_told(monkeypatch, visible, group, words) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(FleetError) as caught:
        engine(**group).gpus()
    assert words in str(caught.value)


def test_another_file_and_another_dtype_are_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    (folder / "model.safetensors").write_bytes(b"1" * 1000)

    def seen(**flags: object) -> str:
        return engine(tmp_path, flags=flags).model_fingerprint("http://a", "")

    first = seen(mem_fraction_static=0.9)
    assert first.startswith("m ")
    assert seen(mem_fraction_static=0.8, mamba_strategy="no_buffer", max_running_requests=4) == first
    assert len({first, seen(mamba_ssm_dtype="bfloat16"), seen(**{"--quantization": "fp8"})}) == 3
    (folder / "model.safetensors").write_bytes(b"2" * 1000)
    assert seen() != first
    assert engine(model="Qwen/Qwen3.6-27B").model_fingerprint("http://a", "") == "Qwen3.6-27B"


def test_an_interpreter_without_sglang_is_said_before_anything_starts(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path / "f")
    folder.logs.mkdir(parents=True)
    with pytest.raises(EngineStartError, match=r"has no SGLang.*fleet\.python"):
        engine(tmp_path, device="cpu").plan(folder, "secret")
    assert not list(folder.path.glob("server-*"))


def test_the_count_of_tokens_adds_up_ranks_and_tells_answers_from_prompts() -> None:
    series = 'sglang:realtime_tokens_total{engine_type="unified",mode="%s",dp_rank="%d",tp_rank="0"} %s\n'
    page = "# HELP sglang:realtime_tokens_total ...\n" + series % ("decode", 0, "1667.0")
    page += series % ("decode", 1, "3e+02") + series % ("prefill_compute", 0, "863.0")
    page += series % ("prefill_cache", 0, "9999.0")
    assert tokens_so_far(from_metrics(page, at=0, server="a")) == TokenCounts(1967.0, 2830.0)
    for little in ("sglang:num_running_reqs 3.0\n", series % ("decode", 0, "NaN")):
        assert tokens_so_far(from_metrics(little, at=0, server="a")) is None
