"""Copies between the device's blocks and the host's, as the cache service orders them.

    order      src checked and held, dst opened      copied      dst sealed, both let go
    -----> . ------------------------------------> . -----> . ---------------------------> CopiesDone
           `- refused: nothing is touched, failed

Both ends are users of their blocks while the copy runs: no plan opens what is read, and none attaches what is written,
as it has no seal before it is whole. Copies run beside steps, so nothing here may rely on the turn of a step.

A fence is acknowledged when the copies that were under way before it are over (I9), whoever ordered them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from coppice.handles import block_ids, handles_array
from coppice.ids import WorkerEpoch
from coppice.messages.registration import CopiesDone, CopyOrder, CopyOrders, Direction, Fence
from coppice.seals import SEAL_BYTES
from coppice_worker.core.batch.step_batch import Int32, UInt64
from coppice_worker.core.blocks.pool import COPIER, BlockPool

_NOBODYS_LEASE: UInt64 = np.full(2, np.iinfo(np.uint64).max, np.uint64)


@dataclass(frozen=True, slots=True)
class CopyWork:
    """Copy blocks src [N] of one tier to dst [N] of the other; no block stands twice in dst."""

    number: int  # never used again
    direction: Direction
    src: Int32
    dst: Int32


@dataclass(frozen=True, slots=True)
class Ordered:
    """What to copy now, and what can be answered at once."""

    works: tuple[CopyWork, ...]
    answer: CopiesDone | None


@dataclass(frozen=True, slots=True)
class _Copy:
    order: CopyOrder
    work: CopyWork


class CopyBooks:
    """Which copies are under way, and how the latest orders ended."""

    def __init__(self, device: BlockPool, host: BlockPool, max_orders: int) -> None:
        self._device = device
        self._host = host
        self._max_orders = max_orders  # under way at once; twice as many answers are remembered
        self._under_way: dict[int, _Copy] = {}  # by number
        self._numbers: dict[int, int] = {}  # by order id, of the present cache epoch
        self._answers: OrderedDict[int, bool] = OrderedDict()  # order id -> whether it was done
        self._last_number = 0
        self._held_up: list[tuple[Fence, set[int]]] = []  # and the copies that each waits for

    def take(self, message: CopyOrders, worker_epoch: WorkerEpoch) -> Ordered:
        """Starts what can be started. An order that is repeated starts nothing: it gets its answer again."""
        if message.worker_epoch != worker_epoch or not self._host.num_blocks:
            failed = tuple(order.order_id for order in message.orders)
            return Ordered((), CopiesDone(message.worker_epoch, (), failed))
        works = []
        for order in message.orders:
            if order.order_id in self._numbers or order.order_id in self._answers:
                continue
            if self._may_start(order):
                works.append(self._start(order))
            else:
                self._answer(order.order_id, done=False)
        return Ordered(tuple(works), self._answers_to(message))

    def finish(
        self, numbers: tuple[int, ...], worker_epoch: WorkerEpoch
    ) -> tuple[CopiesDone | None, tuple[Fence, ...]]:
        """These copies are over, and what they wrote is whole. Gives the answer, if anybody waits for one, and the
        fences that nothing holds up any more."""
        done = []
        for number in numbers:
            copy = self._under_way.pop(number, None)
            if copy is None:
                continue  # of an earlier worker epoch
            source, target = self._pools(copy.work.direction)
            source.leave(copy.work.src, COPIER)
            target.leave(copy.work.dst, COPIER)
            target.set_seals(handles_array(copy.order.dst), copy.order.seals)
            if self._numbers.get(copy.order.order_id) == number:
                del self._numbers[copy.order.order_id]
                self._answer(copy.order.order_id, done=True)
                done.append(copy.order.order_id)
        for _, copies in self._held_up:
            copies.difference_update(numbers)
        fences = tuple(fence for fence, copies in self._held_up if not copies)
        self._held_up = [(fence, copies) for fence, copies in self._held_up if copies]
        return CopiesDone(worker_epoch, tuple(done)) if done else None, fences

    def hold_up(self, fence: Fence) -> bool:
        """Whether copies are under way; then `finish` gives the fence when the last of them is over."""
        if self._under_way:
            self._held_up.append((fence, set(self._under_way)))
        return bool(self._under_way)

    def forget_fences(self) -> None:
        self._held_up.clear()

    def forget_orders(self) -> None:
        """Another cache service orders from now on and counts anew: what is under way goes on, and is not answered."""
        self._numbers.clear()
        self._answers.clear()

    def forget(self) -> None:
        """A new worker epoch. No copy is under way any more, and what the host has is unknown."""
        self.forget_orders()
        self.forget_fences()
        self._under_way.clear()
        self._host.reset()

    def hold_device_blocks(self) -> None:
        """The device pool has forgotten all users; those that copies use are used all the same."""
        for copy in self._under_way.values():
            if copy.work.direction is Direction.DEMOTE:
                self._device.read(handles_array(copy.order.src))
            else:
                self._device.writer[copy.work.dst] = COPIER

    def device_users(self) -> tuple[Int32, Int32]:
        """Blocks of the device that copies read, one entry for each reader, and those that they write."""
        works = [copy.work for copy in self._under_way.values()]
        read = [work.src for work in works if work.direction is Direction.DEMOTE]
        written = [work.dst for work in works if work.direction is Direction.PROMOTE]
        none = np.zeros(0, np.int32)
        return np.concatenate([none, *read]), np.concatenate([none, *written])

    def check(self) -> None:
        """The users of host blocks are recomputable from the copies (I5-I7)."""
        readers, writer = np.zeros_like(self._host.readers), np.zeros_like(self._host.writer)
        for copy in self._under_way.values():
            if copy.work.direction is Direction.PROMOTE:
                np.add.at(readers, copy.work.src, 1)
            else:
                writer[copy.work.dst] = COPIER
        assert (readers == self._host.readers).all(), "readers of host blocks do not match the copies"
        assert (writer == self._host.writer).all(), "writers of host blocks do not match the copies"
        assert not self._host.seal[writer != 0].any(), "a sealed host block is written"
        assert set(self._numbers.values()) <= set(self._under_way), "an order waits for a copy that is over"

    def _pools(self, direction: Direction) -> tuple[BlockPool, BlockPool]:
        """Source and target."""
        return (self._device, self._host) if direction is Direction.DEMOTE else (self._host, self._device)

    def _may_start(self, order: CopyOrder) -> bool:
        """Generation and seal of every source block, a newer generation and no user for every target block."""
        count, source_bytes = len(order.seals) // SEAL_BYTES, len(order.src)
        if not count or len(order.seals) % SEAL_BYTES or source_bytes != 8 * count or len(order.dst) != source_bytes:
            return False
        if len(self._under_way) >= self._max_orders:
            return False
        source, target = self._pools(order.direction)
        src, dst = handles_array(order.src), handles_array(order.dst)
        if order.direction is Direction.DEMOTE:
            # What was published a moment ago may be demoted before the plan that brings its seals: this is the same
            # word of the cache service, on a shorter way. Blocks that have another seal stay as they are.
            source.set_seals(src, order.seals)
        if source.why_not_read(src, order.seals) is not None:
            return False
        if len(np.unique(block_ids(order.dst))) < len(dst):
            return False
        return target.why_not_write(dst, _NOBODYS_LEASE) is None

    def _start(self, order: CopyOrder) -> CopyWork:
        source, target = self._pools(order.direction)
        source.read(handles_array(order.src))
        target.open(handles_array(order.dst), _NOBODYS_LEASE, COPIER)
        self._last_number += 1
        work = CopyWork(self._last_number, order.direction, block_ids(order.src), block_ids(order.dst))
        self._under_way[work.number] = _Copy(order, work)
        self._numbers[order.order_id] = work.number
        return work

    def _answer(self, order_id: int, *, done: bool) -> None:
        self._answers[order_id] = done
        while len(self._answers) > 2 * self._max_orders:
            self._answers.popitem(last=False)

    def _answers_to(self, message: CopyOrders) -> CopiesDone | None:
        known = [order.order_id for order in message.orders if order.order_id in self._answers]
        if not known:
            return None
        done = tuple(order_id for order_id in known if self._answers[order_id])
        return CopiesDone(message.worker_epoch, done, tuple(i for i in known if not self._answers[i]))
