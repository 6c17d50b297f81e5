"""The services as processes of their own on loopback, for measurements: with TLS on every edge, or with none.

    cache <-- TCP --> workers, scheduler     sessions; mutual TLS with `services_tls`
    scheduler <-- client                     REST and gRPC; TLS with `public_tls`

Sessions run over TCP, as between machines: over Unix sockets there is no TLS that could be measured.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from coppice.errors import CoppiceError
from coppice.processes.child_process import tethered
from coppice_bench.certificates import Authority
from coppice_up.ports import LOOPBACK, free_addresses
from coppice_up.probe import RestReady

MODEL_NAME = "bench"
_START_S = 180.0
_END_S = 20.0
_POLL_S = 0.2
_SHOWN_CHARS = 3_000  # of the log of a service that did not start


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """`tenants` is the text of a tenants file; without it there is one tenant and no key."""

    model: Path
    tenants: str = ""
    services_tls: bool = False
    public_tls: bool = False
    num_blocks: int = 4_096
    threads: int = 0  # of each worker; 0: all cores
    workers: int = 1
    planners: int = 1


@dataclass(frozen=True, slots=True)
class Stack:
    """One that serves. `ca` is what clients of `url` have to trust, None without TLS. `pids`: of each service."""

    url: str
    host: str
    port: int
    grpc_port: int
    ca: Path | None
    operator_url: str  # of the scheduler
    pids: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def running(options: StackOptions) -> Iterator[Stack]:
    """Raises CoppiceError when it does not come up."""
    with ExitStack() as children:
        folder = Path(children.enter_context(tempfile.TemporaryDirectory(prefix="coppice-bench-")))
        commands, stack = _commands(options, folder)
        processes = [children.enter_context(_process(name, argv, folder)) for name, argv in commands.items()]
        _wait_ready(stack, processes, folder)
        pids = {name: process.pid for name, process in zip(commands, processes, strict=True)}
        yield replace(stack, pids=pids)


def _commands(options: StackOptions, folder: Path) -> tuple[dict[str, list[str]], Stack]:
    """Of each service, in the order in which they start; they are ended the other way round."""
    cache_grpc, admin_grpc, cache_http, sessions, rest, grpc, metrics, *of_workers = free_addresses(
        7 + 3 * options.workers
    )
    authority = Authority(folder)
    cache = ["--session-port", str(sessions.port), "--grpc-port", str(cache_grpc.port)]
    cache += ["--admin-grpc-port", str(admin_grpc.port), "--http-port", str(cache_http.port)]
    workers = {}
    for place in range(options.workers):
        steps, worker_grpc, worker_http = of_workers[3 * place : 3 * place + 3]
        worker = ["--worker-id", f"worker-{place}", "--cache", str(sessions), "--session-port", str(steps.port)]
        worker += ["--grpc-port", str(worker_grpc.port), "--http-port", str(worker_http.port), "--device", "cpu"]
        worker += ["--model", str(options.model), "--num-blocks", str(options.num_blocks)]
        worker += ["--threads", str(options.threads or os.cpu_count() or 1)]
        if options.services_tls:
            worker += authority.flags("worker", f"worker-{place}")
        workers[f"worker-{place}"] = worker
    scheduler = ["--cache", str(sessions), "--port", str(rest.port), "--grpc-port", str(grpc.port)]
    scheduler += ["--metrics-port", str(metrics.port), "--model", str(options.model), "--model-name", MODEL_NAME]
    scheduler += ["--planners", str(options.planners)]
    if options.tenants:
        tenants = folder / "tenants.yaml"
        tenants.write_text(options.tenants, encoding="utf-8")
        cache += ["--tenants", str(tenants)]
        scheduler += ["--tenants", str(tenants)]
    if options.services_tls:
        cache += authority.flags("cache", "cache-0")
        scheduler += authority.flags("scheduler", "scheduler-0")
    if options.public_tls:
        certificate, key = authority.public(LOOPBACK)
        scheduler += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    url = f"{'https' if options.public_tls else 'http'}://{rest}"
    ca = authority.ca if options.public_tls else None
    stack = Stack(url, rest.host, rest.port, grpc.port, ca, f"http://{metrics}")
    return {"cache": cache, **workers, "scheduler": scheduler}, stack


@contextmanager
def _process(name: str, arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`name`: service, or service-number."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "COPPICE_SEAL_KEY": _seal_key(folder)}
    command = tethered([sys.executable, "-m", f"coppice_{name.partition('-')[0]}", *arguments])
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _seal_key(folder: Path) -> str:
    """One for all services of a stack."""
    path = folder / "seal_key"
    if not path.exists():
        path.write_text(secrets.token_hex(32), encoding="ascii")
    return path.read_text(encoding="ascii")


def _wait_ready(stack: Stack, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    is_ready = RestReady(stack.url, verify=False)
    deadline_s = time.monotonic() + _START_S
    while not is_ready():
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline_s:
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-_SHOWN_CHARS:]}" for log in folder.glob("*.log"))
            raise CoppiceError(f"the services of the benchmark did not come up\n{logs}")
        time.sleep(_POLL_S)
