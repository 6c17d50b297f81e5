"""What a worker would find, by its own arithmetic: shapes of weights and blocks are exact, the rest is an estimate.

    |<------------ share of the device's memory ------------>|
    | weights | largest step | libraries, graphs |   blocks   |
      exact      estimate        allowance         what is left

A worker on a GPU measures the middle two when it starts, and logs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from coppice_worker.core.batch.step_batch import StepLimits
from coppice_worker.model.config.config import ModelConfig
from coppice_worker.model.config.dtypes import kv_dtype_of, torch_dtype_of
from coppice_worker.model.config.shard import Shard
from coppice_worker.model.decoder.weights import Layout, tensor_layouts
from coppice_worker.model.memory import MemoryUse, blocks_that_fit
from coppice_worker.model.pool_size import kv_shape

LIBRARIES_BYTES = 1 << 30  # contexts, workspaces, code and graphs on a GPU: an allowance, measured nowhere yet
_HIDDEN_AT_PEAK = 4  # tensors [T, hidden] that live at once in a layer
_INTERMEDIATE_AT_PEAK = 3  # gate, up and what becomes of them: [T, intermediate]
_LOGITS_AT_PEAK = 7  # float32 [R, vocabulary] while rows are drawn: sorted values, their places, sums
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a worker is started with."""

    config: ModelConfig
    dtype: str  # of weights and computation
    kv_dtype: str  # auto, fp8
    block_size: int
    ranks: int = 1
    limits: StepLimits = StepLimits()


@dataclass(frozen=True, slots=True)
class Pool:
    """Bytes of each rank; blocks, which are the same on all of them."""

    weights: int
    step: int
    libraries: int
    bytes_per_token: int
    bytes_per_block: int
    num_blocks: int


def pool_on_gpu(asked: Asked, *, total: int, free: int, utilization: float) -> Pool:
    """Of a device with `total` bytes, `free` of them. Raises PoolTooSmall and UsageError."""
    per_block = bytes_per_block(asked)
    use = MemoryUse(total, free, weight_bytes(asked), step_bytes(asked), LIBRARIES_BYTES)
    needed = -(-min(asked.limits.max_step_tokens, asked.config.max_context) // asked.block_size)
    found = blocks_that_fit(use, utilization=utilization, bytes_per_block=per_block, num_blocks_min=needed)
    return Pool(use.weights, use.step, use.libraries, per_block // asked.block_size, per_block, found)


def pool_on_cpu(asked: Asked, *, kv_memory: int) -> Pool:
    """Ranks share the memory that is set aside for KV; weights are beside it. Raises UsageError."""
    per_block = bytes_per_block(asked)
    found = kv_memory // asked.ranks // per_block
    return Pool(weight_bytes(asked), step_bytes(asked), 0, per_block // asked.block_size, per_block, found)


def bytes_per_block(asked: Asked) -> int:
    """Of the first rank. Raises UsageError where heads do not split."""
    share = Shard(0, asked.ranks).share_of(asked.config)
    return kv_shape(share).bytes_per_block(asked.block_size, kv_dtype_of(asked.kv_dtype, asked.dtype))


def weight_bytes(asked: Asked) -> int:
    """Of the rank that holds most."""
    ranks = [Shard(rank, asked.ranks) for rank in (0, asked.ranks - 1)]
    layouts = tensor_layouts(asked.config).values()
    most = max(sum(_elements(layout, asked.config, shard) for layout in layouts) for shard in ranks)
    return most * torch_dtype_of(asked.dtype).itemsize


def _elements(layout: Layout, config: ModelConfig, shard: Shard) -> int:
    parts = (None if axis is None else shard.part(axis, config) for axis in layout.axes)
    return prod(
        size if part is None else part.stop - part.start for size, part in zip(layout.shape, parts, strict=True)
    )


def step_bytes(asked: Asked) -> int:
    """An estimate of a largest step's peak: in a layer, or where its rows are drawn."""
    config, limits = Shard(0, asked.ranks).share_of(asked.config), asked.limits
    itemsize = torch_dtype_of(asked.dtype).itemsize
    hidden = limits.max_step_tokens * config.hidden_size * itemsize
    layer = (
        _HIDDEN_AT_PEAK * hidden + _INTERMEDIATE_AT_PEAK * limits.max_step_tokens * config.intermediate_size * itemsize
    )
    rows = min(limits.max_sequences, limits.max_step_tokens)
    drawing = _LOGITS_AT_PEAK * rows * config.vocab_size * _FLOAT32 + 2 * hidden
    return max(layer, drawing)


def requests_at_once(num_blocks: int, *, context: int, shared: int, block_size: int, most: int) -> int:
    """How many requests of `context` tokens have room, `most` at most; the first `shared` of each are the same, and
    whole blocks of those are held once."""
    in_common = min(shared, context - 1) // block_size
    own = -(-context // block_size) - in_common
    return max(0, min(most, (num_blocks - in_common) // own))
