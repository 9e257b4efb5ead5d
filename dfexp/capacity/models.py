"""Where shapes and weight sizes come from: a folder or file of the model, or the table that ships with the package."""

import difflib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dfexp.capacity.config import from_config
from dfexp.capacity.errors import CapacityError, UnknownModel
from dfexp.capacity.shape import GIB, ModelShape, dtype_bytes

MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A shape, the weights' bytes, and where both are from. `weight_dtype`: `bfloat16`, or `fp8` for 8-bit weights."""

    shape: ModelShape
    weights_bytes: int
    weight_dtype: str
    shape_source: str
    weights_source: str


def load_model(model: str, *, weights_gib: float | None = None, weight_dtype: str | None = None) -> Model:
    """A model by the path of its folder or config.json, or by its name in the shipped table.

    Args: weights_gib, all weights of one copy on the GPUs, where it is known better; weight_dtype, `bfloat16` or `fp8`
    (default: the checkpoint's, by its quantization_config or its name).
    Raises UnsupportedModel, CapacityError: no such model, unreadable or incomplete files.
    """
    path = Path(model).expanduser()
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        name, source, config = file.parent.name, str(file), _read_json(file)
        eight_bit = weight_dtype is None and _is_eight_bit(config.get("quantization_config"), name)
        sizes = _measured_in(file.parent)
    else:
        name, entry = _entry(model)
        source, config, sizes = entry["source"], entry["config"], entry["weights_gib"]
        eight_bit = "fp8" in model.lower()
    shape = from_config(config, name)
    dtype = weight_dtype or ("fp8" if eight_bit else shape.dtype)
    size = sizes.get("any") or sizes.get("fp8" if dtype_bytes(dtype) == 1 else dtype)
    if weights_gib is not None:
        size = {"gib": weights_gib, "source": "given"}
    elif size is None:
        source_text = "estimated from the number of parameters; give weights_gib if known"
        size = {"gib": _estimated_bytes(shape, dtype) / GIB, "source": source_text}
    return Model(
        shape=shape,
        weights_bytes=int(size["gib"] * GIB),
        weight_dtype=dtype,
        shape_source=source,
        weights_source=size["source"],
    )


def _is_eight_bit(quantised: Any, name: str) -> bool:
    """Whether a checkpoint's weights have 8 bits. Raises CapacityError: neither 8 nor 16."""
    text = str(quantised or "").lower()
    if any(word in text for word in ("fp4", "int4", "'num_bits': 4", "awq", "gptq", "'load_in_4bit': true")):
        raise CapacityError(
            f"{name}: weights quantised as {text[:120]} are not modelled. Give weights_gib, and weight_dtype fp8 or "
            "bfloat16, whichever its kernels compute in; rates are then rough."
        )
    return "fp8" in text or "'num_bits': 8" in text


def _estimated_bytes(shape: ModelShape, dtype: str) -> float:
    """Resident bytes from the number of parameters: 8-bit checkpoints keep embeddings, head and vision in 16 bits."""
    element = 1.02 if dtype_bytes(dtype) == 1 else float(dtype_bytes(dtype))  # with the scales of the blocks
    sixteen_bit = shape.head_parameters + shape.idle_parameters
    return (shape.body_parameters + shape.expert_parameters) * element + 2 * sixteen_bit


def shipped_models() -> dict[str, dict[str, Any]]:
    """The shipped table: name to aliases, source, weights in GiB by dtype, and config."""
    text = resources.files("dfexp.capacity").joinpath("models.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def _entry(model: str) -> tuple[str, dict[str, Any]]:
    table = shipped_models()
    names = {alias.lower(): name for name, entry in table.items() for alias in (name, *entry["aliases"])}
    if model.lower() in names:
        name = names[model.lower()]
        return name, table[name]
    near = difflib.get_close_matches(model.lower(), names, n=1)
    hint = f"Did you mean {names[near[0]]}? " if near else ""
    raise UnknownModel(
        f"model {model!r} is neither a path nor in the shipped table. {hint}Known: {', '.join(table)}. "
        "Or give the folder that holds its config.json."
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        return {**value}
    except (OSError, ValueError, TypeError) as error:
        raise CapacityError(f"cannot read a JSON object from {file}: {error}. Is the download complete?") from error


def spans(file: Path) -> tuple[int, list[list[int]]]:
    """Where the data of a safetensors file begins, and the bytes from there of each tensor: begin and end.

    It is 8 bytes of length, JSON with offsets, the data. Raises OSError, ValueError, KeyError, TypeError.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = dict(json.loads(stream.read(min(length, MOST_HEADER_BYTES))))
    return 8 + length, [part["data_offsets"] for name, part in header.items() if name != "__metadata__"]


def _measured_in(folder: Path) -> dict[str, Any]:
    """Weight bytes from the index, else from the headers of the safetensors files; empty when there are neither."""
    index, files = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    file = index
    try:
        if index.is_file():
            total = int(_read_json(index)["metadata"]["total_size"])
            return {"any": {"gib": total / GIB, "source": str(index)}}
        total = 0
        for file in files:
            total += sum(end - begin for begin, end in spans(file)[1])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CapacityError(f"{file} has no readable sizes ({error!r}); give weights_gib.") from error
    return {"any": {"gib": total / GIB, "source": f"headers of {len(files)} safetensors files"}} if files else {}
