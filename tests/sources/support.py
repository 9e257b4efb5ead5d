"""Files of prompts and what is read of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dfexp.params_prompts import PromptsGroup
from dfexp.records import Prompt
from dfexp.sources.reading import Reading

DATA = Path(__file__).parents[1] / "data" / "prompts"


def reading(root: Path, **keys: Any) -> Reading:
    return Reading(PromptsGroup.model_validate(keys), root)


def read(root: Path, **keys: Any) -> list[Prompt]:
    return list(reading(root, **keys))


def said(root: Path, **keys: Any) -> list[str]:
    """The last message of each prompt."""
    return [prompt.messages[-1]["content"] for prompt in read(root, **keys)]


def write(path: Path, *texts: str) -> None:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def report(root: Path, **keys: Any) -> dict[str, Any]:
    found = reading(root, **keys)
    assert sum(1 for _ in found) == found.asked
    return found.report()
