"""Copies between host and disk as the worker core sees them: they may fail, and leave nothing then."""

from __future__ import annotations

import pytest

from coppice.ids import CacheEpoch, WorkerEpoch
from coppice.messages.registration import (
    NOTHING_LOST,
    CopiesDone,
    CopyOrder,
    CopyOrders,
    Direction,
    Fence,
    FenceAck,
    Registered,
)
from coppice_worker.core.worker import WorkerCore
from tests.fakes.worker.worker_plans import h, handles, seal
from tests.unit.worker.core.test_copies import NOW, cached_core, demotion, give, order, promotion

STORE, LOAD = Direction.STORE, Direction.LOAD


def store(number: int = 10, generation: int = 4) -> CopyOrder:
    src, dst = handles(h(0, 9), h(7, 9)), handles(h(1, generation), h(5, generation))
    return order(number, STORE, src, dst, seal(2) + seal(3))


def load(number: int = 11, generation: int = 20) -> CopyOrder:
    src, dst = handles(h(1, 4), h(5, 4)), handles(h(2, generation), h(3, generation))
    return order(number, LOAD, src, dst, seal(2) + seal(3))


def on_host() -> WorkerCore:
    """Contents 2 and 3 are in blocks 0 and 7 of the host, under generation 9."""
    core = cached_core(num_disk_blocks=8)
    (work,), _ = give(core, demotion())
    core.copied((work.number,))
    return core


def on_disk() -> WorkerCore:
    """And in blocks 1 and 5 of the disk, under generation 4."""
    core = on_host()
    (work,), _ = give(core, store())
    assert core.copied((work.number,)) == (CopiesDone(NOW, (10,)), ())
    core.check()
    return core


def sealed(core: WorkerCore, block: int) -> bool:
    return bool(core.disk_pool.seal[block].any())


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "over"])
def test_in_a_new_epoch_the_disk_is_as_it_was_if_the_cache_service_says_so(keeps: bool) -> None:
    core = on_disk()
    assert core.registration().disk_epoch == NOW
    give(core, load())  # which never ends
    after = WorkerEpoch(NOW + 1)
    core.registered(Registered(after, CacheEpoch(1), keeps_disk=keeps))
    core.check()
    said = core.registration()
    assert said.disk_epoch == after
    assert any(said.disk_seals) is any(said.disk_generations) is keeps
    assert not any(said.host_generations)
    (works, answer) = give(core, load(12, generation=30), epoch=after)
    assert len(works) == keeps
    assert (answer is None) is keeps


def test_a_process_begins_with_what_the_one_before_left() -> None:
    before, core = on_disk(), cached_core(num_disk_blocks=8)
    core.disk_pool.load(NOW, before.disk_pool.generation, before.disk_pool.seal)
    said = core.registration()
    assert (said.disk_epoch, said.disk_generations) == (NOW, before.registration().disk_generations)
    core.check()


def test_what_is_stored_is_sealed_when_it_is_whole() -> None:
    core = on_host()
    (work,), answer = give(core, store())
    assert answer is None
    assert (work.src.tolist(), work.dst.tolist()) == ([0, 7], [1, 5])
    assert (work.order.dst, work.order.seals) == (store().dst, seal(2) + seal(3))
    assert not sealed(core, 1)
    core.copied((work.number,))
    assert sealed(core, 1)
    assert not core.disk_pool.has_user().any()


def test_what_comes_from_the_disk_can_go_on_to_the_device() -> None:
    core = on_disk()
    (work,), _ = give(core, load())
    assert core.copied((work.number,)) == (CopiesDone(NOW, (11,)), ())
    onward = order(12, Direction.PROMOTE, handles(h(2, 20)), handles(h(4, 6)), seal(2))
    assert give(core, onward)[0]


def test_what_the_disk_did_not_take_is_not_there_and_may_be_written_again() -> None:
    core = on_host()
    (work,), _ = give(core, store())
    assert core.copied((work.number,), failed={work.number: 0}) == (CopiesDone(NOW, (), (10,)), ())
    core.check()
    assert not sealed(core, 1)
    assert give(core, store(10))[1] == CopiesDone(NOW, (), (10,)), "the same order has the same answer"
    assert give(core, store(13, generation=5))[0]


def test_what_the_disk_did_not_give_is_read_no_more_and_its_target_has_no_seal() -> None:
    core = on_disk()
    (work,), _ = give(core, load())
    assert core.copied((work.number,), failed={work.number: 0}) == (CopiesDone(NOW, (), (11,)), ())
    core.check()
    assert not core.host_pool.seal[[2, 3]].any()
    assert give(core, load(12, generation=21))[1] == CopiesDone(NOW, (), (12,)), "the disk has lost it"


def test_of_copies_that_end_together_each_has_its_answer() -> None:
    core = on_disk()
    (one, other), _ = give(core, load(11), promotion())
    assert core.copied((one.number, other.number), failed={one.number: 0}) == (CopiesDone(NOW, (2,), (11,)), ())


def test_a_block_that_is_read_from_the_disk_is_not_written_there() -> None:
    core = on_disk()
    give(core, load())
    assert give(core, store(12, generation=5))[1] == CopiesDone(NOW, (), (12,))


def test_a_fence_waits_for_copies_of_the_disk_and_reports_it() -> None:
    core = on_host()
    (work,), _ = give(core, store())
    assert core.fence(Fence(1, NOW, report=True)) is None
    _, (acknowledgement,) = core.copied((work.number,))
    assert isinstance(acknowledgement, FenceAck)
    assert (acknowledgement.disk_generations, acknowledgement.disk_seals) == core.disk_pool.packed()
    assert core.disk_pool.generation.tolist() == [0, 4, 0, 0, 0, 4, 0, 0]


def test_a_fence_of_leases_waits_for_no_disk() -> None:
    core = on_host()
    give(core, store())
    assert core.fence(Fence(1, NOW)) == FenceAck(1, NOW)


def test_a_registration_says_what_is_on_the_disk() -> None:
    core = on_disk()
    message = core.registration()
    assert message.num_disk_blocks == 8
    assert (message.disk_generations, message.disk_seals) == core.disk_pool.packed()


def test_a_new_worker_epoch_knows_of_no_block_on_the_disk() -> None:
    core = on_disk()
    core.registered(Registered(WorkerEpoch(NOW + 1), CacheEpoch(1)))
    assert core.registration().disk_generations == bytes(64)
    core.check()


def test_a_worker_without_a_disk_refuses_such_orders() -> None:
    core = cached_core()
    (work,), _ = give(core, demotion())
    core.copied((work.number,))
    assert give(core, store())[1] == CopiesDone(NOW, (), (10,))
    assert give(core, load())[1] == CopiesDone(NOW, (), (11,))


def test_of_a_load_that_failed_only_what_the_disk_has_lost_is_lost() -> None:
    core = on_disk()
    (work,), _ = give(core, load())
    lost = CopiesDone(NOW, (), (11,), lost_from=(1,))
    assert core.copied((work.number,), failed={work.number: 1}) == (lost, ())
    assert core.disk_pool.seal[work.src[0]].any()
    assert not core.disk_pool.seal[work.src[1:]].any()
    assert give(core, load())[1] == lost, "the same order has the same answer"


def test_a_load_of_an_epoch_that_is_over_has_lost_nothing() -> None:
    core = on_disk()
    answer = core.order_copies(CopyOrders(WorkerEpoch(NOW + 1), (load(),))).answer
    assert answer == CopiesDone(WorkerEpoch(NOW + 1), (), (11,), lost_from=(NOTHING_LOST,))
