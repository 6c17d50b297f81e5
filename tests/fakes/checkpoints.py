"""Tiny, randomly initialised checkpoints, written by `transformers` so that their format is not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from coppice_bench.split.byte_tokenizer import BOS_ID, EOS_ID, NUM_TOKENS, write_byte_tokenizer

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma2"]

MAX_CONTEXT = 2048
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
# Windows shorter than most prompts, and caps that are felt.
FAMILY_SETTINGS: dict[Family, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 16, "sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 20.0,
        "pad_token_id": None,
    },
}


def write_tiny_checkpoint(
    path: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 320,
    sharded: bool = False,
    tie: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    **config_changes: Any,
) -> Path:
    """Writes config, weights and a byte-level tokenizer into the folder `path`, and returns it.

    The vocabulary is 256 bytes, the special tokens after them, and unused ids up to `vocab_size` (at least 261).
    `rope_scaling` is a `rope_parameters` object such as LLAMA3_ROPE. The context is 2048 tokens.
    """
    assert vocab_size >= NUM_TOKENS
    path.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_CONTEXT,
        "tie_word_embeddings": tie,
        "rope_parameters": rope_scaling or {"rope_type": "default", "rope_theta": 10000.0},
        # Wide enough that the best logit of a random model stands clear of the second.
        "initializer_range": 0.15,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **FAMILY_SETTINGS[family],
        **config_changes,
    }
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
        _randomise_vectors(model)
    model.save_pretrained(path, max_shard_size="100KB" if sharded else "5GB")
    if "layer_types" not in config_changes:
        _leave_out(path, "layer_types")  # as most files do, and mean the family's own rule
    write_byte_tokenizer(path, MAX_CONTEXT)
    return path


def edit_config(checkpoint: Path, **changes: Any) -> None:
    """Changes keys of its config.json."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _leave_out(checkpoint: Path, key: str) -> None:
    file = checkpoint / "config.json"
    values = json.loads(file.read_text())
    values.pop(key, None)
    file.write_text(json.dumps(values))


def _randomise_vectors(model: torch.nn.Module) -> None:
    """Fresh biases are 0 and norms 1: swapping or dropping them would go unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
