"""From options to commands: what children need, and in the places that they got, which commands in which order."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from coppice.addresses import Address, SessionAddress, is_loopback
from coppice.tls.credentials import TlsFiles
from coppice_up.checkpoint import Checkpoint
from coppice_up.host import ChildSpec, Needs, Place, PortNeed, Program
from coppice_up.options import UpOptions
from coppice_up.ports import (
    LOOPBACK,
    USUAL_CACHE_ADMIN,
    USUAL_CACHE_ADMIN_GRPC,
    USUAL_CACHE_GRPC,
    USUAL_GRPC,
    USUAL_OPERATOR,
    USUAL_WORKER_GRPC,
    USUAL_WORKER_HTTP,
)
from coppice_up.probe import GrpcServing, Probe, RestReady, Runs, ValkeyAnswers

SEAL_KEY_BYTES = 32
DRAIN_S = 5  # what a request in flight gets after Ctrl-C
FRONT = "front"  # the group of all children but workers


@dataclass(frozen=True, slots=True)
class MovedPort:
    """`given` in the place of the `usual` one, which somebody else has; `flag` is what a user chooses it with."""

    usual: int
    given: int
    flag: str


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Children in start order and the addresses that a user wants to know."""

    stages: tuple[tuple[ChildSpec, ...], ...]
    rest: Address
    grpc: Address
    cache_sessions: SessionAddress
    cache_admin_grpc: Address
    cache_http: Address
    worker_grpc: tuple[Address, ...]
    worker_http: tuple[Address, ...]
    scheduler_metrics: Address
    model_name: str
    log_dir: Path
    is_tls: bool = False  # for clients
    moved_ports: tuple[MovedPort, ...] = ()

    @property
    def rest_url(self) -> str:
        """As a client on this machine reaches it."""
        return _rest_url(self.rest, is_tls=self.is_tls)


def _rest_url(rest: Address, *, is_tls: bool) -> str:
    return f"{'https' if is_tls else 'http'}://{rest.reached}"


@dataclass(frozen=True, slots=True)
class Services:
    """The arguments of Python that start each service; tests put stand-ins here."""

    cache: tuple[str, ...] = ("-m", "coppice_cache")
    worker: tuple[str, ...] = ("-m", "coppice_worker")
    scheduler: tuple[str, ...] = ("-m", "coppice_scheduler")


def worker_names(options: UpOptions) -> list[str]:
    return [f"worker-{index}" for index in range(options.workers)]


def needs_of(options: UpOptions) -> list[Needs]:
    """Of every child, in the order in which they start."""
    sessions = (PortNeed("sessions"),) if options.on else ()
    rest = PortNeed("rest", options.listens_on, options.port, flag="--port")
    public_grpc = _port("grpc", "--grpc-port", options.grpc_port, USUAL_GRPC, host=options.listens_on)
    public_files = [path for path in (options.tenants, options.ssl_certfile, options.ssl_keyfile) if path is not None]
    cache_ports = (
        _port("grpc", "--cache-grpc-port", options.cache_grpc_port, USUAL_CACHE_GRPC),
        _port("admin_grpc", "--cache-admin-grpc-port", options.cache_admin_grpc_port, USUAL_CACHE_ADMIN_GRPC),
        _port("http", "--cache-admin-port", options.cache_admin_port, USUAL_CACHE_ADMIN),
    )
    cache = Needs(
        name="cache",
        group=FRONT,
        ports=(*sessions, *cache_ports),
        files=(*_tls_paths(options, "cache", "cache-0"), *public_files[:1]),
        redis_url=options.redis_url,
    )
    workers = [
        Needs(
            name=name,
            group=name,
            ports=(
                *sessions,
                _port("grpc", "--worker-grpc-port", options.worker_grpc_port, USUAL_WORKER_GRPC, above=index),
                _port("http", "--worker-http-port", options.worker_http_port, USUAL_WORKER_HTTP, above=index),
            ),
            cpus=options.threads or 1,
            gpus=options.gpus // options.nodes_per_worker,
            files=_tls_paths(options, "worker", name),
        )
        for index, name in enumerate(worker_names(options))
    ]
    workers = [each for worker in workers for each in _on_nodes(options, worker)]
    operators = _port("metrics", "--operator-port", options.operator_port, USUAL_OPERATOR)
    scheduler = Needs(
        name="scheduler",
        group=FRONT,
        ports=(rest, public_grpc, operators),
        cpus=1,
        files=(*_tls_paths(options, "scheduler", "scheduler-0"), *public_files),
    )
    redis = PortNeed("redis", LOOPBACK)  # of the cache's machine
    valkey = Needs(name="valkey", group=FRONT, ports=(redis,), program=Program.VALKEY)
    return [*([] if options.redis_url else [valkey]), cache, *workers, scheduler]


