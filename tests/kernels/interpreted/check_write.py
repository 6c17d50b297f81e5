"""The one launch that norms, rotates and stores heads, against plain torch in float64.

The interpreter cannot round to float8, so a pool of float32 with scales stands for one: it shows what is rounded.
"""

from __future__ import annotations

import pytest
import torch

from coppice_worker.kernels.backend import HeadNorms, LayerAttention
from coppice_worker.kernels.pool import FLOAT8_MAX, SCALE_MIN, LayerBlocks
from coppice_worker.kernels.triton.write import write

BLOCK, NUM_BLOCKS = 16, 3


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def wanted_heads(
    qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], norms: HeadNorms | None, num_heads: int, num_kv: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in float64."""
    parts = list(qkv.double().split([num_heads, num_kv, num_kv], dim=1))
    for index, weight in enumerate((norms.query, norms.key) if norms else ()):
        mean = parts[index].square().mean(-1, keepdim=True)
        parts[index] = parts[index] / (mean + norms.eps).sqrt() * weight.double()
    cos, sin = (angle.double() for angle in angles)
    for index in (0, 1):
        first, second = parts[index].chunk(2, dim=-1)
        parts[index] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return parts[0], parts[1], parts[2]


# 14 / 2 and 6 / 1 heads do not fill their last program; half of 80 is no power of two; 256 makes programs of 4 heads.
@pytest.mark.parametrize(("num_heads", "num_kv", "head_dim"), [(14, 2, 64), (6, 1, 80), (5, 5, 256), (32, 8, 16)])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("has_scales", [False, True])
def test_write(num_heads: int, num_kv: int, head_dim: int, has_norms: bool, has_scales: bool) -> None:
    norms = HeadNorms(random(head_dim) + 1, random(head_dim) - 1, 1e-5) if has_norms else None
    layer = LayerAttention(scale=1.0, head_norms=norms)
    slots = torch.tensor([17, 47, -1, 0])
    wide = random(4, num_heads + 2 * num_kv + 3, head_dim)
    wide[1, num_heads + num_kv] = 0.0  # a head of zeros has a scale
    qkv, before = wide[:, : num_heads + 2 * num_kv], wide.clone()
    angles = random(4, 1, head_dim // 2).cos(), random(4, 1, head_dim // 2).sin()
    planes = [torch.full((NUM_BLOCKS, num_kv, BLOCK, head_dim), float("nan")) for _ in range(2)]
    scales = [torch.full((NUM_BLOCKS, num_kv, BLOCK), float("nan")) if has_scales else None for _ in range(2)]
    query = write(qkv, angles, slots, LayerBlocks(planes[0], planes[1], *scales), layer, num_heads)
    wanted = wanted_heads(before[:, : qkv.shape[1]], angles, norms, num_heads, num_kv)
    real = [0, 1, 3]
    torch.testing.assert_close(query[real].double(), wanted[0][real], atol=1e-5, rtol=1e-5)
    assert query.data_ptr() == wide.data_ptr()
    # Padding, and what lies behind the heads, stays as it was.
    assert torch.equal(wide[2], before[2])
    assert torch.equal(wide[:, num_heads:], before[:, num_heads:])
    for plane, plane_scales, heads in zip(planes, scales, wanted[1:], strict=True):
        assert plane.isnan().sum() == plane.numel() - 3 * num_kv * head_dim
        for token in real:
            at = slots[token] // BLOCK, slice(None), slots[token] % BLOCK
            stored = plane[at].double()
            if plane_scales is not None:
                torch.testing.assert_close(
                    plane_scales[at].double(), (heads[token].abs().amax(-1) / FLOAT8_MAX).clamp(min=SCALE_MIN)
                )
                assert stored.abs().max() <= FLOAT8_MAX * (1 + 1e-6)
                stored *= plane_scales[at].double()[:, None]
            torch.testing.assert_close(stored, heads[token], atol=1e-5, rtol=1e-5)
        assert plane_scales is None or plane_scales.isnan().sum() == plane_scales.numel() - 3 * num_kv


def test_every_token_finds_its_slot() -> None:
    """More tokens than fit a block, in no order."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK, generator=torch.Generator().manual_seed(0))[:20]
    qkv = random(20, 4, 16)
    still = torch.ones(20, 1, 8), torch.zeros(20, 1, 8)
    planes = [torch.zeros(NUM_BLOCKS, 1, BLOCK, 16) for _ in range(2)]
    blocks = LayerBlocks(planes[0], planes[1], None, None)
    write(qkv, still, slots, blocks, LayerAttention(scale=1.0), 2)
    for plane, head in zip(planes, (2, 3), strict=True):
        assert torch.equal(plane.view(-1, 16)[slots], qkv[:, head])
        assert int((plane.view(-1, 16).abs().sum(-1) > 0).sum()) == 20
