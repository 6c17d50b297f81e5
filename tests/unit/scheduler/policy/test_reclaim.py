"""Borrowed blocks are given back when the cache service asks, and a guarantee waits behind nobody."""

from __future__ import annotations

import pytest

from coppice.ids import CacheEpoch, DomainId
from coppice.messages.index import Acquire, NoCapacityReason, Reclaim, Release
from coppice_scheduler.core import engine
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.policy.preemption import Stakes
from coppice_scheduler.core.state.request import Finish
from coppice_scheduler.core.state.settings import Guarantee, SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import Bench, W
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_world import World
from tests.unit.scheduler.policy.test_preemption import answer_extends, detached, got_no_further, running

POOL_FULL = NoCapacityReason.POOL_FULL
X, Y = DomainId("x"), DomainId("y")


def settings(**fields: object) -> SchedulerSettings:
    given = {"instance": b"instance", "max_running": 8, "max_step_tokens": 64, "extend_ahead_blocks": 0}
    return SchedulerSettings(**{**given, **fields})  # type: ignore[arg-type]


def guarantees(**blocks: int) -> dict[DomainId, Guarantee]:
    return {DomainId(domain): Guarantee(blocks=count) for domain, count in blocks.items()}


def reclaim(bench: Bench, domain: str, num_blocks: int, *, epoch: int = 1) -> None:
    bench.core.index_message(Reclaim(CacheEpoch(epoch), W, DomainId(domain), num_blocks), bench.now_ns)
    bench.advance()


def domains(bench: Bench) -> list[str]:
    return [op.domain for op in bench.ops(Acquire) if isinstance(op, Acquire)]


def test_the_latest_of_the_domain_give_way_until_enough_is_on_its_way() -> None:
    bench = running("xyxx")
    bench.answer()
    bench.plans.clear()
    assert bench.core.stats().total_preemptions == 0
    reclaim(bench, "x", 3)
    assert bench.core.stats().total_preemptions == 2, "two blocks each"
    assert [bench.core._life.requests[name].sequence is None for name in "abcd"] == [False, False, True, True]
    assert bench.core.stats().total_reclaims == 1


def test_what_returns_already_counts_and_a_repeated_reclaim_takes_nothing_twice() -> None:
    bench = running("xxx")
    bench.answer()
    bench.cancel("c")
    reclaim(bench, "x", 2)
    assert bench.core.stats().total_preemptions == 0, "the blocks of the cancelled one are on their way"
    reclaim(bench, "x", 4)
    reclaim(bench, "x", 4)
    assert bench.core.stats().total_preemptions == 1


def test_nobody_is_preempted_for_nothing() -> None:
    bench = running("xy")
    reclaim(bench, "z", 9)
    reclaim(bench, "x", 9, epoch=2)
    assert bench.core.stats().total_preemptions == 0
    reclaim(bench, "x", 9)
    assert bench.core.stats().total_preemptions == 1, "all that there is, though it is less"


def test_a_stake_is_what_nobody_else_holds() -> None:
    bench = running("xxx")
    bench.settle()
    first, second, third = bench.core._life.workers[W].running.values()
    second.lease.shared = bytes(first.lease.owned[:8])
    third.lease.shared, third.lease.owned = bytes(second.lease.owned), bytearray()
    stakes = Stakes(bench.core._life.workers[W])
    assert [stakes.of(sequence) for sequence in (first, second, third)] == [1, 0, 0]
    assert stakes.take(third) == 0
    assert [stakes.of(sequence) for sequence in (first, second)] == [1, 2]
    assert stakes.take(second) == 2
    assert stakes.of(first) == 2


def test_a_sequence_that_holds_nothing_alone_is_no_victim() -> None:
    bench = running("xxx")
    bench.settle()
    worker = bench.core._life.workers[W]
    first, second, third = worker.running.values()
    third.lease.shared, third.lease.owned = bytes(second.lease.owned), bytearray()
    third.lease.reserved_tokens = third.lease.num_shared_blocks * 4
    second.lease.shared = bytes(second.lease.owned)
    second.lease.owned = bytearray()
    reclaim(bench, "x", 1)
    assert first not in worker.running.values()
    assert {second, third} <= set(worker.running.values())


# --- guarantees and gates


