"""How many programs decode's kernels leave room for beside each other on a device, as they were compiled for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coppice_worker.kernels.backend import Heads
from coppice_worker.kernels.pool import KvPool
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.attention.arrays import DecodeScratch, Prefixes, StepArrays
from coppice_worker.kernels.triton.attention.decode import attend_spans
from coppice_worker.kernels.triton.attention.split_kv import plan, shared_prefixes
from coppice_worker.kernels.triton.residency import DecodePrograms, programs_of


def resident_programs(pool: KvPool, heads: Heads, scratch: DecodeScratch, read: DecodePrograms) -> DecodePrograms:
    """Launches them for a row that is padding, of which nothing is computed. The fewest of all kinds of layers; `read`
    where a kernel does not say what it takes."""
    arrays = _padding(heads.num_heads // pool.shape.num_kv_heads, pool.storage.device)
    plan(arrays, scratch, pool.shape.num_kv_heads)
    query = torch.zeros((1, heads.num_heads, pool.shape.head_dim), dtype=pool.content_dtype, device=pool.storage.device)
    own: list[int | None] = []
    shared: list[int | None] = []
    kinds = {(layer.window, layer.soft_cap is None): index for index, layer in enumerate(heads.layers)}
    for index in kinds.values():
        layer, blocks = heads.layers[index], pool.layer(index)
        for prefixes, found in ((None, own), (shared_prefixes(arrays, layer.window), shared)):
            if found is own or prefixes is not None:
                kernel = attend_spans(query, blocks, arrays, scratch, layer, prefixes)
                found.append(programs_of(kernel, pool.storage.device))
    return DecodePrograms(_fewest(own, read.own), _fewest(shared, read.shared))


def _fewest(found: Sequence[int | None], read: int) -> int:
    return min((read if number is None else number for number in found), default=read)


def _padding(group: int, device: torch.device) -> StepArrays:
    def numbers(value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    groups, members = launch.PREFIX_GROUPS_MAX, launch.prefix_members(group)
    return StepArrays(
        slots=torch.full((1,), -1, dtype=torch.int64, device=device),
        tables=numbers(0, 1, 4),
        context_lens=numbers(0, 1),
        query_starts=torch.arange(2, dtype=torch.int32, device=device),
        tile_rows=numbers(0, 0),
        tile_starts=numbers(0, 0),
        has_decodes=True,
        prefixes=Prefixes(numbers(-1, groups, members), numbers(0, groups + 1), numbers(-1, 1)),
    )
