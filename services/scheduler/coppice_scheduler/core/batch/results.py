"""What a step's result changes: progress, new tokens, ends, refusals, blocks that became full or free.

Most rows of most steps only get one token more: they are counted with array operations. Python looks at those where
something happens: a first token, a block that became full, an end, log-probabilities, a refusal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from coppice.handles import HANDLE_BYTES, block_of, handles_array
from coppice.ids import TOKEN_BYTES
from coppice.messages.step import FLOAT_BYTES, Refusal, RefusalCode, StepResult, TokenLogprobs
from coppice.request_log.stages import Stage, StageKind
from coppice_scheduler.core.batch.multi_step import NS_PER_US, expected_length_ns, note_pace
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import RequestState, Sequence
from coppice_scheduler.core.state.slot_table import TAIL_MAX, Bool, Int64, SlotTable, UInt32
from coppice_scheduler.core.state.workers import InFlight, PlanRows, Worker

_TOO_MUCH = "the answer's grammar takes more work than one answer is given, or allows nothing further; make it simpler"


SLOW_TIMES = 4  # what its like took: so long a step is told of to those in it,
SLOW_EXTRA_NS = 100_000_000  # if it cost them so much


class Accepted(NamedTuple):
    """What became of the rows that sampled. All arrays have shape [S]."""

    rows: Int64  # among the rows of the step
    num_tokens: Int64  # that each request has more now, a stop token not counted
    stopped: Bool
    stop_tokens: UInt32
    at_length: Bool


def take_result(life: Lifecycle, worker: Worker, result: StepResult, now_ns: int) -> None:
    """Results come in the order of steps; any other was taken before, or belongs to an epoch that is over."""
    if not worker.in_flight or worker.in_flight[0].plan.step != result.step:
        return
    step = worker.in_flight.popleft()
    life.totals.steps += 1
    late = _late(worker, step, now_ns)
    worker.result_ns = now_ns
    note_pace(worker, step, result)
    worker.rate.step_done(step.planned_ns, now_ns, result.num_tokens)
    rows, table = step.rows, worker.table
    live = table.ids[rows.slots] == rows.ids
    tokens, has_tokens = _tokens_of(step, result)
    refused = _is_refused(rows, result)
    silent = rows.samples & ~has_tokens & ~refused
    good = live & ~refused & ~silent
    table.num_computed[rows.slots[good]] += rows.num_tokens[good] * step.plan.num_decode_steps
    accepted = _accept(table, rows, tokens, np.flatnonzero(good & rows.samples))
    _count(life, table, rows, good, accepted)
    if result.logprobs:
        stopped = rows.ids[accepted.rows[accepted.stopped]]
        for request in take_logprobs(worker, result, frozenset(stopped.tolist())):
            if request.request.streams:
                life.outbox.note(request)
    _send(life, table, rows, tokens, accepted)
    if late is not None:
        for sequence in table.at(rows.slots[live]):
            sequence.request.history.was(late)
    _visit(life, worker, step, good, accepted, now_ns)
    for row in np.flatnonzero(live & ~good).tolist():
        _failed_row(life, worker, int(rows.slots[row]), result, now_ns)
    for sequence in step.removed:
        life.removed(sequence)


def _late(worker: Worker, step: InFlight, now_ns: int) -> Stage | None:
    """Where the step took many times what its like took lately, from when the worker could begin with it."""
    expected_ns = expected_length_ns(worker, step)
    begun_ns = max(step.planned_ns, worker.result_ns)
    if not expected_ns or now_ns - begun_ns < max(expected_ns * SLOW_TIMES, expected_ns + SLOW_EXTRA_NS):
        return None
    return Stage(StageKind.SLOW_STEP, begun_ns, now_ns, worker.worker_id, expected_ns // NS_PER_US)


# --- tokens


def _tokens_of(step: InFlight, result: StepResult) -> tuple[UInt32, Bool]:
    """tokens: [k, R], of each row of the plan what it sampled (nothing that counts where it did not); which rows did:
    [R]. Normally the worker names all rows that sample, in the order of the plan."""
    rows, num_steps = step.rows, step.plan.num_decode_steps
    given = np.frombuffer(result.sampled_ids, "<u4")
    sampled = np.frombuffer(result.sampled_tokens, "<u4")
    if len(sampled) != num_steps * len(given):  # of no use: every row counts as one that was given none
        return np.zeros((num_steps, len(rows)), np.uint32), np.zeros(len(rows), np.bool_)
    sampled = sampled.reshape(num_steps, len(given))
    all_sample = bool(rows.samples.all())
    ids = rows.ids if all_sample else rows.ids[rows.samples]
    as_planned = result.sampled_ids == ids.astype("<u4", copy=False).tobytes()
    if as_planned and all_sample:
        return sampled, rows.samples
    tokens = np.zeros((num_steps, len(rows)), np.uint32)
    if as_planned:
        tokens[:, rows.samples] = sampled
        return tokens, rows.samples
    place_of = {sequence_id: place for place, sequence_id in enumerate(given.tolist())}
    places = np.array([place_of.get(sequence_id, -1) for sequence_id in rows.ids.tolist()], np.int64)
    has_tokens = rows.samples & (places >= 0)
    tokens[:, has_tokens] = sampled[:, places[has_tokens]]
    return tokens, has_tokens


def _accept(table: SlotTable[Sequence], rows: PlanRows, tokens: UInt32, sampling: Int64) -> Accepted:
    """Append the tokens of the rows `sampling` [S] up to a stop token. What a plan computed behind it is dropped;
    nothing is ever planned beyond the length."""
    slots = rows.slots[sampling]
    sampled = tokens.take(sampling, axis=1)  # many times faster than an index, for few rows of many columns
    num_steps = len(tokens)
    is_stop = _is_stop(table, slots, sampled)
    stopped = np.asarray(is_stop.any(axis=0))
    num_tokens = np.full(len(slots), num_steps)
    stop_tokens = np.zeros(len(slots), np.uint32)
    if stopped.any():
        ends = np.flatnonzero(stopped)
        num_tokens[ends] = is_stop[:, ends].argmax(axis=0)
        stop_tokens[ends] = sampled[num_tokens[ends], ends]
    _append(table, slots, sampled, num_tokens)
    table.num_pending[slots] -= num_steps
    known = table.num_known[slots] + num_tokens
    table.num_known[slots] = known
    table.num_computed[slots] = np.minimum(table.num_computed[slots], known)
    at_length: Bool = (known == table.num_max[slots]) & ~stopped
    return Accepted(sampling, num_tokens, stopped, stop_tokens, at_length)


def _is_stop(table: SlotTable[Sequence], slots: Int64, sampled: UInt32) -> Bool:
    """sampled: [k, S]. Returns which of these end their requests: [k, S]."""
    is_stop = np.zeros(sampled.shape, np.bool_)
    for column in range(table.num_stops):
        is_stop |= sampled == table.stops[slots, column]
    special = table.is_special[slots]
    if special.any():
        for column in np.flatnonzero(special).tolist():
            sequence = table.sequences[int(slots[column])]
            assert sequence is not None
            stops = sequence.request.request.stop_token_ids
            is_stop[:, column] = [token in stops for token in sampled[:, column].tolist()]
    return is_stop


def _append(table: SlotTable[Sequence], slots: Int64, sampled: UInt32, num_tokens: Int64) -> None:
    """sampled: [k, S], of which each slot keeps the first `num_tokens` [S]."""
    num_tail = table.num_tail[slots]
    full = num_tail + len(sampled) > TAIL_MAX
    if full.any():
        for sequence in table.at(slots[full]):
            sequence.fold()
        num_tail[full] = 0
    tail = table.tail.reshape(-1)
    first = slots * TAIL_MAX + num_tail
    for place, tokens in enumerate(sampled):
        kept = num_tokens > place
        tail[first[kept] + place] = tokens[kept]
    table.num_tail[slots] = num_tail + num_tokens


def _count(life: Lifecycle, table: SlotTable[Sequence], rows: PlanRows, good: Bool, accepted: Accepted) -> None:
    life.totals.prefill_tokens += int(rows.num_prefill[good].sum())
    served = accepted.num_tokens + accepted.stopped
    life.totals.sampled_tokens += int(served.sum())
    if len(served):
        life.shares.charge_many(table.tenants[rows.slots[accepted.rows]], served)


def _send(life: Lifecycle, table: SlotTable[Sequence], rows: PlanRows, tokens: UInt32, accepted: Accepted) -> None:
    """Who streams and goes on gets its tokens with those of the others; who ends, with its last Output."""
    slots = rows.slots[accepted.rows]
    going = table.is_plain[slots] & ~accepted.stopped & ~accepted.at_length
    if going.any():
        slots = slots[going]
        life.outbox.tokens(table.numbers[slots], tokens.take(accepted.rows[going], axis=1))
        table.num_sent[slots] = table.num_known[slots]


# --- rows where something happens


def _visit(life: Lifecycle, worker: Worker, step: InFlight, good: Bool, accepted: Accepted, now_ns: int) -> None:
    """First tokens, full blocks, ends, in the order of the rows."""
    rows, table = step.rows, worker.table
    ends: Bool = np.zeros(len(rows), np.bool_)
    ends[accepted.rows] = accepted.stopped | accepted.at_length
    has_tokens = np.zeros(len(rows), np.bool_)
    has_tokens[accepted.rows] = True
    slots = rows.slots
    fills = table.num_computed[slots] >= table.next_look[slots]
    begins = has_tokens & ~table.has_first[slots]
    visited = good & (ends | fills | begins | (rows.num_prefill > 0) | table.is_watched[slots])
    table.has_first[slots[begins]] = True
    places = np.full(len(rows), -1, np.int64)
    places[accepted.rows] = np.arange(len(accepted.rows))
    found = np.flatnonzero(visited)
    marks = (rows.num_prefill[found], begins[found], fills[found], ends[found], places[found])
    each = zip(table.at(slots[found]), *(mark.tolist() for mark in marks), strict=True)
    for sequence, num_prefill, is_first, is_full, is_last, place in each:
        request = sequence.request
        if num_prefill:
            request.note_chunk(step.planned_ns, now_ns, num_prefill)
            if place >= 0:
                request.history.becomes(StageKind.DECODE, now_ns, worker.worker_id)
        if is_first:
            life.prompt_computed(request, now_ns)
            request.first_token_ns = request.first_token_ns or now_ns
        if request.wants_logprobs and request.request.streams and place >= 0:
            life.outbox.note(request)
        if is_full:
            life.publish_full(sequence)
            sequence.look_again()
        if is_last:
            _end(life, sequence, accepted, place, now_ns)


def _end(life: Lifecycle, sequence: Sequence, accepted: Accepted, place: int, now_ns: int) -> None:
    if accepted.stopped[place]:
        stop_token = int(accepted.stop_tokens[place]).to_bytes(TOKEN_BYTES, "little")
        life.finish(sequence.request, Finish.STOP, now_ns, stop_token=stop_token)
    else:
        life.finish(sequence.request, Finish.LENGTH, now_ns)


# --- rows that failed


def _is_refused(rows: PlanRows, result: StepResult) -> Bool:
    if not result.refusals:
        return np.zeros(len(rows), np.bool_)
    refused = np.array([refusal.sequence_id for refusal in result.refusals], np.uint32)
    found: Bool = np.isin(rows.ids, refused)
    return found


def _failed_row(life: Lifecycle, worker: Worker, slot: int, result: StepResult, now_ns: int) -> None:
    """It was refused, or the worker owes it a token. Its request may have ended with another's failure."""
    sequence = worker.table.sequences[slot]
    if sequence is None:
        return
    refusal = next((found for found in result.refusals if found.sequence_id == sequence.sequence_id), None)
    if refusal is None:
        life.retry(sequence.request, _silent(worker, result.step), now_ns)
    elif refusal.code is RefusalCode.GRAMMAR:
        life.finish(sequence.request, Finish.ERROR, now_ns, error=OutputError(OutputErrorCode.GRAMMAR, _TOO_MUCH))
    elif _mend(life, worker, sequence, refusal, result.step):
        life.requeue(sequence.request, now_ns)
    else:
        life.retry(sequence.request, _refused(worker, refusal), now_ns)


