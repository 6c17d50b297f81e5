"""After a restart: what schedulers claim, judged against what the worker reports (design, section 6a, rules 3 to 8).

Register (old worker epoch)   ledger closed, every block drains, the window is open
Reattach                      each claim is accepted or refused as soon as its worker is there
all named sessions are back,  one fence for everybody who is not, and for the refused leases
  or the deadline
FenceAck with the arrays      a second look, then the trees regrow, what nobody holds is free, and the worker is open
"""

from __future__ import annotations

import numpy as np

from coppice.handles import HANDLE_BYTES, block_of, epoch_in_era, epoch_of, generation_of
from coppice.ids import LEASE_ID_BYTES, LeaseId, SchedulerEpoch, WorkerId
from coppice.messages.index import DEAD_EPOCHS_MAX, DeadWorker, Grant, LeaseClaim, Reattach, Reattached
from coppice.messages.registration import Fence, FenceAck
from coppice.seals import SEAL_BYTES
from coppice_cache.core.base.errors import OpRefused
from coppice_cache.core.ops.ops import drop_claim
from coppice_cache.core.pool.free_ring import unpack_handles
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.radix.tree import Node
from coppice_cache.core.recovery.lifetimes import end_session, end_worker, finish_fenced
from coppice_cache.core.recovery.regrowth import open_worker
from coppice_cache.core.state.sessions import EPOCH_SHIFT, Session, minted_by
from coppice_cache.core.state.state import NS_PER_MS, State
from coppice_cache.core.state.workers import Phase, Worker


def reattach(state: State, session: Session, message: Reattach, now_ns: int) -> None:
    """All claims of a session. Those on workers that are not here yet are held until they register.

    A session that claims more than it may hold is over.
    """
    claims_max, dead_max = state.settings.leases_per_session_max, DEAD_EPOCHS_MAX * state.settings.workers_max
    if len(message.claims) > claims_max or len(message.dead_workers) > dead_max:
        end_session(state, session.epoch)  # refused it would only say so again; under another epoch it starts anew
        return
    _bury(state, session, message.dead_workers)
    is_first, session.reattached = not session.reattached, True
    by_worker: dict[WorkerId, list[LeaseClaim]] = {}
    for claim in message.claims:
        by_worker.setdefault(claim.worker_id, []).append(claim)
    for worker_id, claims in by_worker.items():
        worker = state.workers.get(worker_id)
        awaited = state.is_old(session.epoch) and worker_id not in state.known_workers
        if worker is None and awaited and now_ns < give_up_ns(state):
            for claim in claims:
                _hold(state, session, claim)
        else:
            if worker is None and awaited and is_first:
                # It may come yet, and what ran there runs on: its fence spares the session, and must name the leases.
                state.refused_ids.setdefault(worker_id, set()).update(claim.lease_id for claim in claims)
            _judge_all(state, session, worker, claims, now_ns)
    close_windows(state, now_ns)


def _bury(state: State, session: Session, dead_workers: tuple[DeadWorker, ...]) -> None:
    """What an earlier incarnation declared dead stays dead, although the worker lives and we know nothing of it.

    The session acted on that word: it claims nothing there, while what it ran may run on. Since it is spared by the
    fence of the window, only another worker epoch keeps the two apart. Our own word on an epoch that we minted stands.
    Only a session of before was told anything by others, and only its first word here can be about them.
    """
    if not state.is_old(session.epoch) or session.reattached:
        return
    session.dead_workers = frozenset(dead for dead in dead_workers if minted_by(dead.worker_epoch) < state.cache_epoch)
    for dead in dead_workers:
        worker = state.workers.get(dead.worker_id)
        if worker is not None and dead in session.dead_workers and worker.epoch == dead.worker_epoch:
            end_worker(state, dead.worker_id)


def judge_held_claims(state: State, worker: Worker, now_ns: int) -> None:
    """The worker is here: its window has just opened, or it came back with a new epoch."""
    by_epoch: dict[SchedulerEpoch, list[LeaseClaim]] = {}
    for (epoch, _), claim in state.held_claims.pop(worker.worker_id, {}).items():
        by_epoch.setdefault(epoch, []).append(claim)
    for epoch, claims in by_epoch.items():
        session = state.sessions[epoch]
        for claim in claims:
            session.drop_claim(claim.lease_id)
        _judge_all(state, session, worker, claims, now_ns)
    worker.window.lease_ids |= state.refused_ids.pop(worker.worker_id, set())


def give_up_ns(state: State) -> int:
    """When workers that have not registered by then are not waited for any more."""
    return state.reattach_deadline_ns + state.settings.worker_ttl_ms * NS_PER_MS


