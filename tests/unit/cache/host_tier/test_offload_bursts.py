"""Demotions ahead of bursts, promotions as far as the link brings them in time, and what a worker measured of both."""

from __future__ import annotations

from coppice.handles import HANDLE_BYTES
from coppice.messages.index import Grant, Pending
from coppice.messages.registration import Direction
from tests.unit.cache.host_tier.tier_world import PROMPT, ask, demoted, measured, orders, push_out, world
from tests.unit.cache.world import tokens


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


def test_what_the_link_would_bring_too_late_is_computed() -> None:
    here = demoted()
    measured(here, prefill_ns_per_token=10**9, copy_ns_per_block=400_000_000)
    assert isinstance(ask(here, 10), Pending)
    assert len(orders(here)[-1].src) == 2 * HANDLE_BYTES, "in half of the two seconds that anybody waits"
