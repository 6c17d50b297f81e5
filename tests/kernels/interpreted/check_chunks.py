"""Chunks against the reference, fresh and after context, over groups, block sizes, head sizes and ragged lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from coppice_worker.kernels.triton.attention.extend_launch import extend_tiles
from coppice_worker.kernels.triton.backend import TritonBackend
from tests.kernels.cases import assert_exact, make_case


@pytest.mark.parametrize(("group", "block_size", "head_dim"), [(2, 32, 64), (4, 16, 128)])
@pytest.mark.parametrize(
    ("new_tokens", "before"),
    [([2, 16, 33], [0, 0, 0]), ([40, 3, 2], [31, 62, 126])],
    ids=["fresh", "after-context"],
)
def test_extend(new_tokens: Sequence[int], before: Sequence[int], group: int, block_size: int, head_dim: int) -> None:
    case = make_case(new_tokens, before, block_size=block_size, num_kv_heads=2, group=group, head_dim=head_dim)
    assert_exact(TritonBackend(case.pool, case.heads), case)


def test_extend_over_several_query_tiles() -> None:
    case = make_case([70, 10], [20, 0], block_size=16, num_kv_heads=1, group=2, head_dim=16)
    tiles = extend_tiles(np.array([0, 1], np.int32), np.array([140, 20], np.int32))
    assert tiles[0].tolist() == [0, 0, 1]
    assert_exact(TritonBackend(case.pool, case.heads), case)
