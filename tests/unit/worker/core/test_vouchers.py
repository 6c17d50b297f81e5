"""Whom a worker trusts: schedulers for whom the cache service vouches, here and now."""

from __future__ import annotations

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch
from coppice.messages.registration import Fence, Registered
from coppice.session.frames import RejectCode
from coppice.session.vouchers import scheduler_voucher
from coppice_worker.core.batch.steps import SchedulerAccepted, SchedulerRefused, SchedulerRefusedReason
from coppice_worker.core.worker import WorkerCore
from tests.fakes.worker.worker_plans import settings

EPOCH = SchedulerEpoch(5 << 32 | 7)
FORGED = SchedulerEpoch((1 << 64) - 1)
UNVOUCHED = SchedulerRefused(SchedulerRefusedReason.UNVOUCHED)


def registered(epoch: int, key: bytes, cache_epoch: int = 5) -> Registered:
    return Registered(WorkerEpoch(epoch), CacheEpoch(cache_epoch), b"voucher", key)


def test_a_worker_that_is_not_registered_trusts_nobody_yet() -> None:
    refused = WorkerCore(settings()).why_not_trust(EPOCH, scheduler_voucher(b"", EPOCH))
    assert refused == SchedulerRefused(SchedulerRefusedReason.NOT_REGISTERED)
    assert refused.reason.reject_code is RejectCode.NOT_READY


def test_only_the_epoch_that_is_vouched_for_is_trusted() -> None:
    core = WorkerCore(settings())
    core.registered(registered(1, b"key one"))
    voucher = scheduler_voucher(b"key one", EPOCH)
    assert core.why_not_trust(EPOCH, voucher) is None
    for epoch, shown in (
        (EPOCH, b""),
        (FORGED, b""),
        (FORGED, voucher),
        (FORGED, scheduler_voucher(b"", FORGED)),
        (EPOCH, scheduler_voucher(b"another worker's", EPOCH)),
    ):
        assert core.why_not_trust(epoch, shown) == UNVOUCHED
    assert UNVOUCHED.reason.reject_code is RejectCode.NOT_READY, "the list of workers may be on its way"


def test_without_a_key_nobody_is_trusted() -> None:
    core = WorkerCore(settings())
    core.registered(registered(1, b""))
    assert core.why_not_trust(EPOCH, scheduler_voucher(b"", EPOCH)) == UNVOUCHED


def test_a_new_worker_epoch_has_another_key_and_no_memory_of_fences() -> None:
    """Epochs may be lower from now on: the seal key changed and the counter was lost."""
    core = WorkerCore(settings())
    core.registered(registered(9 << 32, b"key one", 9))
    core.attach_scheduler(SchedulerEpoch(9 << 32 | 1))
    core.fence(Fence(1, WorkerEpoch(9 << 32), up_to_epoch=SchedulerEpoch((9 << 32) - 1)))
    core.registered(registered(1 << 32, b"key two", 1))
    lower = SchedulerEpoch(1 << 32 | 3)
    assert core.why_not_trust(lower, scheduler_voucher(b"key one", lower)) == UNVOUCHED
    assert core.why_not_trust(lower, scheduler_voucher(b"key two", lower)) is None
    assert isinstance(core.attach_scheduler(lower), SchedulerAccepted)


def test_the_last_registration_is_shown_in_the_next() -> None:
    core = WorkerCore(settings())
    assert core.registration().voucher == b""
    core.registered(registered(1, b"key one"))
    said = core.registration()
    assert (said.worker_epoch, said.highest_cache_epoch, said.voucher) == (1, 5, b"voucher")
