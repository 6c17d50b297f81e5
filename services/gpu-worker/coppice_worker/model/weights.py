"""Names and shapes of a decoder's tensors, as files hold them and as the decoder uses them.

file                                      decoder (fused once at load: one matmul instead of three or two)
self_attn.{q,k,v}_proj.weight       ->    qkv       [(H + 2 HK) D, hidden]
self_attn.o_proj.weight             ->    output    [hidden, H D]
mlp.{gate,up}_proj.weight           ->    gated     [2 intermediate, hidden]
mlp.down_proj.weight                ->    down      [hidden, intermediate]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .config import ModelConfig
from .linear import Projection, Projections

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: torch.Tensor  # [hidden] float32
    qkv: Projection
    output: Projection
    mlp_norm: torch.Tensor  # [hidden] float32
    gated: Projection  # [T, hidden] -> [T, intermediate]
    down: Projection


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden] float32
    head: Projection  # [vocab, hidden]


class TensorSource(Protocol):
    """Where tensors come from, already on the wanted device and of the wanted dtype."""

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        """The named tensors, one below the other along dimension 0."""


def layer_projections(config: ModelConfig, layer: int) -> dict[str, tuple[Shape, bool]]:
    """Per projection of one layer: shape [out, in] of its weight and whether it has a bias [out]."""
    prefix = f"model.layers.{layer}."
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return {
        f"{prefix}self_attn.q_proj": ((query, hidden), config.qkv_bias),
        f"{prefix}self_attn.k_proj": ((key, hidden), config.qkv_bias),
        f"{prefix}self_attn.v_proj": ((key, hidden), config.qkv_bias),
        f"{prefix}self_attn.o_proj": ((hidden, query), config.output_bias),
        f"{prefix}mlp.gate_proj": ((intermediate, hidden), config.mlp_bias),
        f"{prefix}mlp.up_proj": ((intermediate, hidden), config.mlp_bias),
        f"{prefix}mlp.down_proj": ((hidden, intermediate), config.mlp_bias),
    }


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the files must hold, with its shape."""
    hidden = (config.hidden_size,)
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size), f"{FINAL_NORM}.weight": hidden}
    if not config.tied_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    for layer in range(config.num_layers):
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = hidden
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = hidden
        for name, (shape, has_bias) in layer_projections(config, layer).items():
            shapes[f"{name}.weight"] = shape
            if has_bias:
                shapes[f"{name}.bias"] = shape[:1]
    return shapes


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some files carry and that say nothing new."""
    return name.endswith("rotary_emb.inv_freq") or (name == HEAD and config.tied_embeddings)


def assemble(config: ModelConfig, source: TensorSource, projections: Projections) -> DecoderWeights:
    """Builds the decoder's weights from a source that holds all of `expected_shapes`."""

    def norm(name: str) -> torch.Tensor:
        return source.stacked([f"{name}.weight"]).float()

    def stacked(*names: str, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = source.stacked([f"{name}.weight" for name in names])
        return weight, source.stacked([f"{name}.bias" for name in names]) if bias else None

    def linear(*names: str, bias: bool) -> Projection:
        return projections.project(*stacked(*names, bias=bias))

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return LayerWeights(
            attention_norm=norm(f"{prefix}.input_layernorm"),
            qkv=linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj", bias=config.qkv_bias),
            output=linear(f"{attention}.o_proj", bias=config.output_bias),
            mlp_norm=norm(f"{prefix}.post_attention_layernorm"),
            gated=projections.gated(*stacked(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias), "silu"),
            down=linear(f"{mlp}.down_proj", bias=config.mlp_bias),
        )

    embedding = source.stacked([EMBEDDING])
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=norm(FINAL_NORM),
        head=projections.tied(embedding) if config.tied_embeddings else projections.project(source.stacked([HEAD])),
    )
