"""A model for comparing servers on a small machine: a bf16 Llama of 57M parameters with random weights.

    python -m benchmarks.serve_model FOLDER [--context 4096]

hidden 512, 8 layers, 8 query and 2 KV heads, intermediate 1536, vocabulary 32,000, context 4,096. Weights say nothing;
the work of a step is that of a real model of this shape. The tokenizer gives a byte one token, and every other id is a
word of its own, so that every generated token is text at once.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coppice_bench.split.byte_tokenizer import BOS_ID, EOS_ID, write_byte_tokenizer

CONTEXT = 4_096
VOCABULARY = 32_000


@contextmanager
def model_folder(given: Path | None) -> Iterator[Path]:
    """`given`, or one with this model for as long as it is used."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="coppice-model-") as name:
        write_model(Path(name))
        yield Path(name)


def write_model(folder: Path, seed: int = 0, context: int = CONTEXT) -> int:
    """Write checkpoint and tokenizer; returns the number of parameters. `context` in tokens."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, context, VOCABULARY)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where it is written; made if it is not there")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens that the model takes")
    arguments = parser.parse_args()
    print(f"{write_model(arguments.folder, context=arguments.context):,} parameters")
