"""`python -m coppice_bench.split.worker CACHE SESSIONS`: the worker service as it ships, on an executor that sleeps.

A line {"step_ms": 10} on stdin sets the length of a step.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from coppice.addresses import parse_session_address
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.session_listener import SessionListener
from coppice_bench.split.commands import serve_commands
from coppice_bench.split.parts import sleeping_worker
from coppice_worker.core.worker import WorkerCore
from coppice_worker.edge.runner import StepObserver
from coppice_worker.edge.service import WorkerService

_log = logging.getLogger(__name__)


def main(cache: str, sessions: str) -> None:
    listener = SessionListener(parse_session_address(sessions))
    server = GrpcServer("127.0.0.1:0", ("coppice_rpc.v1.Worker",), None, "bench")
    executor, settings = sleeping_worker(sessions)
    service = WorkerService(WorkerCore(settings), executor, StepObserver(), _failed)
    server.add(service.add_to)
    service.serve(listener, server)
    service.register_with(cache)

    def handle(command: dict[str, Any]) -> dict[str, Any]:
        executor.step_ns = int(command["step_ms"] * 1e6)
        return {}

    serve_commands(handle)
    service.stop(0.2)


def _failed(error: BaseException) -> None:
    _log.error("the step thread failed: %s", error)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
