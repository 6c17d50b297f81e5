"""Names and shapes of a decoder's tensors, as files hold them and as the decoder uses them.

file                                      decoder (fused once at load: one matmul instead of three or two)
self_attn.{q,k,v}_proj.weight       ->    qkv       [(H + 2 HK) D, hidden]
self_attn.o_proj.weight             ->    output    [hidden, H D]
mlp.{gate,up}_proj.weight           ->    gated     [2 intermediate, hidden]
mlp.down_proj.weight                ->    down      [hidden, intermediate]

Families name norms differently, and some have more of them. One of several workers holds its `Shard` of all this, and
counts its own heads and columns only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from coppice_worker.kernels.backend import HeadNorms, LayerAttention, Projection
from coppice_worker.model.config.config import ModelConfig
from coppice_worker.model.config.shard import WHOLE, Axis, Shard
from coppice_worker.model.decoder.linear import Projections

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: torch.Tensor  # [hidden] float32, as all norms
    qkv: Projection
    output: Projection
    attention_out_norm: torch.Tensor | None  # of what attention brings
    mlp_norm: torch.Tensor
    gated: Projection  # [T, hidden] -> [T, intermediate]
    down: Projection
    mlp_out_norm: torch.Tensor | None  # of what the MLP brings


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden] float32
    head: Projection  # [vocab, hidden]; of one of several workers, its rows


class TensorSource(Protocol):
    """Where tensors come from, already on the wanted device and of the wanted dtype."""

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        """This worker's parts of the named tensors, one below the other along dimension 0."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor in the files: its shape, and which of its dimensions workers share out."""

    shape: Shape
    axes: tuple[Axis | None, ...]


def tensor_layouts(config: ModelConfig) -> dict[str, Layout]:
    """Every tensor that the files must hold."""
    norm = Layout((config.hidden_size,), (None,))
    vocabulary = (config.vocab_size, config.hidden_size)
    layouts = {EMBEDDING: Layout(vocabulary, (None, None)), f"{FINAL_NORM}.weight": norm}
    if not config.tied_embeddings:
        layouts[HEAD] = Layout(vocabulary, ("vocabulary", None))
    for layer in range(config.num_layers):
        names = config.traits.norm_names
        for name in (names.attention, names.attention_out, names.mlp, names.mlp_out):
            if name is not None:
                layouts[f"model.layers.{layer}.{name}.weight"] = norm
        if config.traits.has_head_norms:
            for name in _head_norms(layer):
                layouts[f"{name}.weight"] = Layout((config.head_dim,), (None,))
        layouts.update(_projection_layouts(config, f"model.layers.{layer}."))
    return layouts


def _head_norms(layer: int) -> tuple[str, str]:
    return f"model.layers.{layer}.self_attn.q_norm", f"model.layers.{layer}.self_attn.k_norm"


def _projection_layouts(config: ModelConfig, prefix: str) -> dict[str, Layout]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate, traits = config.hidden_size, config.intermediate_size, config.traits
    projections: dict[str, tuple[Shape, tuple[Axis | None, ...], bool]] = {
        "self_attn.q_proj": ((query, hidden), ("query", None), traits.qkv_bias),
        "self_attn.k_proj": ((key, hidden), ("key", None), traits.qkv_bias),
        "self_attn.v_proj": ((key, hidden), ("key", None), traits.qkv_bias),
        "self_attn.o_proj": ((hidden, query), (None, "query"), traits.output_bias),
        "mlp.gate_proj": ((intermediate, hidden), ("intermediate", None), traits.mlp_bias),
        "mlp.up_proj": ((intermediate, hidden), ("intermediate", None), traits.mlp_bias),
        "mlp.down_proj": ((hidden, intermediate), (None, "intermediate"), traits.mlp_bias),
    }
    layouts = {}
    for name, (shape, axes, has_bias) in projections.items():
        layouts[f"{prefix}{name}.weight"] = Layout(shape, axes)
        if has_bias:
            layouts[f"{prefix}{name}.bias"] = Layout(shape[:1], axes[:1])
    return layouts


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some files carry and that say nothing new."""
    return name.endswith("rotary_emb.inv_freq") or (name == HEAD and config.tied_embeddings)


def attention_layers(config: ModelConfig, source: TensorSource) -> tuple[LayerAttention, ...]:
    """How each layer attends; of the weights only the norms of heads are read."""
    traits = config.traits

    def head_norms(layer: int) -> HeadNorms | None:
        if not traits.has_head_norms:
            return None
        query, key = (_norm(config, source, name) for name in _head_norms(layer))
        return HeadNorms(query, key, config.rms_norm_eps)

    return tuple(
        LayerAttention(
            scale=config.attention_scale,
            window=traits.window(layer),
            soft_cap=traits.attention_soft_cap,
            head_norms=head_norms(layer),
        )
        for layer in range(config.num_layers)
    )


def _norm(config: ModelConfig, source: TensorSource, name: str) -> torch.Tensor:
    return source.stacked([f"{name}.weight"]).float() + config.traits.norm_offset


def assemble(
    config: ModelConfig, source: TensorSource, projections: Projections, shard: Shard = WHOLE
) -> DecoderWeights:
    """Builds a worker's decoder from a source that holds its parts of all `tensor_layouts`."""

    traits, names = config.traits, config.traits.norm_names

    def norm(prefix: str, name: str) -> torch.Tensor:
        return _norm(config, source, f"{prefix}.{name}")

    def out_norm(prefix: str, name: str | None) -> torch.Tensor | None:
        return None if name is None else norm(prefix, name)

    def stacked(*names: str, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = source.stacked([f"{name}.weight" for name in names])
        return weight, source.stacked([f"{name}.bias" for name in names]) if bias else None

    def linear(*names: str, bias: bool) -> Projection:
        return projections.project(*stacked(*names, bias=bias))

    def summed(name: str, *, bias: bool) -> Projection:
        # What workers compute is added, so one of them adds the bias.
        return projections.summed(*stacked(name, bias=bias and shard.rank == 0))

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return LayerWeights(
            attention_norm=norm(prefix, names.attention),
            qkv=linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj", bias=traits.qkv_bias),
            output=summed(f"{attention}.o_proj", bias=traits.output_bias),
            attention_out_norm=out_norm(prefix, names.attention_out),
            mlp_norm=norm(prefix, names.mlp),
            gated=projections.gated(
                *stacked(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=traits.mlp_bias), traits.activation
            ),
            down=summed(f"{mlp}.down_proj", bias=traits.mlp_bias),
            mlp_out_norm=out_norm(prefix, names.mlp_out),
        )

    embedding = source.stacked([EMBEDDING])
    layers = tuple(layer(index) for index in range(config.num_layers))
    final_norm = _norm(config, source, FINAL_NORM)
    return DecoderWeights(embedding, layers, final_norm, _head(config, embedding, source, projections, shard))


def _head(
    config: ModelConfig, embedding: torch.Tensor, source: TensorSource, projections: Projections, shard: Shard
) -> Projection:
    if shard.size == 1:
        return projections.tied(embedding) if config.tied_embeddings else projections.project(source.stacked([HEAD]))
    rows = embedding[shard.part("vocabulary", config)] if config.tied_embeddings else source.stacked([HEAD])
    missing = shard.vocabulary_rows(config) - len(rows)
    # Packed or not, each worker's logits are equally many, so that they can be gathered.
    weight = torch.cat([rows, rows.new_zeros((missing, config.hidden_size))]) if missing else rows.contiguous()
    return projections.gathered(weight, config.vocab_size)
