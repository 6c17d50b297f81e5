"""Decode by a fixed number of programs: spans that end anywhere, padding rows, arrays filled anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coppice_worker.kernels import reference
from coppice_worker.kernels.triton.arrays import DecodeScratch, StepArrays, decode_scratch, step_arrays
from coppice_worker.kernels.triton.decode import decode
from coppice_worker.kernels.triton.spans import plan
from tests.kernels.cases import Case, make_case

CPU = torch.device("cpu")


def scratch_for(case: Case, rows_max: int = 8, num_sms: int = 1) -> DecodeScratch:
    """Full of what would be noticed."""
    scratch = decode_scratch(rows_max, case.heads, case.pool.shape, num_sms=num_sms, device=CPU)
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
    return step_arrays(case.batch, group=case.num_heads // case.pool.shape.num_kv_heads, device=CPU)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("num_sms", [1, 2, 7])
def test_spans_end_anywhere(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with several rows and heads, heads with more programs than are joined at a time, idle programs."""
    monkeypatch.setattr("coppice_worker.kernels.triton.launch.REDUCE_PIECES", 2)
    case = filled(make_case([1] * 4, [0, 127, 128, 300], block_size=16, num_kv_heads=2, group=2, head_dim=16))
    assert_close(run(case, arrays_of(case), scratch_for(case, num_sms=num_sms)), wanted(case))


def test_a_replay_depends_on_nothing_but_its_arrays() -> None:
    """One set of arrays and scratch, filled for a large step and then for a small one with padding rows."""
    large = filled(make_case([1] * 5, [200, 64, 90, 5, 130], block_size=16, num_kv_heads=2, group=2, head_dim=16))
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
