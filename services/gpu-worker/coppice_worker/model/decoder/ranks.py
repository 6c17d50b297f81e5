"""The ranks of one model, as the model sees them: they meet twice per layer, and once for logits."""

from __future__ import annotations

from typing import Protocol

import torch


class RankGroup(Protocol):
    """The ranks that compute one model. All of them call the same methods in the same order, with equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add_up(self, share: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' shares, in place where it can be; contiguous, the same bits on every rank."""

    def join_columns(self, share: torch.Tensor) -> torch.Tensor:
        """[R, n] of each rank -> [R, size * n], rank 0's columns first."""

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
