"""The one place that moves requests from state to state, and says when a sequence or a lease moves.

A sequence's moves are its own methods (`sequences.py`), a lease's those of `LeaseTable`.

enter -> start (a grant) -> preempt | retry -> back to the queue
                        \\-> finish (exactly once)

close a sequence:  GRANTED, nothing told to the worker   -> release at once
                   ATTACHED                              -> detach with the next plan, release after its result
"""

from __future__ import annotations

from coppice.ids import LeaseId, SequenceId, WorkerId
from coppice.messages.index import Grant
from coppice.messages.reuse import Reuse
from coppice.request_log.stages import History, Preemption, StageKind
from coppice_scheduler.core.cell.elsewhere import Elsewhere
from coppice_scheduler.core.cell.own_sums import OwnSums
from coppice_scheduler.core.queue.deadlines import Deadlines
from coppice_scheduler.core.queue.hints import Hints
from coppice_scheduler.core.queue.limits import RateLimits
from coppice_scheduler.core.queue.open_calls import OpenCalls
from coppice_scheduler.core.queue.quarantine import Quarantine
from coppice_scheduler.core.queue.queues import Gates, Sleepers, WaitingQueue
from coppice_scheduler.core.queue.shortages import Shortages
from coppice_scheduler.core.queue.slot_shares import SlotShares
from coppice_scheduler.core.state import forks
from coppice_scheduler.core.state.counts import Counts, Totals, decrement
from coppice_scheduler.core.state.estimates import RecentRequests
from coppice_scheduler.core.state.fairness import FairShares
from coppice_scheduler.core.state.leases import Lease, LeaseState, LeaseTable
from coppice_scheduler.core.state.outbox import Outbox
from coppice_scheduler.core.state.request import NOT_SERVED, Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import NO_LEASE, RequestState, RequestStatus, Sequence, SequenceState
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantSettings
from coppice_scheduler.core.state.workers import Worker

NS_PER_MS = 1_000_000
_NOT_OF_STRICT = frozenset({StageKind.NO_SLOT, StageKind.POOL_FULL})


