"""The beginning of a published block is copied into a sequence's own, as long as the block is what its handle says."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.handles import handles_array, make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, SchedulerEpoch, WorkerEpoch
from coppice.messages.registration import Registered
from coppice.messages.step import SequenceStart, StepPlan
from coppice_worker.core.batch.plan_shape import MalformedPlanError
from coppice_worker.core.batch.steps import SchedulerAccepted
from coppice_worker.core.blocks.pool import lease_words
from coppice_worker.core.worker import WorkerCore
from tests.fakes.worker.worker_plans import (
    applied,
    codes,
    finish,
    grow,
    h,
    handles,
    lease,
    ready_core,
    run,
    seal,
    start,
    u32,
)

NEW = 2
SHARED, SOURCE = h(3), h(4)
SOURCE_AGAIN = handles_array(handles(h(4, 2))), lease_words(lease(77))  # as another lease is granted it later


def own(block: int, cache_epoch: int = 1) -> int:
    """As that cache service grants it first."""
    return pack_handle(BlockId(block), make_generation(CacheEpoch(cache_epoch), 1))


def with_cached() -> WorkerCore:
    """The blocks 3 and 4 are published, and nobody uses them."""
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 8, handles(SHARED, SOURCE, h(5))),), rows=u32(1), row_tokens=u32(8)))
    run(core, StepPlan(2, sealed=handles(SHARED, SOURCE), seals=seal(3) + seal(4), detach=u32(1)))
    return core


def copier(computed: int = 6, **changes: object) -> SequenceStart:
    """Shares block 3; of block 4 two tokens are copied."""
    begun = start(
        NEW, 9, handles(own(6), own(7)), handles(SHARED), seal(3), computed=computed,
        copy_source=handles(SOURCE), copy_seal=seal(4),
    )  # fmt: skip
    return replace(begun, **changes)  # type: ignore[arg-type]


def plan(begun: SequenceStart, **more: object) -> StepPlan:
    return StepPlan(3, attach=(begun,), rows=u32(NEW), row_tokens=u32(3), **more)  # type: ignore[arg-type]


def test_the_block_is_copied_into_the_first_own_one_which_is_not_zeroed() -> None:
    core = with_cached()
    step = applied(core, plan(copier(), zero=handles(own(6), own(7))))
    assert (step.copy_src.tolist(), step.copy_dst.tolist(), step.zero.tolist()) == ([4], [6], [7])
    assert step.batch is not None
    assert step.batch.positions.tolist() == [6, 7, 8], "what was copied is not computed"
    assert codes(finish(core, step)) == {}


@pytest.mark.parametrize(
    "changes",
    [{"copy_seal": seal(9)}, {"copy_source": handles(h(4, 2))}, {"copy_source": handles(h(9))}],
    ids=["seal", "generation", "unpublished"],
)
def test_a_block_that_is_not_what_its_handle_says_is_refused(changes: dict[str, object]) -> None:
    core = with_cached()
    step = applied(core, plan(copier(**changes)))
    assert not len(step.copy_src)
    assert codes(finish(core, step)) == {NEW: "lost_source"}
    assert not core.pool.has_user().any()


def test_while_the_step_computes_nobody_writes_the_source() -> None:
    core = with_cached()
    step = applied(core, plan(copier()))
    assert core.pool.readers[4] == 1
    assert core.pool.why_not_write(*SOURCE_AGAIN) is not None
    finish(core, step)
    assert core.pool.readers[4] == 0
    assert core.pool.why_not_write(*SOURCE_AGAIN) is None


def test_a_growth_of_the_same_plan_does_not_get_the_source() -> None:
    core = with_cached()
    run(core, StepPlan(3, attach=(start(5, 4, handles(h(10))),), rows=u32(5), row_tokens=u32(4)))
    begun = replace(plan(copier()), step=4, grow=(grow(5, h(4, 2)),), rows=u32(NEW, 5), row_tokens=u32(3, 1))
    step = applied(core, begun)
    assert codes(finish(core, step)) == {5: "double_grant"}


def test_another_scheduler_takes_over_in_the_middle_of_the_step() -> None:
    core = with_cached()
    step = applied(core, plan(copier()))
    assert isinstance(core.attach_scheduler(SchedulerEpoch(8)), SchedulerAccepted)
    core.check()
    finish(core, step)
    assert not core.pool.readers.any()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_computed_tokens": 4},
        {"num_computed_tokens": 9},
        {"copy_source": b""},
        {"copy_seal": b""},
        {"copy_source": handles(SOURCE)[:4]},
        {"copy_source": handles(SOURCE, SHARED), "copy_seal": seal(4) + seal(3)},
        {"copy_from": 1},
    ],
)
def test_plans_that_no_scheduler_makes(changes: dict[str, object]) -> None:
    core = with_cached()
    with pytest.raises(MalformedPlanError):
        applied(core, plan(copier(**changes)))


def test_what_an_earlier_cache_service_named_is_not_copied() -> None:
    """The one that came after it knows of what the lease owns and shares, and may have granted the source again."""
    core = with_cached()
    assert not core.registered(Registered(WorkerEpoch(1), CacheEpoch(2)))
    step = applied(core, plan(copier()))
    assert codes(finish(core, step)) == {NEW: "lost_source"}
    assert not core.pool.has_user().any()
    later = copier(owned=handles(own(6, 2), own(7, 2)), sequence_id=3)
    step = applied(core, StepPlan(4, attach=(later,), rows=u32(3), row_tokens=u32(3)))
    assert (step.copy_src.tolist(), step.copy_dst.tolist()) == ([4], [6])
