"""The planner: turns at the core, one at a time. Everything reaches it through one inbox.

    front doors     --submit, cancel------->  +-------+  --ops-->    cache service
    links' threads  --answers, results----->  | inbox |  --plans-->  workers
    own thread      --time is up----------->  +-------+  --tokens, outputs, one call per turn--> front doors

A turn takes everything that waits in the inbox, then asks the core once what must leave now. Who brings something while
no turn is at work takes the turn itself: to wake another thread for it would cost more than most turns do. Each brings
one turn at most; what came meanwhile is for the planner's own thread, so nobody is kept from the socket that it reads.
Tokenising, detokenising and streaming happen in the front doors' processes and never delay a plan.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from coppice.addresses import UnixAddress, parse_session_address
from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import TenantsVersion, ToClient, Workers
from coppice.messages.ownership import SessionName, Succeed
from coppice.messages.step import StepResult
from coppice.session.link import Attached
from coppice.tls.credentials import Credentials
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Effects, SchedulerStats
from coppice_scheduler.edge.planner.clients import IndexClient, WorkerClients

_log = logging.getLogger(__name__)
IDLE_WAKEUP_NS = 200_000_000
NEVER_NS = 1 << 63
STATS_EVERY_NS = 200_000_000
POOL_EVERY_NS = 1_000_000_000
OpenWorkers = tuple[tuple[WorkerId, int], ...]  # that take new requests, and the blocks of each
TURN_EVENTS_MAX = 1_000  # of the inbox, before the core is asked again


class Planner:
    """Owns a `SchedulerCore`; its methods may be called from any thread that holds no lock which a turn may want.

    It calls `deliver` at the end of every turn, and `failed` as its last act when a turn fails.
    """

    def __init__(
        self,
        core: SchedulerCore,
        cache_address: str,
        name: str,
        deliver: Callable[[Effects], None],
        failed: Callable[[BaseException], None],
        *,
        tls: Credentials | None = None,
        succeeds: SessionName | None = None,
    ) -> None:
        """`succeeds`: the session of the planner before it, which is gone. What that one took goes on here, so this one
        accepts through an outage from the start."""
        self._succeeds = succeeds
        self._core = core
        self._deliver = deliver
        self._failed = failed
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._index = IndexClient(
            cache_address, name, self.later, self._index_attached, self._index_message, self._index_lost, tls
        )
        self._workers = WorkerClients(
            name,
            self.later,
            self._worker_attached,
            self._worker_result,
            self._worker_lost,
            self._worker_gone,
            self._fenced,
            tls,
            is_local=isinstance(parse_session_address(cache_address), UnixAddress),
        )
        self._index_is_attached = False
        self.open_workers: OpenWorkers = ()
        self.cache_tenants_version: str | None = None  # as the cache service said last
        self._epoch = self._refused_epoch = SchedulerEpoch(0)
        self._turning = threading.Lock()  # held by whoever is at a turn
        self._is_running = False
        self._alarm = threading.Event()  # the thread has something to do, or less time than it thinks
        self._wakeup_ns = 0  # when the core wants to be asked again
        self._asleep_until_ns = 0
        self._stats = core.stats()
        self._stats_ns = 0
        self._pool, self._pool_ns = core.pool_use(), 0
        self._ready_ns = time.monotonic_ns() if succeeds is not None else None  # when it was without problems last
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)

    def start(self) -> None:
        self._is_running = True
        self._index.start()
        self._thread.start()

    def stop(self) -> None:
        self.later(self._stop)
        self._thread.join(timeout=10)
        self._index.stop()

    def later(self, event: Callable[[], None]) -> None:
        """Run `event` in a turn: in one of this thread's own, now, unless another thread is at one."""
        self._events.put(event)
        if self._turning.acquire(blocking=False):
            try:
                self._take_turn()
            finally:
                self._turning.release()
            # Who brought something meanwhile found the lock taken, and relies on this look.
            if not self._events.empty():
                self._alarm.set()

    @property
    def problems(self) -> tuple[str, ...]:
        """Why no request can be served now; empty when it can."""
        if not self._index_is_attached:
            return ("not attached to the cache service",)
        if not self._workers.num_attached:
            return ("no worker is attached",)
        if self._core.all_drain:
            return ("all workers drain",)
        return ()

    @property
    def is_stranded(self) -> bool:
        """No worker is attached, though the cache service would say which. What waits here runs nowhere."""
        return self._index_is_attached and not self._workers.num_attached

    @property
    def seconds_in_trouble(self) -> float:
        """How long ago it was ready; infinite before it ever was."""
        if self._ready_ns is None:
            return math.inf
        return (time.monotonic_ns() - self._ready_ns) / 1e9 if self.problems else 0.0

    @property
    def stats(self) -> SchedulerStats:
        """At most a fraction of a second old."""
        return self._stats

    @property
    def session(self) -> SessionName | None:
        """What whoever comes after it says to the cache service; None while there is nothing to succeed to."""
        return self._index.session if self._epoch else self._succeeds

    @property
    def core(self) -> SchedulerCore:
        """To be touched in turns only."""
        return self._core

    # ---- the thread ----

    def _run(self) -> None:
        while self._is_running:
            self._sleep()
            with self._turning:
                self._take_turn()
        with self._turning:
            self._workers.stop()

    def _sleep(self) -> None:
        """Until something waits in the inbox, or the core wants to be asked."""
        idle_ns = time.monotonic_ns() + IDLE_WAKEUP_NS
        while self._is_running and self._events.empty():
            self._asleep_until_ns = until_ns = min(self._wakeup_ns, idle_ns)
            left_ns = until_ns - time.monotonic_ns()
            if left_ns <= 0:
                return
            if self._wakeup_ns >= until_ns:  # a turn that wants to be followed earlier has seen how long we sleep
                self._alarm.wait(left_ns / 1e9)
            self._alarm.clear()

    # ---- turns, with the lock held ----

    def _take_turn(self) -> None:
        if not self._is_running:
            return
        try:
            self._turn()
        except Exception as error:
            self._is_running = False
            _log.exception("the planner failed")
            self._failed(error)

    def _turn(self) -> None:
        try:
            for _ in range(TURN_EVENTS_MAX):
                self._events.get_nowait()()
        except queue.Empty:
            pass
        now_ns = time.monotonic_ns()
        if not self.problems:
            self._ready_ns = now_ns
        effects = self._core.advance(now_ns)
        # A worker that would have nothing to compute goes first, then whoever waits for tokens; the rest can wait.
        urgent = any(plan.rows or plan.repeat_rows for _, plan in effects.plans)
        if not urgent:
            self._deliver(effects)
        for worker_id, plan in effects.plans:
            self._workers.post(worker_id, plan)
        if urgent:
            self._deliver(effects)
        for message in effects.to_index:
            self._index.post(message)
        if now_ns - self._stats_ns > STATS_EVERY_NS:
            self._stats, self._stats_ns = self._measured(now_ns), now_ns
            self._workers.tend()
        wakeup_ns = self._core.next_wakeup_ns()
        self._wakeup_ns = NEVER_NS if wakeup_ns is None else wakeup_ns
        if self._wakeup_ns < self._asleep_until_ns:
            self._alarm.set()

    def _measured(self, now_ns: int) -> SchedulerStats:
        if now_ns - self._pool_ns > POOL_EVERY_NS:
            self._pool, self._pool_ns = self._core.pool_use(), now_ns
        return replace(self._core.stats(), pool=self._pool)

    def _stop(self) -> None:
        """Its workers are another scheduler's at once, if there is one."""
        if self._index_is_attached:
            self._index.post(Succeed(self._index.session))
        self._is_running = False
        self._alarm.set()

    # ---- sessions ----

    def _index_attached(self, attached: Attached) -> None:
        epoch = self._epoch = SchedulerEpoch(attached.epoch)
        _log.info("attached to the cache service: epoch %d, fresh %s", epoch, attached.fresh)
        if epoch == self._refused_epoch:
            self._renew()
            return
        if self._succeeds is not None and attached.fresh:
            self._index.post(Succeed(self._succeeds))
        self._index_is_attached = True
        self._workers.new_epoch(epoch)
        self._core.index_attached(epoch, CacheEpoch(attached.server_epoch), attached.fresh, time.monotonic_ns())

    def _index_message(self, message: ToClient) -> None:
        if isinstance(message, TenantsVersion):
            self.cache_tenants_version = message.version
            return
        if isinstance(message, Workers):
            self._workers.listed(message)
        self._core.index_message(message, time.monotonic_ns())
        if isinstance(message, Workers):
            self._workers_changed()

    def _index_lost(self) -> None:
        self._index_is_attached = False
        self._core.index_lost(time.monotonic_ns())

    def _worker_attached(self, worker_id: WorkerId, attached: Attached) -> None:
        _log.info("attached to worker %s, epoch %d, fresh %s", worker_id, attached.server_epoch, attached.fresh)
        now_ns = time.monotonic_ns()
        epoch = WorkerEpoch(attached.server_epoch)
        self._core.worker_attached(worker_id, epoch, attached.fresh, now_ns, attached.version)
        self._workers_changed()

    def _worker_result(self, worker_id: WorkerId, result: StepResult) -> None:
        self._core.worker_result(worker_id, result, time.monotonic_ns())

    def _fenced(self) -> None:
        """A worker takes no plans under our epoch any more. The cache service may hold it alive, and then nobody else
        would tell us to get another one."""
        self._refused_epoch = self._epoch
        if self._index_is_attached:
            self._renew()

    def _renew(self) -> None:
        _log.warning("epoch %d plans no more, as a worker says; getting another one", self._epoch)
        self._index_lost()
        self._index.renew()

    def _worker_lost(self, worker_id: WorkerId) -> None:
        self._core.worker_lost(worker_id, time.monotonic_ns())
        self._workers_changed()

    def _worker_gone(self, worker_id: WorkerId) -> None:
        self._core.worker_gone(worker_id, time.monotonic_ns())
        self._workers_changed()

    def _workers_changed(self) -> None:
        self.open_workers = self._core.open_workers()
