"""A worker is gone: its requests go on elsewhere, but for prompts that are not placed again (`queue/quarantine.py`)."""

from __future__ import annotations

from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.queue.quarantine import InWork, words
from coppice_scheduler.core.state.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import RequestState, RequestStatus
from coppice_scheduler.core.state.workers import Worker, nobody_listens


def worker_died(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    """Its epoch is over."""
    _suspect(life, worker, now_ns)
    life.worker_dead(worker, now_ns)


def worker_gone(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    """Nobody listens where it was. Whether its epoch is over is for the cache service to say: until then it may still
    compute, and what it held comes back through a fence."""
    if worker.attached and not worker.connected and not worker.abandoned:
        _suspect(life, worker, now_ns)
        life.give_up(worker, nobody_listens(worker), now_ns)


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
