"""The scheduler's queue with one protection taken away; see `registry`."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.core.policy.queue_room import Amount, QueueRoom
from coppice_scheduler.core.state.counts import Counts

Patches = list[tuple[Any, str, Any]]


def without_shares() -> Patches:
    """First come, first queued."""

    def has_room(self: QueueRoom, tenant: str, num_tokens: int, counts: Counts) -> bool:
        return Amount(counts.waiting, counts.waiting_tokens).and_one_of(num_tokens).is_within(self.whole)

    return [(QueueRoom, "has_room", has_room)]
