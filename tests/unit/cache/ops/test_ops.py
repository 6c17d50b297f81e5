"""Acquire, extend, publish, release: what a client sees of one worker."""

from __future__ import annotations

import pytest

from coppice.handles import block_ids
from coppice.ids import DomainId, LeaseId, Namespace, SchedulerEpoch, WorkerId
from coppice.messages.index import (
    Abandon,
    Acquire,
    AnswerBatch,
    Extend,
    Extended,
    Gone,
    Grant,
    Invalid,
    NoCapacity,
    NoCapacityReason,
    NotPublished,
    NotPublishedReason,
    OpBatch,
    Publish,
    Published,
    Release,
    Released,
)
from coppice.seals import NO_SEAL, chain_key, chain_seals
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.results import Match
from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_cache.core.radix.tree import EDGE_BLOCKS_MAX
from tests.unit.cache.world import ALICE, KEY, NAMESPACE, W, World, lease_id, registration, settings, tokens

BOB = DomainId("bob")


@pytest.mark.parametrize(
    ("block_size", "lengths", "held"),
    [(128, (300, 700, 1100), (3, 6, 9)), (16, (50, 200, 30, 150), (4, 13, 2, 10))],
)
def test_sequences_hold_whole_blocks(block_size: int, lengths: tuple[int, ...], held: tuple[int, ...]) -> None:
    world = World(num_blocks=64, block_size=block_size)
    grants = [world.granted(n, tokens(length, n * 10_000)) for n, length in enumerate(lengths)]
    assert tuple(len(grant.owned) // 8 for grant in grants) == held
    assert world.core.stats().leased_blocks == sum(held)


def test_forks_of_a_published_prompt_hold_its_full_blocks_once() -> None:
    world = World(num_blocks=64)
    prompt = tokens(18)
    world.fill(1, prompt)
    forks = [world.granted(10 + n, prompt) for n in range(5)]
    assert {fork.shared for fork in forks} == {forks[0].shared}
    assert [len(fork.shared) // 8 for fork in forks] == [4] * 5
    stats = world.core.stats()
    assert (stats.cached_blocks, stats.leased_blocks) == (4, 5)


def test_the_last_token_is_never_cached() -> None:
    world = World(num_blocks=16)
    world.fill(1, tokens(16))
    assert world.core.match(ALICE, NAMESPACE, tokens(16), W) == Match(12, 3)
    assert world.core.match(ALICE, NAMESPACE, tokens(17), W) == Match(16, 4)
    grant = world.granted(2, tokens(16))
    assert (grant.num_cached_tokens, len(grant.shared) // 8, len(grant.owned) // 8) == (12, 3, 1)


def test_a_match_changes_nothing() -> None:
    world = World(num_blocks=16)
    world.fill(1, tokens(16))
    before = world.core.tree(ALICE, max_depth=9, limit=99)
    assert world.core.match(ALICE, NAMESPACE, tokens(9), W).num_blocks == 2
    assert world.core.tree(ALICE, max_depth=9, limit=99) == before
    world.granted(2, tokens(9))
    assert len(world.core.tree(ALICE, max_depth=9, limit=99).trees[0].nodes) == 3


def test_unknown_places_match_nothing() -> None:
    world = World(num_blocks=16)
    world.fill(1, tokens(16))
    for domain, namespace, worker in [(BOB, NAMESPACE, W), (ALICE, Namespace(b"x"), W), (ALICE, NAMESPACE, "v")]:
        assert world.core.match(domain, namespace, tokens(17), WorkerId(worker)) == Match(0, 0)


def test_domains_and_namespaces_share_nothing() -> None:
    world = World(num_blocks=32)
    world.fill(1, tokens(16))
    assert world.granted(2, tokens(17), domain=BOB).num_cached_tokens == 0
    assert world.granted(3, tokens(17), namespace=Namespace(b"other")).num_cached_tokens == 0
    assert world.granted(4, tokens(17)).num_cached_tokens == 16


def test_the_same_lease_id_gets_the_same_grant() -> None:
    world = World(num_blocks=16)
    first = world.granted(1, tokens(10))
    world.publish(1, 0, tokens(8))
    assert world.acquire(1, tokens(10)) == first
    assert world.core.stats().leases == 1
    assert isinstance(world.acquire(1, tokens(10), domain=BOB), Invalid)
    assert isinstance(world.acquire(1, tokens(10), namespace=Namespace(b"other")), Invalid)


def test_the_cheapest_candidate_wins_and_ties_go_by_order() -> None:
    world = World(num_blocks=16)
    world.register(registration(WorkerId("v"), num_blocks=16))
    world.fill(1, tokens(8), candidates=(("v", 0),))
    assert world.granted(2, tokens(9), candidates=(("w", 0), ("v", 7))).worker_id == "v"
    assert world.granted(3, tokens(9), candidates=(("w", 0), ("v", 8))).worker_id == "w"
    assert world.granted(4, tokens(9), candidates=(("v", 9), ("w", 0))).worker_id == "w"
    assert world.granted(5, tokens(9, 99), candidates=(("v", 1), ("w", 1))).worker_id == "v"


def test_a_full_candidate_gives_way_to_the_next() -> None:
    world = World(num_blocks=16)
    world.register(registration(WorkerId("v"), num_blocks=16))
    world.granted(1, tokens(64))
    assert world.granted(2, tokens(9), candidates=(("w", 0), ("v", 50))).worker_id == "v"


def test_no_open_candidate() -> None:
    world = World(num_blocks=16)
    answer = world.acquire(1, tokens(9), candidates=(("elsewhere", 0),))
    assert isinstance(answer, NoCapacity)
    assert answer.reason is NoCapacityReason.NO_WORKER
    assert answer.retry_after_ms > 0


def test_publish_answers_own_blocks_and_their_seals() -> None:
    world = World(num_blocks=16)
    grant = world.granted(1, tokens(10))
    answer = world.publish(1, 0, tokens(8))
    seals = chain_seals(chain_key(KEY, ALICE, NAMESPACE), NO_SEAL, tokens(8), 16)
    assert answer == Published(lease_id(1), 2, grant.owned[:16], seals)
    assert world.publish(1, 0, tokens(8)) == answer
    assert world.granted(2, tokens(10)).shared_seals == seals


def test_a_gap_is_invalid_and_so_are_other_tokens_under_a_published_block() -> None:
    world = World(num_blocks=16)
    world.granted(1, tokens(16))
    assert isinstance(world.publish(1, 1, tokens(4, 4)), Invalid)
    world.publish(1, 0, tokens(8))
    assert isinstance(world.publish(1, 3, tokens(4, 12)), Invalid)
    assert isinstance(world.publish(1, 1, tokens(4, 500)), Invalid)
    assert isinstance(world.publish(1, 1, tokens(12, 4) + tokens(4)), Invalid)
    assert isinstance(world.publish(1, 2, tokens(3)), Invalid)
    assert isinstance(world.publish(1, 2, b""), Invalid)
    assert world.core.stats().cached_blocks == 2
    overlapping = world.publish(1, 1, tokens(12, 4))
    assert isinstance(overlapping, Published)
    assert overlapping.num_published_blocks == 4


def test_duplicates_stay_with_the_lease_until_it_ends() -> None:
    world = World(num_blocks=16)
    first, second = world.granted(1, tokens(12)), world.granted(2, tokens(12))
    world.publish(1, 0, tokens(12))
    answer = world.publish(2, 0, tokens(12))
    assert answer == Published(lease_id(2), 3, b"", b"")
    assert world.publish(2, 0, tokens(12)) == answer
    stats = world.core.stats()
    assert (stats.cached_blocks, stats.leased_blocks) == (3, 3)
    world.release(1)
    assert world.core.stats().workers[0].domains[0].pinned_blocks == 3
    world.release(2)
    stats = world.core.stats()
    assert (stats.cached_blocks, stats.leased_blocks, stats.free_blocks) == (3, 0, 13)
    assert world.granted(3, tokens(13)).shared == first.owned != second.owned


def test_a_partial_duplicate_splits_the_edge() -> None:
    world = World(num_blocks=32)
    world.fill(1, tokens(16))
    world.granted(2, tokens(7, 700))
    world.granted(3, tokens(4) + tokens(12, 900))
    answer = world.publish(3, 0, tokens(4) + tokens(12, 900))
    assert isinstance(answer, Published)
    assert len(answer.handles) == 24
    assert world.core.match(ALICE, NAMESPACE, tokens(17), W).num_blocks == 4
    assert world.core.match(ALICE, NAMESPACE, tokens(4) + tokens(13, 900), W).num_blocks == 4


def test_one_block_at_a_time_grows_one_edge() -> None:
    world = World(num_blocks=400)
    world.granted(1, tokens(4), reserve=1_200)
    for block in range(300):
        answer = world.publish(1, block, tokens(4, block * 4))
        assert isinstance(answer, Published)
        assert len(answer.handles) == 8
    nodes = world.core.tree(ALICE, max_depth=99, limit=999).trees[0].nodes
    assert [node.num_blocks for node in nodes] == [0, EDGE_BLOCKS_MAX, 300 - EDGE_BLOCKS_MAX]
    assert [node.num_pins for node in nodes] == [0, 0, 1]
    assert world.core.match(ALICE, NAMESPACE, tokens(1_201), W).num_blocks == 300


def test_an_edge_that_others_are_pinned_to_does_not_grow() -> None:
    world = World(num_blocks=32)
    world.fill(1, tokens(8))
    world.granted(2, tokens(9), reserve=16)
    world.granted(3, tokens(9), reserve=16)
    world.publish(2, 2, tokens(4, 8))
    world.publish(3, 2, tokens(4, 800))
    nodes = world.core.tree(ALICE, max_depth=9, limit=99).trees[0].nodes
    assert sorted((node.num_blocks, node.num_pins) for node in nodes) == [(0, 0), (1, 1), (1, 1), (2, 0)]


def test_extend_is_all_or_nothing_and_repeats_itself() -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(8))
    answer = world.extend(1, 17)
    assert isinstance(answer, Extended)
    assert (answer.first_block, len(answer.owned) // 8) == (2, 3)
    assert world.extend(1, 17) == answer
    assert world.extend(1, 9) == Extended(lease_id(1), 5, b"", b"")
    world.granted(2, tokens(8, 100))
    refused = world.extend(1, 28)
    assert isinstance(refused, NoCapacity)
    assert refused.reason is NoCapacityReason.POOL_FULL
    assert world.core.stats().free_blocks == 1
    never = world.extend(1, 33)
    assert isinstance(never, NoCapacity)
    assert never.reason is NoCapacityReason.NEVER_FITS


def test_a_disabled_domain_leaves_no_trace() -> None:
    config = settings(DomainConfig(ALICE, mode=Mode.DISABLED))
    world = World(config, num_blocks=16)
    world.granted(1, tokens(9))
    assert world.publish(1, 0, tokens(8)) == NotPublished(lease_id(1), NotPublishedReason.DOMAIN_DISABLED)
    assert world.granted(2, tokens(9)).num_cached_tokens == 0
    world.release(1)
    world.release(2)
    assert world.core.stats().free_blocks == 16
    assert world.core.stats().workers[0].trees == 0


def test_finished_leases() -> None:
    world = World(num_blocks=16)
    world.granted(1, tokens(9))
    assert world.release(1) == Released(lease_id(1))
    assert world.release(1) == Released(lease_id(1))
    assert world.do(Abandon(lease_id(1))) == Released(lease_id(1))
    assert world.extend(1, 20) == Gone(lease_id(1))
    assert world.publish(1, 0, tokens(8)) == Gone(lease_id(1))
    assert not world.fences()


def test_a_lease_belongs_to_its_session() -> None:
    world = World(num_blocks=16)
    other = world.attach()
    world.granted(1, tokens(9))
    assert world.do(Release(lease_id(1)), other) == Released(lease_id(1))
    assert world.do(Extend(lease_id(1), 20), other) == Gone(lease_id(1))
    assert world.core.stats().leases == 1
    assert isinstance(world.acquire(1, tokens(9), session=other), Grant)
    assert world.core.stats().leases == 2


def test_an_unknown_session_has_no_leases() -> None:
    world = World(num_blocks=16)
    stranger = SchedulerEpoch(99)
    assert isinstance(world.acquire(1, tokens(9), session=stranger), Invalid)
    assert world.do(Extend(lease_id(1), 9), stranger) == Gone(lease_id(1))
    assert world.do(Publish(lease_id(1), 0, tokens(4)), stranger) == Gone(lease_id(1))
    assert world.do(Release(lease_id(1)), stranger) == Released(lease_id(1))


def test_a_batch_is_answered_in_its_order() -> None:
    world = World(num_blocks=16)
    batch = OpBatch((Release(lease_id(7)), Extend(lease_id(8), 4), Release(lease_id(9))))
    world.core.receive_client(world.session, batch, world.now_ns)
    world.collect()
    answers = (Released(lease_id(7)), Gone(lease_id(8)), Released(lease_id(9)))
    assert world.told(world.session)[-1] == AnswerBatch(world.core.cache_epoch, answers)


LIMITS = settings(
    ops_per_batch_max=2, tokens_max=32, leases_per_session_max=2, candidates_max=2, name_bytes_max=8, sessions_max=1
)


def test_limits_of_an_op() -> None:
    world = World(LIMITS, num_blocks=32)

    def refused(data: bytes = tokens(4), **options: object) -> str:
        answer = world.acquire(1, data, **options)  # type: ignore[arg-type]
        assert isinstance(answer, Invalid), answer
        return answer.message

    assert "packed u32" in refused(b"")
    assert "packed u32" in refused(b"abc", reserve=4)
    assert "below" in refused(tokens(8), reserve=7)
    assert "between 1 and 32" in refused(tokens(4), reserve=33)
    assert "at most 2" in refused(candidates=(("w", 0), ("v", 0), ("u", 0)))
    assert "longer than 8" in refused(domain=DomainId("ninechars"))
    assert "longer than 8" in refused(namespace=Namespace(b"ninechars"))
    assert "negative" in refused(candidates=(("w", -1),))
    assert "unknown domain" in refused(domain=DomainId(""))
    bad = world.do(Release(LeaseId(b"short")))
    assert isinstance(bad, Invalid)
    assert isinstance(world.acquire(1, tokens(32)), Grant)
    assert isinstance(world.extend(1, 33), Invalid)
    assert isinstance(world.extend(1, 0), Invalid)
    assert isinstance(world.publish(1, 0, tokens(36)), Invalid)
    assert isinstance(world.acquire(2, tokens(4)), Grant)
    third = world.acquire(3, tokens(4))
    assert isinstance(third, Invalid)
    assert "maximum of 2 leases" in third.message


def test_limits_of_a_message_and_of_sessions() -> None:
    world = World(LIMITS, num_blocks=32)
    ops = (Release(lease_id(1)),) * 3
    with pytest.raises(MessageRefused, match="at most 2"):
        world.core.receive_client(world.session, OpBatch(ops), world.now_ns)
    world.core.receive_client(world.session, OpBatch(ops[:2]), world.now_ns)
    with pytest.raises(MessageRefused, match="maximum"):
        world.attach()


def test_limit_of_domains_on_a_worker() -> None:
    world = World(settings(domains_per_worker_max=2), num_blocks=32)
    for number, name in enumerate(("a", "b")):
        world.granted(number, tokens(4), domain=DomainId(name))
    assert isinstance(world.acquire(5, tokens(4), domain=DomainId("c")), Invalid)
    world.release(0)
    assert isinstance(world.acquire(5, tokens(4), domain=DomainId("c")), Grant)


def test_unlisted_domains_without_a_default_are_unknown() -> None:
    world = World(settings(DomainConfig(BOB), default_domain=None), num_blocks=16)
    answer = world.acquire(1, tokens(9))
    assert isinstance(answer, NoCapacity), "the tenants file may be about to list it"
    assert isinstance(world.acquire(2, tokens(9), domain=BOB), Grant)


def test_blocks_are_granted_first_in_first_out() -> None:
    world = World(num_blocks=6)
    world.granted(1, tokens(8))
    world.release(1)
    assert list(block_ids(world.granted(2, tokens(24)).owned)) == [2, 3, 4, 5, 0, 1]


def test_an_acquire_without_candidates_has_no_worker() -> None:
    world = World(num_blocks=6)
    answer = world.do(Acquire(lease_id(1), ALICE, NAMESPACE, tokens(4), 4, ()))
    assert isinstance(answer, NoCapacity)
    assert answer.reason is NoCapacityReason.NO_WORKER
