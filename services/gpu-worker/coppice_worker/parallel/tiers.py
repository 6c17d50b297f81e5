"""Copies between the tiers of a model that is shared out: each rank copies its heads' part of a block.

They go beside the steps, over channels of their own. What rank 0 knows of a block, it knows because the commands before
were carried out here; a rank that lags carries them out before it copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from coppice_worker.core.batch.step_batch import Int32
from coppice_worker.edge.copies.copier import TierCopier
from coppice_worker.parallel.channels import Channel, await_byte, send_all
from coppice_worker.parallel.commands import Demote, Promote, encode

DONE = b"\1"  # what a rank answers to a copy


class Progress:
    """How many commands a rank has carried out. Counted by one thread, awaited by another."""

    def __init__(self) -> None:
        self.num_done = 0
        self._changed = threading.Condition()

    def count(self) -> None:
        with self._changed:
            self.num_done += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.num_done >= count)


class SharedOutTiers:
    """A `TierCopier`: has all ranks copy, and waits for all."""

    def __init__(self, local: TierCopier, channels: Mapping[int, Channel], num_told: Callable[[], int]) -> None:
        """`num_told` counts the commands that ranks were told so far, beside copies."""
        self._local = local
        self._channels = channels
        self._num_told = num_told
        self.bytes_per_block = local.bytes_per_block * (len(channels) + 1)

    def demote(self, src: Int32, dst: Int32) -> None:
        send_all(self._channels, encode(Demote(self._num_told(), src, dst)))
        self._local.demote(src, dst)
        self._wait()

    def promote(self, src: Int32, dst: Int32) -> None:
        send_all(self._channels, encode(Promote(self._num_told(), src, dst)))
        self._local.promote(src, dst)
        self._wait()

    def _wait(self) -> None:
        for rank, channel in self._channels.items():
            await_byte(rank, channel)
