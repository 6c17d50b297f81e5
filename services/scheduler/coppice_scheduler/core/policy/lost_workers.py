"""A worker is gone: its requests go on elsewhere, but for prompts that are not placed again (`queue/quarantine.py`)."""

from __future__ import annotations

from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.queue.quarantine import InWork, words
from coppice_scheduler.core.state.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import RequestState, RequestStatus, Sequence, SequenceState
from coppice_scheduler.core.state.workers import Worker, lost_in_work, nobody_listens


def worker_died(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    """Its epoch is over."""
    _suspect(life, worker, now_ns)
    _worker_dead(life, worker, now_ns)


def worker_gone(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    """Nobody listens where it was. Whether its epoch is over is for the cache service to say: until then it may still
    compute, and what it held comes back through a fence."""
    if worker.attached and not worker.connected and not worker.abandoned:
        _suspect(life, worker, now_ns)
        give_up(life, worker, nobody_listens(worker), now_ns)


def _suspect(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    """Once for each loss: that it is gone is seen before its epoch is over, most often."""
    if worker.loss_is_counted:
        return
    worker.loss_is_counted = True
    in_work = _in_work(worker)
    if life.quarantine.lost([_as_lost(worker, request) for request in in_work], now_ns):
        for request in list(life.requests.values()):
            # One that runs on another worker may yet show that it kills nobody.
            if request.status is not RequestStatus.RUNNING or request in in_work:
                _end_quarantined(life, request, now_ns)


def _as_lost(worker: Worker, request: RequestState) -> InWork:
    """One that was given up there may run elsewhere by now: what is pending there was not lost."""
    sequence = request.sequence
    pending = sequence.num_pending if sequence is not None and sequence.table is worker.table else 0
    return InWork(request.request, request.num_tokens, request.num_tokens + max(1, pending))


def _in_work(worker: Worker) -> list[RequestState]:
    """Requests with a row in a plan without a result. Those that ended meanwhile are among them: who hangs up does not
    take back what the worker does."""
    ids = {sequence_id for step in worker.in_flight for sequence_id in step.rows.ids.tolist()}
    removed = [sequence for step in worker.in_flight for sequence in step.removed]
    sequences = [*worker.running.values(), *worker.to_detach, *removed]
    return [sequence.request for sequence in sequences if sequence.sequence_id in ids]


def _end_quarantined(life: Lifecycle, request: RequestState, now_ns: int) -> None:
    left_ms = life.quarantine.left_ms(request.request, now_ns)
    if left_ms:
        error = OutputError(OutputErrorCode.QUARANTINED, words(left_ms), left_ms)
        life.finish(request, Finish.ERROR, now_ns, error=error)


# --- what ran there


def _worker_dead(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    """Its epoch is over: nothing that was granted there is worth anything."""
    _take_requests(life, list(worker.running.values()), lost_in_work(worker), now_ns)
    _nothing_in_flight(life, worker)


def worker_emptied(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    """Its epoch goes on, its sequences are gone. Those that it was not told of yet are not concerned."""
    told = [sequence for sequence in worker.running.values() if sequence.state is SequenceState.ATTACHED]
    _take_requests(life, told, lost_in_work(worker), now_ns)
    _nothing_in_flight(life, worker)


def _nothing_in_flight(life: Lifecycle, worker: Worker) -> None:
    gone = worker.to_detach + [sequence for step in worker.in_flight for sequence in step.removed]
    worker.restart_steps()
    for sequence in gone:
        life.removed(sequence)
    worker.returning.clear()


def give_up(life: Lifecycle, worker: Worker, error: OutputError, now_ns: int) -> None:
    """It cannot be asked and may still compute: its blocks go back through a fence."""
    worker.abandoned = True
    _take_requests(life, list(worker.running.values()), error, now_ns)
    for lease in list(worker.returning.values()):
        life.leases.abandon(lease)


def _take_requests(life: Lifecycle, sequences: list[Sequence], error: OutputError, now_ns: int) -> None:
    for sequence in sequences:
        life.retry(sequence.request, error, now_ns)
