"""The decoder that all families share, over packed tokens [T, hidden].

embed -> [ norm -> qkv -> rotate, write KV -> attend over blocks -> output -> (norm) -> +
           norm -> gate, up -> activation(gate) * up -> down               -> (norm) -> + ] x layers -> norm -> head
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from coppice_worker.kernels.backend import Angles, Arithmetic, AttentionStep
from coppice_worker.model.config.config import ModelConfig
from coppice_worker.model.decoder.rope import Rotary
from coppice_worker.model.decoder.weights import DecoderWeights, LayerWeights


class Attention:
    """Projects, attends over blocks, projects back."""

    def __init__(self, config: ModelConfig, index: int, weights: LayerWeights) -> None:
        self._index = index
        self._weights = weights
        self._heads = (config.num_heads + 2 * config.num_kv_heads, config.head_dim)

    def __call__(self, hidden: torch.Tensor, angles: Angles, step: AttentionStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        query = step.write(self._index, self._weights.qkv(hidden).view(-1, *self._heads), angles)
        return self._weights.output(step.attend(self._index, query))


class Decoder:
    """A causal language model; stateless, as all KV lives in blocks behind the step."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, arithmetic: Arithmetic) -> None:
        self.config = config
        self._weights = weights
        self._arithmetic = arithmetic
        self._embedding_scale = _embedding_scale(config, weights.embedding.dtype)
        self._rotary = Rotary(config.rope, config.head_dim, weights.embedding.device, weights.embedding.dtype)
        self._layers = [(layer, Attention(config, index, layer)) for index, layer in enumerate(weights.layers)]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Packed tokens [T] and their positions [T] -> hidden states [T, hidden] before the final norm."""
        hidden = embedding(token_ids, self._weights.embedding)
        if self._embedding_scale is not None:
            hidden *= self._embedding_scale
        angles = self._rotary.angles(positions)
        delta: torch.Tensor | None = None  # what the last part adds; added where the next one is normalised
        for weights, attention in self._layers:
            delta = attention(self._add_norm(hidden, delta, weights.attention_norm), angles, step)
            delta = self._out_norm(delta, weights.attention_out_norm)
            delta = weights.down(weights.gated(self._add_norm(hidden, delta, weights.mlp_norm)))
            delta = self._out_norm(delta, weights.mlp_out_norm)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [R, hidden] of the rows to sample -> logits [R, vocab]."""
        logits = self._weights.head(self._add_norm(hidden, None, self._weights.final_norm))
        cap = self.config.traits.logit_soft_cap
        # In float32: near the cap, narrow logits that differ would become equal.
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)

    def _out_norm(self, delta: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return delta if weight is None else self._add_norm(delta, None, weight)

    def _add_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        return self._arithmetic.add_norm(hidden, delta, weight, self.config.rms_norm_eps)


def _embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float | None:
    """Rounded to the model's dtype, as such models were trained."""
    return torch.tensor(config.hidden_size**0.5).to(dtype).item() if config.traits.scales_embedding else None
