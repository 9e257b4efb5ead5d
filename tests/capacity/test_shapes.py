from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dfexp.capacity.config import from_config
from dfexp.capacity.errors import CapacityError, UnsupportedModel
from dfexp.capacity.models import load_model, shipped_models
from dfexp.capacity.shape import ModelShape, dtype_bytes
from dfexp.hardware import UnknownGpu, find_gpu, gpus

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "num_hidden_layers": 64,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32", "hidden_size": 5120, "intermediate_size": 17408, "vocab_size": 248320,
        "attn_output_gate": True, "tie_word_embeddings": False, "max_position_embeddings": 262144, "dtype": "bfloat16",
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
}  # fmt: skip


def parameters(shape: ModelShape) -> int:
    """All of a model's."""
    return shape.body_parameters + shape.head_parameters + shape.idle_parameters + shape.expert_parameters


@pytest.mark.parametrize(
    ("name", "slot_fp32", "slot_bf16", "token"),
    [
        ("Qwen3-Next-80B-A3B", 77_266_944, 39_518_208, 24_576),
        ("Qwen3.5-9B", 51_511_296, 26_345_472, 32_768),
        ("Qwen3.6-27B", 153_944_064, 78_446_592, 65_536),
        ("Qwen3.6-35B-A3B", 64_389_120, 32_931_840, 20_480),
        ("Qwen3.5-397B-A17B", 192_061_440, 97_689_600, 30_720),
        ("Nemotron-3-Nano-30B-A3B", 49_082_368, 24_965_120, 6_144),
        ("granite-4.0-h-micro", 76_437_504, 38_688_768, 8_192),
    ],
)
def test_bytes_of_slots_and_tokens(name: str, slot_fp32: int, slot_bf16: int, token: int) -> None:
    shape = load_model(name).shape
    assert shape.state is not None
    assert shape.state.slot_bytes(1, 4) == slot_fp32
    assert shape.state.slot_bytes(1, 2) == slot_bf16
    assert shape.attention.token_bytes(1, 2) == token


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-8B", 8.19), ("Qwen3-32B", 32.76), ("Qwen3-30B-A3B", 30.53), ("Qwen3-235B-A22B", 235.09),
        ("Meta-Llama-3.1-8B", 8.03), ("Qwen3-Next-80B-A3B", 79.67), ("Nemotron-3-Nano-30B-A3B", 31.58),
        ("granite-4.0-h-micro", 3.19),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_model_card(name: str, billions: float) -> None:
    assert parameters(load_model(name).shape) / 1e9 == pytest.approx(billions, abs=0.01)


def test_every_shipped_model_loads_and_says_where_it_is_from() -> None:
    models = [load_model(name) for name in shipped_models()]
    assert len(models) >= 15
    assert all(model.shape_source and model.weights_source and model.weights_bytes > 1e9 for model in models)


def test_a_nested_config_is_the_shipped_shape() -> None:
    read, shipped = from_config(HYBRID, "here"), load_model("Qwen3.6-27B").shape
    assert (read.state, read.attention) == (shipped.state, shipped.attention)
    assert parameters(read) == parameters(shipped)
    assert read.multimodal
    assert read.ssm_dtype == "float32"


def test_the_text_part_beats_the_root() -> None:
    config = {**HYBRID, "mamba_ssm_dtype": "bfloat16"}
    assert from_config(config, "m").ssm_dtype == "float32"
    text = {key: value for key, value in HYBRID["text_config"].items() if key != "mamba_ssm_dtype"}
    assert from_config({**config, "text_config": text}, "m").ssm_dtype == "bfloat16"


def test_latent_attention_keeps_one_vector() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    config = {**LLAMA, "model_type": "deepseek_v3", "q_lora_rank": 1536, **latent}
    attention = from_config(config, "m").attention
    assert attention.token_bytes(1, 2) == attention.token_bytes(8, 2) == 32 * 576 * 2


