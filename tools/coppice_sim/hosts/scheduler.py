"""A scheduler as a process: the scheduler core, its session to the cache service, one to each worker it is told of."""

from __future__ import annotations

from typing import Any, Protocol

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.cell import ServedElsewhere
from coppice.messages.index import Acquire, OpBatch, Reclaim, WorkerInfo, Workers
from coppice.messages.ownership import SessionName, Succeed, Yielded
from coppice.session.frames import Reject, RejectCode
from coppice.session.link import Attached, ClientLink
from coppice.session.versions import SPOKEN, Versions
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Granted, Output, Refused, RefusedReason, Request, TokenBatch
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantSettings
from coppice_sim.base.environment import Environment
from coppice_sim.base.links import ClientEnd
from coppice_sim.base.names import CACHE_FOR_SCHEDULERS
from coppice_sim.base.process import Process
from coppice_sim.hosts.monitor import Monitor


class Clients(Protocol):
    """Those who ask, and take what comes."""

    def tokens(self, batch: TokenBatch) -> None: ...

    def granted(self, granted: Granted) -> None: ...

    def output(self, output: Output) -> None: ...

    def started(self, host: SchedulerHost) -> None: ...

    def crashed(self, host: SchedulerHost) -> None: ...


class SchedulerHost(Process):
    """`succeeds`: the session of the process before it, which is known to be gone."""

    def __init__(
        self,
        env: Environment,
        name: str,
        settings: SchedulerSettings,
        monitor: Monitor,
        clients: Clients,
        succeeds: SessionName | None = None,
        speaks: Versions = SPOKEN,
    ) -> None:
        super().__init__(name, env.timeline, env.rng, speaks)
        self.env = env
        self._sometimes = env.record.sometimes
        self._monitor = monitor
        self._clients = clients
        self._succeeds = succeeds
        self.core = SchedulerCore(settings)
        self.epoch = SchedulerEpoch(0)
        self._workers: dict[WorkerId, _WorkerSession] = {}
        self._listed_by: dict[WorkerId, CacheEpoch] = {}
        self._wakeup_ns: int | None = None
        link: ClientLink[Any] = ClientLink(env.rng.randbytes(16), name, speaks=speaks)
        self._cache = ClientEnd(self, env.network, link, CACHE_FOR_SCHEDULERS, self)
        monitor.watch_scheduler(self.core)
        clients.started(self)

    @property
    def session(self) -> SessionName | None:
        """What a process that comes after it says of it; None while it has no session."""
        link = self._cache.link
        return SessionName(link.key, link.incarnation, self.epoch, link.voucher) if self.epoch else None

    def die(self) -> None:
        super().die()
        self._clients.crashed(self)

    # -- requests

    def submit(self, request: Request) -> Refused | None:
        may_wait = self._monitor.is_within_share(self.core, request)
        refused = self.core.submit(request, self.now_ns)
        if refused is not None:
            self._sometimes[f"refused: {refused.reason.value}"] += 1
            if may_wait and refused.reason is RefusedReason.QUEUE_FULL:
                self.env.record.fail("O3", f"{request.tenant} is refused within its share of the queue")
        self.turn()
        return refused

    def set_tenants(self, tenants: TenantSettings) -> None:
        self.core.set_tenants(tenants, self.now_ns)
        self.turn()

    def cancel(self, request_id: str) -> None:
        self.core.cancel(request_id, self.now_ns)
        self.turn()

    # -- the session to the cache service

    def link_attached(self, attached: Attached) -> None:
        epoch = SchedulerEpoch(attached.epoch)
        if epoch != self.epoch:
            for worker_id in list(self._workers):
                self._drop(worker_id)
            self.epoch = epoch
        if self._succeeds is not None and attached.fresh:
            self._sometimes["succeeded"] += 1
            self._cache.post(Succeed(self._succeeds))
        self.core.index_attached(epoch, CacheEpoch(attached.server_epoch), attached.fresh, self.now_ns)
        self.turn()

    def link_body(self, body: Any) -> None:
        if isinstance(body, Workers):
            self._list(body)
        self._sometimes["sums of another scheduler"] += isinstance(body, ServedElsewhere) and bool(body.tenants)
        preempted = self.core.stats().total_preemptions
        self.core.index_message(body, self.now_ns)
        if isinstance(body, Reclaim) and self.core.stats().total_preemptions > preempted:
            self._sometimes["borrow then reclaim"] += 1
        self.turn()

    def link_lost(self) -> None:
        self.core.index_lost(self.now_ns)
        self.turn()

    def link_rejected(self, reject: Reject) -> None:
        """The link goes on trying."""

    # -- workers

    def refused(self, session: _WorkerSession, reject: Reject) -> None:
        """A worker takes no plans of this epoch any more, while the cache service knows it: only a new one helps."""
        if reject.code is RejectCode.FENCED and self.is_current(session) and self._cache.link.is_attached:
            self._sometimes["epoch renewed"] += 1
            self._cache.renew(self.rng.randbytes(16))

    def worker_gone(self, worker_id: WorkerId) -> None:
        running = self.core.stats().running
        self.core.worker_gone(worker_id, self.now_ns)
        self._sometimes["requests left a worker that was gone"] += running - self.core.stats().running
        self.turn()

    def _list(self, message: Workers) -> None:
        """A cache service that has just restarted lists nobody yet: that is no reason to hang up."""
        infos = {info.worker_id: info for info in message.workers}
        for worker_id, session in list(self._workers.items()):
            info = infos.get(worker_id)
            is_gone = info is None and self._listed_by.get(worker_id) == message.cache_epoch
            if is_gone or (info is not None and (info.address != session.address or not info.is_owned)):
                self._drop(worker_id)
        for worker_id, info in infos.items():
            self._listed_by[worker_id] = message.cache_epoch
            if not info.is_owned:
                continue
            if worker_id not in self._workers:
                self._workers[worker_id] = _WorkerSession(self, info)
            self._workers[worker_id].end.link.voucher = info.voucher

    def _drop(self, worker_id: WorkerId) -> None:
        self._workers.pop(worker_id).end.stop()
        self.core.worker_lost(worker_id, self.now_ns)

    def is_current(self, session: _WorkerSession) -> bool:
        return self._workers.get(session.worker_id) is session

    # -- a turn of the planner

    def turn(self) -> None:
        if not self.is_alive:
            return
        effects = self.core.advance(self.now_ns)
        for worker_id, plan in effects.plans:
            session = self._workers.get(worker_id)
            if session is None:
                self.env.record.fail("plan", f"{self.name} plans for {worker_id} without a session")
            self._sometimes["fork by copy"] += any(start.copy_from for start in plan.attach)
            self._sometimes["copy of a part of a block"] += any(start.copy_source for start in plan.attach)
            self._sometimes["burst"] += plan.num_decode_steps > 1
            session.end.post(plan)
        for message in effects.to_index:
            if isinstance(message, OpBatch):
                for op in message.ops:
                    if isinstance(op, Acquire):
                        self._monitor.acquiring(op, self.core._life.by_lease.get(op.lease_id))
            self._sometimes["yielded"] += isinstance(message, Yielded)
            self._cache.post(message)
        for granted in effects.granted:
            self._clients.granted(granted)
        for batch in effects.tokens:
            self._clients.tokens(batch)
        for output in effects.outputs:
            self._clients.output(output)
        self.env.record.touched.add(self)
        self._plan_wakeup()

    def _plan_wakeup(self) -> None:
        wakeup_ns = self.core.next_wakeup_ns()
        if wakeup_ns is None or (self._wakeup_ns is not None and self.now_ns < self._wakeup_ns <= wakeup_ns):
            return
        self._wakeup_ns = wakeup_ns
        self.timeline.at(wakeup_ns, lambda: self.deliver(self.turn))


