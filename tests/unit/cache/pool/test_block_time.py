"""Block time of domains: who is told to have held, borrowed and lent how much, and that nothing is lost of the pool.

`World` compares every statement with a meter that adds up block by block; here are the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coppice.ids import CacheEpoch, DomainId, WorkerId
from coppice.messages.index import Acquire, Candidate, Grant, Publish, Release
from coppice.messages.registration import FenceAck
from coppice_cache.core.base.errors import InvariantBroken
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_cache.core.base.statements import OTHER_DOMAINS, DomainStatement, PoolStatement, total
from coppice_cache.core.index import IndexCore
from coppice_cache.core.pool.block_time import BlockTime, ClosedDomains
from tests.unit.cache.restart import OLD_WORKER, S1, Pool, Restarted, claim, handle
from tests.unit.cache.world import MS, NAMESPACE, V, W, World, lease_id, registration, settings, tokens

A, B, C = DomainId("a"), DomainId("b"), DomainId("c")
BLOCKS = 16


def world_of(*domains: DomainConfig, num_blocks: int = BLOCKS) -> World:
    return World(settings(*domains), num_blocks=num_blocks)


def pool_of(world: World, worker_id: WorkerId = W) -> PoolStatement:
    statement = world.core.statement(world.now_ns)
    return next(found for found in statement.pools if found.worker_id == worker_id)


def domain_of(pool: PoolStatement, domain: DomainId) -> DomainStatement:
    return next((found for found in pool.domains if found.domain == domain), DomainStatement(domain))


def after(world: World, ms: int, change: Callable[[], object] = lambda: None) -> dict[DomainId, dict[str, float]]:
    """Blocks times milliseconds that each domain had more, while so much time passed after `change`."""
    change()
    before = pool_of(world)
    world.now_ns += ms * MS
    now = pool_of(world)
    found: dict[DomainId, dict[str, float]] = {}
    for domain in now.domains:
        was = domain_of(before, domain.domain)
        names = ("leased", "cached", "draining", "guaranteed", "borrowed", "lent", "held")
        more = {name: getattr(domain, f"{name}_block_ns") - getattr(was, f"{name}_block_ns") for name in names}
        found[domain.domain] = {name: value / MS for name, value in more.items() if value}
    return found


def test_a_lease_is_held_then_cached_then_gone() -> None:
    world = world_of()
    assert after(world, 10, lambda: world.granted(1, tokens(9), domain=A))[A] == {
        "leased": 30,
        "held": 30,
        "borrowed": 30,
    }
    assert after(world, 10, lambda: world.publish(1, 0, tokens(8)))[A] == {
        "leased": 10,
        "cached": 20,
        "held": 30,
        "borrowed": 30,
    }
    assert after(world, 10, lambda: world.release(1))[A] == {"cached": 20, "held": 20, "borrowed": 20}
    world.core.invalidate(now_ns=world.now_ns, domain=A)
    world.tick(0)
    assert after(world, 10)[A] == {}
    pool = pool_of(world)
    assert pool.time.pool_block_ns == BLOCKS * pool.elapsed_ns
    assert pool.time.free_block_ns == pool.time.pool_block_ns - domain_of(pool, A).held_block_ns


def test_what_drains_is_held_until_the_fence_is_acknowledged() -> None:
    world = world_of()
    world.granted(1, tokens(9), domain=A)
    world.core.end_client(world.session, world.now_ns)
    world.collect()
    assert after(world, 5)[A] == {"draining": 15, "held": 15, "borrowed": 15}
    world.ack(world.fences()[-1])
    assert after(world, 5)[A] == {}


def test_who_borrows_takes_what_nobody_is_guaranteed_first() -> None:
    """16 blocks, 8 of them guaranteed: of 12 that are borrowed 4 are lent, in proportion to what is idle."""
    world = world_of(
        DomainConfig(A, guarantee_blocks=6), DomainConfig(B, guarantee_blocks=2), DomainConfig(C, maximum_share=1.0)
    )
    assert after(world, 8, lambda: world.granted(1, tokens(8 * 4), domain=C)) == {
        A: {"guaranteed": 48},
        B: {"guaranteed": 16},
        C: {"leased": 64, "held": 64, "borrowed": 64},
    }
    assert after(world, 8, lambda: world.extend(1, 12 * 4)) == {
        A: {"guaranteed": 48, "lent": 24},
        B: {"guaranteed": 16, "lent": 8},
        C: {"leased": 96, "held": 96, "borrowed": 96},
    }
    assert after(world, 8, lambda: world.granted(2, tokens(2 * 4, start=99), domain=B)) == {
        A: {"guaranteed": 48, "lent": 32},  # all that is borrowed beyond the 8 is A's now
        B: {"guaranteed": 16, "leased": 16, "held": 16},
        C: {"leased": 96, "held": 96, "borrowed": 96},
    }
    assert after(world, 8, lambda: world.release(1)) == {
        A: {"guaranteed": 48},
        B: {"guaranteed": 16, "leased": 16, "held": 16},
        C: {},
    }


def test_a_strict_domain_neither_borrows_nor_lends() -> None:
    world = world_of(DomainConfig(A, mode=Mode.STRICT, guarantee_blocks=6), DomainConfig(B))
    world.granted(1, tokens(4 * 4), domain=A)
    world.granted(2, tokens(10 * 4), domain=B)
    assert after(world, 2) == {
        A: {"guaranteed": 12, "leased": 8, "held": 8},
        B: {"leased": 20, "held": 20, "borrowed": 20},
    }


def test_shares_that_change_count_from_then_on() -> None:
    world = world_of(DomainConfig(A, guarantee_blocks=4), DomainConfig(B))
    world.granted(1, tokens(14 * 4), domain=B)
    assert after(world, 1)[A] == {"guaranteed": 4, "lent": 2}

    def change(*domains: DomainConfig) -> Callable[[], None]:
        return lambda: world.core.set_domains(domains, world.now_ns)

    assert after(world, 1, change(DomainConfig(A, guarantee_blocks=8), DomainConfig(B)))[A] == {
        "guaranteed": 8,
        "lent": 6,
    }
    reshared = after(world, 1, change(DomainConfig(A, guarantee_blocks=8), DomainConfig(B, guarantee_blocks=8)))
    assert reshared[A] == {"guaranteed": 8, "lent": 6}
    assert reshared[B] == {"guaranteed": 8, "leased": 14, "held": 14, "borrowed": 6}
    strict = DomainConfig(A, mode=Mode.STRICT, guarantee_blocks=8)
    assert after(world, 1, change(strict, DomainConfig(B)))[A] == {"guaranteed": 8}
    removed = after(world, 1, change(DomainConfig(A, guarantee_blocks=8)))
    assert removed == {A: {"guaranteed": 8, "lent": 6}, B: {"leased": 14, "held": 14, "borrowed": 14}}
    world.core.check()


def test_who_had_to_make_room_for_whom() -> None:
    world = world_of(DomainConfig(A, guarantee_blocks=8), DomainConfig(B))
    world.fill(1, tokens(16 * 4), domain=B)
    world.granted(2, tokens(6 * 4), domain=A)
    world.fill(3, tokens(10 * 4, start=900), domain=B)
    pool = pool_of(world)
    a, b = domain_of(pool, A), domain_of(pool, B)
    assert (a.evicted_blocks, a.displaced_blocks, a.displaced_others_blocks) == (0, 0, 6)
    assert (b.evicted_blocks, b.displaced_blocks, b.displaced_others_blocks) == (16, 6, 0)


def test_a_domain_that_is_forgotten_and_comes_back_goes_on() -> None:
    world = World(settings(domains_per_worker_max=2), num_blocks=BLOCKS)
    world.granted(1, tokens(4), domain=A)
    world.now_ns += 9 * MS
    world.release(1)  # a call takes a millisecond
    for number, domain in enumerate((B, C), 2):
        world.granted(number, tokens(4, start=number), domain=domain)
        world.release(number)
    assert A not in world.core.state.workers[W].quotas.accounts
    assert domain_of(pool_of(world), A).held_block_ns == 10 * MS
    world.granted(4, tokens(4), domain=A)
    world.now_ns += 5 * MS
    assert domain_of(pool_of(world), A).held_block_ns == 15 * MS
    world.release(4)


def test_a_worker_that_dies_goes_into_the_sums() -> None:
    world = world_of(DomainConfig(A, guarantee_blocks=4))
    world.register(registration(V, num_blocks=8))
    world.granted(1, tokens(12), domain=A)
    world.now_ns += 10 * MS
    before = pool_of(world)
    world.core.end_worker(W, world.now_ns)
    world.now_ns += 50 * MS
    world.tick(0)
    statement = world.core.statement(world.now_ns)
    assert [pool.worker_id for pool in statement.pools] == [V]
    (ended,) = statement.ended
    assert (ended.tier, ended.num_epochs, ended.worker_id) == (Tier.DEVICE, 1, "")
    assert ended.time == before.time
    assert domain_of(ended, A) == domain_of(before, A)
    assert domain_of(ended, A).leased_block_ns == 3 * 10 * MS
    (both,) = total((*statement.pools, *statement.ended))
    assert both.num_epochs == 2
    assert both.time.pool_block_ns == before.time.pool_block_ns + 8 * pool_of(world, V).elapsed_ns
    assert both.excess_block_ns == 0


def test_a_new_epoch_of_a_worker_begins_at_nothing() -> None:
    world = world_of()
    world.granted(1, tokens(12), domain=A)
    world.now_ns += 10 * MS
    world.register(registration(num_blocks=BLOCKS))
    pool = pool_of(world)
    assert (pool.elapsed_ns, pool.time.pool_block_ns, domain_of(pool, A).held_block_ns) == (0, 0, 0)
    (ended,) = world.core.statement(world.now_ns).ended
    assert domain_of(ended, A).held_block_ns == 3 * 10 * MS


def test_a_worker_that_is_silent_counts_until_it_is_given_up() -> None:
    world = world_of()
    began_ns = world.now_ns - pool_of(world).elapsed_ns
    world.tick(12_000, workers=False)
    (ended,) = world.core.statement(world.now_ns).ended
    assert ended.time.pool_block_ns % BLOCKS == 0
    lived_ns = ended.time.pool_block_ns // BLOCKS
    assert settings().worker_ttl_ms * MS <= lived_ns <= world.now_ns - began_ns


def test_after_a_restart_nobody_holds_what_nobody_has_claimed() -> None:
    """Neither is it borrowed, nor is the guarantee lent for it."""
    world = Restarted(Pool(), S1, attach=(S1,), domains=(DomainConfig(A, guarantee_blocks=4),))
    assert after(world, 10) == {A: {"guaranteed": 40}}
    assert pool_of(world).time.unclaimed_block_ns == 8 * 10 * MS
    world.claims(S1, claim(1, owned=handle(0, 5) + handle(1, 5), domain=A))
    assert after(world, 10)[A] == {"guaranteed": 40, "leased": 20, "held": 20}
    assert pool_of(world).time.unclaimed_block_ns == (8 * 10 + 6 * 10) * MS
    fence = world.fences()[-1]
    world.core.receive_worker(W, FenceAck(fence.fence_id, fence.worker_epoch, **world.pool.arrays()), world.now_ns)
    world.collect()
    after(world, 10)
    pool = pool_of(world)
    assert pool.time.unclaimed_block_ns == (8 * 10 + 6 * 10) * MS
    assert pool.time.free_block_ns == 6 * 10 * MS
    assert (pool.worker_epoch, pool.elapsed_ns) == (OLD_WORKER, 30 * MS)


def test_another_incarnation_begins_at_nothing() -> None:
    world = world_of()
    world.granted(1, tokens(12), domain=A)
    world.now_ns += MS
    successor = IndexCore(settings(), CacheEpoch(2), world.now_ns)
    successor.dismantle(world.core)
    statement = successor.statement(world.now_ns + 5)
    assert (statement.cache_epoch, statement.elapsed_ns, statement.pools, statement.ended) == (2, 5, (), ())


def test_a_call_that_comes_late_turns_no_time_back() -> None:
    """Threads read the clock before they wait for the core."""
    world = world_of()
    world.granted(1, tokens(12), domain=A)
    late_ns, world.now_ns = world.now_ns, world.now_ns + 10 * MS
    world.core.tick(world.now_ns)
    world.core.invalidate(now_ns=late_ns, domain=B)
    world.core.check()
    found = world.core.statement(late_ns)
    assert domain_of(found.pools[0], A).leased_block_ns == 3 * 10 * MS


def test_domains_that_have_ended_are_kept_by_name_up_to_a_limit() -> None:
    closed = ClosedDomains(domains_max=2)
    for number, domain in enumerate((A, B, C, A, C)):
        closed.add(DomainStatement(domain, leased_block_ns=10**number, lent_block_ns=1, evicted_blocks=1))
    found = closed.by_domain
    assert {domain: one.leased_block_ns for domain, one in found.items()} == {A: 1001, B: 10, OTHER_DOMAINS: 10100}
    assert sum(one.evicted_blocks for one in found.values()) == 5


def test_numbers_of_years_stay_exact() -> None:
    world = world_of(DomainConfig(A, guarantee_blocks=3))
    world.granted(1, tokens(15 * 4), domain=B)
    world.now_ns += 10 * 365 * 24 * 3_600 * 1_000 * MS + 1
    world.extend(1, 16 * 4)
    world.now_ns += 1
    found = pool_of(world)
    assert found.excess_block_ns == 0
    assert found.time.pool_block_ns == BLOCKS * found.elapsed_ns
    lent = domain_of(found, A).lent_block_ns
    assert lent == 2 * (10 * 365 * 24 * 3_600 * 1_000 * MS + 1 + MS) + 3


def test_ops_of_one_millisecond_count_from_its_first() -> None:
    """Until somebody asks nothing was added up, and what came and went meanwhile was never there."""
    world = world_of()
    world.now_ns += MS
    world.core.tick(began_ns := world.now_ns)
    candidates = (Candidate(W, 0),)
    for number, after_ns in enumerate((100, 300_000, 600_000)):
        acquire = Acquire(lease_id(number), A, NAMESPACE, tokens(4, start=number), 4, candidates)
        assert isinstance(world.core.execute(world.session, acquire, began_ns + after_ns), Grant)
    world.core.execute(world.session, Release(lease_id(1)), began_ns + 999_999)
    world.now_ns = began_ns + MS - 1
    assert domain_of(pool_of(world), A).leased_block_ns == 2 * (MS - 1)
    world.core.execute(world.session, Release(lease_id(2)), began_ns + MS + 5)
    world.now_ns = began_ns + MS + 7
    assert domain_of(pool_of(world), A).leased_block_ns == 2 * (MS + 5) + 2
    world.meter.compare()
    world.core.check()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("acquire", "release", "tick", "invalidate", "look")),
            st.sampled_from((A, B, C)),
            st.integers(1, 9),
            st.integers(0, 3 * MS),
        ),
        max_size=40,
    )
)
@hypothesis_settings(max_examples=50, deadline=None)
def test_whatever_happens_and_when_it_sums_up(moves: list[tuple[str, DomainId, int, int]]) -> None:
    """A domain that lends, one that is strict, one that only borrows; ops some nanoseconds to milliseconds apart."""
    world = world_of(DomainConfig(A, guarantee_blocks=5), DomainConfig(B, mode=Mode.STRICT, guarantee_blocks=4))
    core, live = world.core, list[int]()
    for number, (what, domain, count, gap_ns) in enumerate(moves):
        world.now_ns += gap_ns
        if what == "acquire":
            data = tokens(4 * count, start=1_000 * (number % 3))
            op = Acquire(lease_id(number), domain, NAMESPACE, data, len(data) // 4, (Candidate(W, 0),))
            if isinstance(core.execute(world.session, op, world.now_ns), Grant):
                live.append(number)
                core.execute(world.session, Publish(lease_id(number), 0, data), world.now_ns)
        elif what == "release" and live:
            core.execute(world.session, Release(lease_id(live.pop(count % len(live)))), world.now_ns)
        elif what == "tick":
            core.tick(world.now_ns)
        elif what == "invalidate":
            core.invalidate(now_ns=world.now_ns, domain=domain)
        else:
            core.check()
        world.meter.compare(later_ns=gap_ns)
    core.check()


# ---- the audit sees it


def damaged_moment(world: World) -> None:
    world.core.state.workers[W].quotas.accounts[A].time.held_moment += 1


def damaged_free(world: World) -> None:
    world.core.state.workers[W].ledger.block_time.free_moment -= 1


def damaged_guarantee(world: World) -> None:
    world.core.state.workers[W].ledger.block_time.unguaranteed += 1


def damaged_count(world: World) -> None:
    world.core.state.workers[W].quotas.accounts[A].time.cached += 1


def damaged_loan(world: World) -> None:
    world.core.state.workers[W].quotas.accounts[A].time.lent += 1 << 100


@pytest.mark.parametrize(
    "damage",
    [damaged_moment, damaged_free, damaged_guarantee, damaged_count, damaged_loan],
    ids=lambda it: it.__name__,
)
def test_the_audit_sees_each_kind_of_damage(damage: Callable[[World], None]) -> None:
    world = world_of(DomainConfig(A, guarantee_blocks=3))
    world.granted(1, tokens(12), domain=A)
    damage(world)
    with pytest.raises(InvariantBroken, match=r"^I1 broken: .*block time"):
        world.core.check()


def test_the_audit_misses_a_domain_that_took_its_time_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClosedDomains, "add", lambda self, found: None)
    with pytest.raises(InvariantBroken, match="ns above that of the pool"):
        test_a_domain_that_is_forgotten_and_comes_back_goes_on()


def test_the_audit_sees_that_nothing_is_told_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockTime, "settle", lambda self, account: None)
    with pytest.raises(InvariantBroken, match="held, cached, draining, guaranteed, borrowed, idle"):
        test_a_lease_is_held_then_cached_then_gone()
