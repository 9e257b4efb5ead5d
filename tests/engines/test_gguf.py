"""What a model file says of its shape: the real bundled model, and headers made by hand."""

import struct
from pathlib import Path

import pytest

from dfexp.engines.llamacpp import _bundled_model, kv_bytes_per_token, read_header


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(**keys: object) -> bytes:
    """A GGUF 3 file without tensors."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys))
    for name, value in keys.items():
        data += text(name.replace("__", "."))
        if isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            data += struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
        else:
            data += struct.pack("<II", 4, value)
    return data


HYBRID = {"general__architecture": "q", "q__block_count": 16, "q__attention__head_count": 8}
HYBRID |= {"q__embedding_length": 512, "q__attention__head_count_kv": 2, "q__attention__key_length": 128}


def kv_of(tmp_path: Path, **keys: object) -> int | None:
    (tmp_path / "m.gguf").write_bytes(header(**keys))
    return kv_bytes_per_token(read_header(tmp_path / "m.gguf"))


def test_the_bundled_model():
    found = read_header(_bundled_model())
    assert found["context_length"] == 8192
    assert kv_bytes_per_token(found) == 30 * 3 * (64 + 64) * 2


def test_only_layers_with_attention_keep_tokens(tmp_path):
    plain = kv_of(tmp_path, **HYBRID)
    hybrid = kv_of(tmp_path, **HYBRID, q__full_attention_interval=4, q__ssm__state_size=128)
    assert (plain, hybrid) == (16 * 2 * (128 + 64) * 2, 4 * 2 * (128 + 64) * 2)


@pytest.mark.parametrize(
    "extra",
    [
        {"q__ssm__state_size": 1},
        {"q__attention__kv_lora_rank": 512},
        {"q__attention__head_count_kv": [0, 2, 0, 4]},
    ],
)
def test_a_shape_that_is_not_known_gives_no_number(tmp_path, extra):
    assert kv_of(tmp_path, **{**HYBRID, **extra}) is None


def test_other_files_are_refused(tmp_path):
    for data in (b"PK\x03\x04zip", b"version https://git-lfs", b""):
        (tmp_path / "x.gguf").write_bytes(data)
        with pytest.raises(ValueError, match="not a GGUF"):
            read_header(tmp_path / "x.gguf")
