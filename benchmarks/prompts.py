"""How fast prompts are read, mapped, compared and frozen, and in how much memory; each filter's rate.

    python benchmarks/prompts.py [--prompts 1000000] [--filters 50000]

Prompts are made up: log-normal lengths, median 600 characters, as JSON lines in the form of each public set. A
twentieth repeats an earlier one, a twentieth has one more word than an earlier one. Each line is of a process of its
own: wall time, CPU time, records a second of it, and the most memory it ever had.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dfexp import prompts
from dfexp.layout import RunFolder
from dfexp.params import PromptsGroup

LETTERS = "eeeeeeeeeeeetttttttttaaaaaaaaooooooooiiiiiiinnnnnnnssssssrrrrrrhhhhhhllllddddccccuuummmffppggwwyybbvk"


def texts(number: int, seed: int = 1) -> Iterator[str]:
    """Prompts of made-up words; some are repeated, some changed in one word."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(LETTERS, k=rng.randint(2, 9))) for _ in range(30_000)]
    recent: list[str] = []
    for _ in range(number):
        chance = rng.random()
        if chance < 0.1 and recent:
            old = rng.choice(recent)
            yield old if chance < 0.05 else old.replace(" ", f" {rng.choice(words)} ", 1)
            continue
        text = " ".join(rng.choices(words, k=max(3, round(rng.lognormvariate(4.6, 0.8)))))
        if len(recent) < 10_000:
            recent.append(text)
        yield text


def record(number: int, text: str) -> dict[str, Any]:
    """A record as one of the public sets has it."""
    answer = "An answer."
    return (
        {"id": number, "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]},
        {"question": text, "answer": answer, "source": "made up"},
        {"query": text, "answer": answer, "lang": "python"},
        {"query": text, "response": answer, "type": "made up"},
    )[number % 4]


def write(path: Path, number: int, seed: int) -> None:
    """A source of so many prompts."""
    with path.open("w") as file:
        file.writelines(json.dumps(record(n, text)) + "\n" for n, text in enumerate(texts(number, seed)))


def tokenizer(path: Path) -> None:
    """A tokenizer of a real kind, trained on made-up text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator(texts(2000), trainers.BpeTrainer(vocab_size=20_000))
    made.save(str(path))


def frozen(root: Path, name: str, keys: str) -> None:
    """Freeze once, and print what it took: the work of one process of its own."""
    group = PromptsGroup.model_validate(json.loads(keys))
    wall, cpu = time.monotonic(), time.process_time()
    result = prompts.freeze(group, root, RunFolder(root / "outputs" / name.replace(" ", "_")))
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    rows = sum(source["rows"] for source in result.sources)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{name:<34}{rows:>10,}{result.asked:>10,}{wall:>9.1f}{cpu:>9.1f}{rows / cpu:>11,.0f}{memory:>9.2f}", flush=True
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--filters", type=int, default=50_000)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        frozen(Path(args.one[0]), *args.one[1:])
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write(root / "all.jsonl", args.prompts, 1)
        write(root / "few.jsonl", args.filters, 2)
        tokenizer(root / "tokenizer.json")
        exact = {"duplicates": {"exact": True}}
        tokens = {"filters": {"max_tokens": 4096, "tokenizer": "tokenizer.json"}}
        mixture = {"sources": [{"path": "all.jsonl", "weight": 3}, {"path": "few.jsonl", "weight": 1}]}
        titles = ("records", "prompts", "wall s", "CPU s", "a CPU s", "GiB")
        print("{:<34}{:>10}{:>10}{:>9}{:>9}{:>11}{:>9}".format("", *titles))
        for title, keys in (
            ("read, map, freeze", {"path": "all.jsonl"}),
            ("and leave out exact duplicates", {"path": "all.jsonl", **exact}),
            ("a mixture 3 : 1, without them", {**mixture, **exact}),
            ("few: read, map, freeze", {"path": "few.jsonl"}),
            ("few: and most tokens", {"path": "few.jsonl", **tokens}),
            ("few: and languages", {"path": "few.jsonl", "filters": {"languages": ["en", "de", "fr", "it", "es"]}}),
            ("few: and near duplicates", {"path": "few.jsonl", "duplicates": {"near": 0.8}}),
            ("all: and near duplicates", {"path": "all.jsonl", "duplicates": {"near": 0.8}}),
        ):
            command = [sys.executable, __file__, "--one", str(root), title, json.dumps(keys)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
