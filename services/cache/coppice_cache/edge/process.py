"""All parts of the service, put together: ports, epoch, core, listeners; and taken apart in the right order."""

from __future__ import annotations

import logging
from pathlib import Path

from prometheus_client import CollectorRegistry

from coppice.addresses import Address, PortInUse
from coppice.audit_log import AuditLog
from coppice.compiled import kind_of
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.session_listener import SessionListener
from coppice.edge.signal_event import SignalEvent
from coppice.errors import UnavailableError, UsageError
from coppice.ids import CacheEpoch
from coppice.session.vouchers import Vouchers
from coppice.telemetry.build_info import BuildInfo
from coppice.telemetry.traces import configure_tracing
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.watch import TenantsWatch
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_cache.core.base.errors import SettingsRefused
from coppice_cache.edge.api.admin_grpc import ADMIN_SERVICES, PrefixIndexAdminServicer
from coppice_cache.edge.api.admin_http import AdminServer, Readiness, build_app
from coppice_cache.edge.api.console import Elsewhere
from coppice_cache.edge.api.grpc_service import SERVICES, PrefixIndexServicer
from coppice_cache.edge.api.inspection import Inspection
from coppice_cache.edge.durability.epochs import EpochFile, EpochInRedis, next_epoch
from coppice_cache.edge.durability.recovery import Recovery, RecoveryMetrics
from coppice_cache.edge.durability.registry import Registry, connect
from coppice_cache.edge.events.index_slices import IndexSlices
from coppice_cache.edge.events.kv_events_settings import kv_events_plan, open_publishers
from coppice_cache.edge.events.token_rule import token_rule
from coppice_cache.edge.events.watching import Watchers
from coppice_cache.edge.metrics import CacheMetrics
from coppice_cache.edge.service.service import IndexService
from coppice_cache.edge.settings import CacheSettings, core_settings, domain_configs
from coppice_cache.edge.tracing import LeaseSpans

_log = logging.getLogger("coppice.cache")
GRACE_S = 1.0


