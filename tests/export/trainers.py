"""Do SpecForge and speculators train on exactly what a model said? Their own code reads exported sets.

    .venv/bin/python -m tests.export.trainers make FOLDER        a run, and its sets with thoughts inline and apart
    OTHER/bin/python tests/export/trainers.py check FOLDER       in an environment with both trainers

By hand, since that environment takes 2 GB; docs/decisions.md says how it is made and what was seen. The tokenizer is
one of bytes, and the chat template writes thoughts as those of thinking models do; speculators asks a server to render
chats, and gets one of this file.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

START, END, ODD = "<|im_start|>", "<|im_end|>\n", "\u2028 \u0085 \x0c \t \0 \ufffd 漢字 🦉 \\ud800 \"quoted\" {'a': 1} "
TEMPLATE = """
{%- for turn in messages %}
{{- '<|im_start|>' + turn.role + '\\n' }}
{%- if turn.role == 'assistant' and loop.last %}
{%- if turn.reasoning_content is string and turn.reasoning_content %}
{{- '<think>\\n' + turn.reasoning_content + '\\n</think>\\n\\n' + turn.content }}
{%- else %}
{{- '<think>\\n' + turn.content.split('</think>')[0].split('<think>')[-1].strip('\\n') }}
{{- '\\n</think>\\n\\n' + turn.content.split('</think>')[-1].lstrip('\\n') }}
{%- endif %}
{%- else %}
{{- turn.content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


def make(folder: Path) -> None:
    """Sets, and in expected.json the prompt and the answer of each row as the template has them."""
    from dfexp.export import Options, export
    from tests.finished_run import row, write_run

    rows, expected = [], []
    for i in range(40):
        said, opening = f"thought {i} {ODD}.\n</think>\n\nanswer {i} {ODD}.", "<think>\n" * (i % 2)
        messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": f"question {i} {ODD}"},)
        if i % 4 == 0:
            before = ({"role": "user", "content": "first"}, {"role": "assistant", "content": "second"})
            messages = ({"role": "system", "content": "be brief"}, *before, *messages)
        shown = "".join(f"{START}{turn['role']}\n{turn['content']}{END}" for turn in messages)
        rows.append(row(i, messages=messages, text=opening + said))  # every other prompt opened the thought itself
        expected.append([f"{shown}{START}assistant\n<think>\n", f"{said}{END}"])
    run = write_run(folder, rows)
    export(run, folder / "inline" / "set.jsonl", Options())
    export(run, folder / "apart" / "set.jsonl", Options(thinking="apart"))
    (folder / "expected.json").write_text(json.dumps(sorted(expected)))


def tokenizer() -> Any:
    """Bytes as tokens, and the marks of a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>")
    wrapped.add_special_tokens({"additional_special_tokens": [START]})
    wrapped.chat_template = TEMPLATE
    return wrapped


def split_by_mask(tokens: Any, rows: Any) -> list[list[str]]:
    """What is context and what is learned, of each row; the mask must change once."""
    found = []
    for row in rows:
        ids, mask = (list(map(int, row[name])) for name in ("input_ids", "loss_mask"))
        first = mask.index(1)
        assert mask == [0] * first + [1] * (len(mask) - first), "the mask has holes"
        found.append([tokens.decode(part, clean_up_tokenization_spaces=False) for part in (ids[:first], ids[first:])])
    return sorted(found)


def specforge(path: Path, tokens: Any, *, last_turn: bool) -> list[list[str]]:
    """What SpecForge's online training makes of a set."""
    from specforge.data.prompt_builder import prepare_prompt_tasks  # type: ignore[import-not-found]
    from specforge.data.template import TEMPLATE_REGISTRY, ChatTemplate  # type: ignore[import-not-found]

    template = ChatTemplate(
        assistant_header=f"{START}assistant\n<think>\n", user_header=f"{START}user\n", end_of_turn_token=END,
        parser_type="thinking", enable_thinking=True,
    )  # fmt: skip
    TEMPLATE_REGISTRY.register("bytes", template, override=True)
    tasks = prepare_prompt_tasks(
        path, tokens, chat_template="bytes", max_length=4096, is_preformatted=False, train_only_last_turn=last_turn,
        cache_dir=None, cache_key=None, num_proc=None,
    )  # fmt: skip
    return split_by_mask(tokens, [task["payload"] for task in tasks])


def speculators(path: Path, tokens: Any) -> list[list[str]]:
    """What speculators makes of a set: a row for every turn of the assistant, of which the last ones are ours."""
    from speculators.data_generation import preprocessing  # type: ignore[import-not-found]

    class Render(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = tokens.apply_chat_template(
                body["messages"], tokenize=False, add_generation_prompt=body["add_generation_prompt"]
            )
            answer = json.dumps({"token_ids": tokens.encode(text, add_special_tokens=False)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing: thousands of requests."""

    raw, _ = preprocessing.load_raw_dataset(str(path))
    with ThreadingHTTPServer(("127.0.0.1", 0), Render) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = preprocessing.build_speculator_training_dataset(
            raw, tokens, 4096, None, render_endpoint=f"http://127.0.0.1:{server.server_port}"
        )
        server.shutdown()
    return [pair for pair in split_by_mask(tokens, made) if "answer" in pair[1]]


def check(folder: Path) -> None:
    """Compare; ends with an error at the first difference."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    expected, tokens = json.loads((folder / "expected.json").read_text()), tokenizer()
    for name in ("inline", "apart"):
        path = folder / name / "set.jsonl"
        for reader, found in (
            ("SpecForge", specforge(path, tokens, last_turn=True)),
            ("speculators", speculators(path, tokens)),
        ):
            wrong = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
            assert not wrong, f"{reader}, {name}: {len(wrong)} of {len(expected)} differ, first {wrong[0]}"
            print(f"{reader}, thoughts {name}: {len(found)} rows, context and learned tokens as the model had them")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](Path(sys.argv[2]))
