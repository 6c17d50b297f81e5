"""Chunks after any context: windows, caps, sinks, float8, odd heads, and lists of tiles with places left over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coppice_worker.kernels import reference
from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.pool import FLOAT8_MAX, KvPool
from coppice_worker.kernels.triton.attention.arrays import StepArrays, step_arrays
from coppice_worker.kernels.triton.attention.extend import extend
from coppice_worker.kernels.upload import Upload
from tests.kernels.cases import Case, make_case, reference_of

CPU = torch.device("cpu")


def filled(case: Case) -> Case:
    """With the new tokens in the pool already."""
    slots = torch.from_numpy(case.batch.slots)
    reference.write_kv(case.pool.keys(0), case.key, slots)
    reference.write_kv(case.pool.values(0), case.value, slots)
    return case


def arrays_of(case: Case, num_sms: int = 1) -> StepArrays:
    heads, block_size = case.pool.shape.num_kv_heads, case.pool.block_size
    group = case.num_heads // heads
    return step_arrays(
        case.batch,
        num_kv_heads=heads,
        group=group,
        head_dim=case.pool.shape.head_dim,
        block_size=block_size,
        upload=Upload(CPU),
        num_sms=num_sms,
    )


def run(case: Case, arrays: StepArrays) -> torch.Tensor:
    """[T, H, D], 7 where nothing was written."""
    out = torch.full(case.query.shape, 7.0)
    extend(case.query, case.pool.layer(0), arrays, case.layer, out)
    return out


def in_float8(case: Case) -> Case:
    """With blocks of float8; the ones that it had are rounded to what these hold."""
    plain = case.pool
    block_size = plain.block_size
    pool = KvPool(
        plain.shape, num_blocks=plain.num_blocks, block_size=block_size, device=CPU, dtype=torch.float8_e4m3fn
    )
    assert pool.scales is not None
    pool.scales.copy_(plain.storage.abs().amax(-1) / FLOAT8_MAX)
    pool.storage.copy_(plain.storage / pool.scales[..., None])
    plain.storage.copy_(pool.storage.float() * pool.scales[..., None])
    return replace(case, pool=pool)


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
    filled(case)
    sizes = 10.0 ** torch.randint(-4, 3, case.pool.storage.shape[:-1], generator=torch.Generator().manual_seed(3))
    case.pool.storage[:, 1] *= sizes[:, 1, ..., None]
    kept = in_float8(case)
    assert_close(run(kept, arrays_of(kept)), reference_of(case))


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


@pytest.mark.parametrize(("head_dim", "is_float8"), [(16, False), (80, False), (256, True)])
def test_context_in_pieces(head_dim: int, is_float8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces without tokens for some rows, of which one begins among the new tokens, beside a tile that is not cut."""
    monkeypatch.setattr("coppice_worker.kernels.triton.attention.extend_launch._PIECE_TOKENS_MIN", 64)
    monkeypatch.setattr("coppice_worker.kernels.triton.attention.extend_launch._PIECE_COST", 1)
    layer = LayerAttention(scale=0.3, sinks=torch.tensor([3.0, -1.0]), soft_cap=9.0)
    # Pieces of 64 tokens: the first row's third one begins at its 29th new token.
    new_tokens, before = [50, 3, 1, 70], [100, 20, 9, 0]
    case = make_case(new_tokens, before, block_size=16, num_kv_heads=1, group=2, head_dim=head_dim, layer=layer)
    filled(case)
    kept = in_float8(case) if is_float8 else case
    arrays = arrays_of(kept, num_sms=7)
    assert arrays.extend_pieces is not None
    counts = arrays.extend_pieces.joins[3].tolist()
    assert max(counts) >= 3
    assert -1 in arrays.extend_pieces.pieces[4]
    out, expected = run(kept, arrays), reference_of(case)
    chunks = [token for token in range(len(out)) if token != 53]
    assert_close(out[chunks], expected[chunks])
    assert (out[53] == 7).all()


def test_layers_with_a_window_read_it_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice_worker.kernels.triton.attention.extend_launch._PIECE_TOKENS_MIN", 64)
    layer = LayerAttention(scale=0.3, window=90)
    case = filled(make_case([5], [600], block_size=16, num_kv_heads=1, group=2, head_dim=16, layer=layer))
    arrays = arrays_of(case, num_sms=8)
    assert arrays.extend_pieces is not None
    expected = reference_of(case)
    assert_close(run(out_of_sight(case), arrays), expected)
