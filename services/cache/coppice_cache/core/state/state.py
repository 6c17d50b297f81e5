"""What all parts of the core share: sessions, workers, counters, pins as declared, effects that wait to be taken."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from coppice.ids import CacheEpoch, DomainId, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import LeaseClaim, ToClient, Wake, WorkerInfo, Workers
from coppice.messages.registration import CopyOrder, CopyOrders, Fence, ToWorker
from coppice.namespaces import with_keyed_salt
from coppice.seals import ChainKey, chain_key
from coppice.session.vouchers import Vouchers
from coppice_cache.core.base.events import IndexEvent
from coppice_cache.core.base.results import Effect, ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import CoreSettings, Domains
from coppice_cache.core.pool.block_time import CallTime
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.reservations import ReservationKey
from coppice_cache.core.radix.incarnations import Incarnations
from coppice_cache.core.radix.tree import Node
from coppice_cache.core.state.replay import Forest, ReplayBook
from coppice_cache.core.state.sessions import EPOCH_SHIFT, Session, minted_by
from coppice_cache.core.state.set_aside import Aside, SetAside
from coppice_cache.core.state.single_flight import Waiter
from coppice_cache.core.state.statements import EndedWorkers
from coppice_cache.core.state.workers import PendingFence, Worker


@dataclass(frozen=True, slots=True)
class PinSpec:
    """What was declared."""

    name: str
    domain: DomainId
    namespace: Namespace
    tokens: bytes


class PinSpecs:
    """All declared pins, found by name and by tree."""

    def __init__(self) -> None:
        self.by_name: dict[str, PinSpec] = {}
        self._by_tree: dict[tuple[DomainId, Namespace], list[PinSpec]] = {}

    def of_tree(self, domain: DomainId, namespace: Namespace) -> list[PinSpec]:
        return self._by_tree.get((domain, namespace), [])

    def add(self, spec: PinSpec) -> None:
        self.by_name[spec.name] = spec
        self._by_tree.setdefault((spec.domain, spec.namespace), []).append(spec)

    def remove(self, name: str) -> None:
        spec = self.by_name.pop(name)
        specs = self._by_tree[spec.domain, spec.namespace]
        specs.remove(spec)
        if not specs:
            del self._by_tree[spec.domain, spec.namespace]


NS_PER_MS = 1_000_000


class State:
    """Plain data with a few helpers; the rules live in the modules around it."""

    def __init__(self, settings: CoreSettings, cache_epoch: CacheEpoch, now_ns: int, first_epoch: int) -> None:
        self.settings = settings
        self.domains = Domains(settings)
        self.cache_epoch = cache_epoch
        self.started_ns = now_ns
        self.call_time = CallTime(now_ns)
        self.ended = EndedWorkers()
        self.sessions: dict[SchedulerEpoch, Session] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.vouchers = Vouchers(*settings.seal_keys)
        self.incarnation = first_epoch  # named by the vouchers of workers that are registered here
        self.known_workers: set[WorkerId] = set()  # registered here, live or dead; see `remember_worker`
        self.unproved_registrations = 0  # that claimed epochs for which nobody vouches
        self.held_claims: dict[WorkerId, dict[tuple[SchedulerEpoch, LeaseId], LeaseClaim]] = {}  # worker not here yet
        self.refused_ids: dict[WorkerId, set[LeaseId]] = {}  # claims given up before their worker registered
        self.effects: list[Effect] = []
        self.events: list[IndexEvent] | None = [] if settings.record_events else None
        self.workers_changed = False
        self.owners_changed = False  # a session or a worker came or went: who plans where has to be looked at
        self.planners_changed = False  # a planner's session came, went or attached again: the others have to hear of it
        self.reincarnate_above = CacheEpoch(0)  # the epoch that has to replace this one, once known
        self.reattach_deadline_ns = now_ns + settings.session_ttl_ms * NS_PER_MS
        self.reattach_closed = False  # some worker's window was fenced: who is not back by then is dead
        self.dead_epochs: set[SchedulerEpoch] = set()  # of earlier cache epochs, ended here: never back
        self.dismantling: list[Node] = []
        self.replay = ReplayBook()
        self.aside = SetAside()
        self.incarnations = Incarnations()
        self.pins = PinSpecs()
        self.owed: dict[ReservationKey, Worker] = {}  # which worker each reservation waits for; see `reclaim`
        self.woken: list[Waiter] = []  # by flights of any worker; told at the end of the call
        self._copying: dict[WorkerEpoch, tuple[Worker, list[CopyOrder]]] = {}
        self._fencing: dict[WorkerEpoch, Worker] = {}  # with leases that `flush` has to fence
        self._session_count = first_epoch
        self._worker_count = first_epoch
        self._lease_count = 0
        self._fence_count = 0
        self._order_count = 0

    # minting

    def mint_scheduler_epoch(self) -> SchedulerEpoch:
        self._session_count += 1
        assert self._session_count < 1 << EPOCH_SHIFT
        return SchedulerEpoch((self.cache_epoch << EPOCH_SHIFT) | self._session_count)

    def mint_worker_epoch(self) -> WorkerEpoch:
        self._worker_count += 1
        assert self._worker_count < 1 << EPOCH_SHIFT
        return WorkerEpoch((self.cache_epoch << EPOCH_SHIFT) | self._worker_count)

    def next_lease_number(self) -> int:
        self._lease_count += 1
        return self._lease_count

    def next_fence_id(self) -> int:
        self._fence_count += 1
        return self._fence_count

    def next_order_id(self) -> int:
        self._order_count += 1
        return (self.cache_epoch << EPOCH_SHIFT) | self._order_count

    def is_old(self, epoch: SchedulerEpoch) -> bool:
        """Minted by an earlier cache epoch."""
        return minted_by(epoch) < self.cache_epoch

    def remember_worker(self, worker_id: WorkerId) -> None:
        """No pool of before comes back under this id: sessions have heard of another one, or that it is over.

        When the book is full nobody's does, so nothing need be taken out of it.
        """
        if len(self.known_workers) < self.settings.known_workers_max:
            self.known_workers.add(worker_id)

    def may_survive(self, worker_id: WorkerId) -> bool:
        """Whether sessions have heard nothing of this worker here."""
        return worker_id not in self.known_workers and len(self.known_workers) < self.settings.known_workers_max

    def with_keyed_salt(self, domain: DomainId, namespace: Namespace) -> Namespace:
        """What a client names, as trees and leases have it here."""
        return with_keyed_salt(self.settings.seal_key, domain, namespace)

    def chain_key_at(self, worker: Worker, domain: DomainId, namespace: Namespace) -> ChainKey:
        """Of a tree that is new on the device: that of a lower tier's, since blocks take their seals with them."""
        for tier in worker.lower_tiers:
            if (there := tier.store.trees.get((domain, namespace))) is not None:
                return there.chain_key
        return chain_key(self.settings.seal_key, domain, namespace)

    @property
    def reincarnating(self) -> bool:
        """A higher cache epoch was used for grants somewhere: nothing is granted any more (rule 9)."""
        return self.reincarnate_above > 0

    def drop_replay(self, worker_id: WorkerId) -> None:
        """What the log says of it is not needed, or not true, any more."""
        self.dismantling += self.replay.drop(worker_id)

    def set_aside(self, worker_id: WorkerId, epochs: tuple[WorkerEpoch, ...], forest: Forest) -> None:
        """What the disk of a worker had that is not here now."""
        until_ns = self.call_time.now_ns + self.settings.set_aside_ms * NS_PER_MS
        self.dismantling += self.aside.put(
            worker_id, Aside(epochs, forest, until_ns), self.settings.set_aside_blocks_max
        )

    # effects

    def tell_client(self, epoch: SchedulerEpoch, message: ToClient) -> None:
        self.effects.append(ToClientEffect(epoch, message))

    def tell_worker(self, worker_id: WorkerId, message: ToWorker) -> None:
        self.effects.append(ToWorkerEffect(worker_id, message))

    def workers_message(self) -> Workers:
        """As anybody may hear it: nobody is vouched for."""
        return Workers(self.cache_epoch, tuple(worker.info for worker in self.workers.values()))

    def workers_for(self, session: Session) -> Workers:
        """With a voucher for each worker, if the session is a scheduler's.

        A session keeps its vouchers, else each change of one worker would have all signed anew for all sessions; those
        of workers that are not listed any more are forgotten.
        """
        message = self.workers_message()
        if not session.plans:
            return message
        kept, session.vouchers = session.vouchers, {}
        for info in message.workers:
            at = info.worker_id, info.worker_epoch
            session.vouchers[at] = kept.get(at) or self.vouchers.of_scheduler(*at, session.epoch)
        vouched = zip(message.workers, session.vouchers.values(), strict=True)
        return Workers(
            self.cache_epoch,
            tuple(
                self._listed(session, worker, replace(info, voucher=voucher))
                for (info, voucher), worker in zip(vouched, self.workers.values(), strict=True)
            ),
        )

    def _listed(self, session: Session, worker: Worker, info: WorkerInfo) -> WorkerInfo:
        is_owned = worker.owner == session.epoch
        if session.may_yield or is_owned:
            return replace(info, is_owned=is_owned, yields=worker.yields)
        # It takes what is listed for its own: so nothing new there, and no voucher, which a worker of its age believes.
        return replace(info, is_owned=False, voucher=b"", draining=True)

    def order_copy(self, worker: Worker, order: CopyOrder) -> None:
        """Orders of one call go out in one message."""
        self._copying.setdefault(worker.epoch, (worker, []))[1].append(order)

    def send_fence(self, worker: Worker, fence: Fence, leases: list[Lease]) -> None:
        worker.fences[fence.fence_id] = PendingFence(fence, leases)
        worker.num_fences += 1
        self.tell_worker(worker.worker_id, fence)

    def fence_leases(self, worker: Worker, lease: Lease) -> None:
        """Drain one lease; `flush` sends a single fence for all that drained in the same call."""
        worker.drain(lease)
        self._fencing[worker.epoch] = worker
        worker.to_fence.append(lease)

    def flush(self) -> None:
        """Send what was collected during one call: lease fences, then the list of workers."""
        fencing, self._fencing = self._fencing, {}
        for worker in fencing.values():
            leases, worker.to_fence = worker.to_fence, []
            ids = tuple(lease.lease_id for lease in leases)
            if self.workers.get(worker.worker_id) is worker:
                self.send_fence(worker, Fence(self.next_fence_id(), worker.epoch, lease_ids=ids), leases)
        self._wake()
        copying, self._copying = self._copying, {}
        for worker, orders in copying.values():
            if self.workers.get(worker.worker_id) is worker:
                self.tell_worker(worker.worker_id, CopyOrders(worker.epoch, tuple(orders)))
        if self.workers_changed:
            self.workers_changed = False
            for epoch, session in self.sessions.items():
                self.tell_client(epoch, self.workers_for(session))

    def _wake(self) -> None:
        """Tell those whose wait is over, one message per session."""
        if not self.woken:
            return
        woken, self.woken[:] = tuple(self.woken), ()
        by_epoch: dict[SchedulerEpoch, list[LeaseId]] = {}
        for waiter in woken:
            session = self.sessions.get(waiter.epoch)
            if session is not None and session.waiting.pop(waiter.lease_id, None) is not None:
                by_epoch.setdefault(waiter.epoch, []).append(waiter.lease_id)
        for epoch, lease_ids in by_epoch.items():
            self.tell_client(epoch, Wake(self.cache_epoch, tuple(lease_ids)))
