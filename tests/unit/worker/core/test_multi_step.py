"""Several decode steps in one plan: the same tokens, blocks and batches as one step at a time, and no write beyond."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from coppice.ids import SchedulerEpoch
from coppice.messages.registration import Fence
from coppice.messages.step import StepPlan, StepResult
from coppice_sim.hosts.kv_honest import KvHonest
from coppice_worker.core.batch.step_batch import NO_OUTPUT
from coppice_worker.core.batch.steps import MalformedPlanError, Replayed, SchedulerAccepted
from tests.fakes.worker.worker_plans import (
    EPOCH,
    applied,
    codes,
    compute,
    finish,
    grow,
    h,
    handles,
    lease,
    ready_core,
    run,
    seal,
    settings,
    start,
    u32,
)

PROMPTS = {1: 5, 2: 3, 3: 8}  # sequence -> tokens


class Honest:
    """A core with the honest executor behind it; block 4n and those after it are sequence n's, at most 4."""

    def __init__(self, blocks: int = 4, max_context: int = 64) -> None:
        self.core = ready_core(settings(num_blocks=32, max_context=max_context))
        self.executor = KvHonest(self.core.settings.pool)
        attach = tuple(start(n, count, self.blocks(n, range(blocks))) for n, count in PROMPTS.items())
        self.plan(StepPlan(1, attach=attach, rows=u32(*PROMPTS), row_tokens=u32(*PROMPTS.values())))

    def blocks(self, number: int, wanted: Iterable[int]) -> bytes:
        return handles(*[h(4 * number + block) for block in wanted])

    def plan(self, plan: StepPlan) -> StepResult:
        return compute(self.core, self.executor, plan)

    def written(self) -> np.ndarray:
        return np.stack([self.executor.hashes, self.executor.positions.astype(np.uint64)])


def tokens_of(results: list[StepResult], sequence: int) -> list[int]:
    found = []
    for result in results:
        ids = np.frombuffer(result.sampled_ids, "<u4")
        table = np.frombuffer(result.sampled_tokens, "<u4").reshape(-1, len(ids))
        found += table[:, ids == sequence].reshape(-1).tolist()
    return found


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (2, 1, 4), (1, 6)])
@pytest.mark.parametrize("repeat", [False, True])
def test_a_burst_gives_what_single_steps_give(sizes: tuple[int, ...], repeat: bool) -> None:
    single, burst = Honest(), Honest()
    named = {"rows": u32(*PROMPTS), "row_tokens": u32(1, 1, 1)}
    ones = [single.plan(StepPlan(step, **named)) for step in range(2, 9)]
    several = [
        burst.plan(StepPlan(step, num_decode_steps=count, **({"repeat_rows": True} if repeat else named)))
        for step, count in enumerate(sizes, 2)
    ]
    for sequence in PROMPTS:
        assert tokens_of(several, sequence) == tokens_of(ones, sequence)
    assert (single.written() == burst.written()).all()
    assert [result.num_tokens for result in several] == [3 * count for count in sizes]
    stats, expected = burst.core.stats(), single.core.stats()
    assert (stats.tokens_computed, stats.tokens_sampled) == (expected.tokens_computed, expected.tokens_sampled)
    following = {"step": len(sizes) + 2, "repeat_rows": True}
    assert burst.plan(StepPlan(**following)).sampled_tokens == single.plan(StepPlan(9, repeat_rows=True)).sampled_tokens


def test_sampled_tokens_are_row_major_by_step() -> None:
    core = Honest().core
    result = run(core, StepPlan(2, rows=u32(3, 1), row_tokens=u32(1, 1), num_decode_steps=3), first_token=700)
    assert (result.sampled_ids, result.sampled_tokens) == (u32(3, 1), u32(700, 701, 702, 703, 704, 705))
    slots = core.sequences.slot_of
    assert core.sequences.tokens[slots[3], 9:12].tolist() == [700, 702, 704]  # type: ignore[index]
    assert core.sequences.num_computed[slots[1]] == 8  # type: ignore[index]


def test_a_burst_needs_the_blocks_of_all_its_steps() -> None:
    """Sequence 3 has 8 tokens of KV and 4 blocks of 4: 8 more fit, and not one beyond."""
    assert codes(Honest().plan(StepPlan(2, rows=u32(3), row_tokens=u32(1), num_decode_steps=8))) == {}
    for repeat in (False, True):
        stack = Honest(blocks=3)
        before = stack.written()
        rows = {"repeat_rows": True} if repeat else {"rows": u32(3), "row_tokens": u32(1)}
        result = stack.plan(StepPlan(2, num_decode_steps=5, detach=u32(1, 2) if repeat else b"", **rows))
        assert codes(result)[3] == "not_reserved"
        assert (result.sampled_ids, result.num_tokens) == (b"", 0)
        assert (stack.written() == before).all()


def test_one_row_without_blocks_leaves_the_others_alone() -> None:
    stack = Honest(blocks=3)
    plan = StepPlan(2, rows=u32(1, 3, 2), row_tokens=u32(1, 1, 1), num_decode_steps=6)
    result = stack.plan(plan)
    assert codes(result) == {3: "not_reserved"}
    assert result.sampled_ids == u32(1, 2)
    assert len(result.sampled_tokens) == 4 * 6 * 2
    assert result.num_tokens == 12


