"""Decode by a fixed number of programs: spans that end anywhere, padding rows, arrays filled anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from coppice_worker.kernels import reference
from coppice_worker.kernels.backend import LayerAttention, StepRows
from coppice_worker.kernels.pool import FLOAT8_MAX, KvPool
from coppice_worker.kernels.triton.attention.arrays import (
    DecodeScratch,
    Prefixes,
    StepArrays,
    decode_scratch,
    step_arrays,
)
from coppice_worker.kernels.triton.attention.cascade import no_groups
from coppice_worker.kernels.triton.attention.decode import decode
from coppice_worker.kernels.triton.attention.split_kv import plan
from coppice_worker.kernels.triton.backend import TritonBackend
from coppice_worker.kernels.triton.residency import DecodePrograms
from coppice_worker.kernels.upload import Upload
from tests.kernels.cases import Case, make_case

CPU = torch.device("cpu")


def scratch_for(case: Case, rows_max: int = 8, num_sms: int = 1) -> DecodeScratch:
    """Full of what would be noticed."""
    shape = case.pool.shape
    per_sm = DecodePrograms(2, 3)  # neither one program, nor as many for both
    scratch = decode_scratch(rows_max, case.heads, shape, per_sm=per_sm, num_sms=num_sms, device=CPU)
    for array in (scratch.own.out, scratch.own.lse, scratch.shared.out, scratch.shared.lse):
        array.fill_(float("nan"))
    return scratch


def filled(case: Case) -> Case:
    """With the new tokens in the pool already."""
    slots = torch.from_numpy(case.batch.slots)
    reference.write_kv(case.pool.keys(0), case.key, slots)
    reference.write_kv(case.pool.values(0), case.value, slots)
    return case


def wanted(case: Case) -> torch.Tensor:
    batch = case.batch
    lengths = [torch.from_numpy(array) for array in (batch.block_tables, batch.context_lens, batch.query_starts)]
    return reference.attend(case.layer, case.query, case.pool.keys(0), case.pool.values(0), *lengths)


def run(case: Case, arrays: StepArrays, scratch: DecodeScratch) -> torch.Tensor:
    """[T, H, D], 7 where nothing was written."""
    out = torch.full(case.query.shape, 7.0)
    plan(arrays, scratch, case.pool.shape.num_kv_heads)
    decode(case.query, case.pool.layer(0), arrays, scratch, case.layer, out)
    return out


def arrays_of(case: Case) -> StepArrays:
    heads = case.pool.shape.num_kv_heads
    return step_arrays(
        case.batch,
        num_kv_heads=heads,
        group=case.num_heads // heads,
        head_dim=case.pool.shape.head_dim,
        block_size=case.pool.block_size,
        upload=Upload(CPU),
    )


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("num_sms", [1, 7])
def test_spans_end_anywhere(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with several rows and heads, heads with more programs than are joined at a time, idle programs."""
    monkeypatch.setattr("coppice_worker.kernels.triton.launch.REDUCE_PIECES", (2, 2))
    case = filled(make_case([1] * 4, [0, 127, 128, 200], block_size=16, num_kv_heads=2, group=2, head_dim=16))
    assert_close(run(case, arrays_of(case), scratch_for(case, num_sms=num_sms)), wanted(case))


def test_a_replay_depends_on_nothing_but_its_arrays() -> None:
    """One set of arrays and scratch, filled for a large step and then for a small one with padding rows."""
    large = filled(make_case([1] * 5, [130, 64, 5, 5, 70], block_size=16, num_kv_heads=2, group=2, head_dim=16))
    small = filled(make_case([1] * 3, [70, 1, 130], block_size=16, num_kv_heads=2, group=2, head_dim=16, seed=1))
    scratch, arrays = scratch_for(large), arrays_of(large)
    assert_close(run(large, arrays, scratch), wanted(large))
    # Tables of padding rows name blocks that do not exist; a read of them would end the process or bring garbage.
    arrays.tables.fill_(1 << 30)
    arrays.tables[:3, : small.batch.block_tables.shape[1]] = torch.from_numpy(small.batch.block_tables)
    arrays.context_lens.copy_(torch.tensor([71, 2, 131, 0, 0]))
    qkv = torch.full((5, *small.qkv.shape[1:]), float("nan"))
    qkv[:3] = small.qkv
    out = run(replace(small, qkv=qkv), arrays, scratch)
    assert_close(out[:3], wanted(small))
    assert (out[3:] == 7).all()


def test_only_rows_with_one_new_token_are_touched() -> None:
    case = filled(make_case([1, 3, 1], [40, 30, 70], block_size=16, num_kv_heads=1, group=2, head_dim=16))
    out = run(case, arrays_of(case), scratch_for(case))
    assert_close(out[[0, 4]], wanted(case)[[0, 4]])
    assert (out[1:4] == 7).all()


