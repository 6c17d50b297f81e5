"""A request whose prefix another one computes sleeps: it holds nothing, keeps its place, and is never lost."""

from __future__ import annotations

from coppice.ids import CacheEpoch, LeaseId, SchedulerEpoch
from coppice.messages.index import Acquire, Gone, LeaseDigest, NoCapacityReason, Op, Pending, Release, Wake
from coppice_scheduler.core.state.request import Finish, OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits
from tests.fakes.scheduler.scheduler_bench import Bench
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_world import World


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def pending(op: Op, retry_after_ms: int = 40) -> Pending:
    return Pending(op.lease_id, 4, retry_after_ms)


def asleep(bench: Bench, name: str = "a", num_tokens: int = 9, retry_ms: int = 40) -> LeaseId:
    """Submit a request whose Acquire is answered with Pending."""
    bench.submit(name, num_tokens)
    ((op,),) = bench.batches
    bench.answer_with(pending(op, retry_ms))
    return op.lease_id


def wake(bench: Bench, *lease_ids: LeaseId, epoch: int = 1) -> None:
    bench.core.index_message(Wake(CacheEpoch(epoch), lease_ids), bench.now_ns)
    bench.advance()


def acquires(bench: Bench) -> list[Acquire]:
    return [op for op in bench.ops(Acquire) if isinstance(op, Acquire)]


def test_a_sleeper_holds_nothing_and_asks_again_when_woken_under_its_id() -> None:
    bench = Bench(settings(max_running=1))
    lease_id = asleep(bench)
    stats = bench.core.stats()
    assert (stats.sleeping, stats.waiting, stats.running, stats.leases, stats.total_flight_waits) == (1, 1, 0, 0, 1)
    bench.submit("b", 3)
    (other,) = acquires(bench)
    assert len(other.tokens) == 12, "its place among the running is another's meanwhile"
    bench.answer()
    wake(bench, lease_id)
    assert acquires(bench) == []
    assert bench.core.stats().sleeping == 0
    bench.cancel("b")
    bench.result({1: 1})
    bench.result()
    (again,) = acquires(bench)
    assert again.lease_id == lease_id
    bench.answer()
    assert bench.core.stats().running == 1


