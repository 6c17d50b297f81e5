"""Who may come in where other planners have some of the tenant's requests at work."""

from __future__ import annotations

from coppice.ids import CacheEpoch, SchedulerEpoch
from coppice.messages.cell import Planners, Served, ServedElsewhere, TenantSums
from coppice_scheduler.core.state.request import RefusedReason
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits
from tests.fakes.scheduler.scheduler_bench import Bench

OTHER = SchedulerEpoch(9)


def bench_with(**limits: TenantLimits) -> Bench:
    settings = SchedulerSettings(
        instance=b"instance", max_running=8, max_step_tokens=64, extend_more_blocks=0, tenants=limits
    )
    bench = Bench(settings)
    bench.core.index_message(Planners(CacheEpoch(1), (OTHER,)), bench.now_ns)
    hear(bench)
    bench.advance()
    return bench


def hear(bench: Bench, *tenants: TenantSums) -> None:
    bench.core.index_message(ServedElsewhere(CacheEpoch(1), OTHER, tenants, False), bench.now_ns)


def at_work(tenant: str, count: int) -> TenantSums:
    return TenantSums(tenant, 0, 0, 0, 0, count, False)


def test_concurrency_counts_the_whole_cell() -> None:
    bench = bench_with(t=TenantLimits(max_concurrency=4))
    hear(bench, at_work("t", 3), at_work("u", 4))
    assert bench.submit("one", 5) is None
    refused = bench.submit("two", 5)
    assert refused is not None
    assert refused.reason is RefusedReason.TENANT_CONCURRENCY
    assert refused.message == "tenant t has 4 requests at work, its maximum is 4"
    assert refused.retry_after_ms > 0
    hear(bench, at_work("t", 2))
    assert bench.submit("two", 5) is None


def test_an_open_call_needs_its_places_in_the_whole_cell() -> None:
    bench = bench_with(t=TenantLimits(max_concurrency=4))
    hear(bench, at_work("t", 2))
    refused = bench.submit("call", 0, num_places=3)
    assert refused is not None
    assert refused.reason is RefusedReason.TENANT_CONCURRENCY
    assert bench.submit("call", 0, num_places=2) is None
    bench.advance(100)
    (said,) = [message for message in bench.other_messages if isinstance(message, Served)]
    assert said.tenants == (at_work("t", 2),)


def test_what_others_charged_is_told_with_the_limit_and_its_retry_after() -> None:
    bench = bench_with(t=TenantLimits(requests_per_minute=60))
    hear(bench, TenantSums("t", 0, 0, 60, 0, 0, False))
    refused = bench.submit("one", 5)
    assert refused is not None
    assert (refused.reason, refused.retry_after_ms) == (RefusedReason.TENANT_RATE, 1_000)
    left = bench.core.stats().limits_left["t"].requests
    assert left is not None
    assert (left.limit, left.left, left.full_ms) == (60, 0, 60_000)


def test_a_request_is_told_from_its_start_to_its_end() -> None:
    bench = bench_with()
    bench.advance(100)
    bench.submit("one", 5, max_new=1)
    bench.advance(100)
    bench.answer()
    bench.result({1: 7})
    bench.advance(100)
    said = [message for message in bench.other_messages if isinstance(message, Served)]
    assert [message.tenants for message in said] == [
        (),
        (TenantSums("t", 0, 0, 1, 5, 1, True),),
        (TenantSums("t", 5, 1, 1, 5, 0, False),),
    ]


def test_a_strict_tenants_sums_leave_when_they_would_without_others() -> None:
    """Others change theirs at 130 ms: the tick at 200 ms is told. Of the strict tenant's, at 220 ms, that at 300 ms
    is."""
    times = []
    for others in (True, False):
        bench = bench_with(t=TenantLimits(is_strict=True))
        bench.advance(100)
        bench.advance(30)
        if others:
            bench.submit("other", 5, tenant="u")
        bench.advance(90)
        bench.submit("one", 5)
        while not any(
            sums.tenant == "t" for message in bench.other_messages for sums in getattr(message, "tenants", ())
        ):
            bench.advance(10)
        times.append(bench.now_ns)
    assert times == [300_000_000] * 2
