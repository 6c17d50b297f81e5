"""Health of a front door over gRPC, for whoever asks: no caller makes another wait, nor who tells what changed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """In place of the library's, whose watchers wait for their callers with a lock that `set` takes."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()  # of now; set once, and replaced by the next
        self._is_ending = False

    def set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        self._tell()

    def end(self) -> None:
        """Nothing is served any more; calls of Watch hear that and end."""
        self._is_ending = True
        self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
        self._tell()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        told: int | None = None
        while True:
            changed, is_ending = self._changed, self._is_ending
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if is_ending:
                return
            await changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
