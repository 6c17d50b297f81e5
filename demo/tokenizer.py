"""A byte-level byte-pair tokenizer: any text is representable, and decoding gives the text back exactly."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.formats import CHAT_TEMPLATE, END

VOCABULARY_SIZE = 4096
END_ID = 0


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learns VOCABULARY_SIZE entries, END (id 0) and the 256 bytes among them. Deterministic for given texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    assert tokenizer.token_to_id(END) == END_ID
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, context_tokens: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json as `transformers` reads them."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
