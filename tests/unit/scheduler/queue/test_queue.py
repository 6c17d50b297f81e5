"""Who may come in, who asks for memory, and who waits for whom."""

from __future__ import annotations

import pytest

from coppice.ids import DomainId
from coppice.messages.index import Acquire, NoCapacityReason, Release
from coppice_scheduler.core.state.request import Finish, OutputErrorCode, RefusedReason
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits
from tests.fakes.scheduler.scheduler_bench import Bench
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_world import World

POOL_FULL = NoCapacityReason.POOL_FULL
DOMAIN_MAXIMUM = NoCapacityReason.DOMAIN_MAXIMUM


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


MANY = TenantLimits(2000, 2000)


def asked(bench: Bench) -> list[str]:
    """Requests with an Acquire on its way, by the length of their prompts."""
    return [str(len(op.tokens) // 4) for op in bench.ops(Acquire) if isinstance(op, Acquire)]


@pytest.mark.parametrize(
    ("fields", "num_tokens", "max_new", "reason"),
    [
        ({}, 0, 1, RefusedReason.EMPTY),
        ({}, 1, 0, RefusedReason.EMPTY),
        ({"max_context": 8}, 8, 1, RefusedReason.TOO_LONG),
        ({}, 64 * 4 + 1, 1, RefusedReason.NEVER_FITS),
        ({"max_queued_tokens": 9}, 10, 1, RefusedReason.QUEUE_FULL),
        ({"default_limits": TenantLimits(1, 0)}, 1, 1, RefusedReason.TENANT_QUEUE),
        ({"tenants": {"t": TenantLimits(0, 5)}}, 1, 1, RefusedReason.TENANT_CONCURRENCY),
    ],
)
def test_what_cannot_come_in(fields: dict[str, object], num_tokens: int, max_new: int, reason: RefusedReason) -> None:
    bench = Bench(settings(**fields))
    refused = bench.submit("r", num_tokens, max_new)
    assert refused is not None
    assert refused.reason is reason
    assert bench.core.is_idle()


def test_limits_hold_at_their_edge_and_pass_when_something_ends() -> None:
    bench = Bench(settings(max_queued=2, max_running=1, default_limits=TenantLimits(3, 3)))
    assert bench.submit("a", 2) is None
    bench.answer()
    assert bench.submit("b", 2) is None
    assert bench.submit("c", 2) is None
    refused = bench.submit("e", 2, tenant="other")
    assert refused is not None
    assert refused.reason is RefusedReason.QUEUE_FULL
    assert refused.retry_after_ms > 0
    refused = bench.submit("e", 2)
    assert refused is not None
    assert refused.reason is RefusedReason.TENANT_CONCURRENCY
    bench.cancel("b")
    assert bench.submit("e", 2) is None
    assert bench.core.stats().tenants["t"].running == 1
    assert bench.core.stats().waiting == 2


def test_a_burst_on_an_idle_worker_is_not_a_queue() -> None:
    """`max_queued` bounds those that found no place, not those that nobody has looked at yet."""
    bench = Bench(settings(max_running=2, default_limits=TenantLimits(5, 1)))
    for name in "abc":
        assert bench.submit(name, 2) is None
    bench.answer()
    assert bench.core.stats().tenants["t"].running == 2
    refused = bench.submit("d", 2)
    assert refused is not None
    assert refused.reason is RefusedReason.TENANT_QUEUE


def test_a_draining_scheduler_takes_nothing_and_finishes_what_it_has() -> None:
    bench = Bench()
    bench.submit("a", 2, max_new=1)
    bench.core.drain()
    refused = bench.submit("b", 2)
    assert refused is not None
    assert refused.reason is RefusedReason.DRAINING
    bench.settle()
    bench.result({1: 1})
    bench.result()
    bench.settle()
    assert bench.last("a").finish is Finish.LENGTH
    assert bench.core.is_idle()


def test_running_places_bound_what_is_asked() -> None:
    bench = Bench(settings(max_running=2))
    for length in (1, 2, 3):
        bench.submit(f"r{length}", length)
    assert asked(bench) == ["1", "2"]


def test_requests_that_wait_together_are_asked_in_one_batch_spread_over_loads() -> None:
    world = World(settings(), FakeIndex(4))
    world.add_worker("a", 64)
    world.add_worker("b", 64)
    world.run()
    for name in "xyz":
        world.submit(name, [1, 2, 3], 2)
    world.attach_index()
    world.run(until_ms=1)
    (batch,) = [ops for message in world.sent_ops if (ops := getattr(message, "ops", ())) and len(ops) == 3]
    loads = [{c.worker_id: c.load_cost for c in op.candidates} for op in batch]
    assert loads == [{"a": 0, "b": 0}, {"a": 3, "b": 0}, {"a": 3, "b": 3}]
    world.run()
    assert world.core.is_idle()


def test_lower_priority_values_go_first() -> None:
    bench = Bench(settings(max_running=1))
    bench.submit("1", 1)
    bench.submit("2", 2)
    bench.submit("3", 3, priority=-1)
    bench.answer()
    bench.cancel("1")
    assert asked(bench) == ["3"]


def test_a_full_pool_stops_the_line_until_something_is_released() -> None:
    bench = Bench()
    bench.submit("a", 9)
    bench.answer()
    bench.submit("b", 2)
    bench.answer_with(*(bench.no(op, POOL_FULL) for op in bench.batches[0]))
    bench.submit("c", 3)
    assert asked(bench) == [], "nobody overtakes the one that was refused"
    bench.cancel("a")
    bench.result({1: 1})
    bench.result({1: 1})
    bench.result()
    assert asked(bench) == ["2"], "the release lets the head ask, and only the head"
    bench.answer()
    bench.settle()
    assert bench.core.stats().running == 2


def test_a_full_pool_is_asked_again_after_the_time_that_it_named() -> None:
    bench = Bench()
    bench.submit("a", 2)
    bench.answer_with(bench.no(bench.batches[0][0], POOL_FULL, retry_after_ms=30))
    assert bench.core.next_wakeup_ns() == 30_000_000
    bench.advance(29)
    assert asked(bench) == []
    bench.advance(1)
    assert asked(bench) == ["2"]


def test_a_domain_at_its_maximum_does_not_stop_the_others() -> None:
    bench = Bench()
    bench.submit("a", 2, domain="x")
    bench.answer_with(bench.no(bench.batches[0][0], DOMAIN_MAXIMUM))
    bench.submit("b", 3, domain="x")
    bench.submit("c", 4, domain="y")
    assert asked(bench) == ["4"]
    bench.answer()
    bench.advance(50)
    assert asked(bench) == ["2"], "one at a time while the domain is full"


def test_never_fits_ends_the_request() -> None:
    bench = Bench()
    bench.submit("a", 2)
    bench.answer_with(bench.no(bench.batches[0][0], NoCapacityReason.NEVER_FITS))
    error = bench.last("a").error
    assert error is not None
    assert error.code is OutputErrorCode.NEVER_FITS


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (POOL_FULL, OutputErrorCode.QUEUE_TIMEOUT),
        (DOMAIN_MAXIMUM, OutputErrorCode.TENANT_MAXIMUM),
        (NoCapacityReason.DOMAIN_UNKNOWN, OutputErrorCode.TENANT_NOT_READY),
    ],
)
def test_waiting_has_an_end(reason: NoCapacityReason, code: OutputErrorCode) -> None:
    bench = Bench(settings(queue_timeout_ms=100))
    bench.submit("a", 2)
    bench.answer_with(bench.no(bench.batches[0][0], reason, retry_after_ms=1000))
    assert bench.core.next_wakeup_ns() == 100_000_000
    bench.advance(99)
    assert not bench.outputs
    bench.advance(1)
    error = bench.last("a").error
    assert error is not None
    assert (error.code, error.retry_after_ms) == (code, 100)
    assert bench.ops(Release), "the cache service may remember that it asked"
    bench.settle()
    assert bench.core.is_idle()


