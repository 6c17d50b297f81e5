"""Connections come and go: what survives, what is asked again, what is given up."""

from __future__ import annotations

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch
from coppice.messages.index import DeadWorker, FromClient, Reattached, Workers
from coppice.messages.ownership import Yielded
from coppice.request_log.stages import Preemption, StageKind
from coppice_scheduler.core.kv_client.answers import lease_lost
from coppice_scheduler.core.lifecycle import NS_PER_MS, Lifecycle
from coppice_scheduler.core.policy.lost_workers import give_up, worker_died, worker_emptied
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import RequestStatus
from coppice_scheduler.core.state.workers import Worker, unreachable

LEAVE_AFTER_MS = 2_000  # that what runs on a worker gets to end when another scheduler is to have it


def index_attached(life: Lifecycle, epoch: SchedulerEpoch, cache_epoch: CacheEpoch, fresh: bool, now_ns: int) -> None:
    leases = life.leases
    known = leases.epoch
    leases.connected = True
    if fresh or known != epoch:
        life.hints.forget()
    leases.epoch = epoch
    leases.cache_epoch = cache_epoch
    if known and known != epoch:
        _session_lost(life, now_ns)
    elif known and fresh:
        leases.reattach(
            tuple(DeadWorker(worker.worker_id, dead) for worker in life.workers.values() for dead in worker.dead_epochs)
        )
        life.wake_all()
        for worker in life.workers.values():
            for stall in worker.stalled.values():
                stall.refused = False
                stall.since_ns = now_ns
                stall.retry_ns = 0
        for gate in life.gates.domains.values():
            gate.retry_ns = 0
        if life.gates.pool is not None:
            life.gates.pool.retry_ns = 0


def _session_lost(life: Lifecycle, now_ns: int) -> None:
    """Every lease is dead; sequences are taken off the workers without giving anything back."""
    life.leases.forget_session()
    life.forget_asked()
    life.gates.reset()
    error = OutputError(
        OutputErrorCode.SESSION_LOST, "the cache service ended this scheduler's session; send it again", 1000
    )
    for worker in life.workers.values():
        worker.returning.clear()
        worker.dead_epochs.clear()  # nothing of ours can run there any more, whatever becomes of them
    for request in list(life.requests.values()):
        if request.status is RequestStatus.ASKING:
            life.unask(request)
        elif request.status is RequestStatus.RUNNING:
            life.retry(request, error, now_ns)


def workers_listed(life: Lifecycle, message: Workers, now_ns: int) -> None:
    """A worker that is listed under another epoch has lost the old one; so has one that is listed no more.

    After a restart of the cache service nobody is listed until workers register again: that is no death.
    """
    if message.cache_epoch != life.leases.cache_epoch:
        return
    listed = {info.worker_id: info for info in message.workers}
    for worker_id, info in listed.items():
        worker = life.workers.setdefault(worker_id, Worker(worker_id))
        if info.worker_epoch in worker.dead_epochs:
            continue
        worker.take_info(info)
        if not info.yields:
            worker.yields_since_ns = None
        elif worker.yields_since_ns is None:
            worker.yields_since_ns = now_ns
        worker.listed_by = message.cache_epoch
        # A lower epoch was said before the worker registered again: its own word is newer, and the next list follows.
        if worker.attached and worker.epoch < info.worker_epoch:
            _epoch_over(life, worker, now_ns)
    for worker in life.workers.values():
        if worker.worker_id not in listed:
            # Not listed under the epoch that attached here: it was, or will be; the worker's own word is newer.
            known = worker.info is not None and worker.info.worker_epoch == worker.epoch
            was_listed = worker.listed_by == message.cache_epoch and known
            worker.info = None
            worker.listed_by = CacheEpoch(0)
            if was_listed and worker.attached:
                _epoch_over(life, worker, now_ns)
    for worker_id in [worker.worker_id for worker in life.workers.values() if worker.is_stranger]:
        del life.workers[worker_id]


def _epoch_over(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    worker.bury(worker.epoch)
    worker.attached = False
    worker.sealed.clear()
    worker.seals.clear()
    worker_died(life, worker, now_ns)


def worker_attached(life: Lifecycle, worker: Worker, epoch: WorkerEpoch, fresh: bool, now_ns: int) -> None:
    if worker.attached and worker.epoch != epoch:
        _epoch_over(life, worker, now_ns)
    elif worker.attached and fresh:
        sealed = b"".join(step.plan.sealed for step in worker.in_flight)
        seals = b"".join(step.plan.seals for step in worker.in_flight)
        worker_emptied(life, worker, now_ns)
        worker.sealed[:0] = sealed
        worker.seals[:0] = seals
    if fresh:
        worker.restart_steps()
    worker.epoch = epoch
    worker.attached = epoch not in worker.dead_epochs
    worker.connected = True
    worker.abandoned = worker.loss_is_counted = False


def worker_lost(worker: Worker, now_ns: int) -> None:
    worker.connected = False
    worker.lost_ns = now_ns


def give_up_absent(life: Lifecycle, now_ns: int) -> None:
    """Take the requests of workers that nobody can reach."""
    for worker in life.workers.values():
        at_ns = gives_up_at_ns(life, worker)
        if at_ns is not None and at_ns <= now_ns:
            give_up(life, worker, unreachable(worker, life.settings.worker_absent_ms), now_ns)


def gives_up_at_ns(life: Lifecycle, worker: Worker) -> int | None:
    if not worker.attached or worker.connected or worker.abandoned:
        return None
    return worker.lost_ns + life.settings.worker_absent_ms * NS_PER_MS


def leave_workers(life: Lifecycle, now_ns: int) -> list[FromClient]:
    """Of those that another scheduler is to have: what runs there for long goes on elsewhere. When nothing is left, the
    cache service hears of it."""
    said: list[FromClient] = []
    for worker in life.workers.values():
        if worker.yields_since_ns is None or worker.info is None:
            continue
        if worker.is_left:
            said.append(Yielded(worker.worker_id, worker.info.worker_epoch))
            worker.yields_since_ns = None
        elif leaves_at_ns(worker) <= now_ns:
            for sequence in list(worker.running.values()):
                sequence.request.history.happened(StageKind.PREEMPTED, now_ns, Preemption.YIELDED.value)
                life.requeue(sequence.request, now_ns)
    return said


def leaves_at_ns(worker: Worker) -> int:
    assert worker.yields_since_ns is not None
    return worker.yields_since_ns + LEAVE_AFTER_MS * NS_PER_MS


def reattached(life: Lifecycle, message: Reattached, now_ns: int) -> None:
    if message.cache_epoch != life.leases.cache_epoch:
        return
    settled = dict(zip(message.accepted, message.settled_blocks, strict=False))
    for lease_id in message.accepted:
        lease = life.leases.leases.get(lease_id)
        if lease is not None:
            life.leases.accept(lease, settled.get(lease_id))
    for lease_id in message.refused:
        lease = life.leases.leases.get(lease_id)
        if lease is not None:
            lease_lost(life, lease, now_ns)
