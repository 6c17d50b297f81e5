"""What must hold between the cores (DESIGN section 6), looked at after every event.

The cores check themselves; here stands what no core can see alone: whether what the ledger believes is what the worker
has, whether what is findable was really written, whether a block is granted while somebody uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from coppice.handles import block_ids, block_of, generation_of, generations, handles_array
from coppice.ids import LeaseId, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Abandon,
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
from coppice.seals import chain_seals, root_seal
from coppice_cache.core.base.results import Effect, ToClientEffect
from coppice_cache.core.index import IndexCore
from coppice_cache.core.pool.ledger import BlockState
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import Node
from coppice_cache.core.state.single_flight import Flight
from coppice_cache.core.state.workers import Worker as IndexWorker
from coppice_scheduler.core.state.sequences import RequestState
from coppice_sim.hosts.kv_honest import KvHonest, prefix_hashes
from coppice_worker.core.batch.steps import Applied
from coppice_worker.core.blocks.pool import BlockPool

if TYPE_CHECKING:
    from coppice_sim.base.process import Process
    from coppice_sim.hosts.scheduler import SchedulerHost
    from coppice_sim.hosts.worker import WorkerHost
    from coppice_sim.world import World

CONTENT_EVERY = 8  # checks; comparing all findable blocks is the dearest check

Bool = npt.NDArray[np.bool_]


class Oracle:
    def __init__(self, world: World) -> None:
        self._world = world
        self._granted: dict[tuple[WorkerId, WorkerEpoch, int], tuple[int, LeaseId]] = {}
        self._events = 0
        self._evicted = 0  # blocks, by all cache services
        self._evicted_at: dict[LeaseId, int] = {}  # when its acquire left the scheduler
        self._evicted_of: dict[tuple[WorkerId, WorkerEpoch, str], int] = {}
        self._fenced_of: dict[tuple[WorkerId, WorkerEpoch, str], int] = {}
        self._followed: dict[Flight, IndexWorker] = {}  # that somebody waited for

    # -- after every event

    def check_all(self) -> None:
        """Every core, and all content; when everything is at rest."""
        self._events = -1  # so that this one looks at content
        self.check(set(self._world.processes()))

    def check(self, touched: set[Process]) -> None:
        """Every touched core by itself, then each worker against the ledger."""
        from coppice_sim.hosts.cache import CacheHost
        from coppice_sim.hosts.scheduler import SchedulerHost
        from coppice_sim.hosts.worker import WorkerHost

        for host in sorted(touched, key=lambda host: host.name):
            if host.is_alive and isinstance(host, CacheHost | SchedulerHost | WorkerHost):
                host.core.check()
        cache = self._world.cache
        if not cache.is_alive:
            return
        self._events += 1
        for name, host in sorted(self._world.workers.items()):
            if cache not in touched and host not in touched:
                continue
            ledger_side = cache.core.state.workers.get(WorkerId(name))
            if not host.is_alive or ledger_side is None or not ledger_side.is_open:
                continue
            if ledger_side.epoch == host.core.worker_epoch:
                self._check_worker(ledger_side, host)

    def _check_worker(self, index: IndexWorker, host: WorkerHost) -> None:
        self._check_pool(index, host.core.pool, host.name)
        written = np.zeros(index.num_blocks, bool)
        if host.outstanding is not None and host.outstanding.batch is not None:
            written[host.outstanding.batch.slots // index.block_size] = True
        state = index.ledger.states
        self._none(written & (state == BlockState.FREE), "I9", host.name, "free in the ledger and being written")
        self._none(written & (state == BlockState.CACHED), "I7", host.name, "findable and being written")
        if index.host is not None:
            self._check_pool(index.host.store, host.core.host_pool, f"{host.name}'s host")
        if self._events % CONTENT_EVERY == 0:
            self.check_content(index, host.executor, host.name)
            if index.host is not None:
                self.check_content(index.host.store, host.host_tier.memory, f"{host.name}'s host")
                self._check_residue(host)

    def _check_pool(self, store: BlockStore, pool: BlockPool, name: str) -> None:
        """What the ledger believes of a tier and what the worker has there."""
        state, granted = store.ledger.states, store.ledger.generations
        opened, used = pool.generation, pool.has_user()
        self._none(used & (state == BlockState.FREE), "I9", name, "free in the ledger and used on the worker")
        self._none(used & (granted != opened), "I9", name, "granted again and still used on the worker")
        self._none(opened > granted, "I4", name, "opened under a generation that was not granted")
        self._none((state == BlockState.CACHED) & (opened != granted), "I8", name, "findable and never opened")

    def check_content(self, store: BlockStore, memory: KvHonest, name: str) -> None:
        """I8, I12, I3: every findable block holds exactly the KV of its chain, in its domain's tree."""
        for tree in store.trees.values():
            salt = self._world.salt_of_domain(tree.domain)
            waiting: list[tuple[Node, bytes, bytes]] = [(child, b"", b"") for child in tree.children.values()]
            while waiting:
                node, tokens, handles = waiting.pop()
                tokens, handles = tokens + node.tokens, handles + node.handles
                waiting.extend((child, tokens, handles) for child in node.children.values())
                if not node.children:
                    self._check_chain(memory, name, salt, tokens, handles, tree.domain)
                key = self._world.settings.index.seal_key
                chain = chain_seals(key, root_seal(key, tree.domain, tree.namespace), tokens, store.block_bytes)
                seals = store.ledger.seals_of(node.handles)
                if chain[len(chain) - len(seals) :] != seals:
                    self._world.fail("I12", f"a seal in the tree of {tree.domain} is not that of its tokens")

    def _check_residue(self, host: WorkerHost) -> None:
        """I15: nothing of a domain that must leave no trace is ever on the host, where nobody zeroes."""
        for config in self._world.settings.index.domains:
            if config.wipes and (host.host_tier.memory.salts == self._world.salt_of_domain(config.domain)).any():
                self._world.fail("I15", f"something of {config.domain} is on the host of {host.name}")

    def _check_chain(self, memory: KvHonest, name: str, salt: int, tokens: bytes, handles: bytes, domain: str) -> None:
        slots, expected = memory.slots_of(block_ids(handles)), prefix_hashes(np.frombuffer(tokens, "<u4"))
        good = (
            (memory.hashes[slots] == expected)
            & (memory.positions[slots] == np.arange(len(slots)))
            & (memory.salts[slots] == np.uint64(salt))
        )
        if not good.all():
            at = int(np.flatnonzero(~good)[0])
            block = int(slots[at]) // memory.pool.block_size
            self._world.fail("I8", f"block {block} of {name} is findable by {domain} at position {at}, but wrong")

    def _none(self, bad: Bool, rule: str, name: str, what: str) -> None:
        if bad.any():
            self._world.fail(rule, f"blocks {np.flatnonzero(bad).tolist()} of {name} are {what}")

    # -- what passes between the cores

    def answered(self, core: IndexCore, batch: AnswerBatch) -> None:
        """I4: every newly granted handle is above all earlier ones of its block; a repeated one has the same lease."""
        for answer in batch.answers:
            if self._evicted_at.pop(answer.lease_id, self._evicted) != self._evicted:
                self._world.sometimes["evicted while an acquire was in flight"] += 1
            if isinstance(answer, NoCapacity):
                quota = answer.reason is NoCapacityReason.DOMAIN_MAXIMUM
                self._world.sometimes["quota refusal" if quota else "no room"] += 1
            self._world.sometimes["waited for a flight"] += isinstance(answer, Pending)
            if isinstance(answer, Grant):
                self._world.sometimes["prefix found"] += bool(answer.shared)
                self._check_shared(answer)
            if isinstance(answer, Published) and answer.handles:
                self._world.sometimes["published after a restart"] += self._came_back(core, answer)
            if not isinstance(answer, Grant | Extended):
                continue
            worker = self._holder(core, answer)
            if worker is not None:
                for handle in handles_array(answer.owned).tolist():
                    self._granted_handle(worker, handle, answer.lease_id)
                self._count_evictions(worker, answer.lease_id)

    def watch_index(self, core: IndexCore, effects: list[Effect]) -> None:
        """After each call of the index core: what it took back, and whom it left waiting."""
        for effect in effects:
            if isinstance(effect, ToClientEffect) and isinstance(effect.message, Reclaim):
                self._reclaimed(core, effect.message)
        for worker in core.state.workers.values():
            for domain, account in worker.quotas.accounts.items():
                key = (worker.worker_id, worker.epoch, domain)
                forced = account.fenced_leases - self._fenced_of.get(key, 0)
                self._fenced_of[key] = account.fenced_leases
                self._world.sometimes["reclaim forced through a fence"] += max(0, forced)
        for flight, worker in self._followed.items():
            is_over = flight.lease.number not in worker.leases or flight.lease.draining
            if is_over and flight.lease.num_settled * worker.block_bytes < len(flight.tokens):
                self._world.sometimes["pending leader aborted with followers waiting"] += 1
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
            self._world.fail("I14", f"{message} of {account.held} blocks held, {account.guarantee} guaranteed")

    def _check_shared(self, grant: Grant) -> None:
        """I5: what is granted for reading is what the worker has now."""
        host = self._world.workers.get(grant.worker_id)
        if host is None or not host.is_alive or host.core.worker_epoch != grant.worker_epoch:
            return
        opened = host.core.pool.generation[block_ids(grant.shared)]
        if not (opened == generations(grant.shared)).all():
            self._world.fail("I5", f"a stale grant: {grant}")

    @staticmethod
    def _came_back(core: IndexCore, answer: Published) -> bool:
        found = [s.leases[answer.lease_id] for s in core.state.sessions.values() if answer.lease_id in s.leases]
        return any(lease.num_claimed for lease in found)

    def acquiring(self, lease: LeaseId) -> None:
        self._evicted_at[lease] = self._evicted

    def _count_evictions(self, worker: IndexWorker, lease: LeaseId) -> None:
        own = self._world.domain_of_lease[lease]
        for domain, account in worker.quotas.accounts.items():
            key = (worker.worker_id, worker.epoch, domain)
            more = account.evicted_blocks - self._evicted_of.get(key, 0)
            self._evicted_of[key] = account.evicted_blocks
            if more > 0:
                self._evicted += more
                self._world.sometimes["evicted" if domain == own else "borrowed blocks taken back"] += 1

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
            self._world.fail("I4", f"block {key[2]} of {key[0]}: generation {generation:#x} granted after {before:#x}")
        if generation > before and before >> 24 != generation >> 24:
            self._world.sometimes["block reused after a restart"] += before > 0
        self._granted[key] = (generation, lease)

    def pool_is_new(self, worker_id: WorkerId) -> None:
        """A new worker epoch: no handle of before is accepted, so generations may start again."""
        for key in [key for key in self._granted if key[0] == worker_id]:
            del self._granted[key]

    def repeated(self, batch: OpBatch, first: AnswerBatch, second: AnswerBatch) -> None:
        """I10: the same op gets the same answer, unless its lease was released in between."""
        released = {op.lease_id for op in batch.ops if isinstance(op, Release | Abandon)}
        self._world.sometimes["duplicate release"] += bool(released)
        for op, once, twice in zip(batch.ops, first.answers, second.answers, strict=True):
            same = once == twice or isinstance(once, NoCapacity)
            if not same and (op.lease_id not in released or isinstance(op, Release | Abandon)):
                self._world.fail("I10", f"{type(op).__name__} answered {once}, then {twice}")

    def launched(self, host: WorkerHost, applied: Applied) -> None:
        """I15: what a domain that must leave no trace wrote, or is about to write over, was zeroed in between."""
        if applied.batch is None:
            return
        size, leases = host.executor.pool.block_size, host.core.sequences.leases
        wipes = {
            self._world.salt_of_domain(config.domain): config.wipes for config in self._world.settings.index.domains
        }
        rows = np.repeat(applied.rows.slots, applied.rows.num_tokens)
        pairs = {(int(block), int(slot)) for block, slot in zip(applied.batch.slots // size, rows, strict=True)}
        zeroed = {*applied.zero.tolist(), *applied.copy_dst.tolist()}
        for block, slot in sorted(pairs - {(block, slot) for block, slot in pairs if block in zeroed}):
            lease = leases[slot]
            assert lease is not None
            own = self._world.salt_of_lease(lease)
            found = set(host.executor.salts[block * size : (block + 1) * size].tolist()) - {0, own}
            if found and (wipes[own] or any(wipes[salt] for salt in found)):
                self._world.fail("I15", f"block {block} of {host.name} changed its domain and was not zeroed")

    def watch_scheduler(self, host: SchedulerHost) -> None:
        """Count what only the scheduler knows, by standing in front of some of its methods."""
        life, sometimes = host.core._life, self._world.sometimes
        preempt, take, leave = life.preempt, life.start, life.leave_family

        def preempted(request: RequestState, now_ns: int) -> None:
            sequence = request.sequence
            if sequence is not None:
                prefill = sequence.num_computed < sequence.num_start_tokens
                sometimes["preempted in prefill" if prefill else "preempted in decode"] += 1
            preempt(request, now_ns)

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