class CacheProcess:
    """All parts of one service process. All ports are taken before a cache epoch is used up.

    `stopping` is set when the core broke; `failures` says how.
    """

    def __init__(self, settings: CacheSettings, stopping: SignalEvent) -> None:
        self._settings = settings
        self._stopping = stopping
        self.failures: list[BaseException] = []
        settings.check_listening()
        tls = settings.credentials(Role.CACHE)
        self._audit = AuditLog("cache", settings.audit_log)
        self.tenants = TenantsWatch(settings.tenants, self._audit) if settings.tenants else None
        directory = self.tenants.directory if self.tenants is not None else TenantDirectory.single_default()
        core = core_settings(settings, directory)
        plan = kv_events_plan(settings, directory)
        if not settings.has_seal_key:
            _log.warning("COPPICE_SEAL_KEY is not set: what is cached will not be recognised after a restart")
        password = settings.redis_password.get_secret_value()
        redis = connect(settings.redis_url, password) if settings.redis_url else None
        self._epoch_file = EpochFile(Path(settings.epoch_file)) if settings.epoch_file else None
        self.kv_events = open_publishers(settings, plan) if plan is not None else []
        try:
            self._grpc, self._admin_grpc, self._sessions, self._http = _listen(settings, tls, self._audit)
        except UnavailableError:
            for publisher in self.kv_events:
                publisher.stop()
            raise
        self.grpc_port, self.admin_grpc_port = self._grpc.port, self._admin_grpc.port
        self.session_address, self.http_port = self._sessions.address, self._http.port
        self._tracing = configure_tracing("coppice-cache", settings.otlp_endpoint, tls=tls)
        self._epoch_in_redis = EpochInRedis(redis, Vouchers(*core.seal_keys)) if redis is not None else None
        self._service = IndexService(
            core,
            next_epoch(self._epoch_file, self._epoch_in_redis),
            remember=self._remember,
            failed=self._failed,
            observer=LeaseSpans(self._tracing),
            audit_interval_s=settings.audit_interval_s,
            tenants_version=directory.version if settings.tenants else "",
        )
        self._registry = None
        if redis is not None and self._epoch_in_redis is not None:
            self._registry = Registry(redis, self._epoch_in_redis, self._service.list_workers)
        log_url = settings.redis_url if settings.has_seal_key else None
        self._recovery = Recovery(log_url, password, self._service) if log_url is not None else None
        self._readiness = Readiness(self._problems, self.tenants)
        self._slices = IndexSlices(self._service)
        self._watchers = Watchers(self._service.hub, self._slices, token_rule(settings, directory))
        self._grpc.add(PrefixIndexServicer(self._service).add_to)
        admin = PrefixIndexAdminServicer(self._watchers, Inspection(self._service), self._audit)
        self._admin_grpc.add(admin.add_to)

    def start(self) -> None:
        metrics = CollectorRegistry()
        metrics.register(BuildInfo("cache", kind_of("coppice_cache")))
        metrics.register(
            CacheMetrics(
                self._service.stats,
                lambda: bool(self._problems()),
                lambda: self._tracing.spans_dropped,
                self._service.auditor,
                self._unproved,
                self._service.statement,
            )
        )
        if self.tenants is not None:
            metrics.register(self.tenants)
        if self._recovery is not None:
            metrics.register(RecoveryMetrics(self._recovery))
            self._recovery.load()
            self._recovery.start()
        self._service.start()
        self._watchers.start()
        for publisher in self.kv_events:
            publisher.start(self._service.hub, self._slices)
        app = build_app(
            self._service,
            metrics,
            self._readiness,
            names=self._settings.http_names,
            audit=self._audit,
            wants_operators=self._settings.tls_cert is not None,
            elsewhere=Elsewhere(self._settings.requests_url, self._settings.rest_url),
        )
        self._http.start(app)
        if self._registry is not None:
            self._registry.start()
        self._grpc.start()
        self._admin_grpc.start()
        self._sessions.start((self._service.clients.server, self._service.workers.server))
        self._readiness.is_serving = True
        self._grpc.set_ready(True)
        self._admin_grpc.set_ready(True)
        operators = self._settings.http_listens_on
        grpc, rest = Address(self._settings.host, self.grpc_port), Address(operators, self.http_port)
        _log.info(
            "cache epoch %d; gRPC on %s, sessions on %s; for operators REST on %s, gRPC on %s",
            *(self._service.cache_epoch, grpc, self.session_address, rest, Address(operators, self.admin_grpc_port)),
        )
        _log.info("core: %s", kind_of("coppice_cache"))

    def look_at_tenants(self, *, always: bool = False) -> None:
        """Take a tenants file that changed; `always`: read it in any case."""
        if self.tenants is not None:
            self.tenants.look(self._set_tenants, always=always)

    def _set_tenants(self, directory: TenantDirectory, content: bytes) -> None:
        rule = token_rule(self._settings, directory)
        try:
            self._service.set_domains(domain_configs(directory), directory.version)
        except SettingsRefused as refused:
            raise UsageError(str(refused)) from refused
        self._watchers.set_rule(rule)

    def stop(self) -> None:
        _log.info("stopping")
        self._readiness.is_serving = False
        self._grpc.set_ready(False)
        self._admin_grpc.set_ready(False)
        if self._recovery is not None:
            self._recovery.stop()
        self._sessions.close()
        self._service.close()
        for publisher in self.kv_events:
            publisher.stop()
        for server in (self._grpc, self._admin_grpc):
            server.stop(GRACE_S)
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

    def _unproved(self) -> dict[str, int]:
        in_redis = self._epoch_in_redis.num_disbelieved if self._epoch_in_redis is not None else 0
        return {**self._service.unproved, "redis": in_redis}

    def _problems(self) -> list[str]:
        found = [self._registry.problem] if self._registry is not None else []
        found += [self._recovery.problem] if self._recovery is not None else []
        found += [f"tenants file refused: {self.tenants.problem}"] if self.tenants and self.tenants.problem else []
        found += [self._service.auditor.problem, self._audit.problem]
        found += [publisher.problem for publisher in self.kv_events]
        return [problem for problem in found if problem]


def _listen(
    settings: CacheSettings, tls: Credentials | None, audit: AuditLog
) -> tuple[GrpcServer, GrpcServer, SessionListener, AdminServer]:
    """Take all ports before an epoch is used up. Raises UnavailableError."""
    http = AdminServer(settings.http_listens_on, settings.http_port, tls=tls)
    flag = "--grpc-port"
    try:
        address = Address(settings.host, settings.grpc_port)
        grpc = GrpcServer(str(address), SERVICES, None, "cache", tls=tls, audit=audit)
        flag, address = "--admin-grpc-port", Address(settings.http_listens_on, settings.admin_grpc_port)
        admin = GrpcServer(str(address), ADMIN_SERVICES, None, "cache admin", tls=tls, audit=audit)
        flag, sessions = settings.sessions()
        return grpc, admin, SessionListener(sessions, tls), http
    except PortInUse as error:
        http.stop()
        raise UnavailableError(str(error), hint=f"choose another {flag}") from error