def node_names(options: UpOptions, worker: str) -> list[str]:
    """Of a worker's nodes but the first, which has the name of the worker."""
    return [f"{worker}-{node}" for node in range(1, options.nodes_per_worker)]


def _on_nodes(options: UpOptions, worker: Needs) -> list[Needs]:
    """A worker's first node, where the others meet it, and these: they listen nowhere."""
    others = [replace(worker, name=n, group=n, ports=(), leader=worker.name) for n in node_names(options, worker.name)]
    return [replace(worker, ports=(*worker.ports, PortNeed("nodes"))), *others] if others else [worker]


def _port(name: str, flag: str, asked: int | None, usual: int, *, above: int = 0, host: str = "") -> PortNeed:
    """`asked` as the options have it; `above`: so many above that of the first."""
    if asked is None:
        return PortNeed(name, host, usual=usual + above, flag=flag)
    return PortNeed(name, host, asked + above if asked else 0, flag=flag)


def moved_ports(needs: Sequence[Needs], places: Mapping[str, Place]) -> tuple[MovedPort, ...]:
    """Those that somebody else has."""
    found = [(port, places[each.name].addresses[port.name].port) for each in needs for port in each.ports if port.usual]
    return tuple(MovedPort(port.usual, given, port.flag) for port, given in found if port.usual != given)


def plan_stack(
    options: UpOptions, places: Mapping[str, Place], environ: Mapping[str, str], services: Services
) -> StackPlan:
    """Write each child's command, for its place (`needs_of` has the names)."""
    cache_place, scheduler_place = places["cache"], places["scheduler"]
    rest, grpc, metrics = (scheduler_place.addresses[name] for name in ("rest", "grpc", "metrics"))
    sessions = cache_place.sessions("cache")
    redis_url = options.redis_url or f"redis://{places['valkey'].addresses['redis']}/0"
    cache = _cache_child(options, services, cache_place, redis_url, environ)
    console = _console(options, cache_place.addresses["http"])
    cache = replace(cache, argv=(*cache.argv, *_seen_by_console(options, rest, metrics)))
    names = worker_names(options)
    workers: list[ChildSpec] = []
    for name in names:
        workers.append(_worker_child(options, services, sessions, name, places[name]))
        workers += [
            _node_child(options, services, name, node, places[name].addresses["nodes"], places[other])
            for node, other in enumerate(node_names(options, name), start=1)
        ]
    scheduler = _scheduler_child(options, services, sessions, scheduler_place)
    scheduler = replace(scheduler, argv=(*scheduler.argv, "--cors-origins", console, "--console-origins", console))
    stages: tuple[tuple[ChildSpec, ...], ...] = ((cache,), (*workers, scheduler))
    if not options.redis_url:
        stages = ((_valkey_child(places["valkey"]),), *stages)
    return StackPlan(
        stages=stages,
        rest=rest,
        grpc=grpc,
        cache_sessions=sessions,
        cache_admin_grpc=cache_place.addresses["admin_grpc"],
        cache_http=cache_place.addresses["http"],
        worker_grpc=tuple(places[name].addresses["grpc"] for name in names),
        worker_http=tuple(places[name].addresses["http"] for name in names),
        scheduler_metrics=metrics,
        model_name=scheduler_place.checkpoint.name,
        log_dir=cache_place.folder,
        is_tls=options.ssl_certfile is not None,
        moved_ports=moved_ports(needs_of(options), places),
    )


def _console(options: UpOptions, cache_http: Address) -> str:
    """Origins of the console: under its address, and on this machine under its name."""
    scheme = "http" if options.certs is None else "https"
    names = [str(cache_http), *([f"localhost:{cache_http.port}"] if is_loopback(cache_http.host) else [])]
    return ",".join(f"{scheme}://{name}" for name in names)


