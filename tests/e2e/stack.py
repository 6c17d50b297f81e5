"""The three services as real processes on loopback, for one test module: started, watched, killed, restarted."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_for

STOP_S = 60.0


@dataclass
class Service:
    """One child process and how to start it again."""

    name: str
    argv: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environ = {**os.environ, "COPPICE_SEAL_KEY": "ab" * 16, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.argv, stdout=log, stderr=log, env=environ)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(STOP_S)

    def stop(self) -> int:
        if self.is_running:
            self.signal(signal.SIGTERM)
        assert self.process is not None
        return self.process.wait(STOP_S)


@dataclass
class Stack:
    """`with Stack(checkpoint, folder, num_blocks=64) as stack:` serves on `stack.url`."""

    checkpoint: Path
    folder: Path
    num_blocks: int = 256
    block_size: int = 16
    num_workers: int = 1
    tenants: Path | None = None
    cache_tenants: Path | None = None  # where the cache has a file of its own
    cache_args: list[str] = field(default_factory=list)
    worker_args: list[str] = field(default_factory=list)
    scheduler_args: list[str] = field(default_factory=list)
    public_ca: Path | None = None  # where the public API speaks TLS
    services: dict[str, Service] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.cache_grpc, self.cache_http, self.port, self.grpc_port = (free_port() for _ in range(4))
        self.cache_admin = free_port()
        self.metrics_port, self.cache_sessions = free_port(), free_port()
        self.worker_http = [free_port() for _ in range(self.num_workers)]
        self.worker_grpc = [free_port() for _ in range(self.num_workers)]
        self.worker_sessions = [free_port() for _ in range(self.num_workers)]
        self.folder.mkdir(parents=True, exist_ok=True)
        tenants = [f"--tenants={self.tenants}"] if self.tenants else []
        cache_tenants = [f"--tenants={self.cache_tenants}"] if self.cache_tenants else tenants
        metrics = [f"--metrics-port={self.metrics_port}"] if self.tenants else []
        self._add("cache", "coppice_cache", f"--grpc-port={self.cache_grpc}", f"--http-port={self.cache_http}",
                  f"--session-port={self.cache_sessions}", f"--admin-grpc-port={self.cache_admin}",
                  *cache_tenants, *self.cache_args)  # fmt: skip
        for index in range(self.num_workers):
            self._add_worker(index)
        self._add("scheduler", "coppice_scheduler", f"--cache=127.0.0.1:{self.cache_sessions}", f"--port={self.port}",
                  f"--grpc-port={self.grpc_port}", f"--model={self.checkpoint}", "--model-name=tiny", "--drain-s=2",
                  *metrics, *tenants, *self.scheduler_args)  # fmt: skip
        try:
            for service in self.services.values():
                service.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        codes = self.close()
        if kind is not None:
            print(self.logs())
        else:
            assert set(codes.values()) <= {0}, f"exit codes {codes}\n{self.logs()}"

    def close(self) -> dict[str, int]:
        """Stop everything, the front door first. Exit codes by name; killed ones are left out."""
        codes = {}
        for name in reversed(self.services):
            service = self.services[name]
            if service.is_running:
                codes[name] = service.stop()
        return codes

    def _add(self, name: str, module: str, *args: str) -> None:
        self.services[name] = Service(name, [sys.executable, "-m", module, *args], self.folder / f"{name}.log")

    def _add_worker(self, index: int) -> None:
        self._add(f"worker-{index}", "coppice_worker", f"--worker-id=worker-{index}",
                  f"--cache=127.0.0.1:{self.cache_sessions}", f"--grpc-port={self.worker_grpc[index]}",
                  f"--session-port={self.worker_sessions[index]}",
                  f"--http-port={self.worker_http[index]}", f"--model={self.checkpoint}", "--dtype=float32",
                  "--device=cpu", f"--num-blocks={self.num_blocks}", f"--block-size={self.block_size}", "--threads=1",
                  *self.worker_args)  # fmt: skip

    def wait_ready(self) -> None:
        def ready() -> bool:
            dead = [name for name, service in self.services.items() if service.process and not service.is_running]
            if dead:
                pytest.fail(f"{dead} ended during start\n{self.logs()}")
            return self.get(f"{self.url}/readyz")[0] == 200

        try:
            wait_for(ready, "the stack to be ready")
        except AssertionError:
            print(self.logs())
            raise

    def restore(self) -> None:
        """Whatever the test before stopped or killed is there again, and nothing runs."""
        self.wait_all_open()
        self.wait_at_rest()

    def wait_all_open(self) -> None:
        """Every service runs, those that do not are started, and every worker may be given requests."""

        def all_open() -> bool:
            status, stats = self.get(f"http://127.0.0.1:{self.cache_http}/v1/stats")
            return status == 200 and [worker["open"] for worker in stats["workers"]] == [True] * self.num_workers

        def all_registered() -> bool:
            return all(self.get(f"http://127.0.0.1:{port}/readyz")[0] == 200 for port in self.worker_http)

        for service in self.services.values():
            if not service.is_running:
                service.start()
        # The cache service calls a worker that ended open until its time is up: so the workers are asked first.
        wait_for(all_registered, "all workers to be registered")
        wait_for(all_open, "all workers to be open")
        self.wait_ready()

    def forget(self) -> None:
        """Nothing is cached any more."""
        self.wait_at_rest()
        url = f"http://127.0.0.1:{self.cache_http}/v1/invalidate"
        body = b'{"everything": true}'
        assert self._ask(urllib.request.Request(url, body, {"Content-Type": "application/json"}))[0] == 200
        wait_for(lambda: not self.cache_stats()["cached_blocks"], "everything to be forgotten")

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))

    # ---- asking ----

    @property
    def url(self) -> str:
        return f"{'https' if self.public_ca else 'http'}://127.0.0.1:{self.port}"

    def get(self, url: str) -> tuple[int, Any]:
        """Status and parsed body (text where it is no JSON); 0 where nobody answers."""
        return self._ask(urllib.request.Request(url))

    def post(self, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return self._ask(urllib.request.Request(self.url + path, raw, headers))

    def complete(self, prompt: list[int], max_tokens: int, **more: Any) -> Any:
        """One greedy completion over token ids that does not stop early; the first choice and usage."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, **more}  # fmt: skip
        status, answer = self.post("/v1/completions", body)
        assert status == 200, (status, answer)
        return answer

    def cache_stats(self) -> Any:
        status, stats = self.get(f"http://127.0.0.1:{self.cache_http}/v1/stats")
        assert status == 200
        return stats

    def metric(self, port: int, name: str) -> float:
        """Sum of a metric over its labels."""
        status, text = self.get(f"http://127.0.0.1:{port}/metrics")
        assert status == 200
        lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_at_rest(self) -> None:
        """Answers leave before blocks are given back, and before the worker has counted what it computed."""
        wait_for(lambda: self.cache_stats()["leases"] == 0, "no lease to be left")

    def tokens_computed(self) -> float:
        """By all that was answered."""
        self.wait_at_rest()
        return sum(self.metric(port, "coppice_worker_tokens_computed_total") for port in self.worker_http)

    def _ask(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            context = ssl.create_default_context(cafile=self.public_ca) if request.type == "https" else None
            with urllib.request.urlopen(request, timeout=120, context=context) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())
        except (urllib.error.URLError, ConnectionError, http.client.HTTPException):
            return 0, None  # also when it died in the middle of its answer


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
