"""Registration, fences, and who may plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch
from coppice.messages.registration import Draining, Fence, Owner, Registered
from coppice.messages.step import StepPlan
from coppice.session.frames import RejectCode
from coppice_worker.core.batch.step_batch import StepOutput
from coppice_worker.core.batch.steps import SchedulerAccepted, SchedulerRefused, SchedulerRefusedReason, StepGap
from coppice_worker.core.blocks.fences import FencedEpochs
from coppice_worker.core.worker import WorkerCore
from tests.fakes.worker.worker_plans import (
    EPOCH,
    applied,
    codes,
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


def epoch(number: int) -> SchedulerEpoch:
    return SchedulerEpoch(number)


def busy_core() -> WorkerCore:
    """Sequences 1 and 2, the block of 1 sealed."""
    core = ready_core()
    attach = (start(1, 5, handles(h(1, 5), h(2, 5))), start(2, 4, handles(h(3, 5))))
    run(core, StepPlan(1, attach=attach, rows=u32(1, 2), row_tokens=u32(5, 4)))
    run(core, StepPlan(2, sealed=handles(h(1, 5)), seals=seal(9)))
    return core


def test_worker_without_epoch_plans_for_nobody():
    core = WorkerCore(settings())
    assert core.registration().worker_epoch == 0
    assert core.attach_scheduler(EPOCH) == SchedulerRefused(SchedulerRefusedReason.NOT_REGISTERED)


def test_registration_reports_what_the_blocks_are():
    core = busy_core()
    message = core.registration()
    assert message.worker_epoch == 1
    assert np.frombuffer(message.generations, "<u8")[:4].tolist() == [0, 5, 5, 5]
    assert message.seals[16:32] == seal(9)
    assert len(message.seals) == 16 * 16
    assert message.scheduler_epochs == (EPOCH,)


def test_that_it_drains_is_said_again_under_the_epoch_that_a_registration_gave_meanwhile():
    core = WorkerCore(settings())
    core.registration()
    assert core.drain() == Draining(WorkerEpoch(0)), "nobody knows it by this epoch"
    core.registered(Registered(WorkerEpoch(1), CacheEpoch(1)))
    assert core.said_again() == Draining(WorkerEpoch(1))
    assert core.said_again() is None, "once"
    core.registered(Registered(WorkerEpoch(1), CacheEpoch(1)))
    assert core.said_again() is None, "of the same epoch"
    assert core.registration().draining
    core.registered(Registered(WorkerEpoch(2), CacheEpoch(2)))
    assert core.said_again() is None, "the registration said it"


def test_what_does_not_drain_says_nothing_again():
    core = ready_core()
    core.drain()
    core.is_draining = False
    core.registered(Registered(WorkerEpoch(2), CacheEpoch(2)))
    assert core.said_again() is None


def test_same_worker_epoch_keeps_everything_and_the_latest_cache_epoch():
    core = busy_core()
    assert not core.registered(Registered(WorkerEpoch(1), CacheEpoch(4)))
    assert not core.registered(Registered(WorkerEpoch(1), CacheEpoch(3)))
    assert core.registration().highest_cache_epoch == 3
    assert len(core.sequences) == 2


def test_new_worker_epoch_starts_over():
    core = busy_core()
    assert core.registered(Registered(WorkerEpoch(2), CacheEpoch(2)))
    core.check()
    message = core.registration()
    assert not any(message.generations)
    assert not any(message.seals)
    assert message.scheduler_epochs == ()
    late = run(core, StepPlan(3, attach=(start(9, 4, handles(h(1, 5))),), rows=u32(9), row_tokens=u32(4)))
    assert codes(late) == {9: "fenced"}, "a plan of the old worker epoch runs nothing"
    assert core.attach_scheduler(EPOCH) == SchedulerAccepted(WorkerEpoch(2), took_over=False)
    assert core.apply(EPOCH, StepPlan(3)) == StepGap(1)


def test_second_session_of_the_same_scheduler_starts_over():
    core = busy_core()
    assert core.attach_scheduler(EPOCH) == SchedulerAccepted(WorkerEpoch(1), took_over=False)
    assert len(core.sequences) == 0
    assert not core.pool.has_user().any()
    assert core.apply(EPOCH, StepPlan(3)) == StepGap(1)


def test_newer_scheduler_takes_over_and_the_older_is_refused():
    core = busy_core()
    assert core.attach_scheduler(epoch(8)) == SchedulerAccepted(WorkerEpoch(1), took_over=True)
    assert len(core.sequences) == 0
    assert not core.pool.has_user().any()
    assert core.attach_scheduler(EPOCH) == SchedulerRefused(SchedulerRefusedReason.SUPERSEDED)
    late = run(core, StepPlan(3, rows=u32(1), row_tokens=u32(1)))
    assert codes(late) == {1: "fenced"}
    assert codes(run(core, StepPlan(1, attach=(start(1, 4, handles(h(1, 6))),)), epoch(8))) == {}


def test_an_older_scheduler_is_told_to_get_a_new_epoch_when_the_newer_is_over():
    core = busy_core()
    core.attach_scheduler(epoch(8))
    refused = core.attach_scheduler(EPOCH)
    assert isinstance(refused, SchedulerRefused)
    assert refused.reason.reject_code is RejectCode.NOT_READY, "two would only take turns"
    core.fence(Fence(3, WorkerEpoch(1), scheduler_epochs=(epoch(8),)))
    refused = core.attach_scheduler(EPOCH)
    assert refused == SchedulerRefused(SchedulerRefusedReason.OUTLIVED)
    assert refused.reason.reject_code is RejectCode.FENCED
    assert core.planning is None
    assert isinstance(core.attach_scheduler(epoch(9)), SchedulerAccepted)


def test_takeover_in_the_middle_of_a_step_leaves_no_trace_of_it():
    core = busy_core()
    step = applied(core, StepPlan(3, rows=u32(1), row_tokens=u32(1)))
    core.attach_scheduler(epoch(8))
    result = core.complete(step, StepOutput(np.array([5], np.int32)))
    assert (result.sampled_ids, result.num_tokens) == (b"", 0)
    core.check()
    assert codes(run(core, StepPlan(1, attach=(start(1, 4, handles(h(1, 6))),)), epoch(8))) == {}


def test_fence_ends_a_scheduler_for_ever():
    core = busy_core()
    ack = core.fence(Fence(3, WorkerEpoch(1), scheduler_epochs=(EPOCH,), report=True))
    assert (ack.fence_id, ack.worker_epoch) == (3, 1)
    assert np.frombuffer(ack.generations, "<u8")[1] == 5
    assert ack.seals[16:32] == seal(9)
    assert not core.pool.has_user().any()
    assert codes(run(core, StepPlan(3, attach=(start(9, 4, handles(h(4))),), rows=u32(9), row_tokens=u32(4)))) == {
        9: "fenced"
    }
    assert core.pool.generation[4] == 0
    assert core.attach_scheduler(EPOCH) == SchedulerRefused(SchedulerRefusedReason.FENCED)
    core.registered(Registered(WorkerEpoch(1), CacheEpoch(2)))
    assert core.attach_scheduler(EPOCH) == SchedulerRefused(SchedulerRefusedReason.FENCED)
    assert core.registration().scheduler_epochs == ()


def test_fence_of_a_lease_refuses_its_sequence_and_no_other():
    core = busy_core()
    ack = core.fence(Fence(3, WorkerEpoch(1), lease_ids=(lease(1), lease(4))))
    assert ack.generations == b""
    core.check()
    assert core.pool.writer[2] == 0
    result = run(core, StepPlan(3, attach=(start(4, 4, handles(h(4))),), rows=u32(1), row_tokens=u32(1)))
    assert codes(result) == {1: "fenced", 4: "fenced"}
    assert list(core.sequences.slot_of) == [2]


def test_fence_of_another_worker_epoch_fences_no_lease_but_every_scheduler():
    core = busy_core()
    ack = core.fence(Fence(3, WorkerEpoch(9), lease_ids=(lease(1),), report=True))
    assert (ack.worker_epoch, ack.generations) == (1, b"")
    assert len(core.sequences) == 2
    core.fence(Fence(4, WorkerEpoch(9), scheduler_epochs=(EPOCH,)))
    assert len(core.sequences) == 0


def test_fence_up_to_an_epoch_spares_the_named():
    core = busy_core()
    core.fence(Fence(3, WorkerEpoch(1), up_to_epoch=epoch(9), spared=(EPOCH,)))
    assert len(core.sequences) == 2
    assert core.attach_scheduler(epoch(8)) == SchedulerRefused(SchedulerRefusedReason.FENCED)
    assert isinstance(core.attach_scheduler(epoch(10)), SchedulerAccepted)


def test_fence_waits_for_the_outstanding_step():
    core = busy_core()
    applied(core, StepPlan(3))
    with pytest.raises(AssertionError, match="outstanding"):
        core.fence(Fence(1, WorkerEpoch(1)))


def test_fenced_leases_are_bounded():
    base = settings()
    core = ready_core(type(base)(**{name: getattr(base, name) for name in base.__slots__} | {"max_fenced_leases": 3}))
    core.fence(Fence(1, WorkerEpoch(1), lease_ids=tuple(lease(n) for n in range(1, 6))))
    assert core.stats().fenced_leases == 3
    assert codes(run(core, StepPlan(1, attach=(start(5, 4, handles(h(1))),)))) == {5: "fenced"}


Fences = st.lists(
    st.tuples(st.sets(st.integers(1, 12), max_size=3), st.integers(0, 12), st.sets(st.integers(1, 12), max_size=3)),
    max_size=6,
)


@hypothesis_settings(max_examples=200, deadline=None)
@given(Fences)
def test_fenced_epochs_are_the_union_of_all_fences(fences: list[tuple[set[int], int, set[int]]]):
    fenced, naive = FencedEpochs(), set()
    for named, up_to, spared in fences:
        fenced.add(named, up_to, spared)
        naive |= named | {number for number in range(1, up_to + 1) if number not in spared}
        assert {number for number in range(1, 20) if number in fenced} == naive


def test_fenced_epochs_stay_few():
    core = ready_core()
    for number in range(8, 200):
        core.fence(Fence(number, WorkerEpoch(1), scheduler_epochs=(epoch(number - 1),)))
        assert isinstance(core.attach_scheduler(epoch(number)), SchedulerAccepted)
    assert core.stats().fenced_epochs == 0


def registered(core: WorkerCore, owner: int) -> bool:
    return core.registered(Registered(core.worker_epoch, CacheEpoch(1), owner=epoch(owner)))


def test_whom_the_cache_service_names_plans_and_nobody_else_whoever_is_newer():
    core = ready_core()
    assert not registered(core, 9)
    assert core.planning is None, "the one that planned is not the one that is named"
    for other in (7, 10):
        refused = core.attach_scheduler(epoch(other))
        assert isinstance(refused, SchedulerRefused)
        assert refused.reason is SchedulerRefusedReason.SUPERSEDED
    assert isinstance(core.attach_scheduler(epoch(9)), SchedulerAccepted)
    assert not registered(core, 7)
    assert core.planning is None
    assert isinstance(core.attach_scheduler(epoch(7)), SchedulerAccepted), "an older one may have it again"
    assert codes(core.apply(epoch(9), StepPlan(1, attach=(start(1, 4, handles(h(1))),)))) == {1: "fenced"}


def test_an_owner_that_is_named_once_more_goes_on():
    core = ready_core()
    registered(core, 9)
    core.attach_scheduler(epoch(9))
    attachment = core.attachment
    registered(core, 9)
    assert (core.planning, core.attachment) == (epoch(9), attachment)


def test_an_owner_that_was_fenced_attaches_no_more_and_fences_stay_few():
    core = ready_core()
    for number in range(8, 40):
        registered(core, number)
        assert isinstance(core.attach_scheduler(epoch(number)), SchedulerAccepted)
        core.fence(Fence(number, WorkerEpoch(1), scheduler_epochs=(epoch(number),)))
        refused = core.attach_scheduler(epoch(number))
        assert isinstance(refused, SchedulerRefused)
        assert refused.reason is SchedulerRefusedReason.FENCED
    assert core.stats().fenced_epochs == 1


def test_what_is_said_to_the_epoch_before_names_nobody():
    begun = WorkerCore(settings())
    begun.owned(Owner(WorkerEpoch(7), epoch(9)))
    assert not begun.worker_epoch, "it has not registered yet"
    core = ready_core()
    core.attach_scheduler(epoch(8))
    core.owned(Owner(WorkerEpoch(7), epoch(9)))
    assert core.planning == epoch(8)
    core.owned(Owner(core.worker_epoch, epoch(9)))
    assert core.planning is None
    assert isinstance(core.attach_scheduler(epoch(9)), SchedulerAccepted)
