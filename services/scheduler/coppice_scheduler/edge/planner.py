"""The planner's loop: a thread of its own that owns the core. Everything reaches it through one inbox.

    front doors     --submit, cancel------->  +-------+  --ops-->    cache service
    links' threads  --answers, results----->  | inbox |  --plans-->  workers
                                              +-------+  --tokens, outputs, one call per turn--> front doors

A turn takes everything that waits in the inbox, then asks the core once what must leave now. Tokenising, detokenising
and streaming happen in the front doors' processes and never delay a plan.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import ToClient, Workers
from coppice.messages.step import StepResult
from coppice.session.link import Attached
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.request import Effects, SchedulerStats
from coppice_scheduler.edge.clients import IndexClient, WorkerClients

_log = logging.getLogger(__name__)
IDLE_WAKEUP_S = 0.2
STATS_EVERY_NS = 200_000_000
TURN_EVENTS_MAX = 1_000  # of the inbox, before the core is asked again


class Planner:
    """Owns a `SchedulerCore`; its methods may be called from any thread.

    On its own thread it calls `deliver` after every turn, and `failed` as its last act when a turn fails.
    """

    def __init__(
        self,
        core: SchedulerCore,
        cache_address: str,
        name: str,
        deliver: Callable[[Effects], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._deliver = deliver
        self._failed = failed
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._index = IndexClient(
            cache_address, name, self.later, self._index_attached, self._index_message, self._index_lost
        )
        self._workers = WorkerClients(name, self.later, self._worker_attached, self._worker_result, self._worker_lost)
        self._index_is_attached = False
        self._stopping = False
        self._stats = core.stats()
        self._stats_ns = 0
        self._ready_ns: int | None = None  # when it was without problems last
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)

    def start(self) -> None:
        self._index.start()
        self._thread.start()

    def stop(self) -> None:
        self.later(self._stop)
        self._thread.join(timeout=10)
        self._index.stop()

    def later(self, event: Callable[[], None]) -> None:
        """Run `event` on the planner's thread."""
        self._events.put(event)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why no request can be served now; empty when it can."""
        if not self._index_is_attached:
            return ("not attached to the cache service",)
        if not self._workers.num_attached:
            return ("no worker is attached",)
        return ()

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
    def core(self) -> SchedulerCore:
        """To be touched on the planner's thread only."""
        return self._core

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            _log.exception("the planner failed")
            self._failed(error)
        self._workers.stop()

    def _turn(self) -> None:
        try:
            event = self._events.get(timeout=self._wait_s())
            event()
            for _ in range(TURN_EVENTS_MAX):
                self._events.get_nowait()()
        except queue.Empty:
            pass
        now_ns = time.monotonic_ns()
        if not self.problems:
            self._ready_ns = now_ns
        effects = self._core.advance(now_ns)
        for worker_id, plan in effects.plans:
            self._workers.post(worker_id, plan)
        for message in effects.to_index:
            self._index.post(message)
        if now_ns - self._stats_ns > STATS_EVERY_NS:
            self._stats, self._stats_ns = self._core.stats(), now_ns
        self._deliver(effects)

    def _wait_s(self) -> float:
        wakeup_ns = self._core.next_wakeup_ns()
        if wakeup_ns is None:
            return IDLE_WAKEUP_S
        return min(max((wakeup_ns - time.monotonic_ns()) / 1e9, 0.0), IDLE_WAKEUP_S)

    def _stop(self) -> None:
        self._stopping = True

    # ---- sessions, on the planner's thread ----

    def _index_attached(self, attached: Attached) -> None:
        epoch = SchedulerEpoch(attached.epoch)
        _log.info("attached to the cache service: epoch %d, fresh %s", epoch, attached.fresh)
        self._index_is_attached = True
        self._workers.new_epoch(epoch)
        self._core.index_attached(epoch, CacheEpoch(attached.server_epoch), attached.fresh, time.monotonic_ns())

    def _index_message(self, message: ToClient) -> None:
        if isinstance(message, Workers):
            self._workers.listed(message)
        self._core.index_message(message, time.monotonic_ns())

    def _index_lost(self) -> None:
        self._index_is_attached = False
        self._core.index_lost(time.monotonic_ns())

    def _worker_attached(self, worker_id: WorkerId, attached: Attached) -> None:
        _log.info("attached to worker %s, epoch %d, fresh %s", worker_id, attached.server_epoch, attached.fresh)
        now_ns = time.monotonic_ns()
        self._core.worker_attached(worker_id, WorkerEpoch(attached.server_epoch), attached.fresh, now_ns)

    def _worker_result(self, worker_id: WorkerId, result: StepResult) -> None:
        self._core.worker_result(worker_id, result, time.monotonic_ns())

    def _worker_lost(self, worker_id: WorkerId) -> None:
        self._core.worker_lost(worker_id, time.monotonic_ns())
