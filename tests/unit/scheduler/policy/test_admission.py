"""Rates, deadlines and estimates: who is refused, with which time to wait, and who is ended."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.ids import DomainId, WorkerEpoch, WorkerId
from coppice.messages.index import Acquire, Extend, NoCapacityReason, Release, WorkerInfo, Workers
from coppice.messages.reuse import Outcome, Reuse
from coppice.messages.step import StepResult
from coppice_scheduler.core.queue.limits import RateLimits
from coppice_scheduler.core.state.estimates import RecentRequests, ServiceRate
from coppice_scheduler.core.state.request import (
    Finish,
    LimitLeft,
    OutputErrorCode,
    Refused,
    RefusedReason,
    TenantLimitsLeft,
)
from coppice_scheduler.core.state.settings import Maximum, SchedulerSettings, TenantLimits
from coppice_scheduler.core.state.workers import DECODE_LOAD_TOKENS
from tests.fakes.scheduler.scheduler_bench import BLOCK, MS, Bench, W
from tests.fakes.scheduler.scheduler_ledger import NAMESPACE

V = WorkerId("v")
S = 1_000_000_000


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 1, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def reason(refused: Refused | None) -> RefusedReason | None:
    return None if refused is None else refused.reason


# --- rates


def test_requests_per_minute() -> None:
    bench = Bench(settings(tenants={"t": TenantLimits(requests_per_minute=2)}))
    assert bench.submit("a", 2) is None
    assert bench.submit("b", 2) is None
    refused = bench.submit("c", 2)
    assert refused is not None
    assert (refused.reason, refused.retry_after_ms) == (RefusedReason.TENANT_RATE, 30_000)
    assert bench.submit("x", 2, tenant="other") is None
    bench.advance(29_999)
    refused = bench.submit("c", 2)
    assert refused is not None
    assert refused.retry_after_ms == 1
    bench.advance(1)
    assert bench.submit("c", 2) is None


def test_what_is_left_of_limits_is_told() -> None:
    limits = {"t": TenantLimits(requests_per_minute=2, tokens_per_minute=600), "u": TenantLimits()}
    bench = Bench(settings(tenants=limits))
    assert bench.core.stats().limits_left == {}
    for tenant in ("t", "u"):
        assert bench.submit(tenant, 50, tenant=tenant) is None
    expected = TenantLimitsLeft(LimitLeft(2, 1, 30_000), LimitLeft(600, 550, 5_000))
    assert bench.core.stats().limits_left == {"t": expected}
    bench.advance(60_000)
    expected = TenantLimitsLeft(LimitLeft(2, 2, 0), LimitLeft(600, 600, 0))
    assert bench.core.stats().limits_left == {"t": expected}


def test_the_forks_of_a_request_are_one_request() -> None:
    bench = Bench(settings(tenants={"t": TenantLimits(requests_per_minute=1, tokens_per_minute=2)}))
    assert bench.submit("a", 2) is None
    assert bench.submit("b", 2, fork_of="a") is None
    assert reason(bench.submit("c", 2)) is RefusedReason.TENANT_RATE


def test_tokens_per_minute_count_prompts_when_taken_and_outputs_as_they_come() -> None:
    outputs = {"t": 0}
    limits = RateLimits(lambda tenant: TenantLimits(tokens_per_minute=600), lambda tenant: outputs[tenant])
    assert limits.wait_ms("t", 600, 0) == (0, "600 tokens per minute")
    limits.charge("t", 400, 0)
    assert limits.wait_ms("t", 200, 0)[0] == 0
    assert limits.wait_ms("t", 300, 0)[0] == 10_000
    outputs["t"] = 250
    assert limits.wait_ms("t", 1, 0)[0] == 5100, "below zero by 50"
    assert limits.wait_ms("t", 1, 5100 * MS)[0] == 0


def test_a_prompt_larger_than_a_minute_is_taken_by_a_full_bucket_only() -> None:
    limits = RateLimits(lambda tenant: TenantLimits(tokens_per_minute=60), lambda tenant: 0)
    assert limits.wait_ms("t", 100, 0)[0] == 0
    limits.charge("t", 100, 0)
    assert limits.wait_ms("t", 100, 0)[0] == 100_000
    assert limits.wait_ms("t", 100, 1000 * S)[0] == 0, "a bucket holds no more than a minute's worth"


def test_outputs_of_running_requests_use_up_the_minute() -> None:
    bench = Bench(settings(tenants={"t": TenantLimits(tokens_per_minute=6)}))
    assert bench.submit("a", 2, max_new=8) is None
    bench.answer()
    for _ in range(5):
        bench.result({1: 7})
        bench.settle()
    refused = bench.submit("b", 2)
    assert reason(refused) is RefusedReason.TENANT_RATE


# --- estimates


def test_the_rate_is_of_the_time_in_steps_and_forgets() -> None:
    rate = ServiceRate()
    assert rate.tokens_per_s == 0
    rate.step_done(0, S, 100)
    assert rate.tokens_per_s == pytest.approx(100)
    rate.step_done(S // 2, 2 * S, 200)
    assert rate.tokens_per_s == pytest.approx(152, abs=5), "planned ahead: it began when the first was done"
    rate.step_done(1000 * S, 1001 * S, 100)
    assert rate.tokens_per_s == pytest.approx(132, abs=5), "a pause does not count"
    for second in range(60):
        rate.step_done((2000 + second) * S, (2001 + second) * S, 10)
    assert rate.tokens_per_s == pytest.approx(10, abs=1)


def test_what_is_expected_of_requests_follows_what_came() -> None:
    recent = RecentRequests()
    assert (recent.num_tokens("t"), recent.duration_ns("t")) == (0, 0)
    recent.ended("t", 80, 8 * S)
    assert (recent.num_tokens("t"), recent.duration_ns("t")) == (80, 8 * S)
    recent.ended("t", 0, 16 * S)
    assert (recent.num_tokens("t"), recent.duration_ns("t")) == (70, 9 * S)
    assert recent.duration_ns("other") == 0


def measured(**fields: object) -> Bench:
    """A worker that was seen to do 1000 tokens a second, and whose only place is taken."""
    bench = Bench(settings(**fields))
    bench.submit("first", 1, max_new=50)
    bench.answer()
    plan = bench.plans.pop(0)
    bench.now_ns += S
    result = StepResult(plan.step, b"\1\0\0\0", b"\7\0\0\0", num_tokens=1000)
    bench.core.worker_result(W, result, bench.now_ns)
    bench.advance()
    return bench


def test_retry_after_is_the_time_that_the_tenants_line_takes() -> None:
    limits = {"t": TenantLimits(max_queued=2), "u": TenantLimits(max_queued=1, weight=3)}
    bench = measured(tenants=limits)
    for name, num_tokens, tenant in (("b", 60, "t"), ("c", 100, "t"), ("d", 90, "u")):
        assert bench.submit(name, num_tokens, tenant=tenant) is None
    refused = bench.submit("e", 40)
    assert refused is not None
    assert refused.reason is RefusedReason.TENANT_QUEUE
    assert refused.retry_after_ms == pytest.approx((60 + 100 + 40) * 4, abs=2), "a quarter of the service is its share"
    refused = bench.submit("e", 60, tenant="u")
    assert refused is not None
    assert refused.retry_after_ms == pytest.approx((90 + 60) * 4 / 3, abs=2)


@pytest.mark.parametrize(("is_strict", "expected_ms"), [(False, 900), (True, 1000)])
def test_at_the_concurrency_limit_retry_after_is_the_time_until_one_of_them_ends(
    is_strict: bool, expected_ms: int
) -> None:
    bench = Bench(settings(tenants={"t": TenantLimits(max_concurrency=2, is_strict=is_strict)}))
    bench.core._life.recent.ended("t", 40, 1800 * MS)
    assert bench.submit("a", 2) is None
    assert bench.submit("b", 2) is None
    refused = bench.submit("c", 2)
    assert refused is not None
    assert (refused.reason, refused.retry_after_ms) == (RefusedReason.TENANT_CONCURRENCY, expected_ms)


def test_a_call_of_many_requests_comes_in_whole_or_not_at_all() -> None:
    bench = Bench(settings(tenants={"t": TenantLimits(max_concurrency=4)}))
    assert bench.submit("a", 2) is None
    refused = bench.submit("b0", 2, num_to_come=4)
    assert refused is not None
    assert refused.reason is RefusedReason.TENANT_CONCURRENCY
    assert refused.message.endswith("has 1 requests at work, its maximum is 4, and this call needs 4 places")
    assert [bench.submit(f"c{place}", 2, num_to_come=3 - place) for place in range(3)] == [None] * 3
    assert reason(bench.submit("d", 2)) is RefusedReason.TENANT_CONCURRENCY


def test_the_time_that_a_request_took_is_measured_from_its_arrival() -> None:
    bench = Bench(settings(tenants={"t": TenantLimits(max_concurrency=1)}))
    bench.submit("a", 1, max_new=1)
    bench.answer()
    plan = bench.plans.pop(0)
    bench.now_ns += 3 * S
    bench.core.worker_result(W, StepResult(plan.step, b"\1\0\0\0", b"\7\0\0\0", num_tokens=1), bench.now_ns)
    bench.advance()
    assert bench.submit("b", 1) is None
    refused = bench.submit("c", 1)
    assert refused is not None
    assert refused.retry_after_ms == pytest.approx(3000, abs=20)


# --- deadlines


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    bench = measured()
    for name in ("b", "c"):
        assert bench.submit(name, 200) is None
    refused = bench.submit("d", 50, deadline_ns=bench.now_ns + 400 * MS)
    assert refused is not None
    assert (refused.reason, refused.retry_after_ms) == (RefusedReason.DEADLINE, 450)
    assert bench.submit("d", 50, deadline_ns=bench.now_ns + 500 * MS) is None
    refused = bench.submit("e", 1, tenant="idle", deadline_ns=bench.now_ns)
    assert reason(refused) is RefusedReason.DEADLINE


def test_nobody_is_refused_for_a_deadline_where_places_are_free() -> None:
    """What was measured of one slow stream is not what the worker can do."""
    bench = measured(max_running=8)
    bench.now_ns += 20 * S
    bench.core.worker_result(
        W, StepResult(bench.plans.pop(0).step, b"\1\0\0\0", b"\7\0\0\0", num_tokens=1), bench.now_ns
    )
    bench.hold = True
    for name, fork_of in (("b", None), ("c", "b"), ("d", None)):
        assert bench.submit(name, 200, fork_of=fork_of, deadline_ns=bench.now_ns + 900 * MS) is None


def test_without_a_measurement_nobody_is_refused_for_a_deadline() -> None:
    bench = Bench(settings())
    for name in ("a", "b", "c"):
        assert bench.submit(name, 200, deadline_ns=bench.now_ns + MS) is None


@pytest.mark.parametrize("runs", [False, True])
def test_what_is_past_its_deadline_ends_wherever_it_is(runs: bool) -> None:
    bench = Bench(settings())
    if not runs:
        bench.submit("first", 1, max_new=50)
        bench.answer()
    bench.submit("a", 2, max_new=50, deadline_ns=80 * MS)
    bench.answer()
    assert bench.core.next_wakeup_ns() == 80 * MS
    bench.advance(79)
    assert not bench.outputs
    bench.advance(1)
    last = bench.last("a")
    assert (last.finish, last.error is not None and last.error.code) == (Finish.ERROR, OutputErrorCode.DEADLINE)
    assert bench.core.next_wakeup_ns() != 80 * MS


def test_who_ended_before_its_deadline_wakes_nobody() -> None:
    bench = Bench(settings())
    bench.submit("a", 2, deadline_ns=80 * MS)
    bench.cancel("a")
    assert bench.core.next_wakeup_ns() is None


# --- what can never be


def test_more_than_the_domain_may_ever_hold_is_refused_at_once() -> None:
    bench = Bench(settings(maximums={DomainId("d"): Maximum(share=0.5), DomainId("e"): Maximum(blocks=3)}))
    assert bench.submit("a", 32 * 4) is None
    assert reason(bench.submit("b", 32 * 4 + 1)) is RefusedReason.NEVER_FITS
    assert bench.submit("c", 12, domain="e") is None
    assert reason(bench.submit("d", 13, domain="e")) is RefusedReason.NEVER_FITS
    assert bench.submit("d", 32 * 4 + 1, domain="other") is None


# --- preempted


def test_a_preempted_request_says_that_its_prefix_will_be_asked_for_again() -> None:
    bench = Bench(settings(max_running=2, extend_ahead_blocks=0))
    bench.hold = True
    for name in "ab":
        bench.submit(name, 3, max_new=20, reuse=Reuse.UNLIKELY)
    bench.advance()
    bench.answer()
    for _ in range(2):
        bench.result({1: 9, 2: 9})
    while bench.batches:
        full = NoCapacityReason.POOL_FULL
        ops = bench.batches[0]
        bench.answer_with(*(bench.no(op, full) if isinstance(op, Extend) else bench.yes(op) for op in ops))
    while not bench.ops(Release):
        bench.result()
    (release,) = bench.ops(Release)
    assert isinstance(release, Release)
    assert release.reuse is Reuse.LIKELY


# --- ended


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [([9, 7], Outcome.CALLED_TOOLS), ([8, 7], Outcome.CALLED_NONE), ([9, 9, 9], Outcome.UNKNOWN)],
)
def test_a_release_says_whether_the_answer_called_tools(answer: list[int], outcome: Outcome) -> None:
    """One that was cut at its length has called none whole."""
    bench = Bench(settings())
    bench.submit("a", 3, max_new=3, call_opens=9, stop_token_ids=frozenset({7}))
    bench.settle()
    tokens = iter([*answer, *answer[-1:] * 3])  # a plan may be made of steps after the last one
    while not bench.ops(Release):
        bench.result({1: [next(tokens) for _ in range(bench.plans[0].num_decode_steps)]})
    (release,) = bench.ops(Release)
    assert isinstance(release, Release)
    assert release.outcome is outcome


# --- placement


def two_workers(*, drains: bool = False) -> Bench:
    """Workers "w" and "v"; all that is granted is granted on "w"."""
    bench = Bench(settings(max_running=32, fixed_domains=frozenset({DomainId("strict")})))
    info = WorkerInfo(W, WorkerEpoch(1), "here:0", 64, BLOCK, NAMESPACE, "m", True)
    other = replace(info, worker_id=V, draining=drains)
    bench.core.index_message(Workers(bench.cache_epoch, (info, other)), 0)
    bench.core.worker_attached(V, WorkerEpoch(1), True, 0)
    return bench


def said_for(domain: str, *, beside: bool) -> list[tuple[object, ...]]:
    """What a tenant asks for, with or without another at work on worker "w" and asking for more."""
    bench = two_workers()
    if beside:
        bench.submit("x", 50, tenant="x", domain="x")
        bench.answer()
        bench.submit("y", 20, tenant="x", domain="x")
    for name, num_tokens in (("a", 9), ("b", 5), ("c", 7)):
        bench.submit(name, num_tokens, tenant=domain, domain=domain)
    ops = [op for op in bench.ops(Acquire) if isinstance(op, Acquire) and op.domain == domain]
    return [(op.tokens, op.reserve_tokens, op.candidates, op.may_wait, op.reuse) for op in ops]


def test_a_strict_tenant_asks_for_the_same_whatever_others_do() -> None:
    assert said_for("strict", beside=True) == said_for("strict", beside=False)
    assert said_for("plain", beside=True) != said_for("plain", beside=False), "others go where there is room"


def test_it_is_known_when_all_workers_drain() -> None:
    bench = two_workers(drains=True)
    assert not bench.core.all_drain, "one of them takes requests"
    info = WorkerInfo(W, WorkerEpoch(1), "here:0", 64, BLOCK, NAMESPACE, "m", True, draining=True)
    bench.core.index_message(Workers(bench.cache_epoch, (info, replace(info, worker_id=V))), 0)
    assert bench.core.all_drain
    bench.core.index_message(Workers(bench.cache_epoch, (info, replace(info, worker_id=V, draining=False))), 0)
    assert not bench.core.all_drain


def test_requests_are_spread_over_workers_by_the_work_that_stands_there() -> None:
    bench = two_workers()
    bench.hold = True
    for name, num_tokens in (("a", 40), ("b", 30), ("c", 5)):
        bench.submit(name, num_tokens)
    bench.advance()
    loads = [[c.load_cost for c in op.candidates] for op in bench.ops(Acquire) if isinstance(op, Acquire)]
    assert loads == [[0, 0], [40, 0], [40, 30]]


def test_a_worker_full_of_decodes_is_not_free() -> None:
    bench = two_workers()
    bench.submit("a", 1, max_new=50)
    bench.answer()
    bench.result({1: 7})
    bench.submit("b", 5)
    (op,) = [op for op in bench.ops(Acquire) if isinstance(op, Acquire)]
    assert {c.worker_id: c.load_cost for c in op.candidates} == {V: 0, W: DECODE_LOAD_TOKENS}


def test_a_drained_worker_is_given_nothing() -> None:
    bench = two_workers(drains=True)
    bench.submit("a", 5)
    (op,) = [op for op in bench.ops(Acquire) if isinstance(op, Acquire)]
    assert [candidate.worker_id for candidate in op.candidates] == [W]