def test_blocks_that_grow_with_the_plan_count() -> None:
    stack = Honest(blocks=2)
    refused = Honest(blocks=2).plan(StepPlan(2, rows=u32(3), row_tokens=u32(1), num_decode_steps=4))
    assert codes(refused) == {3: "not_reserved"}
    plan = StepPlan(2, grow=(grow(3, h(14)),), rows=u32(3), row_tokens=u32(1), num_decode_steps=4)
    assert codes(stack.plan(plan)) == {}


def test_a_later_block_that_is_sealed_or_shared_refuses_the_whole_row() -> None:
    stack = Honest()
    plan = StepPlan(2, sealed=handles(h(15)), seals=seal(4), rows=u32(3), row_tokens=u32(1), num_decode_steps=8)
    result = stack.plan(plan)
    assert codes(result) == {3: "not_reserved"}
    assert result.refusals[0].handle == h(15)


def test_a_row_in_the_middle_of_its_prompt_is_no_burst() -> None:
    stack = Honest()
    plan = StepPlan(2, attach=(start(9, 4, handles(h(30))),), rows=u32(9), row_tokens=u32(1), num_decode_steps=2)
    assert codes(stack.plan(plan)) == {9: "not_reserved"}


def test_a_burst_ends_with_the_context() -> None:
    """A context of 10 tokens in blocks of 4: the last block has room that is nobody's."""
    attach = (start(1, 8, handles(h(1), h(2), h(3))),)
    for count, expected in ((2, {}), (3, {1: "not_reserved"})):
        core = ready_core(settings(max_context=10))
        run(core, StepPlan(1, attach=attach, rows=u32(1), row_tokens=u32(8)))
        assert codes(run(core, StepPlan(2, repeat_rows=True, num_decode_steps=count))) == expected
    assert codes(run(core, StepPlan(3, detach=u32(1)))) == {}


def test_single_steps_end_with_the_context_too() -> None:
    core = ready_core(settings(max_context=10))
    run(core, StepPlan(1, attach=(start(1, 9, handles(h(1), h(2), h(3))),), rows=u32(1), row_tokens=u32(9)))
    assert codes(run(core, StepPlan(2, repeat_rows=True))) == {}
    assert codes(run(core, StepPlan(3, repeat_rows=True))) == {1: "not_reserved"}


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (StepPlan(2, rows=u32(1, 2), row_tokens=u32(1, 2), num_decode_steps=2), "several tokens"),
        (StepPlan(2, rows=u32(1), row_tokens=u32(1), num_decode_steps=0), "num_decode_steps is 0"),
    ],
)
def test_malformed_bursts_change_nothing(plan: StepPlan, problem: str) -> None:
    core = Honest().core
    with pytest.raises(MalformedPlanError, match=problem):
        core.apply(EPOCH, plan)
    assert codes(run(core, StepPlan(2, rows=u32(1, 2), row_tokens=u32(1, 1)))) == {}


def test_a_repeated_plan_gets_the_whole_answer_again() -> None:
    stack = Honest()
    plan = StepPlan(2, rows=u32(1, 2), row_tokens=u32(1, 1), num_decode_steps=4)
    result = stack.plan(plan)
    assert stack.core.apply(EPOCH, plan) == Replayed(result)
    assert len(result.sampled_tokens) == 4 * 4 * 2


def test_a_fence_in_the_middle_of_a_burst_is_a_mistake_of_the_caller() -> None:
    core = Honest().core
    step = applied(core, StepPlan(2, repeat_rows=True, num_decode_steps=3))
    following = core.advance(step, KvHonest(core.settings.pool).execute(step.batch))  # type: ignore[arg-type]
    assert following is not None
    with pytest.raises(AssertionError, match="outstanding"):
        core.fence(Fence(1, core.worker_epoch, lease_ids=(lease(1),)))
    with pytest.raises(AssertionError, match="advance first"):
        core.complete(following, NO_OUTPUT)


def test_a_takeover_in_the_middle_ends_the_burst_without_a_trace() -> None:
    core = Honest().core
    executor = KvHonest(core.settings.pool)
    step = applied(core, StepPlan(2, repeat_rows=True, num_decode_steps=3))
    following = core.advance(step, executor.execute(step.batch))  # type: ignore[arg-type]
    assert following is not None
    assert isinstance(core.attach_scheduler(SchedulerEpoch(8)), SchedulerAccepted)
    output = executor.execute(following.batch)  # type: ignore[arg-type]
    assert core.advance(following, output) is None
    result = core.complete(following, output)
    assert (result.sampled_ids, result.sampled_tokens, result.num_tokens) == (b"", b"", 0)
    core.check()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(1, 9))),), rows=u32(1), row_tokens=u32(4)), SchedulerEpoch(8))


def test_zeroing_and_copies_come_with_the_first_step_only() -> None:
    core = ready_core()
    begun = start(1, 4, handles(h(1), h(2)))
    plan = StepPlan(1, attach=(msgspec.structs.replace(begun, num_computed_tokens=0),), zero=handles(h(1), h(2)))
    run(core, msgspec.structs.replace(plan, rows=u32(1), row_tokens=u32(4)))
    plan = StepPlan(2, grow=(grow(1, h(3)),), zero=handles(h(3)), repeat_rows=True, num_decode_steps=2)
    step = applied(core, plan)
    assert step.zero.tolist() == [3]
    output = replace(NO_OUTPUT, tokens=np.array([5], np.int32))
    following = core.advance(step, output)
    assert following is not None
    assert (len(following.zero), len(following.copy_src), len(following.copy_dst)) == (0, 0, 0)
    assert following.batch is not None
    assert following.batch.token_ids.tolist() == [5]
    finish(core, following)
