"""Chunks against the reference, fresh and after context, over groups, block sizes, head sizes and ragged lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from coppice_worker.kernels import reference
from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.triton.attention.extend_launch import extend_tiles
from coppice_worker.kernels.triton.backend import TritonBackend
from coppice_worker.model.device_state import DeviceState
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


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("num_sms", [1, 16])
def test_a_graphs_launches_give_the_same_bits(window: int | None, num_sms: int) -> None:
    """Padded to more tokens, rows, tiles and pieces than there are, with contexts that are cut and that are not."""
    num_tokens, num_rows = 64, 8
    layer = LayerAttention(scale=0.3, window=window)
    case = make_case(
        [1, 5, 44, 1, 2], [90, 1200, 1500, 0, 1], block_size=16, num_kv_heads=2, group=3, head_dim=16, layer=layer
    )
    batch, backend = case.batch, TritonBackend(case.pool, case.heads)
    backend._num_sms = num_sms
    slots = torch.from_numpy(batch.slots)
    reference.write_kv(case.pool.keys(0), case.key, slots)
    reference.write_kv(case.pool.values(0), case.value, slots)
    state = DeviceState(num_rows, 100, 0, torch.device("cpu"), tokens_max=128, chunks_size=backend.chunks_size(128))
    chunks = backend.chunks(batch, num_tokens)
    assert chunks is not None
    state.fill(batch, chunks=chunks)
    rows = state.mixed_rows(num_tokens, backend.chunks_size(num_tokens), with_common=False)
    assert len(rows.context_lens) == num_rows
    count = len(batch.token_ids)
    query = torch.full((num_tokens, *case.query.shape[1:]), float("nan"))
    query[:count] = case.query
    eager, graph = backend.plan(batch), backend.plan_rows(rows)
    assert (eager._arrays.extend_pieces is not None) == (num_sms > 1)
    attended = graph.attend(0, query)
    assert torch.equal(attended[:count], eager.attend(0, case.query))
    assert not attended[count:].any(), "padding is no NaN, whatever its queries are"


def test_extend_over_several_query_tiles() -> None:
    case = make_case([70, 10], [20, 0], block_size=16, num_kv_heads=1, group=2, head_dim=16)
    tiles = extend_tiles(np.array([0, 1], np.int32), np.array([140, 20], np.int32))
    assert tiles[0].tolist() == [0, 0, 1]
    check(case)
