"""Orders to copy between host and disk over a real session, with files: beside other copies, and no fault of any."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from coppice.handles import UInt64
from coppice.ids import WorkerEpoch
from coppice.messages.registration import NOTHING_LOST, CopiesDone, CopyOrder, Direction, Fence, FenceAck
from coppice_worker.core.batch.step_batch import Bool, Int32
from coppice_worker.disk.disk_pool import Bytes, DiskPool
from coppice_worker.disk.folder import DiskFolder
from coppice_worker.edge.copies import lanes
from tests.contract.worker import test_worker_copies
from tests.contract.worker.test_worker_copies import NOW, TierStack, demotion, promotion, seal
from tests.contract.worker.test_worker_service import WAIT_S, handle
from tests.fakes.cache import registrar
from tests.fakes.cache.registrar import registered
from tests.fakes.waiting import wait_for

BLOCK_BYTES = 512


class HangingPool(DiskPool):
    """Reads and writes when it is let, which may be much later; one that is slow gets on between two looks."""

    def __init__(self, folder: DiskFolder, host: Bytes) -> None:
        self.is_slow, self.num_looks, self._num_tried = False, 0, 0
        super().__init__(folder, host)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.num_begun = self.num_ended = 0

    @property
    def num_tried(self) -> int:
        self.num_looks += self.is_slow
        return self._num_tried + self.num_looks

    @num_tried.setter
    def num_tried(self, count: int) -> None:
        self._num_tried = count - self.num_looks

    def store(self, epoch: WorkerEpoch, src: Int32, handles: UInt64, seals: bytes) -> Bool:
        if not src.size:  # it has begun
            return super().store(epoch, src, handles, seals)
        return self._hang(lambda: super(HangingPool, self).store(epoch, src, handles, seals))

    def load(self, epoch: WorkerEpoch, handles: UInt64, seals: bytes, dst: Int32) -> tuple[Bool, Bool]:
        return self._hang(lambda: super(HangingPool, self).load(epoch, handles, seals, dst))

    def _hang(self, copy: Callable[[], Any]) -> Any:
        self.num_begun += 1
        assert self.may_answer.wait(WAIT_S)
        copied = copy()
        self.num_ended += 1
        return copied


class DiskStack(TierStack):
    """Block 3 of the device is in block 0 of the host, too, whose content is that of `host`."""

    def __init__(self, path: Path, *, demotes: bool = True) -> None:
        self.path, self.is_closed = path, False
        self.host = np.random.default_rng(1).integers(0, 256, (6, BLOCK_BYTES), np.uint8)
        self.folder = DiskFolder(path, "identity", 4)
        self.disk = HangingPool(self.folder, self.host)
        super().__init__(self.disk)
        if demotes:
            self.order(demotion(1))
            assert self.next() == CopiesDone(NOW, (1,))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.disk.may_answer.set()
            super().close()
            self.folder.close()

    def hang(self) -> None:
        """What is stored from now on does not come back; one order is on its way."""
        self.disk.may_answer.clear()
        num_begun = self.disk.num_begun
        self.order(store(90))
        wait_for(lambda: self.disk.num_begun > num_begun, "the disk to hang")

    def files(self) -> list[Path]:
        """Of the pool that counts."""
        return list(self.path.glob(f"identity/{'[0-9a-f]' * 16}/*/*"))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[DiskStack]:
    stack = DiskStack(tmp_path)
    yield stack
    stack.close()


def store(number: int, counter: int = 1) -> CopyOrder:
    return CopyOrder(number, Direction.STORE, handle(0), handle(2, counter), seal(3))


def load(number: int, to: int = 5) -> CopyOrder:
    return CopyOrder(number, Direction.LOAD, handle(2), handle(to), seal(3))


def test_a_block_goes_to_the_disk_and_back_and_on_to_the_device(stack: DiskStack) -> None:
    assert stack.register.num_disk_blocks == 4
    stack.order(store(2))
    assert stack.next() == CopiesDone(NOW, (2,))
    assert len(stack.files()) == 1
    stack.order(load(3))
    assert stack.next() == CopiesDone(NOW, (3,))
    assert (stack.host[5] == stack.host[0]).all()
    stack.order(promotion(4, source=5))
    assert stack.next() == CopiesDone(NOW, (4,))


def test_a_torn_file_is_an_order_that_failed(stack: DiskStack) -> None:
    stack.order(store(2))
    assert stack.next() == CopiesDone(NOW, (2,))
    (file,) = stack.files()
    file.write_bytes(file.read_bytes()[:-1])
    stack.order(load(3))
    assert stack.next() == CopiesDone(NOW, (), (3,))
    stack.order(promotion(4, source=5))
    assert stack.next() == CopiesDone(NOW, (), (4,)), "nobody reads what was not loaded"
    assert not stack.failures


def test_the_disk_waits_for_no_copy_to_the_device(stack: DiskStack) -> None:
    stack.tiers.may_copy.clear()
    stack.order(demotion(5, block=4, to=1))
    wait_for(lambda: stack.tiers.is_copying, "the device's copy to begin")
    stack.order(store(2))
    assert stack.next() == CopiesDone(NOW, (2,))
    stack.tiers.may_copy.set()
    assert stack.next() == CopiesDone(NOW, (5,))


def test_a_new_worker_epoch_begins_an_empty_pool(stack: DiskStack) -> None:
    stack.order(store(2))
    assert stack.next() == CopiesDone(NOW, (2,))
    after = WorkerEpoch(NOW + 1)
    stack.registrar.tell(registered(after))
    wait_for(lambda: stack.service.runner.with_core(lambda core: core.worker_epoch) == after, "the new worker epoch")
    stack.order(load(3), epoch=after)
    assert stack.next() == CopiesDone(after, (), (3,))


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "over"])
def test_the_next_process_says_what_the_files_are_and_goes_on_with_them_if_it_may(
    stack: DiskStack, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    stack.order(store(2))
    assert stack.next() == CopiesDone(NOW, (2,))
    (file,) = stack.files()
    stack.close()
    after = WorkerEpoch(NOW + 1)
    monkeypatch.setattr(registrar, "registered", lambda _: replace(registered(after), keeps_disk=keeps))
    monkeypatch.setattr(test_worker_copies, "NOW", after)
    monkeypatch.setattr(sys.modules[__name__], "NOW", after)
    again = DiskStack(stack.path, demotes=False)
    said = again.register
    assert (said.worker_epoch, said.disk_epoch) == (0, after - 1)
    assert said.disk_seals == bytes(32) + seal(3) + bytes(16)
    again.order(load(3), epoch=after)
    assert again.next() == (CopiesDone(after, (3,)) if keeps else CopiesDone(after, (), (3,)))
    assert bool((again.host[5] == again.host[0]).all()) is keeps
    again.order(demotion(5), epoch=after)
    assert again.next() == CopiesDone(after, (5,))
    again.order(store(6, counter=2), epoch=after)
    assert again.next() == CopiesDone(after, (6,))
    (newer,) = again.files()
    assert newer.parent.parent.name == f"{after:016x}"
    assert newer.name != file.name
    again.close()


def test_a_disk_that_hangs_is_closed_and_ends_nobody(
    stack: DiskStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "DISK_PATIENCE_S", 0.3)
    stack.disk.is_slow = True
    stack.hang()
    stack.order(CopyOrder(91, Direction.STORE, handle(0), handle(3, 1), seal(3)))
    stack.order(demotion(5, block=4, to=1))
    assert stack.next() == CopiesDone(NOW, (5,)), "others do not wait"
    assert stack.service.busy_ns(time.monotonic_ns()) == 0, "nobody takes the worker for one that hangs"
    stack.disk.is_slow = False
    assert stack.next() == CopiesDone(NOW, (), (90, 91))
    stack.order(store(92, counter=2))
    assert stack.next() == CopiesDone(NOW, (), (92,))
    stack.disk.may_answer.set()
    wait_for(lambda: stack.disk.num_ended == 1, "the disk to answer after all")
    stack.order(store(93, counter=3), demotion(6, block=4, to=2))
    assert stack.next() == CopiesDone(NOW, (), (93,))
    assert stack.next() == CopiesDone(NOW, (6,))
    assert [record.message for record in caplog.records if "closed" in record.message] == [
        "the disk tier has not answered for 0 s: it is closed for as long as this process lives"
    ]
    assert not stack.failures


def test_a_disk_that_is_slow_with_many_blocks_does_not_hang(stack: DiskStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "DISK_PATIENCE_S", 0.02)
    stack.disk.is_slow = True
    stack.disk.may_answer.clear()
    stack.order(store(2))
    wait_for(lambda: stack.disk.num_looks > 5, "somebody to look again and again")
    stack.disk.may_answer.set()
    assert stack.next() == CopiesDone(NOW, (2,))


def test_a_disk_that_breaks_is_closed_and_ends_nobody(stack: DiskStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def store_it(*_: object) -> Bool:
        raise MemoryError("no thread can be started")

    monkeypatch.setattr(stack.disk, "store", store_it)
    stack.order(store(90))
    assert stack.next() == CopiesDone(NOW, (), (90,))
    stack.order(load(91), demotion(6, block=4, to=2))
    assert stack.next() == CopiesDone(NOW, (), (91,))
    assert stack.next() == CopiesDone(NOW, (6,))
    assert not stack.failures


def test_a_worker_that_ends_waits_for_no_disk_that_hangs(stack: DiskStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "STOP_S", 3_600.0)
    monkeypatch.setattr(lanes, "DISK_STOP_S", 0.1)
    stack.hang()
    ending = threading.Thread(target=stack.service.stop, args=(0.0,), daemon=True)
    ending.start()
    ending.join(WAIT_S)
    assert not ending.is_alive()
    assert stack.disk.num_ended == 0, "it still hangs"


def test_what_is_loaded_too_late_does_not_touch_the_host(stack: DiskStack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack.order(store(2))
    assert stack.next() == CopiesDone(NOW, (2,))
    monkeypatch.setattr(lanes, "DISK_PATIENCE_S", 0.3)
    stack.disk.may_answer.clear()
    stack.order(load(3))
    assert stack.next() == CopiesDone(NOW, (), (3,), lost_from=(NOTHING_LOST,)), "it may be there, for all one knows"
    stack.host[5] = 77  # granted again
    stack.disk.may_answer.set()
    wait_for(lambda: stack.disk.num_ended == 2, "the disk to answer after all")
    assert (stack.host[5] == 77).all()


def test_a_report_to_a_new_cache_service_waits_for_a_disk_that_hangs_no_longer_than_its_patience(
    stack: DiskStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "DISK_PATIENCE_S", 0.3)
    stack.hang()
    stack.registrar.tell(Fence(5, NOW, report=True))
    said = [stack.next(), stack.next()]
    assert CopiesDone(NOW, (), (90,)) in said
    (acknowledged,) = [message for message in said if isinstance(message, FenceAck)]
    assert not any(acknowledged.disk_seals)


def test_a_new_worker_epoch_waits_for_no_disk(stack: DiskStack) -> None:
    stack.hang()
    after = WorkerEpoch(NOW + 1)
    stack.registrar.tell(registered(after))
    wait_for(lambda: stack.service.runner.with_core(lambda core: core.worker_epoch) == after, "the new worker epoch")
    stack.host[:] = 77
    stack.disk.may_answer.set()
    stack.order(load(3), epoch=after)
    assert stack.next() == CopiesDone(after, (), (3,))
    wait_for(lambda: stack.disk.num_ended == 1, "the copy of before")
    assert stack.files() == [], "it was stored under no epoch"
