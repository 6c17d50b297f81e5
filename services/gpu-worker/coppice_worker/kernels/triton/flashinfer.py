"""Chunks by FlashInfer, where it is installed; all else stays with Triton's kernels.

    steps that are graphs, steps of decodes     Triton
    other steps: all of their rows              FlashInfer: FlashAttention 3 on Hopper, 2 before it
    layers with sinks                           Triton

FlashInfer reads blocks where they lie: a pool's keys of one layer are its pages in the layout HND. `plan` and `run` are
those of `BatchPrefillWithPagedKVCacheWrapper` of FlashInfer 0.6. None of this has run on a GPU; tests have a stand-in
that computes what FlashInfer's documentation says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import StepBatch
from coppice_worker.kernels.backend import Heads, LayerAttention
from coppice_worker.kernels.pool import KvPool, has_scales
from coppice_worker.kernels.triton.attention.arrays import StepArrays
from coppice_worker.kernels.triton.backend import TritonBackend, TritonStep

HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends


class PagedAttention(Protocol):
    """What is used of FlashInfer's wrapper."""

    def plan(self, *tensors: torch.Tensor, **how: Any) -> None:
        """Of the step: query_starts, page_starts [S + 1], pages, tokens in each row's last page [S]; all int32."""

    def run(self, query: torch.Tensor, blocks: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, H, D] of the planned step; keys and values [num_pages, HK, page, D]."""


class Kind(NamedTuple):
    """What a plan is made for: layers that attend in the same way share one."""

    scale: float
    window: int | None
    soft_cap: float | None


def kind_of(layer: LayerAttention) -> Kind | None:
    """None: FlashInfer does not compute it."""
    return None if layer.sinks is not None else Kind(layer.scale, layer.window, layer.soft_cap)


def unsupported(pool: KvPool) -> str | None:
    """Why FlashInfer cannot read the blocks of a pool; None where it can."""
    if has_scales(pool.storage.dtype):
        return "float8 blocks have a scale for each token, FlashInfer has one for all"
    if pool.shape.head_dim not in HEAD_DIMS:
        return f"heads have {pool.shape.head_dim} columns, FlashInfer's have {', '.join(map(str, HEAD_DIMS))}"
    return None


class FlashInferBackend(TritonBackend):
    def __init__(self, pool: KvPool, heads: Heads, make: Callable[[torch.Tensor, str], PagedAttention]) -> None:
        """`make` is `flashinfer.BatchPrefillWithPagedKVCacheWrapper`. The pool is not `unsupported`."""
        super().__init__(pool, heads)
        # One after the other uses it.
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        kinds = {kind for kind in map(kind_of, heads.layers) if kind is not None}
        self.attentions = {kind: make(workspace, "HND") for kind in kinds}

    def plan(self, batch: StepBatch) -> TritonStep:
        if len(batch.token_ids) == len(batch.context_lens):
            return super().plan(batch)
        size = self.pool.block_size
        num_pages = -(-batch.context_lens // size)
        page_starts = np.concatenate([[0], np.cumsum(num_pages)])
        pages = batch.block_tables[np.arange(batch.block_tables.shape[1]) < num_pages[:, None]]
        in_last = batch.context_lens - (num_pages - 1) * size
        tensors = [
            torch.from_numpy(part.astype(np.int32)) for part in (batch.query_starts, page_starts, pages, in_last)
        ]
        for kind, attention in self.attentions.items():
            attention.plan(
                *tensors,
                num_qo_heads=self.heads.num_heads,
                num_kv_heads=self.pool.shape.num_kv_heads,
                head_dim_qk=self.pool.shape.head_dim,
                page_size=size,
                causal=True,
                sm_scale=kind.scale,
                window_left=-1 if kind.window is None else kind.window - 1,
                logits_soft_cap=kind.soft_cap,
                q_data_type=self.pool.content_dtype,
            )
        return FlashInferStep(self, self.arrays(batch))


class FlashInferStep(TritonStep):
    """A step with chunks."""

    def __init__(self, backend: FlashInferBackend, arrays: StepArrays) -> None:
        super().__init__(backend, arrays)
        self._attentions = backend.attentions

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        kind = kind_of(self._backend.heads.layers[layer])
        if kind is None:
            return super().attend(layer, query)
        pool = self._backend.pool
        found = self._attentions[kind].run(query.contiguous(), (pool.keys(layer), pool.values(layer)))
        return found.view(query.shape[0], -1)
