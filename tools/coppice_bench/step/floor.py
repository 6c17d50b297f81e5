"""What a step cannot be quicker than: its matrix products on a CPU, bytes and FLOPs at measured rates on a GPU."""

from __future__ import annotations

from math import prod

import torch

from coppice_bench.kernels.ceilings import Ceilings
from coppice_bench.step.model import StepModel, StepShape
from coppice_worker.model.config.config import ModelConfig
from coppice_worker.model.decoder.weights import EMBEDDING, DecoderWeights, tensor_layouts


class Products:
    """All projections of a step, one after the other, and nothing else; the gate where a projection includes it."""

    def __init__(self, model: StepModel, weights: DecoderWeights, shape: StepShape) -> None:
        config, num_tokens = model.config, shape.batch * shape.new_tokens

        def rows(count: int, width: int) -> torch.Tensor:
            return torch.randn(count, width, device=model.device).to(model.dtype)

        self._weights = weights
        self._hidden = rows(num_tokens, config.hidden_size)
        self._heads = rows(num_tokens, config.num_heads * config.head_dim)
        self._intermediate = rows(num_tokens, config.intermediate_size)
        self._sampled = rows(shape.batch, config.hidden_size)

    @torch.inference_mode()
    def compute(self) -> None:
        for layer in self._weights.layers:
            layer.qkv(self._hidden)
            layer.output(self._heads)
            layer.gated(self._hidden)
            layer.down(self._intermediate)
        self._weights.head(self._sampled)


def floor_ms(ceilings: Ceilings, model: StepModel, shape: StepShape) -> float:
    """The longer of moving the step's bytes and of multiplying."""
    moved, multiplied = step_bytes(model, shape), step_flops(model.config, shape)
    return 1e3 * max(moved / ceilings.copy_bytes_per_s, multiplied / ceilings.flops_per_s[model.dtype])


def num_projected(config: ModelConfig) -> int:
    """Parameters of all projections, the head among them."""
    layouts = tensor_layouts(config)
    matrices = {name: layout.shape for name, layout in layouts.items() if len(layout.shape) == 2}
    if not config.tied_embeddings:
        del matrices[EMBEDDING]  # a step looks up a few of its rows
    return sum(map(prod, matrices.values()))


def step_bytes(model: StepModel, shape: StepShape) -> int:
    """Weights once, and each sequence's KV once."""
    return num_projected(model.config) * model.dtype.itemsize + shape.batch * model.kv_bytes(shape.context)


def step_flops(config: ModelConfig, shape: StepShape) -> int:
    """Products with weights, the head's for one token of each sequence; scores and weighted values of seen keys."""
    num_tokens = shape.batch * shape.new_tokens
    head = config.vocab_size * config.hidden_size
    seen = shape.batch * shape.new_tokens * (2 * shape.context - shape.new_tokens + 1) // 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * seen
    return 2 * num_tokens * (num_projected(config) - head) + 2 * shape.batch * head + attention
