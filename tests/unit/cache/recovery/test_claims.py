"""Which claims of schedulers live on after a restart of the cache (design, section 6a, rule 4)."""

from __future__ import annotations

import pytest

from coppice.ids import CacheEpoch, DomainId, LeaseId, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Gone,
    LeaseClaim,
    LeaseDigest,
    LeaseSet,
    NoCapacity,
    NotPublished,
    NotPublishedReason,
    Reattach,
    Reattached,
    Release,
    Released,
    lease_hash,
)
from coppice_cache.core.base.settings import DomainConfig, Mode
from tests.unit.cache.restart import (
    BLOCKS,
    BOB,
    OLD_WORKER,
    S1,
    S2,
    Pool,
    Restarted,
    claim,
    handle,
    ids,
)
from tests.unit.cache.world import World, lease_id, tokens


def test_owned_claims_need_at_least_the_workers_generation() -> None:
    world = Restarted(Pool(), S1, attach=(S1,))
    verdict = world.claims(S1, claim(1, owned=handle(0, 5)), claim(2, owned=handle(1, 6)), claim(3, owned=handle(2, 4)))
    assert verdict == (ids(1, 2), ids(3))
    assert world.core.stats().leased_blocks == 2
    assert world.open().lease_ids == (lease_id(3),)
    stats = world.core.stats()
    assert (stats.leased_blocks, stats.free_blocks) == (2, BLOCKS - 2)


def test_shared_claims_need_equal_generation_and_seal() -> None:
    pool = Pool().seal(0).seal(1).seal(2)
    world = Restarted(pool, S1, attach=(S1,))
    verdict = world.claims(
        S1,
        claim(1, shared=handle(0, 5)),
        claim(2, shared=handle(1, 6)),
        claim(3, shared=handle(1, 4)),
        claim(4, shared=handle(2, 5), seal=b"x" * 16),
        claim(5, shared=handle(3, 5), seal=bytes(16)),
    )
    assert verdict == (ids(1), ids(2, 3, 4, 5))


@pytest.mark.parametrize(
    "bad",
    [
        claim(1, owned=handle(BLOCKS, 5)),
        claim(1, owned=handle(0, 5) * 2),
        claim(1, owned=handle(0, 5) + b"x"),
        claim(1, shared=handle(0, 5), shared_seals=b""),
        claim(1, owned=handle(0, 5), worker_epoch=WorkerEpoch(OLD_WORKER + 1)),
        claim(1, owned=handle(0, 1, epoch=2)),
        claim(1, owned=handle(0, 5), domain=DomainId("")),
        claim(1, owned=handle(0, 5), lease_id=LeaseId(b"short")),
    ],
)
def test_claims_that_are_wrong_in_themselves_are_refused(bad: LeaseClaim) -> None:
    world = Restarted(Pool(), S1, attach=(S1,))
    assert world.claims(S1, bad) == (set(), {bad.lease_id})
    assert world.core.stats().draining_blocks == BLOCKS


def test_the_highest_generation_displaces_the_rest() -> None:
    world = Restarted(Pool().seal(0), S1, S2, attach=(S1, S2))
    assert world.claims(S1, claim(1, shared=handle(0, 5), owned=handle(1, 5))) == (ids(1), set())
    assert world.claims(S2, claim(2, owned=handle(0, 7)))[0] == ids(2)
    assert world.told(S1)[-1] == Reattached(CacheEpoch(2), (), (lease_id(1),))
    assert world.do(Release(lease_id(1)), S1) == Released(lease_id(1))
    assert lease_id(1) in world.open().lease_ids
    stats = world.core.stats()
    assert (stats.leased_blocks, stats.free_blocks, stats.leases) == (1, BLOCKS - 1, 1)


def test_displaced_claims_leave_a_strict_domain_its_share() -> None:
    """What another domain took back is reserved for it again: nobody is told that it is there to borrow."""
    strict = DomainConfig(BOB, Mode.STRICT, guarantee_share=0.5)
    world = Restarted(Pool().seal(0), S1, S2, attach=(S1, S2), domains=(strict,))
    assert world.claims(S1, claim(1, owned=handle(0, 5), domain=BOB))[0] == ids(1)
    assert world.claims(S2, claim(2, owned=handle(0, 7)))[0] == ids(2)
    world.core.check()


def test_a_lower_claim_after_a_higher_one_is_refused() -> None:
    world = Restarted(Pool().seal(0), S1, S2, attach=(S1, S2))
    assert world.claims(S2, claim(2, owned=handle(0, 7)))[0] == ids(2)
    assert world.claims(S1, claim(1, shared=handle(0, 5)), claim(3, owned=handle(0, 6)))[1] == ids(1, 3)


def test_two_leases_never_own_one_block() -> None:
    world = Restarted(Pool().seal(0), S1, attach=(S1,))
    verdict = world.claims(
        S1, claim(1, owned=handle(0, 5)), claim(2, owned=handle(0, 5)), claim(3, shared=handle(0, 5))
    )
    assert verdict == (ids(1, 3), ids(2))


