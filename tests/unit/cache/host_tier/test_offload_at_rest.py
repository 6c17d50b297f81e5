"""The host tier where nobody asks any more, and promotions that bring nothing."""

from __future__ import annotations

from coppice.messages.index import Grant, NoCapacity, NoCapacityReason, Pending
from coppice.seals import chain_key
from tests.unit.cache.host_tier.tier_world import PROMPT, answer, ask, demoted, orders, world
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, tokens


def rest(here: World, ticks: int, *, before: int | None = None) -> int:
    """Orders that went out in so many ticks, each done before the next; all since `before` of them had gone out."""
    host = here.core.state.workers[W].host
    assert host is not None
    before = len(orders(here)) if before is None else before
    for _ in range(ticks):
        here.tick(100, alive=(here.session,))
        for job in tuple(host.jobs.values()):
            answer(here, job.order)
    return len(orders(here)) - before


def test_a_host_tier_that_holds_less_than_the_victims_comes_to_rest() -> None:
    here = world(num_blocks=16, host=4, demote_below_share=1.0)
    for number in range(4):
        here.fill(number, tokens(16, 1_000 * number))
    assert rest(here, 10) == 4, "each prompt was copied once"
    assert rest(here, 50) == 0


def test_what_was_used_since_it_was_copied_is_copied_again() -> None:
    here = world(num_blocks=16, host=4, demote_below_share=1.0)
    for number in range(4):
        here.fill(number, tokens(16, 1_000 * number))
    rest(here, 10)
    before = len(orders(here))
    here.fill(9, tokens(16))
    here.fill(10, tokens(16, 1_000))
    assert 1 <= rest(here, 10, before=before) <= 2, "the host had dropped it for another"


def test_nobody_waits_for_a_promotion_whose_source_was_invalidated() -> None:
    """What it brings is dropped: whoever waited would sleep in vain."""
    here = demoted()
    assert isinstance(ask(here, 10), Pending)
    promotion = orders(here)[-1]
    here.core.invalidate(domain=ALICE, namespace=NAMESPACE, tokens=PROMPT[:16], now_ns=here.now_ns)
    assert isinstance(ask(here, 11, PROMPT[:8] + tokens(1, 77)), Grant)
    assert not isinstance(ask(here, 10), Pending), "asked again it waits no longer"
    answer(here, promotion)
    assert isinstance(ask(here, 10), Grant)


def test_nobody_waits_for_a_promotion_of_an_invalidated_domain() -> None:
    here = demoted()
    assert isinstance(ask(here, 10), Pending)
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    assert isinstance(ask(here, 11, PROMPT[:12]), Grant)


def test_a_pool_that_a_promotion_fills_is_full_for_a_while_and_not_for_ever() -> None:
    here = demoted()
    ask(here, 10)
    promotion = orders(here)[-1]
    asked = ask(here, 11, tokens(24, 7_000))
    assert isinstance(asked, NoCapacity)
    assert asked.reason is NoCapacityReason.POOL_FULL
    answer(here, promotion)
    assert isinstance(ask(here, 11, tokens(24, 7_000)), Grant)


def test_a_demotion_that_failed_is_tried_again() -> None:
    here = world(num_blocks=16, host=16, demote_below_share=1.0)
    here.fill(1, tokens(16))
    here.tick(100, alive=(here.session,))
    (order,) = orders(here)
    answer(here, order, failed=True)
    assert rest(here, 10) == 1


def test_what_is_left_of_prefixes_that_were_invalidated_one_in_the_other_is_not_demoted() -> None:
    """The outer one may be taken apart first; what hung below it has lost its tree then, and is a victim still."""
    for first, second in ((4, 8), (8, 4)):
        here = world(num_blocks=16, host=8, demote_below_share=1.0, nodes_dismantled_per_tick=1)
        for number, end in enumerate((4, 8, 16), start=1):
            here.fill(number, tokens(end))
        for end in (first, second):
            here.core.invalidate(domain=ALICE, namespace=NAMESPACE, tokens=tokens(end), now_ns=here.now_ns)
        assert rest(here, 6) == 0


def test_a_tree_that_is_new_on_the_device_has_the_chain_key_of_the_host_tier() -> None:
    """It may be that of an earlier seal key; what is copied keeps its seals."""
    here = demoted()
    worker = here.core.state.workers[W]
    assert worker.host is not None
    there = worker.host.store.trees[ALICE, NAMESPACE]
    there.chain_key = chain_key(b"an earlier seal key", ALICE, NAMESPACE)
    assert here.core.state.chain_key_at(worker, ALICE, NAMESPACE) == there.chain_key
