"""Build the next plan of one worker: decodes first, then prefill chunks, under the step's token budget.

There are no phases: a row is whatever brings `num_planned` nearer to the tokens that the worker will know. A row is
planned only onto blocks that the sequence owns already (I6); more blocks are asked for ahead of need.
"""

from __future__ import annotations

import numpy as np

from coppice.ids import TOKEN_BYTES
from coppice.messages.step import Growth, SequenceStart, StepPlan
from coppice_scheduler.core.chunks import Attaching, choose_chunks
from coppice_scheduler.core.fairness import FairShares
from coppice_scheduler.core.sequences import Sequence, SequenceState
from coppice_scheduler.core.settings import SchedulerSettings
from coppice_scheduler.core.workers import InFlight, Row, Worker


def build_plan(worker: Worker, settings: SchedulerSettings, shares: FairShares, now_ns: int) -> StepPlan | None:
    """The next plan, entered into the worker's steps in flight. None when there is nothing to say."""
    rows = _choose_rows(worker, settings, shares)
    if not rows and not worker.to_detach and not worker.sealed:
        return None
    zero = bytearray()
    attach = []
    grow = []
    for row in rows:
        sequence = row.sequence
        if sequence.state is SequenceState.GRANTED:
            attach.append(_start_of(sequence))
        elif sequence.grown:
            grow.append(Growth(sequence.sequence_id, bytes(sequence.grown)))
        zero += sequence.zero
        sequence.zero.clear()
        sequence.grown.clear()
        sequence.num_planned += row.num_tokens
        sequence.num_pending += row.samples
    ids = _packed([row.sequence.sequence_id for row in rows])
    decode = all(row.num_tokens == 1 for row in rows)
    repeat = decode and bool(rows) and ids == worker.last_decode_rows
    worker.last_decode_rows = ids if decode else b""
    plan = StepPlan(
        step=worker.next_step,
        detach=_packed([sequence.sequence_id for sequence in worker.to_detach]),
        sealed=bytes(worker.sealed),
        seals=bytes(worker.seals),
        zero=bytes(zero),
        attach=tuple(attach),
        grow=tuple(grow),
        rows=b"" if repeat else ids,
        row_tokens=b"" if repeat else _packed([row.num_tokens for row in rows]),
        repeat_rows=repeat,
    )
    _enter(worker, plan, rows, now_ns)
    _note_needs(worker, settings)
    return plan


def _enter(worker: Worker, plan: StepPlan, rows: list[Row], now_ns: int) -> None:
    for sequence in worker.to_detach:
        sequence.state = SequenceState.REMOVING
    worker.in_flight.append(InFlight(plan, tuple(rows), tuple(worker.to_detach), now_ns))
    worker.to_detach.clear()
    worker.sealed.clear()
    worker.seals.clear()
    worker.next_step += 1


def _packed(values: list[int]) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


def _start_of(sequence: Sequence) -> SequenceStart:
    request = sequence.request
    lease = sequence.lease
    sequence.state = SequenceState.ATTACHED
    return SequenceStart(
        sequence_id=sequence.sequence_id,
        lease_id=lease.lease_id,
        tokens=bytes(request.tokens),
        num_computed_tokens=sequence.num_computed,
        shared=lease.shared,
        shared_seals=lease.shared_seals,
        owned=bytes(lease.owned),
        sampling=request.request.sampling,
        traceparent=request.request.traceparent,
        num_prompt_tokens=request.num_prompt_tokens,
    )


def _choose_rows(worker: Worker, settings: SchedulerSettings, shares: FairShares) -> list[Row]:
    rows = []
    prefills = []
    attaching = Attaching()
    budget = min(settings.max_step_tokens, worker.max_step_tokens or settings.max_step_tokens)
    for sequence in worker.running.values():
        request, planned = sequence.request, sequence.num_planned
        to_plan = (len(request.tokens) // TOKEN_BYTES) + sequence.num_pending - planned
        if to_plan > 1:
            prefills.append(sequence)
        elif not budget or request.num_output_tokens + sequence.num_pending >= request.max_output_tokens:
            continue  # without the budget, or ended by the tokens that are sampled in flight
        elif planned >= sequence.lease.reserved_tokens:
            worker.wants_blocks[sequence.sequence_id] = sequence
        elif attaching.takes(sequence):
            rows.append(Row(sequence, 1, True, 1 if planned < sequence.num_start_tokens else 0))
            budget -= 1
    return rows + choose_chunks(prefills, budget, attaching, settings, shares)


def _note_needs(worker: Worker, settings: SchedulerSettings) -> None:
    """Mark sequences whose blocks run out soon. A prefill has all that its prompt needs; its tail is decode."""
    for sequence in worker.running.values():
        if sequence.lease.extend_asked or sequence.num_to_plan > 1:
            continue
        if needed_tokens(sequence, settings) > sequence.lease.reserved_tokens:
            worker.wants_blocks[sequence.sequence_id] = sequence


def needed_tokens(sequence: Sequence, settings: SchedulerSettings) -> int:
    """Positions that it should own blocks for now. After a refusal no more than the next token's."""
    ahead = 0 if sequence.ahead_refused else settings.extend_ahead_blocks * sequence.lease.block_size
    return min(sequence.request.num_kv_tokens_max, sequence.num_planned + 1 + ahead)
