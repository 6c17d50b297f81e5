"""The core on the network: one lock around it, two kinds of sessions in front, a thread that ticks.

    session threads --- lock ---> core ---> effects ---> LinkServer.post, LinkServer.end
    ticker thread ---'

Effects are carried out before the core's lock is given back, so that messages leave in the order of the decisions.
Lock order: this lock, then those of the link servers; they call us without holding theirs.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from coppice.ids import CacheEpoch, DomainId, Namespace, SchedulerEpoch, WorkerId
from coppice.messages.index import Answer, AnswerBatch, MatchHints, MatchQueries, Op, OpBatch, Workers
from coppice.session.frames import Hello, Reject, RejectCode
from coppice.session.link import ServerLinks
from coppice_cache.core.base.results import (
    Effect,
    IndexStats,
    Match,
    Regrown,
    Reincarnate,
    SessionEnded,
    ToClientEffect,
    ToWorkerEffect,
    WorkerEnded,
)
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.base.statements import Statement
from coppice_cache.core.index import IndexCore
from coppice_cache.core.state.sessions import FIRST_EPOCHS
from coppice_cache.edge.service.auditor import Auditor
from coppice_cache.edge.service.clients import ClientSessions
from coppice_cache.edge.service.collector import Collector
from coppice_cache.edge.service.event_hub import EventHub
from coppice_cache.edge.service.locked_core import CoreBroken, LockedCore
from coppice_cache.edge.service.workers import WorkerSessions

_log = logging.getLogger("coppice.cache")
TICK_S = 0.1


class OpObserver(Protocol):
    """Sees every batch of ops that was executed. The service's lock may be held meanwhile: it must be quick."""

    @property
    def is_watching(self) -> bool: ...

    def executed(self, ops: tuple[Op, ...], answers: tuple[Answer, ...], duration_ns: int) -> None: ...