def test_a_guarantee_does_not_wait_behind_anothers_refusal() -> None:
    bench = Bench(settings(guarantees=guarantees(y=4)))
    bench.submit("a", 40, domain="x")
    bench.answer_with(bench.no(bench.batches[0][0], POOL_FULL))
    bench.submit("b", 3, domain="z")
    bench.submit("c", 40, domain="y")
    assert domains(bench) == [], "neither who has none nor who asks for more than its own"
    bench.cancel("c")
    bench.settle()
    bench.submit("d", 3, domain="y")
    assert domains(bench) == ["y"]
    bench.answer_with(bench.no(bench.ops(Acquire)[0], POOL_FULL, 500))
    bench.advance(50)
    assert domains(bench) == ["x"], "its refusal is its own, and does not stop the line"


def test_its_own_gate_opens_when_anybody_gives_back() -> None:
    bench = Bench(settings(guarantees=guarantees(y=4)))
    bench.submit("a", 9, domain="x")
    bench.answer()
    bench.submit("b", 3, domain="y")
    bench.answer_with(bench.no(bench.batches[0][0], POOL_FULL, 5_000))
    bench.cancel("a")
    while not bench.ops(Release):
        bench.result()
    assert domains(bench) == ["y"]


def test_what_was_asked_for_counts_as_held() -> None:
    bench = Bench(settings(guarantees=guarantees(y=4), max_running=8))
    bench.submit("a", 40, domain="x")
    bench.answer_with(bench.no(bench.batches[0][0], POOL_FULL))
    bench.hold = True
    for number in range(4):
        bench.submit(f"y{number}", 7, domain="y")
    bench.advance()
    assert domains(bench) == ["y", "y"]


def test_a_stalled_borrower_does_not_keep_a_guarantee_out() -> None:
    bench = running("x", guarantees=guarantees(y=4))
    got_no_further(bench, "a")
    answer_extends(bench, POOL_FULL)
    bench.submit("other", 5, domain="z")
    bench.submit("own", 5, domain="y")
    assert domains(bench) == ["y"]


def test_a_domain_below_its_guarantee_takes_from_those_that_borrow() -> None:
    bench = running("yyx", guarantees=guarantees(y=9))
    answer_extends(bench, POOL_FULL, refused={1})
    assert detached(bench) == [3]


def test_one_that_borrows_takes_from_no_guarantee() -> None:
    bench = running("xyy", guarantees=guarantees(y=9))
    answer_extends(bench, POOL_FULL, refused={1})
    assert bench.core.stats().total_preemptions == 0, "the only one that borrows waits"


def test_a_share_counts_in_blocks_of_the_worker() -> None:
    assert [Guarantee(0.3).of(10), Guarantee(blocks=7).of(10), Guarantee().of(10)] == [3, 7, 0]


def borrowed_pool(seed: int) -> World:
    """Domain x has borrowed a pool of which y owns a part, and y asks for it."""
    world = World(settings(guarantees=guarantees(y=30)), FakeIndex(4, retry_after_ms=5), seed)
    world.index.owed = {"y": 30}
    world.add_worker("a", 100)
    world.attach_index()
    for number in range(2):
        world.submit(f"x{number}", [number, *range(1, 150)], 48, domain="x", seed=number)
    world.run(until_ms=12)
    assert world.core.stats().running == 2
    for number in range(2):
        world.submit(f"y{number}", [9, number, *range(50)], 3, domain="y", seed=number)
    return world


@pytest.mark.parametrize("seed", range(6))
def test_borrowed_blocks_come_back_and_the_borrower_finishes_later(seed: int) -> None:
    world = borrowed_pool(seed)
    world.run(until_ms=24)
    assert [world.finish_of(f"y{number}") for number in range(2)] == [Finish.LENGTH] * 2, "within a few steps"
    assert world.core.stats().total_reclaims
    world.run()
    assert [world.finish_of(f"x{number}") for number in range(2)] == [Finish.LENGTH] * 2
    assert world.core.is_idle()


def test_without_the_reclaim_the_guarantee_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone() -> World:
        world = World(settings(guarantees=guarantees(y=30), queue_timeout_ms=500), FakeIndex(4, retry_after_ms=5))
        world.index.owed = {"y": 30}
        world.add_worker("a", 50)
        world.attach_index()
        world.submit("x", list(range(150)), 48, domain="x")
        world.run(until_ms=12)
        world.submit("y", list(range(50)), 3, domain="y")
        world.run()
        return world

    assert alone().finish_of("y") is Finish.LENGTH
    monkeypatch.setattr(Lifecycle, "restart", lambda life, request, now_ns: None)  # which would give back, too
    assert alone().finish_of("y") is Finish.LENGTH
    monkeypatch.setattr(engine, "give_back", lambda life, message, now_ns: None)
    assert alone().finish_of("y") is Finish.ERROR
