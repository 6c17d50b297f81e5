"""Conservation laws of the scheduler, asserted after every event in tests and when idle in production."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from operator import xor

import numpy as np

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import lease_hash
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.leases import LeaseState
from coppice_scheduler.core.state.sequences import RequestState, RequestStatus, Sequence, SequenceState
from coppice_scheduler.core.state.workers import Worker


def check(life: Lifecycle) -> None:
    _check_requests(life)
    _check_leases(life)
    for worker in life.workers.values():
        _check_worker(life, worker)


def _check_requests(life: Lifecycle) -> None:
    """Every accepted request is at work or has had its one outcome (I16); the counts are those of the requests."""
    assert life.totals.submitted == life.totals.finished + len(life.requests)
    life.open_calls.check(Counter(request.request.step_of or "" for request in life.requests.values()))
    counts = dict.fromkeys(RequestStatus, 0)
    waiting_tokens = 0
    for request in life.requests.values():
        counts[request.status] += 1
        holds = request.status in (RequestStatus.ASKING, RequestStatus.RUNNING)
        assert holds == (request.lease is not None)
        assert (request.status is RequestStatus.RUNNING) == (request.sequence is not None)
        if request.lease is not None:
            assert life.by_lease[request.lease.lease_id] is request
        if request.status is not RequestStatus.RUNNING:
            waiting_tokens += request.num_tokens
        if request.asked_under:
            assert request.status in (RequestStatus.WAITING, RequestStatus.SLEEPING)
            assert request.asked_under not in life.leases.leases
        _check_family(life, request)
        if request.status is RequestStatus.SLEEPING:
            assert life.sleepers.find(request.asked_under) is request
        assert request.num_output_tokens == request.num_tokens - request.num_prompt_tokens
        assert request.num_output_tokens < request.max_output_tokens
    assert counts[RequestStatus.FINISHED] == 0
    assert counts[RequestStatus.RUNNING] == life.counts.running == sum(life.counts.tenant_running.values())
    assert counts[RequestStatus.ASKING] == life.counts.asking
    assert counts[RequestStatus.SLEEPING] == len(life.sleepers) == sum(life.counts.tenant_sleeping.values())
    assert counts[RequestStatus.FOLLOWING] == sum(life.counts.tenant_following.values())
    not_running = (RequestStatus.ASKING, RequestStatus.SLEEPING, RequestStatus.FOLLOWING, RequestStatus.WAITING)
    assert sum(counts[status] for status in not_running) == life.counts.waiting
    assert life.counts.waiting == sum(life.counts.tenant_waiting.values())
    assert life.counts.asking == sum(life.counts.tenant_asking.values())
    assert life.counts.waiting_tokens == waiting_tokens
    assert life.counts.running + life.counts.asking <= life.settings.max_running
    assert len(life.by_lease) == life.counts.running + life.counts.asking


def _check_family(life: Lifecycle, request: RequestState) -> None:
    """Somebody at work computes the prompt that forks wait for."""
    family, name = request.family, request.request.request_id
    assert (request.status is RequestStatus.FOLLOWING) == (family is not None and name in family.waiting)
    if family is None:
        return
    assert family.members[name] is request
    assert all(life.requests[member] is relative for member, relative in family.members.items())
    assert not family.waiting or (not family.is_computed and family.leader.family is family)
    assert family.leader.status is not RequestStatus.FOLLOWING


def _check_leases(life: Lifecycle) -> None:
    """Every live lease belongs to one live or closing sequence; the digest is that of the live leases."""
    table = life.leases
    owners = [sequence.lease.lease_id for worker in life.workers.values() for sequence in _sequences(worker)]
    owned = set(owners)
    assert len(owners) == len(owned), "two sequences under one lease"
    live = [lease for lease in table.leases.values() if lease.state is not LeaseState.ASKED]
    for lease in live:
        assert lease.state is not LeaseState.DEAD
        assert lease.state is not LeaseState.LIVE or lease.lease_id in owned, "a live lease without a sequence"
        assert lease.num_published <= lease.num_publish_sent <= lease.num_full_blocks
        assert lease.reserved_tokens == (lease.num_shared_blocks + lease.num_owned_blocks) * lease.block_size
    assert table.num_live == len(live)
    assert table.digest == reduce(xor, (lease_hash(lease.lease_id) for lease in live), 0)
    assert table.num_awaiting_verdict == sum(lease.awaits_verdict for lease in live)
    asked = {op.lease_id for batch in table.unanswered for op in batch}
    for lease in table.leases.values():
        assert lease.state is not LeaseState.ASKED or lease.lease_id in asked or table.settles(lease)


def _sequences(worker: Worker) -> list[Sequence]:
    removing = [sequence for step in worker.in_flight for sequence in step.removed]
    return [*worker.running.values(), *worker.to_detach, *removing]


def _check_worker(life: Lifecycle, worker: Worker) -> None:
    """Steps without gaps; what is planned is what completed plus what is in flight; no row without blocks (I6)."""
    steps = [step.plan.step for step in worker.in_flight]
    assert steps == list(range(worker.next_step - len(steps), worker.next_step))
    assert len(steps) <= life.settings.max_steps_in_flight
    assert worker.max_sequences is None or len(worker.running) <= worker.max_sequences
    _check_table(worker)
    for sequence_id, sequence in worker.running.items():
        assert sequence.live
        assert sequence.sequence_id == sequence_id
        assert sequence.request.sequence is sequence
        assert sequence.lease.state is LeaseState.LIVE
        assert sequence.lease.worker_epoch == worker.epoch
        assert sequence.num_planned <= sequence.lease.reserved_tokens
        assert sequence.num_computed <= sequence.num_known
        assert sequence.num_known + sequence.num_pending <= sequence.request.num_tokens_max
    for sequence in worker.to_detach:
        assert sequence.state is SequenceState.CLOSING
    for step in worker.in_flight:
        assert all(sequence.state is SequenceState.REMOVING for sequence in step.removed)
    assert worker.stalled.keys() <= worker.running.keys()
    assert worker.wants_blocks.keys() <= worker.running.keys()
    _check_copies(worker)
    for sequence_id, sequence in worker.copying.items():
        assert worker.running[sequence_id] is sequence
        assert sequence.state is SequenceState.GRANTED
        assert sequence.source is not None


def _check_copies(worker: Worker) -> None:
    """Nobody has said that the source of a copy may be given to others, while its step has no result."""
    for step in worker.in_flight:
        for start in step.plan.attach:
            fork = worker.running.get(start.sequence_id)
            if start.copy_from and fork is not None and fork.source is not None:
                assert fork.source.lease.state is not LeaseState.RELEASING, "the source of a copy was released"


def _check_table(worker: Worker) -> None:
    """A slot for each running sequence and no other, with the counts of its plans, its lease and its request."""
    table = worker.table
    assert len(table) == len(worker.running)
    planned = table.num_computed.copy()
    pending = np.zeros_like(planned)
    for step in worker.in_flight:
        rows = step.rows
        live = table.ids[rows.slots] == rows.ids
        planned[rows.slots[live]] += rows.num_tokens[live] * step.plan.num_decode_steps
        pending[rows.slots[live]] += rows.samples[live] * step.plan.num_decode_steps
    for sequence in worker.running.values():
        slot, request, lease = sequence.slot, sequence.request, sequence.lease
        assert table.sequences[slot] is sequence
        assert table.ids[slot] == sequence.sequence_id
        assert table.num_planned[slot] == planned[slot]
        assert table.num_pending[slot] == pending[slot]
        assert (
            table.num_known[slot]
            == request.num_prompt_tokens + len(request.output) // TOKEN_BYTES + table.num_tail[slot]
        )
        assert table.num_reserved[slot] == lease.reserved_tokens
        assert table.num_max[slot] == request.num_tokens_max
        assert table.next_look[slot] > table.num_computed[slot]
        assert table.attached[slot] == (sequence.state is SequenceState.ATTACHED)
        assert table.has_news[slot] or not sequence.grown
        assert request.num_prompt_tokens <= table.num_sent[slot] <= table.num_known[slot]
