"""A model for comparing servers on a small machine: a bf16 Llama of 57M parameters with random weights.

    python benchmarks/serve_model.py FOLDER

hidden 512, 8 layers, 8 query and 2 KV heads, intermediate 1536, vocabulary 32,000, context 4,096. Weights say nothing;
the work of a step is that of a real model of this shape. The tokenizer gives a byte one token, and every other id is a
word of its own, so that every generated token is text at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 4_096
VOCABULARY = 32_000
_SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
_CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_model(folder: Path, seed: int = 0) -> int:
    """Write checkpoint and tokenizer; returns the number of parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {name: len(vocabulary) + number for number, name in enumerate(_SPECIAL)}
    vocabulary |= {f"Ġw{number}": number for number in range(len(vocabulary), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "model_max_length": CONTEXT,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/serve_model.py FOLDER")
    print(f"{write_model(Path(sys.argv[1])):,} parameters")
