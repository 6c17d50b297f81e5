"""Borrowed blocks come back: who is asked, for how much, what if nobody answers, and for whom they are kept."""

from __future__ import annotations

import pytest

from coppice.ids import DomainId, SchedulerEpoch, WorkerId
from coppice.messages.index import Answer, Grant, LeaseSet, NoCapacity, NoCapacityReason, Reattached, Reclaim, Release
from coppice.messages.registration import Draining
from coppice_cache.core.base.errors import InvariantBroken
from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_cache.core.ops import reclaim
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.pool.reservations import RESERVATIONS_PER_DOMAIN_MAX, Reservations
from tests.unit.cache.world import ALICE, V, W, World, lease_id, registration, settings, tokens

BOB, CAROL, DAN = DomainId("bob"), DomainId("carol"), DomainId("dan")
GRACE_MS = 2_000


class Lending(World):
    """16 blocks. Alice is guaranteed 8 of them; bob and carol have their own sessions and no guarantee."""

    def __init__(self, *configs: DomainConfig, blocks: int = 16) -> None:
        given = configs or (DomainConfig(ALICE, guarantee_blocks=8), DomainConfig(BOB), DomainConfig(CAROL))
        super().__init__(settings(*given, session_ttl_ms=60_000, worker_ttl_ms=60_000), num_blocks=blocks)
        self.bob, self.carol = self.attach(), self.attach()

    def lend(self, number: int, blocks: int, domain: DomainId = BOB) -> Answer:
        session = self.carol if domain == CAROL else self.bob
        return self.acquire(number, tokens(4, number * 1_000), reserve=4 * blocks, domain=domain, session=session)

    def want(self, number: int, blocks: int, domain: DomainId = ALICE) -> Answer:
        return self.acquire(number, tokens(4, number * 1_000), reserve=4 * blocks, domain=domain)

    def give_back(self, number: int) -> None:
        session = next(s for s in self.core.state.sessions.values() if lease_id(number) in s.leases)
        self.do(Release(lease_id(number)), session.epoch)

    def reclaims(self, session: SchedulerEpoch) -> list[tuple[DomainId, int]]:
        return [(m.domain, m.num_blocks) for m in self.told(session) if isinstance(m, Reclaim)]

    def lost(self, session: SchedulerEpoch) -> list[int]:
        told = [m for m in self.told(session) if isinstance(m, Reattached)]
        return [int.from_bytes(refused, "big") for m in told for refused in m.refused]

    def pass_ms(self, ms: int) -> None:
        self.tick(ms, alive=tuple(self.core.state.sessions))

    def drain(self) -> None:
        self.core.receive_worker(W, Draining(self.core.state.workers[W].epoch), self.now_ns)
        self.collect()

    def ack_all(self) -> None:
        for pending in tuple(self.core.state.workers[W].fences.values()):
            self.ack(pending.message)


def refused(answer: Answer) -> NoCapacity:
    assert isinstance(answer, NoCapacity), answer
    assert answer.reason is NoCapacityReason.POOL_FULL
    return answer


@pytest.fixture
def lent() -> Lending:
    """Bob has borrowed everything, in four leases."""
    world = Lending()
    for number in range(1, 5):
        assert isinstance(world.lend(number, 4), Grant)
    return world


# --- asking


def test_the_borrower_is_asked_for_what_is_lacking_and_only_once(lent: Lending) -> None:
    answer = refused(lent.want(10, 6))
    assert lent.reclaims(lent.bob) == [(BOB, 6)]
    assert answer.retry_after_ms < GRACE_MS, "it comes within the grace period"
    refused(lent.want(10, 6))
    lent.pass_ms(500)
    assert lent.reclaims(lent.bob) == [(BOB, 6)]
    assert not lent.reclaims(lent.session)


def test_what_is_there_is_not_asked_for(lent: Lending) -> None:
    lent.give_back(4)
    refused(lent.want(10, 6))
    assert lent.reclaims(lent.bob) == [(BOB, 2)]


def test_more_than_the_guarantee_is_nobodys_right(lent: Lending) -> None:
    refused(lent.want(10, 9))
    refused(lent.want(11, 1, CAROL))
    assert not lent.reclaims(lent.bob)


def test_a_second_need_asks_for_the_rest_and_names_the_whole(lent: Lending) -> None:
    refused(lent.want(10, 3))
    refused(lent.want(11, 3))
    refused(lent.want(12, 3))
    assert lent.reclaims(lent.bob) == [(BOB, 3), (BOB, 6), (BOB, 8)], "up to the guarantee"


