"""Rotary position embedding: the angles of a step's positions, computed once and used by every layer.

A head's first half is paired with its second half: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), with the angle
position * inv_freq[i] for pair i. Formula: Su et al. 2021 (RoFormer); halves as in the Llama and Qwen2 checkpoints.
"""

from __future__ import annotations

import math

import torch

from .config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32, radians per position.

    llama3 (Llama 3.1's `rope_scaling`): wavelengths longer than original / low_freq_factor are stretched by
    `factor`, those shorter than original / high_freq_factor are kept, and between them both are blended.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return inv_freq
    stretched = inv_freq / rope.factor
    if rope.kind == "linear":
        return stretched
    turns = rope.original_max_context * inv_freq / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * inv_freq + (1 - keep) * stretched


class Rotary:
    """Turns positions into angles; holds the frequencies on the model's device."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self._dtype = dtype

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, head_dim / 2] in the model's dtype, for positions [T]."""
        radians = torch.outer(positions.float(), self._inv_freq).unsqueeze(1)
        return radians.cos().to(self._dtype), radians.sin().to(self._dtype)
