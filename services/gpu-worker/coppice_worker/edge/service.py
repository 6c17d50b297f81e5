"""A worker on the network: its session to the cache service, the sessions that schedulers open to it, and its threads.

start:   listen -> session to the cache -> Register -> Registered(epoch) -> schedulers may attach -> ready
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from coppice.audit_log import Act, AuditLog
from coppice.edge import codec
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.grpc_tls import who_calls
from coppice.edge.link_client import LinkClient
from coppice.edge.link_server import LinkServer
from coppice.edge.session_listener import SessionListener
from coppice.ids import SchedulerEpoch
from coppice.messages.registration import CopiesDone, CopyOrders, Fence, FenceAck, Owner, Register, Registered
from coppice.session.frames import Hello, Reject, RejectCode
from coppice.session.link import Attached, ServerLink, ServerLinks
from coppice.tls.credentials import Credentials
from coppice_rpc.v1 import worker_pb2, worker_pb2_grpc
from coppice_worker.core.batch.step_batch import Executor
from coppice_worker.core.batch.steps import SchedulerAccepted, SchedulerRefused
from coppice_worker.core.worker import WorkerCore
from coppice_worker.edge.copies.copier import Copier, DiskCopier, TierCopier
from coppice_worker.edge.draining import Running, wait_until_quiet
from coppice_worker.edge.runner import StepObserver, StepRunner

_log = logging.getLogger(__name__)
ASK_TIMEOUT_S = 60.0  # a question waits behind the steps that were handed over before


class WorkerService:
    """Wires one core and one executor to the network, and lower tiers where there are some. `failed` is called at most
    once from the step thread, and from the thread that copies."""

    def __init__(
        self,
        core: WorkerCore,
        executor: Executor,
        observer: StepObserver,
        failed: Callable[[BaseException], None],
        tiers: TierCopier | None = None,
        audit: AuditLog | None = None,
        disk: DiskCopier | None = None,
    ) -> None:
        self._core = core
        self._audit = audit or AuditLog("worker")
        self._executor = executor
        self.runner = StepRunner(core, executor, observer, failed)
        self._copier = None if tiers is None else Copier(self.runner, tiers, observer, failed, disk)
        self._schedulers = _SchedulerSessions(core, self.runner)
        self._server: GrpcServer | None = None
        self._listener: SessionListener | None = None
        self._cache: _CacheSession | None = None
        self._draining = threading.Lock()
        self._ends = False
        self._num_undrained = 0
        self.problems: dict[str, str] = {"registration": "not registered with the cache service yet"}

    def serve(self, listener: SessionListener, server: GrpcServer) -> None:
        """Answer schedulers on `listener`, and whoever operates the worker on `server`."""
        self._listener, self._server = listener, server
        self.runner.start()
        listener.start((self._schedulers.server,))
        server.start()

    def register_with(self, cache_address: str, tls: Credentials | None = None) -> None:
        """Open the session to the cache service and keep it open."""
        self._cache = _CacheSession(
            self._core, self.runner, self._copier, cache_address, self._registered, self._fenced, tls
        )
        if self._copier is not None:
            self._copier.start(self._cache)
        self._cache.start()

    def add_to(self, server: grpc.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(_Servicer(self, self._audit), server)

    def stop(self, grace_s: float) -> None:
        if self._server is not None:
            self._server.set_ready(False)
        if self._listener is not None:
            self._listener.close()
        self._schedulers.close()
        if self._cache is not None:
            self._cache.stop()
        if self._copier is not None:
            self._copier.stop()
        self.runner.stop()
        if self._server is not None:
            self._server.stop(grace_s)

    def busy_ns(self, now_ns: int) -> int:
        """How long the longer of the step and the copies that run has taken. `now_ns` is `time.monotonic_ns`."""
        copying_ns = 0 if self._copier is None else self._copier.busy_ns(now_ns)
        return max(self.runner.busy_ns(now_ns), copying_ns)

    def drain(self, pause: Callable[[float], bool], *, ends: bool = False) -> bool:
        """Have nothing new sent here, and wait until nothing runs. `pause` waits for so many seconds, and says whether
        to give up. Returns False if it did, or if `undrain` was called. `ends`: the process ends then, and nobody can
        undrain it any more. On any thread but that of the steps."""
        with self._draining:
            self._ends = self._ends or ends
            if self._cache is not None:
                self._cache.drain()
            num_undrained = self._num_undrained
        return wait_until_quiet(self.running, lambda seconds: pause(seconds) or self._num_undrained != num_undrained)

    def undrain(self) -> bool:
        """Have new requests sent here again. False: the process ends, and nothing was changed."""
        with self._draining:
            if self._ends:
                return False
            if self._cache is not None:
                self._cache.undrain()
            self._num_undrained += 1
            return True

    def running(self) -> Running:
        """Of now, also while a step is computed."""
        sequences = self.runner.with_core(lambda core: core.stats().sequences)
        return Running(sequences, self._schedulers.server.is_connected)

    # ---- on the step thread ----

    def _registered(self, message: Registered) -> None:
        had_epoch = self._core.worker_epoch != 0
        if self.runner.with_core(lambda core: self._take_epoch(core, message)):
            if had_epoch:
                # Generations start again at 0, so nobody can tell any more whose bytes are where (I15).
                self._executor.zero_blocks(np.arange(self._executor.pool.num_blocks, dtype=np.int32))
            _log.info("registered: worker epoch %d, cache epoch %d", message.worker_epoch, message.cache_epoch)
            self._schedulers.restart(message.worker_epoch)
        else:
            self._schedulers.drop_others()  # another one may plan from now on
        self.problems.pop("registration", None)
        if self._server is not None:
            self._server.set_ready(True)

    def _take_epoch(self, core: WorkerCore, message: Registered) -> bool:
        if self._copier is not None and message.worker_epoch != core.worker_epoch:
            self._copier.begin(message.worker_epoch, keeps_disk=message.keeps_disk)
        return core.registered(message)

    def _fenced(self, word: Fence | Owner) -> None:
        if isinstance(word, Owner):
            _log.info("scheduler epoch %d plans here", word.owner)
        else:
            _log.info("fence %d: epochs %s, up to %d", word.fence_id, list(word.scheduler_epochs), word.up_to_epoch)
        self._schedulers.drop_others()


class _CacheSession:
    """The worker's own session to the cache service."""

    def __init__(
        self,
        core: WorkerCore,
        runner: StepRunner,
        copier: Copier | None,
        cache_address: str,
        registered: Callable[[Registered], None],
        fenced: Callable[[Fence | Owner], None],
        tls: Credentials | None,
    ) -> None:
        self._core = core
        self._runner = runner
        self._copier = copier
        self._registered = registered
        self._fenced = fenced
        self._attachment = 0
        self._num_told = self._num_taken = 0  # registrations: on the link's thread, and on that of the steps
        self.reported = 0
        self._address = cache_address
        self._link = LinkClient(codec.WORKERS, cache_address, self, core.settings.worker_id, "cache", tls=tls)

    def start(self) -> None:
        self._link.start()

    def stop(self) -> None:
        self._link.stop()

    def link_attached(self, attached: Attached, attachment: int) -> None:
        if attached.fresh:
            self._attachment = attachment
            self._runner.later(lambda: self._register(attachment))

    def post(self, message: CopiesDone | FenceAck, attachment: int) -> None:
        self._link.post(message, attachment)

    def drain(self) -> None:
        """Tell the cache service to send nothing new here."""
        self._runner.later(lambda: self._link.post(self._core.drain(), self._attachment))

    def undrain(self) -> None:
        """Register again, as one that takes new leases."""
        self._runner.later(lambda: self._register(self._attachment, is_undrained=True))

    def link_body(self, body: Any, attachment: int) -> None:
        match body:
            case Registered():
                self._num_told += 1
                self._runner.later(lambda: self._take_registered(body, attachment))
            case Owner():
                self._runner.later(lambda: self._owned(body))
            case Fence():
                self._runner.later(lambda: self._fence(body, attachment))
            case CopyOrders() if self._copier is not None:
                copier = self._copier
                if self._num_taken == self._num_told:
                    copier.order(body, attachment)
                else:  # orders of an epoch that begins only there
                    self._runner.later(lambda: copier.order(body, attachment))

    def link_lost(self, reason: str) -> None:
        _log.warning("lost the cache service (%s); computing goes on", reason)

    def link_rejected(self, reject: Reject) -> None:
        _log.warning("the cache service at %s refuses the session: %s", self._address, reject.message)

    def _register(self, attachment: int, *, is_undrained: bool = False) -> None:
        def report(core: WorkerCore) -> Register:
            if is_undrained:
                core.is_draining = False
            self.reported = attachment
            return core.registration()

        self._link.post(self._runner.with_core(report), attachment)

    def _take_registered(self, registered: Registered, attachment: int) -> None:
        self._registered(registered)
        self._num_taken += 1
        if (draining := self._runner.with_core(lambda core: core.said_again())) is not None:
            self._link.post(draining, attachment)

    def _owned(self, owner: Owner) -> None:
        self._runner.with_core(lambda core: core.owned(owner))
        self._fenced(owner)

    def _fence(self, fence: Fence, attachment: int) -> None:
        if fence.report and self._copier is not None:
            self._copier.hurry()
        acknowledgement = self._runner.with_core(lambda core: core.fence(fence))
        self._fenced(fence)
        if acknowledgement is not None:
            self._link.post(acknowledgement, attachment)


