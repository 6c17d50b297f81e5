"""The seam between the decoder and the kernels that know blocks.

backend = TorchBackend(pool)            or TritonBackend(pool), NativeBackend(pool, library)
step = backend.plan(batch)              once per step: indices, masks, split counts
out = step.attend(layer, q, k, v)       once per layer: writes k and v into the blocks, then attends
"""

from __future__ import annotations

from typing import Protocol

import torch

from coppice_worker.core.batch import Int32, StepBatch


class AttentionStep(Protocol):
    """One step's attention; used once for each layer."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Writes the new tokens' KV, then attends causally over each row's whole context.

        query [T, H, D], key and value [T, HK, D], already rotated; rows may be strided, heads are contiguous.
        Returns [T, H * D].
        """


class Arithmetic(Protocol):
    """What is done between projections and attention, and to choose the likeliest token."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds delta [T, N] to hidden [T, N] in place; returns the RMS norm of the sum, by weight [N]."""

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates heads [T, N, D] by angles [T, 1, D / 2], perhaps in place; rows may be strided."""

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        """[T, 2 N], gate and up side by side -> silu(gate) * up, [T, N]."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """[R] int64, the first of the largest in each row of logits [R, vocab]."""


class Backend(Protocol):
    """Everything that touches blocks on one kind of device."""

    @property
    def arithmetic(self) -> Arithmetic: ...

    def plan(self, batch: StepBatch, num_heads: int) -> AttentionStep: ...

    def zero_blocks(self, block_ids: Int32) -> None:
        """Overwrites whole blocks, all layers of K and V, with zeros."""

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Copies whole blocks pairwise, shapes [N]. No block may be both a source and a destination."""