class Lifecycle:
    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.requests: dict[str, RequestState] = {}
        self.by_lease: dict[LeaseId, RequestState] = {}  # who asks for a lease, or runs under it
        self.workers: dict[WorkerId, Worker] = {}
        self.queue = WaitingQueue(settings.queue_timeout_ms * NS_PER_MS, settings.max_overtake_ms * NS_PER_MS)
        self.sleepers = Sleepers()
        self.gates = Gates(fixed=settings.fixed_domains)
        self.shortages = Shortages()
        self.shortages.lasts(StageKind.NO_CACHE, 0)
        self.leases = LeaseTable(settings.instance, settings.retain_priority)
        self.shares = FairShares(lambda tenant: self.settings.limits_of(tenant).weight)
        self.slot_shares = SlotShares(settings)
        self.rate_limits = RateLimits(lambda tenant: self.settings.limits_of(tenant), self.shares.num_outputs)
        self.recent = RecentRequests()
        self.quarantine = Quarantine(settings.quarantine_ms)
        self.deadlines = Deadlines()
        self.hints = Hints(settings.match_window)
        self.totals = Totals()
        self.counts = Counts()
        self.outbox = Outbox()
        self.open_calls = OpenCalls(self.recent, self.outbox)
        self.own_sums = OwnSums(self.shares, self.open_calls)
        self.elsewhere = Elsewhere()
        self._next_sequence = 1

    def set_tenants(self, tenants: TenantSettings, now_ns: int) -> None:
        """Who is not served any more hears of it; the others go on under their new limits."""
        self.settings = self.settings.with_tenants(tenants)
        self.gates.fixed = tenants.fixed_domains
        self.shares.reweigh()
        self.slot_shares = SlotShares(self.settings)
        self.rate_limits.change(now_ns)
        for one in list(self.requests.values()):
            if not self.settings.serves(one.request.tenant, one.request.domain):
                self.finish(one, Finish.ERROR, now_ns, error=OutputError(OutputErrorCode.TENANT_REMOVED, NOT_SERVED))
        self.open_calls.end_unserved(self.settings, now_ns)

    # --- requests

    def enter(self, request: RequestState, now_ns: int) -> None:
        self.requests[request.request.request_id] = request
        self.open_calls.step_began(request.request)
        self.totals.submitted += 1
        request.since_ns = now_ns
        request.tenant_number = self.shares.number_of(request.request.tenant)
        self.shares.come(request.tenant_number)
        self.counts.tenant_unseen[request.request.tenant] += 1
        if request.request.fork_of is None and request.request.resumed is None:
            self.rate_limits.charge(request.request.tenant, request.num_prompt_tokens, now_ns)
            self.own_sums.charge(request.tenant_number, request.num_prompt_tokens)
        self.deadlines.add(request)
        request.history = History(StageKind.QUEUED, now_ns, amount=self.counts.tenant_waiting[request.request.tenant])
        self._enter_queue(request, now_ns)
        if forks.join(request, self.requests.get(request.request.fork_of or "")):
            request.status = RequestStatus.FOLLOWING
            self.counts.tenant_following[request.request.tenant] += 1
            request.history.becomes(StageKind.FORK, now_ns)

    def prompt_computed(self, request: RequestState, now_ns: int) -> None:
        """It has its first token: its forks go on, and from now on they wait as others do."""
        for fork in forks.prompt_computed(request):
            self._stop_following(fork)
            self.queue.stay_on(fork, now_ns)
            fork.history.becomes(StageKind.QUEUED, now_ns)
            self._put_back(fork)

    def leave_family(self, request: RequestState) -> None:
        """Another fork takes its place if the prompt is still to be computed."""
        if request.status is RequestStatus.FOLLOWING:
            self._stop_following(request)
        heir = forks.leave(request)
        if heir is not None:
            self._stop_following(heir)
            self._put_back(heir)

    def _stop_following(self, fork: RequestState) -> None:
        assert fork.status is RequestStatus.FOLLOWING
        decrement(self.counts.tenant_following, fork.request.tenant)

    def _enter_queue(self, request: RequestState, now_ns: int) -> None:
        self.counts.enter_queue(request.request.tenant, request.num_tokens)
        request.status = RequestStatus.WAITING
        self.queue.enter(request, now_ns)
        request.start_wanting(self.shares)

    def _waited(self, request: RequestState, now_ns: int) -> None:
        """What everybody waited for is why it was queued; but strict tenants have slots and blocks of their own."""
        if request.history.kind is StageKind.QUEUED:
            is_strict = request.request.tenant in self.slot_shares.strict
            self.shortages.tell(request.history, now_ns, _NOT_OF_STRICT if is_strict else ())

    def _put_back(self, request: RequestState) -> None:
        """It got nothing: the same stay in the queue goes on."""
        request.status = RequestStatus.WAITING
        self.queue.place(request)

    def _leave_queue(self, request: RequestState) -> None:
        self.queue.leave(request)
        self.counts.leave_queue(request.request.tenant, request.num_tokens)

    def ask(self, request: RequestState, lease: Lease, now_ns: int) -> None:
        request.status = RequestStatus.ASKING
        request.lease = lease
        request.asked_under = NO_LEASE
        self.by_lease[lease.lease_id] = request
        self._waited(request, now_ns)
        request.history.becomes(StageKind.ACQUIRE, now_ns)
        self.counts.asking += 1
        self.counts.tenant_asking[request.request.tenant] += 1

    def _asked(self, request: RequestState) -> None:
        self.counts.asking -= 1
        decrement(self.counts.tenant_asking, request.request.tenant)

    def unask(self, request: RequestState) -> None:
        """Its Acquire brought nothing: it waits on where it stood, and asks next under another id."""
        assert request.status is RequestStatus.ASKING
        self._asked(request)
        self._part_from_lease(request)
        self._put_back(request)

    def refused(self, request: RequestState, lease: Lease) -> None:
        """There was no room: it waits on where it stood, and asks again under the same id."""
        self.unask(request)
        request.asked_under = lease.lease_id

    def sleep(self, request: RequestState, lease: Lease, num_tokens: int, retry_ms: int, now_ns: int) -> None:
        """Another lease computes so many tokens of its prefix. It holds nothing, keeps its place, and its deadline goes
        on."""
        assert request.status is RequestStatus.ASKING
        self._asked(request)
        self._part_from_lease(request)
        if not request.flight_until_ns:
            request.flight_until_ns = now_ns + self.settings.single_flight_wait_ms * NS_PER_MS
        request.status = RequestStatus.SLEEPING
        request.asked_under = lease.lease_id
        request.wake_ns = min(now_ns + retry_ms * NS_PER_MS, max(request.flight_until_ns, now_ns + NS_PER_MS))
        self.sleepers.add(request)
        request.history.becomes(StageKind.PREFIX, now_ns, amount=num_tokens)
        self.counts.tenant_sleeping[request.request.tenant] += 1
        self.totals.flight_waits += 1

    def wake(self, request: RequestState) -> None:
        """It asks again, in the order in which it came."""
        self._left_sleep(request)
        self._put_back(request)

    def _left_sleep(self, request: RequestState) -> None:
        assert request.status is RequestStatus.SLEEPING
        self.sleepers.remove(request)
        decrement(self.counts.tenant_sleeping, request.request.tenant)

    def wake_due(self, now_ns: int) -> None:
        while (request := self.sleepers.due(now_ns)) is not None:
            self.wake(request)

    def wake_all(self) -> None:
        """Nobody knows any more that they wait."""
        for request in self.sleepers.all():
            self.wake(request)

    def forget_asked(self) -> None:
        """The ids that were asked under in vain are worth nothing any more, or worse."""
        self.wake_all()
        for request in self.requests.values():
            request.asked_under = NO_LEASE

    def start(self, request: RequestState, lease: Lease, grant: Grant, now_ns: int) -> None:
        """Its grant came: it has a sequence on a worker."""
        assert request.status is RequestStatus.ASKING
        worker = self.workers[grant.worker_id]
        if worker.copies_blocks and grant.copy_source:
            lease.copy_source, lease.copy_seal = grant.copy_source, grant.copy_seal
            lease.num_copy_tokens = grant.num_copy_tokens
        num_to_compute = request.num_tokens - lease.num_found_tokens
        request.history.becomes(StageKind.PREFILL, now_ns, grant.worker_id, num_to_compute)
        self._asked(request)
        self._leave_queue(request)
        self.counts.running += 1
        self.counts.tenant_running[request.request.tenant] += 1
        request.status = RequestStatus.RUNNING
        request.no_room = None
        request.flight_until_ns = 0
        if request.num_grants == 0:
            request.num_cached_tokens = lease.num_found_tokens
            self.outbox.granted(request)
        request.num_grants += 1
        self.totals.cached_tokens += lease.num_found_tokens
        sequence = Sequence(
            SequenceId(self._next_sequence),
            request,
            lease,
            worker.table,
            num_cached=lease.num_found_tokens,
            num_ahead=self.num_ahead(lease),
        )
        sequence.zero += grant.zero
        self._next_sequence += 1
        request.sequence = sequence
        if sequence.num_to_plan <= 1:
            request.stop_wanting(self.shares)
        worker.running[sequence.sequence_id] = sequence
        forks.plan_copy(worker, sequence)

    def preempt(self, request: RequestState, why: Preemption, now_ns: int) -> None:
        """Take its blocks back; it waits and recomputes. It will ask for the same prefix: that is worth keeping."""
        assert request.lease is not None
        request.lease.reuse = Reuse.LIKELY
        self.totals.preemptions += 1
        request.history.happened(StageKind.PREEMPTED, now_ns, why.value)
        self.requeue(request, now_ns)

    def restart(self, request: RequestState, now_ns: int) -> None:
        """Preempt it for its own sake, once for each length that it reached."""
        if request.num_tokens > request.restarted_at:
            request.restarted_at = request.num_tokens
            self.preempt(request, Preemption.ALONE, now_ns)

    def requeue(self, request: RequestState, now_ns: int) -> None:
        """Start it over without counting a fault: what stopped it is mended."""
        self._stop_running(request)
        self._back_in_queue(request, now_ns)

    def retry(self, request: RequestState, error: OutputError, now_ns: int) -> None:
        """Something failed that was not its fault: it goes on behind its last token, here or on another worker, or ends
        with `error` when it was started over `max_retries` times."""
        if request.num_retries >= self.settings.max_retries:
            self.finish(request, Finish.ERROR, now_ns, error=error)
            return
        request.num_retries += 1
        self.totals.retries += 1
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
            request.history.happened(StageKind.RESTARTED, now_ns, error.code.value)
            self._back_in_queue(request, now_ns)

    def _back_in_queue(self, request: RequestState, now_ns: int) -> None:
        request.history.becomes(StageKind.QUEUED, now_ns, amount=self.counts.tenant_waiting[request.request.tenant])
        self._enter_queue(request, now_ns)

    def _stop_running(self, request: RequestState) -> None:
        assert request.status is RequestStatus.RUNNING
        assert request.sequence is not None
        self.close(request.sequence)
        request.sequence = None
        self._part_from_lease(request)
        self.counts.running -= 1
        decrement(self.counts.tenant_running, request.request.tenant)

    def _part_from_lease(self, request: RequestState) -> None:
        assert request.lease is not None
        del self.by_lease[request.lease.lease_id]
        request.lease = None

    def finish(
        self,
        request: RequestState,
        finish: Finish,
        now_ns: int,
        *,
        error: OutputError | None = None,
        stop_token: bytes = b"",
    ) -> None:
        """The one terminal outcome (I16)."""
        assert request.status is not RequestStatus.FINISHED
        if finish in (Finish.STOP, Finish.LENGTH):
            took_ns = now_ns - request.since_ns if request.request.step_of is None else None
            self.recent.ended(request.request.tenant, request.num_output_tokens, took_ns)
            self.quarantine.completed(request.request)
        if request.status is RequestStatus.RUNNING:
            if finish is Finish.STOP and request.lease is not None:
                request.lease.outcome = request.outcome
            self._stop_running(request)
        else:
            if request.status is RequestStatus.ASKING:
                self._part_from_lease(request)
                self._asked(request)
            elif request.status is RequestStatus.SLEEPING:
                self._left_sleep(request)
            if request.asked_under:
                self.leases.disown(request.asked_under)
            self._leave_queue(request)
        self._waited(request, now_ns)
        request.stop_wanting(self.shares)
        self.shares.go(request.tenant_number)
        self.leave_family(request)
        request.status = RequestStatus.FINISHED
        self.totals.finished += 1
        del self.requests[request.request.request_id]
        self.open_calls.step_ended(request.request)
        self.outbox.last(request, finish, error, stop_token, now_ns)

    # --- sequences

    def num_ahead(self, lease: Lease) -> int:
        """Positions beyond the next token's that a sequence should own blocks for."""
        return self.settings.extend_ahead_blocks * lease.block_size

    def close(self, sequence: Sequence) -> None:
        """No more of it is planned. Its full blocks stay findable; the rest goes back when no step can touch it."""
        assert sequence.live
        lease = sequence.lease
        worker = self.workers[lease.worker_id]
        self.publish_full(sequence)
        sequence.request.note_written()
        sequence.leave_table()
        del worker.running[sequence.sequence_id]
        worker.stalled.pop(sequence.sequence_id, None)
        worker.wants_blocks.pop(sequence.sequence_id, None)
        worker.copying.pop(sequence.sequence_id, None)
        if lease.state is LeaseState.LIVE:
            worker.returning[lease.lease_id] = lease
        if sequence.state is SequenceState.ATTACHED:
            sequence.stop()
            worker.to_detach.append(sequence)
        else:
            self.removed(sequence)

    def publish_full(self, sequence: Sequence) -> None:
        """Its blocks that completed steps have filled are to be findable."""
        if sequence.lease.state is LeaseState.LIVE and not sequence.is_copying:
            sequence.fold()
            self.leases.filled(sequence.lease, sequence.num_computed)

    def removed(self, sequence: Sequence) -> None:
        """No step that is in flight or to come can touch its blocks: only now may they be released."""
        sequence.end()
        self.leases.stopped(sequence.lease)
        self.release(sequence.lease)

    def release(self, lease: Lease) -> None:
        if lease.state is LeaseState.LIVE:
            self.leases.release(lease)
            self.freed(lease)

    def released(self, lease: Lease) -> None:
        """The answer: what it held is free, or was before."""
        self.leases.forget(lease)
        worker = self.workers.get(lease.worker_id)
        if worker is not None:
            worker.returning.pop(lease.lease_id, None)
        self.freed(lease)

    def freed(self, lease: Lease) -> None:
        """Blocks of a worker and a domain are back (or are, before the next op is looked at)."""
        self.gates.freed(lease.domain)
        worker = self.workers.get(lease.worker_id)
        if worker is not None:
            for stall in worker.stalled.values():
                stall.refused = False
                stall.retry_ns = 0
