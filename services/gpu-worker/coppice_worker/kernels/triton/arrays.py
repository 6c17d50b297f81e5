"""What one step's launches read: index arrays on the device, made once per step and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from coppice_worker.core.batch import Int32, Int64, StepBatch

from . import launch


@dataclass(frozen=True, slots=True)
class DecodeArrays:
    """The B rows with one new token, and room for what their splits leave behind."""

    rows: torch.Tensor  # [B] int32, of the S sequence rows
    tokens: torch.Tensor  # [B] int32, of the T packed tokens
    split_tokens: int  # context tokens of a split, a multiple of the kernel's tile
    num_splits: int
    partial: torch.Tensor  # [B, H, num_splits, D] float32
    lse: torch.Tensor  # [B, H, num_splits] float32


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step on the device."""

    slots: torch.Tensor  # [T] int64
    tables: torch.Tensor  # [S, W] int32
    context_lens: torch.Tensor  # [S] int32
    query_starts: torch.Tensor  # [S + 1] int32
    decodes: DecodeArrays
    tile_rows: torch.Tensor  # [tiles] int32, sequence row of each tile of the rows with several new tokens
    tile_starts: torch.Tensor  # [tiles] int32, its first packed query row, counted from the row's first


def step_arrays(
    batch: StepBatch, *, num_heads: int, num_kv_heads: int, head_dim: int, num_sms: int, device: torch.device
) -> StepArrays:
    """The host knows all lengths before the step, so nothing is read back."""

    def to_device(array: Int32 | Int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    new_tokens = np.diff(batch.query_starts)
    decodes = np.flatnonzero(new_tokens == 1).astype(np.int32)
    extends = np.flatnonzero(new_tokens > 1).astype(np.int32)
    lens = batch.context_lens[decodes]
    split_tokens = launch.split_tokens(lens, num_kv_heads, num_sms)
    num_splits = -(-int(lens.max(initial=1)) // split_tokens)
    partials = (decodes.size, num_heads, num_splits, head_dim)
    tile_rows, tile_starts = launch.extend_tiles(extends, new_tokens[extends] * (num_heads // num_kv_heads))
    return StepArrays(
        slots=to_device(batch.slots),
        tables=to_device(batch.block_tables),
        context_lens=to_device(batch.context_lens),
        query_starts=to_device(batch.query_starts),
        decodes=DecodeArrays(
            rows=to_device(decodes),
            tokens=to_device(batch.query_starts[decodes]),
            split_tokens=split_tokens,
            num_splits=num_splits,
            partial=torch.empty(partials, dtype=torch.float32, device=device),
            lse=torch.empty(partials[:3], dtype=torch.float32, device=device),
        ),
        tile_rows=to_device(tile_rows),
        tile_starts=to_device(tile_starts),
    )
