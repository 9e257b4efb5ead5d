"""Writes two tiny models with random weights, each with its tokenizer, for SGLang to serve: make_models.py FOLDER.

FOLDER/hybrid is of the Qwen3-Next family, three gated-delta-net layers and one of full attention, with experts: it has
both pools, as the models that dfexp is made for. FOLDER/dense has attention alone. The same seed makes the same files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

PAD, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvwyz" for vowel in "aeio"]
WORDS = [f" {first}{last}" for first in SYLLABLES[::3] for last in SYLLABLES[::5]]
SIZES = {
    "hidden_size": 64,
    "initializer_range": 0.1,  # large enough for what came before to decide what follows
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
CHAT = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Reads any text, one token a byte, so that tests can count; has words to write with, so that answers are text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word.replace(" ", "\u0120") for word in WORDS]  # the byte alphabet's sign for a space
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters, *words])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD, chat_template=CHAT)


def write_in_words(model: Qwen3ForCausalLM | Qwen3NextForCausalLM, first_word: int) -> None:
    """Let the model write words, or end, and never single bytes, which would seldom be valid UTF-8.

    The first channel carries the same value from the embedding through all layers, which write zeros to it; the output
    layer subtracts it from every other token.
    """
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                weights[..., 0, :] = 0.0
        model.get_input_embeddings().weight[:, 0] = 1.0
        output = model.get_output_embeddings().weight
        output[:, 0] = -100.0
        output[first_word:, 0] = 0.0
        output[model.config.eos_token_id, 0] = 0.0


def main(folder: Path) -> None:
    tokens = tokenizer()
    common = {**SIZES, "vocab_size": len(tokens), "tie_word_embeddings": False, "bos_token_id": None}
    common |= {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    dense = Qwen3Config(num_hidden_layers=2, head_dim=16, **common)
    hybrid = Qwen3NextConfig(
        num_hidden_layers=4,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **common,
    )
    for name, config, kind in (("dense", dense, Qwen3ForCausalLM), ("hybrid", hybrid, Qwen3NextForCausalLM)):
        torch.manual_seed(0)
        model = kind(config)
        write_in_words(model, len(tokens) - len(WORDS))
        model.to(torch.bfloat16).save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
    # transformers replaces this key by a list of the layers' kinds; SGLang goes by the key.
    path = folder / "hybrid" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "full_attention_interval": 4}, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
