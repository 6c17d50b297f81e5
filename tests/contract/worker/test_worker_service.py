"""The worker on real ports: registration, plans and results, refusals, fences, resumption. The device is a counter."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from coppice.addresses import Address
from coppice.edge import codec
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.link_client import LinkClient
from coppice.edge.session_listener import SessionListener
from coppice.handles import make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, LeaseId, Namespace, SchedulerEpoch, SequenceId, WorkerEpoch, WorkerId
from coppice.messages.registration import Draining, Fence, FenceAck, Register, Registered
from coppice.messages.step import RefusalCode, SamplingParams, SequenceStart, StepPlan, StepResult
from coppice.session.frames import Reject, RejectCode
from coppice.session.link import Attached
from coppice.session.vouchers import scheduler_voucher
from coppice_rpc.v1 import worker_pb2, worker_pb2_grpc
from coppice_worker.core.batch.step_batch import Int32, PoolSpec, StepBatch, StepOutput
from coppice_worker.core.batch.steps import WorkerCoreSettings
from coppice_worker.core.worker import WorkerCore
from coppice_worker.disk.disk_pool import DiskPool
from coppice_worker.edge.copies.copier import TierCopier
from coppice_worker.edge.runner import StepObserver
from coppice_worker.edge.service import WorkerService
from tests.fakes.cache.registrar import SCHEDULER_KEY, Registrar
from tests.fakes.waiting import wait_for

WAIT_S = 60
GREEDY = SamplingParams(temperature=0.0)


class CountingExecutor:
    """Samples 1000 + the position of the sampled token."""

    pool = PoolSpec(num_blocks=8, block_size=4)

    def __init__(self) -> None:
        self.zeroed: list[int] = []

    def zero_blocks(self, block_ids: Int32) -> None:
        self.zeroed += block_ids.tolist()

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        raise AssertionError("no test copies")

    def execute(self, batch: StepBatch) -> StepOutput:
        return StepOutput((batch.sample.position + 1000).astype(np.int32))


class Stack:
    """A worker with its registrar."""

    def __init__(
        self,
        executor: CountingExecutor | None = None,
        tiers: TierCopier | None = None,
        num_host_blocks: int = 0,
        observer: StepObserver | None = None,
        disk: DiskPool | None = None,
    ) -> None:
        self.registrar = Registrar()
        self.failures: list[BaseException] = []
        self.executor = executor or CountingExecutor()
        self.listener = SessionListener(Address("127.0.0.1", 0))
        self.server = GrpcServer("127.0.0.1:0", ("coppice_rpc.v1.Worker",), None, "worker")
        self.address = str(self.listener.address)
        self.grpc_address = f"127.0.0.1:{self.server.port}"
        core = WorkerCore(
            WorkerCoreSettings(
                worker_id=WorkerId("w0"),
                address=self.address,
                pool=CountingExecutor.pool,
                namespace=Namespace(b"n"),
                model="counter",
                num_host_blocks=num_host_blocks,
                num_disk_blocks=0 if disk is None else disk.num_blocks,
            )
        )
        if disk is not None:
            core.disk_pool.load(*disk.reported())
        self.service = WorkerService(
            core, self.executor, observer or StepObserver(), self.failures.append, tiers, disk=disk
        )
        self.server.add(self.service.add_to)
        self.service.serve(self.listener, self.server)
        self.service.register_with(self.registrar.address)
        self.register: Register = self.registrar.received.get(timeout=WAIT_S)
        wait_for(lambda: not self.service.problems, "the worker to hear that it is registered")

    def close(self) -> None:
        self.service.stop(0)
        self.registrar.close()
        assert not self.failures


class Planner:
    """A scheduler's end of the session."""

    def __init__(self, address: str, epoch: int, voucher: bytes | None = None) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        shown = scheduler_voucher(SCHEDULER_KEY, SchedulerEpoch(epoch)) if voucher is None else voucher
        name = f"scheduler-{epoch}"
        self.link = LinkClient(codec.STEPS, address, self, name, "worker", epoch=epoch, voucher=shown)
        self.link.start()

    def next(self, kind: type) -> Any:
        event = self.events.get(timeout=WAIT_S)
        while isinstance(event, str) or (isinstance(event, Reject) and kind is not Reject):
            event = self.events.get(timeout=WAIT_S)
        assert isinstance(event, kind), event
        return event

    def step(self, plan: StepPlan) -> StepResult:
        self.link.post(plan, 1)
        result: StepResult = self.next(StepResult)
        return result

    def close(self) -> None:
        self.link.stop()

    def link_attached(self, attached: Attached, attachment: int) -> None:
        self.events.put(attached)

    def link_body(self, body: Any, attachment: int) -> None:
        self.events.put(body)

    def link_lost(self, reason: str) -> None:
        self.events.put(reason)

    def link_rejected(self, reject: Reject) -> None:
        self.events.put(reject)


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack()
    yield stack
    stack.close()


