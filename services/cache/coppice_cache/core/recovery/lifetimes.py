"""How sessions and worker epochs begin and end."""

from __future__ import annotations

from coppice.ids import SchedulerEpoch, WorkerId
from coppice.messages.ownership import Succeed
from coppice.messages.registration import Fence
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.results import SessionEnded, WorkerEnded
from coppice_cache.core.ops.ops import drop_claim
from coppice_cache.core.ops.reclaim import end_reservations_of_session, end_reservations_of_worker
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.state.replay import copied
from coppice_cache.core.state.sessions import Session
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Phase, Worker


def attach_session(
    state: State, claimed: SchedulerEpoch, now_ns: int, *, plans: bool = True, may_yield: bool = True
) -> SchedulerEpoch:
    """The epoch that the client has from now on; another one than claimed when that is dead."""
    session = state.sessions.get(claimed)
    if session is None:
        if len(state.sessions) >= state.settings.sessions_max:
            raise MessageRefused(f"{len(state.sessions)} sessions are attached, the maximum; try again later")
        kept = claimed and may_reattach(state, claimed, now_ns)
        epoch = claimed if kept else state.mint_scheduler_epoch()
        session = Session(epoch, now_ns, reattached=not kept, plans=plans, may_yield=may_yield)
        state.sessions[epoch] = session
        state.owners_changed = state.owners_changed or plans
    session.last_heard_ns = max(session.last_heard_ns, now_ns)
    session.planners_told = ()  # what it was told before did not all arrive, perhaps
    state.planners_changed = state.planners_changed or session.plans
    state.tell_client(session.epoch, state.workers_for(session))
    return session.epoch


def may_reattach(state: State, epoch: SchedulerEpoch, now_ns: int) -> bool:
    """An epoch of before our restart, while no fence has gone out against those who are late."""
    if not may_be_remembered_dead(state, epoch) or state.reattach_closed or epoch in state.dead_epochs:
        return False
    waiting = any(worker.phase is Phase.WINDOW for worker in state.workers.values())
    return waiting or now_ns < state.reattach_deadline_ns


def end_session(state: State, epoch: SchedulerEpoch) -> None:
    """Expiry or goodbye: every lease drains, and each worker is asked to fence the whole scheduler epoch."""
    session = state.sessions.pop(epoch, None)
    if session is None:
        return
    if state.is_old(epoch):
        state.dead_epochs.add(epoch)
    for lease_id in tuple(session.claims):
        drop_claim(state, session, lease_id)
    for lease_id in tuple(session.waiting):
        session.stop_waiting(lease_id)
    end_reservations_of_session(state, epoch)
    state.owners_changed = state.owners_changed or session.plans
    state.planners_changed = state.planners_changed or session.plans
    # Of a scheduler all workers, also those where it held nothing: they take plans of nobody older until they know.
    by_worker: dict[WorkerId, list[Lease]] = {worker_id: [] for worker_id in state.workers} if session.plans else {}
    for lease_id, lease in session.leases.items():
        worker = session.workers[lease_id]
        worker.drain(lease)
        by_worker.setdefault(worker.worker_id, []).append(lease)
    for worker_id, leases in by_worker.items():
        worker = state.workers[worker_id]
        state.send_fence(worker, Fence(state.next_fence_id(), worker.epoch, scheduler_epochs=(epoch,)), leases)
    state.effects.append(SessionEnded(epoch))


def succeed(state: State, successor: SchedulerEpoch, message: Succeed) -> None:
    """End the session that `message` proves to have been told of: its scheduler will not come back."""
    over = message.session
    if over.epoch == successor:
        end_session(state, successor)
        return
    if not state.vouchers.is_of_session(over.voucher, over.key, over.incarnation, over.epoch):
        return
    if over.epoch in state.sessions:
        end_session(state, over.epoch)
    elif may_be_remembered_dead(state, over.epoch):
        state.dead_epochs.add(over.epoch)


def may_be_remembered_dead(state: State, epoch: SchedulerEpoch) -> bool:
    """One of before our restart, and there is room: each that ends here takes a place for ever."""
    return state.is_old(epoch) and len(state.dead_epochs) + len(state.sessions) < 2 * state.settings.sessions_max


def end_worker(state: State, worker_id: WorkerId) -> None:
    """The worker epoch is dead: its ledger, trees, fences and leases go with it."""
    worker = state.workers.pop(worker_id, None)
    if worker is None:
        return
    state.ended.add(worker, state.call_time.now_ns)
    worker.flights.wake_all()
    end_reservations_of_worker(state, worker)
    for lease in worker.leases.values():
        forget_lease(state, lease)
    _set_aside(state, worker)
    state.dismantling += worker.leave()
    worker.changes.cleared()
    state.drop_replay(worker_id)
    state.effects.append(WorkerEnded(worker_id, worker.epoch))
    state.workers_changed = state.owners_changed = True


def _set_aside(state: State, worker: Worker) -> None:
    """Its files outlive it, and it may come back. One whose window is open has found nothing of them yet."""
    if worker.disk is None:
        return
    if not worker.is_open:
        if (found := state.replay.take_disk(worker.worker_id)) is not None:
            state.set_aside(worker.worker_id, (found[0],), found[1])
        return
    store = worker.disk.store
    current = [tree for tree in store.trees.values() if store.is_current(tree)]
    forest = copied(current, store.ledger.seals_of, store.block_bytes)
    state.set_aside(worker.worker_id, (worker.epoch, worker.kept_from), forest)


def forget_lease(state: State, lease: Lease) -> None:
    """Take a lease that is over out of its session's books."""
    session = state.sessions.get(lease.epoch)
    if session is None:
        return
    if lease.draining:
        session.draining.discard(lease.lease_id)
    elif session.leases.get(lease.lease_id) is lease:
        session.remove(lease.lease_id)


def finish_fenced(state: State, worker: Worker, leases: list[Lease]) -> None:
    """The fence was acknowledged: the leases that waited for it are over."""
    for lease in leases:
        forget_lease(state, lease)
        worker.finish(lease)
