"""The host tier: orders to copy, both ends held until the worker's word, and what becomes of either."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from coppice.handles import block_ids, generations
from coppice.ids import DomainId
from coppice.messages.index import Grant, Pending, Wake
from coppice.messages.registration import CopiesDone, CopyOrder, Direction
from coppice.seals import NO_SEAL, chain_key, chain_seals
from coppice_cache.core.base.settings import DomainConfig, Mode
from tests.unit.cache.host_tier.tier_world import (
    BLOCK,
    CHEAP,
    PROMPT,
    answer,
    ask,
    demoted,
    host_blocks,
    measured,
    orders,
    world,
)
from tests.unit.cache.world import ALICE, KEY, NAMESPACE, W, World, lease_id, registration, settings, tokens


def test_few_free_blocks_demote_the_coldest_leaf() -> None:
    here = world()
    here.fill(1, PROMPT)
    here.tick()
    assert orders(here) == [], "half of the pool is free"
    here.fill(2, tokens(4, 500))
    here.tick()
    (order,) = orders(here)
    assert order.direction is Direction.DEMOTE
    seals = chain_seals(chain_key(KEY, ALICE, NAMESPACE), NO_SEAL, PROMPT, BLOCK * 4)
    assert order.seals == seals
    assert len(order.src) == len(order.dst) == 32
    assert host_blocks(here) == [12, 4, 0, 0]
    answer(here, order)
    assert host_blocks(here) == [12, 0, 4, 0]


def test_what_is_copied_is_neither_evicted_nor_granted_before_the_workers_word() -> None:
    here = world()
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    here.tick()
    assert not isinstance(here.acquire(3, tokens(24, 700)), Grant), "four blocks are read by the copy"
    answer(here, orders(here)[0])
    assert isinstance(here.acquire(4, tokens(24, 700)), Grant)


def test_a_demotion_that_fails_leaves_nothing() -> None:
    here = world()
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    here.tick()
    answer(here, orders(here)[0], failed=True)
    assert host_blocks(here) == [16, 0, 0, 0]


def test_an_answer_said_twice_or_of_another_order_changes_nothing() -> None:
    here = demoted()
    before = host_blocks(here)
    for order in orders(here):
        answer(here, order)
        answer(here, order, failed=True)
    here.core.receive_worker(W, CopiesDone(here.core.state.workers[W].epoch, (12_345,)), here.now_ns)
    here.core.receive_worker(W, CopiesDone(0, (orders(here)[0].order_id,)), here.now_ns)  # type: ignore[arg-type]
    here.collect()
    assert host_blocks(here) == before


def test_a_prompt_that_the_host_has_is_promoted_and_waited_for() -> None:
    here = demoted()
    assert ask(here, 10) == Pending(lease_id(10), 16, here.core.state.settings.flight_wait_ms)
    order = orders(here)[-1]
    assert order.direction is Direction.PROMOTE
    assert order.seals == chain_seals(chain_key(KEY, ALICE, NAMESPACE), NO_SEAL, PROMPT, BLOCK * 4)
    answer(here, order)
    assert [m.lease_ids for m in here.told(here.session) if isinstance(m, Wake)] == [(lease_id(10),)]
    grant = ask(here, 10)
    assert isinstance(grant, Grant)
    assert grant.num_cached_tokens == 16
    assert grant.shared == order.dst, "the copied blocks, under the generations of the order"
    here.release(10)


def test_a_second_asker_waits_for_the_same_copy() -> None:
    here = demoted()
    ask(here, 10)
    num_orders = len(orders(here))
    assert isinstance(ask(here, 11), Pending)
    assert len(orders(here)) == num_orders
    answer(here, orders(here)[-1])
    assert isinstance(ask(here, 10), Grant)
    assert isinstance(ask(here, 11), Grant)


def test_a_promotion_that_fails_is_computed_instead_in_the_end() -> None:
    here = demoted()
    ask(here, 10)
    answer(here, orders(here)[-1], failed=True)
    assert [m.lease_ids for m in here.told(here.session) if isinstance(m, Wake)] == [(lease_id(10),)]
    grant = ask(here, 10)
    assert isinstance(grant, Grant), "what failed once is not in the host tier any more"
    assert grant.num_cached_tokens == 0


def test_so_few_tokens_that_nobody_would_wait_for_them_are_not_promoted() -> None:
    here = demoted()
    object.__setattr__(here.core.state.settings, "flight_tokens_min", 17)
    grant = ask(here, 10)
    assert isinstance(grant, Grant), "all that the host has are 16 tokens"
    assert orders(here)[-1].direction is Direction.DEMOTE


def test_who_may_not_wait_computes() -> None:
    here = demoted()
    grant = here.granted(10, PROMPT + tokens(1, 99))
    assert grant.num_cached_tokens == 0
    assert orders(here)[-1].direction is Direction.DEMOTE


def test_nothing_of_a_promotion_is_found_before_the_workers_word() -> None:
    here = demoted()
    assert isinstance(ask(here, 10), Pending)
    assert here.core.match(ALICE, NAMESPACE, PROMPT + tokens(1, 99), W).num_cached_tokens == 0


def test_a_copy_that_costs_more_than_it_saves_is_not_ordered() -> None:
    here = world(tiers=replace(CHEAP, copy_us_per_block=10_000.0))
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    here.tick()
    assert orders(here) == [], "it is dropped when its turn comes"
    here = demoted()
    measured(here, copy_ns_per_block=10_000_000)
    assert isinstance(ask(here, 10), Grant), "and computed sooner than it would be copied"


def test_only_what_is_new_is_demoted() -> None:
    here = world(num_blocks=12, demote_below_share=0.9)
    here.fill(1, PROMPT)
    here.tick()
    answer(here, orders(here)[0])
    here.fill(2, PROMPT + tokens(8, 300))
    here.tick()
    assert len(orders(here)[-1].src) == 16, "two blocks follow what is there already"
    answer(here, orders(here)[-1])
    assert host_blocks(here) == [10, 0, 6, 0]


def test_the_host_tier_evicts_its_own_coldest() -> None:
    here = world(host=4, num_blocks=12, demote_below_share=0.9)
    here.fill(1, PROMPT)
    here.tick()
    answer(here, orders(here)[0])
    here.fill(2, tokens(16, 300))
    here.tick()
    answer(here, orders(here)[-1])
    assert host_blocks(here) == [0, 0, 4, 0]
    assert len(orders(here)) == 2


def test_a_domain_reads_its_own_host_blocks_only() -> None:
    here = demoted()
    assert isinstance(ask(here, 10, domain=DomainId("bob")), Grant)
    assert orders(here)[-1].direction is Direction.DEMOTE


@pytest.mark.parametrize(
    "config",
    [DomainConfig(ALICE, mode=Mode.STRICT, guarantee_share=0.75), DomainConfig(ALICE, zero_on_change=True)],
    ids=["strict", "zeroed"],
)
def test_nothing_of_a_domain_that_leaves_no_residue_is_copied(config: DomainConfig) -> None:
    here = world(config)
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    here.tick()
    assert orders(here) == []


def test_the_host_tier_keeps_no_more_accounts_than_the_device_may() -> None:
    here = world(domains_per_worker_max=3)
    for number in range(8):
        here.fill(number + 1, tokens(28, 1_000 * number), domain=DomainId(f"d{number}"))
        here.tick()
        host = here.core.state.workers[W].host
        assert host is not None
        while host.jobs:
            answer(here, next(iter(host.jobs.values())).order)
    assert len(host.store.quotas.accounts) <= 3
    assert len(orders(here)) >= 3


def test_an_invalidation_reaches_both_tiers() -> None:
    here = demoted()
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    here.collect()
    assert isinstance(ask(here, 10), Grant)
    here.tick(1_000, alive=(here.session,))
    assert host_blocks(here) == [16, 0, 0, 0]


def test_an_invalidation_while_the_copy_runs_leaves_nothing_findable() -> None:
    here = demoted()
    ask(here, 10)
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    answer(here, orders(here)[-1])
    grant = ask(here, 10)
    assert isinstance(grant, Grant)
    assert grant.num_cached_tokens == 0
    here.tick(1_000, alive=(here.session,))
    assert host_blocks(here) == [16, 0, 0, 0]


def test_orders_are_said_again_when_the_worker_reconnects() -> None:
    here = demoted()
    ask(here, 10)
    worker = here.core.state.workers[W]
    assert worker.host is not None
    count = len(orders(here))
    message = changed(
        registration(num_blocks=8, block_size=BLOCK, epoch=worker.epoch, highest=1),
        generations=worker.ledger.generations.tobytes(),
        seals=bytes(worker.ledger.seals),
        num_host_blocks=16,
        host_generations=worker.host.store.ledger.generations.tobytes(),
        host_seals=bytes(worker.host.store.ledger.seals),
    )
    here.register(message)
    assert orders(here)[count:] == [orders(here)[count - 1]]


def reconnect_with_seals_of(here: World, order: CopyOrder) -> bool:
    """The worker reports that it has done this promotion. Whether its epoch lives on."""
    worker = here.core.state.workers[W]
    seals = bytearray(worker.ledger.seals)
    for number, block in enumerate(block_ids(order.dst)):
        seals[16 * block : 16 * block + 16] = order.seals[16 * number : 16 * number + 16]
    message = changed(
        registration(num_blocks=8, block_size=BLOCK, epoch=worker.epoch, highest=1),
        generations=worker.ledger.generations.tobytes(),
        seals=bytes(seals),
        num_host_blocks=16,
    )
    here.register(message)
    return here.core.state.workers[W] is worker


def test_a_promotion_that_is_done_and_whose_answer_was_lost_explains_its_seals() -> None:
    here = demoted()
    ask(here, 10)
    order = orders(here)[-1]
    assert reconnect_with_seals_of(here, order)
    assert orders(here)[-1] == order
    answer(here, order)
    assert isinstance(ask(here, 10), Grant)


def test_a_promotion_that_was_for_nothing_explains_its_seals() -> None:
    here = demoted()
    ask(here, 10)
    order = orders(here)[-1]
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    answer(here, order)
    assert reconnect_with_seals_of(here, order)


def test_a_dead_worker_takes_its_copies_along() -> None:
    here = demoted()
    ask(here, 10)
    here.core.end_worker(W, here.now_ns)
    here.collect()
    assert [m.lease_ids for m in here.told(here.session) if isinstance(m, Wake)] == [(lease_id(10),)]


def test_generations_of_the_host_pool_go_on_after_a_restart() -> None:
    here = demoted()
    old = here.core.state.workers[W]
    assert old.host is not None
    last = old.host.store.ledger.generations.copy()
    later = World(settings(tiers=CHEAP, demote_below_share=0.9), epoch=2)
    message = changed(
        registration(num_blocks=8, block_size=BLOCK, epoch=old.epoch, highest=1),
        generations=old.ledger.generations.tobytes(),
        seals=bytes(old.ledger.seals),
        num_host_blocks=16,
        host_generations=last.tobytes(),
        host_seals=bytes(old.host.store.ledger.seals),
    )
    later.register(message)
    later.tick(later.core.state.settings.session_ttl_ms)
    (fence,) = later.fences()
    arrays = {"generations": message.generations, "seals": message.seals}
    later.ack(fence, **arrays)
    later.session = later.attach()
    later.fill(1, PROMPT)
    later.tick()
    granted = generations(orders(later)[0].dst)
    assert (granted > last.max()).all()


def forget_prefix(here: World, data: bytes) -> None:
    here.core.invalidate(domain=ALICE, namespace=NAMESPACE, tokens=data, now_ns=here.now_ns)
    here.collect()


def test_what_follows_an_invalidated_prefix_is_not_demoted_before_it_is_taken_apart() -> None:
    here = world()
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    forget_prefix(here, PROMPT)
    here.tick()
    assert orders(here) == []


def test_a_prefix_that_is_invalidated_while_it_is_demoted_is_in_neither_tier() -> None:
    here = world()
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    here.tick()
    forget_prefix(here, PROMPT[:16])
    answer(here, orders(here)[0])
    assert host_blocks(here) == [16, 0, 0, 0]


def test_a_prefix_that_is_invalidated_while_it_is_promoted_is_in_neither_tier() -> None:
    here = demoted()
    ask(here, 10)
    forget_prefix(here, PROMPT[:16])
    answer(here, orders(here)[-1])
    grant = ask(here, 10)
    assert isinstance(grant, Grant)
    assert grant.num_cached_tokens == 0


def test_what_is_promoted_is_under_the_operators_pin_again() -> None:
    here = demoted()
    assert here.core.pin("system", ALICE, NAMESPACE, PROMPT, here.now_ns) == 0
    ask(here, 10)
    answer(here, orders(here)[-1])
    assert [view.num_tokens for view in here.core.pins()] == [16]


def test_a_strict_domain_with_a_guarantee_in_blocks_takes_nothing_of_the_host() -> None:
    here = world(DomainConfig(ALICE, mode=Mode.STRICT, guarantee_blocks=4))
    host = here.core.state.workers[W].host
    assert host is not None
    assert host.store.quotas.accounts[ALICE].guarantee == 0
    assert host.store.quotas.accounts[ALICE].config.wipes
