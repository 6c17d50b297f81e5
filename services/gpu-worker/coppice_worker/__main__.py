"""`python -m coppice_worker`: load a checkpoint, register with the cache service, compute what is planned.

SIGTERM, SIGINT -> no new requests -> those that run end (up to drain_s, or a second signal) -> exit 0
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from coppice.addresses import Address, PortInUse
from coppice.audit_log import AuditLog
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.session_listener import SessionListener
from coppice.errors import EXIT_OK, CoppiceError, UnavailableError, run_main
from coppice.garbage import shorten_pauses
from coppice.ids import WorkerId
from coppice.namespaces import encode_namespace
from coppice.processes.leaving import leave
from coppice.settings import read_settings
from coppice.telemetry.build_info import BuildInfo
from coppice.telemetry.logs import configure_logging
from coppice.telemetry.metrics_server import serve_metrics
from coppice.telemetry.traces import configure_tracing
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_worker.core.batch.steps import WorkerCoreSettings
from coppice_worker.core.worker import WorkerCore
from coppice_worker.disk.metrics import DiskMetrics
from coppice_worker.edge.draining import StopRequests
from coppice_worker.edge.loading import Compute, Loaded, load, resolve_settings
from coppice_worker.edge.metrics import WorkerMetrics
from coppice_worker.edge.service import WorkerService
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.edge.tracing import Observers, WorkerSpans
from coppice_worker.edge.watchdog import StepWatchdog
from coppice_worker.model.guides import GuideMaker, grammars_of
from coppice_worker.parallel.nodes.leader import LeadingNode
from coppice_worker.parallel.nodes.node import run_node
from coppice_worker.parallel.processes import Ranks

_log = logging.getLogger("coppice.worker")
PROG = "python -m coppice_worker"
SERVICES = ("coppice_rpc.v1.Worker",)
GRACE_S = 2.0


class DeviceFailed(CoppiceError):
    """A kernel or the device went wrong: nothing in this process can be trusted any more."""


def main() -> int:
    settings = read_settings(WorkerSettings, sys.argv[1:], os.environ, PROG)
    return run_main(PROG, lambda: run(settings))


def run(settings: WorkerSettings) -> int:
    configure_logging(settings.log_level, settings.log_format)
    stopping = StopRequests()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.ask())
    settings.check_listening()
    # Nobody knows another node by a name.
    tls = settings.credentials(Role.WORKER, "" if settings.node_rank else settings.worker_id)
    settings = resolve_settings(settings)
    if settings.tensor_parallel == 1:
        loaded = load(settings)
        return serve(settings, loaded, Compute(loaded.executor, loaded.host, disk=loaded.disk), stopping, tls)
    if settings.node_rank:
        return run_node(settings, tls, stopping)
    with Ranks(settings) if settings.nnodes == 1 else LeadingNode(settings, tls, stopping) as ranks:
        loaded = load(settings, ranks.join())
        code = serve(settings, loaded, ranks.lead(loaded), stopping, tls)
        gc.unfreeze()  # what holds graphs is garbage now
        loaded.executor.close()
        return code


def serve(
    settings: WorkerSettings,
    loaded: Loaded,
    compute: Compute,
    stopping: StopRequests,
    tls: Credentials | None = None,
) -> int:
    """Until `stopping` is asked for and nothing runs, or the device fails."""
    tracing = configure_tracing("coppice-worker", settings.otlp_endpoint, instance_id=settings.worker_id, tls=tls)
    registry = CollectorRegistry()
    registry.register(BuildInfo("worker"))
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        # After an error of the device nothing in its context can be trusted: the process ends, its epoch with it.
        failures.append(error)
        stopping.cut()

    audit = AuditLog("worker", settings.audit_log)
    listener, server = _listen(settings, tls, audit)
    guides = GuideMaker(partial(grammars_of, Path(settings.model), loaded.executor.info))
    core = WorkerCore(_core_settings(settings, loaded, str(listener.address)), guides.open)
    if loaded.disk is not None:
        core.disk_pool.load(*loaded.disk.reported())
    observers = Observers(WorkerMetrics(registry, settings.worker_id), WorkerSpans(tracing.tracer("coppice.worker")))
    if settings.disk_mib:
        registry.register(DiskMetrics(loaded.disk))
    service = WorkerService(core, compute.executor, observers, failed, compute.tiers, audit, compute.disk)
    server.add(service.add_to)
    host, port = settings.http_listens_on, settings.http_port
    http = serve_metrics(host, port, registry, lambda: tuple(service.problems.values()), tls=tls)
    # Not stopped at the end: a step that hangs then must not keep the process either.
    StepWatchdog(service, settings.step_timeout_s, compute.hung).start()
    shorten_pauses()
    service.serve(listener, server)
    service.register_with(settings.cache, tls)
    listens = listener.address, server.port, http.port
    _log.info("%s listens on %s, gRPC on port %d, metrics on %d", settings.worker_id, *listens)
    stopping.asked.wait()
    try:
        if not failures:
            _drain(service, stopping, settings.drain_s)
        service.stop(GRACE_S)
        http.close()
        tracing()
    finally:
        # Whatever else goes wrong now comes from the same.
        if failures:
            raise DeviceFailed(f"the device failed: {failures[0]}", hint="the process must be started again")
    return EXIT_OK


def _drain(service: WorkerService, stopping: StopRequests, drain_s: float) -> None:
    """Let what runs end."""
    ends_s = time.monotonic() + drain_s
    if sequences := service.running().sequences:
        text = "stopping: %d running sequences get %.0f s to end; a second signal cuts them"
        _log.info(text, sequences, drain_s)
    if not service.drain(lambda seconds: stopping.cuts_within(seconds) or time.monotonic() >= ends_s, ends=True):
        _log.warning("%d running sequences are cut", service.running().sequences)


def _core_settings(settings: WorkerSettings, loaded: Loaded, address: str) -> WorkerCoreSettings:
    executor = loaded.executor
    namespace = encode_namespace(replace(executor.namespace, model=loaded.model))
    return WorkerCoreSettings(
        worker_id=WorkerId(settings.worker_id),
        address=settings.advertise or address,
        pool=executor.pool,
        namespace=namespace,
        model=loaded.model,
        max_sequences=settings.max_sequences,
        max_context=executor.info.max_context,
        max_step_tokens=settings.max_step_tokens,
        num_host_blocks=0 if loaded.host is None else len(loaded.host.blocks),
        num_disk_blocks=0 if loaded.disk is None else loaded.disk.num_blocks,
    )


def _listen(settings: WorkerSettings, tls: Credentials | None, audit: AuditLog) -> tuple[SessionListener, GrpcServer]:
    flag = "--grpc-port"
    try:
        address = Address(settings.http_listens_on, settings.grpc_port)  # nobody but operators calls it
        server = GrpcServer(str(address), SERVICES, None, settings.worker_id, tls=tls, audit=audit)
        flag, sessions = settings.sessions()
        return SessionListener(sessions, tls), server
    except PortInUse as error:
        raise UnavailableError(str(error), hint=f"choose another {flag}") from error


if __name__ == "__main__":
    leave(main())
