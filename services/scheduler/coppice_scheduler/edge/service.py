"""The scheduler on the network: REST, gRPC, the planner, readiness, and an orderly end.

SIGTERM -> not ready, no new requests -> those at work end (up to drain_s) -> listeners close -> exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvicorn
from fastapi import FastAPI
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from coppice.edge.grpc_server import SERVER_OPTIONS
from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice.telemetry import serve_metrics
from coppice.tenants import TenantDirectory
from coppice.up.ports import is_loopback
from coppice_rpc.v1 import scheduler_pb2_grpc
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.settings import INSTANCE_BYTES, Guarantee, SchedulerSettings, TenantLimits
from coppice_scheduler.edge.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.engine import ModelInfo
from coppice_scheduler.edge.frontdoor import FrontDoor
from coppice_scheduler.edge.generation_grpc import GenerationServicer
from coppice_scheduler.edge.http_server import uvicorn_config
from coppice_scheduler.edge.metrics import FrontDoorMetrics
from coppice_scheduler.edge.openai_http import create_app
from coppice_scheduler.edge.planner import PlannerEngine
from coppice_scheduler.edge.planner_metrics import PlannerCollector
from coppice_scheduler.edge.settings import ServiceSettings

_log = logging.getLogger("coppice.scheduler")
SERVICE = "coppice_rpc.v1.Generation"
READY_POLL_S = 0.1
CLOSE_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Limits:
    max_context: int
    vocab_size: int


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the service decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: ServiceSettings) -> None:
    """Run until a signal. Raises CoppiceError."""
    if not settings.tenants and not is_loopback(settings.host):
        raise UsageError(
            f"--host {settings.host} can be reached from other machines, and without a tenants file everybody who "
            "reaches it may use it",
            hint="give --tenants FILE, or listen on 127.0.0.1",
        )
    checkpoint = load_checkpoint_text(settings.model)
    limits = _model_limits(Path(settings.model))
    tenants = TenantDirectory.load(settings.tenants) if settings.tenants else TenantDirectory.single_default()
    model = ModelInfo(
        id=settings.model_name or Path(settings.model).resolve().name,
        max_context=limits.max_context,
        created=int(time.time()),
        vocab_size=limits.vocab_size,
    )
    stopping = asyncio.Event()
    failures: list[BaseException] = []
    loop = asyncio.get_running_loop()

    def failed(error: BaseException) -> None:
        failures.append(error)
        loop.call_soon_threadsafe(stopping.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    core = SchedulerCore(_core_settings(settings, limits, tenants))
    engine = PlannerEngine(core, settings.cache, f"scheduler-{os.getpid()}", model, failed)
    registry = CollectorRegistry()
    registry.register(PlannerCollector(engine.stats, model.id))
    frontdoor = FrontDoor(engine, checkpoint, tenants, FrontDoorMetrics(registry, model.id))
    # Metrics name tenants and tell how busy each is, which is no tenant's to know.
    is_public = settings.metrics_port is None and not tenants.needs_key
    app = create_app(frontdoor, registry if is_public else None)
    with _metrics_listener(settings, registry, engine):
        await _run(settings, app, frontdoor, engine, stopping)
    if failures:
        raise CoppiceError(f"the planner failed: {failures[0]}", hint="see the log above; start the scheduler again")


@contextlib.contextmanager
def _metrics_listener(settings: ServiceSettings, registry: CollectorRegistry, engine: PlannerEngine) -> Iterator[None]:
    """/metrics on a port of its own, where one is wanted."""
    if settings.metrics_port is None:
        yield
        return
    host, port = settings.metrics_host, settings.metrics_port
    server = serve_metrics(host, port, registry, lambda: engine.planner.problems, flag="--metrics-port")
    _log.info("metrics on %s:%d", settings.metrics_host, server.port)
    try:
        yield
    finally:
        server.close()


async def _run(
    settings: ServiceSettings,
    app: FastAPI,
    frontdoor: FrontDoor,
    engine: PlannerEngine,
    stopping: asyncio.Event,
) -> None:
    listener = _listen(settings)
    rest = _Server(uvicorn_config(app, settings.host, settings.port))
    grpc_server, ready = await _start_grpc(settings, frontdoor)
    engine.planner.start()
    rest_task = asyncio.create_task(rest.serve(sockets=[listener]))
    ready_task = asyncio.create_task(_tell_readiness(engine, ready))
    _log.info("REST on %s:%d", settings.host, listener.getsockname()[1])
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({stopped, rest_task}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    ready_task.cancel()
    await ready.enter_graceful_shutdown()
    engine.drain()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.drained(), settings.drain_s)
    rest.should_exit = True
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(rest_task, CLOSE_GRACE_S)
    await grpc_server.stop(CLOSE_GRACE_S)
    await asyncio.to_thread(engine.planner.stop)


async def _start_grpc(
    settings: ServiceSettings, frontdoor: FrontDoor
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    ready = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(ready, server)
    scheduler_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(frontdoor), server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        server.add_insecure_port(f"{settings.host}:{settings.grpc_port}")
    except RuntimeError as error:
        raise UnavailableError(
            f"cannot listen on {settings.host}:{settings.grpc_port} for gRPC", hint="choose another --grpc-port"
        ) from error
    for service in ("", SERVICE):
        await ready.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    return server, ready


async def _tell_readiness(engine: PlannerEngine, ready: health.aio.HealthServicer) -> None:
    told: bool | None = None
    while True:
        if engine.ready != told:
            told = engine.ready
            _log.info("ready" if told else "not ready: %s", *(() if told else ("; ".join(engine.planner.problems),)))
            status = health_pb2.HealthCheckResponse.SERVING if told else health_pb2.HealthCheckResponse.NOT_SERVING
            for service in ("", SERVICE):
                await ready.set(service, status)
        await asyncio.sleep(READY_POLL_S)


def _listen(settings: ServiceSettings) -> socket.socket:
    try:
        listener = socket.create_server((settings.host, settings.port), backlog=4096)
        # Accepted sockets inherit it. asyncio would set it only on sockets that name their protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", hint="choose another --port"
        ) from error


def _model_limits(folder: Path) -> _Limits:
    """Context and vocabulary from config.json."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        return _Limits(int(config["max_position_embeddings"]), int(config["vocab_size"]))
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing", hint="--model names a checkpoint folder") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not usable: {error!r}", hint="it needs max_position_embeddings and vocab_size"
        ) from error


