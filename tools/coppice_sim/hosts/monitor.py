"""What passes between the cores (DESIGN section 6), looked at as it passes; and what only they know, counted."""

from __future__ import annotations

import numpy as np

from coppice.compiled import is_compiled
from coppice.handles import block_ids, block_of, generation_of, generations, handles_array
from coppice.ids import TOKEN_BYTES, DomainId, LeaseId, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Abandon,
    Acquire,
    AnswerBatch,
    Extended,
    Grant,
    NoCapacity,
    NoCapacityReason,
    OpBatch,
    Pending,
    Published,
    Reclaim,
    Release,
)
from coppice.messages.registration import CopyOrders, Registered
from coppice.request_log.stages import Preemption
from coppice_cache.core.base.results import Effect, ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import DomainConfig
from coppice_cache.core.index import IndexCore
from coppice_cache.core.state.single_flight import Flight
from coppice_cache.core.state.workers import Worker as IndexWorker
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.core.state.sequences import RequestState, RequestStatus
from coppice_sim.base.environment import Record
from coppice_sim.hosts.kv_honest import KvHonest, prefix_hashes, salt_of_domain
from coppice_sim.witnesses.drains import DrainWitness
from coppice_sim.witnesses.salts import SaltWitness
from coppice_worker.core.batch.steps import Applied
from coppice_worker.core.worker import WorkerCore


