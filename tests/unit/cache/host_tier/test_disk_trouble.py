"""What a disk tier does badly: it loses blocks, is slow, hangs, or says that it is dear."""

from __future__ import annotations

from coppice.ids import LeaseId
from coppice.messages.index import Grant, Pending, Wake
from coppice.messages.registration import NOTHING_LOST, CopiesDone, Direction
from coppice_cache.core.base.settings import DomainConfig
from tests.unit.cache.host_tier.test_disk_tier import After, last, left_behind, settle, stored, where, with_disk
from tests.unit.cache.host_tier.tier_world import answer, ask, measured, orders
from tests.unit.cache.world import ALICE, W, World, lease_id, tokens

LOAD = Direction.LOAD


def load_failed(here: World, lost_from: int) -> None:
    worker = here.core.state.workers[W]
    done = CopiesDone(worker.epoch, (), (orders(here)[-1].order_id,), lost_from=(lost_from,))
    here.core.receive_worker(W, done, here.now_ns)
    here.collect()


def let_pass(here: World, seconds: int) -> None:
    """What is copied beside loads is done."""
    for _ in range(seconds):
        here.tick(1_000, alive=(here.session,))
        for tier in here.core.state.workers[W].lower_tiers:
            for job in [job for job in tier.jobs.values() if job.order.direction is not LOAD]:
                answer(here, job.order)


def woken(here: World) -> list[LeaseId]:
    return [name for said in here.told(here.session) if isinstance(said, Wake) for name in said.lease_ids]


def test_only_what_is_lost_is_forgotten_and_the_rest_is_loaded() -> None:
    here = stored()
    ask(here, 10)
    load_failed(here, 2)
    assert where(here) == [0, 0, 2]
    assert woken(here) == [lease_id(10)]
    assert isinstance(ask(here, 10), Pending)
    assert last(here) == (LOAD, 2)


def test_after_a_load_that_failed_for_another_reason_nobody_waits_for_a_while() -> None:
    here = stored()
    ask(here, 10)
    load_failed(here, NOTHING_LOST)
    assert where(here) == [0, 0, 4]
    assert isinstance(ask(here, 10), Grant)
    here.release(10)
    assert isinstance(ask(here, 11), Grant)
    here.release(11)
    let_pass(here, 11)
    assert isinstance(ask(here, 12), Pending)
    assert last(here) == (LOAD, 4)


def test_a_load_that_somebody_waited_for_too_long_is_waited_for_by_nobody_else() -> None:
    here = stored()
    ask(here, 10)
    order = orders(here)[-1]
    let_pass(here, 3)
    assert woken(here) == [lease_id(10)]
    assert isinstance(ask(here, 10), Grant)
    here.release(10)
    assert isinstance(ask(here, 11), Grant)
    here.release(11)
    answer(here, order)
    assert where(here) == [0, 4, 4], "it came in the end"


def test_what_the_device_has_already_is_not_loaded_for_a_few_blocks_more() -> None:
    here = stored()
    measured(here, copy_ns_per_block=10**9)  # so dear that nothing is demoted
    here.fill(50, tokens(8))
    assert where(here) == [2, 0, 4]
    blocks = 2_000 * 1_000 // 8  # microseconds that loads may fill the link for
    measured(here, prefill_ns_per_token=10**9, disk_ns_per_block=(blocks // 2 - 1) * 1_000)
    grant = ask(here, 10)
    assert isinstance(grant, Grant)
    assert grant.num_cached_tokens == 8
    here.release(10)
    measured(here, prefill_ns_per_token=10**9, disk_ns_per_block=(blocks // 3 - 1) * 1_000)
    pending = ask(here, 11)
    assert isinstance(pending, Pending)
    assert last(here) == (LOAD, 3)
    assert pending.num_tokens == 4


def test_loads_that_were_dear_are_tried_again_once_in_a_while() -> None:
    here = stored()
    measured(here, disk_ns_per_block=10**9)
    assert isinstance(ask(here, 10), Grant)
    here.release(10)
    let_pass(here, 61)
    assert isinstance(ask(here, 11), Pending)
    load_failed(here, NOTHING_LOST)
    let_pass(here, 11)
    assert isinstance(ask(here, 12), Grant), "they are dear still"


def test_what_is_to_be_zeroed_from_now_on_is_forgotten_in_all_tiers() -> None:
    here = with_disk(DomainConfig(ALICE))
    for number in range(1, 4):
        here.fill(number, tokens(16, 1_000 * number))
        settle(here)
    assert where(here, tokens(16, 1_000)) == [0, 4, 4]
    here.core.set_domains((DomainConfig(ALICE, zero_on_change=True),), here.now_ns)
    here.collect()
    assert where(here, tokens(16, 1_000)) == [0, 0, 0]


def test_a_worker_that_lives_and_comes_back_late_finds_what_the_log_had_of_its_disk() -> None:
    here = After(left_behind(), away_ms=40_000).open()
    assert where(here)[2] == 4
    assert here.core.state.aside.num_blocks == 0