class IndexService:
    """Everything that may be asked of the cache service, from any thread.

    `remember` stores a new cache epoch before it is used; `failed` is called when the core broke: its state cannot be
    trusted then, and the process has to end (a restart recovers from workers and sessions).
    """

    def __init__(
        self,
        settings: CoreSettings,
        cache_epoch: CacheEpoch,
        *,
        remember: Callable[[CacheEpoch], None],
        failed: Callable[[BaseException], None],
        observer: OpObserver,
        audit_interval_s: float = 0.0,
        tenants_version: str = "",
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.settings = settings
        self._remember = remember
        self.observer = observer
        self.now_ns = now_ns
        self._locked = LockedCore(self._new_core(cache_epoch), let_out=self._let_out, failed=failed)
        self.looking, self.entered = self._locked.looking, self._locked.entered
        self.hub = EventHub(_new_stream())
        self._unproved_sessions = 0  # that claimed to be of before, without a voucher
        self.clients = ClientSessions(
            self._locked,
            self._links(),
            outlived=self._outlived,
            receive=self._receive,
            now_ns=now_ns,
            tenants_version=tenants_version,
        )
        self.workers = WorkerSessions(self._locked, self._links(), outlived=self._outlived, now_ns=now_ns)
        self._stopping = threading.Event()
        self._collector = Collector()
        self.auditor = Auditor(self, interval_s=audit_interval_s)
        self._ticker = threading.Thread(target=self._tick, name="cache ticker", daemon=True)

    def start(self) -> None:
        self._collector.start()
        self._ticker.start()

    def close(self) -> None:
        """End all sessions' streams and stop ticking. The leases stay: whoever comes next re-attaches them."""
        self._stopping.set()
        self.auditor.stop()
        self.hub.close()
        self.clients.server.close()
        self.workers.server.close()
        if self._ticker.is_alive():
            self._ticker.join(timeout=5)
        self._collector.stop()

    def set_domains(self, configs: tuple[DomainConfig, ...], tenants_version: str) -> None:
        """Other domains or shares from now on, for this core and those that follow it. Raises SettingsRefused.

        `tenants_version`: of the file that has them, which sessions are told.
        """
        with self.entered() as core:
            core.set_domains(configs, self.now_ns())
            self.settings = core.state.settings
            self.clients.set_tenants_version(tenants_version)

    # ---- unary forms ----

    def execute(self, epoch: SchedulerEpoch, op: Op) -> Answer:
        started_ns = self.now_ns()
        with self.entered() as core:
            answer = core.execute(epoch, op, started_ns)
        if self.observer.is_watching:
            self.observer.executed((op,), (answer,), self.now_ns() - started_ns)
        return answer

    def match(self, domain: DomainId, namespace: Namespace, tokens: bytes, worker_id: WorkerId) -> Match:
        with self.entered() as core:
            return core.match(domain, namespace, tokens, worker_id)

    def match_all(self, queries: MatchQueries) -> MatchHints:
        """Raises MessageRefused."""
        with self.entered() as core:
            return core.match_all(queries)

    def list_workers(self) -> Workers:
        with self.entered() as core:
            return core.state.workers_message()

    def stats(self) -> IndexStats:
        with self.entered() as core:
            return core.stats()

    def statement(self) -> Statement:
        with self._locked.looking() as core:
            return core.statement(self.now_ns())

    @property
    def unproved(self) -> dict[str, int]:
        """Claims to be of before for which nobody vouched."""
        registrations = self._locked.core.state.unproved_registrations
        return {"session": self._unproved_sessions, "registration": registrations}

    @property
    def cache_epoch(self) -> CacheEpoch:
        return self._locked.core.cache_epoch

    # ---- the core, its effects ----

    def _receive(self, epoch: SchedulerEpoch, body: Any, core: IndexCore) -> None:
        """One message of a client's session, inside of `entered`. Raises MessageRefused."""
        started_ns = self.now_ns()
        core.receive_client(epoch, body, started_ns)
        if isinstance(body, OpBatch) and self.observer.is_watching:
            self._show(epoch, body, core, self.now_ns() - started_ns)

    def _show(self, epoch: SchedulerEpoch, batch: OpBatch, core: IndexCore, duration_ns: int) -> None:
        for effect in core.state.effects:
            match effect:
                case ToClientEffect(told, AnswerBatch(answers=answers)) if told == epoch:
                    self.observer.executed(batch.ops, answers, duration_ns)

    def _let_out(self, core: IndexCore) -> None:
        self.hub.publish(core.take_events())
        self._carry_out(core.take_effects())

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToClientEffect(epoch, to_client):
                    self.clients.tell(epoch, to_client)
                case ToWorkerEffect(worker_id, to_worker):
                    self.workers.tell(worker_id, to_worker)
                case SessionEnded(epoch):
                    self.clients.ended(epoch)
                case WorkerEnded(worker_id, worker_epoch):
                    self.workers.ended(worker_id, worker_epoch)
                case Regrown():
                    self.hub.restart(_new_stream())
                case Reincarnate(cache_epoch):
                    self._reincarnate(cache_epoch)
                    return  # the rest belongs to the incarnation that is over

    def _reincarnate(self, cache_epoch: CacheEpoch) -> None:
        """A peer proves that ours or a higher one was used: nothing of this incarnation may grant again (rule 9)."""
        _log.warning("another incarnation had this cache epoch or a later one; starting over as epoch %d", cache_epoch)
        self._remember(cache_epoch)
        core = self._new_core(cache_epoch)
        core.dismantle(self._locked.replace(core))
        self.hub.restart(_new_stream())
        self.clients.forget_all()
        self.workers.forget_all()
        self.clients.server.replace(self._links())
        self.workers.server.replace(self._links())

    def _new_core(self, cache_epoch: CacheEpoch) -> IndexCore:
        return IndexCore(self.settings, cache_epoch, self.now_ns(), secrets.randbelow(FIRST_EPOCHS))

    def _links(self) -> ServerLinks[Any]:
        core = self._locked.core
        incarnation = (core.cache_epoch << 32) | secrets.randbits(32)
        return ServerLinks(incarnation, core.cache_epoch, vouch=core.state.vouchers.of_session)

    def _outlived(self, hello: Hello) -> Reject | None:
        """Was the peer attached to another incarnation with our epoch or a later one? Then we start over above it.

        Peers tell incarnations apart by the epoch alone, so no epoch may be used twice, whatever was forgotten.
        """
        with self._locked.held() as core:
            theirs, _ = core.believed(hello)
            if not theirs and hello.incarnation:
                self._unproved_sessions += 1
                _log.warning("%r shows no voucher of ours for what it was attached to; it starts anew", hello.name[:64])
            ours = self.clients.server.issued(hello.incarnation) or self.workers.server.issued(hello.incarnation)
            if ours or theirs < core.cache_epoch:
                return None
            self._reincarnate(CacheEpoch(theirs + 1))
        return Reject(RejectCode.NOT_READY, f"starting over above cache epoch {theirs}")

    def _tick(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                with self.entered() as core:
                    core.tick(self.now_ns())
            except Exception:
                _log.exception("the core broke in a tick")
                return
            self._audit_a_slice()

    def _audit_a_slice(self) -> None:
        try:
            self.auditor.tick()
        except CoreBroken:
            pass  # whoever broke it has said so


def _new_stream() -> int:
    """Followers tell streams of events apart by it; never 0."""
    return secrets.randbits(63) | 1
