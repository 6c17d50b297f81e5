"""What a worker can take bounds what it is given: sequences, tokens of a step, tokens of a sequence."""

from __future__ import annotations

import pytest

from coppice.ids import WorkerEpoch, WorkerId
from coppice.messages.index import Acquire
from coppice_scheduler.core.batch import chunked_prefill as chunks
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state import leases
from coppice_scheduler.core.state.request import Finish, OutputErrorCode, RefusedReason
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import Bench, rows_of
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_world import World
from tests.fakes.trio import WORKER, Trio


def running(core: SchedulerCore) -> int:
    return core.stats().running


def test_a_workers_limits_reach_the_scheduler() -> None:
    trio = Trio(num_blocks=8, block_size=4, max_context=300)
    info = trio.scheduler._life.workers[WORKER].info
    assert info is not None
    settings = trio.worker.settings
    said = (info.max_sequences, info.max_step_tokens, info.max_context)
    assert said == (settings.max_sequences, settings.max_step_tokens, settings.max_context) == (256, 300, 300)


def test_no_more_are_acquired_than_the_worker_takes_and_the_others_wait() -> None:
    bench = Bench(limits=(2, 0, 0))
    bench.hold = True
    for name in "abc":
        assert bench.submit(name, 3, max_new=1) is None
    bench.hold = False
    bench.advance()
    assert len(bench.ops(Acquire)) == 2
    bench.answer()
    bench.submit("d", 3)
    assert (running(bench.core), len(bench.ops(Acquire))) == (2, 0)
    bench.result({1: 5, 2: 5})
    assert len(bench.ops(Acquire)) == 2, "their places are free: the next plan detaches before it attaches"


def test_two_workers_are_filled_and_not_overfilled() -> None:
    index = FakeIndex(4)
    index.max_sequences = 2
    world = World(SchedulerSettings(instance=b"instance", max_running=8, max_step_tokens=64), index)
    world.add_worker("a", 40)
    world.add_worker("b", 40)
    world.attach_index()
    for number in range(9):
        assert world.submit(f"r{number}", [1, 2, number], 4, seed=number) is None
    most: dict[WorkerId, int] = {}
    while world._events:
        world.run(until_ms=world.now_ns / 1e6 + 0.2)
        for worker_id, worker in world.workers.items():
            most[worker_id] = max(most.get(worker_id, 0), len(worker.residents))
    assert most == {"a": 2, "b": 2}
    assert all(world.finish_of(f"r{number}") is Finish.LENGTH for number in range(9))


def test_a_step_has_no_more_tokens_than_the_worker_computes() -> None:
    bench = Bench(limits=(0, 5, 0))
    bench.submit("a", 12)
    bench.answer()
    assert rows_of(bench.plans[0]) == {1: 5}


def test_every_sequence_of_a_worker_has_its_token_of_a_step() -> None:
    bench = Bench(limits=(8, 2, 0))
    for name in "abc":
        bench.submit(name, 1)
        bench.settle()
    assert running(bench.core) == 2


def test_what_is_longer_than_every_workers_context_is_refused() -> None:
    bench = Bench(limits=(0, 0, 12))
    refused = bench.submit("a", 12)
    assert refused is not None
    assert refused.reason is RefusedReason.TOO_LONG
    assert "12" in refused.message


def test_an_answer_ends_with_the_workers_context() -> None:
    bench = Bench(limits=(0, 0, 8))
    bench.submit("a", 6, max_new=50)
    bench.answer()
    bench.result({1: 5})
    bench.result({1: 5})
    assert bench.last("a").finish is Finish.LENGTH


def test_what_came_before_any_worker_was_listed_is_cut_or_ended() -> None:
    bench = Bench(limits=(0, 0, 8))
    bench.list_workers()
    bench.submit("cut", 6, max_new=50)
    bench.submit("long", 9, max_new=50)
    bench.list_workers(2)
    bench.core.worker_attached(WorkerId("w"), WorkerEpoch(2), True, bench.now_ns)
    bench.advance()
    (acquire,) = bench.ops(Acquire)
    assert isinstance(acquire, Acquire)
    assert acquire.reserve_tokens <= 8
    error = bench.last("long").error
    assert error is not None
    assert error.code is OutputErrorCode.NEVER_FITS


@pytest.mark.parametrize("cached_blocks", [0, 3])
def test_a_plan_attaches_no_more_bytes_than_a_message_takes(
    monkeypatch: pytest.MonkeyPatch, cached_blocks: int
) -> None:
    monkeypatch.setattr(chunks, "ATTACH_BYTES_MAX", 2 * 13 * 4)
    bench = Bench()
    bench.hold = True
    for name in "abcde":
        assert bench.submit(name, 13, max_new=1) is None
    bench.hold = False
    bench.advance()
    bench.answer(cached_blocks=cached_blocks)
    assert [[start.sequence_id for start in plan.attach] for plan in bench.plans] == [[1, 2], [3, 4]]
    bench.result({1: 5, 2: 5})
    assert [start.sequence_id for start in bench.plans[-1].attach] == [5]


def test_a_sequence_that_is_too_long_for_the_bound_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ATTACH_BYTES_MAX", 4)
    bench = Bench()
    bench.submit("a", 13)
    bench.answer()
    assert [start.sequence_id for start in bench.plans[0].attach] == [1]


def test_a_batch_of_ops_has_no_more_bytes_than_a_message_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "OPS_BYTES_MAX", 2 * 13 * 4)
    bench = Bench()
    bench.hold = True
    for name, num_tokens in (("a", 13), ("b", 13), ("c", 13), ("long", 60), ("d", 13), ("e", 13)):
        assert bench.submit(name, num_tokens, max_new=1) is None
    bench.hold = False
    bench.advance()
    asked = [[len(op.tokens) // 4 for op in batch if isinstance(op, Acquire)] for batch in bench.batches]
    assert asked == [[13, 13], [13], [60], [13, 13]], "in their order; the first of a batch always goes"
    bench.answer()
    assert bench.core.stats().running == 6