class _SchedulerSessions:
    """Sessions that schedulers opened. One scheduler plans at a time; the newest unfenced epoch wins."""

    def __init__(self, core: WorkerCore, runner: StepRunner) -> None:
        self._core = core
        self._runner = runner
        self._lock = threading.Lock()
        self._links: dict[int, ServerLink[Any]] = {}  # by scheduler epoch
        self.server = LinkServer(None, codec.STEPS, self, "the worker is not registered yet")

    def restart(self, worker_epoch: int) -> None:
        """A new worker epoch: every scheduler attaches again and starts over."""
        with self._lock:
            self._links.clear()
        self.server.replace(ServerLinks(worker_epoch, worker_epoch))

    def drop_others(self) -> None:
        """End the sessions of epochs that do not plan here any more. On the step thread."""
        planning = self._core.planning
        with self._lock:
            over = [link for epoch, link in self._links.items() if epoch != planning]
            self._links = {epoch: link for epoch, link in self._links.items() if epoch == planning}
        for link in over:
            self.server.end(link)

    def close(self) -> None:
        self.server.close()

    # ---- SessionHandler ----

    def session_opening(self, hello: Hello) -> int | Reject:
        if hello.epoch == 0:
            return Reject(RejectCode.INVALID, "a scheduler gets its epoch from the cache service first")
        epoch = SchedulerEpoch(hello.epoch)
        untrusted = self._runner.with_core(lambda core: core.why_not_trust(epoch, hello.voucher))
        if untrusted is not None:
            _log.warning("scheduler %r, epoch %d: %s", hello.name[:64], epoch, untrusted.reason.value)
            return Reject(untrusted.reason.reject_code, untrusted.reason.value)
        with self._lock:
            earlier = self._links.pop(hello.epoch, None)
        if earlier is not None:
            # The scheduler gave that session up. It ends before the new one is attached, so that no plan of it that
            # still waits for the step thread can be taken for one of the new session.
            self.server.end(earlier)
        try:
            answer = self._runner.ask(lambda core: self._attach(core, epoch, hello.voucher), timeout_s=ASK_TIMEOUT_S)
        except TimeoutError:
            return Reject(RejectCode.NOT_READY, "the worker is busy with a long step")
        if not isinstance(answer, SchedulerAccepted):
            return Reject(answer.reason.reject_code, answer.reason.value)
        _log.info("scheduler %s attached with epoch %d", hello.name, hello.epoch)
        return hello.epoch

    @staticmethod
    def _attach(core: WorkerCore, epoch: SchedulerEpoch, voucher: bytes) -> SchedulerAccepted | SchedulerRefused:
        """In its turn the worker may have another epoch."""
        return core.why_not_trust(epoch, voucher) or core.attach_scheduler(epoch)

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        with self._lock:
            self._links[link.epoch] = link
        self._runner.later(self.drop_others)

    def session_heard(self, link: ServerLink[Any]) -> None:
        """A scheduler that falls silent is the cache service's to judge."""

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        self._runner.step(
            SchedulerEpoch(link.epoch),
            body,
            lambda: not link.is_ended,
            lambda result: self.server.post(link, result),
            lambda why: self._broken(link, why),
        )

    def _broken(self, link: ServerLink[Any], why: str) -> None:
        _log.error("scheduler %s broke the protocol: %s; its session ends", link.name, why)
        self.server.end(link)