def test_what_drains_already_is_credit(lent: Lending) -> None:
    lent.core.end_client(lent.bob, lent.now_ns)
    lent.collect()
    refused(lent.want(10, 6))
    assert not lent.reclaims(lent.bob)
    lent.ack_all()
    assert isinstance(lent.want(10, 6), Grant)


def test_the_domain_furthest_over_is_asked_first_and_each_session_for_its_part() -> None:
    world = Lending(DomainConfig(ALICE, guarantee_blocks=8), DomainConfig(BOB, guarantee_blocks=4), blocks=24)
    for number in (1, 2, 3):
        world.lend(number, 4)  # 8 over
    world.lend(4, 2, CAROL)
    world.lend(5, 10, CAROL)  # 12 over
    refused(world.want(10, 3))
    assert (world.reclaims(world.bob), world.reclaims(world.carol)) == ([], [(CAROL, 3)])
    refused(world.want(11, 5))
    assert world.reclaims(world.carol) == [(CAROL, 3), (CAROL, 8)]


def test_the_latest_leases_decide_which_session_is_asked() -> None:
    world = Lending()
    world.lend(1, 8)
    other = world.attach()
    world.acquire(2, tokens(4, 50), reserve=32, domain=BOB, session=other)
    refused(world.want(10, 6))
    assert (world.reclaims(world.bob), world.reclaims(other)) == ([], [(BOB, 6)])
    refused(world.want(11, 2))
    assert (world.reclaims(world.bob), world.reclaims(other)) == ([], [(BOB, 6), (BOB, 8)])


def test_who_is_within_a_guarantee_is_not_asked() -> None:
    world = Lending(DomainConfig(ALICE, guarantee_blocks=8), DomainConfig(BOB, guarantee_blocks=8))
    world.lend(1, 8)
    world.lend(2, 2, CAROL)
    assert isinstance(world.lend(3, 5, CAROL), Grant)
    refused(world.want(10, 8))
    assert (world.reclaims(world.bob), world.reclaims(world.carol)) == ([], [(CAROL, 7)])


