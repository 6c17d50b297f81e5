"""What others need to know of a model."""

from __future__ import annotations

from dataclasses import dataclass

from coppice_worker.model.config.config import ModelConfig
from coppice_worker.model.config.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """To validate requests and to build namespaces."""

    family: str
    checkpoint_digest: str
    kv_dtype: str
    rope: RopeConfig
    vocab_size: int
    max_context: int  # tokens
    eos_token_ids: tuple[int, ...]


def describe(config: ModelConfig, digest: str, kv_dtype: str) -> ModelInfo:
    return ModelInfo(
        family=config.family,
        checkpoint_digest=digest,
        kv_dtype=kv_dtype,
        rope=config.rope,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        eos_token_ids=config.eos_token_ids,
    )