@pytest.fixture
def planner(stack: Stack) -> Iterator[Planner]:
    planner = Planner(stack.address, epoch=7)
    yield planner
    planner.close()


def handle(block: int, counter: int = 1) -> bytes:
    return pack_handle(BlockId(block), make_generation(CacheEpoch(1), counter)).to_bytes(8, "little")


def start(sequence: int, num_tokens: int, owned: bytes) -> SequenceStart:
    tokens = np.arange(num_tokens, dtype="<u4").tobytes()
    lease = LeaseId(sequence.to_bytes(16, "little"))
    return SequenceStart(SequenceId(sequence), lease, tokens, 0, b"", b"", owned, GREEDY)


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def test_registers_with_the_arrays_of_an_empty_pool(stack: Stack) -> None:
    assert stack.register.worker_id == "w0"
    assert stack.register.worker_epoch == 0
    assert stack.register.generations == bytes(8 * 8)
    assert stack.register.seals == bytes(8 * 16)


def test_computes_plans_in_order_and_tells_of_it(stack: Stack, planner: Planner) -> None:
    attached = planner.next(Attached)
    assert (attached.fresh, attached.epoch, attached.server_epoch) == (True, 7, 1)
    owned = handle(3) + handle(5)
    first = StepPlan(1, attach=(start(1, 6, owned),), zero=handle(5), rows=u32(1), row_tokens=u32(4))
    assert replace(planner.step(first), duration_us=0) == StepResult(1, num_tokens=4)
    second = planner.step(StepPlan(2, rows=u32(1), row_tokens=u32(2)))
    assert (second.sampled_ids, second.sampled_tokens, second.num_tokens) == (u32(1), u32(1006), 2)
    third = planner.step(StepPlan(3, repeat_rows=False, rows=u32(1), row_tokens=u32(1)))
    assert third.sampled_tokens == u32(1007)
    assert planner.step(StepPlan(4, repeat_rows=True)).sampled_tokens == u32(1008)
    fifth = planner.step(StepPlan(5, repeat_rows=True))
    assert [(r.sequence_id, r.code) for r in fifth.refusals] == [(1, RefusalCode.NOT_RESERVED)]
    assert planner.step(StepPlan(6, detach=u32(1))).num_tokens == 0
    assert stack.executor.zeroed == [5]
    with grpc.insecure_channel(stack.grpc_address) as channel:
        stats = worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest(), timeout=WAIT_S)
    assert (stats.tokens_computed, stats.tokens_sampled, stats.refusals, stats.sequences) == (8, 3, 1, 0)


def test_a_stale_handle_is_refused_for_its_sequence_alone(planner: Planner) -> None:
    planner.next(Attached)
    planner.step(StepPlan(1, attach=(start(1, 2, handle(3, counter=5)),), rows=u32(1), row_tokens=u32(2)))
    plan = StepPlan(
        2,
        detach=u32(1),
        attach=(start(2, 2, handle(3, counter=4)), start(3, 2, handle(4))),
        rows=u32(2, 3),
        row_tokens=u32(2, 2),
    )
    result = planner.step(plan)
    assert [(r.sequence_id, r.code) for r in result.refusals] == [(2, RefusalCode.STALE)]
    assert result.sampled_ids == u32(3)


def test_a_fence_is_acknowledged_and_ends_the_session_for_good(stack: Stack, planner: Planner) -> None:
    planner.next(Attached)
    planner.step(StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2)))
    stack.registrar.fence(Fence(9, WorkerEpoch(1), scheduler_epochs=(SchedulerEpoch(7),), report=True))
    acknowledged = stack.registrar.received.get(timeout=WAIT_S)
    assert isinstance(acknowledged, FenceAck)
    assert acknowledged.fence_id == 9
    assert acknowledged.generations[3 * 8 : 4 * 8] == (int.from_bytes(handle(3), "little") >> 24).to_bytes(8, "little")
    assert "fenced" in planner.next(Reject).message
    heir = Planner(stack.address, epoch=8)
    assert heir.next(Attached).fresh
    heir.close()


def test_a_newer_scheduler_takes_over(stack: Stack, planner: Planner) -> None:
    planner.next(Attached)
    planner.step(StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2)))
    heir = Planner(stack.address, epoch=8)
    heir.next(Attached)
    result = heir.step(StepPlan(1, attach=(start(1, 2, handle(4)),), rows=u32(1), row_tokens=u32(2)))
    assert result.sampled_ids == u32(1)
    assert "newer" in planner.next(Reject).message
    heir.close()


