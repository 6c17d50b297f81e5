"""Chunks after any context: windows, caps, sinks, float8, odd heads, and lists of tiles with places left over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coppice_worker.kernels import reference
from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.pool import FLOAT8_MAX, KvPool
from coppice_worker.kernels.triton.arrays import StepArrays, step_arrays
from coppice_worker.kernels.triton.extend import extend
from tests.kernels.cases import Case, make_case, reference_of

CPU = torch.device("cpu")


def filled(case: Case) -> Case:
    """With the new tokens in the pool already."""
    slots = torch.from_numpy(case.batch.slots)
    reference.write_kv(case.pool.keys(0), case.key, slots)
    reference.write_kv(case.pool.values(0), case.value, slots)
    return case


def arrays_of(case: Case) -> StepArrays:
    heads = case.pool.shape.num_kv_heads
    return step_arrays(
        case.batch, num_kv_heads=heads, group=case.num_heads // heads, block_size=case.pool.block_size, device=CPU
    )


def run(case: Case, arrays: StepArrays) -> torch.Tensor:
    """[T, H, D], 7 where nothing was written."""
    out = torch.full(case.query.shape, 7.0)
    extend(case.query, case.pool.layer(0), arrays, case.layer, out)
    return out


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, atol=2e-6 * float(expected.abs().max()), rtol=1e-5)


def out_of_sight(case: Case) -> Case:
    """Nothing that no token sees is there any more: contents are NaN, and tables name no blocks."""
    block_size = case.pool.block_size
    assert case.layer.window is not None
    for row, position in enumerate(case.batch.positions[case.batch.query_starts[:-1]].tolist()):
        first = max(0, position + 1 - case.layer.window)
        table = case.batch.block_tables[row]
        for unseen in range(first):
            case.pool.storage[:, :, table[unseen // block_size], :, unseen % block_size] = float("nan")
        table[: first // block_size] = 1 << 30
    return case


# A whole tile behind the window's edge, none, a window within a tile, of one token, and longer than the context.
@pytest.mark.parametrize(("window", "block_size"), [(200, 32), (200, 64), (70, 16), (9, 16), (1, 16), (999, 16)])
def test_window(window: int, block_size: int) -> None:
    layer = LayerAttention(scale=0.3, window=window)
    case = make_case([5, 70], [300, 140], block_size=block_size, num_kv_heads=1, group=2, head_dim=16, layer=layer)
    expected = reference_of(filled(case))
    assert_close(run(out_of_sight(case), arrays_of(case)), expected)


LAYERS = {
    "capped": LayerAttention(scale=1.0, soft_cap=2.0),
    "sinks": LayerAttention(scale=0.3, sinks=torch.tensor([-1.0, 4.0, 60.0, 0.0, 1.0, -80.0])),
    "all": LayerAttention(scale=0.5, window=150, soft_cap=1.5, sinks=torch.linspace(-2, 3, 6)),
}


# Heads of 24 columns are computed tile by tile, and of 80 with the next tile's scores ahead.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # to infinity, of which the tanh is 1
@pytest.mark.parametrize("head_dim", [24, 80])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_ways_of_attending(layer: LayerAttention, head_dim: int) -> None:
    case = make_case([2, 40], [60, 190], block_size=16, num_kv_heads=2, group=3, head_dim=head_dim, layer=layer)
    filled(case)
    case.query.mul_(4)  # far into the cap
    assert_close(run(case, arrays_of(case)), reference_of(case))


@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "block_size"),
    [(1, 2, 128, 64), (14, 1, 96, 32), (7, 2, 256, 64), (1, 3, 32, 16)],
)
def test_shapes(group: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    case = make_case(
        [3, 20], [0, 270], block_size=block_size, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim
    )
    filled(case)
    assert_close(run(case, arrays_of(case)), reference_of(case))


@pytest.mark.parametrize("head_dim", [80, 256])
def test_float8_blocks(head_dim: int) -> None:
    """Values of very different size, each with a scale of its own; NaN scales where no token is."""
    case = make_case([3, 40], [20, 140], block_size=16, num_kv_heads=2, group=2, head_dim=head_dim)
    plain = filled(case).pool
    sizes = 10.0 ** torch.randint(-4, 3, plain.storage.shape[:-1], generator=torch.Generator().manual_seed(3))
    plain.storage[:, 1] *= sizes[:, 1, ..., None]
    pool = KvPool(plain.shape, num_blocks=plain.num_blocks, block_size=16, device=CPU, dtype=torch.float8_e4m3fn)
    assert pool.scales is not None
    pool.scales.copy_(plain.storage.abs().amax(-1) / FLOAT8_MAX)
    pool.storage.copy_(plain.storage / pool.scales[..., None])
    plain.storage.copy_(pool.storage.float() * pool.scales[..., None])
    assert_close(run(replace(case, pool=pool), arrays_of(case)), reference_of(case))


def test_places_left_over_in_the_lists_do_nothing() -> None:
    """And rows with one new token are not touched."""
    case = filled(make_case([70, 1, 3], [20, 9, 50], block_size=16, num_kv_heads=1, group=2, head_dim=16))
    arrays = arrays_of(case)
    nowhere = torch.full((3,), -1, dtype=torch.int32)
    arrays = replace(
        arrays,
        tile_rows=torch.cat([arrays.tile_rows, nowhere]),
        tile_starts=torch.cat([arrays.tile_starts, nowhere]),
    )
    out, expected = run(case, arrays), reference_of(case)
    chunks = [*range(70), 71, 72, 73]
    assert_close(out[chunks], expected[chunks])
    assert (out[70] == 7).all()
