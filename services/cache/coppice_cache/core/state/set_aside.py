"""What the disks of workers had whose epochs are over: found by nobody, and not forgotten.

    the worker ends, or never comes back with what the log has   --> set aside, for a while, within bounds
    it registers again, and says which epoch its files are of    --> taken: `regrowth` compares each block
    what is invalidated meanwhile                                --> is of a stamp that is over

A process that starts again finds the files of the one before. Their names say block, generation and seal; what that is
worth only the trees can say, which the worker does not have.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from coppice.ids import DomainId, Namespace, WorkerEpoch, WorkerId
from coppice_cache.core.radix.tree import Tree
from coppice_cache.core.state.replay import Forest


@dataclass(frozen=True, slots=True)
class Aside:
    """`epochs` are those that the worker may know its files by: of two that follow each other it heard perhaps one."""

    epochs: tuple[WorkerEpoch, ...]
    forest: Forest
    until_ns: int


class SetAside:
    """One forest of each worker, the oldest first."""

    def __init__(self) -> None:
        self._by_worker: OrderedDict[WorkerId, Aside] = OrderedDict()
        self.num_blocks = 0

    def put(self, worker_id: WorkerId, aside: Aside, blocks_max: int) -> list[Tree]:
        """Returns the trees that have to go: of what it had before, and of the oldest where there is no room."""
        gone = self._remove(worker_id)
        if aside.forest.handles.size:
            self._by_worker[worker_id] = aside
            self.num_blocks += len(aside.forest.handles)
        while self.num_blocks > blocks_max:
            gone += self._remove(next(iter(self._by_worker)))
        return gone

    def take(self, worker_id: WorkerId, epoch: WorkerEpoch) -> Forest | None:
        """What the files of this epoch are; None where nothing is known of them."""
        aside = self._by_worker.get(worker_id)
        if aside is None or epoch not in aside.epochs:
            return None
        self._remove(worker_id)
        return aside.forest

    def expire(self, now_ns: int) -> list[Tree]:
        over = [worker_id for worker_id, aside in self._by_worker.items() if now_ns >= aside.until_ns]
        return [tree for worker_id in over for tree in self._remove(worker_id)]

    def drop(self, worker_id: WorkerId) -> list[Tree]:
        return self._remove(worker_id)

    def distrust(self, domain: DomainId, namespace: Namespace) -> None:
        """A part of this tree was invalidated, under each salt: nothing of it comes back."""
        for aside in self._by_worker.values():
            aside.forest.distrust(domain, namespace)

    def _remove(self, worker_id: WorkerId) -> list[Tree]:
        aside = self._by_worker.pop(worker_id, None)
        if aside is None:
            return []
        self.num_blocks -= len(aside.forest.handles)
        return aside.forest.trees
