"""What domains below their guarantee wait for on one worker, and what was asked back from those who borrowed.

    need   an op was refused although its domain would stay within its guarantee. The blocks that come back are kept
           for it: nobody whose need is younger, or who has none, may take them. It ends with the grant, or when
           nobody asks for it any more
    ask    a domain over its guarantee was asked to give back: until its `firm` blocks are down to a target

Needs are served in the order in which they were refused, so each waits for one round of asking at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coppice.ids import LeaseId, SchedulerEpoch
from coppice_cache.core.base.errors import InvariantBroken
from coppice_cache.core.pool.ledger import BlockState, Ledger
from coppice_cache.core.pool.quotas import DomainUse, Quotas

NeedKey = tuple[SchedulerEpoch, LeaseId]
NEEDS_PER_DOMAIN_MAX = 64  # further ones wait without a place of their own


@dataclass(slots=True, eq=False)
class Need:
    use: DomainUse
    num_blocks: int  # to be granted, and cached ones of its own that the grant would protect
    refused_ns: int  # last


@dataclass(slots=True, eq=False)
class Ask:
    target: int  # firm blocks that are left to the domain when it has given back
    again_ns: int  # asked a second time then
    due_ns: int  # taken through a fence then


class Needs:
    """All of one worker."""

    def __init__(self, quotas: Quotas, ledger: Ledger) -> None:
        self._quotas = quotas
        self._ledger = ledger
        self.waiting: dict[NeedKey, Need] = {}
        self.asks: dict[DomainUse, deque[Ask]] = {}
        self.quiet_until_ns = 0  # nobody had more to give back: not looked for again before

    # needs

    def note(self, key: NeedKey, use: DomainUse, num_blocks: int, now_ns: int) -> bool:
        """Refused, for the first time or again; it keeps its place in line. False: the domain has no place left."""
        need = self.waiting.get(key)
        if need is not None and need.use is use:
            need.num_blocks, need.refused_ns = num_blocks, now_ns
        elif sum(other.use is use for other in self.waiting.values()) < NEEDS_PER_DOMAIN_MAX:
            self.waiting[key] = Need(use, num_blocks, now_ns)
        return key in self.waiting

    def forget(self, key: NeedKey) -> None:
        self.waiting.pop(key, None)

    def expired(self, before_ns: int) -> list[NeedKey]:
        """The needs that nobody has asked for since."""
        return [key for key, need in self.waiting.items() if need.refused_ns < before_ns]

    def promised(self, use: DomainUse, key: NeedKey) -> int:
        """Blocks that are kept from this op of this domain. A strict domain has its share, and sees nothing of it."""
        if not self.waiting or use.is_strict:
            return 0
        sums: dict[DomainUse, int] = {}
        for other, need in self.waiting.items():
            if other == key:
                break
            if need.use is not use:
                sums[need.use] = sums.get(need.use, 0) + need.num_blocks
        return _kept_for(sums)

    def lacking(self) -> int:
        """Blocks that have to come back before all needs can be met; not above 0 when they are there."""
        sums: dict[DomainUse, int] = {}
        for need in self.waiting.values():
            sums[need.use] = sums.get(need.use, 0) + need.num_blocks
        return _kept_for(sums) - self._quotas.available(self._ledger.num_free)

    # asks

    def draining(self) -> int:
        """Blocks that come back with the acknowledgement of a fence, to whoever may borrow."""
        return self._ledger.counts[BlockState.DRAINING] - self._quotas.strict_draining

    def outstanding(self, use: DomainUse) -> int:
        """Asked from the domain, and neither given back nor draining."""
        asks = self.asks.get(use)
        return max(0, use.firm - asks[-1].target) if asks else 0

    def coming(self) -> int:
        """All that is on its way back: the credit of the shortage."""
        return self.draining() + sum(self.outstanding(use) for use in self.asks)

    def settle(self) -> None:
        """Drop the asks that were answered."""
        for use, asks in tuple(self.asks.items()):
            while asks and use.firm <= asks[0].target:
                asks.popleft()
            if not asks:
                del self.asks[use]

    def check(self) -> None:
        """I14: nobody is asked for a part of its guarantee or of a fixed share; nothing is kept beyond a guarantee."""
        for use, asks in self.asks.items():
            targets = [ask.target for ask in asks]
            wrong = targets != sorted(targets, reverse=True) or targets[-1] < 0 or self.outstanding(use) > use.over
            if use.is_strict or wrong:
                raise InvariantBroken("I14", f"{use.config.domain!r} is asked to go down to {targets}")
        for need in self.waiting.values():
            if need.use.is_strict or not 0 < need.num_blocks <= need.use.guarantee:
                raise InvariantBroken("I14", f"{need.num_blocks} blocks are kept for {need.use.config.domain!r}")

    def delay(self, gap_ns: int) -> None:
        """It was us who slept."""
        self.quiet_until_ns += gap_ns
        for need in self.waiting.values():
            need.refused_ns += gap_ns
        for asks in self.asks.values():
            for ask in asks:
                ask.again_ns += gap_ns
                ask.due_ns += gap_ns


def _kept_for(sums: dict[DomainUse, int]) -> int:
    """What is kept for these domains: never more than their guarantees, less what they can evict of their own."""
    return sum(max(0, min(wanted, use.headroom) - use.spare) for use, wanted in sums.items())
