"""Orders to copy between host and disk over a real session, with files: beside other copies, and no fault of any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coppice.ids import WorkerEpoch
from coppice.messages.registration import CopiesDone, CopyOrder, Direction
from coppice_worker.disk.disk_pool import DiskPool
from coppice_worker.disk.folder import DiskFolder
from tests.contract.worker.test_worker_copies import NOW, TierStack, demotion, promotion, seal
from tests.contract.worker.test_worker_service import handle
from tests.fakes.cache.registrar import registered
from tests.fakes.waiting import wait_for

BLOCK_BYTES = 512


class DiskStack(TierStack):
    """Block 3 of the device is in block 0 of the host, too, whose content is that of `host`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.host = np.arange(6 * BLOCK_BYTES, dtype=np.uint32).astype(np.uint8).reshape(6, BLOCK_BYTES)
        super().__init__(DiskPool(DiskFolder(path, "identity", 4), self.host))
        self.order(demotion(1))
        assert self.next() == CopiesDone(NOW, (1,))

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
    assert stack.files() == []
    stack.order(load(3), epoch=after)
    assert stack.next() == CopiesDone(after, (), (3,))