def _seen_by_console(options: UpOptions, rest: Address, metrics: Address) -> list[str]:
    """Where a browser finds what the console asks for beside the cache service."""
    scheme = "http" if options.certs is None else "https"
    rest_url = _rest_url(rest, is_tls=options.ssl_certfile is not None)
    return ["--requests-url", f"{scheme}://{metrics.reached}", "--rest-url", rest_url]


def _valkey_child(place: Place) -> ChildSpec:
    address, log_dir = place.addresses["redis"], place.folder
    # Nothing is written to disk: what Redis holds here is rebuilt by the services when it is gone.
    argv = (
        *(place.program, "--bind", address.host, "--port", str(address.port), "--dir", str(log_dir)),
        *("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning", "--set-proc-title", "no"),
    )
    return ChildSpec("valkey", argv, ValkeyAnswers(address), log_dir / "valkey.log", stop_turn=3)


def _cache_child(
    options: UpOptions, services: Services, place: Place, redis_url: str, environ: Mapping[str, str]
) -> ChildSpec:
    grpc, admin_grpc, http = (place.addresses[name] for name in ("grpc", "admin_grpc", "http"))
    argv = [
        *(place.program, *services.cache, "--host", grpc.host, "--grpc-port", str(grpc.port)),
        *("--admin-grpc-port", str(admin_grpc.port)),
        *("--session-address", str(place.sessions("cache")), "--http-port", str(http.port)),
        *("--redis-url", redis_url, "--epoch-file", str(place.folder / "cache.epoch")),
        *_between_services(options, "cache", "cache-0"),
    ]
    if options.tenants is not None:
        argv += ["--tenants", str(options.tenants.resolve())]
    # The key outlives a crash of the cache, because seals made before it must still be recognised.
    made = {"COPPICE_SEAL_KEY": environ.get("COPPICE_SEAL_KEY") or secrets.token_hex(SEAL_KEY_BYTES)}
    return ChildSpec(
        "cache",
        tuple(argv + _tracing(options)),
        _serves(options, grpc, "cache", "cache-0"),
        place.folder / "cache.log",
        environment={} if "COPPICE_SEAL_KEY_FILE" in environ else made,
        stop_turn=2,
    )


def _worker_child(options: UpOptions, services: Services, cache: SessionAddress, name: str, place: Place) -> ChildSpec:
    grpc, http, meets_at = place.addresses["grpc"], place.addresses["http"], place.addresses.get("nodes")
    argv = [
        *(place.program, *services.worker, "--worker-id", name, "--cache", str(cache)),
        *("--host", grpc.host, "--session-address", str(place.sessions(name))),
        *("--grpc-port", str(grpc.port), "--http-port", str(http.port)),
        *_computing(options, place.checkpoint, name, meets_at, node=0),
    ]
    return ChildSpec(
        name,
        tuple(argv + _tracing(options)),
        _serves(options, grpc, "worker", name),
        place.folder / f"{name}.log",
        role="worker",
        stop_grace_s=DRAIN_S + 5.0,
        stop_turn=1,  # the scheduler has ended, so nothing runs
        moved=partial(_worker_child, options, services, cache, name),
        meets_at=meets_at,
    )


def _node_child(
    options: UpOptions, services: Services, worker: str, node: int, meets_at: Address, place: Place
) -> ChildSpec:
    """Another node of a worker, under its certificate. It knows nobody but node 0."""
    name = node_names(options, worker)[node - 1]
    computing = _computing(options, place.checkpoint, worker, meets_at, node=node)
    return ChildSpec(
        name,
        (place.program, *services.worker, *computing),
        Runs(),
        place.folder / f"{name}.log",
        role="worker",
        stop_grace_s=DRAIN_S + 5.0,
        stop_turn=1,  # together with node 0
        moved=partial(_node_child, options, services, worker, node, meets_at),
        leader=worker,
        meets_at=meets_at,
        led=lambda address: _node_child(options, services, worker, node, address, place),
    )