def _mend(life: Lifecycle, worker: Worker, sequence: Sequence, refusal: Refusal, step: int) -> bool:
    """Whether what is wrong with its source, or with blocks that the cache service shared out, has been seen to, or
    passes by itself."""
    if refusal.code is RefusalCode.GRAMMAR_PENDING:
        return True  # what it computed is found in the cache; until it is back, the grammar may be compiled
    if refusal.code is RefusalCode.LOST_SOURCE and sequence.source is not None:
        life.leave_family(sequence.request)  # so it is computed from its prefix, and copies no more
        return True
    if refusal.code is RefusalCode.LOST_SOURCE and sequence.lease.copy_source:
        sequence.request.may_copy = False
        return True
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


def _refused(worker: Worker, refusal: Refusal) -> OutputError:
    if refusal.code is RefusalCode.FENCED:
        return worker.error(OutputErrorCode.SESSION_LOST, "has fenced this request's blocks; send it again")
    what = f"refused this request's blocks: {refusal.code.value}, handle {refusal.handle:#018x}"
    return worker.error(OutputErrorCode.INTERNAL, what)


def _silent(worker: Worker, step: int) -> OutputError:
    return worker.error(OutputErrorCode.INTERNAL, f"returned no token for this request in step {step}")


def take_logprobs(worker: Worker, result: StepResult, stopped: frozenset[int]) -> list[RequestState]:
    """Keep what is new for each request, and say which have something new. `stopped`: sequences that this result ends
    with a stop token, whose entry counts; tokens that were computed beyond an end have none."""
    found = []
    for reported in result.logprobs:
        sequence = worker.running.get(reported.sequence_id)
        if sequence is None or not sequence.request.wants_logprobs:
            continue
        request = sequence.request
        end = request.num_tokens + (reported.sequence_id in stopped)
        part = part_of(reported, request.num_logprob_positions, end)
        if part is not None:
            request.fresh_logprobs.append(part)
            request.num_logprob_positions = part.end_position
            found.append(request)
    return found


def part_of(reported: TokenLogprobs, start: int, end: int) -> TokenLogprobs | None:
    """Those of positions `start` <= position < `end`; None when there are none. After a preemption the worker reports
    once more what it computes once more."""
    first = reported.first_position
    low = max(start, first) - first
    high = min(end - first, len(reported.chosen) // FLOAT_BYTES)
    if low >= high:
        return None
    row = reported.num_top * FLOAT_BYTES
    return replace(
        reported,
        first_position=first + low,
        chosen=reported.chosen[low * FLOAT_BYTES : high * FLOAT_BYTES],
        top_ids=reported.top_ids[low * row : high * row],
        top=reported.top[low * row : high * row],
        ranks=reported.ranks[low * TOKEN_BYTES : high * TOKEN_BYTES],
    )
