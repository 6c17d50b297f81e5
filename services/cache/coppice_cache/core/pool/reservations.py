"""What domains below their guarantee wait for on one worker, and what was asked back from those who borrowed.

    reservation       an op was refused although its domain would stay within its guarantee. The blocks that come back
                      are kept for it: nobody whose reservation is younger, or who has none, may take them. It ends with
                      the grant, or when nobody asks for it any more
    reclaim request   a domain over its guarantee was asked to give back: until its `firm` blocks are down to a target

Reservations are served in the order in which their ops were refused, so each waits for one round of asking at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coppice.ids import LeaseId, SchedulerEpoch
from coppice_cache.core.base.errors import InvariantBroken
from coppice_cache.core.pool.ledger import BlockState, Ledger
from coppice_cache.core.pool.quotas import Account, Quotas

ReservationKey = tuple[SchedulerEpoch, LeaseId]
RESERVATIONS_PER_DOMAIN_MAX = 64  # further ones wait without a place of their own


@dataclass(slots=True, eq=False)
class Reservation:
    account: Account
    num_blocks: int  # to be granted, and cached ones of its own that the grant would protect
    refused_ns: int  # last


@dataclass(slots=True, eq=False)
class ReclaimRequest:
    target: int  # firm blocks that are left to the domain when it has given back
    again_ns: int  # asked a second time then
    due_ns: int  # taken through a fence then


class Reservations:
    """All of one worker."""

    def __init__(self, quotas: Quotas, ledger: Ledger) -> None:
        self._quotas = quotas
        self._ledger = ledger
        self.waiting: dict[ReservationKey, Reservation] = {}
        self.requests: dict[Account, deque[ReclaimRequest]] = {}
        self.quiet_until_ns = 0  # nobody had more to give back: not looked for again before

    def reset(self) -> None:
        """Shares changed: whoever needs something asks again."""
        self.waiting.clear()
        self.requests.clear()
        self.quiet_until_ns = 0

    # needs

    def note(self, key: ReservationKey, account: Account, num_blocks: int, now_ns: int) -> bool:
        """Refused, for the first time or again; it keeps its place in line. False: the domain has no place left."""
        reservation = self.waiting.get(key)
        if reservation is not None and reservation.account is account:
            reservation.num_blocks, reservation.refused_ns = num_blocks, now_ns
        elif sum(other.account is account for other in self.waiting.values()) < RESERVATIONS_PER_DOMAIN_MAX:
            self.waiting[key] = Reservation(account, num_blocks, now_ns)
        return key in self.waiting

    def forget(self, key: ReservationKey) -> None:
        self.waiting.pop(key, None)

    def expired(self, before_ns: int) -> list[ReservationKey]:
        """The needs that nobody has asked for since."""
        return [key for key, reservation in self.waiting.items() if reservation.refused_ns < before_ns]

    def promised(self, account: Account, key: ReservationKey) -> int:
        """Blocks that are kept from this op of this domain: for those before it in line; for all, when it would borrow,
        as its domain was granted others meanwhile. A strict domain has its share, and sees nothing of it."""
        if not self.waiting or account.is_strict:
            return 0
        own = self.waiting.get(key)
        is_owed = own is not None and own.num_blocks <= account.headroom
        sums: dict[Account, int] = {}
        for other, reservation in self.waiting.items():
            if is_owed and other == key:
                break
            if reservation.account is not account:
                sums[reservation.account] = sums.get(reservation.account, 0) + reservation.num_blocks
        return _kept_for(sums)

    def lacking(self) -> int:
        """Blocks that have to come back before all needs can be met; not above 0 when they are there."""
        sums: dict[Account, int] = {}
        for reservation in self.waiting.values():
            sums[reservation.account] = sums.get(reservation.account, 0) + reservation.num_blocks
        return _kept_for(sums) - self._quotas.available(self._ledger.num_free)

    # asks

    def draining(self) -> int:
        """Blocks that come back with the acknowledgement of a fence, to whoever may borrow."""
        return self._ledger.counts[BlockState.DRAINING] - self._quotas.strict_draining

    def outstanding(self, account: Account) -> int:
        """Asked from the domain, and neither given back nor draining."""
        requests = self.requests.get(account)
        return max(0, account.firm - requests[-1].target) if requests else 0

    def coming(self) -> int:
        """All that is on its way back: the credit of the shortage."""
        return self.draining() + sum(self.outstanding(account) for account in self.requests)

    def drop_answered(self) -> None:
        """Drop the requests that were answered."""
        for account, requests in tuple(self.requests.items()):
            while requests and account.firm <= requests[0].target:
                requests.popleft()
            if not requests:
                del self.requests[account]

    def check(self) -> None:
        """I14: nobody is asked for a part of its guarantee or of a fixed share; nothing is kept beyond a guarantee."""
        for account, requests in self.requests.items():
            targets = [request.target for request in requests]
            wrong = (
                targets != sorted(targets, reverse=True) or targets[-1] < 0 or self.outstanding(account) > account.over
            )
            if account.is_strict or wrong:
                raise InvariantBroken("I14", f"{account.config.domain!r} is asked to go down to {targets}")
        for reservation in self.waiting.values():
            if reservation.account.is_strict or not 0 < reservation.num_blocks <= reservation.account.guarantee:
                raise InvariantBroken(
                    "I14", f"{reservation.num_blocks} blocks are kept for {reservation.account.config.domain!r}"
                )

    def delay(self, gap_ns: int) -> None:
        """It was us who slept."""
        self.quiet_until_ns += gap_ns
        for reservation in self.waiting.values():
            reservation.refused_ns += gap_ns
        for requests in self.requests.values():
            for request in requests:
                request.again_ns += gap_ns
                request.due_ns += gap_ns


def _kept_for(sums: dict[Account, int]) -> int:
    """What is kept for these domains: never more than their guarantees, less what they can evict of their own."""
    return sum(max(0, min(wanted, account.headroom) - account.spare) for account, wanted in sums.items())
