"""The decoder that both families share, over packed tokens [T, hidden].

embed -> [ norm -> qkv -> rotate -> attend (writes KV, reads blocks) -> output -> +
           norm -> gate, up -> silu(gate) * up -> down               -> + ] x layers -> norm -> head
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, rms_norm, silu

from coppice_worker.kernels.backend import AttentionStep

from .config import ModelConfig
from .rope import Rotary, rotate
from .weights import DecoderWeights, LayerWeights


class Attention:
    """Projects, rotates, attends over blocks, projects back."""

    def __init__(self, config: ModelConfig, index: int, weights: LayerWeights) -> None:
        self._index = index
        self._weights = weights
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._heads = (self._num_rotated + config.num_kv_heads, config.head_dim)
        self._num_query = config.num_heads

    def __call__(
        self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        qkv = self._weights.qkv(hidden).view(-1, *self._heads)
        rotated = rotate(qkv[:, : self._num_rotated], *angles)
        query, key = rotated[:, : self._num_query], rotated[:, self._num_query :]
        attended = step.attend(self._index, query, key, qkv[:, self._num_rotated :])
        return self._weights.output(attended)


class Mlp:
    """Gated SiLU."""

    def __init__(self, weights: LayerWeights) -> None:
        self._weights = weights

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self._weights.gate_up(hidden).chunk(2, dim=-1)
        return self._weights.down(silu(gate).mul_(up))


class Decoder:
    """A causal language model; stateless, as all KV lives in blocks behind the step."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._rotary = Rotary(config.rope, config.head_dim, weights.embedding.device, weights.embedding.dtype)
        self._layers = [
            (layer, Attention(config, index, layer), Mlp(layer)) for index, layer in enumerate(weights.layers)
        ]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Packed tokens [T] and their positions [T] -> hidden states [T, hidden] before the final norm."""
        hidden = embedding(token_ids, self._weights.embedding)
        angles = self._rotary.angles(positions)
        for weights, attention, mlp in self._layers:
            hidden += attention(self._norm(hidden, weights.attention_norm), angles, step)
            hidden += mlp(self._norm(hidden, weights.mlp_norm))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [R, hidden] of the rows to sample -> logits [R, vocab]."""
        return self._weights.head(self._norm(hidden, self._weights.final_norm))

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normalise(hidden, weight, self.config.rms_norm_eps)


def normalise(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of hidden [T, N] by weight [N].

    On a CPU torch's own one converts narrow rows to float32 in several passes over memory; the scale is all that
    needs it.
    """
    if hidden.device.type != "cpu" or hidden.dtype == torch.float32:
        return rms_norm(hidden, weight.shape, weight, eps)
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(hidden, scale).mul_(weight).to(hidden.dtype)