def test_a_new_session_of_the_cache_service_finds_the_pool_as_it_is(stack: Stack, planner: Planner) -> None:
    planner.next(Attached)
    planner.step(StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2)))
    stack.registrar.restart()
    again = stack.registrar.received.get(timeout=WAIT_S)
    assert isinstance(again, Register)
    assert again.worker_epoch == 1
    assert again.generations != bytes(64)
    assert again.scheduler_epochs == (7,)
    assert planner.step(StepPlan(2, rows=u32(1), row_tokens=u32(1))).num_tokens == 1


def test_a_plan_out_of_order_ends_the_session(stack: Stack, planner: Planner) -> None:
    planner.next(Attached)
    planner.link.post(StepPlan(3, rows=b"", row_tokens=b""), 1)
    assert isinstance(planner.events.get(timeout=WAIT_S), str)


def test_a_new_session_under_the_same_epoch_starts_over(stack: Stack, planner: Planner) -> None:
    planner.next(Attached)
    planner.step(StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2)))
    again = Planner(stack.address, epoch=7)
    assert again.next(Attached).fresh
    result = again.step(StepPlan(1, attach=(start(2, 2, handle(4)),), rows=u32(2), row_tokens=u32(2)))
    assert result.sampled_ids == u32(2)
    again.close()


def test_a_draining_worker_says_so_and_waits_for_its_sequences(stack: Stack, planner: Planner) -> None:
    planner.next(Attached)
    planner.step(StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2)))
    with grpc.insecure_channel(stack.grpc_address) as channel:
        drained = worker_pb2_grpc.WorkerStub(channel).Drain.future(worker_pb2.DrainRequest(), timeout=WAIT_S)
        assert stack.registrar.received.get(timeout=WAIT_S) == Draining(WorkerEpoch(1))
        assert planner.step(StepPlan(2, rows=u32(1), row_tokens=u32(1))).num_tokens == 1
        assert not drained.done()
        planner.step(StepPlan(3, detach=u32(1)))
        drained.result()
    stack.registrar.restart()
    assert stack.registrar.received.get(timeout=WAIT_S).draining


def test_a_worker_that_has_another_epoch_since_it_said_that_it_drains_says_it_again(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc_address) as channel:
        worker_pb2_grpc.WorkerStub(channel).Drain(worker_pb2.DrainRequest(), timeout=WAIT_S)
    assert stack.registrar.received.get(timeout=WAIT_S) == Draining(WorkerEpoch(1))
    stack.registrar.tell(Registered(WorkerEpoch(9), CacheEpoch(1)))
    assert stack.registrar.received.get(timeout=WAIT_S) == Draining(WorkerEpoch(9))


def test_an_undrained_worker_registers_as_one_that_takes_requests(stack: Stack, planner: Planner) -> None:
    planner.next(Attached)
    planner.step(StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2)))
    with grpc.insecure_channel(stack.grpc_address) as channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        drained = worker.Drain.future(worker_pb2.DrainRequest(), timeout=WAIT_S)
        assert stack.registrar.received.get(timeout=WAIT_S) == Draining(WorkerEpoch(1))
        assert worker.Stats(worker_pb2.WorkerStatsRequest(), timeout=WAIT_S).draining
        worker.Undrain(worker_pb2.UndrainRequest(), timeout=WAIT_S)
        again = stack.registrar.received.get(timeout=WAIT_S)
        assert isinstance(again, Register)
        assert not again.draining
        assert again.worker_epoch == 1
        with pytest.raises(grpc.RpcError) as caught:
            drained.result()
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert not worker.Stats(worker_pb2.WorkerStatsRequest(), timeout=WAIT_S).draining
        assert planner.step(StepPlan(2, rows=u32(1), row_tokens=u32(1))).num_tokens == 1, "what runs goes on"


def test_a_worker_whose_process_ends_is_not_undrained(stack: Stack) -> None:
    assert stack.service.drain(lambda seconds: False, ends=True)
    with grpc.insecure_channel(stack.grpc_address) as channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            worker.Undrain(worker_pb2.UndrainRequest(), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert worker.Stats(worker_pb2.WorkerStatsRequest(), timeout=WAIT_S).draining


def test_a_forged_scheduler_epoch_changes_nothing(stack: Stack) -> None:
    """A Hello named the highest epoch there is, and the worker refused every other one until it was restarted."""
    assert is_refused(stack, (1 << 64) - 1)
    planner = Planner(stack.address, 7)
    try:
        assert planner.next(Attached).epoch == 7
        assert is_refused(stack, 7), "a session that goes on is not ended by whoever names its epoch"
        owned = StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2))
        assert planner.step(owned).step == 1
    finally:
        planner.close()


def is_refused(stack: Stack, epoch: int) -> bool:
    """Whether a scheduler that names this epoch without a voucher is told to come again."""
    forger = Planner(stack.address, epoch, voucher=b"forged")
    try:
        reject = forger.next(Reject)
        return reject.code is RejectCode.NOT_READY and "does not vouch" in reject.message
    finally:
        forger.close()
