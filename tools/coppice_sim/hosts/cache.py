"""The cache service as a process: the index core behind its two ports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerId
from coppice.messages.index import AnswerBatch, OpBatch
from coppice.messages.ownership import Yielded
from coppice.messages.registration import Registered
from coppice.session.frames import Hello, Reject, RejectCode
from coppice.session.link import ServerLink, ServerLinks
from coppice.session.versions import SPOKEN, Versions
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.results import (
    Regrown,
    Reincarnate,
    SessionEnded,
    ToClientEffect,
    ToWorkerEffect,
    WorkerEnded,
)
from coppice_cache.core.base.settings import CoreSettings
from coppice_cache.core.index import IndexCore
from coppice_cache.core.state.sessions import FIRST_EPOCHS
from coppice_sim.base.environment import Environment
from coppice_sim.base.links import ServerEnd
from coppice_sim.base.names import CACHE_FOR_SCHEDULERS, CACHE_FOR_WORKERS, LIAR
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.epochs import EpochRegistry
from coppice_sim.hosts.monitor import Monitor
from coppice_sim.hosts.recovery import SimLog

TICK_MS = 40


class CacheHost(Process):
    """`settings` gives what a core that starts now reads."""

    def __init__(
        self,
        env: Environment,
        epochs: EpochRegistry,
        log: SimLog,
        settings: Callable[[], CoreSettings],
        monitor: Monitor,
        speaks: Versions,
    ) -> None:
        super().__init__("cache", env.timeline, env.rng, speaks)
        self.env = env
        self._epochs = epochs
        self._log = log
        self._settings = settings
        self.monitor = monitor
        self.core = self._start_core(epochs.next_epoch())
        log.load_into(self.core)
        self.clients = ServerEnd(self, _Clients(self))
        self.workers = ServerEnd(self, _Workers(self))
        env.network.listen(CACHE_FOR_SCHEDULERS, self.clients)
        env.network.listen(CACHE_FOR_WORKERS, self.workers)
        self.client_links: dict[SchedulerEpoch, ServerLink[Any]] = {}
        self.worker_links: dict[WorkerId, ServerLink[Any]] = {}
        self.registered: dict[WorkerId, int] = {}  # the epoch that the present link's worker was told
        self._open_ports()
        self.every(TICK_MS * MS, self._tick)

    def _start_core(self, epoch: CacheEpoch) -> IndexCore:
        core = IndexCore(self._settings(), epoch, self.now_ns, self._epochs.begin(epoch).randrange(FIRST_EPOCHS))
        core.names_owners = self.speaks == SPOKEN
        return core

    def _open_ports(self) -> None:
        incarnation = (self.core.cache_epoch << 32) | self._epochs.next_incarnation()
        self.client_links.clear()
        self.worker_links.clear()
        self.registered.clear()
        epoch, vouch = self.core.cache_epoch, self.core.state.vouchers.of_session
        self.clients.replace(ServerLinks(incarnation, epoch, vouch=vouch))
        self.workers.replace(ServerLinks(incarnation, epoch, vouch=vouch))

    def outlived(self, hello: Hello, end: ServerEnd) -> Reject | None:
        """A peer that was attached to another incarnation with our epoch or a later one: we start over above it."""
        theirs, _ = self.core.believed(hello)
        if theirs < self.core.cache_epoch or end.issued(hello.incarnation):
            return None
        self._reincarnate(CacheEpoch(theirs + 1))
        return Reject(RejectCode.NOT_READY, f"starting over above cache epoch {theirs}")

    def _reincarnate(self, epoch: CacheEpoch) -> None:
        self.env.record.sometimes["reincarnated"] += 1
        before, self.core = self.core, self._start_core(epoch)
        self.core.dismantle(before)
        self._log.start_over()
        self._open_ports()

    def _tick(self) -> None:
        self.core.tick(self.now_ns)
        self.carry_out()

    def carry_out(self) -> None:
        effects = self.core.take_effects()
        self.monitor.watch_index(self.core, effects)
        for effect in effects:
            match effect:
                case ToClientEffect(epoch, message):
                    client = self.client_links.get(epoch)
                    if isinstance(message, AnswerBatch):
                        self.monitor.answered(self.core, message)
                    if client is not None:
                        self.clients.post(client, message)
                case ToWorkerEffect(worker_id, to_worker):
                    worker = self.worker_links.get(worker_id)
                    if worker is None:
                        continue
                    if isinstance(to_worker, Registered):
                        self.registered[worker_id] = to_worker.worker_epoch
                    self.workers.post(worker, to_worker)
                case SessionEnded(epoch):
                    self.env.record.sometimes["session ended"] += 1
                    ended = self.client_links.pop(epoch, None)
                    if ended is not None:
                        self.clients.end(ended)
                case WorkerEnded(worker_id, worker_epoch):
                    if self.registered.get(worker_id) == worker_epoch:
                        self.workers.end(self.worker_links.pop(worker_id))
                        del self.registered[worker_id]
                case Regrown():
                    self._log.start_over()
                case Reincarnate(cache_epoch):
                    self._reincarnate(cache_epoch)
                    return
        self._log.follow(self.core)
        self.env.record.touched.add(self)


class _Clients:
    """Sessions of schedulers."""

    def __init__(self, host: CacheHost) -> None:
        self._host = host

    def session_opening(self, hello: Hello) -> int | Reject:
        host = self._host
        if (reject := host.outlived(hello, host.clients)) is not None:
            return reject
        _, claimed = host.core.believed(hello)
        holder = host.client_links.get(claimed)
        # Somebody else's by now: after a restart that forgot its own epoch.
        is_anothers = holder is not None and holder.key != hello.key
        try:
            may_yield = hello.versions.highest >= Yielded.SINCE
            claimed = SchedulerEpoch(0) if is_anothers else claimed
            epoch = host.core.attach_client(claimed, host.now_ns, may_yield=may_yield)
        except MessageRefused as refused:
            return Reject(RejectCode.NOT_READY, str(refused))
        if hello.epoch and epoch == hello.epoch:
            host.env.record.sometimes["session re-attached"] += 1
            if hello.name == LIAR:
                host.env.record.fail("rule 9", f"{hello} was believed")
        return epoch

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        if is_new:
            self._host.client_links[SchedulerEpoch(link.epoch)] = link
        self._host.carry_out()

    def session_heard(self, link: ServerLink[Any]) -> None:
        self._host.core.heard_client(SchedulerEpoch(link.epoch), self._host.now_ns)

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        host, epoch = self._host, SchedulerEpoch(link.epoch)
        try:
            host.core.receive_client(epoch, body, host.now_ns)
        except MessageRefused:
            host.env.record.fail("MessageRefused", f"a scheduler sent {body!r}")
        if isinstance(body, OpBatch) and host.rng.random() < host.env.doubled_bodies:
            self._again(epoch, body)
        host.carry_out()

    def _again(self, epoch: SchedulerEpoch, batch: OpBatch) -> None:
        """The same ops once more: they change nothing, and nobody hears the answers (I10)."""
        host = self._host
        host.env.record.sometimes["ops doubled"] += 1
        effects = host.core.take_effects()
        host.core.receive_client(epoch, batch, host.now_ns)
        again = host.core.take_effects()
        first = [e.message for e in effects if isinstance(e, ToClientEffect) and isinstance(e.message, AnswerBatch)]
        second = [e for e in again if isinstance(e, ToClientEffect) and isinstance(e.message, AnswerBatch)]
        assert isinstance(second[-1].message, AnswerBatch)
        host.monitor.repeated(batch, first[-1], second[-1].message)
        host.core.state.effects = effects + [effect for effect in again if effect is not second[-1]]


class _Workers:
    """Sessions of workers: the newest link of a worker id speaks for it."""

    def __init__(self, host: CacheHost) -> None:
        self._host = host

    def session_opening(self, hello: Hello) -> int | Reject:
        return self._host.outlived(hello, self._host.workers) or 1

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        host, worker_id = self._host, WorkerId(link.name)
        if is_new:
            old = host.worker_links.pop(worker_id, None)
            host.registered.pop(worker_id, None)
            host.worker_links[worker_id] = link
            if old is not None:
                host.workers.end(old)

    def session_heard(self, link: ServerLink[Any]) -> None:
        if self._host.worker_links.get(WorkerId(link.name)) is link:
            self._host.core.heard_worker(WorkerId(link.name), self._host.now_ns)

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        host, worker_id = self._host, WorkerId(link.name)
        if host.worker_links.get(worker_id) is not link:
            return
        unproved = host.core.state.unproved_registrations
        try:
            host.monitor.drains.receives(host.core, worker_id, body, host.now_ns)
            if worker_id != LIAR and host.core.state.unproved_registrations > unproved:
                host.env.record.fail("rule 9", f"{worker_id} was not believed what it was told")
            if host.rng.random() < host.env.doubled_bodies:
                host.monitor.drains.receives(host.core, worker_id, body, host.now_ns)
        except MessageRefused as refused:
            if worker_id != LIAR:
                host.env.record.fail("MessageRefused", f"worker {worker_id} sent {type(body).__name__}: {refused}")
        host.carry_out()
