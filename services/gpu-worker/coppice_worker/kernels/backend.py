"""The seam between the decoder and the kernels that know blocks.

backend = TorchBackend(pool)            or TritonBackend(pool)
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


class Backend(Protocol):
    """Everything that touches blocks on one kind of device."""

    def plan(self, batch: StepBatch, num_heads: int) -> AttentionStep: ...

    def zero_blocks(self, block_ids: Int32) -> None:
        """Overwrites whole blocks, all layers of K and V, with zeros."""

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Copies whole blocks pairwise, shapes [N]. No block may be both a source and a destination."""
