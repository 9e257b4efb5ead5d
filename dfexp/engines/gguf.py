"""What a GGUF file says of its model: the header alone, without loading weights. Format: GGUF version 2 and 3."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEPT_ITEMS = 1024
_BLOCK_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """Facts of one file; None or absent where the file does not say.

    Attributes:
        path: the file.
        size_bytes: of the whole file; nearly all of it is weights.
        metadata: its scalar keys and short lists (the vocabulary is left out).
    """

    path: Path
    size_bytes: int
    metadata: Mapping[str, Any]

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was trained to look back on."""
        return self._number("context_length")

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int | None:
        """Bytes that one token keeps in the KV cache, f16 by default; None for shapes that this reader does not know.

        Layers with attention * KV heads * (key length + value length) * bytes. In hybrid models only one layer in
        `full_attention_interval` has attention.
        """
        layers, heads = self._number("block_count"), self._number("attention.head_count")
        width, kv_heads = self._number("embedding_length"), self._get("attention.head_count_kv")
        if not (layers and heads and width and kv_heads) or self._get("attention.kv_lora_rank"):
            return None
        interval = self._number("full_attention_interval")
        if interval is None and any(".ssm." in key for key in self.metadata):
            return None
        per_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * (layers // (interval or 1))
        key = self._number("attention.key_length") or width // heads
        value = self._number("attention.value_length") or width // heads
        return int(sum(per_layer)) * (key + value) * bytes_per_value

    def fingerprint(self) -> str:
        """A hash that tells models apart without reading them whole: size, and 64 blocks spread over the file."""
        digest = hashlib.sha256(str(self.size_bytes).encode())
        with self.path.open("rb") as file:
            for step in range(64):
                file.seek(max(0, self.size_bytes - _BLOCK_BYTES) * step // 63)
                digest.update(file.read(_BLOCK_BYTES))
        return digest.hexdigest()

    def _get(self, key: str) -> Any:
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")

    def _number(self, key: str) -> int | None:
        value = self._get(key)
        return value if isinstance(value, int) else None


def read_gguf(path: Path) -> GgufModel:
    """Read the header. Raises OSError if the file cannot be read, ValueError saying why it is no GGUF model."""
    with path.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        file = _Header(file=opened, size=size)
        magic = opened.read(4)
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r}, a GGUF file with b'GGUF'")
        (version,) = _unpack(file, "I")
        if version not in (2, 3):
            raise ValueError(f"it is GGUF version {version}; versions 2 and 3 are known")
        _, keys = _unpack(file, "QQ")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = _string(file).decode("utf-8", "replace")
            (kind,) = _unpack(file, "I")
            value = _value(file, kind)
            if value is not None:
                metadata[name] = value
    return GgufModel(path=path, size_bytes=size, metadata=metadata)


@dataclass(frozen=True, slots=True)
class _Header:
    """Reads exactly: a header that ends early, or a length that no file has, is no model."""

    file: BinaryIO
    size: int

    def read(self, count: int) -> bytes:
        if count > self.size:
            raise ValueError("its header is damaged")
        data = self.file.read(count)
        if len(data) < count:
            raise ValueError("it ends inside its header: the file is incomplete")
        return data


def _value(file: _Header, kind: int) -> Any:
    """One value; None for a list too long to keep."""
    if kind in _SCALARS:
        return _unpack(file, _SCALARS[kind])[0]
    if kind == _STRING:
        return _string(file).decode("utf-8", "replace")
    if kind == _ARRAY:
        item, count = _unpack(file, "IQ")
        if item in _SCALARS and count > _KEPT_ITEMS:
            file.read(struct.calcsize("<" + _SCALARS[item]) * count)
            return None
        if item == _STRING:
            for _ in range(count):
                _string(file)
            return None
        return [_value(file, item) for _ in range(count)]
    raise ValueError(f"its header holds a value of unknown type {kind}")


def _string(file: _Header) -> bytes:
    return file.read(_unpack(file, "Q")[0])


def _unpack(file: _Header, shape: str) -> tuple[Any, ...]:
    return struct.unpack("<" + shape, file.read(struct.calcsize("<" + shape)))
