"""Demotions ahead of bursts, promotions as far as the link brings them in time, and what a worker measured of both."""

from __future__ import annotations

from dataclasses import replace

from coppice.handles import HANDLE_BYTES
from coppice.ids import DomainId
from coppice.messages.index import Grant, Pending
from coppice.messages.registration import Direction
from coppice_cache.core.base.settings import TierCosts
from coppice_cache.core.ops.offload import blocks_ahead
from tests.unit.cache.host_tier.tier_world import (
    PROMPT,
    answer,
    ask,
    demoted,
    host_blocks,
    measured,
    orders,
    push_out,
    world,
)
from tests.unit.cache.world import ALICE, W, tokens


def test_what_a_worker_measured_counts_until_it_says_something_else() -> None:
    here = demoted()
    measured(here, prefill_ns_per_token=1)
    measured(here)
    assert isinstance(ask(here, 10), Grant), "tokens cost next to nothing, and the second word was none"
    here.release(10)
    measured(here, prefill_ns_per_token=100_000)
    push_out(here)
    assert isinstance(ask(here, 11), Pending)


def test_evictions_demote_what_is_next_before_the_next_tick() -> None:
    here = world(num_blocks=12)
    here.fill(1, PROMPT)
    here.fill(2, tokens(16, 500))
    here.fill(3, tokens(16, 900))
    assert orders(here) == [], "nothing was evicted yet"
    here.fill(4, tokens(4, 1_300))
    assert [order.direction for order in orders(here)] == [Direction.DEMOTE] * 2, "as many blocks as half of the pool"


def test_as_much_is_demoted_ahead_as_a_burst_took() -> None:
    here = world(num_blocks=32, host=64, demote_below_share=0.0)
    for number in range(8):
        here.fill(number, tokens(16, 1_000 * number))
    here.tick(100, alive=(here.session,))
    for number in range(8, 12):
        here.fill(number, tokens(16, 1_000 * number))
    assert orders(here) == [], "nobody knew that sixteen blocks would go at once"
    here.tick(100, alive=(here.session,))
    assert sum(len(order.src) for order in orders(here)) == 16 * HANDLE_BYTES


def test_more_is_promoted_at_once_than_may_be_demoted_at_once() -> None:
    here = demoted()
    object.__setattr__(here.core.state.settings, "demote_blocks_max", 1)
    assert isinstance(ask(here, 10), Pending)
    assert len(orders(here)[-1].src) == 4 * HANDLE_BYTES


def test_whoever_would_wait_for_the_copies_of_others_computes() -> None:
    here = demoted()
    host = here.core.state.workers[W].host
    assert host is not None
    assert isinstance(ask(here, 10), Pending)
    assert blocks_ahead(host, ALICE) == 0, "its own"
    assert blocks_ahead(host, DomainId("bob")) == 4
    costs = TierCosts(prefill_us_per_token=100.0, copy_us_per_block=300.0, order_us=0.0)
    assert costs.is_worth_promoting(4, 4, 0)
    assert not costs.is_worth_promoting(4, 4, 4)
    assert costs.takes_us(4, 0) == 1_200.0
    assert costs.takes_us(4, 4) == 2_400.0


def test_half_of_a_pool_at_most_is_held_by_demotions() -> None:
    here = world(num_blocks=16, host=64, demote_below_share=1.0)
    for number in range(4):
        here.fill(number, tokens(16, 1_000 * number))
    here.tick(100, alive=(here.session,))
    host = here.core.state.workers[W].host
    assert host is not None
    assert host.copying(Direction.DEMOTE) == (2, 8)
    for job in tuple(host.jobs.values()):
        answer(here, job.order)
    assert host.copying(Direction.DEMOTE) == (2, 8), "the others follow at once"


def test_a_path_that_is_too_long_at_once_goes_in_parts() -> None:
    here = world(num_blocks=16, host=64, demote_below_share=1.0, demote_blocks_max=3)
    here.fill(1, tokens(32))
    sizes: list[int] = []
    here.tick(100, alive=(here.session,))
    while copies := orders(here)[len(sizes) :]:
        for order in copies:
            sizes.append(len(order.src) // HANDLE_BYTES)
            answer(here, order)
    assert sizes == [3, 3, 2]
    assert host_blocks(here)[2] == 8


def test_what_is_fixed_is_not_measured() -> None:
    costs = TierCosts(is_copy_fixed=True)
    assert costs.measured(7_000, 9_000) == replace(costs, prefill_us_per_token=7.0)


def test_what_the_link_would_bring_too_late_is_computed() -> None:
    here = demoted()
    measured(here, prefill_ns_per_token=10**9, copy_ns_per_block=100_000_000)
    assert isinstance(ask(here, 10), Pending)
    assert len(orders(here)[-1].src) == 2 * HANDLE_BYTES, "in an eighth of the two seconds that anybody waits"


def test_copies_that_were_slow_are_measured_again_once_in_a_while() -> None:
    here = world(num_blocks=16, host=64)
    ordered_at = []
    for number in range(150):  # seconds
        measured(here, copy_ns_per_block=10_000_000)
        before = len(orders(here))
        here.fill(number, tokens(16, 1_000 * number))
        here.tick(1_000, alive=(here.session,))
        ordered_at += [number] * (len(orders(here)) - before)
        for order in orders(here)[before:]:
            answer(here, order)
    first, second = ordered_at
    assert first >= 55
    assert second - first == 60, "once a minute"
    measured(here, copy_ns_per_block=1_000)
    here.tick(1_000, alive=(here.session,))
    assert len(orders(here)) > 3, "all that is next"
