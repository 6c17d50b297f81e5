"""A tokenizer for checkpoints of random weights: a byte is a token, five special ones follow, then plain words."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
NUM_TOKENS = 256 + len(SPECIAL_TOKENS)  # without words
BOS_ID = 256
EOS_ID = 257
_CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_byte_tokenizer(folder: Path, max_context: int, vocabulary: int = NUM_TOKENS) -> None:
    """Write tokenizer.json and tokenizer_config.json. Each id from NUM_TOKENS to `vocabulary` is a word, ` w261` ..."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS]
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    vocab |= {f"Ġw{number}": number for number in range(NUM_TOKENS, vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "model_max_length": max_context,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
