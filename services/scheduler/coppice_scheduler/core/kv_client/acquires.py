"""Who asks for memory next, and on which workers."""

from __future__ import annotations

from math import inf

from coppice.ids import LEASE_ID_BYTES, DomainId, WorkerId
from coppice.messages.index import Acquire, Candidate, MatchQueries, Op
from coppice.namespaces import with_salt
from coppice.request_log.stages import Preemption, StageKind
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.policy.admission import max_context
from coppice_scheduler.core.policy.candidates import few_of
from coppice_scheduler.core.policy.dispatch_order import DispatchOrder
from coppice_scheduler.core.policy.free_slots import FreeSlots
from coppice_scheduler.core.policy.guarantee_usage import GuaranteeUsage
from coppice_scheduler.core.policy.running_slots import giving_way
from coppice_scheduler.core.policy.virtual_time import Ranks
from coppice_scheduler.core.queue.shortages import most_blocks, most_slots
from coppice_scheduler.core.state.forks import near_its_prompt
from coppice_scheduler.core.state.leases import LeaseState
from coppice_scheduler.core.state.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import NO_LEASE, RequestState, RequestStatus, Sequence
from coppice_scheduler.core.state.workers import Worker


def choose_acquires(life: Lifecycle, now_ns: int) -> list[Op]:
    """Acquires for those who go next, as many as there are free places or as others have to give up."""
    if not _somebody_stands(life):
        life.shortages.over(now_ns)
        return []
    workers = candidates(life)
    if not workers:
        life.shortages.lasts(StageKind.NO_WORKER, now_ns)
        return []
    one_round = _Round(life, workers, now_ns)
    ops = one_round.choose()
    one_round.note_shortage()
    return ops


def match_questions(life: Lifecycle, now_ns: int) -> list[MatchQueries]:
    """About those who still wait: nobody asks while all that come find a place."""
    if not _somebody_stands(life):
        return []
    workers = candidates(life)
    return life.hints.questions(life.queue, workers[0].info.namespace, now_ns) if workers and workers[0].info else []


def lookup_questions(life: Lifecycle) -> list[MatchQueries]:
    """About requests that are nowhere yet. All workers of a cell are of one namespace."""
    if not life.hints.has_lookups:
        return []
    infos = (worker.info for worker in life.workers.values() if worker.info is not None)
    info = next(infos, None) if life.leases.connected else None
    return life.hints.lookups(None if info is None else info.namespace)


def _somebody_stands(life: Lifecycle) -> bool:
    """In a line, that is: not all that wait ask, sleep or follow."""
    counts = life.counts
    return counts.waiting > counts.asking + len(life.sleepers) + counts.tenant_following.total()


def candidates(life: Lifecycle) -> list[Worker]:
    """Open workers of one namespace, that of the first of them by name, but for those that drain or are to be left."""
    able = (
        worker
        for worker in life.workers.values()
        if worker.open and worker.info and not (worker.info.draining or worker.info.yields)
    )
    workers = sorted(able, key=lambda worker: worker.worker_id)
    namespaces = [worker.info.namespace for worker in workers if worker.info]
    return [worker for worker in workers if worker.info and worker.info.namespace == namespaces[0]]