def _computing(
    options: UpOptions, checkpoint: Checkpoint, worker: str, meets_at: Address | None, *, node: int
) -> list[str]:
    """What all nodes of a worker are told alike, and which of them this is."""
    argv = [
        *("--model", str(checkpoint.folder), "--model-name", checkpoint.name),
        *("--dtype", options.dtype, "--kv-dtype", options.kv_dtype, "--device", options.device),
        *("--block-size", str(options.block_size), "--gpu-memory-utilization", str(options.gpu_memory_utilization)),
        *("--drain-s", str(DRAIN_S)),
        *_between_services(options, "worker", worker),
    ]
    if options.num_blocks:
        argv += ["--num-blocks", str(options.num_blocks)]
    if options.ranks > 1:
        argv += ["--tensor-parallel", str(options.ranks)]
    if meets_at is not None:
        argv += ["--nnodes", str(options.nodes_per_worker), "--node-rank", str(node), "--dist-init-addr", str(meets_at)]
    if options.host_memory_mib:
        argv += ["--host-memory-mib", str(options.host_memory_mib)]
    if options.disk_folder is not None:
        argv += ["--disk-folder", str(options.disk_folder.absolute()), "--disk-mib", str(options.disk_mib)]
    threads = _threads(options)
    if threads:
        argv += ["--threads", str(threads)]
    return argv


def _threads(options: UpOptions) -> int:
    """Of each node of a worker: those reserved for it, or its share of this machine; 0 leaves it to the worker."""
    if options.threads or options.on:
        return options.threads or 1
    return max(1, (os.cpu_count() or 1) // options.workers) if options.workers > 1 else 0


def _scheduler_child(options: UpOptions, services: Services, cache: SessionAddress, place: Place) -> ChildSpec:
    rest, grpc, metrics = (place.addresses[name] for name in ("rest", "grpc", "metrics"))
    checkpoint = place.checkpoint
    argv = [
        *(place.program, *services.scheduler, "--cache", str(cache), "--host", rest.host),
        *("--port", str(rest.port), "--grpc-port", str(grpc.port)),
        *("--model", str(checkpoint.folder), "--model-name", checkpoint.name, "--drain-s", str(DRAIN_S)),
        *("--metrics-port", str(metrics.port), "--metrics-host", metrics.host),
        *_between_services(options, "scheduler", "scheduler-0"),
    ]
    if options.request_log is not None:
        argv += ["--request-log", str(options.request_log.resolve())]
    if options.max_queued_tokens:
        argv += ["--max-queued-tokens", str(options.max_queued_tokens)]
    if options.tool_parser:
        argv += ["--tool-parser", options.tool_parser]
    if options.reasoning_parser:
        argv += ["--reasoning-parser", options.reasoning_parser]
    if options.tenants is not None:
        argv += ["--tenants", str(options.tenants.resolve())]
    probe: Probe = GrpcServing(grpc.reached)
    if options.ssl_certfile is not None and options.ssl_keyfile is not None:
        argv += ["--ssl-certfile", str(options.ssl_certfile.resolve())]
        argv += ["--ssl-keyfile", str(options.ssl_keyfile.resolve())]
        probe = RestReady(_rest_url(rest, is_tls=True), verify=False)  # it is our own child
    return ChildSpec(
        "scheduler",
        tuple(argv + _tracing(options)),
        probe,
        place.folder / "scheduler.log",
        stop_grace_s=DRAIN_S + 5.0,
        stop_turn=0,  # it drains what runs, and needs the others for that
    )


def _tracing(options: UpOptions) -> list[str]:
    return ["--otlp-endpoint", options.otlp_endpoint] if options.otlp_endpoint else []


def _tls(options: UpOptions, role: str, name: str) -> TlsFiles | None:
    """As `coppice certs issue ROLE NAME` names them."""
    if options.certs is None:
        return None
    stem = options.certs / f"{role}-{name}"
    return TlsFiles(Path(f"{stem}.pem"), Path(f"{stem}-key.pem"), options.certs / "ca.pem")


def _tls_paths(options: UpOptions, role: str, name: str) -> tuple[Path, ...]:
    files = _tls(options, role, name)
    return () if files is None else (files.certificate, files.key, files.ca)


def _between_services(options: UpOptions, role: str, name: str) -> list[str]:
    """What lets them speak to each other over a network; nothing where they do so within this machine."""
    files = _tls(options, role, name)
    if files is None:
        return ["--insecure-network"] if options.on else []
    return ["--tls-cert", str(files.certificate), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]


def _serves(options: UpOptions, grpc: Address, role: str, name: str) -> Probe:
    return GrpcServing(grpc, _tls(options, role, name))
