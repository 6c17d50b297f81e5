"""Several continuations of one prompt: one request computes it, the others share its full blocks and copy the rest.

    leader  [block|block|tail.]     its prompt is computed: its first token was sampled
    fork    [share|share|copy.]     shared by the grant | copied in the step that attaches it; it computes one token

A fork waits, holding nothing, until the prompt is computed. Then it asks in the batch that publishes the prompt's
blocks, where they are. What its grant does not share is copied from a relative that still holds the whole prompt: the
block that the prompt fills in part, or all of them where nothing is published. The last token of the prompt is not
copied but computed, for a sample of the fork's own.

The source's blocks outlast the copy: they are released only after the result of the step that removed the source, and
that step is the copy's own or a later one. Within a plan copies come before any row computes, and what the source
writes later lies behind what is copied. Where nobody holds the prompt any more, a fork computes what it did not find.
"""

from __future__ import annotations

from msgspec.structs import replace

from coppice.ids import DomainId, SequenceId
from coppice_scheduler.core.state.leases import LeaseState
from coppice_scheduler.core.state.sequences import Family, RequestState, Sequence
from coppice_scheduler.core.state.workers import Worker

# --- who waits for whom


def join(request: RequestState, relative: RequestState | None) -> bool:
    """Make `request` one of the family of an earlier request. True: it waits until the prompt is computed.

    Another domain, salt or prompt is no relation. Who wants log-probabilities of the prompt has to compute it, and who
    has output already begins behind it.
    """
    if relative is None or request.request.sampling.num_prompt_logprobs is not None or request.num_output_tokens:
        return False
    if _shared_by(request) != _shared_by(relative):
        return False
    family = relative.family
    if family is None:
        family = relative.family = Family(relative, is_computed=relative.num_output_tokens > 0)
        family.members[relative.request.request_id] = relative
    request.family = family
    request.request = replace(request.request, tokens=relative.request.tokens)  # held once for all of them
    family.members[request.request.request_id] = request
    if not family.is_computed:
        family.waiting[request.request.request_id] = request
    return not family.is_computed


def _shared_by(request: RequestState) -> tuple[DomainId, bytes, bytes]:
    return request.request.domain, request.request.salt, request.request.tokens


def prompt_computed(request: RequestState) -> list[RequestState]:
    """It has its first token. Returns the forks that waited for that."""
    family = request.family
    if family is None or family.is_computed:
        return []
    family.is_computed = True
    waited = list(family.waiting.values())
    for fork in waited:
        fork.num_matched = fork.num_prompt_tokens - 1  # as far as its place in line and loads are concerned
    family.waiting.clear()
    return waited


def leave(request: RequestState) -> RequestState | None:
    """It ended, or is no longer to copy. Returns the fork that computes the prompt in its place, if one has to."""
    family = request.family
    if family is None:
        return None
    request.family = None
    del family.members[request.request.request_id]
    family.waiting.pop(request.request.request_id, None)
    if family.leader is not request or family.is_computed or not family.waiting:
        return None
    family.leader = family.waiting.pop(next(iter(family.waiting)))
    return family.leader


def follows_at_work(request: RequestState) -> bool:
    """Whether it waits for a prompt that its leader computes right now."""
    family = request.family
    if family is None or request.request.request_id not in family.waiting:
        return False
    return family.leader.sequence is not None


# --- where it goes


def near_its_prompt(request: RequestState, workers: list[Worker]) -> list[Worker]:
    """Those where it can copy its prompt; all of them if there is none, or if it was refused there before."""
    family = request.family
    if family is None or request.asked_under:
        return workers
    return [worker for worker in workers if _source_on(family, worker) is not None] or workers


def _source_on(family: Family, worker: Worker) -> Sequence | None:
    """A sequence there that has the whole prompt, as results tell: what it copied itself is there, too."""
    for member in family.members.values():
        sequence = member.sequence
        is_there = sequence is not None and worker.running.get(sequence.sequence_id) is sequence
        if is_there and sequence is not None and sequence.num_computed >= member.num_prompt_tokens:
            return sequence
    return None


# --- what it copies


def plan_copy(worker: Worker, sequence: Sequence) -> None:
    """It was granted: note where it will copy from, if its blocks do not have the whole prompt."""
    family = sequence.request.family
    if family is not None and sequence.lease.num_found_tokens < sequence.request.num_prompt_tokens - 1:
        sequence.source = _source_on(family, worker)
    if sequence.source is not None:
        worker.copying[sequence.sequence_id] = sequence


def aim(worker: Worker) -> None:
    """Before rows are chosen: a sequence whose source still holds the prompt needs no prefill."""
    for sequence in list(worker.copying.values()):
        if _still_holds(worker, sequence.source):
            sequence.start_at(sequence.request.num_prompt_tokens - 1)
        else:
            del worker.copying[sequence.sequence_id]
            sequence.source = None
            sequence.start_at(sequence.lease.num_found_tokens)


def take_copy(worker: Worker, sequence: Sequence) -> SequenceId:
    """It is attached in this plan: the sequence that it copies from, 0 where it copies nothing."""
    if worker.copying.pop(sequence.sequence_id, None) is None:
        return SequenceId(0)
    assert sequence.source is not None
    return sequence.source.sequence_id


def _still_holds(worker: Worker, source: Sequence | None) -> bool:
    """The worker has it, or lets it go in the plan that is being made: nobody else may be given its blocks before."""
    assert source is not None
    is_there = worker.running.get(source.sequence_id) is source or source in worker.to_detach
    return is_there and source.lease.state is LeaseState.LIVE
