"""README.md of a training set: what a person who finds it must know, with the head that `datasets` and hubs read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

import dfexp
from dfexp.export.rows import Thinking
from dfexp.quality import KNOWN

if TYPE_CHECKING:
    from dfexp.export.sets import Made

_SIZES = {1e3: "n<1K", 1e4: "1K<n<10K", 1e5: "10K<n<100K", 1e6: "100K<n<1M", 1e7: "1M<n<10M", 1e99: "n>10M"}
_THOUGHTS: dict[Thinking, str] = {
    "inline": "Thoughts are inline: each answer is byte for byte what the model said.",
    "apart": "Thoughts are in `reasoning_content`, without the line breaks around them.",
    "dropped": "Thoughts were dropped: the answers are not all that the model said.",
}


def card(made: "Made") -> str:
    """The text of the card."""
    run, counts, options = made.run, made.counts, made.options
    prompts, failed = run["prompts"], sum(counts["Failed"].values())
    missing = prompts["asked"] - made.rows["done"] - failed
    made_with = run.get("versions", {}).get("dfexp")
    undrawn = sum(source.get("kept", 0) for source in prompts["sources"]) - prompts["asked"]  # of a mixture
    left_out = prompts.get("dropped_by_reason", {}) | ({"not drawn": undrawn} if undrawn > 0 else {})
    limits = options.thresholds
    least, most = limits.tokens
    sections: dict[str, Mapping[str, Any]] = {
        "Files": {f"`{path.name}`": f"{made.written[s]:,} rows ({s})" for s, path in made.files.items() if s != "card"},
        "Rows": {"prompts asked": prompts["asked"], **made.rows, "failed": failed, "still to be done": missing},
        "Rejected (a row can have several reasons)": {
            f"{name}: {KNOWN.get(name, 'a flag')}": n for name, n in counts["Rejected"].most_common()
        },
        "Failed": counts["Failed"],
        "Finish reasons of good rows": dict(counts["Finish reasons"].most_common()),
        "Lengths of good rows": {name: _lengths(np.array(found)) for name, found in made.lengths.items()},
        "Sources": {str(source.get("path") or source): _source(source, made) for source in prompts["sources"]},
        "Left out of the sources": left_out,
        **{f"Configuration {name}: {n:,} good rows": _config(run["configs"].get(name, {}))
           for name, n in counts["Configurations"].most_common()},
        "Made with": {"dfexp, exporting": dfexp.__version__, "dfexp, of the run": made_with, "run": run["run"],
                      "rejected": ", ".join(sorted(limits.rejected)), "share for validation": options.validation,
                      "tokens of an answer": f"{least} to {'any' if most is None else most}",
                      "said five times": f"at most {limits.repeated:.0%}",
                      "length_outlier": f"{limits.sigmas:g} sigmas"},
    }  # fmt: skip
    shown = (f"## {title}\n\n{_table(facts)}" for title, facts in sections.items() if facts)
    text = f"Prompts with the answers of a model. {_THOUGHTS[options.thinking]}"
    return "\n\n".join((_head(made), f"# {made.name}", text, *shown, _earlier(made))).rstrip() + "\n"


def thinking_of(path: Path) -> Thinking | None:
    """Where the thoughts of a set are, by the card beside it; None where that does not say."""
    card_path = path.with_name("README.md")
    text = card_path.read_text(encoding="utf-8", errors="replace") if card_path.exists() else ""
    return next((name for name, words in _THOUGHTS.items() if words in text.partition("\n## ")[0]), None)


def _head(made: "Made") -> str:
    paths = [
        {"split": split, "path": made.files[split].name} for split in ("train", "validation") if made.written[split]
    ]
    total = sum(made.written.values())
    head: dict[str, Any] = {"pretty_name": made.name, "license": made.options.licenses.get("", "unknown")}
    head |= {"task_categories": ["text-generation"], "tags": ["synthetic"]}
    head |= {"size_categories": [next(name for most, name in _SIZES.items() if total < most)]}
    return f"---\n{yaml.safe_dump({**head, 'configs': [{'config_name': 'default', 'data_files': paths}]})}---"


def _table(facts: Mapping[str, Any]) -> str:
    cells = ((name, f"{fact:,}" if isinstance(fact, int) else str(fact)) for name, fact in facts.items())
    safe = (" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) for line in cells)
    return "\n".join(("| | |", "|---|---|", *(f"| {line} |" for line in safe)))


def _lengths(found: Any) -> str:
    told = found[~np.isnan(found)]
    if not len(told):
        return "not told"
    median, p95 = np.quantile(told, (0.5, 0.95))
    mean, most, total = told.mean(), told.max(), told.sum()
    return f"mean {mean:.0f}, median {median:.0f}, 95 % at most {p95:.0f}, longest {most:.0f}, sum {total:,.0f}"


def _source(source: Mapping[str, Any], made: "Made") -> str:
    licence = made.options.licenses.get(str(source.get("path")), "not given")
    found = f"{source.get('rows', '?')} records, {source.get('kept', '?')} prompts kept"
    return f"{found}; licence: {licence}; SHA-256 {source.get('sha256') or 'not known'}"


def _config(config: Mapping[str, Any]) -> dict[str, str]:
    """What a configuration in run.json says of answers; not where its servers were."""
    fleet = config.get("fleet") or {}
    facts = {name: config.get(name) for name in ("engine", "engine_version", "model", "sampling")}
    facts["flags"] = fleet.get("flags") or {key: fleet[key] for key in ("context_length",) if fleet.get(key)}
    return {name: f"`{fact if isinstance(fact, str) else json.dumps(fact)}`" for name, fact in facts.items() if fact}


def _earlier(made: "Made") -> str:
    """The card of the set that was merged in, without its head."""
    path = made.options.merge and made.options.merge.with_name("README.md")
    if path is None or not path.exists():
        return ""
    body = path.read_text(encoding="utf-8", errors="replace").removeprefix("---\n").split("\n---\n", 1)[-1]
    return f"---\n\nThe rows merged in come first. Their card:\n\n{body.strip()}"