def test_domains_do_not_share_held_blocks() -> None:
    world = Restarted(Pool().seal(0), S1, attach=(S1,))
    one, two = claim(1, shared=handle(0, 5)), claim(2, shared=handle(0, 5), domain=BOB)
    assert world.claims(S1, one, two) == (ids(1), ids(2))


def test_claims_may_come_before_their_worker() -> None:
    world = World(epoch=2)
    world.attach(S1)
    world.core.receive_client(S1, Reattach((claim(1, owned=handle(0, 5)), claim(2, owned=handle(1, 4)))), world.now_ns)
    world.tick(1_000, alive=(S1,))
    assert world.told(S1)[-1] == LeaseDigest(2, lease_hash(lease_id(1)) ^ lease_hash(lease_id(2)))
    assert not [m for m in world.told(S1) if isinstance(m, Reattached)]
    pool = Pool()
    world.register(pool.report(S1))
    verdict = next(m for m in world.told(S1) if isinstance(m, Reattached))
    assert verdict == Reattached(CacheEpoch(2), (lease_id(1),), (lease_id(2),))
    assert world.fences()[-1].lease_ids == (lease_id(2),)


def test_ops_on_claims_whose_worker_is_not_here() -> None:
    world = World(epoch=2)
    world.attach(S1)
    world.session = S1
    held = [claim(n, owned=handle(n, 5)) for n in (1, 2, 3)]
    world.core.receive_client(S1, Reattach(tuple(held)), world.now_ns)
    assert isinstance(world.extend(1, 8), NoCapacity)
    assert isinstance(world.acquire(1, tokens(4)), NoCapacity)
    assert world.publish(1, 0, tokens(4)) == NotPublished(lease_id(1), NotPublishedReason.TREE_GONE)
    assert world.release(1) == Released(lease_id(1))
    world.core.receive_client(S1, LeaseSet((lease_id(3),)), world.now_ns)
    world.collect()
    assert world.extend(2, 8) == Gone(lease_id(2))
    world.register(Pool().report(S1))
    assert set(world.fences()[-1].lease_ids) == ids(1, 2)


def test_claims_are_given_up_when_their_worker_never_comes() -> None:
    world = World(epoch=2)
    world.attach(S1)
    world.core.receive_client(S1, Reattach((claim(1, owned=handle(0, 5)),)), world.now_ns)
    world.tick(19_900, alive=(S1,))
    assert not [m for m in world.told(S1) if isinstance(m, Reattached)]
    world.tick(200, alive=(S1,))
    assert Reattached(CacheEpoch(2), (), (lease_id(1),)) in world.told(S1)
    world.register(Pool().report(S1))
    assert world.fences()[-1].lease_ids == (lease_id(1),)
    world.core.receive_client(S1, Reattach((claim(2, owned=handle(0, 5), worker_id=WorkerId("x")),)), world.now_ns)
    world.collect()
    assert world.told(S1)[-1] == Reattached(CacheEpoch(2), (), (lease_id(2),))


def test_claims_that_come_too_late_for_a_worker_are_named_when_it_comes_after_all() -> None:
    """Its fence spares the session, whose sequences run on there: only the leases' ids end them (seed 732971031)."""
    world = World(epoch=2)
    world.attach(S1)
    world.tick(20_100, alive=(S1,))
    late, elsewhere = claim(1, owned=handle(0, 5)), claim(2, owned=handle(0, 5), worker_id=WorkerId("x"))
    world.core.receive_client(S1, Reattach((late,)), world.now_ns)
    world.collect()
    assert Reattached(CacheEpoch(2), (), (lease_id(1),)) in world.told(S1)
    world.core.receive_client(S1, Reattach((late, elsewhere)), world.now_ns)
    world.collect()
    assert not world.core.state.refused_ids.get(WorkerId("x")), "only a session's first word is remembered"
    world.register(Pool().report(S1))
    assert world.fences()[-1].lease_ids == (lease_id(1),)


def test_a_repeated_reattach_gets_the_same_verdict() -> None:
    world = Restarted(Pool(), S1, S2, attach=(S1,))
    claims = (claim(1, owned=handle(0, 5)), claim(2, owned=handle(1, 4)))
    assert world.claims(S1, *claims) == world.claims(S1, *claims) == (ids(1), ids(2))
    assert world.core.stats().leases == 1


def test_claims_after_the_window_are_refused() -> None:
    world = Restarted(Pool(), S1, attach=(S1,))
    world.claims(S1)
    assert world.claims(S1, claim(1, owned=handle(0, 5))) == (set(), ids(1))
    world.open()
    assert world.claims(S1, claim(2, owned=handle(0, 5))) == (set(), ids(2))
    fresh = world.attach()
    assert world.claims(fresh, claim(3, owned=handle(0, 5))) == (set(), ids(3))
