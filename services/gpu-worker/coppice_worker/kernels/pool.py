"""The physical blocks of one worker: one allocation, seen per layer as K and V apart.

    storage [layers, 2, num_blocks, HK, block, D]
                     |  `-- one block of one layer's K (or V): HK * block * D contiguous elements
                     `-- 0 = K, 1 = V

One allocation lets a whole block, all layers of K and V, be copied or zeroed by one kernel launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from .host_memory import zeros_in_huge_pages


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's KV looks like in each layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of `block_size` tokens, K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size * dtype.itemsize


class KvPool:
    """Blocks of KV. Zeroed at start, as a masked-out NaN in unwritten memory would still poison a matmul."""

    def __init__(
        self, shape: KvShape, *, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        planes = (shape.num_layers, 2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        if device.type == "cpu":
            self.storage = zeros_in_huge_pages(prod(planes) * dtype.itemsize).view(dtype).view(planes)
        else:
            self.storage = torch.zeros(planes, dtype=dtype, device=device)

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks, HK, block, D], contiguous."""
        return self.storage[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks, HK, block, D], contiguous."""
        return self.storage[layer, 1]

    def planes(self) -> torch.Tensor:
        """[layers * 2, num_blocks, HK * block * D], contiguous: what block copies and zeroing work on."""
        return self.storage.view(self.shape.num_layers * 2, self.num_blocks, -1)
