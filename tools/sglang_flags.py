"""Write dfexp/engines/sglang_flags.json: every flag of the SGLang versions that dfexp ships a list of.

    python tools/sglang_flags.py 0.5.12=TABLE.json 0.5.23=TABLE.json

A table is what a version's own argparse parser holds: option to action, choices, dest, type and nargs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "dfexp" / "engines" / "sglang_flags.json"
_USUAL = {"action": "_StoreAction", "type": "str", "choices": None, "nargs": None}


def reduced(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The table without what a reader can add again: usual values, and a `dest` that the option itself tells."""
    rows = {}
    for option in sorted(name for name in table if name.startswith("--")):
        row, named = table[option], option[2:].replace("-", "_")
        kept = {key: row[key] for key, usual in _USUAL.items() if row.get(key, usual) not in (usual, "None", "0")}
        rows[option] = kept if row["dest"] == named else {**kept, "dest": row["dest"]}
    return rows


def main(arguments: list[str]) -> None:
    """Read the named tables and write the file."""
    tables = {
        version: reduced(json.loads(Path(path).read_text())) for version, path in (a.split("=") for a in arguments)
    }
    blocks = []
    for version, rows in tables.items():
        lines = [f"  {json.dumps(option)}: {json.dumps(row)}" for option, row in rows.items()]
        blocks.append(f" {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n }")
    TARGET.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