def test_the_check_sees_a_reclaim_that_takes_from_a_guarantee(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: whoever has leased the least over its guarantee is asked, and what is leased counts as borrowed."""
    monkeypatch.setattr(Account, "firm", property(lambda account: account.leased))
    monkeypatch.setattr(
        reclaim, "_divide", lambda worker, lenders, short: [(min(lenders, key=lambda account: account.over), short)]
    )
    world = Lending(DomainConfig(ALICE, guarantee_blocks=8), DomainConfig(BOB, guarantee_blocks=8))
    world.lend(1, 8)
    world.lend(2, 7, CAROL)
    with pytest.raises(InvariantBroken, match="I14"):
        world.want(10, 4)


def test_an_extension_within_the_guarantee_is_a_need_too(lent: Lending) -> None:
    lent.give_back(4)
    assert isinstance(lent.want(10, 4), Grant)
    refused(lent.extend(10, 24))
    assert lent.reclaims(lent.bob) == [(BOB, 2)]
    lent.give_back(3)
    refused(lent.lend(5, 4))
    assert not isinstance(lent.extend(10, 24), NoCapacity)
    assert not lent.core.state.owed


def test_cached_blocks_of_its_own_are_evicted_before_others_are_asked() -> None:
    world = Lending()
    world.fill(1, tokens(32))
    for number in (2, 3):
        world.lend(number, 4)
    assert isinstance(world.want(10, 8), Grant)
    assert not world.reclaims(world.bob)


# --- what comes back


def test_what_comes_back_is_kept_for_the_one_that_waits(lent: Lending) -> None:
    refused(lent.want(10, 6))
    lent.give_back(4)
    refused(lent.lend(5, 4))
    refused(lent.lend(6, 1, CAROL))
    lent.give_back(3)
    assert isinstance(lent.lend(6, 2, CAROL), Grant), "what is more than it needs is anybody's"
    assert isinstance(lent.want(10, 6), Grant)
    assert not lent.core.state.owed


def test_without_the_reservation_it_would_starve(lent: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, "promised", lambda self, account, key: 0)
    for number in range(4, 14):
        refused(lent.want(100, 6))
        lent.give_back(number)
        assert isinstance(lent.lend(number + 1, 4), Grant), "taken away again, every time"


def test_needs_are_met_in_the_order_in_which_they_were_refused() -> None:
    world = Lending(DomainConfig(ALICE, guarantee_blocks=6), DomainConfig(DAN, guarantee_blocks=6))
    for number in range(1, 5):
        world.lend(number, 4)
    refused(world.want(10, 5))
    refused(world.want(11, 5, DAN))
    world.give_back(4)
    world.give_back(3)
    refused(world.want(11, 5, DAN))
    assert isinstance(world.want(10, 5), Grant)
    refused(world.want(11, 5, DAN))
    world.give_back(2)
    assert isinstance(world.want(11, 5, DAN), Grant)


def test_a_domain_may_recycle_its_own_while_others_wait(lent: Lending) -> None:
    """What only itself may evict is not kept from it."""
    world = Lending(DomainConfig(ALICE, guarantee_blocks=8), DomainConfig(BOB, guarantee_blocks=4))
    world.fill(1, tokens(16), domain=BOB)
    for number in (2, 3, 4):
        world.lend(number, 4, CAROL)
    refused(world.want(10, 4))
    assert isinstance(world.lend(5, 4), Grant)
    refused(world.lend(6, 1))


def test_the_reservation_ends_with_the_need(lent: Lending) -> None:
    refused(lent.want(10, 6))
    lent.give_back(4)
    refused(lent.lend(5, 4))
    lent.release(10)
    assert isinstance(lent.lend(5, 4), Grant)


def test_a_need_that_nobody_asks_for_any_more_is_forgotten_and_nobody_is_fenced(lent: Lending) -> None:
    refused(lent.want(10, 6))
    lent.give_back(4)
    lent.pass_ms(GRACE_MS + 1_100)
    assert isinstance(lent.lend(5, 4), Grant)
    assert not lent.fences()
    assert not lent.core.state.owed


def test_who_has_no_place_in_line_any_more_leaves_nothing_behind(lent: Lending) -> None:
    for number in range(100, 100 + RESERVATIONS_PER_DOMAIN_MAX + 5):
        refused(lent.want(number, 6))
    assert len(lent.core.state.owed) == RESERVATIONS_PER_DOMAIN_MAX
    lent.pass_ms(GRACE_MS + 1_100)
    assert not lent.core.state.owed


def test_the_end_of_a_session_or_a_worker_ends_its_needs(lent: Lending) -> None:
    refused(lent.want(10, 6))
    lent.core.end_client(lent.session, lent.now_ns)
    lent.collect()
    assert not lent.core.state.owed
    lent.session = lent.attach()
    refused(lent.want(10, 6))
    lent.core.end_worker(W, lent.now_ns)
    lent.collect()
    assert not lent.core.state.owed


def test_where_a_worker_drains_nothing_is_kept_or_taken_back_for_who_would_get_no_lease_there(lent: Lending) -> None:
    lent.register(registration(V))
    refused(lent.want(10, 6))
    assert lent.reclaims(lent.bob) == [(BOB, 6)]
    lent.drain()
    assert not lent.core.state.owed
    assert not lent.core.state.workers[W].reservations.waiting
    assert lent.granted(10, tokens(4), reserve=24, candidates=(("w", 0), ("v", 9))).worker_id == V
    lent.pass_ms(GRACE_MS // 2)
    assert lent.reclaims(lent.bob) == [(BOB, 6)], "not said again"
    lent.pass_ms(GRACE_MS)
    assert not lent.fences()


def test_where_a_worker_drains_blocks_are_kept_for_what_runs_there(lent: Lending) -> None:
    lent.give_back(4)
    assert isinstance(lent.want(10, 4), Grant)
    refused(lent.extend(10, 24))
    refused(lent.want(11, 2))
    lent.drain()
    assert lent.core.state.owed.keys() == {(lent.session, lease_id(10))}
    lent.give_back(3)
    assert not isinstance(lent.extend(10, 24), NoCapacity)


@pytest.mark.parametrize("way", ["taken away", "not known to its session"])
def test_a_lease_that_is_over_needs_nothing_any_more(lent: Lending, way: str) -> None:
    lent.give_back(4)
    assert isinstance(lent.want(10, 4), Grant)
    refused(lent.extend(10, 24))
    state = lent.core.state
    if way == "taken away":
        reclaim.take_away(state, state.workers[W], state.sessions[lent.session].leases[lease_id(10)])
        lent.core.tick(lent.now_ns)
    else:
        lent.core.receive_client(lent.session, LeaseSet(()), lent.now_ns)
    lent.collect()
    assert not state.owed


def test_a_request_for_several_workers_waits_at_one_of_them() -> None:
    world = Lending()
    world.register(registration(WorkerId("v")))
    for number, worker in ((1, "w"), (2, "v")):
        world.acquire(
            number, tokens(4, number * 99), reserve=64, domain=BOB, candidates=((worker, 0),), session=world.bob
        )
    for loads in ((0, 5), (5, 0)):
        refused(world.acquire(10, tokens(4), reserve=16, candidates=(("w", loads[0]), ("v", loads[1]))))
        assert world.reclaims(world.bob) == [(BOB, 4)]
    assert {worker.worker_id for worker in world.core.state.owed.values()} == {"w"}
    refused(world.acquire(10, tokens(4), reserve=16, candidates=(("v", 0),)))
    assert {worker.worker_id for worker in world.core.state.owed.values()} == {"v"}
    assert not world.core.state.workers[W].reservations.waiting


# --- who does not answer


def keep_asking(world: Lending, ms: int, blocks: int = 6) -> None:
    for _ in range(ms // 250):
        refused(world.want(10, blocks))
        world.pass_ms(250)


def test_half_way_it_is_said_again_and_at_the_end_the_latest_are_fenced(lent: Lending) -> None:
    keep_asking(lent, GRACE_MS // 2 - 250)
    assert lent.reclaims(lent.bob) == [(BOB, 6)]
    lent.give_back(4)
    keep_asking(lent, 500)
    assert lent.reclaims(lent.bob) == [(BOB, 6), (BOB, 2)], "what is left of it"
    assert not lent.fences()
    keep_asking(lent, GRACE_MS // 2)
    assert lent.lost(lent.bob) == [3]
    assert [fence.lease_ids for fence in lent.fences()] == [(lease_id(3),)]
    refused(lent.want(10, 6))
    lent.ack_all()
    assert isinstance(lent.want(10, 6), Grant)
    assert lent.core.state.sessions[lent.bob].leases.keys() == {lease_id(1), lease_id(2)}


def test_no_more_is_fenced_than_is_lacking_by_then(lent: Lending) -> None:
    keep_asking(lent, GRACE_MS - 250)
    lent.give_back(1)
    lent.give_back(2)
    lent.pass_ms(1_000)
    assert not lent.lost(lent.bob)
    assert isinstance(lent.want(10, 6), Grant)


def test_our_own_pause_is_not_counted_against_the_borrower(lent: Lending) -> None:
    refused(lent.want(10, 6))
    lent.now_ns += 60_000 * 1_000_000
    lent.core.tick(lent.now_ns)
    lent.collect()
    assert not lent.lost(lent.bob)
    assert lent.core.state.owed


# --- strict domains


def test_a_fixed_share_is_neither_asked_for_nor_kept_back() -> None:
    world = Lending(
        DomainConfig(ALICE, guarantee_blocks=8), DomainConfig(DAN, mode=Mode.STRICT, guarantee_blocks=4), blocks=16
    )
    world.want(1, 4, DAN)
    world.lend(2, 12)
    refused(world.want(10, 8))
    assert world.reclaims(world.bob) == [(BOB, 8)]
    assert not world.reclaims(world.session)
    world.release(1)
    refused(world.want(10, 8))
    assert isinstance(world.want(3, 4, DAN), Grant), "others' needs are nothing to it"


def test_what_is_beyond_a_guarantee_by_now_takes_nothing_that_is_kept_for_another() -> None:
    """Two ops of a domain were refused, each within its guarantee. When one is granted, the other would borrow."""
    guaranteed = DomainConfig(ALICE, guarantee_blocks=3), DomainConfig(CAROL, guarantee_blocks=5)
    world = Lending(*guaranteed, DomainConfig(BOB), blocks=10)
    for answer in (world.want(1, 1), world.lend(2, 4, CAROL), world.lend(3, 3), world.lend(4, 2)):
        assert isinstance(answer, Grant)
    for answer in (world.want(5, 2), world.want(6, 1), world.lend(7, 1, CAROL)):
        refused(answer)
    world.give_back(3)
    assert isinstance(world.want(6, 1), Grant)
    refused(world.want(5, 2))
    assert isinstance(world.lend(7, 1, CAROL), Grant)
