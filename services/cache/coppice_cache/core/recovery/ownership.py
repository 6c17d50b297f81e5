"""Which scheduler plans for which worker: one at a time, in even shares by blocks.

    no owner, or its session is over --> the scheduler that has least          the worker hears of it: `Owner`
    a scheduler has too little       --> the one with most is asked to yield --Yielded--> it has no owner

    builds that do not know owners   a scheduler is never asked; a worker goes to a newer session alone, whose plans
                                     it takes

A worker that drains counts as no blocks: nothing new is granted there, so it is no share, and nobody is asked for it.
It has an owner all the same, for what runs there.

An owner is never replaced while its session lives and it has not yielded. What its session held there when it ended is
behind a fence. So a worker takes plans of one scheduler, and its blocks are granted again when nothing of the one
before can write them any more.
"""

from __future__ import annotations

from coppice.ids import SchedulerEpoch
from coppice.messages.ownership import Yielded
from coppice.messages.registration import Owner, Registered
from coppice_cache.core.state.sessions import Session
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Phase, Worker


def share_out(state: State) -> None:
    """Called when a session or a worker came, went or was given up, and when one begins to drain or ceases to."""
    owned = {session.epoch: 0 for session in state.sessions.values() if session.plans}
    free = []
    for worker in _in_order(state):
        if worker.owner in owned:
            owned[worker.owner] += _share_of(worker)
        elif not _may_come_back(state, worker):
            free.append(worker)
    for worker in free if owned else ():
        _own(state, worker, _least(owned))
        owned[worker.owner] += _share_of(worker)
    _balance(state, owned)


def yielded(state: State, session: Session, message: Yielded) -> None:
    """Without effect where it owns no such worker, was not asked to let it go, or has something there all the same."""
    worker = state.workers.get(message.worker_id)
    if worker is None or worker.epoch != message.worker_epoch or worker.owner != session.epoch or not worker.yields:
        return
    if any(at is worker for at in session.workers.values()):
        return
    worker.owner, worker.yields = SchedulerEpoch(0), False
    state.owners_changed = True


def tell_registered(state: State, worker: Worker) -> None:
    """Its epochs, and whose plans it takes."""
    vouchers, named = state.vouchers, (worker.worker_id, worker.epoch)
    voucher = vouchers.of_registration(state.incarnation, *named, state.cache_epoch)
    key = vouchers.scheduler_key(*named)
    keeps_disk = worker.kept_from != 0
    state.tell_worker(
        worker.worker_id, Registered(worker.epoch, state.cache_epoch, voucher, key, worker.owner, keeps_disk)
    )


def _own(state: State, worker: Worker, epoch: SchedulerEpoch) -> None:
    worker.owner, worker.yields = epoch, False
    state.workers_changed = True
    state.tell_worker(worker.worker_id, Owner(worker.epoch, epoch))


def _balance(state: State, owned: dict[SchedulerEpoch, int]) -> None:
    """Ask for what brings the one with least nearer to the one with most; what is asked for already counts as given."""
    asked = [worker for worker in _in_order(state) if worker.yields and worker.owner in owned]
    for worker in asked:
        share = _share_of(worker)
        owned[worker.owner] -= share
        least = _least(owned)
        owned[least] += share
        if least == worker.owner or not share:  # who wanted it is gone, or has enough; or it drains, and helps nobody
            worker.yields, state.workers_changed = False, True
    while owned:
        least = _least(owned)
        able = [worker for worker in _in_order(state) if _may_move(state, worker, owned, least)]
        if not able:
            return
        worker = min(able, key=lambda worker: (-owned[worker.owner], worker.owner, worker.num_blocks))
        worker.yields = state.workers_changed = True
        owned[worker.owner] -= _share_of(worker)
        owned[least] += _share_of(worker)


def _may_move(state: State, worker: Worker, owned: dict[SchedulerEpoch, int], least: SchedulerEpoch) -> bool:
    """Its owner may be asked for it, it would take the plans of `least`, and both had nearer as much as each other."""
    if worker.owner not in owned or worker.yields:
        return False
    if not 0 < _share_of(worker) < owned[worker.owner] - owned[least]:  # each move brings two sums nearer, so they end
        return False
    return state.sessions[worker.owner].may_yield and (worker.knows_owners or least > worker.owner)


def _share_of(worker: Worker) -> int:
    """The blocks that its owner may plan new requests for."""
    return 0 if worker.draining else worker.num_blocks


def _may_come_back(state: State, worker: Worker) -> bool:
    """After our restart, while sessions of before may still claim what they have there."""
    named = worker.phase is Phase.WINDOW and worker.owner
    return bool(named) and state.is_old(worker.owner) and worker.owner not in state.dead_epochs


def _least(owned: dict[SchedulerEpoch, int]) -> SchedulerEpoch:
    return min(owned, key=lambda epoch: (owned[epoch], epoch))


def _in_order(state: State) -> list[Worker]:
    return [worker for _, worker in sorted(state.workers.items())]
