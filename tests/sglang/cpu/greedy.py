"""What transformers' own code answers, always with the likeliest token: greedy.py MODEL TEXT TOKENS."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, text: str, tokens: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=int(tokens), do_sample=False)
    print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))


if __name__ == "__main__":
    main(*sys.argv[1:])
