"""Taking back what was borrowed, so that a domain below its guarantee waits for one round of it at most (I13, I14).

    refused within its guarantee --> need --> Reclaim to the sessions of those furthest over theirs
                                      |            | half of the grace: said again
                                      |            v the whole of it
                                      |       their latest leases are fenced
                                      v
                      what comes back is kept for it (`reservations`)

Blocks that are on their way back are credit, so that one shortage asks once. `num_blocks` of a Reclaim is all that
the session still has to give back of that domain: said again it asks for nothing twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from coppice.handles import HANDLE_BYTES
from coppice.ids import LeaseId, SchedulerEpoch
from coppice.messages.index import Reattached, Reclaim
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.pool.reservations import ReclaimRequest
from coppice_cache.core.radix.tree import Node
from coppice_cache.core.state.state import NS_PER_MS, State
from coppice_cache.core.state.workers import Worker

_CHUNK_BLOCKS = 8  # asked of one domain before looking again which one is furthest over its guarantee
_AGAIN = 2  # a second word after grace / 2
_QUIET = 4  # nobody had more to give: looked for again after grace / 4


# --- needs


def owe(
    state: State,
    epoch: SchedulerEpoch,
    worker: Worker,
    lease_id: LeaseId,
    account: Account,
    count: int,
    newly_protected: int,
    now_ns: int,
) -> bool:
    """An op of this lease found no room for `count` blocks on this worker. Whether they are its domain's by right.

    A request that could go to several workers waits for the one that it waits for already.
    """
    if not account.is_within(count, newly_protected):
        end_reservation(state, epoch, lease_id)
        return False
    known = state.owed.get((epoch, lease_id))
    if known is not None and known is not worker:
        end_reservation(state, epoch, lease_id)
    if worker.reservations.note((epoch, lease_id), account, count + newly_protected, now_ns):
        state.owed[epoch, lease_id] = worker
    ask_back(state, worker, now_ns)
    return True


def end_reservation(state: State, epoch: SchedulerEpoch, lease_id: LeaseId) -> None:
    """It was granted, or is over: nothing is kept for it any more."""
    worker = state.owed.pop((epoch, lease_id), None)
    if worker is not None:
        worker.reservations.forget((epoch, lease_id))


def end_reservations_of_session(state: State, epoch: SchedulerEpoch) -> None:
    for owner, lease_id in [key for key in state.owed if key[0] == epoch]:
        end_reservation(state, owner, lease_id)


def end_reservations_of_worker(state: State, worker: Worker) -> None:
    for key in worker.reservations.waiting:
        state.owed.pop(key, None)


def end_reservations_of_acquires(state: State, worker: Worker) -> None:
    """No new lease is granted there. What live leases need to grow stays."""
    live = {(lease.epoch, lease.lease_id) for lease in worker.leases.values() if not lease.draining}
    for key in [key for key in worker.reservations.waiting if key not in live]:
        end_reservation(state, *key)


def retry_ms(state: State) -> int:
    """Who is owed blocks asks again soon: within the grace period they come."""
    return max(1, state.settings.reclaim_grace_ms // 8)


# --- asking


def ask_back(state: State, worker: Worker, now_ns: int) -> None:
    """Ask for what the reservations lack and nobody is asked for yet: of those furthest over their guarantees first."""
    reservations = worker.reservations
    reservations.drop_answered()
    short = reservations.lacking() - reservations.coming()
    if short <= 0 or now_ns < reservations.quiet_until_ns:
        return
    grace_ns = state.settings.reclaim_grace_ms * NS_PER_MS
    lenders = _lenders(worker)
    for account, count in _divide(worker, lenders, short):
        target = account.firm - reservations.outstanding(account) - count
        requests = reservations.requests.setdefault(account, deque())
        requests.append(ReclaimRequest(target, again_ns=now_ns + grace_ns // _AGAIN, due_ns=now_ns + grace_ns))
        _say(state, worker, account, lenders[account])
        short -= count
    if short > 0:
        reservations.quiet_until_ns = now_ns + grace_ns // _QUIET


@dataclass(slots=True)
class Lender:
    """The live leases of a domain over its guarantee, latest first, and what each gives back after those before it."""

    leases: list[Lease] = field(default_factory=list)
    gains: list[int] = field(default_factory=list)

    def latest(self, count: int) -> list[tuple[Lease, int]]:
        """As many of the latest as give back `count` blocks, each with its part of them."""
        chosen = []
        for lease, gain in zip(self.leases, self.gains, strict=True):
            if count <= 0:
                break
            if gain:
                chosen.append((lease, min(gain, count)))
                count -= gain
        return chosen


def _lenders(worker: Worker) -> dict[Account, Lender]:
    """Cost: the leases of the worker and the paths of those that borrow."""
    found: dict[Account, Lender] = {}
    for lease in reversed(worker.leases.values()):
        if not lease.draining and not lease.account.is_strict and lease.account.firm:
            found.setdefault(lease.account, Lender()).leases.append(lease)
    for lender in found.values():
        lender.gains = _gains(lender.leases)
    return found


def _gains(leases: list[Lease]) -> list[int]:
    """Blocks that come back when these leases end one after the other: their own, and what they alone protect."""
    guards: dict[Node, int] = {}
    pins: dict[Node, int] = {}
    gains = []
    for lease in leases:
        gain = len(lease.own_handles()) // HANDLE_BYTES + len(lease.held)
        if lease.tree is not None:
            gain += _unprotected(lease.node, pins, guards)
        gains.append(gain)
    return gains


def _unprotected(node: Node | None, pins: dict[Node, int], guards: dict[Node, int]) -> int:
    """As `Node.unpin`, without doing it."""
    assert node is not None
    pins[node] = pins.get(node, len(node.pins)) - 1
    if pins[node]:
        return 0
    lost = 0
    while node is not None:
        guards[node] = guards.get(node, node.guards) - 1
        if guards[node] > 0:
            break
        lost += node.num_blocks
        node = node.parent
    return lost


def _divide(worker: Worker, lenders: dict[Account, Lender], short: int) -> list[tuple[Account, int]]:
    """How much to ask of whom: never more than was borrowed (I14), nor than leases can give back."""
    room: dict[Account, int] = {}
    heap: list[tuple[int, int, Account]] = []
    for order, (account, lender) in enumerate(lenders.items()):
        asked = worker.reservations.outstanding(account)
        room[account] = min(account.firm, sum(lender.gains)) - asked
        heap.append((asked - account.over, order, account))
    heapify(heap)
    parts: dict[Account, int] = {}
    while short > 0 and heap:
        key, order, account = heappop(heap)
        count = min(short, room[account], _CHUNK_BLOCKS)
        if count > 0:
            parts[account] = parts.get(account, 0) + count
            room[account] -= count
            short -= count
            heappush(heap, (key + count, order, account))
    return list(parts.items())


def _say(state: State, worker: Worker, account: Account, lender: Lender) -> None:
    by_session: dict[SchedulerEpoch, int] = {}
    for lease, count in lender.latest(worker.reservations.outstanding(account)):
        by_session[lease.epoch] = by_session.get(lease.epoch, 0) + count
    for epoch, count in by_session.items():
        state.tell_client(epoch, Reclaim(state.cache_epoch, worker.worker_id, account.config.domain, count))


# --- time


def tick(state: State, worker: Worker, now_ns: int) -> None:
    """Needs that nobody asks for any more end; asks that nobody answers are said again, then taken through a fence."""
    reservations = worker.reservations
    if not reservations.waiting and not reservations.requests:
        return
    for key in reservations.expired(now_ns - state.settings.reclaim_grace_ms * NS_PER_MS):
        end_reservation(state, *key)
    reservations.drop_answered()
    for account in tuple(reservations.requests):
        _tick_asks(state, worker, account, now_ns)
    if reservations.waiting:
        ask_back(state, worker, now_ns)


def _tick_asks(state: State, worker: Worker, account: Account, now_ns: int) -> None:
    reservations = worker.reservations
    requests = reservations.requests[account]
    still_short = reservations.lacking() - reservations.draining()
    if still_short > 0 and any(request.again_ns <= now_ns for request in requests):
        _say(state, worker, account, _lenders(worker).get(account, Lender()))
    overdue = 0
    while requests and requests[0].due_ns <= now_ns:
        overdue = account.firm - requests.popleft().target
    for request in requests:
        if request.again_ns <= now_ns:
            request.again_ns = request.due_ns
    if not requests:
        del reservations.requests[account]
    if min(overdue, still_short) > 0:
        lender = _lenders(worker).get(account, Lender())
        for lease, _ in lender.latest(min(overdue, still_short)):
            take_away(state, worker, lease)


def take_away(state: State, worker: Worker, lease: Lease) -> None:
    """The last resort: its session had its time. It hears of it as of any lost lease, and starts the request over."""
    state.sessions[lease.epoch].drain(lease.lease_id)
    end_reservation(state, lease.epoch, lease.lease_id)
    lease.account.fenced_leases += 1
    state.tell_client(lease.epoch, Reattached(state.cache_epoch, (), (lease.lease_id,)))
    state.fence_leases(worker, lease)