class _Servicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, service: WorkerService, audit: AuditLog) -> None:
        self._service = service
        self._audit = audit

    def Drain(self, request: Any, context: Any) -> Any:
        """Have nothing new sent here, and answer when no sequence was seen for a while: then it may be stopped."""
        self._audit.ended(Act("drain", who_calls(context), "gRPC"), done=True)
        never = threading.Event()
        if not self._service.drain(lambda seconds: never.wait(seconds) or not context.is_active()):
            context.abort(grpc.StatusCode.ABORTED, "the worker takes new requests again: somebody called Undrain")
        return worker_pb2.DrainResponse()

    def Undrain(self, request: Any, context: Any) -> Any:
        is_done = self._service.undrain()
        self._audit.ended(Act("undrain", who_calls(context), "gRPC"), done=is_done)
        if not is_done:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the worker's process ends, and was told to")
        return worker_pb2.UndrainResponse()

    def Stats(self, request: Any, context: Any) -> Any:
        epoch, is_draining, stats = self._service.runner.ask(
            lambda core: (core.worker_epoch, core.is_draining, core.stats()), ASK_TIMEOUT_S
        )
        return worker_pb2.WorkerStatsResponse(
            worker_epoch=epoch,
            steps=stats.steps,
            tokens_computed=stats.tokens_computed,
            tokens_sampled=stats.tokens_sampled,
            refusals=sum(stats.refusals.values()),
            sequences=stats.sequences,
            blocks_in_use=stats.blocks_with_users,
            draining=is_draining,
        )
