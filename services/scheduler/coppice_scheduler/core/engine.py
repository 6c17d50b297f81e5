"""The scheduler's core: events in, effects out. See `sequences.py` for the states, DESIGN.md section 4 for the life.

submit, cancel, index_*, worker_*   change state only
advance                             decides: expire, preempt, plan, ask; returns everything that must leave now
"""

from __future__ import annotations

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.cell import Planners, ServedElsewhere
from coppice.messages.index import (
    AnswerBatch,
    FromClient,
    LeaseDigest,
    MatchHints,
    Reattached,
    Reclaim,
    ToClient,
    Wake,
    Workers,
)
from coppice.messages.step import COPY_SOURCE_SINCE, StepPlan, StepResult
from coppice.request_log.stages import StageKind
from coppice.session.versions import PROTOCOL_VERSION
from coppice_scheduler.core.batch.multi_step import plan_due_ns
from coppice_scheduler.core.batch.results import take_result
from coppice_scheduler.core.batch.step import plan_step
from coppice_scheduler.core.check import check
from coppice_scheduler.core.kv_client import attachment, cell_sums
from coppice_scheduler.core.kv_client.acquires import candidates, lookup_questions, match_questions
from coppice_scheduler.core.kv_client.answers import collect_ops, take_answer
from coppice_scheduler.core.kv_client.pool_use import pool_use
from coppice_scheduler.core.lifecycle import NS_PER_MS, Lifecycle
from coppice_scheduler.core.policy.admission import expire, max_context, refusal
from coppice_scheduler.core.policy.lost_workers import worker_gone
from coppice_scheduler.core.policy.preemption import give_back, relieve
from coppice_scheduler.core.policy.queue_room import QueueRoom
from coppice_scheduler.core.state.request import (
    Effects,
    Finish,
    Lookup,
    OutputError,
    PoolUse,
    Refused,
    RefusedReason,
    Request,
    SchedulerStats,
    TenantStats,
)
from coppice_scheduler.core.state.sequences import RequestState, state_of
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantSettings
from coppice_scheduler.core.state.workers import Worker


class SubmitFailed(Exception):
    """To decide on one request failed, and nothing was changed by it: the request can be refused, the core goes on."""


