"""Copies between the device's blocks and the host's, and between those and a disk's, as the cache service orders them.

    order      src checked and held, dst opened      copied      dst sealed, both let go
    -----> . ------------------------------------> . -----> . ---------------------------> CopiesDone
           `- refused: nothing is touched, failed  |
                                                   `- the disk took it not, or gave it not: no seal, failed

Both ends are users of their blocks while the copy runs: no plan opens what is read, and none attaches what is written,
as it has no seal before it is whole. Copies run beside steps, so nothing here may rely on the turn of a step.

A fence is acknowledged when the copies that were under way before it are over (I9), whoever ordered them. A disk may
take long, and no lease has blocks there: only a fence that reports what is there waits for its copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from coppice.handles import block_ids, handles_array
from coppice.ids import WorkerEpoch
from coppice.messages.registration import (
    NOTHING_LOST,
    CopiesDone,
    CopyOrder,
    CopyOrders,
    Direction,
    Fence,
    Registered,
)
from coppice.seals import SEAL_BYTES
from coppice_worker.core.batch.step_batch import Int32, UInt64
from coppice_worker.core.blocks.pool import COPIER, BlockPool

_OF_A_DISK = (Direction.STORE, Direction.LOAD)
NONE_FAILED: Mapping[int, int] = MappingProxyType({})
_NOBODYS_LEASE: UInt64 = np.full(2, np.iinfo(np.uint64).max, np.uint64)


@dataclass(frozen=True, slots=True)
class CopyWork:
    """Copy blocks src [N] of one tier to dst [N] of another; no block stands twice in dst."""

    number: int  # never used again
    direction: Direction
    src: Int32
    dst: Int32
    order: CopyOrder  # whose handles and seals a disk keeps beside the content
    worker_epoch: WorkerEpoch


@dataclass(frozen=True, slots=True)
class _Pools:
    source: BlockPool
    target: BlockPool


@dataclass(frozen=True, slots=True)
class Ordered:
    """What to copy now, and what can be answered at once."""

    works: tuple[CopyWork, ...]
    answer: CopiesDone | None


class CopyBooks:
    """Which copies are under way, and how the latest orders ended."""

    def __init__(self, device: BlockPool, host: BlockPool, disk: BlockPool, max_orders: int) -> None:
        self._device = device
        self._lower = {"host": host, "disk": disk}
        self._pools = {
            Direction.DEMOTE: _Pools(device, host),
            Direction.PROMOTE: _Pools(host, device),
            Direction.STORE: _Pools(host, disk),
            Direction.LOAD: _Pools(disk, host),
        }
        self._max_orders = max_orders  # under way at once; twice as many answers are remembered
        self._under_way: dict[int, CopyWork] = {}  # by number
        self._numbers: dict[int, int] = {}  # by order id, of the present cache epoch
        # By order id what of its source is lost, from which block on; None: it was done.
        self._answers: OrderedDict[int, int | None] = OrderedDict()
        self._last_number = 0
        self._held_up: list[tuple[Fence, set[int]]] = []  # and the copies that each waits for

    def take(self, message: CopyOrders, worker_epoch: WorkerEpoch) -> Ordered:
        """Starts what can be started. An order that is repeated starts nothing: it gets its answer again."""
        if message.worker_epoch != worker_epoch:
            failed = tuple(order.order_id for order in message.orders)
            lost_from = (NOTHING_LOST,) * len(failed)
            return Ordered((), CopiesDone(message.worker_epoch, (), failed, lost_from=lost_from))
        works = []
        for order in message.orders:
            if order.order_id in self._numbers or order.order_id in self._answers:
                continue
            if self._may_start(order):
                works.append(self._start(order, worker_epoch))
            else:
                self._answer(order.order_id, 0)
        return Ordered(
            tuple(works), self._answers_to([order.order_id for order in message.orders], message.worker_epoch)
        )

    def finish(
        self, numbers: tuple[int, ...], worker_epoch: WorkerEpoch, failed: Mapping[int, int] = NONE_FAILED
    ) -> tuple[CopiesDone | None, tuple[Fence, ...]]:
        """These copies are over, and what they wrote is whole, but for those in `failed`: from which of its blocks on
        the source has lost them, perhaps NOTHING_LOST. Gives the answer, if anybody waits for one, and the fences that
        nothing holds up any more."""
        ended: list[int] = []
        for number in numbers:
            work = self._under_way.pop(number, None)
            if work is None:
                continue  # of an earlier worker epoch
            lost_from = failed.get(number)
            if lost_from is not None and work.direction is not Direction.LOAD:
                lost_from = 0  # nobody asks
            self._end(work, lost_from)
            if self._numbers.get(work.order.order_id) == number:
                del self._numbers[work.order.order_id]
                self._answer(work.order.order_id, lost_from)
                ended.append(work.order.order_id)
        for _, copies in self._held_up:
            copies.difference_update(numbers)
        fences = tuple(fence for fence, copies in self._held_up if not copies)
        self._held_up = [(fence, copies) for fence, copies in self._held_up if copies]
        return self._answers_to(ended, worker_epoch), fences

    def _end(self, work: CopyWork, lost_from: int | None) -> None:
        pools = self._pools[work.direction]
        pools.source.leave(work.src, COPIER)
        pools.target.leave(work.dst, COPIER)
        if lost_from is None:
            pools.target.set_seals(handles_array(work.order.dst), work.order.seals)
        elif work.direction is Direction.LOAD:
            pools.source.lose(work.src[lost_from:])  # perhaps not all of them; the cache service forgets them

    def hold_up(self, fence: Fence) -> bool:
        """Whether it waits for copies that are under way; then `finish` gives it when the last of them is over."""
        awaited = {
            number for number, work in self._under_way.items() if fence.report or work.direction not in _OF_A_DISK
        }
        if awaited:
            self._held_up.append((fence, awaited))
        return bool(awaited)

    def forget_fences(self) -> None:
        self._held_up.clear()

    def forget_orders(self) -> None:
        """Another cache service orders from now on and counts anew: what is under way goes on, and is not answered."""
        self._numbers.clear()
        self._answers.clear()

    def forget(self, message: Registered) -> None:
        """A new worker epoch. No copy is under way any more, and what the lower tiers have is unknown, unless the cache
        service knows what is on the disk, and says so."""
        self.forget_orders()
        self.forget_fences()
        self._under_way.clear()
        for name, pool in self._lower.items():
            if name == "disk" and message.keeps_disk:
                pool.forget_users()
            else:
                pool.reset()
            pool.epoch = message.worker_epoch

    def hold_device_blocks(self) -> None:
        """The device pool has forgotten all users; those that copies use are used all the same."""
        for work in self._under_way.values():
            if work.direction is Direction.DEMOTE:
                self._device.read(handles_array(work.order.src))
            elif work.direction is Direction.PROMOTE:
                self._device.writer[work.dst] = COPIER

    def device_users(self) -> tuple[Int32, Int32]:
        """Blocks of the device that copies read, one entry for each reader, and those that they write."""
        works = list(self._under_way.values())
        read = [work.src for work in works if work.direction is Direction.DEMOTE]
        written = [work.dst for work in works if work.direction is Direction.PROMOTE]
        none = np.zeros(0, np.int32)
        return np.concatenate([none, *read]), np.concatenate([none, *written])

    def check(self) -> None:
        """The users of blocks below the device are recomputable from the copies (I5-I7)."""
        for name, pool in self._lower.items():
            readers, writer = np.zeros_like(pool.readers), np.zeros_like(pool.writer)
            for work in self._under_way.values():
                if self._pools[work.direction].source is pool:
                    np.add.at(readers, work.src, 1)
                if self._pools[work.direction].target is pool:
                    writer[work.dst] = COPIER
            assert (readers == pool.readers).all(), f"readers of {name} blocks do not match the copies"
            assert (writer == pool.writer).all(), f"writers of {name} blocks do not match the copies"
            assert not pool.seal[writer != 0].any(), f"a sealed {name} block is written"
        assert set(self._numbers.values()) <= set(self._under_way), "an order waits for a copy that is over"

    def _may_start(self, order: CopyOrder) -> bool:
        """Generation and seal of every source block, a newer generation and no user for every target block."""
        count, source_bytes = len(order.seals) // SEAL_BYTES, len(order.src)
        if not count or len(order.seals) % SEAL_BYTES or source_bytes != 8 * count or len(order.dst) != source_bytes:
            return False
        if len(self._under_way) >= self._max_orders:
            return False
        source, target = self._pools[order.direction].source, self._pools[order.direction].target
        if not source.num_blocks or not target.num_blocks:
            return False
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

    def _start(self, order: CopyOrder, worker_epoch: WorkerEpoch) -> CopyWork:
        pools = self._pools[order.direction]
        pools.source.read(handles_array(order.src))
        pools.target.open(handles_array(order.dst), _NOBODYS_LEASE, COPIER)
        self._last_number += 1
        src, dst = block_ids(order.src), block_ids(order.dst)
        work = CopyWork(self._last_number, order.direction, src, dst, order, worker_epoch)
        self._under_way[work.number] = work
        self._numbers[order.order_id] = work.number
        return work

    def _answer(self, order_id: int, lost_from: int | None) -> None:
        self._answers[order_id] = lost_from
        while len(self._answers) > 2 * self._max_orders:
            self._answers.popitem(last=False)

    def _answers_to(self, order_ids: Iterable[int], worker_epoch: WorkerEpoch) -> CopiesDone | None:
        """None where none of them is over."""
        known = {order_id: self._answers[order_id] for order_id in order_ids if order_id in self._answers}
        if not known:
            return None
        failed = {order_id: lost_from for order_id, lost_from in known.items() if lost_from is not None}
        done = tuple(order_id for order_id in known if order_id not in failed)
        lost_from = tuple(failed.values()) if any(failed.values()) else ()
        return CopiesDone(worker_epoch, done, tuple(failed), lost_from=lost_from)
