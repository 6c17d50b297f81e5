"""The worker's books of copies between the tiers with one protection taken away; see `registry`."""

from __future__ import annotations

from typing import Any

from coppice_worker.core.blocks.copies import CopyBooks, Ordered

Patches = list[tuple[Any, str, Any]]


def answered_early() -> Patches:
    def take(self: CopyBooks, message: Any, worker_epoch: Any) -> Ordered:
        ordered = original(self, message, worker_epoch)
        done, _ = self.finish(tuple(work.number for work in ordered.works), worker_epoch)
        return Ordered(ordered.works, done or ordered.answer)

    original = CopyBooks.take
    return [(CopyBooks, "take", take)]


def answers_of_another_cache_service() -> Patches:
    return [(CopyBooks, "forget_orders", lambda self: None)]


def fence_beside_copies() -> Patches:
    return [(CopyBooks, "hold_up", lambda self, fence: False)]


def takeover_ends_holds() -> Patches:
    return [(CopyBooks, "hold_device_blocks", lambda self: None)]
