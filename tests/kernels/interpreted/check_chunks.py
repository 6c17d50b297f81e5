"""Chunks against the reference, fresh and after context, over groups, block sizes, head sizes and ragged lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from coppice_worker.kernels.triton.attention.extend_launch import extend_tiles
from tests.kernels.cases import make_case
from tests.kernels.interpreted.check_attention import GEOMETRIES, check


@pytest.mark.parametrize(("group", "block_size", "head_dim"), GEOMETRIES[1:3])
@pytest.mark.parametrize(
    ("new_tokens", "before"),
    [([2, 16, 33], [0, 0, 0]), ([40, 3, 2], [31, 62, 126])],
    ids=["fresh", "after-context"],
)
def test_extend(new_tokens: Sequence[int], before: Sequence[int], group: int, block_size: int, head_dim: int) -> None:
    check(make_case(new_tokens, before, block_size=block_size, num_kv_heads=2, group=group, head_dim=head_dim))


def test_extend_over_several_query_tiles() -> None:
    case = make_case([70, 10], [20, 0], block_size=16, num_kv_heads=1, group=2, head_dim=16)
    tiles = extend_tiles(np.array([0, 1], np.int32), np.array([140, 20], np.int32))
    assert tiles[0].tolist() == [0, 0, 1]
    check(case)