class _WorkerSession:
    """The session to one worker under one scheduler epoch."""

    def __init__(self, host: SchedulerHost, info: WorkerInfo) -> None:
        self.worker_id = info.worker_id
        self.address = info.address
        self._host = host
        link: ClientLink[Any] = ClientLink(host.rng.randbytes(16), host.name, speaks=host.speaks)
        link.epoch, link.voucher = host.epoch, info.voucher
        self.end = ClientEnd(host, host.env.network, link, self.worker_id, self, self.nobody_listens)

    def link_attached(self, attached: Attached) -> None:
        if self._host.is_current(self):
            epoch = WorkerEpoch(attached.server_epoch)
            now_ns = self._host.now_ns
            self._host.core.worker_attached(self.worker_id, epoch, attached.fresh, now_ns, attached.version)
            self._host.turn()

    def link_body(self, body: Any) -> None:
        if self._host.is_current(self):
            self._host.core.worker_result(self.worker_id, body, self._host.now_ns)
            self._host.turn()

    def link_rejected(self, reject: Reject) -> None:
        self._host.refused(self, reject)

    def link_lost(self) -> None:
        if self._host.is_current(self):
            self._host.core.worker_lost(self.worker_id, self._host.now_ns)
            self._host.turn()

    def nobody_listens(self) -> None:
        if self._host.is_current(self):
            self._host.worker_gone(self.worker_id)
