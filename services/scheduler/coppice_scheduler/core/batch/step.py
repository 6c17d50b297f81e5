"""Plan the next step of one worker: decodes first, then prefill chunks, under the step's token budget.

There is one rule and there are no phases: `num_computed` catches up with the tokens that the worker will know. A row is
whatever brings `num_planned` nearer to them. It is planned only onto blocks that the sequence owns already (I6); more
blocks are asked for ahead of need, and what a sequence needs it gets whole or not at all.
"""

from __future__ import annotations

import numpy as np

from coppice.messages.step import Growth, SequenceStart, StepPlan
from coppice_scheduler.core.batch.chunked_prefill import Attaching, choose_chunks
from coppice_scheduler.core.batch.multi_step import choose_steps
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.forks import aim, take_copy
from coppice_scheduler.core.state.sequences import Sequence, SequenceState
from coppice_scheduler.core.state.slot_table import Int64
from coppice_scheduler.core.state.workers import InFlight, PlanRows, Row, Worker

_NO_CHUNKS: list[Row] = []


def plan_step(life: Lifecycle, worker: Worker, now_ns: int) -> StepPlan | None:
    """The next plan, entered into the worker's steps in flight. None when there is nothing to say."""
    aim(worker)
    rows, is_steady = _choose_rows(life, worker)
    if not len(rows) and not worker.to_detach and not worker.sealed:
        return None
    num_steps = choose_steps(life, worker, rows) if is_steady else 1
    zero, attach, grow = _news(worker, rows)
    ids = rows.ids.astype("<u4", copy=False).tobytes()
    repeat = rows.is_decode and bool(ids) and ids == worker.last_decode_rows
    worker.last_decode_rows = ids if rows.is_decode else b""
    plan = StepPlan(
        step=worker.next_step,
        detach=np.array([sequence.sequence_id for sequence in worker.to_detach], dtype="<u4").tobytes(),
        sealed=bytes(worker.sealed),
        seals=bytes(worker.seals),
        zero=zero,
        attach=attach,
        grow=grow,
        rows=b"" if repeat else ids,
        row_tokens=b"" if repeat else rows.num_tokens.astype("<u4").tobytes(),
        repeat_rows=repeat,
        num_decode_steps=num_steps,
    )
    _enter(worker, plan, rows, now_ns)
    _note_needs(worker)
    return plan


# --- which rows


def _choose_rows(life: Lifecycle, worker: Worker) -> tuple[PlanRows, bool]:
    """Each sequence that can decode, in the order of slots, then chunks of those that have more to compute; and whether
    all that are not at their end decode."""
    settings, table = life.settings, worker.table
    budget = min(settings.max_step_tokens, worker.max_step_tokens or settings.max_step_tokens)
    known = table.num_known + table.num_pending
    to_plan = known - table.num_planned
    # One that is ended by the tokens sampled in flight decodes no more.
    going = table.attached & (to_plan == 1) & (known < table.num_max)
    blocked = going & (table.num_planned >= table.num_reserved)
    for sequence in table.at(np.flatnonzero(blocked)):
        worker.wants_blocks[sequence.sequence_id] = sequence
    decodes = np.flatnonzero(going & ~blocked)[:budget]
    others = np.flatnonzero((table.ids != 0) & ((to_plan > 1) | ~table.attached))
    chunks = _NO_CHUNKS
    if len(others):
        chunks = choose_chunks(table.at(others), budget - len(decodes), Attaching(), settings, life.shares)
    return _laid_out(worker, decodes, chunks), not len(others) and not blocked.any()


def _laid_out(worker: Worker, decodes: Int64, chunks: list[Row]) -> PlanRows:
    table = worker.table
    slots = decodes
    num_tokens = np.ones(len(decodes), np.int64)
    samples = np.ones(len(decodes), np.bool_)
    num_prefill = (table.num_planned[decodes] < table.num_start[decodes]).astype(np.int64)
    if chunks:
        slots = np.concatenate([slots, [row.sequence.slot for row in chunks]])
        num_tokens = np.concatenate([num_tokens, [row.num_tokens for row in chunks]])
        samples = np.concatenate([samples, [row.samples for row in chunks]])
        num_prefill = np.concatenate([num_prefill, [row.num_prefill for row in chunks]])
    is_decode = all(row.num_tokens == 1 for row in chunks)
    return PlanRows(slots, table.ids[slots], num_tokens, samples, num_prefill, is_decode)


# --- what the plan says beside its rows


def _news(worker: Worker, rows: PlanRows) -> tuple[bytes, tuple[SequenceStart, ...], tuple[Growth, ...]]:
    """Blocks to zero, sequences to attach and blocks to add, of those that compute in this step."""
    table = worker.table
    zero = bytearray()
    attach, grow = [], []
    new = rows.slots[table.has_news[rows.slots] | ~table.attached[rows.slots]]
    for sequence in table.at(new):
        if sequence.state is SequenceState.GRANTED:
            attach.append(_start_of(worker, sequence))
            sequence.attach()
        elif sequence.grown:
            grow.append(Growth(sequence.sequence_id, bytes(sequence.grown)))
        if sequence.zero:
            zero += sequence.zero
            sequence.zero.clear()
        sequence.grown.clear()
    table.has_news[new] = False
    return bytes(zero), tuple(attach), tuple(grow)


def _start_of(worker: Worker, sequence: Sequence) -> SequenceStart:
    request = sequence.request
    lease = sequence.lease
    sampling = request.request.sampling
    copy_from = take_copy(worker, sequence)
    return SequenceStart(
        sequence_id=sequence.sequence_id,
        lease_id=lease.lease_id,
        tokens=request.all_tokens(),
        num_computed_tokens=sequence.num_computed,
        shared=lease.shared,
        shared_seals=lease.shared_seals,
        owned=bytes(lease.owned),
        sampling=sampling,
        traceparent=request.request.traceparent,
        num_prompt_tokens=request.num_prompt_tokens,
        domain=request.request.domain,
        copy_from=copy_from,
        request_id=request.request.request_id if sampling.grammar else "",
        copy_source=b"" if copy_from else lease.copy_source,
        copy_seal=b"" if copy_from else lease.copy_seal,
    )


# --- what it changes


def _enter(worker: Worker, plan: StepPlan, rows: PlanRows, now_ns: int) -> None:
    worker.table.num_planned[rows.slots] += rows.num_tokens * plan.num_decode_steps
    worker.table.num_pending[rows.slots] += rows.samples * plan.num_decode_steps
    for sequence in worker.to_detach:
        sequence.detach()
    worker.in_flight.append(InFlight(plan, rows, tuple(worker.to_detach), now_ns))
    worker.to_detach.clear()
    worker.sealed.clear()
    worker.seals.clear()
    worker.next_step += 1


def _note_needs(worker: Worker) -> None:
    """Mark sequences whose blocks run out soon. A prefill has all that its prompt needs; its tail is decode."""
    table = worker.table
    to_plan = table.num_known + table.num_pending - table.num_planned
    lacking = (table.ids != 0) & (to_plan <= 1) & (table.num_needed(slice(None)) > table.num_reserved)
    for sequence in table.at(np.flatnonzero(lacking)):
        if not sequence.lease.extend_asked:
            worker.wants_blocks[sequence.sequence_id] = sequence
