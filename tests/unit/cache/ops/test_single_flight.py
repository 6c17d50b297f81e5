"""Single flight: nobody computes what a live lease of the same domain is computing."""

from __future__ import annotations

from coppice.ids import DomainId, LeaseId, SchedulerEpoch, WorkerId
from coppice.messages.index import Abandon, Acquire, Answer, Candidate, Grant, OpBatch, Pending, Release, Wake
from coppice_cache.core.base.settings import DomainConfig, Mode
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, registration, settings, tokens

BLOCK = 4
PROMPT = tokens(32)  # eight blocks


def world(*domains: DomainConfig, **changes: int) -> World:
    return World(settings(*domains, flight_tokens_min=8, **changes), num_blocks=64, block_size=BLOCK)


def ask(
    here: World,
    number: int,
    data: bytes = PROMPT,
    *,
    domain: DomainId = ALICE,
    may_wait: bool = True,
    session: SchedulerEpoch | None = None,
    candidates: tuple[Candidate, ...] = (Candidate(W, 0),),
) -> Answer:
    op = Acquire(lease_id(number), domain, NAMESPACE, data, len(data) // 4 + 1, candidates, may_wait=may_wait)
    return here.do(op, session)


def woken(here: World, session: SchedulerEpoch | None = None) -> list[LeaseId]:
    """Leases of all wakes so far, in order."""
    told = here.told(session or here.session)
    return [woken_id for message in told if isinstance(message, Wake) for woken_id in message.lease_ids]


def test_the_second_of_two_equal_prompts_waits_and_holds_nothing() -> None:
    here = world()
    assert isinstance(ask(here, 1), Grant)
    before = here.core.stats()
    answer = ask(here, 2)
    assert isinstance(answer, Pending)
    assert answer.num_tokens == 28, "the last block of the prompt is never matched whole"
    assert answer.retry_after_ms > 0
    assert here.core.stats() == before
    assert ask(here, 2) == answer, "asked again it waits on"


def test_it_is_woken_when_all_that_they_share_is_published() -> None:
    here = world()
    ask(here, 1)
    ask(here, 2, PROMPT[:80] + tokens(12, 900))
    assert here.publish(1, 0, PROMPT[:64]).num_published_blocks == 4  # type: ignore[union-attr]
    assert woken(here) == []
    here.publish(1, 4, PROMPT[64:80])
    assert woken(here) == [lease_id(2)]
    granted = ask(here, 2, PROMPT[:80] + tokens(12, 900))
    assert isinstance(granted, Grant)
    assert granted.num_cached_tokens == 20


def test_a_leader_that_published_half_is_waited_for_from_there() -> None:
    here = world()
    ask(here, 1)
    here.publish(1, 0, PROMPT[:32])
    answer = ask(here, 2)
    assert isinstance(answer, Pending)
    assert answer.num_tokens == 20, "what is published already is no part of the wait"


def test_whoever_may_not_wait_is_granted() -> None:
    here = world()
    ask(here, 1)
    assert isinstance(ask(here, 2, may_wait=False), Grant)


def test_little_is_not_worth_a_wait() -> None:
    here = world()
    ask(here, 1)
    assert isinstance(ask(here, 2, PROMPT[:16] + tokens(12, 900)), Grant)


def test_another_domain_neither_waits_nor_learns() -> None:
    here = world()
    ask(here, 1)
    assert isinstance(ask(here, 2, domain=DomainId("bob")), Grant)


def test_a_disabled_domain_has_no_flights() -> None:
    here = world(DomainConfig(ALICE, mode=Mode.DISABLED))
    ask(here, 1)
    assert isinstance(ask(here, 2), Grant)


def test_when_the_leader_gives_up_one_is_woken_and_leads_the_others() -> None:
    here = world()
    ask(here, 1)
    for number in (2, 3, 4):
        assert isinstance(ask(here, number), Pending)
    here.release(1)
    assert woken(here) == [lease_id(2)]
    assert isinstance(ask(here, 2), Grant)
    here.publish(2, 0, PROMPT[:112])
    assert woken(here) == [lease_id(2), lease_id(3), lease_id(4)]


def test_when_the_next_leader_does_not_come_the_bound_wakes_the_rest() -> None:
    here = world(flight_wait_ms=500)
    ask(here, 1)
    ask(here, 2)
    ask(here, 3)
    here.release(1)
    here.tick(1_000, alive=(here.session,))
    assert woken(here) == [lease_id(2), lease_id(3)]


def test_a_leader_that_stalls_is_waited_for_no_longer_than_the_bound() -> None:
    here = world(flight_wait_ms=500)
    ask(here, 1)
    ask(here, 2)
    here.tick(400, alive=(here.session,))
    assert woken(here) == []
    here.tick(200, alive=(here.session,))
    assert woken(here) == [lease_id(2)]


def test_an_abandoned_leader_wakes_one_at_once() -> None:
    here = world()
    ask(here, 1)
    ask(here, 2)
    here.do(Abandon(lease_id(1)))
    assert woken(here) == [lease_id(2)]


def test_the_end_of_the_leaders_session_wakes_one_of_another() -> None:
    here = world()
    other = here.attach()
    ask(here, 1)
    ask(here, 2, session=other)
    here.core.end_client(here.session, here.now_ns)
    here.collect()
    assert woken(here, other) == [lease_id(2)]


def test_a_waiter_that_is_released_is_never_woken() -> None:
    here = world()
    ask(here, 1)
    ask(here, 2)
    ask(here, 3)
    here.do(Release(lease_id(2)))
    here.release(1)
    assert woken(here) == [lease_id(3)]


def test_a_session_that_ends_takes_its_waiters_along() -> None:
    here = world()
    other = here.attach()
    ask(here, 1)
    ask(here, 2, session=other)
    ask(here, 3)
    here.core.end_client(other, here.now_ns)
    here.release(1)
    assert woken(here) == [lease_id(3)]


def test_equal_lease_ids_of_two_sessions_wait_apart() -> None:
    here = world()
    other = here.attach()
    ask(here, 1)
    assert isinstance(ask(here, 2), Pending)
    assert isinstance(ask(here, 2, session=other), Pending)
    here.publish(1, 0, PROMPT[:112])
    assert woken(here) == [lease_id(2)]
    assert woken(here, other) == [lease_id(2)]


def test_the_wait_is_weighed_against_another_workers_load() -> None:
    here = world()
    here.register(registration(worker_id="v", num_blocks=64, block_size=BLOCK))  # type: ignore[arg-type]
    ask(here, 1, candidates=(Candidate(W, 0),))
    near, far = Candidate(W, 0), Candidate("v", 2)  # type: ignore[arg-type]
    assert isinstance(ask(here, 2, candidates=(near, far)), Pending)
    busy, idle = Candidate(W, 1_000), Candidate("v", 2)  # type: ignore[arg-type]
    answer = ask(here, 3, candidates=(busy, idle))
    assert isinstance(answer, Grant)
    assert answer.worker_id == "v"


def test_to_wait_at_another_worker_from_now_on_does_not_move_the_bound() -> None:
    here = world(flight_wait_ms=500)
    here.register(registration(worker_id="v", num_blocks=64, block_size=BLOCK))  # type: ignore[arg-type]
    near, far = Candidate(W, 0), Candidate("v", 0)  # type: ignore[arg-type]
    ask(here, 1, candidates=(near,))
    ask(here, 2, candidates=(far,))
    assert isinstance(ask(here, 3, candidates=(near,)), Pending)
    here.tick(400, alive=(here.session,))
    assert isinstance(ask(here, 3, candidates=(far,)), Pending)
    here.tick(200, alive=(here.session,))
    assert woken(here) == [lease_id(3)]


def test_a_leader_that_publishes_something_else_leads_nobody() -> None:
    here = world()
    ask(here, 1)
    ask(here, 2)
    here.publish(1, 0, tokens(8, 4_000))
    assert woken(here) == [lease_id(2)]
    assert isinstance(ask(here, 2), Grant)


def test_decoded_tokens_are_nobodys_flight() -> None:
    """What the leader will say is not known, so it cannot be waited for."""
    here = world()
    ask(here, 1)
    here.publish(1, 0, PROMPT)
    assert isinstance(ask(here, 2, PROMPT + tokens(16, 500)), Grant)


def test_woken_and_waiting_again_within_one_batch_is_a_wait_of_its_own() -> None:
    """The wake of the wait that is over is not told, and the next one is not lost."""
    here = world()
    for number in (1, 2, 3):
        ask(here, number)

    def again(number: int) -> Acquire:
        return Acquire(lease_id(number), ALICE, NAMESPACE, PROMPT, 33, (Candidate(W, 0),), may_wait=True)

    here.core.receive_client(here.session, OpBatch((Release(lease_id(1)), again(4), again(2))), here.now_ns)
    here.collect()
    assert woken(here) == []
    here.publish(4, 0, PROMPT[:112])
    assert sorted(woken(here)) == [lease_id(2), lease_id(3)]


def test_asked_again_while_it_waits_it_gets_the_same_answer() -> None:
    """Whatever else was published or began meanwhile; the op is idempotent (I10)."""
    here = world()
    assert isinstance(ask(here, 1, PROMPT[:80]), Grant)
    first = ask(here, 2)
    assert isinstance(first, Pending)
    assert first.num_tokens == 20
    assert isinstance(ask(here, 3, may_wait=False), Grant)  # would bring more
    assert ask(here, 2) == first
    here.publish(1, 0, PROMPT[:32])
    assert ask(here, 2) == first
    here.publish(1, 2, PROMPT[32:80])
    assert woken(here) == [lease_id(2)]
    assert isinstance(ask(here, 2), Grant)


def test_the_answer_of_before_is_not_given_to_another_prompt_or_to_who_will_not_wait() -> None:
    here = world()
    ask(here, 1)
    assert isinstance(ask(here, 2), Pending)
    assert isinstance(ask(here, 2, tokens(32, 5_000)), Grant)
    assert isinstance(ask(here, 3), Pending)
    assert isinstance(ask(here, 3, may_wait=False), Grant)
    assert isinstance(ask(here, 4), Pending)
    assert not isinstance(ask(here, 4, candidates=(Candidate(WorkerId("elsewhere"), 0),)), Pending)


def test_who_asks_again_does_not_wait_on_for_a_leader_whose_tree_was_invalidated() -> None:
    here = world()
    assert isinstance(ask(here, 1), Grant)
    assert isinstance(ask(here, 2), Pending)
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    assert isinstance(ask(here, 3), Grant), "the leader of the new tree"
    assert isinstance(ask(here, 2), Pending)
    here.publish(3, 0, PROMPT)
    assert woken(here) == [lease_id(2)]


def test_who_asks_again_for_no_match_does_not_wait() -> None:
    here = world()
    ask(here, 1)
    assert isinstance(ask(here, 2), Pending)
    candidates = (Candidate(W, 0),)
    op = Acquire(lease_id(2), ALICE, NAMESPACE, PROMPT, 32, candidates, may_wait=True, skip_match=True)
    assert isinstance(here.do(op), Grant)