class Monitor:
    """Hosts show it what they send, get and do. What two of them show need not fit: that is the `Oracle`'s."""

    def __init__(self, record: Record, domains: tuple[DomainConfig, ...]) -> None:
        self._record = record
        self._domains = domains
        self.workers: dict[WorkerId, WorkerCore] = {}  # the newest of each
        self._domain_of_lease: dict[LeaseId, DomainId] = {}
        self._granted: dict[tuple[WorkerId, WorkerEpoch, int], tuple[int, LeaseId]] = {}
        self._evicted = 0  # blocks, by all cache services
        self._evicted_at: dict[LeaseId, int] = {}  # when its acquire left the scheduler
        self._evicted_of: dict[tuple[WorkerId, WorkerEpoch, str], int] = {}
        self._fenced_of: dict[tuple[WorkerId, WorkerEpoch, str], int] = {}
        self._followed: dict[Flight, IndexWorker] = {}  # that somebody waited for
        self._salts = SaltWitness(record)
        self.drains = DrainWitness(record)

    def salt_of_lease(self, lease: LeaseId) -> int:
        return salt_of_domain(self._domain_of_lease[lease])

    def answered(self, core: IndexCore, batch: AnswerBatch) -> None:
        """I4: every newly granted handle is above all earlier ones of its block; a repeated one has the same lease."""
        for answer in batch.answers:
            if self._evicted_at.pop(answer.lease_id, self._evicted) != self._evicted:
                self._record.sometimes["evicted while an acquire was in flight"] += 1
            if isinstance(answer, NoCapacity):
                quota = answer.reason is NoCapacityReason.DOMAIN_MAXIMUM
                self._record.sometimes["quota refusal" if quota else "no room"] += 1
            self._record.sometimes["waited for a flight"] += isinstance(answer, Pending)
            if isinstance(answer, Grant):
                self._record.sometimes["prefix found"] += bool(answer.shared)
                self._check_shared(answer)
            if isinstance(answer, Published) and answer.handles:
                self._record.sometimes["published after a restart"] += self._came_back(core, answer)
            if not isinstance(answer, Grant | Extended):
                continue
            worker = self._holder(core, answer)
            if worker is not None:
                for handle in handles_array(answer.owned).tolist():
                    self._granted_handle(worker, handle, answer.lease_id)
                self._salts.granted(worker.worker_id, worker.epoch, answer)
                self._count_evictions(worker, answer.lease_id)

    def watch_index(self, core: IndexCore, effects: list[Effect]) -> None:
        """After each call of the index core: what it took back, and whom it left waiting."""
        self.drains.watch(core)
        for effect in effects:
            if isinstance(effect, ToClientEffect) and isinstance(effect.message, Reclaim):
                self._reclaimed(core, effect.message)
            if isinstance(effect, ToWorkerEffect) and isinstance(effect.message, CopyOrders):
                self._salts.moved(effect.worker_id, effect.message)
            if (
                isinstance(effect, ToWorkerEffect)
                and isinstance(effect.message, Registered)
                and effect.message.keeps_disk
            ):
                before = core.state.workers[effect.worker_id].kept_from
                self._salts.kept(effect.worker_id, before, effect.message.worker_epoch)
        for worker in core.state.workers.values():
            for domain, account in worker.quotas.accounts.items():
                key = (worker.worker_id, worker.epoch, domain)
                forced = account.fenced_leases - self._fenced_of.get(key, 0)
                self._fenced_of[key] = account.fenced_leases
                self._record.sometimes["reclaim forced through a fence"] += max(0, forced)
        for flight, worker in self._followed.items():
            is_over = flight.lease.number not in worker.leases or flight.lease.draining
            if is_over and flight.lease.num_settled < flight.num_blocks:
                self._record.sometimes["pending leader aborted with followers waiting"] += 1
        self._followed = {
            waiter.flight: worker
            for worker in core.state.workers.values()
            for waiter in worker.flights._waiters.values()
            if waiter.flight is not None
        }

    def _reclaimed(self, core: IndexCore, message: Reclaim) -> None:
        """I14: only what a domain has borrowed is asked back, and never a fixed share."""
        worker = core.state.workers.get(message.worker_id)
        account = None if worker is None else worker.quotas.accounts.get(message.domain)
        if account is not None and (account.is_strict or message.num_blocks > account.held - account.guarantee):
            self._record.fail("I14", f"{message} of {account.held} blocks held, {account.guarantee} guaranteed")

    def _check_shared(self, grant: Grant) -> None:
        """I5: what is granted for reading is what the worker has now."""
        core = self.workers.get(grant.worker_id)
        if core is None or core.worker_epoch != grant.worker_epoch:
            return
        opened = core.pool.generation[block_ids(grant.shared)]
        if not (opened == generations(grant.shared)).all():
            self._record.fail("I5", f"a stale grant: {grant}")

    @staticmethod
    def _came_back(core: IndexCore, answer: Published) -> bool:
        found = [s.leases[answer.lease_id] for s in core.state.sessions.values() if answer.lease_id in s.leases]
        return any(lease.num_claimed for lease in found)

    def acquiring(self, op: Acquire, request: RequestState | None) -> None:
        """None: asked once more, for a request that has ended since."""
        self._domain_of_lease[op.lease_id] = op.domain
        self._evicted_at[op.lease_id] = self._evicted
        if request is not None:
            self._salts.asked(op.lease_id, request.request.salt)

    def _count_evictions(self, worker: IndexWorker, lease: LeaseId) -> None:
        own = self._domain_of_lease[lease]
        for domain, account in worker.quotas.accounts.items():
            key = (worker.worker_id, worker.epoch, domain)
            more = account.evicted_blocks - self._evicted_of.get(key, 0)
            self._evicted_of[key] = account.evicted_blocks
            if more > 0:
                self._evicted += more
                self._record.sometimes["evicted" if domain == own else "borrowed blocks taken back"] += 1

    @staticmethod
    def _holder(core: IndexCore, answer: Grant | Extended) -> IndexWorker | None:
        """The worker of the lease, unless it was over before the answer was looked at."""
        if isinstance(answer, Grant):
            worker = core.state.workers.get(answer.worker_id)
            return worker if worker is not None and worker.epoch == answer.worker_epoch else None
        found = [s.workers[answer.lease_id] for s in core.state.sessions.values() if answer.lease_id in s.workers]
        return found[0] if found else None

    def _granted_handle(self, worker: IndexWorker, handle: int, lease: LeaseId) -> None:
        key = (worker.worker_id, worker.epoch, int(block_of(handle)))
        generation = int(generation_of(handle))
        before, holder = self._granted.get(key, (0, lease))
        if generation < before or (generation == before and holder != lease):
            self._record.fail("I4", f"block {key[2]} of {key[0]}: generation {generation:#x} granted after {before:#x}")
        if generation > before and before >> 24 != generation >> 24:
            self._record.sometimes["block reused after a restart"] += before > 0
        self._granted[key] = (generation, lease)

    def pool_is_new(self, worker_id: WorkerId) -> None:
        """A new worker epoch: no handle of before is accepted, so generations may start again."""
        for key in [key for key in self._granted if key[0] == worker_id]:
            del self._granted[key]

    def repeated(self, batch: OpBatch, first: AnswerBatch, second: AnswerBatch) -> None:
        """I10: the same op gets the same answer, unless its lease was released in between."""
        released = {op.lease_id for op in batch.ops if isinstance(op, Release | Abandon)}
        self._record.sometimes["duplicate release"] += bool(released)
        for op, once, twice in zip(batch.ops, first.answers, second.answers, strict=True):
            same = once == twice or isinstance(once, NoCapacity)
            if not same and (op.lease_id not in released or isinstance(op, Release | Abandon)):
                self._record.fail("I10", f"{type(op).__name__} answered {once}, then {twice}")

    def launched(self, core: WorkerCore, memory: KvHonest, applied: Applied) -> None:
        """I19 and I15, of what the device is about to do."""
        self._check_copies(core, memory, applied)
        if applied.batch is not None:
            self._check_zeroed(core, memory, applied)

    def _check_copies(self, core: WorkerCore, memory: KvHonest, applied: Applied) -> None:
        """I19: what is copied is the KV of the fork's own tokens, written by its own domain; I3: under its own salt."""
        table, size = core.sequences, memory.pool.block_size
        for source, target in zip(applied.copy_src.tolist(), applied.copy_dst.tolist(), strict=True):
            slot = int(core.pool.writer[target]) - 1
            lease = table.leases[slot]
            assert lease is not None
            first = size * int(np.flatnonzero(table.blocks(slot) == target)[0])
            count = min(size, int(table.num_computed[slot]) - first)
            found = slice(source * size, source * size + count)
            expected = prefix_hashes(table.tokens[slot, : first + count])[first:]
            good = (memory.hashes[found] == expected) & (memory.salts[found] == self.salt_of_lease(lease))
            if not good.all():
                self._record.fail("I19", f"block {source} of {core.settings.worker_id} is copied, and is another's")
            self._salts.forked(core, source, lease)

    def _check_zeroed(self, core: WorkerCore, memory: KvHonest, applied: Applied) -> None:
        """I15: what a domain that must leave no trace wrote, or is about to write over, was zeroed in between."""
        assert applied.batch is not None
        size, leases = memory.pool.block_size, core.sequences.leases
        wipes = {salt_of_domain(config.domain): config.wipes for config in self._domains}
        rows = np.repeat(applied.rows.slots, applied.rows.num_tokens)
        pairs = {(int(block), int(slot)) for block, slot in zip(applied.batch.slots // size, rows, strict=True)}
        zeroed = {*applied.zero.tolist(), *applied.copy_dst.tolist()}
        for block, slot in sorted(pairs - {(block, slot) for block, slot in pairs if block in zeroed}):
            lease = leases[slot]
            assert lease is not None
            own = self.salt_of_lease(lease)
            found = set(memory.salts[block * size : (block + 1) * size].tolist()) - {0, own}
            if found and (wipes[own] or any(wipes[salt] for salt in found)):
                self._record.fail(
                    "I15", f"block {block} of {core.settings.worker_id} changed its domain and was not zeroed"
                )

    @staticmethod
    def is_within_share(core: SchedulerCore, request: Request) -> bool:
        """Whether its tenant, by what it has waiting, has room for it in the queue whatever others have there."""
        settings = core._life.settings
        limits = settings.tenants.get(request.tenant)
        if limits is None:
            return False
        own = [other for other in core._life.requests.values() if other.request.tenant == request.tenant]
        waiting = [other.num_tokens for other in own if other.status is not RequestStatus.RUNNING]
        tokens = sum(waiting) + len(request.tokens) // TOKEN_BYTES
        share = limits.weight / sum(other.weight for other in settings.tenants.values())
        fits = len(waiting) + 1 <= int(settings.max_queued * share) and tokens <= int(
            settings.max_queued_tokens * share
        )
        return fits or not waiting

    def watch_scheduler(self, core: SchedulerCore) -> None:
        """Count what only the scheduler knows, by standing in front of some of its methods; compiled ones cannot be."""
        if is_compiled("coppice_scheduler"):
            return
        life, sometimes = core._life, self._record.sometimes
        preempt, take, leave = life.preempt, life.start, life.leave_family

        def preempted(request: RequestState, why: Preemption, now_ns: int) -> None:
            sequence = request.sequence
            if sequence is not None:
                prefill = sequence.num_computed < sequence.num_start_tokens
                sometimes["preempted in prefill" if prefill else "preempted in decode"] += 1
            preempt(request, why, now_ns)

        def started(request: RequestState, *args: object) -> None:
            sometimes["retry after a crash"] += request.num_retries > 0
            sometimes["late retry"] += request.num_retries > 0 and request.num_output_tokens > 0
            take(request, *args)  # type: ignore[arg-type]
            if request.family is not None and request is not request.family.leader:
                sequence = request.sequence
                assert sequence is not None
                lacks = sequence.num_computed < request.num_prompt_tokens - 1
                sometimes["fork by fallback"] += lacks and sequence.source is None

        def left(request: RequestState) -> None:
            family = request.family
            is_led = family is not None and family.leader is request and bool(family.waiting)
            sometimes["leader died"] += is_led
            leave(request)

        life.preempt = preempted  # type: ignore[method-assign]
        life.start = started  # type: ignore[method-assign, assignment]
        life.leave_family = left  # type: ignore[method-assign]