def refuse_held_claims(state: State) -> None:
    """Their workers never came."""
    refused: dict[SchedulerEpoch, list[LeaseId]] = {}
    for claims in tuple(state.held_claims.values()):
        for epoch, lease_id in tuple(claims):
            drop_claim(state, state.sessions[epoch], lease_id)
            refused.setdefault(epoch, []).append(lease_id)
    for epoch, lease_ids in refused.items():
        state.tell_client(epoch, Reattached(state.cache_epoch, (), tuple(lease_ids)))


def _hold(state: State, session: Session, claim: LeaseClaim) -> None:
    if claim.lease_id in session.leases or claim.lease_id in session.claims:
        return
    session.hold_claim(claim.lease_id, claim.worker_id)
    state.held_claims.setdefault(claim.worker_id, {})[session.epoch, claim.lease_id] = claim


def _judge_all(state: State, session: Session, worker: Worker | None, claims: list[LeaseClaim], now_ns: int) -> None:
    """The verdict on the claims of one session on one worker; others hear of it when they are displaced.

    A lease that comes back after a restart has no place in a tree before its worker opens; one that was here all the
    time may have.
    """
    accepted, refused, settled = [], [], {}
    for claim in claims:
        if worker is not None and _judge(state, session, worker, claim, now_ns):
            lease = session.leases[claim.lease_id]
            if lease.may_publish:
                settled[claim.lease_id] = lease.num_settled
            else:
                accepted.append(claim.lease_id)
        else:
            refused.append(claim.lease_id)
            if worker is not None and worker.phase is Phase.WINDOW:
                worker.window.lease_ids.add(claim.lease_id)
    if accepted or refused or not settled:
        state.tell_client(session.epoch, Reattached(state.cache_epoch, tuple(accepted), tuple(refused)))
    if settled:
        state.tell_client(session.epoch, Reattached(state.cache_epoch, tuple(settled), (), tuple(settled.values())))


def _judge(state: State, session: Session, worker: Worker, claim: LeaseClaim, now_ns: int) -> bool:
    """Whether the lease lives on; if so it is adopted and what it displaces is drained."""
    known = session.leases.get(claim.lease_id)
    if known is not None:
        return session.workers[claim.lease_id] is worker
    if worker.phase is not Phase.WINDOW or claim.worker_epoch != worker.epoch or not state.is_old(session.epoch):
        return False
    if session.num_leases >= state.settings.leases_per_session_max:
        return False
    try:
        account = worker.use_of(state.domains.config(claim.domain), state.settings.domains_per_worker_max)
    except OpRefused:
        return False
    if not _is_well_formed(state, worker, claim) or not _fits_worker(state, worker, account, claim):
        return False
    _displace_lower(state, worker, claim)
    _adopt(state, session, worker, account, claim, now_ns)
    return True


def _is_well_formed(state: State, worker: Worker, claim: LeaseClaim) -> bool:
    if len(claim.lease_id) != LEASE_ID_BYTES or claim.lease_id in worker.window.lease_ids:
        return False
    if len(claim.namespace) + len(claim.domain) > state.settings.name_bytes_max:
        return False
    if len(claim.shared) % HANDLE_BYTES or len(claim.owned) % HANDLE_BYTES:
        return False
    if len(claim.shared_seals) * HANDLE_BYTES != len(claim.shared) * SEAL_BYTES:
        return False
    blocks = [block_of(handle) for handle in unpack_handles(claim.shared + claim.owned)]
    return len(set(blocks)) == len(blocks) and all(block < worker.num_blocks for block in blocks)


def _fits_worker(state: State, worker: Worker, account: Account, claim: LeaseClaim) -> bool:
    """Rule 4. The ledger's generation is the worker's, raised by every accepted claim; a raise clears the seal."""
    ledger = worker.ledger
    for index, handle in enumerate(unpack_handles(claim.shared)):
        block, generation = block_of(handle), generation_of(handle)
        seal = claim.shared_seals[index * SEAL_BYTES : (index + 1) * SEAL_BYTES]
        if generation != ledger.generation[block] or seal != ledger.seal(block) or not any(seal):
            return False
        if any(holder.account is not account for holder in worker.holders.get(block, {}).values()):
            return False
    for handle in unpack_handles(claim.owned):
        block, generation = block_of(handle), generation_of(handle)
        is_old = 0 < epoch_of(generation) < epoch_in_era(state.cache_epoch)
        if not is_old or generation < ledger.generation[block]:
            return False
        if generation > ledger.generation[block]:
            continue
        for holder in worker.holders.get(block, {}).values():
            if holder.account is not account or block in holder.held[holder.num_shared :]:
                return False
    return True


def _displace_lower(state: State, worker: Worker, claim: LeaseClaim) -> None:
    """The highest generation wins: leases that claimed an earlier occupancy of a block are over."""
    for handle in unpack_handles(claim.owned):
        block = block_of(handle)
        if generation_of(handle) == worker.ledger.generation[block]:
            continue
        for holder in tuple(worker.holders.get(block, {}).values()):
            if not holder.draining:
                worker.window.lease_ids.add(holder.lease_id)
                worker.window.displaced.append(holder)
                _lose(state, holder)
                worker.drain(holder)


