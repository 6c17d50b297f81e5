"""The physical blocks of one worker: one allocation, seen per layer as K and V apart.

    storage [layers, 2, num_blocks, HK, block, D]
                     |  `-- one block of one layer's K (or V): HK * block * D contiguous elements
                     `-- 0 = K, 1 = V

One allocation lets a whole block, all layers of K and V, be copied or zeroed by one kernel launch.

Blocks of float8_e4m3fn come with a scale for each token of each head: what was written is about `element * scale`,
and the largest element of a head is stored as 448.

    scales  [layers, 2, num_blocks, HK, block] float32
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from coppice_worker.kernels.host_memory import zeros_in_huge_pages

FLOAT8_MAX = 448.0  # the largest float8_e4m3fn
SCALE_MIN = 2.0**-100  # of a head of zeros; its inverse is finite


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's KV looks like in each layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of `block_size` tokens, K and V of all layers, scales included."""
        per_head = self.head_dim * dtype.itemsize + (torch.float32.itemsize if has_scales(dtype) else 0)
        return 2 * self.num_layers * self.num_kv_heads * block_size * per_head


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The blocks of one layer."""

    keys: torch.Tensor  # [num_blocks, HK, block, D], contiguous
    values: torch.Tensor  # like `keys`
    key_scales: torch.Tensor | None  # [num_blocks, HK, block] float32, for float8 only
    value_scales: torch.Tensor | None


def has_scales(dtype: torch.dtype) -> bool:
    return dtype == torch.float8_e4m3fn


class KvPool:
    """Blocks of KV. Zeroed at start, as a masked-out NaN in unwritten memory would still poison a matmul."""

    def __init__(
        self,
        shape: KvShape,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        content_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of blocks. Blocks of float8 take and give heads of another: `content_dtype`, or float32."""
        assert num_blocks > 0
        assert block_size > 0
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.content_dtype = (content_dtype or torch.float32) if has_scales(dtype) else dtype
        planes = (shape.num_layers, 2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        if device.type == "cpu":
            self.storage = zeros_in_huge_pages(prod(planes) * dtype.itemsize).view(dtype).view(planes)
        else:
            self.storage = torch.zeros(planes, dtype=dtype, device=device)
        self.scales = torch.zeros(planes[:-1], device=device) if has_scales(dtype) else None

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks, HK, block, D], contiguous."""
        return self.storage[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks, HK, block, D], contiguous."""
        return self.storage[layer, 1]

    def layer(self, layer: int) -> LayerBlocks:
        scales = (None, None) if self.scales is None else (self.scales[layer, 0], self.scales[layer, 1])
        return LayerBlocks(self.keys(layer), self.values(layer), *scales)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, K and V of all layers, scales included."""
        return self.shape.bytes_per_block(self.block_size, self.storage.dtype)

    def planes(self) -> tuple[torch.Tensor, ...]:
        """What copying and zeroing work on: all of the pool's bits, each [layers * 2, num_blocks, words] int32."""
        shape = (self.shape.num_layers * 2, self.num_blocks, -1)
        elements = self.storage.view(shape).view(torch.int32)
        return (elements,) if self.scales is None else (elements, self.scales.view(shape).view(torch.int32))

    def staged(self, staging: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of staging [N, bytes_per_block] uint8 that stand for `planes`, each [layers * 2, N, words] int32.

        a row of staging  | elements of K, V of each layer | scales of K, V of each layer |
        """
        assert staging.dtype == torch.uint8
        assert staging.shape[1] == self.bytes_per_block
        parts, start = [], 0
        for plane in self.planes():
            num_planes, _, words = plane.shape
            part = staging.view(torch.int32)[:, start : start + num_planes * words]
            parts.append(part.view(-1, num_planes, words).transpose(0, 1))
            start += num_planes * words
        return tuple(parts)
