"""A worker's epoch is over: who may start over, and whose prompt is not placed again (`queue/quarantine.py`)."""

from __future__ import annotations

from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.queue.quarantine import words
from coppice_scheduler.core.state.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import RequestState, RequestStatus
from coppice_scheduler.core.state.workers import Worker


def worker_died(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    in_work = _in_work(worker)
    if life.quarantine.lost([request.request for request in in_work], now_ns):
        for request in list(life.requests.values()):
            # One that runs on another worker may yet show that it kills nobody.
            if request.status is not RequestStatus.RUNNING or request in in_work:
                _end_quarantined(life, request, now_ns)
    life.worker_dead(worker, now_ns)


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