def _core_settings(settings: ServiceSettings, limits: _Limits, tenants: TenantDirectory) -> SchedulerSettings:
    by_tenant = {
        tenant.id: TenantLimits(
            max_concurrency=tenant.concurrency,
            max_queued=tenant.max_queued,
            weight=tenant.weight,
            requests_per_minute=tenant.requests_per_minute,
            tokens_per_minute=tenant.tokens_per_minute,
        )
        for tenant in tenants.tenants
    }
    unlimited = TenantLimits(max_concurrency=settings.max_queued + settings.max_running, max_queued=settings.max_queued)
    try:
        return SchedulerSettings(
            instance=os.urandom(INSTANCE_BYTES),
            max_step_tokens=settings.max_step_tokens,
            max_running=settings.max_running,
            max_chunk_tokens=settings.max_chunk_tokens,
            max_queued=settings.max_queued,
            queue_timeout_ms=settings.queue_timeout_ms,
            max_steps_in_flight=settings.max_steps_in_flight,
            single_flight_wait_ms=settings.single_flight_wait_ms,
            retain_priority=settings.retain_priority,
            max_context=limits.max_context,
            tenants=by_tenant if tenants.needs_key else {},
            default_limits=unlimited,
            fixed_domains=frozenset(shares.domain for shares in tenants.domains() if shares.mode == "strict"),
            guarantees={
                shares.domain: Guarantee(shares.guarantee_share, shares.guarantee_blocks)
                for shares in tenants.domains()
                if shares.guarantee_share or shares.guarantee_blocks
            },
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
