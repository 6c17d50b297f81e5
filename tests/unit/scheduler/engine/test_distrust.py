"""A worker refuses blocks that the cache service shared out: seals are repeated, entries are reported, nobody pays."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.messages.index import Acquire, AnswerBatch, Distrust, Distrusted, Grant, Invalid, Op, Release
from coppice.messages.step import Refusal, RefusalCode, SequenceStart
from coppice_scheduler.core.state.request import OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import Bench, W
from tests.fakes.scheduler.scheduler_worker import u32

STRICT = SchedulerSettings(instance=b"instance", max_running=8, max_step_tokens=64, max_retries=0)


def grant(bench: Bench, op: Op, shared: bytes) -> Grant:
    answer = bench.yes(op, cached_blocks=2)
    assert isinstance(answer, Grant)
    return replace(answer, shared=shared)


def share(bench: Bench, shared: bytes) -> None:
    """Grant every waiting Acquire with the same shared blocks, and say yes to the rest."""
    while bench.batches:
        ops = bench.batches.pop(0)
        answers = tuple(grant(bench, op, shared) if isinstance(op, Acquire) else bench.yes(op) for op in ops)
        bench.core.index_message(AnswerBatch(bench.cache_epoch, answers), bench.now_ns)
    bench.advance()


def start_of(bench: Bench) -> SequenceStart:
    """The next attach; plans before it are answered."""
    while not bench.plans[0].attach:
        bench.result()
    return bench.plans[0].attach[0]


def refuse(bench: Bench, code: RefusalCode, *starts: SequenceStart, handle: int = 0) -> None:
    refusals = tuple(
        Refusal(start.sequence_id, code, handle or int.from_bytes(start.shared[:8], "little")) for start in starts
    )
    bench.result(refusals=refusals)


def failed(bench: Bench) -> list[str]:
    return [output.request_id for output in bench.outputs if output.finish is not None]


def test_a_stale_entry_is_reported_before_the_request_asks_again() -> None:
    bench = Bench(STRICT)
    bench.submit("r", 9)
    share(bench, bench.handles(2))
    start = start_of(bench)
    refuse(bench, RefusalCode.STALE, start)
    (ops,) = bench.batches
    assert [type(op) for op in ops] == [Distrust, Acquire]
    assert ops[0] == Distrust(start.lease_id, start.shared[:8])
    bench.answer()
    assert not failed(bench), "it cost no retry"
    bench.result()
    assert u32(bench.plans[0].detach) == [start.sequence_id]
    bench.result()
    assert [op.lease_id for op in bench.ops(Release)] == [start.lease_id], "after its removal, as ever"


def test_a_stale_block_of_its_own_is_a_fault_as_before() -> None:
    bench = Bench(STRICT)
    bench.submit("r", 9)
    share(bench, bench.handles(2))
    start = start_of(bench)
    refuse(bench, RefusalCode.STALE, start, handle=int.from_bytes(start.owned[:8], "little"))
    assert not bench.ops(Distrust)
    error = bench.last("r").error
    assert error is not None
    assert (error.code, error.retry_after_ms) == (OutputErrorCode.INTERNAL, 1000)
    assert error.message.startswith("worker w refused this request's blocks: stale, handle 0x")


def test_seals_that_the_worker_lacks_are_repeated_first_and_distrusted_when_that_was_in_vain() -> None:
    bench = Bench(STRICT)
    shared = bench.handles(2)
    bench.submit("r", 9)
    share(bench, shared)
    start = start_of(bench)
    refuse(bench, RefusalCode.WRONG_SEAL, start)
    assert (start.shared, start.shared_seals) in [(plan.sealed, plan.seals) for plan in bench.plans]
    assert not bench.ops(Distrust)
    share(bench, shared)
    refuse(bench, RefusalCode.WRONG_SEAL, start_of(bench))
    assert [op.handles for op in bench.ops(Distrust) if isinstance(op, Distrust)] == [shared[:8]]
    assert not failed(bench)


def test_a_refusal_from_before_the_seals_were_repeated_proves_nothing() -> None:
    bench = Bench(STRICT)
    shared = bench.handles(2)
    bench.submit("r", 9)
    bench.submit("s", 9)
    share(bench, shared)
    refuse(bench, RefusalCode.WRONG_SEAL, *bench.plans[0].attach)
    assert not bench.ops(Distrust)
    assert not failed(bench)


def test_a_new_session_with_the_worker_forgets_what_was_repeated() -> None:
    bench = Bench(STRICT)
    shared = bench.handles(2)
    bench.submit("r", 9)
    share(bench, shared)
    refuse(bench, RefusalCode.WRONG_SEAL, start_of(bench))
    worker = bench.core._life.workers[W]
    assert worker.resealed
    bench.core.worker_attached(W, worker.epoch, True, bench.now_ns)
    assert not worker.resealed


@pytest.mark.parametrize("kind", [Distrusted, Invalid])
def test_the_answer_leaves_the_lease_alone(kind: type) -> None:
    bench = Bench(STRICT)
    bench.submit("r", 9)
    share(bench, bench.handles(2))
    start = start_of(bench)
    refuse(bench, RefusalCode.STALE, start)
    ops = bench.batches.pop(0)
    answer = kind(start.lease_id) if kind is Distrusted else kind(start.lease_id, "why")
    bench.core.index_message(AnswerBatch(bench.cache_epoch, (answer, bench.yes(ops[1]))), bench.now_ns)
    bench.advance()
    assert start.lease_id in bench.core._life.leases.leases, "its blocks are still attached at the worker"


def test_it_is_said_again_after_the_cache_service_lost_the_link() -> None:
    bench = Bench(STRICT)
    bench.submit("r", 9)
    share(bench, bench.handles(2))
    start = start_of(bench)
    refuse(bench, RefusalCode.STALE, start)
    bench.batches.clear()
    life = bench.core._life
    bench.core.index_attached(life.leases.epoch, bench.cache_epoch, True, bench.now_ns)
    bench.advance()
    assert Distrust(start.lease_id, start.shared[:8]) in bench.ops(Distrust)
