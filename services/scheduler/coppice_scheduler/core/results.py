"""What a step's result changes: progress, new tokens, ends, refusals, blocks that became full or free."""

from __future__ import annotations

import numpy as np

from coppice.handles import HANDLE_BYTES, block_of, handles_array
from coppice.ids import TOKEN_BYTES
from coppice.messages.step import Refusal, RefusalCode, StepResult
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.sequences import Sequence, SequenceState
from coppice_scheduler.core.workers import InFlight, Row, Worker


def take_result(life: Lifecycle, worker: Worker, result: StepResult, now_ns: int) -> None:
    """Results come in the order of steps; any other was taken before, or belongs to an epoch that is over."""
    if not worker.in_flight or worker.in_flight[0].plan.step != result.step:
        return
    step = worker.in_flight.popleft()
    life.totals.steps += 1
    refusals = {refusal.sequence_id: refusal for refusal in result.refusals}
    ids = np.frombuffer(result.sampled_ids, dtype="<u4").tolist()
    sampled = dict(zip(ids, np.frombuffer(result.sampled_tokens, dtype="<u4").tolist(), strict=True))
    for row in step.rows:
        if row.sequence.state is not SequenceState.ATTACHED:
            continue
        refusal = refusals.get(row.sequence.sequence_id)
        if refusal is not None and _mend(life, worker, row.sequence, refusal, result.step):
            life.requeue(row.sequence.request, now_ns)
        elif refusal is not None:
            life.retry(row.sequence.request, _refused(worker, refusal), now_ns)
        elif row.samples and row.sequence.sequence_id not in sampled:
            life.retry(row.sequence.request, _silent(worker, result.step), now_ns)
        else:
            _progress(life, step, row, now_ns)
            if row.samples:
                _accept(life, row.sequence, sampled[row.sequence.sequence_id], now_ns)
    for sequence in step.removed:
        life.removed(sequence)


def _mend(life: Lifecycle, worker: Worker, sequence: Sequence, refusal: Refusal, step: int) -> bool:
    """Whether what is wrong with the blocks that the cache service shared out has been seen to."""
    if refusal.code not in (RefusalCode.STALE, RefusalCode.WRONG_SEAL):
        return False
    if not bool((handles_array(sequence.lease.shared) == np.uint64(refusal.handle)).any()):
        return False
    if refusal.code is RefusalCode.STALE or not _repeat_seals(worker, sequence, refusal, step):
        life.leases.distrust(sequence.lease, refusal.handle.to_bytes(HANDLE_BYTES, "little"))
    return True


def _repeat_seals(worker: Worker, sequence: Sequence, refusal: Refusal, step: int) -> bool:
    """Whoever published these blocks may have died, or lost the worker, before it told the worker of their seals. The
    grant's are as good: the worker takes a seal only for the same occupancy, and never over another one.

    False when the worker refuses although it was told again before: then it has another seal there.
    """
    block = block_of(refusal.handle)
    handle, told_in_step = worker.resealed.get(block, (0, 0))
    if handle == refusal.handle:
        return step < told_in_step
    worker.resealed[block] = refusal.handle, worker.next_step
    worker.sealed += sequence.lease.shared
    worker.seals += sequence.lease.shared_seals
    return True


def _progress(life: Lifecycle, step: InFlight, row: Row, now_ns: int) -> None:
    sequence = row.sequence
    sequence.num_computed += row.num_tokens
    if row.num_prefill:
        life.totals.prefill_tokens += row.num_prefill
        sequence.request.mark("prefill", step.planned_ns, now_ns)
    if sequence.num_computed // sequence.lease.block_size > sequence.lease.num_full_blocks:
        life.leases.filled(sequence.lease, sequence.request.tokens, sequence.num_computed)


def _accept(life: Lifecycle, sequence: Sequence, token: int, now_ns: int) -> None:
    request = sequence.request
    sequence.num_pending -= 1
    request.num_output_tokens += 1
    life.totals.sampled_tokens += 1
    life.shares.charge(request.tenant_number, 1)
    if not request.first_token_ns:
        request.first_token_ns = now_ns
    if token in request.request.stop_token_ids:
        life.finish(request, Finish.STOP, now_ns, stop_token=token.to_bytes(TOKEN_BYTES, "little"))
        return
    request.tokens += token.to_bytes(TOKEN_BYTES, "little")
    if request.num_output_tokens >= request.max_output_tokens:
        life.finish(request, Finish.LENGTH, now_ns)
    else:
        life.fresh_tokens[request.request.request_id] = request


def _refused(worker: Worker, refusal: Refusal) -> OutputError:
    if refusal.code is RefusalCode.FENCED:
        return OutputError(
            OutputErrorCode.SESSION_LOST,
            f"worker {worker.worker_id} has fenced this request's blocks; send it again",
            retry_after_ms=1000,
        )
    return OutputError(
        OutputErrorCode.INTERNAL,
        f"worker {worker.worker_id} refused this request's blocks: {refusal.code.value}, handle {refusal.handle:#018x}",
        retry_after_ms=1000,
    )


def _silent(worker: Worker, step: int) -> OutputError:
    return OutputError(
        OutputErrorCode.INTERNAL,
        f"worker {worker.worker_id} returned no token for this request in step {step}",
        retry_after_ms=1000,
    )
