"""The honest model: the right reads give the reference, any wrong one gives something else."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.messages.step import SamplingParams, SequenceStart, StepPlan
from coppice_sim.hosts.kv_honest import KvHonest, prefix_hashes, reference
from coppice_worker.core.batch.step_batch import PoolSpec, StepBatch
from tests.fakes.worker.worker_plans import EPOCH, applied, handles, lease, ready_core, settings, u32
from tests.fakes.worker.worker_plans import h as handle

SALT, SEED = 77, 5
PROMPT = np.arange(100, 110, dtype="<u4")
BLOCKS = (7, 3, 9, 1, 12)


class Decoding:
    """One sequence of ten prompt tokens over scattered blocks."""

    def __init__(self, chunks: tuple[int, ...] = (10,)) -> None:
        self.core = ready_core(settings(num_blocks=16))
        self.executor = KvHonest(self.core.settings.pool)
        owned = handles(*[handle(block) for block in BLOCKS])
        sampling = SamplingParams(temperature=0.0, seed=SEED)
        start = SequenceStart(1, lease(1), PROMPT.tobytes(), 0, b"", b"", owned, sampling)  # type: ignore[arg-type]
        self.tokens: list[int] = []
        self._step = 0
        for index, chunk in enumerate(chunks):
            self.step(StepPlan(self.next(), attach=(start,) if index == 0 else (), rows=u32(1), row_tokens=u32(chunk)))

    def next(self) -> int:
        self._step += 1
        return self._step

    def step(self, plan: StepPlan) -> None:
        step = applied(self.core, plan, EPOCH)
        assert step.batch is not None
        self.execute(step.batch)
        output = self.executor.execute(step.batch)
        self.tokens += output.tokens.tolist()
        while (following := self.core.advance(step, output)) is not None:
            assert following.batch is not None
            step, output = following, self.executor.execute(following.batch)
            self.tokens += output.tokens.tolist()
        self.core.complete(step, output)

    def execute(self, batch: StepBatch) -> None:
        self.executor.row_salts = np.full(len(batch.context_lens), SALT, np.uint64)

    def decode(self, count: int) -> list[int]:
        for _ in range(count):
            self.step(StepPlan(self.next(), rows=u32(1), row_tokens=u32(1)))
        return self.tokens

    def slot(self, position: int) -> int:
        return BLOCKS[position // 4] * 4 + position % 4


@pytest.mark.parametrize("chunks", [(10,), (3, 7), (1,) * 10, (4, 4, 2)])
def test_right_reads_give_the_reference_however_the_prompt_is_cut(chunks: tuple[int, ...]) -> None:
    assert Decoding(chunks).decode(8) == reference(PROMPT.tobytes(), 9, seed=SEED, salt=SALT)


def test_the_reference_depends_on_everything() -> None:
    base = reference(PROMPT.tobytes(), 12, seed=SEED, salt=SALT)
    assert reference(PROMPT.tobytes(), 12, seed=SEED + 1, salt=SALT) != base
    assert reference(PROMPT.tobytes(), 12, seed=SEED, salt=SALT + 1) != base
    assert reference(PROMPT[::-1].tobytes(), 12, seed=SEED, salt=SALT) != base


@pytest.mark.parametrize("what", ["salts", "positions", "hashes"])
@pytest.mark.parametrize("position", [0, 5, 9])
def test_one_wrong_slot_makes_wrong_tokens(what: str, position: int) -> None:
    run = Decoding()
    getattr(run.executor, what)[run.slot(position)] += 1
    assert run.decode(6) != reference(PROMPT.tobytes(), 7, seed=SEED, salt=SALT)


def test_two_slots_in_each_others_place_make_wrong_tokens() -> None:
    run = Decoding()
    first, second = run.slot(2), run.slot(6)
    for array in (run.executor.hashes, run.executor.positions):
        array[[first, second]] = array[[second, first]]
    assert run.decode(6) != reference(PROMPT.tobytes(), 7, seed=SEED, salt=SALT)


def test_an_error_in_the_prefix_is_carried_into_what_is_written_after_it() -> None:
    run = Decoding((5,))
    run.executor.salts[run.slot(1)] += 1
    run.step(StepPlan(run.next(), rows=u32(1), row_tokens=u32(5)))
    written = run.executor.hashes[[run.slot(position) for position in range(5, 10)]]
    assert not (written == prefix_hashes(PROMPT)[5:]).any()


def test_zeroed_and_copied_blocks() -> None:
    executor = KvHonest(PoolSpec(4, 2))
    executor.hashes[2:4], executor.positions[2:4], executor.salts[2:4] = 9, (0, 1), 3
    executor.copy_blocks(np.array([1], np.int32), np.array([3], np.int32))
    executor.zero_blocks(np.array([1], np.int32))
    assert executor.hashes.tolist() == [0, 0, 0, 0, 0, 0, 9, 9]
    assert executor.positions.tolist() == [-1, -1, -1, -1, -1, -1, 0, 1]
