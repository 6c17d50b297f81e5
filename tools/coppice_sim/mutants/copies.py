"""The worker's books of copies between the tiers with one protection taken away; see `registry`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from coppice.messages.registration import Direction
from coppice_cache.core.recovery import entries, registration, regrowth
from coppice_cache.core.state.set_aside import SetAside
from coppice_sim.mutants.registry import Mutant, Patches
from coppice_sim.nemesis import FaultProfile
from coppice_worker.core.blocks.copies import NONE_FAILED, CopyBooks, Ordered
from coppice_worker.core.blocks.pool import BlockPool


def _answered_early() -> Patches:
    def take(self: CopyBooks, message: Any, worker_epoch: Any) -> Ordered:
        ordered = original(self, message, worker_epoch)
        done, _ = self.finish(tuple(work.number for work in ordered.works), worker_epoch)
        return Ordered(ordered.works, done or ordered.answer)

    original = CopyBooks.take
    return [(CopyBooks, "take", take)]


def _failures_unnoticed(direction: Direction) -> Patches:
    def finish(
        self: CopyBooks, numbers: tuple[int, ...], worker_epoch: Any, failed: Mapping[int, int] = NONE_FAILED
    ) -> Any:
        ways = {work.number: work.direction for work in self._under_way.values()}
        noticed = {number: lost for number, lost in failed.items() if ways.get(number) is not direction}
        return original(self, numbers, worker_epoch, noticed)

    original = CopyBooks.finish
    return [(CopyBooks, "finish", finish)]


def _torn_files_are_read() -> Patches:
    return _failures_unnoticed(Direction.LOAD)


def _full_disks_are_believed() -> Patches:
    return _failures_unnoticed(Direction.STORE)


def _lost_blocks_keep_their_seals() -> Patches:
    return [(BlockPool, "lose", lambda self, blocks: None)]


def _kept_files_are_believed() -> Patches:
    def believed(same_generation: entries.Bool, same_seal: entries.Bool) -> entries.Bool:
        return np.ones_like(same_generation)

    def regrow(*args: Any) -> None:
        compared, entries.judged = entries.judged, believed
        try:
            original(*args)
        finally:
            entries.judged = compared

    original = regrowth.regrow_disk
    return [(registration, "regrow_disk", regrow)]


def _set_aside_hears_nothing() -> Patches:
    return [(SetAside, "distrust", lambda self, domain, namespace: None)]


def _answers_of_another_cache_service() -> Patches:
    return [(CopyBooks, "forget_orders", lambda self: None)]


def _fence_beside_copies() -> Patches:
    return [(CopyBooks, "hold_up", lambda self, fence: False)]


def _takeover_ends_holds() -> Patches:
    return [(CopyBooks, "hold_device_blocks", lambda self: None)]


_CRASHES = replace(FaultProfile.none(), crashes=8.0)

COPIES = (
    Mutant(
        "kept files are believed", "I8: what the crash took is found", _kept_files_are_believed, _CRASHES, disks=True
    ),
    Mutant("copies answered early", "I8: found before it is there", _answered_early, tiers=True),
    Mutant("torn files are read", "I8: what the disk did not give is found", _torn_files_are_read, disks=True),
    Mutant("full disks are believed", "I8: what the disk did not take is found", _full_disks_are_believed, disks=True),
)
# Another protection covers the loss of each of these in whole runs; unit tests ask for it directly.
COPIES_MASKED = (
    Mutant("set aside hears nothing", "what is invalidated comes back with its worker", _set_aside_hears_nothing),
    Mutant("lost blocks keep their seals", "I8: covered by the cache, which cuts them", _lost_blocks_keep_their_seals),
    Mutant("answers of another cache service", "I8: few numbers meet", _answers_of_another_cache_service),
    Mutant("fence beside copies", "I9: covered by the worker's own check", _fence_beside_copies),
    Mutant("takeover ends holds", "I9: covered by the leases of both ends", _takeover_ends_holds),
)