class _Round:
    """One look at the queue: what stands while places are given out."""

    def __init__(self, life: Lifecycle, workers: list[Worker], now_ns: int) -> None:
        self.life = life
        self.workers = workers
        self.now_ns = now_ns
        self.slots = FreeSlots(life, workers)
        self.guarantee_usage = GuaranteeUsage(life)
        self.ranks = Ranks(life)
        self.dispatch_order = DispatchOrder(life.queue, self.ranks)
        self.loads: dict[DomainId | None, dict[WorkerId, int]] = {}
        self.gate = life.gates.pool_gate()
        self.is_shut = self.gate is not None and not self.gate.opens(now_ns)
        self.held_up: set[DomainId] = set()  # their heads find no worker now
        self.places_end = False  # nobody gives one up for those who share places

    def choose(self) -> list[Op]:
        life = self.life
        ops: list[Op] = []
        while (request := self.dispatch_order.next(self._is_kept_out, self._bar())) is not None:
            able = self.slots.able(request)
            if not able:
                self.places_end = not self._make_place(request)
                if self.places_end and not self.slots.may_differ:
                    break
            elif not _outgrows_all(life, request, self.now_ns):
                self._ask(request, able, ops)
        self._make_memory()
        return ops

    def _is_kept_out(self, request: RequestState) -> bool:
        domain = request.request.domain
        if domain in self.held_up or self.life.gates.skips(domain, self.now_ns):
            return True
        workers = self.slots.able(request)
        if not workers:
            tenant = request.request.tenant
            if tenant in self.life.slot_shares.strict:
                held = self.life.counts.tenant_at_places(tenant)
                request.history.becomes(StageKind.NO_SLOT, self.now_ns, tenant, held)
                return True  # it gets no place of others
            if self.places_end:
                return True
            workers = self.workers
        is_shut = self.is_shut and not self._goes_before_refused(request)
        for worker in workers:
            past = self.guarantee_usage.covers(worker, domain, 1)
            if (past or not is_shut) and not worker.is_short(domain, past=past):
                return False
        return True

    def _bar(self) -> float:
        """Rank from which on everybody is kept out: while the pool is full and nobody has anything by right."""
        if not self.is_shut or self.guarantee_usage.gives_rights:
            return inf
        refused = self.life.gates.pool_request
        return -inf if refused is None else self.ranks.of(refused.tenant_number)

    def _goes_before_refused(self, request: RequestState) -> bool:
        """The pool's gate was shut for a tenant that was served more: it may ask once itself whether there is room."""
        refused = self.life.gates.pool_request
        if refused is None or self.gate is None or self.gate.asking or request.asked_under != NO_LEASE:
            return False
        return self.ranks.of(request.tenant_number) < self.ranks.of(refused.tenant_number)

    def _ask(self, request: RequestState, able: list[Worker], ops: list[Op]) -> None:
        domain = request.request.domain
        is_shut = self.is_shut and not self._goes_before_refused(request)
        covered = [worker for worker in able if self.guarantee_usage.covers(worker, domain, request.num_tokens + 1)]
        fit = [
            worker
            for worker in able
            if not worker.is_short(domain, past=worker in covered)
            and worker.has_context_for(request.num_tokens_max)
            and (worker in covered or not is_shut)
        ]
        if not fit:
            self.held_up.add(domain)
            return
        named = few_of(near_its_prompt(request, fit), request)
        past = all(worker in covered for worker in named)
        self.life.queue.take(request)
        op = _acquire(self.life, request, named, self._loads_for(domain), self.now_ns)
        lease = self.life.leases.leases[op.lease_id]
        lease.past_gate, lease.names_all = past, len(named) == len(fit)
        ops.append(op)
        self.slots.took(request, lease.candidates)
        for worker in named:
            self.guarantee_usage.asked(worker, domain, op.reserve_tokens)
        self.ranks.took_place(request.tenant_number, lease.num_prefill_tokens)
        self.life.gates.asked(domain, past=past)
        self.is_shut = self.is_shut or (self.gate is not None and not past)

    def note_shortage(self) -> None:
        """What those wait for who were not chosen."""
        life, now_ns = self.life, self.now_ns
        if not _somebody_stands(life):
            life.shortages.over(now_ns)
        elif self.slots.none_is_free:
            life.shortages.lasts(StageKind.NO_SLOT, now_ns, lambda: most_slots(life.counts))
        elif self.is_shut or any(worker.stalled for worker in self.workers):
            life.shortages.lasts(StageKind.POOL_FULL, now_ns, lambda: most_blocks(self.workers))
        else:
            life.shortages.over(now_ns)

    # --- when there is no place, or no memory

    def _make_place(self, request: RequestState) -> bool:
        """Every place is taken: whether somebody gave one up for this request."""
        sequence = None
        if not self.slots.is_overdrawn:
            sequence = giving_way(self.life, request, self.ranks, self.workers)
        if sequence is None:
            return False
        self._preempt(sequence)
        return True

    def _make_memory(self) -> None:
        """Who was refused for a full pool is below its share of places: somebody gives way, one at a time."""
        refused = self.life.gates.pool_request
        if not self.is_shut or refused is None or refused.status is not RequestStatus.WAITING:
            return
        if any(worker.returning for worker in self.workers):
            return
        lenders = [worker for worker in self.workers if not worker.stalled]
        sequence = giving_way(self.life, refused, self.ranks, lenders)
        if sequence is None:
            return
        worker = self.life.workers[sequence.lease.worker_id]
        if not self.guarantee_usage.covers(worker, sequence.lease.domain, 0):
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        request, worker_id = sequence.request, sequence.lease.worker_id
        request.num_yields += 1
        left = max(0, sequence.num_start_tokens - sequence.num_planned)
        self.ranks.gave_place(request.tenant_number, left)
        self.life.preempt(request, Preemption.SLOT, self.now_ns)
        self.dispatch_order = DispatchOrder(self.life.queue, self.ranks)
        self.slots.gave(request, worker_id)

    # --- loads

    def _loads_for(self, domain: DomainId) -> dict[WorkerId, int]:
        """Work that stands before a request of this domain on each worker. A strict domain sees its own alone."""
        own = domain if domain in self.life.settings.fixed_domains else None
        if own not in self.loads:
            self.loads[own] = _loads(self.life, self.workers, own)
        return self.loads[own]