def test_a_step_may_have_more_rows_than_an_iteration_of_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice_worker.kernels.triton.launch.PLAN_ROWS", 4)
    case = filled(make_case([1] * 7, [3, 0, 64, 70, 9, 1, 2], block_size=16, num_kv_heads=2, group=1, head_dim=16))
    scratch = scratch_for(case)
    assert_close(run(case, arrays_of(case), scratch), wanted(case))
    tiles = -(-case.batch.context_lens // 64) * 2
    assert scratch.starts_of(None)[:8].tolist() == [0, *np.cumsum(tiles).tolist()]


def out_of_sight(case: Case) -> Case:
    """Nothing that no token sees is there any more: contents are NaN, and tables name no blocks."""
    window, block_size = case.layer.window, case.pool.block_size
    assert window is not None
    for row, context in enumerate(case.batch.context_lens.tolist()):
        first = max(0, context - window)
        table = case.batch.block_tables[row]
        for position in range(first):
            case.pool.storage[:, :, table[position // block_size], :, position % block_size] = float("nan")
        table[: first // block_size] = 1 << 30
    return case


@pytest.mark.parametrize("window", [1, 70, 500])
def test_window(window: int) -> None:
    layer = LayerAttention(scale=0.3, window=window)
    before = [0, 63, 69, 70, 133]
    case = filled(make_case([1] * 5, before, block_size=32, num_kv_heads=2, group=2, head_dim=16, layer=layer))
    expected, case = wanted(case), out_of_sight(case)
    assert_close(run(case, arrays_of(case), scratch_for(case, num_sms=2)), expected)


LAYERS = {
    "capped": LayerAttention(scale=1.0, soft_cap=2.0),
    "sinks": LayerAttention(scale=0.3, sinks=torch.tensor([-1.0, 4.0, 60.0, 0.0, 1.0, -80.0])),
    "all": LayerAttention(scale=0.5, window=90, soft_cap=1.5, sinks=torch.linspace(-2, 3, 6)),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_ways_of_attending(layer: LayerAttention) -> None:
    case = make_case([1] * 3, [0, 64, 150], block_size=16, num_kv_heads=2, group=3, head_dim=16, layer=layer)
    filled(case)
    case.query.mul_(4)  # far into the cap
    assert_close(run(case, arrays_of(case), scratch_for(case)), wanted(case))


@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "block_size"),
    [(1, 3, 80, 64), (64, 1, 16, 32), (9, 1, 96, 16), (2, 1, 256, 16)],
)
def test_shapes(group: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    case = make_case([1] * 2, [70, 0], block_size=block_size, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim)
    filled(case)
    assert_close(run(case, arrays_of(case), scratch_for(case)), wanted(case))


def test_float8_blocks() -> None:
    """Values of very different size, each with a scale of its own; NaN scales where no token is."""
    case = make_case([1] * 2, [20, 130], block_size=16, num_kv_heads=2, group=2, head_dim=24)
    plain = filled(case).pool
    sizes = 10.0 ** torch.randint(-4, 3, plain.storage.shape[:-1], generator=torch.Generator().manual_seed(3))
    plain.storage[:, 1] *= sizes[:, 1, ..., None]
    pool = KvPool(plain.shape, num_blocks=plain.num_blocks, block_size=16, device=CPU, dtype=torch.float8_e4m3fn)
    assert pool.scales is not None
    pool.scales.copy_(plain.storage.abs().amax(-1) / FLOAT8_MAX)
    pool.storage.copy_(plain.storage / pool.scales[..., None])
    plain.storage.copy_(pool.storage.float() * pool.scales[..., None])
    expected = wanted(case)
    out = run(replace(case, pool=pool), arrays_of(case), scratch_for(case))
    torch.testing.assert_close(out.double(), expected, atol=2e-6 * float(expected.abs().max()), rtol=1e-5)


def sharing(case: Case, shared_blocks: Sequence[int]) -> Case:
    """Every row after the first begins with so many blocks of the first one; its own ones there become NaN."""
    tables = case.batch.block_tables
    for row, count in enumerate(shared_blocks, start=1):
        case.pool.storage[:, :, tables[row, :count]] = float("nan")
        tables[row, :count] = tables[0, :count]
    return filled(case)


@pytest.mark.parametrize("num_sms", [1, 7])
@pytest.mark.parametrize("layer", [LAYERS["sinks"], LAYERS["all"]], ids=["whole", "window"])
def test_common_prefixes(layer: LayerAttention, num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows share, with others between them that do not, or that are padding or no decodes."""
    monkeypatch.setattr("coppice_worker.kernels.triton.launch.PREFIX_COLUMNS", 9)  # those of three rows
    monkeypatch.setattr("coppice_worker.kernels.triton.launch.PREFIX_TOKENS_MIN", 64)
    monkeypatch.setattr("coppice_worker.kernels.triton.launch.PREFIX_SAVED_MIN", 64)
    new_tokens, before = [1, 1, 1, 2, 1], [200, 129, 40, 190, 220]
    case = make_case(new_tokens, before, block_size=16, num_kv_heads=2, group=3, head_dim=16, layer=layer)
    sharing(case, [8, 0, 8, 10])
    arrays = arrays_of(case)
    assert arrays.prefixes is not None
    assert arrays.prefixes.places.tolist() == [0, 1, -1, -1, 2]
    out, expected = run(case, arrays, scratch_for(case, num_sms=num_sms)), wanted(case)
    decodes = [0, 1, 2, 5]
    assert_close(out[decodes], expected[decodes])


def test_prefixes_of_a_replay_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with a launch for prefixes serves steps in which nobody shares."""
    case = filled(make_case([1] * 2, [100, 30], block_size=16, num_kv_heads=2, group=3, head_dim=16))
    groups = no_groups(2, 3)
    prefixes = Prefixes(*map(torch.from_numpy, (groups.members, groups.starts, groups.places)))
    arrays = replace(arrays_of(case), prefixes=prefixes)
    assert_close(run(case, arrays, scratch_for(case)), wanted(case))


def test_no_room_for_two_rows_in_a_tile() -> None:
    """A graph for rows with something in common is made for any model, also where nothing can be."""
    case = filled(make_case([1], [70], block_size=16, num_kv_heads=1, group=32, head_dim=16))
    backend = TritonBackend(case.pool, case.heads)
    arrays = arrays_of(case)
    common = torch.full((backend.common_size(1),), -1, dtype=torch.int32)
    step = backend.plan_rows(StepRows(arrays.slots, arrays.context_lens, arrays.tables, arrays.query_starts, common))
    assert_close(step.attend(0, case.query).view(case.query.shape), wanted(case))
