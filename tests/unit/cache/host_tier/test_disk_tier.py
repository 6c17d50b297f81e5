"""The disk tier, below that of the host: what goes there, and how a prompt comes back from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from coppice.handles import HANDLE_BYTES
from coppice.messages.index import Grant, Pending, Wake
from coppice.messages.registration import CopiesDone, Direction
from coppice.seals import NO_SEAL, chain_key, chain_seals
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.settings import DomainConfig, Eviction, Mode
from coppice_cache.core.radix.tree import walk
from coppice_cache.core.state.workers import Worker
from tests.unit.cache.host_tier.tier_world import BLOCK, CHEAP, PROMPT, answer, ask, orders, push_out, world
from tests.unit.cache.world import ALICE, KEY, NAMESPACE, W, World, lease_id, registration, settings, tokens

SEALS = chain_seals(chain_key(KEY, ALICE, NAMESPACE), NO_SEAL, PROMPT, BLOCK * 4)


def worker_of(here: World) -> Worker:
    return here.core.state.workers[W]


def where(here: World, data: bytes = PROMPT) -> list[int]:
    """Blocks of it on device, host and disk."""
    trees = [store.find_tree(ALICE, NAMESPACE) for store in worker_of(here).stores]
    return [0 if tree is None else walk(tree, data, BLOCK * 4).num_blocks for tree in trees]


def settle(here: World) -> None:
    """All copies are done, and those that follow from them."""
    quiet = 0
    while quiet < 2:
        here.tick(100, alive=(here.session,))
        jobs = [job for tier in worker_of(here).lower_tiers for job in tier.jobs.values()]
        quiet = 0 if jobs else quiet + 1
        for job in jobs:
            answer(here, job.order)


def with_disk(*domains: DomainConfig, **changes: object) -> World:
    values: dict[str, object] = {"host": 8, "disk": 64, "disk_costs": CHEAP, "eviction": Eviction.LRU} | changes
    return world(*domains, **values)  # type: ignore[arg-type]


def send_down(here: World) -> None:
    """PROMPT is on the disk, and what came after it in all tiers."""
    here.fill(1, PROMPT)
    settle(here)
    for number in range(2, 8):
        here.fill(number, tokens(16, 1_000 * number))
        settle(here)


def stored() -> World:
    """PROMPT is on the disk alone; nothing more goes down from here on."""
    here = with_disk()
    send_down(here)
    object.__setattr__(here.core.state.settings, "demote_below_share", 0.0)
    push_out(here)
    assert where(here) == [0, 0, 4]
    return here


def last(here: World) -> tuple[Direction, int]:
    order = orders(here)[-1]
    return order.direction, len(order.src) // HANDLE_BYTES


def test_what_the_host_has_to_forget_soon_is_stored() -> None:
    here = with_disk()
    for number in range(1, 4):
        here.fill(number, tokens(16, 1_000 * number))
        settle(here)
    directions = [order.direction for order in orders(here)]
    assert set(directions) == {Direction.DEMOTE, Direction.STORE}
    assert directions[0] is Direction.DEMOTE
    assert where(here, tokens(16, 1_000)) == [0, 4, 4]


def test_both_ends_of_a_store_are_held_until_the_workers_word() -> None:
    here = with_disk()
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    here.tick(100, alive=(here.session,))
    answer(here, orders(here)[-1])
    object.__setattr__(here.core.state.settings, "demote_below_share", 1.0)
    here.tick(100, alive=(here.session,))
    worker = worker_of(here)
    assert worker.host is not None
    assert worker.disk is not None
    (job,) = worker.disk.jobs.values()
    assert job.order.direction is Direction.STORE
    assert job.order.seals == SEALS
    assert worker.host.store.quotas.accounts[ALICE].evictable == 0
    assert list(worker.disk.store.ledger.counts) == [60, 4, 0, 0]
    answer(here, job.order)
    assert list(worker.disk.store.ledger.counts) == [60, 0, 4, 0]


def test_a_prompt_comes_from_the_disk_in_two_hops() -> None:
    here = stored()
    assert isinstance(ask(here, 10), Pending)
    assert last(here) == (Direction.LOAD, 4)
    assert orders(here)[-1].seals == SEALS
    answer(here, orders(here)[-1])
    assert where(here) == [0, 4, 4]
    assert [m.lease_ids for m in here.told(here.session) if isinstance(m, Wake)] == [(lease_id(10),)]
    assert isinstance(ask(here, 10), Pending)
    assert last(here) == (Direction.PROMOTE, 4)
    answer(here, orders(here)[-1])
    grant = ask(here, 10)
    assert isinstance(grant, Grant)
    assert grant.num_cached_tokens == 16


def test_a_second_asker_waits_for_the_same_hop() -> None:
    here = stored()
    assert isinstance(ask(here, 10), Pending)
    num_orders = len(orders(here))
    assert isinstance(ask(here, 11), Pending)
    assert len(orders(here)) == num_orders
    answer(here, orders(here)[-1])
    assert isinstance(ask(here, 10), Pending)
    assert isinstance(ask(here, 11), Pending)
    assert len(orders(here)) == num_orders + 1
    answer(here, orders(here)[-1])
    assert isinstance(ask(here, 11), Grant)


def test_what_cannot_be_loaded_is_on_the_disk_no_more_and_is_computed() -> None:
    here = stored()
    ask(here, 10)
    answer(here, orders(here)[-1], failed=True)
    assert where(here) == [0, 0, 0]
    grant = ask(here, 10)
    assert isinstance(grant, Grant)
    assert grant.num_cached_tokens == 0


def test_how_much_of_the_disk_is_used_is_told() -> None:
    here = stored()
    ask(here, 10)
    (worker,) = here.core.stats().workers
    counts = worker.disk_free_blocks, worker.disk_leased_blocks, worker.disk_cached_blocks
    assert (worker.num_disk_blocks, sum(counts)) == (64, 64)
    assert worker.disk_cached_blocks >= 4
    assert worker.num_host_blocks == 8
    assert worker.copies == sum(len(tier.jobs) for tier in worker_of(here).lower_tiers) > 0


def test_nothing_is_found_on_the_host_before_it_is_loaded() -> None:
    here = stored()
    ask(here, 10)
    assert where(here) == [0, 0, 4]


def test_what_the_host_has_as_well_is_not_loaded() -> None:
    here = stored()
    ask(here, 10)
    answer(here, orders(here)[-1])
    ask(here, 11)
    assert last(here)[0] is Direction.PROMOTE


def test_what_comes_sooner_when_it_is_computed_is_not_loaded() -> None:
    here = stored()
    worker = worker_of(here)
    here.core.receive_worker(W, CopiesDone(worker.epoch, disk_ns_per_block=10**9), here.now_ns)
    assert isinstance(ask(here, 10), Grant)


def test_costs_of_the_two_copies_are_told_apart() -> None:
    here = with_disk()
    worker = worker_of(here)
    done = CopiesDone(worker.epoch, copy_ns_per_block=7_000, disk_ns_per_block=90_000)
    here.core.receive_worker(W, done, here.now_ns)
    assert [tier.costs.copy_us_per_block for tier in worker.lower_tiers] == [7.0, 90.0]


def not_taken() -> World:
    """PROMPT is in the host tier, and the disk took none of it."""
    here = with_disk(demote_below_share=1.0)
    here.fill(1, PROMPT)
    here.tick(100, alive=(here.session,))
    answer(here, orders(here)[-1])
    here.tick(100, alive=(here.session,))
    assert last(here)[0] is Direction.STORE
    answer(here, orders(here)[-1], failed=True)
    return here


def test_a_disk_that_takes_nothing_is_left_alone_for_a_while() -> None:
    here = not_taken()
    num_orders = len(orders(here))
    for _ in range(50):
        here.tick(100, alive=(here.session,))
    assert len(orders(here)) == num_orders
    for _ in range(60):
        here.tick(100, alive=(here.session,))
    assert last(here)[0] is Direction.STORE
    assert len(orders(here)) == num_orders + 1


def test_what_the_disk_did_not_take_is_not_found_there() -> None:
    here = not_taken()
    assert where(here) == [4, 4, 0]


@pytest.mark.parametrize(
    "config",
    [DomainConfig(ALICE, Mode.STRICT, guarantee_share=0.75), DomainConfig(ALICE, zero_on_change=True)],
    ids=["strict", "zeroed"],
)
def test_nothing_of_whom_it_must_not_outlive_goes_there(config: DomainConfig) -> None:
    here = with_disk(config, demote_below_share=1.0)
    for number in range(1, 6):
        here.fill(number, tokens(16, 1_000 * number))
        settle(here)
    assert orders(here) == []


def test_what_is_invalidated_is_not_found_there() -> None:
    for prefix in (None, PROMPT[:32]):
        here = stored()
        here.core.invalidate(domain=ALICE, namespace=NAMESPACE, tokens=prefix, now_ns=here.now_ns)
        here.collect()
        assert where(here)[2] == (0 if prefix is None else 1)


def test_what_is_invalidated_while_it_is_loaded_does_not_come_back() -> None:
    here = stored()
    ask(here, 10)
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    answer(here, orders(here)[-1])
    assert where(here) == [0, 0, 0]
    assert isinstance(ask(here, 10), Grant)


def test_orders_are_said_again_to_a_worker_that_reconnects() -> None:
    here = stored()
    ask(here, 10)
    order = orders(here)[-1]
    worker = worker_of(here)
    message = registration(num_blocks=8, epoch=worker.epoch, highest=1)
    below: dict[str, object] = {}
    for name, tier in zip(("host", "disk"), worker.lower_tiers, strict=True):
        below[f"num_{name}_blocks"] = tier.store.num_blocks
        below[f"{name}_generations"] = tier.store.ledger.generations.tobytes()
        below[f"{name}_seals"] = bytes(tier.store.ledger.seals)
    own = {"generations": worker.ledger.generations.tobytes(), "seals": bytes(worker.ledger.seals)}
    here.register(changed(message, **own, **below))
    assert worker_of(here) is worker
    assert orders(here)[-1] == order


def test_a_worker_that_says_nothing_of_a_disk_is_told_nothing_of_one() -> None:
    here = with_disk(disk=0)
    for number in range(1, 6):
        here.fill(number, tokens(16, 1_000 * number))
        settle(here)
    assert {order.direction for order in orders(here)} == {Direction.DEMOTE}


def test_a_disk_without_a_host_tier_is_refused() -> None:
    here = World(settings())
    message = changed(registration(), num_disk_blocks=4, disk_generations=bytes(32), disk_seals=bytes(64))
    with pytest.raises(MessageRefused, match="host tier"):
        here.core.receive_worker(W, message, here.now_ns)


def test_arrays_of_another_size_are_refused() -> None:
    here = World(settings())
    message = changed(
        registration(),
        num_host_blocks=4,
        host_generations=bytes(32),
        host_seals=bytes(64),
        num_disk_blocks=8,
        disk_generations=bytes(32),
        disk_seals=bytes(64),
    )
    with pytest.raises(MessageRefused, match="8 blocks need"):
        here.core.receive_worker(W, message, here.now_ns)


class After:
    """The service that comes next: it loads the log, and the worker registers with what it has."""

    def __init__(self, before: World, *, away_ms: int = 0, **changes: object) -> None:
        old = worker_of(before)
        events, cursor = before.core.snapshot_slice(None, 1 << 20)
        assert cursor is None
        config = replace(before.core.state.settings, record_events=True, **changes)  # type: ignore[arg-type]
        self.here = World(config, epoch=2)
        self.here.core.load_replay({W: events})
        self.here.tick(away_ms)
        self.arrays = {"": old.ledger} | {
            name: tier.store.ledger for name, tier in zip(("host_", "disk_"), old.lower_tiers, strict=True)
        }
        message = registration(num_blocks=8, block_size=BLOCK, epoch=old.epoch, highest=1)
        self.here.register(changed(message, num_host_blocks=8, num_disk_blocks=64, **self.reported()))

    def reported(self) -> dict[str, bytes]:
        generations = {f"{name}generations": ledger.generations.tobytes() for name, ledger in self.arrays.items()}
        return generations | {f"{name}seals": bytes(ledger.seals) for name, ledger in self.arrays.items()}

    def open(self) -> World:
        here = self.here
        here.tick(here.core.state.settings.session_ttl_ms)
        (fence,) = here.fences()
        here.ack(fence, **self.reported())
        here.session = here.attach()
        return here


def left_behind() -> World:
    before = stored()
    before.core.end_client(before.session, before.now_ns)
    before.collect()
    return before


def test_what_the_disk_had_is_loaded_after_a_restart() -> None:
    before = left_behind()
    here = After(before).open()
    assert where(here) == [0, 0, 4]
    assert here.core.replay_counts.replayed_to_disk == sum(_cached_on_disk(before))
    assert isinstance(ask(here, 10), Pending)
    assert last(here) == (Direction.LOAD, 4)


def test_a_block_that_the_disk_lost_meanwhile_is_forgotten_with_all_behind_it() -> None:
    before = left_behind()
    after = After(before)
    tree = worker_of(before).stores[2].find_tree(ALICE, NAMESPACE)
    assert tree is not None
    node = walk(tree, PROMPT, BLOCK * 4).node
    after.arrays["disk_"].set_seal(node.block(2), NO_SEAL)
    assert where(after.open()) == [0, 0, 2]


def _cached_on_disk(here: World) -> list[int]:
    return [account.cached for account in worker_of(here).stores[2].quotas.accounts.values()]
