"""The core with one rule taken away: the cache machine, or a test that asks directly, must notice each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from coppice.messages.index import Acquire
from coppice.messages.registration import CopiesDone
from coppice_cache.core import index
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.ops import grants, invalidation, ops, pins, publication, waits
from coppice_cache.core.ops import offload as tiers
from coppice_cache.core.ops import partial_copy as copies
from coppice_cache.core.pool.quotas import Account, Quotas
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import Node, Tree, common_run, root_of
from coppice_cache.core.state import single_flight as flights
from coppice_cache.core.state.single_flight import Flights
from coppice_cache.core.state.workers import Worker
from coppice_sim.mutants.registry import MUTANTS as WHOLE_RUN_MUTANTS
from coppice_sim.mutants.registry import Mutant, Patches
from tests.unit.cache.host_tier import test_disk_tier
from tests.unit.cache.host_tier import test_offload as test_cache_tiers
from tests.unit.cache.machine.test_machine import CacheMachine
from tests.unit.cache.player import play

SEEDS = range(200)
STEPS = 100


def _no_wake_on_abort() -> Patches:
    def end(self: Flights, lease: Any) -> None:
        """The flight goes on without its leader."""
        flight = self._by_lease.get(lease.number)
        if flight is None or not flight.waiters:
            original(self, lease)

    original = Flights.end
    return [(Flights, "end", end), (Flights, "tick", lambda self, now_ns: None)]


def _flights_across_domains() -> Patches:
    place = flights._place

    def any_place(node: Node) -> Any:
        return ("any", "") if isinstance(node, Tree) else place(node)

    def coming(self: Flights, position: Any, tokens: bytes, stop: int) -> Any:
        for flight in [flight for found in self._by_key.values() for flight in found]:
            if position.num_blocks == 0 and flight.lease.num_settled == 0 and flight.tokens[:8] == tokens[:8]:
                return flights.Coming(flight, common_run(tokens, 0, stop, flight.tokens, self._block_bytes, least=1))
        return original(self, position, tokens, stop)

    original = Flights.coming
    return [(flights, "_place", any_place), (Flights, "coming", coming)]


def _copy_source_without_pin() -> Patches:
    """Named in the grant, and free to be evicted at once."""

    def find(*args: Any) -> Any:
        found.clear()
        partial = original(*args)
        if partial is not None:
            found.append(partial)
        return None

    def with_copy(worker: Worker, grant: Any, partial: Any) -> Any:
        return attach(worker, grant, found.pop() if found and found[0].node.handles else None)

    found: list[Any] = []
    original, attach = copies.find_copy, copies.with_copy
    return [(grants, "find_copy", find), (grants, "with_copy", with_copy)]


def _operator_pin_protects_nothing() -> Patches:
    def extend(state: Any, worker: Worker, spec: Any) -> None:
        original(state, worker, spec)
        held = worker.pins.get(spec.name)
        if held is not None and held.number in held.node.pins:
            account = worker.quotas.accounts[spec.domain]
            account.protected -= held.node.unpin(held.number)
            worker.offer(account, held.node)
            worker.quotas.refresh(account)

    def all_pins(self: Worker) -> Any:
        return iter(())

    original = pins._extend

    def let_go(worker: Worker, name: str) -> None:
        worker.pins.pop(name, None)

    patches: Patches = [(pins, "_extend", extend), (Worker, "all_pins", all_pins), (pins, "_let_go", let_go)]
    return [*patches, (pins, "_unpin_node", lambda worker, account, held: None)]


def _invalidation_forgets_a_worker() -> Patches:
    def invalidate(state: Any, *args: Any) -> int:
        workers = dict(state.workers)
        if len(workers) > 1:
            del state.workers["v"]
        try:
            return original(state, *args)
        finally:
            state.workers.clear()
            state.workers.update(workers)

    original = invalidation.invalidate
    return [(index, "invalidate", invalidate)]


def _subtree_stays() -> Patches:
    """Only the named block goes; what follows it is found again as soon as somebody publishes it anew."""

    def cut_off(store: BlockStore, top: Node) -> None:
        account = store.quotas.accounts[root_of(top).domain]
        if not top.children and not top.guards:
            original(store, top)
        else:
            store.offer(account, top)

    original = BlockStore.cut_off
    return [(BlockStore, "cut_off", cut_off)]


def _stale_tree_takes_publications() -> Patches:
    def publish(state: Any, worker: Worker, lease: Any, op: Any, now_ns: int) -> Any:
        if lease.tree is not None and lease.account.config.mode is not Mode.DISABLED:
            lease.tree.stamp = state.incarnations.stamp(lease.tree.domain, lease.tree.namespace)
        return original(state, worker, lease, op, now_ns)

    original = publication.publish
    return [(ops, "publish", publish)]


def _demotion_holds_nothing() -> Patches:
    def order(state: Any, worker: Worker, tier: Any, direction: Any, source: Any, *rest: Any) -> None:
        original(state, worker, tier, direction, source, *rest)
        if direction is tier.down:
            del tier.upper.copying[source.number]
            tier.upper.unpin(source, source.node)
            tier.upper.quotas.refresh(source.account)

    def let_go(store: BlockStore, lease: Any) -> None:
        if lease.number in store.copying:
            release(store, lease)

    original, release = tiers._order, tiers._let_go
    return [(tiers, "_order", order), (tiers, "_let_go", let_go)]


def _promotion_published_early() -> Patches:
    def promote(state: Any, worker: Worker, tier: Any, *args: Any) -> bool:
        before = set(tier.jobs)
        ordered = original(state, worker, tier, *args)
        for job in [job for number, job in tier.jobs.items() if number not in before]:
            tiers._store(state, tier.upper, job, 0)
            worker.flights.advance(job.target)
        return ordered

    original = tiers.promote
    return [(waits, "promote", promote)]


def _failed_promotion_published() -> Patches:
    def copies_done(state: Any, worker: Worker, message: CopiesDone, now_ns: int) -> None:
        jobs = [job for tier in worker.lower_tiers for job in tier.jobs.values()]
        ways = (tiers.Direction.PROMOTE, tiers.Direction.LOAD)
        upward, failed = {job.order.order_id for job in jobs if job.order.direction in ways}, message.failed_ids
        promoted = tuple(i for i in failed if i in upward)
        others = tuple(i for i in failed if i not in promoted)
        original(state, worker, CopiesDone(message.worker_epoch, (*message.order_ids, *promoted), others), now_ns)

    original = tiers.copies_done
    return [(index, "copies_done", copies_done)]


def _host_blocks_granted_twice() -> Patches:
    def order(state: Any, worker: Worker, tier: Any, direction: Any, source: Any, target: Any, *rest: Any) -> None:
        if direction is tier.down:
            for block in target.own_blocks():
                tier.store.ledger.free.append(block)
        original(state, worker, tier, direction, source, target, *rest)

    original = tiers._order
    return [(tiers, "_order", order)]


def _lru_across_tenants() -> Patches:
    """Whatever is coldest goes, whoever is guaranteed it."""
    return [
        (Account, "over", property(lambda account: account.held)),
        (Quotas, "furthest_over", lambda self: next((u for u in self.accounts.values() if u.evictable), None)),
    ]


def _unscoped_cached_tokens() -> Patches:
    def take(state: Any, session: Any, op: Acquire, placement: Any, now_ns: int) -> Any:
        answer = original(state, session, op, placement, now_ns)
        if not isinstance(answer, grants.Grant):
            return answer
        worker, size = placement.worker, placement.worker.block_bytes
        seen = [grants.walk(tree, op.tokens, size, len(op.tokens) - 4).num_blocks for tree in worker.trees.values()]
        return replace(answer, num_cached_tokens=max(seen, default=0) * worker.block_size)

    original = grants._take
    return [(grants, "_take", take)]


def _early_visibility() -> Patches:
    """A full prompt is findable as soon as its blocks are granted."""

    def acquire(state: Any, session: Any, op: Acquire, now_ns: int) -> Any:
        known = op.lease_id in session.leases
        answer = original(state, session, op, now_ns)
        if isinstance(answer, grants.Grant) and not known:
            lease, worker = session.leases[op.lease_id], session.workers[op.lease_id]
            whole = op.tokens[
                lease.num_settled * worker.block_bytes : len(op.tokens) // worker.block_bytes * worker.block_bytes
            ]
            if whole and lease.account.config.mode is not Mode.DISABLED:
                publication._advance(state, worker, lease, whole, now_ns)
        return answer

    original = grants.acquire
    return [(ops, "acquire", acquire)]


def _inner_nodes_go() -> Patches:
    """Whatever has no pin may be evicted, although something hangs below it."""
    return [(Node, "is_evictable", property(lambda self: bool(self.handles) and not self.guards))]


MUTANTS = (
    Mutant("leader aborts and wakes nobody", "single flight: nobody waits for the dead", _no_wake_on_abort),
    Mutant("flights across domains", "I3: a wait tells of another domain's prompts", _flights_across_domains),
    Mutant("copy source without a pin", "I9: read while it is granted again", _copy_source_without_pin),
    Mutant("operator's pin protects nothing", "I2", _operator_pin_protects_nothing),
    Mutant("invalidation forgets a worker", "what is invalidated is found by nobody", _invalidation_forgets_a_worker),
    Mutant("invalidated subtree stays", "what is invalidated is found by nobody", _subtree_stays),
    Mutant(
        "stale tree takes publications", "LEASED to CACHED only in a living incarnation", _stale_tree_takes_publications
    ),
    Mutant("demotion holds nothing", "both ends of a copy are held", _demotion_holds_nothing),
    Mutant("host blocks granted twice", "I7 in the host tier", _host_blocks_granted_twice),
    Mutant("LRU across tenants", "I14: a guarantee is evicted for another domain", _lru_across_tenants),
    Mutant("cached tokens of everybody", "num_cached_tokens tells of other domains", _unscoped_cached_tokens),
    Mutant("inner nodes are evicted", "I11: a prefix without its beginning", _inner_nodes_go),
    Mutant("early visibility", "I8: findable before anything is written", _early_visibility),
    *(m for m in WHOLE_RUN_MUTANTS if m.name in ("shared root", "double release frees twice", "pins protect nothing")),
)


def _full_disk_believed() -> Patches:
    def copies_done(state: Any, worker: Worker, message: CopiesDone, now_ns: int) -> None:
        original(state, worker, CopiesDone(message.worker_epoch, (*message.order_ids, *message.failed_ids)), now_ns)

    original = tiers.copies_done
    return [(index, "copies_done", copies_done)]


EARLY_PROMOTION = Mutant("promotion published early", "I8: findable before the word", _promotion_published_early)
FAILED_PROMOTION = Mutant("failed promotion published", "I8: findable, never written", _failed_promotion_published)
FULL_DISK = Mutant("full disk believed", "I8: findable, never written", _full_disk_believed)


def killed_by(mutant: Mutant) -> str:
    """What the first seed that notices says; empty when none does.

    The core's own checks are off: clients notice, but for what only the accounts of a domain can show.
    """
    if mutant.name == "LRU across tenants":
        blind = Mutant("seeing", "", list)
    else:
        blind = Mutant("blind", "", lambda: [(index.IndexCore, "check", lambda self: None)])
    with mutant.applied(), blind.applied():
        for seed in SEEDS:
            try:
                play(CacheMachine, seed, steps=STEPS)
            except Exception as error:
                return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=[pytest.mark.wide] if place > 1 else [])
        for place, mutant in enumerate(MUTANTS)
    ],
)
def test_the_machine_notices(mutant: Mutant) -> None:
    assert killed_by(mutant), f"{mutant.breaks}: no seed noticed"


@pytest.mark.parametrize(
    ("mutant", "ask"),
    [
        (EARLY_PROMOTION, test_cache_tiers.test_nothing_of_a_promotion_is_found_before_the_workers_word),
        (FAILED_PROMOTION, test_cache_tiers.test_a_promotion_that_fails_is_computed_instead_in_the_end),
        (EARLY_PROMOTION, test_disk_tier.test_nothing_is_found_on_the_host_before_it_is_loaded),
        (FAILED_PROMOTION, test_disk_tier.test_what_cannot_be_loaded_is_on_the_disk_no_more_and_is_computed),
        (FULL_DISK, test_disk_tier.test_what_the_disk_did_not_take_is_not_found_there),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_promotions_are_asked_for_directly(mutant: Mutant, ask: Callable[[], None]) -> None:
    """Too rare a thing for so few seeds."""
    ask()
    with mutant.applied(), pytest.raises(AssertionError):
        ask()
