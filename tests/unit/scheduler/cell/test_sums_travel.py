"""Planners of a cell hear of each other what their tenants were served and have at work."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.messages.cell import TENANTS_TOLD_MAX, Planners, TenantSums
from coppice_scheduler.core.cell.elsewhere import AT_WORK_LASTS_MS
from coppice_scheduler.core.queue.limits import OWED_MINUTES_MAX
from coppice_scheduler.core.state.settings import TenantLimits
from tests.fakes.scheduler.cell import TICK_NS, Cell


def test_a_planner_that_is_alone_says_and_hears_nothing() -> None:
    cell = Cell("a")
    cell.serve("a", "x", 100)
    cell.tick(3)
    assert (cell["a"].said, cell["a"].heard) == ([], [])
    assert cell["a"].core.next_wakeup_ns() is None


def test_what_is_served_counts_at_the_other_within_a_tick() -> None:
    cell = Cell("a", "b")
    cell.tick()
    cell.serve("a", "x", 100)
    cell.serve("b", "x", 7)
    cell.tick()
    assert cell.num_elsewhere("b", "x") == 100
    assert cell.num_elsewhere("a", "x") == 7
    life = cell["b"].life
    assert life.shares.counter(life.shares.number_of("x")) == 107


def test_it_is_told_at_multiples_of_the_tick_and_only_while_something_changes() -> None:
    cell = Cell("a", "b")
    cell.tick()
    said = cell["a"].said
    assert [message.is_whole for message in said] == [True], "once, so that what comes later is known to be new"
    cell.pass_ms(30)
    cell.serve("a", "x", 100)
    cell.carry()
    assert len(said) == 1
    assert cell["a"].core.next_wakeup_ns() == 2 * TICK_NS
    cell.serve("a", "x", 100)
    cell.tick()
    assert [sums.num_prefill_tokens for sums in said[-1].tenants] == [200]
    cell.tick(5)
    assert len(said) == 2
    assert cell["a"].core.next_wakeup_ns() is None


def test_who_comes_later_counts_from_where_it_came() -> None:
    cell = Cell("a")
    cell.serve("a", "x", 1_000)
    cell.start("b")
    cell.tick()
    assert cell.num_elsewhere("b", "x") == 0
    cell.serve("a", "x", 5)
    cell.serve("a", "y", 6)
    cell.tick()
    assert (cell.num_elsewhere("b", "x"), cell.num_elsewhere("b", "y")) == (5, 6)
    cell.start("c")
    cell.serve("c", "x", 9)
    cell.tick()
    assert cell.num_elsewhere("a", "x") == cell.num_elsewhere("b", "x") - 5 == 9
    assert cell.num_elsewhere("c", "x") == 0


def test_work_in_flight_of_a_planner_that_is_gone_is_gone_and_what_it_served_stays() -> None:
    cell = Cell("a", "b", "c")
    cell.serve("b", "x", 50)
    cell.come("b", "x", 3)
    cell.come("c", "x", 1)
    cell.tick()
    assert cell.num_at_work("a", "x") == 4
    cell.die("b")
    assert (cell.num_at_work("a", "x"), cell.num_elsewhere("a", "x")) == (1, 50)


def test_a_fresh_attachment_counts_nothing_twice() -> None:
    cell = Cell("a", "b")
    cell.tick()
    cell.serve("a", "x", 50)
    cell.tick()
    cell.serve("a", "x", 1)
    for arrives in (True, False):
        cell.lose("a", arrives=arrives)
        cell.serve("a", "x", 10)
        cell.attach("a")
        cell.tick()
    assert cell.num_elsewhere("b", "x") == 71
    cell.lose("b")
    cell.serve("a", "x", 9)
    cell.tick()
    cell.attach("b")
    assert cell.num_elsewhere("b", "x") == 80


def test_a_request_that_ended_unheard_is_not_at_work_after_a_fresh_attachment() -> None:
    cell = Cell("a", "b")
    cell.come("a", "x", 2)
    cell.tick()
    cell.lose("a")
    cell.come("a", "x", -2)
    cell.attach("a")
    cell.tick()
    assert cell.num_at_work("b", "x") == 0


def test_a_restart_of_the_cache_service_counts_nothing_twice_and_loses_nothing() -> None:
    cell = Cell("a", "b", "c")
    cell.tick()
    for name in "abc":
        cell.serve(name, "x", 10)
        cell.come(name, "x")
    cell.tick()
    cell.serve("b", "x", 5)
    cell.restart_cache("c", "a", "b")
    assert cell.num_at_work("a", "x") == 2
    cell.tick()
    assert [cell.num_elsewhere(name, "x") for name in "abc"] == [25, 20, 25]
    assert [cell.num_at_work(name, "x") for name in "abc"] == [2, 2, 2]


def test_another_session_of_the_same_process_begins_where_the_last_one_was_told() -> None:
    cell = Cell("a", "b")
    cell.tick()
    cell.serve("a", "x", 100)
    cell.tick()
    cell.serve("a", "x", 5)
    cell.expire("a")
    cell.serve("a", "x", 1)
    cell.tick()
    assert cell.num_elsewhere("b", "x") == 106


def test_another_session_of_a_process_that_told_nothing_begins_at_nothing() -> None:
    cell = Cell("a")
    cell.serve("a", "x", 100)
    cell.start("b")
    cell.expire("a")
    cell.serve("a", "x", 1)
    cell.tick()
    assert cell.num_elsewhere("b", "x") == 1


def test_without_the_cache_service_what_was_at_work_counts_for_a_while() -> None:
    cell = Cell("a", "b")
    cell.come("b", "x", 3)
    cell.serve("b", "x", 10)
    cell.tick()
    cell.lose("a")
    cell.pass_ms(AT_WORK_LASTS_MS - 1)
    assert cell.num_at_work("a", "x") == 3
    assert cell["a"].core.next_wakeup_ns() == cell.now_ns + 1_000_000
    cell.pass_ms(1)
    assert cell.num_at_work("a", "x") == 0
    cell.attach("a", fresh=False)
    cell.come("b", "x", 1)
    cell.tick()
    assert (cell.num_at_work("a", "x"), cell.num_elsewhere("a", "x")) == (4, 10)


def test_a_planner_that_does_not_come_back_after_a_restart_is_forgotten() -> None:
    cell = Cell("a", "b", "c")
    cell.come("b", "x", 3)
    cell.serve("b", "x", 10)
    cell.tick()
    cell.restart_cache("a", "c")
    assert cell.num_at_work("a", "x") == 3
    cell.pass_ms(AT_WORK_LASTS_MS)
    assert cell.num_at_work("a", "x") == 0
    cell.die("c")
    assert not cell["a"].life.elsewhere._planners
    assert cell.num_elsewhere("a", "x") == 10


def test_a_link_that_is_resumed_brings_back_nobody_who_is_not_listed() -> None:
    cell = Cell("a", "b", "c")
    cell.come("b", "x", 3)
    cell.tick()
    cell.restart_cache("a", "c")
    cell.lose("a")
    cell.attach("a", fresh=False)
    cell.pass_ms(AT_WORK_LASTS_MS)
    assert cell.num_at_work("a", "x") == 0


def test_limits_per_minute_are_those_of_the_cell_and_what_was_too_much_is_paid_back() -> None:
    cell = Cell("a", "b", x=TenantLimits(tokens_per_minute=600, requests_per_minute=2))
    cell.tick()
    cell.serve("a", "x", 600)
    cell.serve("b", "x", 600)
    cell.serve("b", "x", 10)
    cell.tick()
    limits = cell["a"].life.rate_limits
    (left,) = limits.left(cell.now_ns).values()
    assert left.tokens is not None
    assert left.requests is not None
    assert (left.tokens.left, left.requests.left) == (0, 0)
    wait_ms, why = limits.wait_ms("x", 1, cell.now_ns)
    assert why == "600 tokens per minute"
    assert wait_ms == pytest.approx(61_000, abs=200), "610 below zero, one to take, 10 come in a second"
    assert limits.wait_ms("x", 1, cell.now_ns + 60_000_000_000)[0] == pytest.approx(1_000, abs=200)


def test_no_sum_of_others_ends_a_tenants_service_for_long() -> None:
    cell = Cell("a", "b", x=TenantLimits(tokens_per_minute=600))
    cell.tick()
    cell.serve("b", "x", 1 << 40)
    cell.tick()
    wait_ms, _ = cell["a"].life.rate_limits.wait_ms("x", 600, cell.now_ns)
    assert wait_ms <= (OWED_MINUTES_MAX + 1) * 60_000


def test_a_tenant_that_wants_something_elsewhere_wants() -> None:
    """Who comes after an hour in which another was served elsewhere has no claim to as much."""
    cell = Cell("a", "b")
    b = cell["b"].life.shares
    b.enter(b.number_of("x"))
    cell.serve("b", "x", 5_000)
    cell.tick()
    a = cell["a"].life.shares
    a.enter(a.number_of("y"))
    assert a.counter(a.number_of("y")) == 5_000
    b.leave(b.number_of("x"))
    cell.serve("b", "x", 1_000)
    a.leave(a.number_of("y"))
    cell.tick()
    a.enter(a.number_of("z"))
    assert a.counter(a.number_of("z")) == 6_000, "the last one that wanted nothing any more left there"


def test_another_cache_epoch_and_unknown_planners_are_not_heard() -> None:
    cell = Cell("a", "b")
    cell.serve("b", "x", 5)
    cell.tick()
    message = replace(cell["a"].elsewhere[-1], tenants=(TenantSums("x", 50, 0, 0, 0, 0, False),))
    for wrong in (replace(message, cache_epoch=9), replace(message, epoch=77)):
        cell["a"].core.index_message(wrong, cell.now_ns)
    cell["a"].core.index_message(Planners(9, ()), cell.now_ns)  # type: ignore[arg-type]
    assert cell.num_elsewhere("a", "x") == 5
    assert cell["a"].life.elsewhere.is_told


def test_names_have_a_bound() -> None:
    cell = Cell("a", "b")
    for number in range(TENANTS_TOLD_MAX + 2):
        cell["b"].life.shares.charge(cell["b"].life.shares.number_of(f"t{number}"), 1)
    cell.tick()
    assert len(cell["b"].said[-1].tenants) == TENANTS_TOLD_MAX
    assert cell["a"].life.shares.num_tenants == TENANTS_TOLD_MAX
    assert cell.num_elsewhere("a", f"t{TENANTS_TOLD_MAX - 1}") == 1
