"""Rotary position embedding: the angles of a step's positions, computed once and used by every layer.

A head's first half is paired with its second half: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), with the angle
position * inv_freq[i] for pair i. Formula: Su et al. 2021 (RoFormer); halves as in the Llama and Qwen2 checkpoints.
"""

from __future__ import annotations

import math

import torch

from coppice_worker.model.config.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32, radians per position.

    llama3 (Llama 3.1's `rope_scaling`): wavelengths longer than original / low_freq_factor are stretched by
    `factor`, those shorter than original / high_freq_factor are kept, and between them both are blended.
    yarn: the same between two pairs of the head, those that turn that often in the original context.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return inv_freq
    stretched = inv_freq / rope.factor
    if rope.kind == "linear":
        return stretched
    keep = _kept_by_turns(rope, inv_freq) if rope.kind == "llama3" else _kept_by_pair(rope, head_dim)
    return keep * inv_freq + (1 - keep) * stretched


def _kept_by_turns(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    turns = rope.original_max_context * inv_freq / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return keep.clamp(0.0, 1.0)


def _kept_by_pair(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    def pair(turns: float) -> float:
        """The pair that turns that often in the original context, as a fraction."""
        return head_dim * math.log(rope.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.high_freq_factor), pair(rope.low_freq_factor)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)


class Rotary:
    """Turns positions into angles; holds the frequencies on the model's device."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self._length = rope.length
        self._dtype = dtype

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, head_dim / 2] in the model's dtype, for positions [T]."""
        radians = torch.outer(positions.float(), self._inv_freq).unsqueeze(1)
        cos, sin = radians.cos(), radians.sin()
        if self._length != 1:
            cos, sin = cos * self._length, sin * self._length
        return cos.to(self._dtype), sin.to(self._dtype)