def test_kv_heads_are_replicated_when_tp_exceeds_them() -> None:
    attention = from_config(LLAMA, "m").attention
    assert [attention.token_bytes(tp, 2) for tp in (1, 4, 8, 16)] == [131_072, 32_768, 16_384, 16_384]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "kimi_linear"}, "KDA"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "KDA"),
        ({"model_type": "gemma3_text"}, "sliding-window"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding-window"),
        ({"index_topk": 2048}, "sparse-attention"),
        ({"model_type": "minicpm_sala"}, "lightning"),
        ({"model_type": "brand_new"}, "brand_new"),
        ({"layer_types": ["odd"] * 32}, "odd"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        from_config({**LLAMA, **change}, "m")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": "32"}, "'32'"),
        ({"vocab_size": -1}, "-1"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"]}, "1 entries"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "MX"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "odd"]}, "M\\?"),
        ({"model_type": "nemotron_h"}, "layers_block_type"),
        ({"model_type": "qwen3_next", "full_attention_interval": 4}, "linear_num_value_heads"),
        ({"model_type": "qwen3_next", "full_attention_interval": 64}, "none of 32 layers"),
    ],
)
def test_a_broken_config_names_the_field(change: dict[str, Any], says: str) -> None:
    with pytest.raises(CapacityError, match=says):
        from_config({**LLAMA, **change}, "m")


def test_both_spellings_of_a_layer_pattern_are_one_shape() -> None:
    old = dict(shipped_models()["Nemotron-3-Nano-30B-A3B"]["config"])
    words = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    new = {key: value for key, value in old.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    new["layers_block_type"] = [words[letter] for letter in old["hybrid_override_pattern"]]
    assert from_config(new, "m") == from_config(old, "m")


def test_experts_may_have_a_narrower_width_of_their_own() -> None:
    old = dict(shipped_models()["Nemotron-3-Nano-30B-A3B"]["config"])
    whole, narrow = (from_config({**old, **change}, "m") for change in ({}, {"moe_latent_size": 1344}))
    assert narrow.expert_parameters * 2 == whole.expert_parameters
    assert narrow.body_parameters - whole.body_parameters == 23 * 2688 * 2 * 1344  # down before the experts, and up


@pytest.mark.parametrize(
    "quantised", [{"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, {"quant_method": "awq", "bits": 4}]
)
def test_four_bit_weights_are_refused_unless_their_size_and_kernels_are_given(
    tmp_path: Path, quantised: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantised}))
    with pytest.raises(CapacityError, match="weight_dtype"):
        load_model(str(tmp_path))
    assert load_model(str(tmp_path), weights_gib=5.0, weight_dtype="bfloat16").weights_bytes == 5 << 30


def test_a_folder_is_read_with_its_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HYBRID, "quantization_config": {"quant_method": "fp8"}}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 30_000_000_000}}))
    model = load_model(str(tmp_path))
    assert model.weights_bytes == pytest.approx(30_000_000_000, abs=2)
    assert model.weight_dtype == "fp8"
    assert load_model(str(tmp_path / "config.json"), weights_gib=1.5).weights_bytes == 3 << 29


def test_headers_are_added_up_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for number, end in enumerate((1000, 500)):
        header = json.dumps(
            {"__metadata__": {}, "w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, end]}}
        ).encode()
        (tmp_path / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert load_model(str(tmp_path)).weights_bytes == pytest.approx(1500, abs=1)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_config_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CapacityError, match=r"config\.json"):
        load_model(str(tmp_path))


def test_damaged_weights_are_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"not a header at all")
    with pytest.raises(CapacityError, match=r"model\.safetensors"):
        load_model(str(tmp_path))


def test_an_unknown_model_gets_the_nearest_name() -> None:
    with pytest.raises(CapacityError, match=r"Did you mean Qwen3\.6-27B"):
        load_model("Qwen3.6-28B")


def test_an_unknown_dtype_is_refused() -> None:
    assert dtype_bytes("torch.float8_e4m3fn") == 1
    with pytest.raises(CapacityError, match="fp4"):
        dtype_bytes("fp4_e2m1")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("B200", "b200"),
    ],
)  # fmt: skip
def test_gpus_are_found_as_drivers_name_them(name: str, key: str) -> None:
    assert find_gpu(name).name == key


def test_an_unknown_gpu_gets_the_nearest_name_and_all_have_sources() -> None:
    with pytest.raises(UnknownGpu, match="Did you mean h200"):
        find_gpu("H202")
    assert all(
        gpu.source and 0 < gpu.free_gib < gpu.memory_mib / 1024 and gpu.flops_8 >= gpu.flops_16 for gpu in gpus()
    )
