"""Health over gRPC, which answers whatever its callers do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from grpc_health.v1 import health, health_pb2

from coppice.edge.grpc_calls.bounds import CallThreads
from coppice.edge.grpc_calls.waits import WaitEnded
from coppice.edge.grpc_tls import party_of


class Health(health.HealthServicer):  # type: ignore[misc]
    """The library's, which tells its watchers with its lock held and waits for each: one that takes nothing would stop
    it. Here a thread of the pool tells them, and waits as other calls do."""

    def __init__(self, threads: CallThreads) -> None:
        super().__init__(experimental_non_blocking=True, experimental_thread_pool=threads.pool)
        self._threads = threads

    def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: Any,
        send_response_callback: Callable[[Any], None] | None = None,
    ) -> None:
        assert send_response_callback is not None
        super().Watch(request, context, _Watcher(self._threads, context, send_response_callback))


class _Watcher:
    """Called with each status, and with None when the call is over. What comes while one is sent replaces what came
    before it: the last one counts."""

    def __init__(self, threads: CallThreads, context: Any, send: Callable[[Any], None]) -> None:
        self._threads = threads
        self._context = context
        self._send = send
        self._lock = threading.Lock()
        self._untold: health_pb2.HealthCheckResponse | None = None
        self._is_telling = False

    def __call__(self, status: health_pb2.HealthCheckResponse | None) -> None:
        if status is None:
            return
        with self._lock:
            self._untold = status
            if self._is_telling:
                return
            self._is_telling = True
        self._threads.pool.submit(self._tell)

    def _tell(self) -> None:
        party = party_of(self._context)
        while (status := self._next()) is not None:
            with suppress(WaitEnded), self._threads.waits.waiting(party, self._context.cancel):
                self._send(status)

    def _next(self) -> health_pb2.HealthCheckResponse | None:
        with self._lock:
            status, self._untold = self._untold, None
            self._is_telling = status is not None
            return status
