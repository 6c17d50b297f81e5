"""A lane of copies: whatever happens, what was ordered is answered."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from coppice.ids import WorkerEpoch
from coppice.messages.registration import CopyOrder, Direction
from coppice_worker.core.blocks.copies import CopyWork
from coppice_worker.edge.copies.lanes import DiskLane, Failed, Works


def work(number: int) -> CopyWork:
    blocks = np.array([number], np.int32)
    return CopyWork(
        number, Direction.STORE, blocks, blocks, CopyOrder(number, Direction.STORE, b"", b"", b""), WorkerEpoch(1)
    )


def answers_nobody(works: Works, failed: Failed, duration_ns: int) -> None:
    raise ValueError("no answer can be made of it")


def copies_nothing(works: Works) -> Failed:
    raise ValueError("a fault of the copier")


def copies(works: Works) -> Failed:
    return {}


@pytest.mark.parametrize("copy", [copies, copies_nothing])
def test_what_a_disk_was_asked_for_is_given_back_when_its_thread_fails(copy: object) -> None:
    given_back: list[int] = []
    is_over = threading.Event()

    def hung(ordered: Works) -> None:
        given_back.extend(each.number for each in ordered)
        is_over.set()

    lane = DiskLane(
        lambda: 0, hung, "disk", (Direction.LOAD, Direction.STORE), 1, copy, answers_nobody, lambda error: None
    )  # fmt: skip
    for number in (1, 2):
        assert lane.add(work(number))
    lane.start()
    assert is_over.wait(20)
    assert given_back == [1, 2]
    assert not lane.add(work(3))
    lane.stop()
