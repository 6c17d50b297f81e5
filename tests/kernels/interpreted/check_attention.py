"""Decode, and its mix with chunks, against the reference, over groups, block sizes, head sizes and ragged lengths."""

from __future__ import annotations

import pytest

from coppice_worker.kernels.triton.backend import TritonBackend
from tests.kernels.cases import Case, assert_exact, make_case

GEOMETRIES = [(1, 16, 64), (2, 32, 64), (4, 16, 128), (7, 32, 16)]  # group, block size, head size


def check(case: Case) -> None:
    assert_exact(TritonBackend(case.pool, case.heads), case)


@pytest.mark.parametrize(("group", "block_size", "head_dim"), GEOMETRIES)
def test_decode(group: int, block_size: int, head_dim: int) -> None:
    before = [0, block_size, 63, 130]
    check(make_case([1] * len(before), before, block_size=block_size, num_kv_heads=2, group=group, head_dim=head_dim))


def test_decodes_and_chunks_in_one_step() -> None:
    check(make_case([1, 20, 1, 1, 7], [40, 13, 0, 99, 16], block_size=16, num_kv_heads=2, group=4, head_dim=16))


def test_padded_head_size() -> None:
    """A head size that is no power of two is padded inside the kernels."""
    check(make_case([1, 9], [20, 4], block_size=16, num_kv_heads=2, group=3, head_dim=24))
