"""What of a step is sent to the device, and what stands behind it there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import StepBatch
from coppice_worker.model.device_state import DeviceState
from tests.fakes.scheduler.step_driver import DrivenSequence, build_batch

BLOCK_SIZE = 4


def decodes(tables: list[list[int]]) -> StepBatch:
    rows = [DrivenSequence([1] * 5, table, num_computed_tokens=4) for table in tables]
    return build_batch(rows, [1] * len(rows), BLOCK_SIZE)


def test_only_tables_that_changed_are_sent() -> None:
    state = DeviceState(8, 6, 1, torch.device("cpu"))
    batch = decodes([[1, 2], [3, 4], [5, 6]])
    state.fill(batch)
    tables = state.rows(8, with_common=False).block_tables
    assert tables[:3, :2].tolist() == [[1, 2], [3, 4], [5, 6]]
    batch.block_tables[:] += 10
    state.fill(replace(batch, changed_tables=np.array([], np.int32)))
    assert tables[:3, :2].tolist() == [[1, 2], [3, 4], [5, 6]]
    state.fill(replace(batch, changed_tables=np.array([1], np.int32)))
    assert tables[:3, :2].tolist() == [[1, 2], [13, 14], [5, 6]]
    state.forget_tables()
    state.fill(replace(batch, changed_tables=np.array([], np.int32)))
    assert tables[:3, :2].tolist() == [[11, 12], [13, 14], [15, 16]]


def test_rows_behind_a_batch_are_padding() -> None:
    state = DeviceState(8, 6, 1, torch.device("cpu"))
    state.fill(decodes([[n, n + 1] for n in range(0, 16, 2)]))
    state.fill(decodes([[1, 2], [3, 4], [5, 6]]))
    rows = state.rows(8, with_common=False)
    assert rows.context_lens.tolist() == [5] * 3 + [0] * 5
    assert rows.slots.tolist() == [2 * BLOCK_SIZE, 4 * BLOCK_SIZE, 6 * BLOCK_SIZE] + [-1] * 5
    assert state.token_ids(8).tolist() == [1] * 3 + [0] * 5
    assert rows.query_starts.tolist() == list(range(9))


def test_tokens_and_rows_behind_a_mixed_step_are_padding() -> None:
    state = DeviceState(8, 6, 0, torch.device("cpu"), tokens_max=16, chunks_size=4)
    state.fill(decodes([[n, n + 1] for n in range(0, 16, 2)]))
    rows = [
        DrivenSequence([1] * 7, [1, 2], num_computed_tokens=4),
        DrivenSequence([1] * 5, [3, 4], num_computed_tokens=4),
    ]
    state.fill(build_batch(rows, [3, 1], BLOCK_SIZE), chunks=np.array([7, 8], np.int32))
    found = state.mixed_rows(12, 2, with_common=False)
    assert found.slots.tolist() == [8, 9, 10, 16] + [-1] * 8
    assert found.context_lens.tolist() == [7, 5] + [0] * 6
    assert found.query_starts.tolist() == [0, 3] + [4] * 7
    assert found.chunks is not None
    assert found.chunks.tolist() == [7, 8]
    assert len(state.mixed_rows(3, 2, with_common=False).context_lens) == 3, "a row has a token"
