"""Which scheduler epoch may plan on a worker.

    the cache service named an owner     the owner, and nobody else, whoever is newer
    it has named nobody                  the newest unfenced epoch; an older one never plans again

An epoch that was fenced plans no more.
"""

from __future__ import annotations

from coppice.ids import SchedulerEpoch
from coppice.messages.registration import Fence
from coppice_worker.core.batch.steps import SchedulerRefusedReason
from coppice_worker.core.blocks.fences import FencedEpochs


class WhoPlans:
    def __init__(self) -> None:
        self.planning: SchedulerEpoch | None = None
        self.fenced = FencedEpochs()
        self.owner = SchedulerEpoch(0)
        self._highest = SchedulerEpoch(0)

    def name(self, owner: SchedulerEpoch) -> bool:
        """What a registration says; 0 names nobody. True: who plans has to go."""
        if owner not in (0, self.owner):
            self.fenced = FencedEpochs()  # nobody but the owner attaches, and who was fenced is named no more
        self.owner = owner
        return owner != 0 and self.planning not in (None, owner)

    def fence(self, message: Fence) -> bool:
        """True: who plans has to go."""
        self.fenced.add(message.scheduler_epochs, message.up_to_epoch, message.spared)
        return self.planning is not None and self.planning in self.fenced

    def why_not(self, epoch: SchedulerEpoch) -> SchedulerRefusedReason | None:
        """Why this epoch may not plan here now; None when it may."""
        if self.owner and epoch != self.owner:
            return SchedulerRefusedReason.SUPERSEDED
        if not self.owner and epoch < self._highest:
            is_over = self._highest in self.fenced
            return SchedulerRefusedReason.OUTLIVED if is_over else SchedulerRefusedReason.SUPERSEDED
        return SchedulerRefusedReason.FENCED if epoch in self.fenced else None

    def begin(self, epoch: SchedulerEpoch) -> None:
        """It plans from now on."""
        self.planning = epoch
        self._highest = max(epoch, self._highest)
        if not self.owner:
            self.fenced.forget_below(epoch)