def test_waiting_for_an_answer_has_an_end_too_and_its_lease_is_given_back() -> None:
    bench = Bench(settings(queue_timeout_ms=100))
    bench.submit("a", 2)
    bench.advance(100)
    assert bench.last("a").finish is Finish.ERROR
    bench.settle()
    assert bench.core.is_idle()


def test_nothing_is_asked_while_no_worker_is_open() -> None:
    bench = Bench()
    bench.list_workers(1, open_=False)
    bench.submit("a", 2)
    assert asked(bench) == []
    bench.list_workers(1)
    bench.advance()
    assert asked(bench) == ["2"]


def test_a_batch_of_ops_has_a_largest_size() -> None:
    bench = Bench(settings(max_running=1030, max_step_tokens=2048, max_queued=1030, default_limits=MANY))
    bench.hold = True
    for number in range(1030):
        assert bench.submit(str(number), 1) is None
    bench.advance()
    assert [len(batch) for batch in bench.batches] == [1024, 6]
    bench.answer()
    assert bench.core.stats().running == 1030


def test_a_request_that_found_the_pool_full_does_not_keep_a_fixed_domain_waiting() -> None:
    fixed = frozenset({DomainId("fixed")})
    bench = Bench(SchedulerSettings(instance=b"instance", max_running=8, max_step_tokens=64, fixed_domains=fixed))
    bench.submit("big", 40, domain="a")
    bench.answer_with(bench.no(bench.batches[0][0], NoCapacityReason.POOL_FULL, 50))
    bench.submit("later", 3, domain="b")
    bench.submit("own", 3, domain="fixed")
    (op,) = bench.ops(Acquire)
    assert isinstance(op, Acquire)
    assert op.domain == "fixed"
    bench.answer_with(bench.no(op, NoCapacityReason.POOL_FULL, 500))
    bench.advance(50)
    assert [op.domain for op in bench.ops(Acquire) if isinstance(op, Acquire)] == ["a"], "its refusal is its own too"
