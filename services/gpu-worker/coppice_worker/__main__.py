"""`python -m coppice_worker`: load a checkpoint, register with the cache service, compute what is planned."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from coppice.addresses import Address, PortInUse
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.session_listener import SessionListener
from coppice.errors import EXIT_OK, CoppiceError, UnavailableError, UsageError, run_main
from coppice.ids import WorkerId
from coppice.namespaces import encode_namespace
from coppice.settings import read_settings
from coppice.telemetry import configure_logging, configure_tracing, serve_metrics
from coppice_worker.core.worker import WorkerCore, WorkerCoreSettings
from coppice_worker.edge.metrics import WorkerMetrics
from coppice_worker.edge.service import WorkerService
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.edge.tracing import Observers, WorkerSpans
from coppice_worker.edge.watchdog import StepWatchdog
from coppice_worker.kernels.choice import KernelsUnavailable
from coppice_worker.model.executor import DtypeName, TorchExecutor, suggest_num_blocks
from coppice_worker.model.resolve import resolve_checkpoint

_log = logging.getLogger("coppice.worker")
PROG = "python -m coppice_worker"
SERVICES = ("coppice_rpc.v1.Worker",)
GRACE_S = 2.0


def main() -> int:
    settings = read_settings(WorkerSettings, sys.argv[1:], os.environ, PROG)
    return run_main(PROG, lambda: run(settings))


def run(settings: WorkerSettings) -> int:
    configure_logging(settings.log_level)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    tracing = configure_tracing("coppice-worker", settings.otlp_endpoint, instance_id=settings.worker_id)
    registry = CollectorRegistry()
    executor, model = _load(settings)
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        # After an error of the device nothing in its context can be trusted: the process ends, its epoch with it.
        failures.append(error)
        stopping.set()

    listener, server = _listen(settings)
    core = WorkerCore(_core_settings(settings, executor, model, listener.port))
    observers = Observers(WorkerMetrics(registry), WorkerSpans(tracing.tracer("coppice.worker")))
    service = WorkerService(core, executor, observers, failed)
    server.add(service.add_to)
    http = serve_metrics(settings.host, settings.http_port, registry, lambda: tuple(service.problems.values()))
    # Not stopped at the end: a step that hangs then must not keep the process either.
    StepWatchdog(service.runner, settings.step_timeout_s).start()
    service.serve(listener, server)
    service.register_with(settings.cache)
    ports = listener.port, server.port, http.port
    _log.info("%s listens on %s:%d, gRPC on port %d, metrics on %d", settings.worker_id, settings.host, *ports)
    stopping.wait()
    service.stop(GRACE_S)
    http.close()
    tracing()
    if failures:
        raise CoppiceError(f"the device failed: {failures[0]}", hint="the process must be started again")
    return EXIT_OK


def _load(settings: WorkerSettings) -> tuple[TorchExecutor, str]:
    """The executor with the checkpoint loaded, and the model's name."""
    folder = resolve_checkpoint(settings.model)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here", hint="use --device cpu")
    dtype: DtypeName = ("bfloat16" if device == "cuda" else "float32") if settings.dtype == "auto" else settings.dtype
    num_blocks = settings.num_blocks or _default_blocks(settings, folder, dtype)
    name = settings.model_name or folder.resolve().name
    _log.info("loading %s (%s on %s), %d blocks of %d tokens", name, dtype, device, num_blocks, settings.block_size)
    try:
        executor = TorchExecutor(
            folder,
            device=device,
            dtype=dtype,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            kernels=settings.kernels,
            num_threads=settings.threads,
        )
    except KernelsUnavailable as error:
        raise UsageError(f"--kernels {settings.kernels}: {error}", hint="use --kernels auto") from error
    return executor, name


def _default_blocks(settings: WorkerSettings, folder: Path, dtype: DtypeName) -> int:
    memory_bytes = settings.kv_memory_mib << 20
    try:
        return suggest_num_blocks(folder, memory_bytes=memory_bytes, dtype=dtype, block_size=settings.block_size)
    except ValueError as error:
        raise UsageError(f"--kv-memory-mib {settings.kv_memory_mib}: {error}") from error


def _core_settings(settings: WorkerSettings, executor: TorchExecutor, model: str, port: int) -> WorkerCoreSettings:
    namespace = encode_namespace(replace(executor.namespace, model=model))
    return WorkerCoreSettings(
        worker_id=WorkerId(settings.worker_id),
        address=settings.advertise or str(Address(settings.host, port)),
        pool=executor.pool,
        namespace=namespace,
        model=model,
        max_sequences=settings.max_sequences,
        max_context=executor.info.max_context,
        max_step_tokens=settings.max_step_tokens,
    )


def _listen(settings: WorkerSettings) -> tuple[SessionListener, GrpcServer]:
    flag = "--session-port"
    try:
        listener = SessionListener(Address(settings.host, settings.session_port))
        flag = "--grpc-port"
        address = Address(settings.host, settings.grpc_port)
        return listener, GrpcServer(str(address), SERVICES, None, settings.worker_id)
    except PortInUse as error:
        raise UnavailableError(str(error), hint=f"choose another {flag}") from error


if __name__ == "__main__":
    sys.exit(main())
