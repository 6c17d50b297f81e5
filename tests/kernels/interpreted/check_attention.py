"""Decode, extend and their mix against the reference, over groups, block sizes, head sizes and ragged lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from coppice_worker.kernels import reference
from coppice_worker.kernels.backend import Backend
from coppice_worker.kernels.torch_backend import TorchBackend
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.backend import TritonBackend

from .cases import Case, make_case

GEOMETRIES = [(1, 16, 64), (2, 32, 64), (4, 16, 128), (7, 32, 16)]  # group, block size, head size


def attend(backend: Backend, case: Case) -> torch.Tensor:
    step = backend.plan(case.batch, case.query.shape[1])
    return step.attend(0, case.query, case.key, case.value).view(case.query.shape)


def expected(case: Case) -> torch.Tensor:
    """Also checks that the step wrote its KV and nothing else."""
    keys, values = case.pool.keys(0), case.pool.values(0)
    wanted = torch.full_like(keys, float("nan"))
    reference.write_kv(wanted, case.key, torch.from_numpy(case.batch.slots))
    written = ~wanted.isnan()
    assert torch.equal(keys[written], wanted[written])
    used = int(case.batch.context_lens.sum()) * keys.shape[1] * keys.shape[3]
    assert (~keys.isnan()).sum() == (~values.isnan()).sum() == used
    batch = case.batch
    return reference.attend(
        case.query,
        keys,
        values,
        *(torch.from_numpy(array) for array in (batch.block_tables, batch.context_lens, batch.query_starts)),
    )


def check(case: Case, backend: type[TritonBackend] | type[TorchBackend] = TritonBackend) -> None:
    out = attend(backend(case.pool), case)
    torch.testing.assert_close(out.double(), expected(case), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("group", "block_size", "head_dim"), GEOMETRIES)
def test_decode(group: int, block_size: int, head_dim: int) -> None:
    before = [0, block_size - 1, block_size, 5, 63, 64, 130]
    check(make_case([1] * len(before), before, block_size=block_size, num_kv_heads=2, group=group, head_dim=head_dim))


def test_decode_over_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "split_tokens", lambda *_: launch.DECODE_TILE)
    monkeypatch.setattr(launch, "REDUCE_SPLITS", 4)
    # Splits that end on a tile, one short of it and one past it; a row with one split beside one with seven.
    case = make_case([1] * 4, [0, 127, 128, 400], block_size=16, num_kv_heads=1, group=2, head_dim=16)
    check(case)


@pytest.mark.parametrize(("group", "block_size", "head_dim"), GEOMETRIES)
@pytest.mark.parametrize(
    ("new_tokens", "before"),
    [([2, 16, 33], [0, 0, 0]), ([40, 3], [31, 80])],
    ids=["fresh", "after-context"],
)
def test_extend(new_tokens: Sequence[int], before: Sequence[int], group: int, block_size: int, head_dim: int) -> None:
    check(make_case(new_tokens, before, block_size=block_size, num_kv_heads=2, group=group, head_dim=head_dim))


def test_extend_over_several_query_tiles() -> None:
    case = make_case([150, 70], [20, 0], block_size=16, num_kv_heads=1, group=2, head_dim=16)
    tiles = launch.extend_tiles(np.array([0, 1], np.int32), np.array([300, 140], np.int32))
    assert tiles[0].tolist() == [0, 0, 0, 1, 1]
    check(case)


@pytest.mark.parametrize("backend", [TritonBackend, TorchBackend])
def test_decodes_and_chunks_in_one_step(backend: type[TritonBackend] | type[TorchBackend]) -> None:
    case = make_case([1, 20, 1, 1, 7], [40, 13, 0, 99, 16], block_size=16, num_kv_heads=2, group=4, head_dim=16)
    check(case, backend)


def test_strided_head_size() -> None:
    """A head size that is no power of two is padded inside the kernels."""
    check(make_case([1, 9], [20, 4], block_size=16, num_kv_heads=2, group=3, head_dim=24))
