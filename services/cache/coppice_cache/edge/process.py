"""All parts of the service, put together: ports, epoch, core, listeners; and taken apart in the right order."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from coppice.edge.grpc_server import GrpcServer, PortInUse
from coppice.errors import UnavailableError
from coppice.ids import CacheEpoch
from coppice.telemetry import configure_tracing
from coppice_cache.edge.admin_http import AdminServer, Readiness, build_app
from coppice_cache.edge.epochs import EpochFile, next_epoch
from coppice_cache.edge.grpc_service import SERVICES, PrefixIndexServicer
from coppice_cache.edge.metrics import CacheMetrics
from coppice_cache.edge.registry import Registry, connect
from coppice_cache.edge.service import IndexService
from coppice_cache.edge.settings import CacheSettings, core_settings
from coppice_cache.edge.tracing import LeaseSpans

_log = logging.getLogger("coppice.cache")
GRACE_S = 1.0


class CacheProcess:
    """All parts of one service process. Both ports are taken before a cache epoch is used up.

    `stopping` is set when the core broke; `failures` says how.
    """

    def __init__(self, settings: CacheSettings, stopping: threading.Event) -> None:
        self._settings = settings
        self._stopping = stopping
        self.failures: list[BaseException] = []
        core = core_settings(settings)
        if not settings.has_seal_key:
            _log.warning("COPPICE_SEAL_KEY is not set: after a restart, seals of before will not be recognised")
        redis = connect(settings.redis_url) if settings.redis_url else None
        self._epoch_file = EpochFile(Path(settings.epoch_file)) if settings.epoch_file else None
        self._grpc, self._http = _listen(settings)
        self.grpc_port, self.http_port = self._grpc.port, self._http.port
        self._tracing = configure_tracing("coppice-cache", settings.otlp_endpoint)
        self._service = IndexService(
            core,
            next_epoch(self._epoch_file, redis),
            remember=self._remember,
            failed=self._failed,
            observer=LeaseSpans(self._tracing),
        )
        self._registry = Registry(redis, self._service.list_workers) if redis is not None else None
        self._readiness = Readiness(self._problems)
        self._grpc.add(PrefixIndexServicer(self._service).add_to)

    def start(self) -> None:
        metrics = CollectorRegistry()
        metrics.register(
            CacheMetrics(self._service.stats, lambda: bool(self._problems()), lambda: self._tracing.spans_dropped)
        )
        self._service.start()
        self._http.start(build_app(self._service, metrics, self._readiness))
        if self._registry is not None:
            self._registry.start()
        self._grpc.start()
        self._readiness.is_serving = True
        self._grpc.set_ready(True)
        epoch, host = self._service.cache_epoch, self._settings.host
        _log.info("cache epoch %d; gRPC on %s:%d, REST on %d", epoch, host, self.grpc_port, self.http_port)

    def stop(self) -> None:
        _log.info("stopping")
        self._readiness.is_serving = False
        self._grpc.set_ready(False)
        self._service.close()
        self._grpc.stop(GRACE_S)
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
        return [self._registry.problem] if self._registry is not None and self._registry.problem else []


def _listen(settings: CacheSettings) -> tuple[GrpcServer, AdminServer]:
    """Take both ports before an epoch is used up. Raises UnavailableError."""
    http = AdminServer(settings.host, settings.http_port)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        return GrpcServer(f"{host}:{settings.grpc_port}", SERVICES, None, "cache"), http
    except PortInUse as error:
        http.stop()
        raise UnavailableError(str(error), hint="choose another --grpc-port") from error
