"""An executor that computes nothing and takes a fixed time for it, as a device would."""

from __future__ import annotations

import time

import numpy as np

from coppice_worker.core.batch.step_batch import Int32, PoolSpec, StepBatch, StepOutput

TOKEN = 7  # every sampled token


class SleepingExecutor:
    """Implements `Executor`. `step_ns` may be changed between steps."""

    def __init__(self, pool: PoolSpec, step_ns: int) -> None:
        self._pool = pool
        self.step_ns = step_ns

    @property
    def pool(self) -> PoolSpec:
        return self._pool

    def zero_blocks(self, block_ids: Int32) -> None:
        """There is no KV."""

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """There is no KV."""

    def execute(self, batch: StepBatch) -> StepOutput:
        ends_ns = time.perf_counter_ns() + self.step_ns
        output = StepOutput(np.full(len(batch.sample.rows), TOKEN, np.int32))
        left_ns = ends_ns - time.perf_counter_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        return output
