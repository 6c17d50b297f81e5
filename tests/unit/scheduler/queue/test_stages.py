"""What a request waited for is noted where it is decided, and told with its last output."""

from __future__ import annotations

import pytest

from coppice.ids import CacheEpoch, DomainId
from coppice.messages.index import Acquire, NoCapacityReason, Pending, Reclaim
from coppice.request_log.stages import Preemption, Stage, StageKind
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import MS, Bench, W
from tests.unit.scheduler.policy.test_preemption import answer_extends, running


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def finish(bench: Bench, name: str) -> tuple[Stage, ...]:
    """Cancel it, and what it tells."""
    bench.cancel(name)
    return bench.last(name).stages


def lengths(stages: tuple[Stage, ...]) -> list[tuple[StageKind, int]]:
    return [(stage.kind, stage.length_ns // MS) for stage in stages]


def test_a_request_that_waits_for_nothing() -> None:
    bench = Bench()
    bench.submit("r", 10, max_new=2)
    bench.advance(3)
    bench.answer(cached_blocks=1)
    bench.advance(20)
    bench.result({1: 7})
    bench.answer()
    bench.advance(5)
    bench.result({1: 8})
    assert bench.last("r").stages == (
        Stage(StageKind.ACQUIRE, 0, 3 * MS),
        Stage(StageKind.PREFILL, 3 * MS, 23 * MS, "w", 6),
        Stage(StageKind.DECODE, 23 * MS, 28 * MS, "w"),
    )
    assert bench.last("r").chunks == ((3 * MS, 23 * MS, 6),)


def test_slots_that_others_hold() -> None:
    bench = Bench(settings(max_running=2))
    for name in ("a", "b"):
        bench.submit(name, 3, tenant="batch", max_new=50)
    bench.settle()
    bench.submit("first", 3, tenant="batch")
    bench.submit("second", 3, tenant="batch")
    bench.advance(700)
    first, second = finish(bench, "first"), finish(bench, "second")
    assert first == (Stage(StageKind.NO_SLOT, 0, 700 * MS, "batch", 2),)
    assert second == (Stage(StageKind.NO_SLOT, 0, 700 * MS, "batch", 2),)


def test_a_full_pool_names_who_holds_it_and_what_was_asked_back() -> None:
    bench = Bench()
    bench.submit("holder", 30, tenant="search", domain="search", max_new=50)
    bench.settle()
    bench.submit("r", 9)
    (op,) = bench.ops(Acquire)
    bench.answer_with(bench.no(op, NoCapacityReason.POOL_FULL, 10_000))
    bench.submit("behind", 9, tenant="other")
    bench.advance(200)
    bench.core.index_message(Reclaim(CacheEpoch(1), W, DomainId("search"), 0), bench.now_ns)
    bench.advance(100)
    expected = (
        Stage(StageKind.POOL_FULL, 0, 200 * MS, "search", 9),
        Stage(StageKind.ASKED_BACK, 200 * MS, 200 * MS, "search", 0),
        Stage(StageKind.POOL_FULL, 200 * MS, 300 * MS, "search", 9),
    )
    assert finish(bench, "behind") == expected
    again = [stage.kind for stage in finish(bench, "r")]
    assert again[:2] == [StageKind.POOL_FULL, StageKind.ASKED_BACK]


def test_another_ones_prefix_and_the_domains_maximum() -> None:
    bench = Bench(settings(single_flight_wait_ms=1000))
    bench.submit("r", 9)
    (op,) = bench.ops(Acquire)
    bench.answer_with(Pending(op.lease_id, 8, 40))
    bench.advance(40)
    (again,) = bench.ops(Acquire)
    bench.advance(3)
    bench.answer_with(bench.no(again, NoCapacityReason.DOMAIN_MAXIMUM))
    bench.advance(20)
    assert lengths(finish(bench, "r")) == [
        (StageKind.PREFIX, 40),
        (StageKind.ACQUIRE, 3),
        (StageKind.DOMAIN_MAXIMUM, 20),
    ]


def test_nobody_to_work_and_nobody_to_ask() -> None:
    bench = Bench()
    bench.list_workers()
    bench.advance()
    bench.submit("r", 9)
    bench.advance(50)
    bench.core.index_lost(bench.now_ns)
    bench.advance(70)
    assert lengths(finish(bench, "r")) == [(StageKind.NO_WORKER, 50), (StageKind.NO_CACHE, 70)]


def test_a_lost_worker_is_a_restart() -> None:
    bench = Bench()
    bench.submit("r", 9, max_new=9)
    bench.settle()
    bench.result({1: 7})
    bench.advance(30)
    bench.list_workers(2)
    bench.advance()
    bench.advance(10)
    told = finish(bench, "r")
    assert [stage.kind for stage in told][-2:] == [StageKind.RESTARTED, StageKind.NO_WORKER]
    assert told[-2].blocker == "worker_lost"


def test_a_step_that_takes_many_times_what_it_should() -> None:
    bench = Bench(settings(max_decode_steps=1))
    bench.submit("r", 3, max_new=50)
    bench.settle()
    bench.result({1: 7})
    for _ in range(4):
        bench.advance(10)
        bench.result({1: 7}, duration_us=10_000)
        bench.settle()
    begun_ns = bench.now_ns
    bench.advance(900)
    bench.result({1: 7}, duration_us=900_000)
    bench.advance(10)
    told = finish(bench, "r")
    slow = next(stage for stage in told if stage.kind is StageKind.SLOW_STEP)
    assert (slow.start_ns, slow.end_ns, slow.blocker) == (begun_ns, begun_ns + 900 * MS, "w")
    assert slow.amount == 10_000


@pytest.mark.parametrize(
    ("reason", "why"),
    [(NoCapacityReason.POOL_FULL, Preemption.POOL), (NoCapacityReason.DOMAIN_MAXIMUM, Preemption.DOMAIN)],
    ids=["pool", "domain"],
)
def test_giving_way_says_why(reason: NoCapacityReason, why: Preemption) -> None:
    bench = running("dddd")
    bench.advance(5)
    answer_extends(bench, reason, refused={1})
    bench.advance(40)
    given = [stage for stage in finish(bench, "d") if stage.kind is StageKind.PREEMPTED]
    assert [(stage.blocker, stage.start_ns) for stage in given] == [(why.value, 5 * MS)]
    stalled = finish(bench, "a")
    assert (stalled[-1].kind.value, stalled[-1].length_ns) == (reason.value, 40 * MS), "it runs, and lacks a block"
    assert StageKind.PREEMPTED not in {stage.kind for stage in stalled}