def test_woken_it_goes_before_those_who_came_later() -> None:
    bench = Bench(settings(max_running=1))
    lease_id = asleep(bench, "first", 9)
    bench.submit("second", 3)
    bench.submit("third", 5)
    bench.answer()
    wake(bench, lease_id)
    bench.cancel("second")
    bench.result({1: 1})
    bench.result()
    assert [len(op.tokens) // 4 for op in acquires(bench)] == [9]


def test_without_a_wake_it_asks_again_after_the_time_that_it_was_told() -> None:
    bench = Bench()
    lease_id = asleep(bench)
    assert bench.core.next_wakeup_ns() == 40_000_000
    bench.advance(39)
    assert acquires(bench) == []
    bench.advance(1)
    assert [(op.lease_id, op.may_wait) for op in acquires(bench)] == [(lease_id, True)]


def test_waiting_for_others_has_a_bound_after_which_it_computes_itself() -> None:
    bench = Bench(settings(single_flight_wait_ms=100))
    asleep(bench)
    waits = 1
    while acquires(bench) == [] or acquires(bench)[0].may_wait:
        for op in acquires(bench):
            bench.answer_with(pending(op))
            waits += 1
        bench.advance(40 if waits < 3 else 20)
    assert (bench.now_ns, waits) == (100_000_000, 3)
    bench.answer()
    assert bench.core.stats().running == 1


def test_it_may_be_told_never_to_wait() -> None:
    bench = Bench(settings(single_flight_wait_ms=0))
    bench.submit("a", 9)
    assert [op.may_wait for op in acquires(bench)] == [False]


def test_its_deadline_goes_on() -> None:
    bench = Bench(settings(queue_timeout_ms=30))
    lease_id = asleep(bench)
    bench.advance(30)
    error = bench.last("a").error
    assert error is not None
    assert error.code is OutputErrorCode.QUEUE_TIMEOUT
    assert [op.lease_id for op in bench.ops(Release)] == [lease_id]
    bench.settle()
    assert bench.core.is_idle()


def test_a_cancelled_sleeper_tells_the_cache_service() -> None:
    """Or the one wake after an abort might be spent on it."""
    bench = Bench()
    lease_id = asleep(bench)
    bench.cancel("a")
    assert bench.last("a").finish is Finish.CANCELLED
    assert [op.lease_id for op in bench.ops(Release)] == [lease_id]
    wake(bench, lease_id)
    bench.advance(40)
    assert acquires(bench) == []
    bench.settle()
    assert bench.core.is_idle()


def test_cancelled_before_the_answer_it_tells_too() -> None:
    bench = Bench()
    bench.submit("a", 9)
    bench.cancel("a")
    (op,) = bench.batches[0]
    bench.answer_with(pending(op))
    assert [release.lease_id for release in bench.ops(Release)] == [op.lease_id]
    bench.settle()
    assert bench.core.is_idle()


def test_wakes_that_mean_nothing_here() -> None:
    bench = Bench()
    lease_id = asleep(bench)
    wake(bench, LeaseId(b"x" * 16))
    wake(bench, lease_id, epoch=2)
    assert acquires(bench) == []
    wake(bench, lease_id)
    wake(bench, lease_id)
    assert len(acquires(bench)) == 1


def test_after_a_restart_of_the_cache_service_everybody_asks_again() -> None:
    bench = Bench()
    lease_id = asleep(bench)
    bench.cache_epoch = CacheEpoch(2)
    bench.core.index_attached(SchedulerEpoch(1), bench.cache_epoch, True, bench.now_ns)
    bench.list_workers(1)
    bench.advance()
    assert [op.lease_id for op in acquires(bench)] == [lease_id]
    bench.answer()
    assert bench.core.stats().running == 1


def test_a_new_session_is_asked_under_a_new_id() -> None:
    """Whatever the old one was granted under the old id may be fenced by it."""
    bench = Bench()
    lease_id = asleep(bench)
    bench.core.index_attached(SchedulerEpoch(2), bench.cache_epoch, True, bench.now_ns)
    bench.list_workers(1)
    bench.advance()
    assert [op.lease_id == lease_id for op in acquires(bench)] == [False]


def test_after_a_lease_set_the_ids_that_it_does_not_name_are_not_used_again() -> None:
    bench = Bench()
    lease_id = asleep(bench)
    bench.core.index_message(LeaseDigest(1, 77), bench.now_ns)
    bench.advance()
    assert len(bench.other_messages) == 1 + 0
    assert [op.lease_id == lease_id for op in acquires(bench)] == [False]


def test_an_id_that_is_gone_is_replaced() -> None:
    bench = Bench()
    lease_id = asleep(bench)
    wake(bench, lease_id)
    bench.answer_with(Gone(lease_id))
    assert [op.lease_id == lease_id for op in acquires(bench)] == [False]
    bench.answer()
    assert bench.core.stats().running == 1


def test_a_refused_request_keeps_its_id_and_gives_it_up_when_it_ends() -> None:
    bench = Bench()
    bench.submit("a", 9)
    (op,) = bench.batches[0]
    bench.answer_with(bench.no(op, NoCapacityReason.POOL_FULL, 10))
    bench.advance(10)
    assert [again.lease_id for again in acquires(bench)] == [op.lease_id]
    bench.answer_with(bench.no(op, NoCapacityReason.POOL_FULL, 10))
    bench.cancel("a")
    assert [release.lease_id for release in bench.ops(Release)] == [op.lease_id]


def test_a_refused_request_that_sleeps_next_does_not_keep_the_line_shut() -> None:
    bench = Bench()
    bench.submit("a", 9)
    (op,) = bench.batches[0]
    bench.answer_with(bench.no(op, NoCapacityReason.POOL_FULL, 10))
    bench.submit("b", 3)
    assert acquires(bench) == []
    bench.advance(10)
    bench.answer_with(pending(acquires(bench)[0]))
    assert [len(op.tokens) // 4 for op in acquires(bench)] == [3]


def test_a_burst_of_equal_prompts_is_not_a_queue() -> None:
    bench = Bench(settings(default_limits=TenantLimits(8, 1)))
    for name in "abc":
        asleep(bench, name)
    assert bench.submit("d", 9) is None
    assert bench.core.stats().sleeping == 3


def test_equal_prompts_are_computed_once() -> None:
    world = World(settings(), FakeIndex(4))
    world.index.flight_retry_ms = 1_000
    world.add_worker("a", 64)
    world.attach_index()
    prompt = list(range(33))
    for number in range(6):
        world.submit(f"r{number}", prompt, 3, seed=number)
    world.run()
    stats = world.core.stats()
    assert [world.finish_of(f"r{number}") for number in range(6)] == [Finish.LENGTH] * 6
    assert stats.total_flight_waits == 5
    assert stats.total_prefill_tokens == 33 + 5, "the others compute the last token only"
    assert world.core.is_idle()
    assert not world.index.waiters


def test_a_leader_that_goes_wakes_the_next() -> None:
    world = World(settings(max_step_tokens=8, max_chunk_tokens=4), FakeIndex(4))
    world.index.flight_retry_ms = 60_000
    world.add_worker("a", 64)
    world.attach_index()
    prompt = list(range(40))
    for number in range(4):
        world.submit(f"r{number}", prompt, 3, seed=number)
    world.run(until_ms=6)
    assert world.core.stats().sleeping == 3
    world.cancel("r0")
    world.run(until_ms=1_000)
    finishes = [world.finish_of(f"r{number}") for number in range(1, 4)]
    assert finishes == [Finish.LENGTH] * 3, "nobody waited for the bound"
    assert world.core.is_idle()


def test_one_that_slept_twice_until_the_same_moment_is_woken_once() -> None:
    bench = Bench(settings(single_flight_wait_ms=100))
    lease_id = asleep(bench, retry_ms=500)
    wake(bench, lease_id)
    bench.answer_with(pending(acquires(bench)[0], 500))
    bench.advance(100)
    assert [op.may_wait for op in acquires(bench)] == [False]