def _lose(state: State, lease: Lease) -> None:
    """Tell the session that a lease which was accepted is over after all."""
    state.sessions[lease.epoch].drain(lease.lease_id)
    state.tell_client(lease.epoch, Reattached(state.cache_epoch, (), (lease.lease_id,)))


def _adopt(state: State, session: Session, worker: Worker, account: Account, claim: LeaseClaim, now_ns: int) -> None:
    handles = unpack_handles(claim.shared + claim.owned)
    num_shared = len(claim.shared) // HANDLE_BYTES
    grant = Grant(
        lease_id=claim.lease_id,
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        num_cached_tokens=num_shared * worker.block_size,
        shared=claim.shared,
        shared_seals=claim.shared_seals,
        owned=claim.owned,
        zero=b"",
    )
    lease = Lease(
        number=state.next_lease_number(),
        lease_id=claim.lease_id,
        epoch=session.epoch,
        account=account,
        namespace=state.with_keyed_salt(claim.domain, claim.namespace),
        node=Node(None, b"", b"", now_ns),
        table=bytearray(claim.shared + claim.owned),
        num_shared=num_shared,
        num_settled=0,
        granted_ns=now_ns,
        grant=grant,
        held=[block_of(handle) for handle in handles],
        num_claimed=len(handles),
    )
    session.add(lease, worker)
    worker.adopt(lease, [generation_of(handle) for handle in handles])


# the end of the window


def close_windows(state: State, now_ns: int) -> None:
    """Fence every window that need not or may not stay open any longer."""
    for worker in tuple(state.workers.values()):
        if worker.phase is Phase.WINDOW and (
            now_ns >= worker.window.deadline_ns or not _is_awaited(state, worker, now_ns)
        ):
            _close(state, worker)


def _is_awaited(state: State, worker: Worker, now_ns: int) -> bool:
    """Whether somebody who may hold leases on the worker can still come back.

    A worker that names nobody may be granted from, too, and its fence ends the time of re-attachment for all: before
    the first session of before is back it waits as long as any.
    """
    if any(not session.reattached for session in state.sessions.values()):
        return True
    if state.reattach_closed:
        return False
    if not worker.window.named and not any(map(state.is_old, state.sessions)):
        return now_ns < state.reattach_deadline_ns
    return any(
        state.is_old(epoch) and epoch not in state.sessions and epoch not in state.dead_epochs
        for epoch in worker.window.named
    )


def _close(state: State, worker: Worker) -> None:
    state.reattach_closed = True
    for epoch in [epoch for epoch, session in state.sessions.items() if not session.reattached]:
        end_session(state, epoch)
    window = worker.window
    window.fence_id = state.next_fence_id()
    worker.phase = Phase.CLOSING
    state.owners_changed = True
    fence = Fence(
        fence_id=window.fence_id,
        worker_epoch=worker.epoch,
        scheduler_epochs=tuple(epoch for epoch in window.named if epoch not in state.sessions),
        up_to_epoch=SchedulerEpoch((state.cache_epoch << EPOCH_SHIFT) - 1),
        spared=tuple(epoch for epoch in state.sessions if state.is_old(epoch)),
        lease_ids=tuple(sorted(window.lease_ids)),
        report=True,
    )
    state.send_fence(worker, fence, window.displaced)
    window.displaced = []


def accept_window_ack(state: State, worker: Worker, ack: FenceAck, now_ns: int) -> None:
    """Rule 8: look at the arrays again, then open the ledger, with the trees that the log tells of."""
    lost = _second_look(worker, ack)
    finish_fenced(state, worker, worker.fences.pop(ack.fence_id).leases)
    for lease in lost:
        _lose(state, lease)
        state.fence_leases(worker, lease)
    open_worker(state, worker, now_ns, knows_below=(bool(ack.host_generations), bool(ack.disk_generations)))
    state.workers_changed = True


def _second_look(worker: Worker, ack: FenceAck) -> list[Lease]:
    """Bring the ledger up to what the worker has now; returns live leases whose blocks are someone else's by now."""
    ledger = worker.ledger
    lost: dict[int, Lease] = {}
    generations = np.frombuffer(ack.generations, "<u8")
    other_seal = (np.frombuffer(ack.seals, np.uint64).reshape(-1, 2) != ledger.seal_words).any(axis=1)
    newer = generations > ledger.generations
    for block in np.flatnonzero(newer | (other_seal & (generations == ledger.generations))).tolist():
        for holder in worker.holders.get(block, {}).values():
            shares = block in holder.held[: holder.num_shared]
            if not holder.draining and (newer[block] or shares):
                lost[holder.number] = holder
        ledger.generation[block] = int(generations[block])
        ledger.set_seal(block, ack.seals[block * SEAL_BYTES : (block + 1) * SEAL_BYTES])
    return list(lost.values())