def _loads(life: Lifecycle, workers: list[Worker], own: DomainId | None) -> dict[WorkerId, int]:
    """Work per worker, with that of unanswered Acquires where they are expected to go. `own`: of this domain only."""
    loads = {worker.worker_id: worker.load_tokens(own) for worker in workers}
    if life.counts.asking:
        for lease in life.leases.leases.values():
            is_asked = lease.state is LeaseState.ASKED and lease.lease_id in life.by_lease
            if is_asked and lease.expected_worker in loads and own in (None, lease.domain):
                loads[lease.expected_worker] += lease.num_prefill_tokens
    return loads


def _outgrows_all(life: Lifecycle, request: RequestState, now_ns: int) -> bool:
    """Taken while no worker was listed, or a roomier one: it is cut to what there is. True: ended, nobody can go on."""
    context = max_context(life)
    if request.num_tokens_max <= context:
        return False
    if request.num_tokens < context:
        request.max_output_tokens = context - request.num_prompt_tokens
        return False
    message = f"{request.num_tokens} tokens and one to generate exceed the {context} that a worker takes"
    life.finish(request, Finish.ERROR, now_ns, error=OutputError(OutputErrorCode.NEVER_FITS, message))
    return True


def _acquire(
    life: Lifecycle, request: RequestState, workers: list[Worker], loads: dict[WorkerId, int], now_ns: int
) -> Acquire:
    info = workers[0].info
    assert info is not None
    namespace = with_salt(info.namespace, request.request.salt)
    lease = life.leases.open(request.request.domain, namespace, request.asked_under)
    assert len(lease.lease_id) == LEASE_ID_BYTES
    candidates = tuple(Candidate(worker.worker_id, loads[worker.worker_id]) for worker in workers)
    lease.candidates = tuple(worker.worker_id for worker in workers)
    lease.expected_worker = min(candidates, key=lambda candidate: candidate.load_cost).worker_id
    lease.num_prefill_tokens = request.num_tokens - request.num_matched
    lease.reuse = request.request.reuse
    lease.retain_tokens = request.num_prompt_tokens if request.request.retain_ms else 0
    lease.retain_ms = request.request.retain_ms
    lease.prompt, lease.output, lease.num_named_tokens = request.request.tokens, request.output, request.num_tokens
    lease.reserve_asked = min(request.num_tokens + 1, request.num_kv_tokens_max)
    loads[lease.expected_worker] += lease.num_prefill_tokens
    life.ask(request, lease, now_ns)
    return Acquire(
        lease_id=lease.lease_id,
        domain=lease.domain,
        namespace=lease.namespace,
        tokens=request.all_tokens(),
        reserve_tokens=lease.reserve_asked,
        candidates=candidates,
        traceparent=request.request.traceparent,
        reuse=request.request.reuse,
        call_kind=request.request.call_kind,
        may_wait=_may_wait(life, request, now_ns),
        wants_copy=request.may_copy and any(worker.copies_blocks for worker in workers),
        skip_match=request.request.sampling.num_prompt_logprobs is not None and not request.num_output_tokens,
    )


def _may_wait(life: Lifecycle, request: RequestState, now_ns: int) -> bool:
    """For another's prefill: until the first wait of this stay in the queue has lasted for `single_flight_wait_ms`."""
    if request.family is not None and request.family.is_computed:
        return False
    if not request.flight_until_ns:
        return life.settings.single_flight_wait_ms > 0
    return now_ns < request.flight_until_ns
