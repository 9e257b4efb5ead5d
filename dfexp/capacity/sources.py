"""Where shapes and weight sizes come from: a folder or file of the model, or the table that ships with the package."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dfexp.capacity.config import from_config
from dfexp.capacity.errors import CapacityError
from dfexp.capacity.shape import ModelShape, dtype_bytes
from dfexp.capacity.units import Bytes, GiB, to_bytes

_HEADER_LIMIT = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A shape, the weights' bytes, and where both are from. `weight_dtype`: `bfloat16`, or `fp8` for 8-bit weights."""

    shape: ModelShape
    weights_bytes: Bytes
    weight_dtype: str
    shape_source: str
    weights_source: str


def load_model(model: str, *, weights_gib: float | None = None, weight_dtype: str | None = None) -> Model:
    """A model by the path of its folder or config.json, or by its name in the shipped table.

    Args: weights_gib, all weights of one copy on the GPUs, where it is known better; weight_dtype, `bfloat16` or `fp8`
    (default: the checkpoint's, by its quantization_config or its name).
    Raises UnsupportedModel, CapacityError: no such model, unreadable or incomplete files, impossible size.
    """
    path = Path(model).expanduser()
    if path.exists():
        config, folder = _read_config(path)
        shape, source = from_config(config, folder.name), str(folder / "config.json")
        measured = {} if weights_gib is not None else _measured_in(folder)
        dtype = weight_dtype or _quantised(config) or shape.dtype
    else:
        name, entry = _entry(model)
        shape, source = from_config(entry["config"], name), entry["source"]
        dtype = weight_dtype or ("fp8" if "fp8" in model.lower() else shape.dtype)
        measured = entry["weights_gib"].get("fp8" if dtype_bytes(dtype) == 1 else dtype) or {}
    if weights_gib is not None:
        measured = {"gib": weights_gib, "source": "given"}
    if measured:
        if not 0 < measured["gib"] < 100_000:
            raise CapacityError(f"weights_gib = {measured['gib']} must be positive; it is GiB.")
        size, origin = to_bytes(GiB(measured["gib"])), measured["source"]
    else:
        size, origin = (
            estimated_weights(shape, dtype),
            "estimated from the number of parameters; give weights_gib if known",
        )
    return Model(shape=shape, weights_bytes=size, weight_dtype=dtype, shape_source=source, weights_source=origin)


def known_models() -> list[str]:
    """Names in the shipped table."""
    return list(_table())


def estimated_weights(shape: ModelShape, dtype: str) -> Bytes:
    """Resident bytes from the number of parameters: 8-bit checkpoints keep embeddings, head and vision in 16 bits."""
    experts = shape.experts.total if shape.experts else 0
    kept = shape.head_parameters + shape.embedding_parameters + shape.other_parameters
    scales = 1.02 if dtype_bytes(dtype) == 1 else 1.0
    return Bytes(int((shape.body_parameters + experts) * dtype_bytes(dtype) * scales) + 2 * kept)


def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("dfexp.capacity").joinpath("models.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def _entry(model: str) -> tuple[str, dict[str, Any]]:
    table = _table()
    names = {alias.lower(): name for name, entry in table.items() for alias in (name, *entry["aliases"])}
    if model.lower() in names:
        name = names[model.lower()]
        return name, table[name]
    near = difflib.get_close_matches(model.lower(), names, n=1)
    hint = f"Did you mean {names[near[0]]}? " if near else ""
    raise CapacityError(
        f"model {model!r} is neither a path nor in the shipped table. {hint}Known: {', '.join(table)}. "
        "Or give the folder that holds its config.json."
    )


def _read_config(path: Path) -> tuple[Mapping[str, Any], Path]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CapacityError(f"cannot read {file}: {error.strerror}. Give the folder that holds config.json.") from error
    except ValueError as error:
        raise CapacityError(f"{file} is not valid JSON ({error}); is the download complete?") from error
    if not isinstance(config, dict):
        raise CapacityError(f"{file} must hold a JSON object, not {type(config).__name__}.")
    return config, file.parent


def _quantised(config: Mapping[str, Any]) -> str | None:
    """`fp8` when the checkpoint says that its weights have 8 bits."""
    quantization = config.get("quantization_config")
    method = str(quantization.get("quant_method", "")) if isinstance(quantization, Mapping) else ""
    algorithm = str(quantization.get("quant_algo", "")) if isinstance(quantization, Mapping) else ""
    return "fp8" if "fp8" in (method + algorithm).lower() else None


def _measured_in(folder: Path) -> dict[str, Any]:
    """Weight bytes from the index, else from the headers of the safetensors files; empty when there are neither."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
            return {"gib": int(total) / 2**30, "source": str(index)}
        except (ValueError, KeyError, TypeError) as error:
            raise CapacityError(f"{index} has no metadata.total_size ({error}); give weights_gib.") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return {}
    return {
        "gib": sum(_header_bytes(file) for file in files) / 2**30,
        "source": f"headers of {len(files)} safetensors files",
    }


def _header_bytes(file: Path) -> int:
    """Bytes of all tensors, by the file's own header."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length < _HEADER_LIMIT:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
        return sum(
            part["data_offsets"][1] - part["data_offsets"][0] for key, part in header.items() if key != "__metadata__"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CapacityError(f"{file} is not a safetensors file ({error}); is the download complete?") from error
