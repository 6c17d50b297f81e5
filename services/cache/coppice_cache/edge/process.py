"""All parts of the service, put together: ports, epoch, core, listeners; and taken apart in the right order."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from coppice.addresses import Address, PortInUse
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.session_listener import SessionListener
from coppice.errors import UnavailableError
from coppice.ids import CacheEpoch
from coppice.telemetry import configure_tracing
from coppice_cache.edge.api.admin_grpc import ADMIN_SERVICES, PrefixIndexAdminServicer
from coppice_cache.edge.api.admin_http import AdminServer, Readiness, build_app
from coppice_cache.edge.api.grpc_service import SERVICES, PrefixIndexServicer
from coppice_cache.edge.api.inspection import Inspection
from coppice_cache.edge.durability.epochs import EpochFile, next_epoch
from coppice_cache.edge.durability.recovery import Recovery, RecoveryMetrics
from coppice_cache.edge.durability.registry import Registry, connect
from coppice_cache.edge.events.index_slices import IndexSlices
from coppice_cache.edge.events.kv_events_settings import kv_events_plan, open_publishers
from coppice_cache.edge.events.watching import Watchers
from coppice_cache.edge.metrics import CacheMetrics
from coppice_cache.edge.service.service import IndexService
from coppice_cache.edge.settings import CacheSettings, core_settings, tenant_directory
from coppice_cache.edge.tracing import LeaseSpans

_log = logging.getLogger("coppice.cache")
GRACE_S = 1.0


class CacheProcess:
    """All parts of one service process. All ports are taken before a cache epoch is used up.

    `stopping` is set when the core broke; `failures` says how.
    """

    def __init__(self, settings: CacheSettings, stopping: threading.Event) -> None:
        self._settings = settings
        self._stopping = stopping
        self.failures: list[BaseException] = []
        core = core_settings(settings)
        plan = kv_events_plan(settings, tenant_directory(settings))
        if not settings.has_seal_key:
            _log.warning("COPPICE_SEAL_KEY is not set: what is cached will not be recognised after a restart")
        redis = connect(settings.redis_url) if settings.redis_url else None
        self._epoch_file = EpochFile(Path(settings.epoch_file)) if settings.epoch_file else None
        self.kv_events = open_publishers(settings, plan) if plan is not None else []
        try:
            self._grpc, self._sessions, self._http = _listen(settings)
        except UnavailableError:
            for publisher in self.kv_events:
                publisher.stop()
            raise
        self.grpc_port, self.session_port, self.http_port = self._grpc.port, self._sessions.port, self._http.port
        self._tracing = configure_tracing("coppice-cache", settings.otlp_endpoint)
        self._service = IndexService(
            core,
            next_epoch(self._epoch_file, redis),
            remember=self._remember,
            failed=self._failed,
            observer=LeaseSpans(self._tracing),
            audit_interval_s=settings.audit_interval_s,
        )
        self._registry = Registry(redis, self._service.list_workers) if redis is not None else None
        log_url = settings.redis_url if settings.has_seal_key else None
        self._recovery = Recovery(log_url, self._service) if log_url is not None else None
        self._readiness = Readiness(self._problems)
        self._slices = IndexSlices(self._service)
        self._watchers = Watchers(self._service.hub, self._slices)
        self._grpc.add(PrefixIndexServicer(self._service).add_to)
        admin = PrefixIndexAdminServicer(self._watchers, Inspection(self._service))
        self._grpc.add(admin.add_to)

    def start(self) -> None:
        metrics = CollectorRegistry()
        metrics.register(
            CacheMetrics(
                self._service.stats,
                lambda: bool(self._problems()),
                lambda: self._tracing.spans_dropped,
                self._service.auditor,
            )
        )
        if self._recovery is not None:
            metrics.register(RecoveryMetrics(self._recovery))
            self._recovery.load()
            self._recovery.start()
        self._service.start()
        self._watchers.start()
        for publisher in self.kv_events:
            publisher.start(self._service.hub, self._slices)
        self._http.start(build_app(self._service, metrics, self._readiness, host=self._settings.host))
        if self._registry is not None:
            self._registry.start()
        self._grpc.start()
        self._sessions.start((self._service.clients.server, self._service.workers.server))
        self._readiness.is_serving = True
        self._grpc.set_ready(True)
        epoch, host = self._service.cache_epoch, self._settings.host
        ports = self.grpc_port, self.session_port, self.http_port
        _log.info("cache epoch %d; gRPC on %s:%d, sessions on %d, REST on %d", epoch, host, *ports)

    def stop(self) -> None:
        _log.info("stopping")
        self._readiness.is_serving = False
        self._grpc.set_ready(False)
        if self._recovery is not None:
            self._recovery.stop()
        self._sessions.close()
        self._service.close()
        for publisher in self.kv_events:
            publisher.stop()
        self._grpc.stop(GRACE_S)
        self._watchers.stop()
        if self._registry is not None:
            self._registry.stop()
        self._http.stop()
        self._tracing()

    def _remember(self, epoch: CacheEpoch) -> None:
        if self._epoch_file is not None:
            self._epoch_file.write(epoch)

    def _failed(self, error: BaseException) -> None:
        self.failures.append(error)
        self._stopping.set()

    def _problems(self) -> list[str]:
        found = [self._registry.problem] if self._registry is not None else []
        found += [self._recovery.problem] if self._recovery is not None else []
        found.append(self._service.auditor.problem)
        found += [publisher.problem for publisher in self.kv_events]
        return [problem for problem in found if problem]


def _listen(settings: CacheSettings) -> tuple[GrpcServer, SessionListener, AdminServer]:
    """Take all ports before an epoch is used up. Raises UnavailableError."""
    http = AdminServer(settings.host, settings.http_port)
    flag = "--grpc-port"
    try:
        address = Address(settings.host, settings.grpc_port)
        grpc = GrpcServer(str(address), (*SERVICES, *ADMIN_SERVICES), None, "cache")
        flag = "--session-port"
        return grpc, SessionListener(Address(settings.host, settings.session_port)), http
    except PortInUse as error:
        http.stop()
        raise UnavailableError(str(error), hint=f"choose another {flag}") from error
