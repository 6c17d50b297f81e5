"""The queue is shared out by weight: nobody can fill another's share, and a strict tenant feels nobody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.ids import DomainId
from coppice.messages.step import SamplingParams, StepResult
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Refused, RefusedReason, Request
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits
from tests.fakes.scheduler.scheduler_bench import MS, Bench, W, tokens_of

QUEUE_FULL = RefusedReason.QUEUE_FULL
TENANTS = {
    "strict": TenantLimits(max_concurrency=20, is_strict=True),
    "small": TenantLimits(max_queued=1024, max_concurrency=1024),
    "large": TenantLimits(max_queued=1024, max_concurrency=1024, weight=2.0),
}


def settings(**fields: object) -> SchedulerSettings:
    given = {"max_running": 1, "max_step_tokens": 64, "max_queued": 40, "max_queued_tokens": 400, "tenants": TENANTS}
    return SchedulerSettings(instance=b"instance", **{**given, **fields})  # type: ignore[arg-type]


class Queue:
    """A scheduler without a worker: whoever comes in waits."""

    def __init__(self, given: SchedulerSettings) -> None:
        self.core = SchedulerCore(given)
        self.now_ns = 0
        self._number = 0

    def submit(self, tenant: str, num_tokens: int, deadline_ms: int | None = None) -> Refused | None:
        self._number += 1
        request = Request(
            request_id=f"{tenant} {self._number}",
            tenant=tenant,
            domain=DomainId(tenant),
            tokens=tokens_of(num_tokens),
            sampling=SamplingParams(),
            max_new_tokens=1,
            number=self._number,
            deadline_ns=None if deadline_ms is None else self.now_ns + deadline_ms * MS,
        )
        refused = self.core.submit(request, self.now_ns)
        self.core.advance(self.now_ns)
        self.core.check()
        return refused

    def fill(self, tenant: str, num_tokens: int) -> int:
        """Until it is refused. Returns how many came in."""
        for count in range(1000):
            if (refused := self.submit(tenant, num_tokens)) is not None:
                assert refused.reason is QUEUE_FULL
                return count
        raise AssertionError("it never ends")


def test_long_prompts_of_one_tenant_leave_the_others_their_share() -> None:
    queue = Queue(settings())
    assert queue.fill("small", 20) == 15, "all but the strict share of 100 tokens, 20 at a time"
    assert queue.fill("large", 20) == 10, "its half"
    assert queue.fill("strict", 20) == 5, "its quarter"


def test_many_requests_of_one_tenant_leave_the_others_their_share() -> None:
    queue = Queue(settings())
    assert queue.fill("small", 1) == 30
    assert queue.fill("large", 1) == 20
    assert queue.fill("strict", 1) == 10


def test_what_nobody_uses_is_used_but_not_by_a_strict_tenant() -> None:
    assert Queue(settings()).fill("small", 10) == 30, "10 are within its share"
    assert Queue(settings()).fill("strict", 10) == 10


def test_what_a_strict_tenant_has_waiting_is_not_felt_by_others() -> None:
    queue = Queue(settings())
    queue.fill("strict", 20)
    assert queue.fill("small", 20) == 15


@pytest.mark.parametrize("tenant", ["strict", "small"])
def test_one_request_of_any_size_waits(tenant: str) -> None:
    queue = Queue(settings())
    queue.fill("large", 10)
    assert queue.submit(tenant, 5_000) is None
    refused = queue.submit(tenant, 1)
    assert refused is not None
    assert refused.reason is QUEUE_FULL


def test_who_is_not_configured_has_no_share() -> None:
    queue = Queue(settings(tenants={}))
    assert queue.fill("x", 10) == 40
    assert queue.fill("y", 10) == 0


def test_a_refusal_tells_nothing_of_what_waits() -> None:
    queue = Queue(settings())
    queue.fill("large", 7)
    queue.fill("small", 7)
    messages = set()
    for _ in range(3):
        refused = queue.submit("small", 7)
        assert refused is not None
        messages.add(refused.message)
        queue.core.cancel("large 1", 0)
        queue.fill("large", 1)
    (message,) = messages
    assert not any(character.isdigit() for character in message)


@pytest.mark.parametrize(
    ("max_queued_tokens", "deadline_ms", "answer"), [(16, None, (QUEUE_FULL, 1000)), (4000, 300, None)]
)
def test_a_strict_tenant_hears_no_estimate(
    max_queued_tokens: int, deadline_ms: int | None, answer: tuple[RefusedReason, int] | None
) -> None:
    """An estimate knows what the worker did for others, and who else is at work."""
    answers = []
    for others, tokens_per_s in ((0, 1000), (5, 100)):
        bench = Bench(settings(max_queued_tokens=max_queued_tokens))
        bench.submit("first", 1, 50, tenant="strict", domain="strict")
        bench.answer()
        bench.now_ns += 1000 * MS
        result = StepResult(bench.plans.pop(0).step, b"\1\0\0\0", b"\7\0\0\0", num_tokens=tokens_per_s)
        bench.core.worker_result(W, result, bench.now_ns)
        bench.advance()
        for number in range(others):
            bench.submit(f"other {number}", 1, tenant="large", domain="large")
        assert bench.submit("b", 100, tenant="strict", domain="strict") is None
        deadline_ns = None if deadline_ms is None else bench.now_ns + deadline_ms * MS
        refused = bench.submit("c", 2, tenant="strict", domain="strict", deadline_ns=deadline_ns)
        answers.append(refused and (refused.reason, refused.retry_after_ms))
    assert answers == [answer, answer]


strict_asks = st.tuples(st.just("strict"), st.integers(1, 200), st.none() | st.integers(0, 50))
others_asks = st.tuples(st.sampled_from(("small", "large", "nobody")), st.integers(1, 200), st.none())
cancels = st.tuples(st.just("cancel"), st.integers(0, 60), st.none())


@given(st.lists(strict_asks | others_asks | cancels, max_size=60))
def test_a_strict_tenant_is_answered_the_same_without_the_others(asks: list[tuple[str, int, int | None]]) -> None:
    """In words too: reason, message and time."""
    assert strict_answers(asks, with_others=True) == strict_answers(asks, with_others=False)


def strict_answers(asks: list[tuple[str, int, int | None]], *, with_others: bool) -> list[Refused | None]:
    queue = Queue(settings())
    answers: list[Refused | None] = []
    ids: list[str] = []  # in both worlds the same place for the same request
    for tenant, amount, deadline_ms in asks:
        queue.now_ns += MS
        queue.core.advance(queue.now_ns)
        if tenant == "cancel":
            if amount < len(ids):
                queue.core.cancel(ids[amount], queue.now_ns)
            continue
        if tenant == "strict" or with_others:
            answer = queue.submit(tenant, amount, deadline_ms)
            ids.append(f"{tenant} {queue._number}")
            if tenant == "strict":
                answers.append(answer)
        else:
            ids.append("")
    return answers