class SchedulerCore:
    """Decides what runs next. Knows no clock and no connection: the edge calls it and does what it returns."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._life = Lifecycle(settings)
        self._room = QueueRoom(settings)
        self._arrivals = 0
        self._draining = False
        self._now_ns = 0
        self._advanced_ns = -1

    # --- requests

    def submit(self, request: Request, now_ns: int) -> Refused | None:
        """None: accepted, and exactly one Output with `finish` will come.

        Raises SubmitFailed while nothing has changed yet. Whatever else comes out of this class, as an assertion or an
        error, leaves it half-changed: then it must not be asked again.
        """
        self._now_ns = now_ns
        try:
            decided = self._decide(request, now_ns)
        except Exception as error:
            raise SubmitFailed(f"request {request.request_id}: {error!r}") from error
        if isinstance(decided, Refused):
            return decided
        if decided is None:
            self._life.open_calls.open(request, now_ns)
        else:
            self._life.enter(decided, now_ns)
        return None

    def _decide(self, request: Request, now_ns: int) -> RequestState | Refused | None:
        """What is to become of it; None: an open call. Changes nothing that a second look would not change back."""
        life, request_id = self._life, request.request_id
        assert request_id not in life.requests, f"request id {request_id} is in use"
        assert life.open_calls.find(request_id) is None, f"request id {request_id} is in use"
        if self._draining and request.step_of is None and request.resumed is None:
            return Refused(RefusedReason.DRAINING, "this scheduler is shutting down; send it to another", 1000)
        refused = refusal(life, self._room, request, now_ns)
        if refused is not None or request.num_places:
            return refused
        self._arrivals += 1  # a gap in it means nothing
        return state_of(request, (request.priority, self._arrivals), max_context(life))

    def cancel(self, request_id: str, now_ns: int, finish: Finish = Finish.CANCELLED) -> None:
        """End a request now; unknown and finished ones are left alone."""
        self._finish(request_id, finish, now_ns)

    def end(self, request_id: str, error: OutputError, now_ns: int) -> bool:
        """End a request now with this error; whether it was at work."""
        return self._finish(request_id, Finish.ERROR, now_ns, error)

    def _finish(self, request_id: str, finish: Finish, now_ns: int, error: OutputError | None = None) -> bool:
        self._now_ns = now_ns
        request = self._life.requests.get(request_id)
        if request is None:
            return self._life.open_calls.end(request_id, finish, now_ns, error)
        self._life.finish(request, finish, now_ns, error=error)
        return True

    def set_tenants(self, tenants: TenantSettings, now_ns: int) -> None:
        """The tenants file changed. Requests of tenants that are gone, or elsewhere now, end with an error."""
        self._now_ns = now_ns
        self._life.set_tenants(tenants, now_ns)
        self._room = QueueRoom(self._life.settings)

    def look_up(self, lookup: Lookup) -> None:
        """Exactly one LookedUp will come: at once and empty where nobody can be asked."""
        self._life.hints.look_up(lookup)

    def drain(self) -> None:
        """Take no new request; those at work and open calls end as they would."""
        self._draining = True

    # --- the cache service

    def index_attached(self, epoch: SchedulerEpoch, cache_epoch: CacheEpoch, fresh: bool, now_ns: int) -> None:
        """`fresh`: the link's state restarted, so nothing that is unanswered will be answered unless asked again."""
        self._now_ns = now_ns
        attachment.index_attached(self._life, epoch, cache_epoch, fresh, now_ns)
        cell_sums.attached(self._life, epoch, fresh, now_ns)

    def index_lost(self, now_ns: int) -> None:
        """Running sequences go on with the blocks they have; ops wait."""
        self._now_ns = now_ns
        self._life.leases.connected = False
        self._life.shortages.lasts(StageKind.NO_CACHE, now_ns)
        cell_sums.lost(self._life, now_ns)

    def index_message(self, message: ToClient, now_ns: int) -> None:
        self._now_ns = now_ns
        life = self._life
        if isinstance(message, AnswerBatch):
            ops = life.leases.answered(message)
            for op, answer in zip(ops, message.answers, strict=False):
                take_answer(life, op, answer, now_ns)
        elif isinstance(message, Workers):
            attachment.workers_listed(life, message, now_ns)
        elif isinstance(message, Reattached):
            attachment.reattached(life, message, now_ns)
        elif isinstance(message, LeaseDigest):
            if life.leases.compare(message):
                life.forget_asked()
        elif isinstance(message, MatchHints):
            life.hints.take(message, life.queue, life.leases.cache_epoch)
        elif isinstance(message, Wake):
            self._woken(message)
        elif isinstance(message, Reclaim):
            give_back(life, message, now_ns)
        elif isinstance(message, Planners):
            cell_sums.planners_listed(life, message, now_ns)
        elif isinstance(message, ServedElsewhere):
            cell_sums.served_elsewhere(life, message, now_ns)

    def _woken(self, message: Wake) -> None:
        """One that asks already, or is over, is left alone: what it waits for now was said after this."""
        if message.cache_epoch != self._life.leases.cache_epoch:
            return
        for lease_id in message.lease_ids:
            request = self._life.sleepers.find(lease_id)
            if request is not None:
                self._life.wake(request)

    # --- workers

    def worker_attached(
        self,
        worker_id: WorkerId,
        worker_epoch: WorkerEpoch,
        fresh: bool,
        now_ns: int,
        version: int = PROTOCOL_VERSION,
    ) -> None:
        """`fresh`: steps start again at 1 and the worker has no sequence of ours. `version`: of the protocol there."""
        self._now_ns = now_ns
        worker = self._life.workers.setdefault(worker_id, Worker(worker_id))
        worker.copies_blocks = version >= COPY_SOURCE_SINCE
        attachment.worker_attached(self._life, worker, worker_epoch, fresh, now_ns)

    def worker_lost(self, worker_id: WorkerId, now_ns: int) -> None:
        """The connection is gone. What is in flight stays so until its result comes or the epoch is dead."""
        self._now_ns = now_ns
        worker = self._life.workers.get(worker_id)
        if worker is not None:
            attachment.worker_lost(worker, now_ns)

    def worker_gone(self, worker_id: WorkerId, now_ns: int) -> None:
        """Nobody listens at its address. Its requests go on elsewhere, now."""
        self._now_ns = now_ns
        worker = self._life.workers.get(worker_id)
        if worker is not None:
            worker_gone(self._life, worker, now_ns)

    def worker_result(self, worker_id: WorkerId, result: StepResult, now_ns: int) -> None:
        self._now_ns = now_ns
        worker = self._life.workers.get(worker_id)
        if worker is not None and worker.attached:
            take_result(self._life, worker, result, now_ns)

    # --- decisions

    def advance(self, now_ns: int) -> Effects:
        """Everything that must leave now. Called after every input and at `next_wakeup_ns`."""
        self._now_ns = self._advanced_ns = now_ns
        life = self._life
        cell_sums.age(life, now_ns)
        expire(life, now_ns)
        life.wake_due(now_ns)
        attachment.give_up_absent(life, now_ns)
        if life.leases.connected:
            for worker in life.workers.values():
                if worker.usable and worker.stalled:
                    relieve(life, worker, now_ns)
        plans = self._plan(now_ns)
        messages: tuple[FromClient, ...] = tuple(lookup_questions(life))
        if life.leases.connected:
            left = attachment.leave_workers(life, now_ns)
            ops = life.leases.take_messages(collect_ops(life, now_ns))
            messages = (*ops, *messages, *match_questions(life, now_ns), *left, *cell_sums.news(life, now_ns))
        life.counts.tenant_unseen.clear()
        granted, tokens, outputs = life.outbox.take()
        return Effects(messages, plans, granted, tokens, outputs, life.hints.take_looked_up())

    def _plan(self, now_ns: int) -> tuple[tuple[WorkerId, StepPlan], ...]:
        plans, life = [], self._life
        for worker in life.workers.values():
            while worker.usable and (due_ns := plan_due_ns(worker, life.settings)) is not None and due_ns <= now_ns:
                plan = plan_step(life, worker, now_ns)
                if plan is None:
                    break
                plans.append((worker.worker_id, plan))
        return tuple(plans)

    def next_wakeup_ns(self) -> int | None:
        """When `advance` has something to do without a new input; None when never."""
        life = self._life
        times = [life.queue.next_deadline_ns(), life.deadlines.next_ns(), life.sleepers.next_ns()]
        times.append(life.elsewhere.ages_ns())
        times += [attachment.gives_up_at_ns(life, worker) for worker in life.workers.values()]
        times += [plan_due_ns(worker, life.settings) for worker in life.workers.values() if worker.usable]
        if life.leases.connected:
            times.append(life.own_sums.due_ns())
            times += [attachment.leaves_at_ns(w) for w in life.workers.values() if w.yields_since_ns is not None]
            timeout_ns = life.settings.queue_timeout_ms * NS_PER_MS
            if life.counts.waiting > life.counts.asking:
                times.append(life.gates.next_retry_ns())
            for worker in life.workers.values():
                for stall in worker.stalled.values() if worker.usable else ():
                    times.append(stall.since_ns + timeout_ns)
                    if not stall.sequence.lease.extend_asked:
                        times.append(stall.retry_ns)
        # What was due at the last `advance` was done there, or can only be done after another input.
        due = [time for time in times if time is not None and time > self._advanced_ns]
        return min(due) if due else None

    # --- what it is like

    @property
    def all_drain(self) -> bool:
        """No worker that is attached takes new requests, and there is one."""
        drains = False
        for worker in self._life.workers.values():
            if worker.usable and worker.info is not None:
                if not worker.info.draining:
                    return False  # mostly the first: each turn asks
                drains = True
        return drains

    def open_workers(self) -> tuple[tuple[WorkerId, int], ...]:
        """Those that take new requests, by name, and the blocks of each."""
        return tuple((worker.worker_id, worker.info.num_blocks) for worker in candidates(self._life) if worker.info)

    def load_tokens(self) -> int:
        """Work that stands before a new request, in tokens of prefill, over all workers."""
        life = self._life
        return life.counts.waiting_tokens + sum(worker.load_tokens() for worker in life.workers.values())

    def is_idle(self) -> bool:
        """Nothing at work, nothing held, nothing on its way, nothing that clients have not heard."""
        life = self._life
        busy = any(
            worker.running or (worker.usable and (worker.in_flight or worker.to_detach or worker.sealed))
            for worker in life.workers.values()
        )
        at_work = life.requests or life.open_calls
        return not at_work and life.leases.is_quiet and life.outbox.is_empty and not busy

    def check(self) -> None:
        """Assert the scheduler's own conservation laws."""
        check(self._life)

    def pool_use(self) -> PoolUse:
        """Looks at every lease: not to be asked in each turn."""
        return pool_use(self._life)

    def stats(self) -> SchedulerStats:
        """All but the use of the pool."""
        life = self._life
        counts, totals = life.counts, life.totals
        oldest = life.queue.oldest()
        tenants = {
            tenant: TenantStats(counts.tenant_running[tenant], counts.tenant_waiting[tenant])
            for tenant in {*counts.tenant_running, *counts.tenant_waiting}
        }
        return SchedulerStats(
            running=counts.running,
            waiting=counts.waiting,
            waiting_tokens=counts.waiting_tokens,
            oldest_wait_ms=0 if oldest is None else (self._now_ns - oldest.queued_ns) // NS_PER_MS,
            tenants=tenants,
            leases=life.leases.num_live,
            steps_in_flight=sum(len(worker.in_flight) for worker in life.workers.values()),
            total_preemptions=totals.preemptions,
            total_retries=totals.retries,
            total_prefill_tokens=totals.prefill_tokens,
            total_cached_tokens=totals.cached_tokens,
            total_sampled_tokens=totals.sampled_tokens,
            total_steps=totals.steps,
            total_finished=totals.finished,
            sleeping=len(life.sleepers),
            total_flight_waits=totals.flight_waits,
            total_reclaims=totals.reclaims,
            limits_left=life.rate_limits.left(self._now_ns),
        )
