"""Orders to copy between the tiers over a real session: they run beside steps and hold up fences and new epochs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from coppice.ids import WorkerEpoch
from coppice.messages.registration import NOTHING_LOST, CopiesDone, CopyOrder, CopyOrders, Direction, Fence, FenceAck
from coppice.messages.step import StepPlan
from coppice.session.link import Attached
from coppice_worker.core.batch.step_batch import Int32, StepBatch, StepOutput
from coppice_worker.disk.disk_pool import DiskPool
from coppice_worker.edge.copies.costs import NUM_UNUSUAL
from coppice_worker.edge.metrics import WorkerMetrics
from tests.contract.worker.test_worker_service import WAIT_S, CountingExecutor, Planner, Stack, handle, start, u32
from tests.fakes.cache.registrar import registered
from tests.fakes.waiting import wait_for

NOW = WorkerEpoch(1)


def seal(number: int) -> bytes:
    return number.to_bytes(16, "big")


class GatedTiers:
    """Remembers what it is to copy, and copies when it is let."""

    bytes_per_block = 100

    def __init__(self) -> None:
        self.begun: list[tuple[str, list[int], list[int]]] = []
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.is_copying = False
        self.error: Exception | None = None

    def demote(self, src: Int32, dst: Int32) -> None:
        self._copy("demote", src, dst)

    def promote(self, src: Int32, dst: Int32) -> None:
        self._copy("promote", src, dst)

    def _copy(self, what: str, src: Int32, dst: Int32) -> None:
        self.is_copying = True
        self.begun.append((what, src.tolist(), dst.tolist()))
        assert self.may_copy.wait(WAIT_S)
        self.is_copying = False
        if self.error is not None:
            raise self.error


class GatedExecutor(CountingExecutor):
    def __init__(self, tiers: GatedTiers) -> None:
        super().__init__()
        self._tiers = tiers
        self.zeroed_beside_a_copy = False
        self.may_compute = threading.Event()
        self.may_compute.set()
        self.is_computing = threading.Event()

    def zero_blocks(self, block_ids: Int32) -> None:
        self.zeroed_beside_a_copy |= self._tiers.is_copying
        super().zero_blocks(block_ids)

    def execute(self, batch: StepBatch) -> StepOutput:
        self.is_computing.set()
        assert self.may_compute.wait(WAIT_S)
        self.is_computing.clear()
        return super().execute(batch)


class TierStack(Stack):
    """Blocks 3 and 4 of the device are full and sealed, 3 and 4."""

    def __init__(self, disk: DiskPool | None = None) -> None:
        self.tiers = GatedTiers()
        self.gated = GatedExecutor(self.tiers)
        self.registry = CollectorRegistry()
        super().__init__(self.gated, self.tiers, 6, WorkerMetrics(self.registry, "w"), disk)
        self.block_ns: list[int] = []  # what copying one costs, as answers said
        self.planner = Planner(self.address, epoch=7)
        self.planner.next(Attached)
        owned = handle(3) + handle(4)
        self.planner.step(StepPlan(1, attach=(start(1, 8, owned),), rows=u32(1), row_tokens=u32(8)))
        self.planner.step(StepPlan(2, sealed=owned, seals=seal(3) + seal(4), detach=u32(1)))

    def close(self) -> None:
        self.tiers.may_copy.set()
        self.gated.may_compute.set()
        self.planner.close()
        super().close()

    def order(self, *orders: CopyOrder, epoch: WorkerEpoch = NOW) -> None:
        self.registrar.tell(CopyOrders(epoch, orders))

    def next(self) -> Any:
        """What was said, without what it cost."""
        said = self.registrar.received.get(timeout=WAIT_S)
        if not isinstance(said, CopiesDone):
            return said
        self.block_ns.append(said.copy_ns_per_block)
        return replace(said, prefill_ns_per_token=0, copy_ns_per_block=0, disk_ns_per_block=0)


@pytest.fixture
def stack() -> Iterator[TierStack]:
    stack = TierStack()
    yield stack
    stack.close()


def demotion(number: int, block: int = 3, to: int = 0, counter: int = 1) -> CopyOrder:
    return CopyOrder(number, Direction.DEMOTE, handle(block), handle(to, counter), seal(block))


def promotion(number: int, source: int = 0, to: int = 6, content: int = 3) -> CopyOrder:
    return CopyOrder(number, Direction.PROMOTE, handle(source), handle(to, 9), seal(content))


def test_an_answer_says_what_a_block_costs_once_some_were_copied(stack: TierStack) -> None:
    for number in range(1, NUM_UNUSUAL + 1):
        stack.order(demotion(number, counter=number))
        assert stack.next() == CopiesDone(NOW, (number,))
    assert [block_ns > 0 for block_ns in stack.block_ns] == [False] * (NUM_UNUSUAL - 1) + [True]


def test_a_block_goes_to_the_host_and_back(stack: TierStack) -> None:
    assert (stack.register.num_host_blocks, stack.register.host_generations) == (6, bytes(48))
    stack.order(demotion(1))
    assert stack.next() == CopiesDone(NOW, (1,))
    stack.order(promotion(2))
    assert stack.next() == CopiesDone(NOW, (2,))
    assert stack.tiers.begun == [("demote", [3], [0]), ("promote", [0], [6])]
    reader = replace(start(9, 6, handle(5)), num_computed_tokens=4, shared=handle(6, 9), shared_seals=seal(3))
    assert stack.planner.step(StepPlan(3, attach=(reader,))).refusals == ()

    def promoted_bytes() -> float | None:
        return stack.registry.get_sample_value("coppice_worker_copied_bytes_total", {"direction": "promote"})

    wait_for(lambda: promoted_bytes() == GatedTiers.bytes_per_block, "the metrics")


def test_copies_run_beside_a_step(stack: TierStack) -> None:
    stack.gated.may_compute.clear()
    stack.planner.link.post(StepPlan(3, attach=(start(5, 2, handle(5)),), rows=u32(5), row_tokens=u32(2)), 1)
    assert stack.gated.is_computing.wait(WAIT_S)
    stack.order(demotion(1))
    assert stack.next() == CopiesDone(NOW, (1,))
    assert stack.gated.is_computing.is_set()


def test_what_waits_is_copied_and_answered_together_and_promotions_go_first(stack: TierStack) -> None:
    stack.order(demotion(1))
    assert stack.next() == CopiesDone(NOW, (1,))
    stack.tiers.may_copy.clear()
    stack.order(demotion(2, block=4, to=1))
    wait_for(lambda: len(stack.tiers.begun) == 2, "the copy to begin")
    stack.order(demotion(3, to=2), demotion(4, block=4, to=3), promotion(5))
    stack.order(promotion(6, to=7))
    stack.order(demotion(7, to=9))  # there is no such block
    assert stack.next() == CopiesDone(NOW, (), (7,))
    stack.tiers.may_copy.set()
    assert [stack.next() for _ in range(3)] == [CopiesDone(NOW, (2,)), CopiesDone(NOW, (5, 6)), CopiesDone(NOW, (3, 4))]
    assert stack.tiers.begun[2:] == [("promote", [0, 0], [6, 7]), ("demote", [3, 4], [2, 3])]
    refused = "coppice_worker_copies_refused_total"  # counted after it is answered
    wait_for(lambda: stack.registry.get_sample_value(refused) == 1, "the count of what was refused")


def test_a_fence_is_acknowledged_after_the_copies_before_it(stack: TierStack) -> None:
    stack.tiers.may_copy.clear()
    stack.order(demotion(1))
    stack.registrar.tell(Fence(5, NOW, report=True))
    stack.registrar.tell(CopyOrders(WorkerEpoch(8), (demotion(2),)))
    assert stack.next() == CopiesDone(WorkerEpoch(8), (), (2,), lost_from=(NOTHING_LOST,)), (
        "all that came before was taken"
    )
    stack.tiers.may_copy.set()
    # Two threads say these: where the fence comes to its turn just as the copy ends, either may be first.
    said = [stack.next(), stack.next()]
    assert CopiesDone(NOW, (1,)) in said
    (acknowledged,) = [message for message in said if isinstance(message, FenceAck)]
    assert acknowledged.host_seals[:16] == seal(3), "what was copied is there"


def test_an_answer_that_was_lost_with_its_session_is_given_again(stack: TierStack) -> None:
    stack.order(demotion(1))
    assert stack.next() == CopiesDone(NOW, (1,))
    stack.registrar.restart()
    register = stack.next()
    assert register.host_seals[:16] == seal(3)
    stack.order(demotion(1))
    assert stack.next() == CopiesDone(NOW, (1,))
    assert len(stack.tiers.begun) == 1


def test_a_new_epoch_waits_for_the_copy_that_runs_and_drops_those_that_wait(stack: TierStack) -> None:
    stack.tiers.may_copy.clear()
    stack.order(demotion(1))
    wait_for(lambda: bool(stack.tiers.begun), "the copy to begin")
    stack.order(promotion(2))
    assert stack.next() == CopiesDone(NOW, (), (2,)), "the host has nothing yet"
    stack.order(demotion(3, block=4, to=1))
    copier = stack.service._copier
    assert copier is not None
    wait_for(lambda: copier._lanes[0]._down, "the order that waits")
    stack.registrar.tell(registered(WorkerEpoch(2)))
    wait_for(lambda: not copier._lanes[0]._down, "it to be dropped")
    stack.tiers.may_copy.set()
    stack.registrar.tell(Fence(6, WorkerEpoch(2), report=True))
    acknowledged = stack.next()
    assert (acknowledged.worker_epoch, acknowledged.host_generations) == (2, bytes(48))
    assert stack.tiers.begun == [("demote", [3], [0])]
    assert sorted(stack.executor.zeroed) == list(range(8))
    assert not stack.gated.zeroed_beside_a_copy


def test_a_copy_that_fails_ends_the_worker(stack: TierStack) -> None:
    stack.tiers.error = RuntimeError("the link is gone")
    stack.order(demotion(1))
    wait_for(lambda: bool(stack.failures), "the failure")
    assert str(stack.failures.pop()) == "the link is gone"
